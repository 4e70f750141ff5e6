"""Describes what would be needed to repeat a run, the code's commit and every package; and
starts the process that sends the run to MLflow.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import partial
from pathlib import Path

from tasks.process import children
from tasks.tracking.tracking_settings import TrackingError, TrackingSettings


def read_code_version() -> dict[str, str]:
    """Return the commit of this project's code as tags, and whether files differ from it.

    Empty where git is not here or does not answer.
    """

    def ask(*words: str) -> str | None:
        here = Path(__file__).parent.parent
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        commit = ask("rev-parse", "HEAD")
        changes = ask("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.TimeoutExpired):
        return {}  # no git here, or no answer from it: not known
    if not commit or changes is None:
        return {}
    dirty = str(bool(changes)).lower()
    return {"git.commit": commit, "mlflow.source.git.commit": commit, "git.dirty": dirty}


def describe_environment() -> str:
    """Return Python, the platform, and every package with its version, as text.

    Read off the names of the packages' metadata folders: parsing what is in them costs 0.4
    s.
    """
    folders = {f.stem for place in sys.path for f in Path(place).glob("*.dist-info")}
    packages = sorted({"==".join(name.rsplit("-", 1)) for name in folders}, key=str.lower)
    head = f"# Python {platform.python_version()} on {platform.platform()}"
    return "\n".join([head, *packages]) + "\n"


def start_sender(where: TrackingSettings) -> subprocess.Popen[str]:
    """Start the sending process. Raises TrackingError where it could write nothing."""
    runs = Path(where.runs)
    try:
        runs.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = open(runs / "tracking.log", "a", opener=partial(os.open, mode=0o600))  # noqa: SIM115
    except OSError as error:
        raise TrackingError(f"runs: {runs} can't be written ({error.strerror})") from None
    with log:
        return children.start_child("tasks.tracking.mlflow_sender", stderr=log)
