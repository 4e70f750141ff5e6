"""Measure what each phase of a step takes, in time and in memory. A clock never makes the host wait
for the device: on an asynchronous device it leaves events in the stream, on the steps it samples,
and reads them at log points, where the host has waited anyway. Memory is read on sampled steps
only, and counted by owner on some of these. A stopwatch has the seconds of the parts of a run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from math import exp, log
from statistics import median
from time import perf_counter, process_time
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from headroom.base.names import REPLAY
from headroom.watch.graph_size import GraphSize
from headroom.watch.memory_by_owner import MemoryByOwner
from headroom.watch.memory_meter import MemoryMeter

FAST_QUANTILE = (
    0.05  # of the steps: what a step takes on a busy machine, where nothing else is in its way
)
LEAST_TIMES = 20  # steps: of fewer nobody knows
GRAIN = 500  # of the logarithm of a step: one fifth of a per cent
SIDE = 192  # of a square matrix whose product takes some 0.1 ms
REFERENCE_MULTIPLY_ADDS = SIDE**3
MOST_REFERENCES = 256
# Seconds between two of them, until there are so many: a fast loop lost 0.2 % of its time to them.
REFERENCE_EVERY_S, FIRST_REFERENCES, REFERENCE_LATER_S = 0.05, 60, 0.5


AS_LONG = 0.8  # the host, as the device for the same calls: then the device waits for them
PROCESSOR = "processor/"  # before the name of a part, in the state of a stopwatch


class PhaseClock(Protocol):
    """Measures the time between two marks of a step and adds it to the phase that the second
    one ends."""

    def begin(self, *, sample: bool) -> None:
        """Start a step. sample: time it, where timing each one would be too expensive."""

    def mark(self, phase: str) -> None:
        """End `phase` here."""

    def add_step(self, step_s: float, wait_s: float) -> None:
        """A step is done that took so long, of which so long for its batch, by the host's clock,
        whether it was sampled or not. Only a loop that does not mark each step calls it."""

    def end_pass(self) -> None:
        """The batch that the step was begun for does not come: what was since then was for the
        loader, which ends its workers."""

    def reset(self) -> None:
        """Forget what was timed so far: the first step holds warm-up and compilation."""

    def collect(self) -> None:
        """Read the times that are ready, without waiting for any."""

    def compute_step_seconds(self, *, replayed: bool = False) -> dict[str, float]:
        """Return the seconds of each phase, of steps run eagerly or of those replayed from a graph:
        the mean over all steps, or the median over those sampled; empty where none was timed."""

    def count_sampled_steps(self) -> int | None:
        """Return how many steps were sampled; None where all are timed."""

    def compute_error_pct(self) -> float | None:
        """Return the largest standard error of a phase's share, in points of the step; None where
        it is not known."""

    def compute_host_bound_share(self) -> float | None:
        """Return in which share of the sampled steps the device had done each call of the backward
        pass by the time that the host made the next one; None where host and device are one."""

    def compute_fast_step_s(self) -> float | None:
        """Return the seconds of a fast step: one timed step in twenty is faster."""

    def compute_reference_s(self) -> float | None:
        """Return the seconds of a fixed piece of work that is timed between steps, in the same
        way: how fast the machine itself was. None where none or too few were timed."""

    def list_references(self) -> list[tuple[float, float]]:
        """Return when that was timed, in seconds of some clock, and how long it took, of some of
        the times, evenly over the run."""


class HostClock:
    """The clock of a CPU, where work is done when the call returns. It times every step."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = defaultdict(float)
        self._fast, self._reference = FastTimes(), FastTimes()
        with _disable_current_modes():  # nobody's memory
            self._matrix, self._product = torch.ones(2, SIDE, SIDE, dtype=torch.float32)
        self._next_reference, self._references = 0.0, 0
        self._timed_references: list[tuple[float, float]] = []  # not more than MOST_REFERENCES
        self._references_every = 1  # of those that are timed one is kept
        self._steps = 0
        self._first = self._last = 0.0
        self._begun = False

    def begin(self, *, sample: bool) -> None:
        self._fast.add(self._last - self._first)  # of the step before
        self._begin()

    def _begin(self) -> None:
        now = perf_counter()
        if now >= self._next_reference:
            self._references += 1
            is_early = self._references <= FIRST_REFERENCES
            self._next_reference = now + (REFERENCE_EVERY_S if is_early else REFERENCE_LATER_S)
            with _disable_current_modes():
                began = perf_counter()
                torch.mm(self._matrix, self._matrix, out=self._product)
                now = perf_counter()
            self._reference.add(now - began)
            if self._references % self._references_every == 0:
                self._timed_references.append((now, now - began))
                if len(self._timed_references) >= MOST_REFERENCES:
                    self._timed_references = self._timed_references[::2]
                    self._references_every *= 2
        self._begun = True
        self._first = self._last = now

    def mark(self, phase: str) -> None:
        now = perf_counter()
        if self._begun:  # a step begun after the last batch never comes to a mark
            self._steps += 1
            self._begun = False
        self._totals[phase] += now - self._last
        self._last = now

    def add_step(self, step_s: float, wait_s: float) -> None:
        raise AssertionError("each step is marked")

    def end_pass(self) -> None:
        if self._begun:
            self._totals["data_wait"] += perf_counter() - self._last
            self._begun = False

    def reset(self) -> None:
        self._totals.clear()
        self._fast, self._reference = FastTimes(), FastTimes()
        self._first = self._last
        self._steps = 0

    def collect(self) -> None:
        self._fast.count()

    def compute_step_seconds(self, *, replayed: bool = False) -> dict[str, float]:
        if replayed or not self._steps:
            return {}
        return {phase: total / self._steps for phase, total in self._totals.items()}

    def count_sampled_steps(self) -> int | None:
        return None

    def compute_error_pct(self) -> float | None:
        return 0.0

    def compute_host_bound_share(self) -> float | None:
        return None

    def compute_fast_step_s(self) -> float | None:
        return self._fast.compute_seconds()

    def compute_reference_s(self) -> float | None:
        return self._reference.compute_seconds()

    def list_references(self) -> list[tuple[float, float]]:
        return self._timed_references


class FastTimes:
    """The 5 % quantile of many times, which are kept as counts by their logarithms."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._new: list[float] = []
        self.add = self._new.append  # at each step, where counting takes 1 % of a small one

    def count(self) -> None:
        """Add the collected times to the counts. Times of 0 are of steps that were begun and
        not taken."""
        self._counts.update(round(GRAIN * log(seconds)) for seconds in self._new if seconds > 0)
        self._new.clear()

    def compute_seconds(self) -> float | None:
        self.count()
        if self._counts.total() < LEAST_TIMES:
            return None
        left = FAST_QUANTILE * self._counts.total()
        for grain in sorted(self._counts):
            left -= self._counts[grain]
            if left <= 0:
                break
        return exp(grain / GRAIN)


class _Marks:
    """The events of a sampled step, and what the host did meanwhile in its backward pass."""

    def __init__(self, begin: Any) -> None:
        self.events = [("begin", begin)]
        self._marked_s = perf_counter()
        self._backward = (0, 0.0)  # where it ends, and what it took the host
        self._keeps_up = False  # the device had ended what came before by then

    def add(self, phase: str, event: Any) -> None:
        now_s = perf_counter()
        if phase == "backward":
            self._backward = (len(self.events), now_s - self._marked_s)
            self._keeps_up = self.events[-1][1].query()
        self.events.append((phase, event))
        self._marked_s = now_s

    def is_host_bound(self) -> bool | None:
        """Return whether the backward pass took the device as long as the host, and the device was
        never behind it; None where there was none."""
        at, host_s = self._backward
        if not at:
            return None
        device_s = self.events[at - 1][1].elapsed_time(self.events[at][1]) / 1000
        return self._keeps_up and host_s >= AS_LONG * device_s


class EventClock:
    """The clock of CUDA, ROCm, XPU and MPS: it times the device by events in its stream, on
    sampled steps.

    elapsed_time() of torch.Event is in milliseconds on every backend.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._timed: dict[bool, list[dict[str, float]]] = {False: [], True: []}  # by replayed
        self._open: _Marks | None = None  # of the step that has begun, if it is sampled
        self._pending: list[_Marks] = []
        self._host_bound = [0, 0]  # sampled steps that were not, and that were

    def begin(self, *, sample: bool) -> None:
        self._open = _Marks(self._record_event()) if sample else None
        if self._open is not None:
            self._pending.append(self._open)

    def mark(self, phase: str) -> None:
        if self._open is not None:
            self._open.add(phase, self._record_event())

    def reset(self) -> None:
        for timed in self._timed.values():
            timed.clear()
        self._pending.clear()
        self._open, self._host_bound = None, [0, 0]

    def collect(self) -> None:
        while self._pending and self._pending[0].events[-1][1].query():
            marks = self._pending.pop(0)
            times: dict[str, float] = defaultdict(float)
            for (_, start), (phase, end) in zip(marks.events, marks.events[1:], strict=False):
                times[phase] += start.elapsed_time(end) / 1000
            self._add_sample(times)
            is_host_bound = marks.is_host_bound()
            if is_host_bound is not None:
                self._host_bound[is_host_bound] += 1

    def _add_sample(self, times: dict[str, float]) -> None:
        if times:
            self._timed[REPLAY in times].append(times)

    def compute_step_seconds(self, *, replayed: bool = False) -> dict[str, float]:
        timed = self._timed[replayed]
        phases = dict.fromkeys(phase for step in timed for phase in step)
        return {p: median(step.get(p, 0.0) for step in timed) for p in phases}

    def add_step(self, step_s: float, wait_s: float) -> None:
        pass  # the host's time is not the device's

    def end_pass(self) -> None:
        pass

    def count_sampled_steps(self) -> int | None:
        return sum(map(len, self._timed.values()))

    def compute_error_pct(self) -> float | None:
        return None

    def compute_host_bound_share(self) -> float | None:
        not_bound, bound = self._host_bound
        return bound / (bound + not_bound) if bound + not_bound else None

    def compute_fast_step_s(self) -> float | None:
        timed = sorted(sum(step.values()) for step in self._timed[True] or self._timed[False])
        return timed[int(FAST_QUANTILE * len(timed))] if len(timed) >= LEAST_TIMES else None

    def compute_reference_s(self) -> float | None:
        return None

    def list_references(self) -> list[tuple[float, float]]:
        return []

    def _record_event(self) -> Any:
        event = make_event(self._device, timed=True)
        event.record()
        return event


def make_event(device: torch.device, *, timed: bool = False) -> Any:
    """Return an event of the device, to be recorded in its current stream."""
    if device.type == "mps":
        return torch.mps.Event(enable_timing=timed)
    return torch.Event(device=device, enable_timing=timed)


def make_phase_clock(device: torch.device) -> PhaseClock:
    """Return the clock that measures correctly on this device, in a loop that marks each step."""
    return HostClock() if device.type == "cpu" else EventClock(device)


class Stopwatch:
    """Measures the wall seconds of named parts of a run on the host, and the processor seconds of
    all threads of this process in them; parts may not nest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.cpu_seconds: dict[str, float] = defaultdict(float)
        self._began = perf_counter()
        self._last, self._last_cpu = self._began, process_time()

    def lap(self, part: str) -> float:
        """Add the time since the last lap to `part`, and return it."""
        now, now_cpu = perf_counter(), process_time()
        lap_s = now - self._last
        self.seconds[part] += lap_s
        self.cpu_seconds[part] += now_cpu - self._last_cpu
        self._last, self._last_cpu = now, now_cpu
        return lap_s

    def leave_out_lap(self) -> None:
        """Let the time since the last lap be no part of the run."""
        now, now_cpu = perf_counter(), process_time()
        self._began += now - self._last
        self._last, self._last_cpu = now, now_cpu

    def compute_lap_s(self) -> float:
        """Return the seconds since the last lap."""
        return perf_counter() - self._last

    def move(self, seconds: float, part: str, other: str) -> None:
        """Let so many seconds of a part, and their share of its processor time, be another's."""
        share = min(1.0, seconds / self.seconds[part]) if self.seconds[part] > 0 else 0.0
        for spent in (self.seconds, self.cpu_seconds):
            moved = spent[part] * share
            spent[part] -= moved
            spent[other] += moved

    def compute_total_s(self) -> float:
        return perf_counter() - self._began

    def state(self) -> dict[str, float]:
        """Return all seconds so far."""
        cpu = {f"{PROCESSOR}{part}": spent_s for part, spent_s in self.cpu_seconds.items()}
        return {**self.seconds, **cpu, "total": self.compute_total_s()}

    def restore(self, state: dict[str, float]) -> None:
        """Add seconds that were counted before."""
        for part, spent_s in state.items():
            if part == "total":
                self._began -= spent_s
            elif part.startswith(PROCESSOR):
                self.cpu_seconds[part.removeprefix(PROCESSOR)] += spent_s
            else:
                self.seconds[part] += spent_s


# On an asynchronous device a timed step keeps the host busy with events and statistics. The first
# is taken phase by phase, those after it as steps are taken by then: replayed, perhaps.
TIME_EVERY = 100
# So many from the second step on are timed by events alone, some 10 us each: a short run has no
# more steps, and one step says little. More are timed at log points.
TIME_FIRST = 20
# A counted step takes about 2 ms longer on a CPU (an mlp of three layers: 2.8 instead of 0.6 ms).
COUNT_EVERY = 5000
NOT_COUNTED = nullcontext()


class Watched(Enum):
    """What is measured of a step while it is taken."""

    NOT = "not"
    TIMED = "timed"  # phase by phase: taken plainly, also where steps are replayed as a whole
    WHOLE = "whole"  # timed as it is taken
    COUNTED = "counted"  # storage by storage: the plain step only


class Phases:
    """Marks where a phase ends. Steps are measured at log points, where they are read anyway:
    some timed, some counted by owner.

    Where the clock times every step there is no need to choose.
    """

    def __init__(
        self,
        clock: PhaseClock,
        meter: MemoryMeter,
        accounts: MemoryByOwner,
        *,
        count_every: int | None,
    ) -> None:
        """count_every: steps between two counted ones, at least; None: one in the run."""
        self.clock, self.meter, self.accounts = clock, meter, accounts
        self._count_every = count_every
        self._counted: int | None = None
        self._timed: int | None = None
        self._whole: int | None = None
        self._first: int | None = None  # of those that are all timed
        self._once: set[str] = set()
        self.may_count: Callable[[], bool] = lambda: True  # now, if it is due
        self.operations = 0  # of a counted step
        self.graph = GraphSize(0, 0)  # of a step
        self.watched = Watched.NOT

    def begin(self, step: int, *, is_log_point: bool, is_sampled: bool = False) -> None:
        """Begin step number `step`. is_sampled: its phases are timed, whatever else is."""
        self.watched = Watched.NOT
        is_due = is_log_point and _is_due(step, self._counted, self._count_every)
        if is_due and self.may_count():
            self.watched, self._counted = Watched.COUNTED, step
        elif is_log_point and _is_due(step, self._timed, None):
            self.watched, self._timed = Watched.TIMED, step
        elif is_log_point and _is_due(step, self._whole, TIME_EVERY):
            self.watched, self._whole = Watched.WHOLE, step
        if self.watched is not Watched.NOT:
            self.meter.end_phase("between")
        self._first = step if self._first is None else self._first
        if self.watched is not Watched.COUNTED:  # counting takes time of its own
            is_early = step < self._first + TIME_FIRST
            is_watched = self.watched is not Watched.NOT
            self.clock.begin(sample=is_sampled or is_early or is_watched)

    def count_memory(self, batch: Sequence[Any]) -> AbstractContextManager[None]:
        """Count the memory of this step, if it is to be counted."""
        if self.watched is Watched.COUNTED:
            return self.accounts.count_memory(batch)
        return NOT_COUNTED

    def count_memory_once(self, phase: str, batch: Sequence[Any]) -> AbstractContextManager[None]:
        """Count the memory of something beside the steps, the first time only, as a phase of
        its own."""
        if phase in self._once:
            return NOT_COUNTED
        self._once.add(phase)
        return self._count_phase(phase, batch)

    @contextmanager
    def _count_phase(self, phase: str, batch: Sequence[Any]) -> Iterator[None]:
        self.meter.end_phase("between")
        # In inference mode an operation that is made of others would come to the ledger whole, and
        # below autocast: the loss of a classification would then be computed in bf16.
        with torch.inference_mode(False), torch.no_grad(), self.accounts.count_memory(batch):
            yield
            self.accounts.ledger.end_phase(phase)
            self.meter.end_phase(phase)

    def restart(self) -> None:
        """Forget the first step, which holds warm-up and compilation."""
        self.clock.reset()
        self._timed = self._whole = self._counted = self._first = None

    def recount(self) -> None:
        """Count again, steps and what is beside them: from here on they hold something else."""
        self._counted = None
        self._once.clear()
        self.accounts.forget()

    def add_graph(self, graph: GraphSize) -> None:
        """A pass of the step that has begun made this graph."""
        nodes, multiply_adds = self.graph
        self.graph = GraphSize(nodes + graph.nodes, multiply_adds + graph.multiply_adds)

    def mark(self, phase: str) -> None:
        """End `phase` here."""
        if self.watched is Watched.NOT:  # nearly always, four times a step
            return self.clock.mark(phase)
        if self.watched is Watched.COUNTED:
            self.accounts.ledger.end_phase(phase)
            self.operations = max(self.operations, self.accounts.ledger.operations)
        else:
            self.clock.mark(phase)
        self.meter.end_phase(phase)


def _is_due(step: int, last: int | None, every: int | None) -> bool:
    # The same step again: it was begun after an epoch's last batch, and never came.
    return last is None or step == last or (every is not None and step - last >= every)
