"""Lists the trainings of this host: those that live, with how far they are, and the newest
of those that ended, with how. It reads the announcements and the folders of the runs, and
asks no server.
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
from tasks.engine.checkpoint.kept_steps import CHECKPOINTS, list_steps
from tasks.run.live_runs import LiveRun, find_live_runs, find_owner
from tasks.run.run_folders import (
    LOCK,
    RunStart,
    list_run_folders,
    make_resume_command,
    read_json,
    read_start,
)
from tasks.tracking.journal import BEGIN, SENDING_LOCK, Line, read_journal_ends

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
END_UNKNOWN = "how it ended is only known in MLflow"
UNKNOWN = "MLflow has not been told of it yet"


@dataclass(frozen=True)
class KnownRun:
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


def list_known_runs(runs: Path, *, last: int | None = None) -> list[KnownRun]:
    """Return the trainings that live, then the `last` newest others; None: all of them."""
    alive = find_live_runs()
    places = {live.folder for live in alive}
    ended = (folder for folder in list_run_folders(runs) if str(folder) not in places)
    found = (run for folder in ended if (run := read_run_folder(folder)) is not None)
    return [*map(_make_live_run, alive), *islice(found, last)]


def find_called_runs(word: str, runs: Sequence[KnownRun]) -> list[KnownRun]:
    """Return the runs that a person means by this word.

    It is an id or the first letters of it, a name, a key, a folder, or the number of a
    process that trains.
    """
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


def _make_live_run(live: LiveRun) -> KnownRun:
    folder = Path(live.folder)
    start = read_start(folder) if os.access(folder, os.R_OK) else None
    state = "waiting" if live.waits_for else STATES.get(live.stage, live.stage)
    run = KnownRun(
        name=live.name,
        state=state,
        live=True,
        run_id=live.run_id,
        key=start.key if start is not None else "",
        folder=live.folder,
        user=find_owner(live),
        pid=live.pid,
        device=live.device,
        waits_for=live.waits_for,
        steps=live.steps or None,
        epochs=live.epochs or None,
    )
    if start is None or not live.steps:  # another user's, or of a run that is not gone on with yet
        return run
    return _add_measurements(run, start, {})


def read_run_folder(folder: Path) -> KnownRun | None:
    """Return the run of a folder, which may still train; None where it holds none."""
    start = read_start(folder)
    if start is None:
        return None
    end = read_json(folder / "run.json")
    tags = end.get("tags") or {}
    status, reason = end.get("status"), end.get("error") or end.get("stopped") or ""
    is_alive = is_held(folder / LOCK)  # of a process that could not tell of itself
    if is_alive:
        status, reason = "training", ""
    elif status is None and is_held(folder / SENDING_LOCK):
        status = "sending"
    elif status is None:
        is_closed = read_json(folder / "sent.json").get("closed")
        status, reason = ("ended", END_UNKNOWN) if is_closed else ("gone", GONE)
    is_done = is_alive or (status == "FINISHED" and not reason)
    run = KnownRun(
        name=start.name,
        state=str(status),
        live=is_alive,
        run_id=start.run_id,
        key=start.key,
        folder=str(folder),
        pid=start.pid or None,
        device=str(tags.get("device") or read_json(folder / "device.json").get("name") or ""),
        reason=" ".join(str(reason).split()),
        unsent="" if is_alive or not end else _explain_unsent(folder),
        steps=start.steps or None,
        epochs=start.epochs or None,
        resume=""
        if is_done or not list_steps(folder / CHECKPOINTS)
        else make_resume_command(start.run_id or folder.name),
    )
    return _add_measurements(run, start, end.get("metrics") or {})


def _explain_unsent(folder: Path) -> str:
    """Return why MLflow has not got all of a run that has ended; empty where it has."""
    if (folder / BEGIN).exists():
        return UNKNOWN
    return str(read_json(folder / "sent.json").get("unsent") or "")


def _add_measurements(run: KnownRun, start: RunStart, end: Mapping[str, float]) -> KnownRun:
    """Return the run with the newest values of its journal, and those of its end over them."""
    first, newest = read_journal_ends(Path(run.folder) / "metrics.jsonl")
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
        epoch=_compute_epoch(step, run),
        eta_s=_estimate_left_s(run, newest, start.began_at, now_s) if run.live else None,
        total_s=max(0.0, so_far_s) if run.live else known.get("time/total_s"),
        loss=known.get("train/loss"),
        samples_per_s=known.get("speed/samples_per_s"),
        tokens_per_s=known.get("speed/tokens_per_s"),
        peak_mib=known.get(RUN_PEAK),
        began_at=start.began_at or None,
    )


def _compute_epoch(step: int | None, run: KnownRun) -> int | None:
    """Return the number of the epoch that is being trained, from 1."""
    if step is None or not run.steps or not run.epochs:
        return None
    return min(run.epochs, max(1, math.ceil(round(run.epochs * step / run.steps, 6))))


def _estimate_left_s(
    run: KnownRun, lines: list[Line], began_at: float, now_s: float
) -> float | None:
    """Return the seconds that are left, by the pace of the newest lines of this start."""
    points = [(ms / 1000, step) for ms, step, _ in lines if ms / 1000 >= began_at]
    if not run.steps or len(points) < 2 or points[-1][1] <= points[0][1]:
        return None
    (first_s, first), (last_s, last) = points[0], points[-1]
    pace_s = (last_s - first_s) / (last - first)
    return max(0.0, (run.steps - last) * pace_s - max(0.0, now_s - last_s))
