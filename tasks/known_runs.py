"""The trainings of this host as a person asks for them: those that live, with how far they are, and
the newest of those that ended, with how. It reads the announcements and the folders of the runs,
and asks no server.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from tasks.engine.base.file_lock import is_held
from tasks.engine.checkpoint.kept_steps import CHECKPOINTS, steps
from tasks.live_runs import Live, live_runs, owner
from tasks.run_folders import LOCK, Start, folders, json_of, resume_command, start_of
from tasks.tracking.journal import BEGIN
from tasks.tracking.journal_lines import LOCK as SENDING_LOCK
from tasks.tracking.journal_lines import Line, ends

PEAK, RUN_PEAK = "memory/peak_allocated_mib", "memory/run_peak_allocated_mib"  # of a window; of all
LEAST_LETTERS = 6  # of an id
STATES = {  # of a training that lives, by its stage
    "starting": "starting",
    "detect device": "starting",
    "prepare data": "preparing",
    "train model": "training",
    "release memory": "releasing",
    "sending it to MLflow": "sending",
}
GONE = "its process is gone, and nothing has ended it; `python -m flows.tidy --yes` does"
UNTOLD = "how it ended is only known in MLflow"
UNKNOWN = "MLflow has not been told of it yet"


@dataclass(frozen=True)
class Run:
    """One training, by the names of --json. What is not known is None, or an empty text."""

    name: str
    state: str  # of STATES, waiting, or FINISHED, FAILED, KILLED, ended, gone
    live: bool = False
    run_id: str = ""
    key: str = ""
    folder: str = ""
    user: str = ""
    pid: int | None = None
    device: str = ""
    waits_for: str = ""
    step: int | None = None
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    eta_s: float | None = None
    total_s: float | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    peak_mib: float | None = None
    reason: str = ""  # why it ended as it did
    unsent: str = ""  # why MLflow has not got all of it
    resume: str = ""  # the command that goes on with it
    began_at: float | None = None  # Unix time


def known_runs(runs: Path, *, last: int | None = None) -> list[Run]:
    """Those that live, then so many of the others, the newest first; None: all of them."""
    alive = live_runs()
    places = {live.folder for live in alive}
    ended = (folder for folder in folders(runs) if str(folder) not in places)
    found = (run for folder in ended if (run := of_folder(folder)) is not None)
    return [*map(_of_live, alive), *islice(found, last)]


def called(word: str, runs: Sequence[Run]) -> list[Run]:
    """Those that a person means: by an id or the first letters of it, a name, a key, a folder, or
    the number of a process that trains."""
    folder = str(Path(word).absolute())
    exact = [
        run
        for run in runs
        if word in filter(None, (run.run_id, run.name, run.key, Path(run.folder).name))
        or (run.live and word == str(run.pid))
        or folder == run.folder
    ]
    return exact or [
        run for run in runs if len(word) >= LEAST_LETTERS and run.run_id.startswith(word)
    ]


def _of_live(live: Live) -> Run:
    folder = Path(live.folder)
    start = start_of(folder) if os.access(folder, os.R_OK) else None
    state = "waiting" if live.waits_for else STATES.get(live.stage, live.stage)
    run = Run(
        name=live.name,
        state=state,
        live=True,
        run_id=live.run_id,
        key=start.key if start is not None else "",
        folder=live.folder,
        user=owner(live),
        pid=live.pid,
        device=live.device,
        waits_for=live.waits_for,
        steps=live.steps or None,
        epochs=live.epochs or None,
    )
    if start is None or not live.steps:  # another user's, or of a run that is not gone on with yet
        return run
    return _measured(run, start, {})


def of_folder(folder: Path) -> Run | None:
    """The run of a folder, which may still train; None where it holds none."""
    start = start_of(folder)
    if start is None:
        return None
    end = json_of(folder / "run.json")
    tags = end.get("tags") or {}
    status, reason = end.get("status"), end.get("error") or end.get("stopped") or ""
    is_alive = is_held(folder / LOCK)  # of a process that could not tell of itself
    if is_alive:
        status, reason = "training", ""
    elif status is None and is_held(folder / SENDING_LOCK):
        status = "sending"
    elif status is None:
        is_closed = json_of(folder / "sent.json").get("closed")
        status, reason = ("ended", UNTOLD) if is_closed else ("gone", GONE)
    is_done = is_alive or (status == "FINISHED" and not reason)
    run = Run(
        name=start.name,
        state=str(status),
        live=is_alive,
        run_id=start.run_id,
        key=start.key,
        folder=str(folder),
        pid=start.pid or None,
        device=str(tags.get("device") or json_of(folder / "device.json").get("name") or ""),
        reason=" ".join(str(reason).split()),
        unsent="" if is_alive or not end else _unsent(folder),
        steps=start.steps or None,
        epochs=start.epochs or None,
        resume=""
        if is_done or not steps(folder / CHECKPOINTS)
        else resume_command(start.run_id or folder.name),
    )
    return _measured(run, start, end.get("metrics") or {})


def _unsent(folder: Path) -> str:
    """Why MLflow has not got all of a run that has ended; empty where it has."""
    if (folder / BEGIN).exists():
        return UNKNOWN
    return str(json_of(folder / "sent.json").get("unsent") or "")


def _measured(run: Run, start: Start, end: Mapping[str, float]) -> Run:
    """The run with what its journal tells, and what its end has told over that."""
    first, newest = ends(Path(run.folder) / "metrics.jsonl")
    known: dict[str, float] = {}
    peaks = []
    for _, _, metrics in [*first, *newest]:
        known |= metrics
        peaks += [value for name, value in metrics.items() if name == PEAK]
    known |= {RUN_PEAK: max(peaks)} if peaks else {}
    known |= end
    step, now_s = max((step for _, step, _ in newest), default=None), time.time()
    so_far_s = now_s - start.began_at + start.spent_s
    return replace(
        run,
        step=step,
        epoch=_epoch(step, run),
        eta_s=_left_s(run, newest, start.began_at, now_s) if run.live else None,
        total_s=max(0.0, so_far_s) if run.live else known.get("time/total_s"),
        loss=known.get("train/loss"),
        samples_per_s=known.get("speed/samples_per_s"),
        tokens_per_s=known.get("speed/tokens_per_s"),
        peak_mib=known.get(RUN_PEAK),
        began_at=start.began_at or None,
    )


def _epoch(step: int | None, run: Run) -> int | None:
    """That under way, from 1."""
    if step is None or not run.steps or not run.epochs:
        return None
    return min(run.epochs, max(1, math.ceil(round(run.epochs * step / run.steps, 6))))


def _left_s(run: Run, lines: list[Line], began_at: float, now_s: float) -> float | None:
    """By the pace of the newest lines; those of the times before are of another one."""
    points = [(ms / 1000, step) for ms, step, _ in lines if ms / 1000 >= began_at]
    if not run.steps or len(points) < 2 or points[-1][1] <= points[0][1]:
        return None
    (first_s, first), (last_s, last) = points[0], points[-1]
    pace_s = (last_s - first_s) / (last - first)
    return max(0.0, (run.steps - last) * pace_s - max(0.0, now_s - last_s))
