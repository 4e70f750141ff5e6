"""This project's own training as a contender, through the assembly that its flow uses and with its
real tracking, timed from log point to log point.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

from benchmarks.trial import Reading, Trial
from headroom.base.facts import TrainFacts
from headroom.tracking.journal import Journal
from headroom.tracking.tracking_settings import TrackingSettings
from headroom.training import trainer
from headroom.training.plan import make_plan
from headroom.watch.step_metrics import Log

# What a run that trained to its end tells its journal last.
ENDED = {"status": "FINISHED", "name": "benchmark", "params": {}, "tags": {}, "metrics": {}}
FLUSH_S = 0.5  # a run is short here: at the usual 2 s most of the sending would come after it
SETTLE_S = 120.0


@dataclass(frozen=True)
class Tracker:
    """Where a training logs to, and a wait until all of it has been sent."""

    log: Log
    settle: Callable[[], None]


NO_TRACKER = Tracker(lambda metrics, step: None, lambda: None)


@contextmanager
def tracking(uri: str | None, scratch: Path, *, flush_s: float = FLUSH_S) -> Iterator[Tracker]:
    """One MLflow run, kept open for all trainings of a benchmark; nothing where there is no uri."""
    if uri is None:
        yield NO_TRACKER
        return
    with Journal(where_to(uri, scratch, flush_s=flush_s), scratch / "runs" / "one") as journal:
        journal.open("throughput")
        journal.create(name="throughput", params={}, tags={})
        yield Tracker(journal.log, partial(_settle, journal.folder))
        journal.close(ENDED)


def where_to(uri: str, scratch: Path, **more: float) -> TrackingSettings:
    """All of MLflow's and the journal's files in `scratch`."""
    places = {"artifacts": str(scratch / "artifacts"), "runs": str(scratch / "runs")}
    return TrackingSettings.model_validate({"tracking_uri": uri, **places, **more})


def _settle(folder: Path) -> None:
    """Until the sending process has sent everything: it must not work in another's turn."""
    until = time.monotonic() + SETTLE_S
    while time.monotonic() < until:
        sent = json.loads((folder / "sent.json").read_text())["offset"]
        if sent == (folder / "events.jsonl").stat().st_size:
            return
        time.sleep(0.05)
    raise TimeoutError(f"{folder}: not sent within {SETTLE_S:.0f} s; see tracking.log beside it")


@dataclass(frozen=True)
class Timed:
    """A training, and the seconds of its last epoch, validation left out."""

    epoch_s: float
    facts: TrainFacts


def timed(trial: Trial, tracker: Tracker, folder: Path) -> Timed:
    """One training, its tracking and its accounting of time and memory included.

    Timed from the log point after the validation of the last epoch but one, when the device has
    nothing left to do, to that of the last step, which is read when it is done.
    """
    epochs, at = trial.config.train.epochs, []

    def log(metrics: dict[str, float], step: int) -> None:
        now = perf_counter()
        is_begin = metrics.get("train/epoch") == epochs - 1
        if is_begin or (step == epochs * trial.steps and "train/loss" in metrics):
            at.append(now)
        tracker.log(metrics, step)

    facts = trainer.train(make_plan(trial.config, trial.device, trial.data), folder=folder, log=log)
    tracker.settle()
    began, ended = at
    return Timed(ended - began, facts)


def headroom(trial: Trial, tracker: Tracker, folder: Path) -> Reading:
    """This project as a contender."""
    run = timed(trial, tracker, folder)
    how = [f"threads {run.facts.tags['threads']}"]
    if run.facts.tags["compiled"] != "no":
        how.append(f"compiled: {run.facts.tags['compiled']}")
    return Reading(run.epoch_s / trial.steps, ", ".join(how))
