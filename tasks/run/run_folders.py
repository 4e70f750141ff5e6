"""Reads the folders of runs, and what each says of its run's beginning. It imports no
PyTorch.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tasks.tracking import journal

START, LOCK = journal.START, journal.TRAINING_LOCK


@dataclass(frozen=True)
class RunStart:
    """How a run began; kept in its folder as start.json."""

    run_id: str
    experiment_id: str
    name: str
    key: str = ""
    resumed: int = 0  # times that it was gone on with
    pid: int = 0  # that trains, or trained last
    began_at: float = 0.0  # Unix time
    spent_s: float = 0.0  # by the times before
    device: str = ""  # its kind
    retries: int = 0  # since there was a newer checkpoint; 0 again where no more is to come
    retried_at: int = 0  # step of the checkpoint at the last of them
    after: str = ""  # which class of failure it came
    steps: int = 0  # that it is to take
    epochs: int = 0
    made_at: float = 0.0  # Unix time; see `choose_made_at`

    def write(self, folder: Path) -> None:
        half = folder / f"{START}.new"
        half.write_text(json.dumps(asdict(self)))
        half.rename(folder / START)

    def mark_as_retry(self, before: RunStart | None, *, on: str) -> RunStart:
        """Return this start on a device of that kind, as a retry of `before` if given."""
        was = before or self
        self = replace(self, retries=was.retries, retried_at=was.retried_at, after=was.after)
        return replace(self, device=on)

    def make_next(self, folder: Path) -> RunStart:
        """Return the start of the next time, with the seconds that the times before took.

        The last one has recorded how long it took, or lasted, as far as is known, until its
        newest metric.
        """
        spent_s = self.spent_s
        try:
            told = read_json(folder / "run.json")["metrics"]["time/total_s"]
            spent_s = max(spent_s, float(told))
        except (ValueError, LookupError, TypeError):
            with suppress(OSError):
                spent_s += max(0.0, (folder / "metrics.jsonl").stat().st_mtime - self.began_at)
        return replace(
            self, resumed=self.resumed + 1, pid=os.getpid(), began_at=time.time(), spent_s=spent_s
        )


def read_start(folder: Path) -> RunStart | None:
    """Return how the run of this folder began; None where it is no run's folder.

    MLflow may know the run only since then.
    """
    with suppress(TypeError):
        start = RunStart(**read_json(folder / START))
        with suppress(LookupError):
            sent = read_json(folder / "sent.json") if not start.run_id else {}
            start = replace(start, run_id=sent["run_id"], experiment_id=sent["experiment_id"])
        return start
    return None


def read_json(file: Path) -> dict[str, Any]:
    """Return what a JSON file of a run's folder says.

    Empty where it is not there, or is damaged.
    """
    with suppress(OSError, ValueError):
        found = json.loads(file.read_text())
        if isinstance(found, dict):
            return found
    return {}


def list_run_folders(runs: Path) -> list[Path]:
    """Return the folders of runs, the newest first, by what their start.json says.

    A folder's name has the time of a clock, which may be that of another time zone, or of the
    hour that comes twice.
    """
    found = (file.parent for file in runs.glob(f"*/{START}"))
    return sorted(found, key=lambda folder: (_read_made_at(folder), folder.name), reverse=True)


def choose_made_at(runs: Path) -> float:
    """Return the `made_at` of a run that is made now: later than that of any run there.

    It is the time, but where the clock was set back since the newest run was made.
    """
    newest = max(map(_read_made_at, (file.parent for file in runs.glob(f"*/{START}"))), default=0.0)
    return max(time.time(), newest + 0.001)


def _read_made_at(folder: Path) -> float:
    start = read_json(folder / START)
    with suppress(TypeError, ValueError):
        # Of an older version: when it began, or was gone on with.
        return float(start.get("made_at") or start.get("began_at") or 0)
    return 0.0


def make_resume_command(run_id: str) -> str:
    """Return the command by which a person goes on with that run."""
    return f"python -m flows.train --resume {run_id}"
