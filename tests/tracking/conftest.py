"""What the tests of tracking share."""

from pathlib import Path

import pytest
from mlflow import MlflowClient

from headroom.tracking import orphaned_runs
from headroom.tracking.orphaned_runs import LeftRun
from headroom.tracking.tracking_settings import TrackingSettings


def send_left(client: MlflowClient, where: TrackingSettings, *, does: bool = True) -> list[LeftRun]:
    """Send what runs of this host have left, as a run does at its end."""
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    return [*orphaned_runs.send_left_runs(client, where, ids, does=does)]


@pytest.fixture
def where(tmp_path: Path) -> TrackingSettings:
    """A database and folders of the test's own."""
    return TrackingSettings(
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db",
        artifacts=str(tmp_path / "artifacts"),
        runs=str(tmp_path / "runs"),
    )
