"""How a run changes while it goes on: the time of its steps and the memory of its process, by a
slope that a few odd readings do not move, and how sure that slope is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from statistics import median
from typing import NamedTuple

MOST = 128  # readings that are kept; of more, neighbours become one
LEAST = 12  # readings, below which nothing is said
SURE = 2.576  # standard deviations: 99 % of the slopes of what does not change lie within


class Slope(NamedTuple):
    """A slope and the bounds between which it lies with 99 %."""

    value: float
    low: float
    high: float


class Growth(NamedTuple):
    """How a quantity has changed over the run, in its unit: by the slope, and at least; and what it
    was at the beginning."""

    change: float
    least: float
    first: float


def estimate_slope(xs: list[float], ys: list[float]) -> Slope | None:
    """Return the median of the slopes of all pairs, with bounds by the variance of Kendall's tau
    (Sen, Estimates of the regression coefficient based on Kendall's tau, 1968)."""
    count = len(xs)
    slopes = sorted(
        (ys[j] - ys[i]) / (xs[j] - xs[i])
        for i in range(count)
        for j in range(i + 1, count)
        if xs[j] > xs[i]
    )
    if not slopes:
        return None
    spread = SURE * sqrt(count * (count - 1) * (2 * count + 5) / 18)
    last = len(slopes) - 1
    low = max(0, round((len(slopes) - spread) / 2) - 1)
    high = min(last, round((len(slopes) + spread) / 2))
    return Slope(median(slopes), slopes[low], slopes[high])


@dataclass
class Trends:
    """The readings of one run."""

    # Of steps that followed each other: how many, their seconds and processor seconds.
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    # Step, MiB of the process, and what tensors took on the device.
    memory: list[tuple[int, float, float]] = field(default_factory=list)

    def add_steps(self, steps: int, wall_s: float, cpu_s: float) -> None:
        if not steps:
            return
        self.steps.append((steps, wall_s, cpu_s))
        if len(self.steps) > 2 * MOST:
            pairs = zip(self.steps[::2], self.steps[1::2], strict=False)
            rest = self.steps[len(self.steps) // 2 * 2 :]
            self.steps = [
                *((a + c, b + d, e + f) for (a, b, e), (c, d, f) in pairs),
                *rest,
            ]

    def add_memory(self, step: int, rss_mib: float, device_mib: float) -> None:
        self.memory.append((step, rss_mib, device_mib))
        if len(self.memory) > 2 * MOST:
            self.memory = self.memory[1::2]

    def compute_step_growth(self, *, by_processor: bool = False) -> Growth | None:
        """Return how the seconds of a step have changed; of its processor time where others have
        the cores."""
        done, xs, ys = 0, [], []
        for steps, wall_s, cpu_s in self.steps:
            xs.append(done + steps / 2)
            ys.append((cpu_s if by_processor else wall_s) / steps)
            done += steps
        return _compute_growth(xs, ys)

    def compute_memory_growth(self, *, of_device: bool = False) -> Growth | None:
        """Return how the MiB of the process, or of tensors on the device, have changed, once it was
        warm: the first fifth of the readings is left out. None also where it did not rise in
        seven of eight parts of the rest."""
        readings = self.memory[len(self.memory) // 5 :]
        if len(readings) < LEAST:
            return None
        steps = [float(step) for step, *_ in readings]
        sizes = [device_mib if of_device else rss_mib for _, rss_mib, device_mib in readings]
        marks = [sizes[i * (len(sizes) - 1) // 8] for i in range(9)]
        rises = sum(after > before for before, after in zip(marks, marks[1:], strict=False))
        return _compute_growth(steps, sizes) if rises >= 7 else None


def _compute_growth(xs: list[float], ys: list[float]) -> Growth | None:
    if len(xs) < LEAST:
        return None
    while len(xs) > MOST:  # as many pairs as are quickly sorted
        xs, ys = xs[::2], ys[::2]
    slope = estimate_slope(xs, ys)
    if slope is None:
        return None
    middle = median(y - slope.value * x for x, y in zip(xs, ys, strict=True))
    span = xs[-1] - xs[0]
    return Growth(slope.value * span, slope.low * span, middle + slope.value * xs[0])
