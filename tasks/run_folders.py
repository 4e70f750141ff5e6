"""The folders of runs, by what each says of its run's beginning. Who asks imports no PyTorch."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tasks.tracking import journal_lines

START, LOCK = journal_lines.START, journal_lines.TRAINING_LOCK


@dataclass(frozen=True)
class Start:
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
    made_at: float = 0.0  # Unix time; see `next_made_at`

    def write(self, folder: Path) -> None:
        half = folder / f"{START}.new"
        half.write_text(json.dumps(asdict(self)))
        half.rename(folder / START)

    def following(self, before: Start | None, *, on: str) -> Start:
        """The same on a device of this kind, as a retry of that one where it is one."""
        was = before or self
        self = replace(self, retries=was.retries, retried_at=was.retried_at, after=was.after)
        return replace(self, device=on)

    def again(self, folder: Path) -> Start:
        """The next time. The last one has told how long it took, or lasted, as far as is known,
        until its newest metric."""
        spent_s = self.spent_s
        try:
            told = json_of(folder / "run.json")["metrics"]["time/total_s"]
            spent_s = max(spent_s, float(told))
        except (ValueError, LookupError, TypeError):
            with suppress(OSError):
                spent_s += max(0.0, (folder / "metrics.jsonl").stat().st_mtime - self.began_at)
        return replace(
            self, resumed=self.resumed + 1, pid=os.getpid(), began_at=time.time(), spent_s=spent_s
        )


def start_of(folder: Path) -> Start | None:
    """None where the folder is none of a run. MLflow may have been told of it since."""
    with suppress(TypeError):
        start = Start(**json_of(folder / START))
        with suppress(LookupError):
            sent = json_of(folder / "sent.json") if not start.run_id else {}
            start = replace(start, run_id=sent["run_id"], experiment_id=sent["experiment_id"])
        return start
    return None


def json_of(file: Path) -> dict[str, Any]:
    """What a file of a run's folder says; empty where it is not there, or is damaged."""
    with suppress(OSError, ValueError):
        found = json.loads(file.read_text())
        if isinstance(found, dict):
            return found
    return {}


def folders(runs: Path) -> list[Path]:
    """Of runs, the newest first, by what their start.json says: a name tells the time of a clock,
    which may be that of another time zone, or of the hour that comes twice."""
    found = (file.parent for file in runs.glob(f"*/{START}"))
    return sorted(found, key=lambda folder: (_made_at(folder), folder.name), reverse=True)


def next_made_at(runs: Path) -> float:
    """Of a run that is made now: the time, or a little more than that of the newest one there,
    which a clock that was set back since would put behind it."""
    newest = max(map(_made_at, (file.parent for file in runs.glob(f"*/{START}"))), default=0.0)
    return max(time.time(), newest + 0.001)


def _made_at(folder: Path) -> float:
    start = json_of(folder / START)
    with suppress(TypeError, ValueError):
        # Of an older version: when it began, or was gone on with.
        return float(start.get("made_at") or start.get("began_at") or 0)
    return 0.0


def resume_command(run_id: str) -> str:
    """How a person goes on with that run."""
    return f"python -m flows.train --resume {run_id}"
