"""What the tests of tracking share."""

from pathlib import Path

import pytest

from headroom.tracking.tracking_settings import TrackingSettings


@pytest.fixture
def where(tmp_path: Path) -> TrackingSettings:
    """A database and folders of the test's own."""
    return TrackingSettings(
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db",
        artifacts=str(tmp_path / "artifacts"),
        runs=str(tmp_path / "runs"),
    )
