"""How a run changes while it goes on: the time of its steps and the memory of its process, by a
slope that a few odd readings do not move, and how sure that slope is.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import median
from typing import NamedTuple

MOST = 128  # readings that are kept; of more, neighbours become one
LEAST = 9  # readings, below which nothing is said
SURE = 2.576  # standard deviations: 99 % of the slopes of what does not change lie within


class Slope(NamedTuple):
    """A slope and the bounds between which it lies with 99 %."""

    value: float
    low: float
    high: float


class Growth(NamedTuple):
    """How a quantity has changed over the run, in its unit: by the slope, and at least; what it was
    at the beginning by the slope, and by the first reading where that is less."""

    change: float
    least: float
    first: float
    start: float


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


def select_rising(readings: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """Return the readings, of a step and a size, of memory that rises all the time: without the
    first fifth, in which a process gets warm. None of them where it does not rise in seven of eight
    parts of the rest: where caches fill, it is flat between some steps."""
    kept = readings[len(readings) // 5 :]
    if len(kept) < LEAST:
        return ()
    marks = [kept[at * (len(kept) - 1) // 8][1] for at in range(9)]
    rises = sum(after > before for before, after in zip(marks, marks[1:], strict=False))
    return kept if rises >= 7 else ()


class Trends:
    """The readings of one run, each of as long a part of it as the others."""

    def __init__(self) -> None:
        # Of steps that followed each other: how many, their seconds and processor seconds.
        self.steps: list[tuple[int, float, float]] = []
        # Step, MiB of the process, and what tensors took on the device.
        self.memory: list[tuple[int, float, float]] = []
        self._open: list[tuple[int, float, float]] = []  # readings that become one
        self._grain = 1  # of so many
        self._every, self._turn = 1, 0  # of memory, which is not added up

    def add_steps(self, steps: int, wall_s: float, cpu_s: float) -> None:
        """Add a reading of so many steps."""
        if not steps:
            return
        self._open.append((steps, wall_s, cpu_s))
        if len(self._open) < self._grain:
            return
        self.steps.append(_add_up(self._open))
        self._open.clear()
        if len(self.steps) >= 2 * MOST:
            self.steps = [_add_up(self.steps[at : at + 2]) for at in range(0, 2 * MOST, 2)]
            self._grain *= 2

    def add_memory(self, step: int, rss_mib: float, device_mib: float) -> None:
        """Add a reading at a step."""
        self._turn += 1
        if self._turn % self._every:
            return
        self.memory.append((step, rss_mib, device_mib))
        if len(self.memory) >= 2 * MOST:
            self.memory = self.memory[1::2]
            self._every *= 2

    def compute_step_growth(self, *, by_processor: bool = False) -> Growth | None:
        """Return how the seconds of a step have changed; of its processor time where others have
        the cores."""
        done, xs, ys = 0, [], []
        for steps, wall_s, cpu_s in self.steps:
            xs.append(done + steps / 2)
            ys.append((cpu_s if by_processor else wall_s) / steps)
            done += steps
        return compute_growth(xs, ys)

    def compute_memory_growth(self, *, of_device: bool = False) -> Growth | None:
        """Return how the MiB of the process, or of tensors on the device, have changed, once it was
        warm: the first fifth of the readings is left out. None also where it did not rise in
        seven of eight parts of the rest."""
        readings = [
            (step, device_mib if of_device else rss_mib)
            for step, rss_mib, device_mib in self.memory
        ]
        rising = select_rising(readings)
        return compute_growth([float(step) for step, _ in rising], [size for _, size in rising])


def _add_up(readings: list[tuple[int, float, float]]) -> tuple[int, float, float]:
    steps, wall_s, cpu_s = map(sum, zip(*readings, strict=True))
    return int(steps), wall_s, cpu_s


def compute_growth(xs: list[float], ys: list[float]) -> Growth | None:
    """Return how these readings have changed; None of too few."""
    if len(xs) < LEAST:
        return None
    while len(xs) > MOST:  # as many pairs as are quickly sorted
        xs, ys = xs[::2], ys[::2]
    slope = estimate_slope(xs, ys)
    if slope is None:
        return None
    middle = median(y - slope.value * x for x, y in zip(xs, ys, strict=True))
    span = xs[-1] - xs[0]
    first = middle + slope.value * xs[0]
    return Growth(slope.value * span, slope.low * span, first, min(first, ys[0]))
