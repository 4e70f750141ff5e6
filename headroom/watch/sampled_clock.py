"""The clocks of a loop in which marking each phase of each step would cost too much. On a CPU the
time of every step and of its wait for a batch are known, and the phases within of the steps that
are sampled: these are scaled to the time of all steps of their part of the run, so that the phases
of a step sum to the step. On a GPU sampled steps are timed by events, phase by phase, and stand for
all steps of their part of the run. So a step that grows is not told by its beginning.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from math import sqrt
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import torch

from headroom.watch.phases import EventClock, FastTimes, HostClock, PhaseClock

WAIT = "data_wait"
FIRST_BLOCK = 20  # steps; each later one has as many as all before it


class _Block:
    """Steps that followed each other: their times, and what was sampled of them."""

    def __init__(self) -> None:
        self.steps = 0
        self.step_s = self.wait_s = 0.0
        self.sampled = 0
        self.within_s = 0.0  # of the sampled steps, without the wait
        self.within_squared = 0.0
        self.phase_s: dict[str, float] = defaultdict(float)
        self.phase_squared: dict[str, float] = defaultdict(float)
        self.phase_by_step: dict[str, float] = defaultdict(float)  # times the step's

    def add_sample(self, phases: dict[str, float]) -> None:
        """Add a sampled step, which is gone through phase by phase."""
        within_s = sum(phases.values())
        self.sampled += 1
        self.within_s += within_s
        self.within_squared += within_s**2
        for phase, seconds in phases.items():
            self.phase_s[phase] += seconds
            self.phase_squared[phase] += seconds**2
            self.phase_by_step[phase] += seconds * within_s

    def compute_error(self, phase: str) -> float:
        """Return the standard error of the phase's share of a step, without the wait, as that of a
        ratio of two means (Cochran, Sampling Techniques, 1977, 6.3)."""
        if self.sampled < 2 or not self.within_s:
            return 0.0
        ratio = self.phase_s[phase] / self.within_s
        squares = self.phase_squared[phase] - 2 * ratio * self.phase_by_step[phase]
        variance = max(0.0, squares + ratio**2 * self.within_squared) / (self.sampled - 1)
        return sqrt(variance / self.sampled) * self.sampled / self.within_s


class _Blocks:
    """The blocks of a run, each as long as all before it."""

    def __init__(self) -> None:
        self.all = [_Block()]
        self._before = 0  # steps of all full blocks

    @property
    def last(self) -> _Block:
        return self.all[-1]

    def end_step(self) -> None:
        """A step of the last block is done."""
        self.last.steps += 1
        if self.last.steps >= max(FIRST_BLOCK, self._before):
            self._before += self.last.steps
            self.all.append(_Block())

    def count_sampled_steps(self) -> int:
        """Return how many steps were sampled."""
        return sum(block.sampled for block in self.all)

    def compute_error_pct(
        self, whole_s: float, compute_within_s: Callable[[_Block], float]
    ) -> float | None:
        """Return the largest standard error of a phase, in per cent of all steps. compute_within_s:
        the seconds of a block's steps without the wait."""
        phases = {phase for block in self.all for phase in block.phase_s}
        if not whole_s or not phases:
            return None
        return max(
            100
            * sqrt(
                sum(
                    (compute_within_s(block) * block.compute_error(phase)) ** 2
                    for block in self.all
                )
            )
            / whole_s
            for phase in phases
        )


@runtime_checkable
class SampledClock(PhaseClock, Protocol):
    """Knows what all steps took, without what was between them."""

    def compute_step_s(self) -> float:
        """Return the seconds of all steps together."""

    def begin_part(self) -> None:
        """Something beside the steps begins here."""

    def end_part(self, part: str, host_s: float) -> None:
        """It ends here, and took the host so long."""

    def compute_waits_s(self) -> dict[str, float]:
        """Return by part how long the host waited in it for the steps before it."""


class SampledHostClock(HostClock):
    """Times all steps as wholes, and some phase by phase."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks = _Blocks()
        self._phases: dict[str, float] = {}  # of the step that has begun

    def begin(self, *, sample: bool) -> None:
        self._phases = {}
        self._begin()

    def mark(self, phase: str) -> None:
        now = perf_counter()
        if phase != WAIT:  # it is known of every step
            self._phases[phase] = self._phases.get(phase, 0.0) + now - self._last
        self._last = now

    def add_step(self, step_s: float, wait_s: float) -> None:
        self._fast.add(step_s)
        block = self._blocks.last
        block.step_s += step_s
        block.wait_s += wait_s
        if self._phases:
            block.add_sample(self._phases)
            self._phases = {}
        self._blocks.end_step()

    def end_pass(self) -> None:
        pass  # whoever adds the steps knows

    def reset(self) -> None:
        super().reset()
        self._blocks, self._phases = _Blocks(), {}

    def compute_step_seconds(self, *, replayed: bool = False) -> dict[str, float]:
        steps = sum(block.steps for block in self._blocks.all)
        if replayed or not steps:
            return {}
        phase_s: dict[str, float] = defaultdict(float)
        wait_s = sum(block.wait_s for block in self._blocks.all)
        if wait_s:
            phase_s[WAIT] = wait_s
        left_s = 0.0  # of blocks of which no step was sampled
        for block in self._blocks.all:
            within_s = block.step_s - block.wait_s
            if not block.within_s:
                left_s += within_s
            for phase, seconds in block.phase_s.items():
                phase_s[phase] += within_s * seconds / block.within_s if block.within_s else 0.0
        known_s = sum(phase_s.values()) - wait_s
        scale = 1 + left_s / known_s if known_s else 1.0
        return {
            phase: seconds * (1 if phase == WAIT else scale) / steps
            for phase, seconds in phase_s.items()
        }

    def compute_step_s(self) -> float:
        """Return the seconds of all steps together."""
        return sum(block.step_s for block in self._blocks.all)

    def count_sampled_steps(self) -> int | None:
        return self._blocks.count_sampled_steps()

    def begin_part(self) -> None:
        pass  # the steps before it are done

    def end_part(self, part: str, host_s: float) -> None:
        pass

    def compute_waits_s(self) -> dict[str, float]:
        return {}

    def compute_error_pct(self) -> float | None:
        return self._blocks.compute_error_pct(
            self.compute_step_s(), lambda block: block.step_s - block.wait_s
        )


class SampledEventClock(EventClock):
    """Times some steps on the device, from their begin to their end in its stream: a device that
    waits for the host within a step is in the phase that lets it wait."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._blocks = _Blocks()
        self._sampled_in: deque[_Block] = deque()  # of the steps that are not read yet
        self._fast = FastTimes()
        self._part_began: Any = None
        self._parts: deque[tuple[str, float, Any, Any]] = deque()  # that are not read yet
        self._waits_s: dict[str, float] = defaultdict(float)

    def begin(self, *, sample: bool) -> None:
        super().begin(sample=sample)
        if sample:
            self._sampled_in.append(self._blocks.last)

    def add_step(self, step_s: float, wait_s: float) -> None:
        self._blocks.end_step()

    def reset(self) -> None:
        super().reset()
        self._blocks, self._fast = _Blocks(), FastTimes()
        self._sampled_in.clear()

    def compute_step_seconds(self, *, replayed: bool = False) -> dict[str, float]:
        steps = sum(block.steps for block in self._blocks.all)
        if replayed or not steps:
            return {}
        phase_s: dict[str, float] = defaultdict(float)
        timed = 0  # steps of blocks of which some were sampled: they stand for the others
        for block in self._blocks.all:
            timed += block.steps if block.sampled else 0
            for phase, seconds in block.phase_s.items():
                phase_s[phase] += seconds / block.sampled * block.steps
        return {phase: seconds / timed for phase, seconds in phase_s.items()} if timed else {}

    def compute_step_s(self) -> float:
        """Return the seconds of all steps together, by those that were sampled."""
        steps = sum(block.steps for block in self._blocks.all)
        return steps * sum(self.compute_step_seconds().values())

    def count_sampled_steps(self) -> int | None:
        return self._blocks.count_sampled_steps()

    def compute_fast_step_s(self) -> float | None:
        return self._fast.compute_seconds()

    def begin_part(self) -> None:
        self._part_began = self._record_event()

    def end_part(self, part: str, host_s: float) -> None:
        if self._part_began is not None:
            self._parts.append((part, host_s, self._part_began, self._record_event()))
            self._part_began = None

    def collect(self) -> None:
        super().collect()
        self._fast.count()
        while self._parts and self._parts[0][-1].query():
            part, host_s, begin, end = self._parts.popleft()
            self._waits_s[part] += host_s - begin.elapsed_time(end) / 1000

    def compute_waits_s(self) -> dict[str, float]:
        return self._waits_s

    def compute_error_pct(self) -> float | None:
        return self._blocks.compute_error_pct(
            self.compute_step_s(),
            lambda block: block.steps * block.within_s / max(block.sampled, 1),
        )

    def _add_sample(self, times: dict[str, float]) -> None:
        block = self._sampled_in.popleft()
        if times:
            block.add_sample(times)
            self._fast.add(sum(times.values()))


def make_sampled_clock(device: torch.device) -> SampledClock:
    """Return the clock that measures correctly on this device, in a loop of which some steps are
    marked."""
    return SampledHostClock() if device.type == "cpu" else SampledEventClock(device)
