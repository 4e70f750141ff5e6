"""Prepares what every run would have to make otherwise, once, when the environment is set
up: empty, migrated databases for Prefect and MLflow (a new home then starts in seconds, and
first runs at once can't race), and matplotlib's list of fonts. It does nothing where that
is done already.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from headroom.prefect import local_prefect
from headroom.tracking import mlflow_store
from headroom.tracking.tracking_settings import TrackingError


def main() -> None:
    """Make what is missing."""
    try:
        mlflow_store.refuse_folder(sys.prefix)
    except TrackingError as error:
        sys.exit(str(error))
    _make_once(local_prefect.find_database_template(), _make_prefect_database)
    _make_once(mlflow_store.find_database_template(), mlflow_store.make_database)
    from headroom.report import run_report

    run_report.load_plotting()


def _make_once(path: Path, make: object) -> None:
    assert callable(make)
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        half = Path(scratch) / path.name
        make(half)
        os.rename(half, path)


def _make_prefect_database(path: Path) -> None:
    with tempfile.TemporaryDirectory() as home:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        environment |= {
            "PREFECT_HOME": home,
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{path}",
        }
        command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"Prefect's database could not be made:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
