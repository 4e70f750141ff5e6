"""What the tests of tracking share."""

from pathlib import Path

import pytest

from tasks.tracking.where import Where


@pytest.fixture
def where(tmp_path: Path) -> Where:
    """A database and folders of the test's own."""
    return Where(
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db",
        artifacts=str(tmp_path / "artifacts"),
        runs=str(tmp_path / "runs"),
    )
