"""Clocks for the phases of a training step. A clock never makes the host wait for the device: on an
asynchronous device it leaves events in the stream, on the steps it samples, and reads them at log
points, where the host has waited anyway. Seconds inside, milliseconds in the record.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from math import exp, log
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

REPLAY = "replay"  # all of a step that is replayed from a graph, but for its data
FAST = 0.05  # of the steps: what a step takes on a busy machine, where nothing else is in its way
LEAST = 20  # steps: of fewer nobody knows
GRAIN = 500  # of the logarithm of a step: one fifth of a per cent
SIDE, REFERENCE_EVERY_S = 192, 0.05  # of a square matrix whose product takes some 0.1 ms
PHASES = ("data_wait", "h2d", "forward", "backward", "communication", "optimizer")


class PhaseClock(Protocol):
    """Times what lies between two marks of a step, and gives it to the phase that it ends."""

    def begin(self, *, sample: bool) -> None:
        """A step begins. sample: time it, where timing each one would cost."""

    def mark(self, phase: str) -> None:
        """`phase` ends here."""

    def reset(self) -> None:
        """Forget what was timed so far: the first step holds warm-up and compilation."""

    def collect(self) -> None:
        """Read what is finished, and wait for nothing."""

    def seconds_per_step(self, *, replayed: bool = False) -> dict[str, float]:
        """Seconds of each phase, those of steps taken plainly or those replayed from a graph: the
        mean over all steps, or the median over those sampled; empty where none was timed."""

    def sampled_steps(self) -> int | None:
        """How many steps were sampled; None where all are timed."""

    def fast_step_s(self) -> float | None:
        """Seconds of a step that only one timed step in twenty is faster than."""

    def reference_s(self) -> float | None:
        """The same of a fixed piece of work between the steps: how fast the machine itself was.
        None where too few were timed, or none."""


class HostClock:
    """For a CPU, where work is done when the call returns. Times every step."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = defaultdict(float)
        self._fast, self._reference = _Fast(), _Fast()
        with _disable_current_modes():  # nobody's memory
            self._matrix, self._product = torch.ones(2, SIDE, SIDE, dtype=torch.float32)
        self._next_reference = 0.0
        self._steps = 0
        self._first = self._last = 0.0
        self._begun = False

    def begin(self, *, sample: bool) -> None:
        self._fast.add(self._last - self._first)  # of the step before
        now = perf_counter()
        if now >= self._next_reference:
            self._next_reference = now + REFERENCE_EVERY_S
            with _disable_current_modes():
                began = perf_counter()
                torch.mm(self._matrix, self._matrix, out=self._product)
                now = perf_counter()
            self._reference.add(now - began)
        self._begun = True
        self._first = self._last = now

    def mark(self, phase: str) -> None:
        now = perf_counter()
        if self._begun:  # a step begun after the last batch never comes to a mark
            self._steps += 1
            self._begun = False
        self._totals[phase] += now - self._last
        self._last = now

    def reset(self) -> None:
        self._totals.clear()
        self._fast, self._reference = _Fast(), _Fast()
        self._first = self._last
        self._steps = 0

    def collect(self) -> None:
        self._fast.count()

    def seconds_per_step(self, *, replayed: bool = False) -> dict[str, float]:
        if replayed:
            return {}
        return {phase: total / self._steps for phase, total in self._totals.items()}

    def sampled_steps(self) -> int | None:
        return None

    def fast_step_s(self) -> float | None:
        return self._fast.seconds()

    def reference_s(self) -> float | None:
        return self._reference.seconds()


class _Fast:
    """Times of which one in twenty is shorter than what it tells, held as counts by their
    logarithms."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._new: list[float] = []
        self.add = self._new.append  # at each step, where counting takes 1 % of a small one

    def count(self) -> None:
        """Hold what was added as counts. Times of 0 are of steps that were begun and not taken."""
        self._counts.update(round(GRAIN * log(seconds)) for seconds in self._new if seconds > 0)
        self._new.clear()

    def seconds(self) -> float | None:
        self.count()
        if self._counts.total() < LEAST:
            return None
        left = FAST * self._counts.total()
        for grain in sorted(self._counts):
            left -= self._counts[grain]
            if left <= 0:
                break
        return exp(grain / GRAIN)


class EventClock:
    """For CUDA, ROCm, XPU and MPS: times the device by events in its stream, on sampled steps.

    elapsed_time() of torch.Event is in milliseconds on every backend.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._timed: dict[bool, list[dict[str, float]]] = {False: [], True: []}  # by replayed
        self._open: list[tuple[str, Any]] = []
        self._pending: list[list[tuple[str, Any]]] = []

    def begin(self, *, sample: bool) -> None:
        self._open = [("begin", self._event())] if sample else []
        if sample:
            self._pending.append(self._open)

    def mark(self, phase: str) -> None:
        if self._open:
            self._open.append((phase, self._event()))

    def reset(self) -> None:
        for timed in self._timed.values():
            timed.clear()
        self._pending.clear()
        self._open = []

    def collect(self) -> None:
        while self._pending and self._pending[0][-1][1].query():
            marks = self._pending.pop(0)
            found: dict[str, float] = defaultdict(float)
            for (_, start), (phase, end) in zip(marks, marks[1:], strict=False):
                found[phase] += start.elapsed_time(end) / 1000
            if found:
                self._timed[REPLAY in found].append(found)

    def seconds_per_step(self, *, replayed: bool = False) -> dict[str, float]:
        timed = self._timed[replayed]
        phases = dict.fromkeys(phase for step in timed for phase in step)
        return {p: median(step.get(p, 0.0) for step in timed) for p in phases}

    def sampled_steps(self) -> int | None:
        return sum(map(len, self._timed.values()))

    def fast_step_s(self) -> float | None:
        timed = sorted(sum(step.values()) for step in self._timed[True] or self._timed[False])
        return timed[int(FAST * len(timed))] if len(timed) >= LEAST else None

    def reference_s(self) -> float | None:
        return None

    def _event(self) -> Any:
        event = new_event(self._device, timed=True)
        event.record()
        return event


def new_event(device: torch.device, *, timed: bool = False) -> Any:
    """An event of the device, to be recorded in its current stream."""
    if device.type == "mps":
        return torch.mps.Event(enable_timing=timed)
    return torch.Event(device=device, enable_timing=timed)


def phase_clock(device: torch.device) -> PhaseClock:
    """The clock that tells the truth on this device."""
    return HostClock() if device.type == "cpu" else EventClock(device)


def wait(device: torch.device) -> None:
    """Return when the device has done all that it was given; at once on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Stopwatch:
    """Wall seconds of named parts of a run, as the host sees them; parts may not nest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._began = perf_counter()
        self._last = self._began

    def lap(self, part: str) -> float:
        """Give the time since the last lap to `part`, and return it."""
        now = perf_counter()
        lap_s = now - self._last
        self.seconds[part] += lap_s
        self._last = now
        return lap_s

    def total_s(self) -> float:
        return perf_counter() - self._began

    def state(self) -> dict[str, float]:
        """All seconds so far."""
        return {**self.seconds, "total": self.total_s()}

    def restore(self, state: dict[str, float]) -> None:
        """Count what was counted before, too."""
        for part, spent_s in state.items():
            if part == "total":
                self._began -= spent_s
            else:
                self.seconds[part] += spent_s
