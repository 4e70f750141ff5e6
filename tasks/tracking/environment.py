"""What surrounds a run: what would be needed to repeat it, the code's commit and every package; and
the process that sends it, which is started here."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import partial
from pathlib import Path

from tasks.process import children
from tasks.tracking.where import TrackingError, Where


def code_version() -> dict[str, str]:
    """The commit that this project's code is at, and whether files differ from it."""

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


def environment() -> str:
    """Python, the platform, and every package with its version.

    Read off the names of the packages' metadata folders: parsing what is in them costs 0.4 s.
    """
    folders = {f.stem for place in sys.path for f in Path(place).glob("*.dist-info")}
    packages = sorted({"==".join(name.rsplit("-", 1)) for name in folders}, key=str.lower)
    head = f"# Python {platform.python_version()} on {platform.platform()}"
    return "\n".join([head, *packages]) + "\n"


def spawn(where: Where) -> subprocess.Popen[str]:
    """The sending process. Raises TrackingError where it could write nothing."""
    runs = Path(where.runs)
    try:
        runs.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = open(runs / "tracking.log", "a", opener=partial(os.open, mode=0o600))  # noqa: SIM115
    except OSError as error:
        raise TrackingError(f"runs: {runs} can't be written ({error.strerror})") from None
    with log:
        return children.start("tasks.tracking.mlflow_sender", stderr=log)
