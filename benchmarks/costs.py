"""What this project's own tracking and accounting cost a step. Each is switched on and off in turns
within one training: a shared machine is faster and slower for seconds at a time, so that one part
in a hundred shows between neighbours only.

`python -m benchmarks.costs [PAIRS]` prints the tables and keeps them in benchmarks/results.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import psutil

from benchmarks import workloads
from benchmarks.conditions import publish
from benchmarks.headroom import Tracker, tracking
from benchmarks.trial import Trial, ready
from headroom.device.detection import detect_best_device
from headroom.settings.read_settings import override_config
from headroom.training import trainer
from headroom.training.plan import make_plan
from headroom.watch.memory_meter import MemoryMeter
from headroom.watch.phases import EventClock, HostClock, Phases, Watched

PAIRS = 50
# Seconds of a turn: what counts, and before it what does not: it has to come to the first sending.
COUNTED_S, BEFORE_S = 0.5, 0.25
FLUSH_S = 0.2  # between two sendings: 2 in a run, too long for a turn here
# Bars of a step without it over one with it.
TRACKING_BAR = 0.99
ACCOUNTING_BARS = {"cpu": 0.98, "cuda": 0.99}
NOTES = """
- A turn is some epochs of one training, in which it is on or off, validation left out. Of tracking
  the first quarter of a second does not count, which has nothing to send yet, and what is still
  to be sent at the end of a turn is sent before the next.
- tracking: a log point at each step. accounting: time and memory of every phase.
- ratio: a step without it over one with it, the median over all neighbouring turns.
"""


@dataclass(frozen=True)
class Turns:
    """Of how many epochs a turn is, and how many before them do not count."""

    counted: int
    before: int

    @property
    def epochs(self) -> int:
        return self.counted + self.before


def main(pairs: int) -> None:
    """Measure, print, keep."""
    with tempfile.TemporaryDirectory() as scratch:
        publish("costs", "What tracking and accounting cost", _report(pairs, Path(scratch)))


def _report(pairs: int, scratch: Path) -> Iterator[str]:
    yield NOTES.rstrip()
    device = detect_best_device()
    is_cpu = device.kind == "cpu"
    uri = f"sqlite:///{scratch}/mlflow.db" if find_spec("mlflow") is not None else None
    if uri is None:
        yield "- MLflow is not installed: nothing is tracked."
    yield ""
    yield "| | pairs | us a step with | without | ratio | its quartiles | bar |"
    yield "|:--|--:|--:|--:|--:|:--|:--|"
    told: list[str] = []
    for workload in workloads.cpu() if is_cpu else workloads.gpu():
        if workload.shows_own_costs:
            trial = ready(workload, device, scratch=scratch, tracking_uri=None)
            if uri is not None:
                found, sent = _tracked(trial, uri, pairs, scratch)
                yield _row(f"tracking, {workload.name}", found, TRACKING_BAR)
                told.append(f"- {workload.name}: {sent}")
            # An epoch has to end at a log point.
            every = max(n for n in range(1, 11) if trial.steps % n == 0)
            found = _turns(trial, Accounting(), 2 * pairs, Turns(1, 0), scratch, log_every=every)
            bar = ACCOUNTING_BARS["cpu" if is_cpu else "cuda"]
            yield _row(f"accounting, {workload.name}", found, bar)
    if told:
        yield from ("", "The process that sends the metrics, at full speed:")
        yield from told


def _tracked(trial: Trial, uri: str, pairs: int, scratch: Path) -> tuple[list[float], str]:
    """Seconds of a step in each turn, and what the sending process took."""
    with tracking(uri, scratch / str(trial.steps), flush_s=FLUSH_S) as tracker:
        logged = Switched(tracker)
        first = _turns(trial, logged, 1, Turns(2, 2), scratch, log_every=1)
        tracker.settle()  # its process is at its usual work from here on
        epoch_s = min(first) * trial.steps
        turns = Turns(ceil(COUNTED_S / epoch_s), ceil(BEFORE_S / epoch_s))
        process = next(
            p
            for p in psutil.Process().children()
            if "headroom.tracking.mlflow_sender" in p.cmdline()
        )
        metrics, cpu_s = logged.metrics, sum(process.cpu_times()[:2])
        found = _turns(trial, logged, pairs, turns, scratch, log_every=1)
        tracker.settle()
        metrics, cpu_s = logged.metrics - metrics, sum(process.cpu_times()[:2]) - cpu_s
    steps = pairs * turns.epochs * trial.steps
    share = cpu_s / steps / median(found[::2])
    return found, (
        f"{1e6 * cpu_s / metrics:.1f} us for each of {metrics / steps:.1f} metrics a step, "
        f"{100 * share:.1f} % of a core"
    )


class Switched:
    """A log that can be switched off."""

    def __init__(self, tracker: Tracker) -> None:
        self._log, self._settle = tracker.log, tracker.settle
        self._is_on = True
        self.metrics = 0  # logged so far

    def __call__(self, metrics: dict[str, float], step: int) -> None:
        if self._is_on:
            self.metrics += len(metrics)
            self._log(metrics, step)

    def switch(self, on: bool) -> None:
        self._is_on = on
        self._settle()  # between two turns: what is sent late belongs to none

    def around(self) -> AbstractContextManager[None]:
        return nullcontext()


class Accounting:
    """What times and counts the phases of a step, and what measures the memory; can be switched
    off, and then does nothing. Nothing is logged."""

    def __init__(self) -> None:
        self._off: dict[tuple[type, str], Callable[..., Any]] = {
            (Phases, "begin"): _unwatched,
            (Phases, "count_memory"): _uncounted,
            (Phases, "count_memory_once"): _uncounted,
            (HostClock, "mark"): _nothing,  # what the step holds is a method of Phases, bound
            (EventClock, "mark"): _nothing,
            (MemoryMeter, "end_phase"): _nothing,
            (MemoryMeter, "end_window"): lambda _: {},
        }
        self._on = {(owner, name): getattr(owner, name) for owner, name in self._off}

    def __call__(self, metrics: dict[str, float], step: int) -> None:
        pass

    def switch(self, on: bool) -> None:
        for (owner, name), method in (self._on if on else self._off).items():
            setattr(owner, name, method)

    @contextmanager
    def around(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.switch(True)


def _nothing(*_: object, **__: object) -> None:
    pass


def _unwatched(phases: Phases, *_: object, **__: object) -> None:
    phases.watched = Watched.NOT


def _uncounted(*_: object, **__: object) -> nullcontext[None]:
    return nullcontext()


def _turns(
    trial: Trial,
    switched: Switched | Accounting,
    pairs: int,
    turns: Turns,
    scratch: Path,
    *,
    log_every: int,
) -> list[float]:
    """Seconds of a step in each turn of one training: on, off, on, ... The first epoch of the
    training is in none of them."""
    epochs = 1 + 2 * pairs * turns.epochs
    config = override_config(trial.config, {"train.epochs": epochs, "train.log_every": log_every})
    found: list[list[float]] = [[] for _ in range(2 * pairs)]
    began = 0.0
    epoch = 0  # under way, since the first

    def log(metrics: dict[str, float], step: int) -> None:
        nonlocal began, epoch
        now = perf_counter()
        turn, within = divmod(epoch - 1, turns.epochs)
        if "train/epoch" not in metrics:
            if step % trial.steps == 0 and epoch and within >= turns.before:
                found[turn].append(now - began)
            return switched(metrics, step)
        epoch += 1
        turn, within = divmod(epoch - 1, turns.epochs)
        if within == 0:
            switched.switch(turn % 2 == 0)
        switched(metrics, step)
        began = perf_counter()

    with switched.around():
        trainer.train(
            make_plan(config, trial.device, trial.data), folder=scratch / "model", log=log
        )
    return [sum(spans) / len(spans) / trial.steps for spans in found]


def _row(name: str, steps_s: list[float], bar: float) -> str:
    pairs = list(zip(steps_s, steps_s[1:], strict=False))
    ratios = [b / a if i % 2 == 0 else a / b for i, (a, b) in enumerate(pairs)]
    ratio, (low, _, high) = median(ratios), quantiles(ratios)
    with_us, without_us = (1e6 * median(steps_s[i::2]) for i in (0, 1))
    verdict = f">= {bar}" + (" **missed**" if ratio < bar else "")
    cells = f"{len(steps_s) // 2} | {with_us:.1f} | {without_us:.1f} | {ratio:.3f}"
    return f"| {name} | {cells} | {low:.3f} to {high:.3f} | {verdict} |"


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else PAIRS)
