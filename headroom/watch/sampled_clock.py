"""The clock of a CPU for a loop in which marking each phase of each step would cost too much: the
time of every step and of its wait for a batch are known, and the phases within of the steps that
are sampled. These are scaled to the time of all steps of their part of the run, so that the phases
of a step sum to the step, and one that grows is not told by its beginning.
"""

from __future__ import annotations

from collections import defaultdict
from math import sqrt
from time import perf_counter

from headroom.watch.phases import HostClock

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


class SampledHostClock(HostClock):
    """Times all steps as wholes, and some phase by phase."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks = [_Block()]
        self._before = 0  # steps of all full blocks
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
        block = self._blocks[-1]
        block.steps += 1
        block.step_s += step_s
        block.wait_s += wait_s
        if self._phases:
            block.add_sample(self._phases)
            self._phases = {}
        if block.steps >= max(FIRST_BLOCK, self._before):
            self._before += block.steps
            self._blocks.append(_Block())

    def reset(self) -> None:
        super().reset()
        self._blocks, self._before, self._phases = [_Block()], 0, {}

    def compute_step_seconds(self, *, replayed: bool = False) -> dict[str, float]:
        steps = sum(block.steps for block in self._blocks)
        if replayed or not steps:
            return {}
        phase_s: dict[str, float] = defaultdict(float)
        wait_s = sum(block.wait_s for block in self._blocks)
        if wait_s:
            phase_s[WAIT] = wait_s
        left_s = 0.0  # of blocks of which no step was sampled
        for block in self._blocks:
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
        return sum(block.step_s for block in self._blocks)

    def count_sampled_steps(self) -> int | None:
        return sum(block.sampled for block in self._blocks)

    def compute_error_pct(self) -> float | None:
        whole_s = self.compute_step_s()
        phases = {phase for block in self._blocks for phase in block.phase_s}
        if not whole_s or not phases:
            return None
        return max(
            100
            * sqrt(
                sum(
                    ((block.step_s - block.wait_s) * block.compute_error(phase)) ** 2
                    for block in self._blocks
                )
            )
            / whole_s
            for phase in phases
        )
