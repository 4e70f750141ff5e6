"""Contenders measured in turns, and what their figures come to: neighbours in time share the
machine's weather, so that the ratio of two is taken turn by turn, and its median over the turns.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")


def in_turns(
    runs: Mapping[K, Callable[[], T]], rounds: int, *, warm_up: bool = True
) -> dict[K, list[T]]:
    """What each run returned in each of `rounds` turns; every other turn goes backwards, so that
    nobody always follows the same neighbour. warm_up: one more turn before, which does not count.
    """
    found: dict[K, list[T]] = {name: [] for name in runs}
    for turn in range(-1 if warm_up else 0, rounds):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            gc.collect()
            got = runs[name]()
            if turn >= 0:
                found[name].append(got)
    return found


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median over the turns of above / below."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def spread(values: Sequence[float], *, digits: int) -> str:
    """Median, then least to most, as two cells of a table."""
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return f"{statistics.median(values):.{digits}f} | {low} to {high}"
