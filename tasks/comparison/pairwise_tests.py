"""Tests which of several groups of values differ by more than chance: every pair of them, by the
t-test, and of a family of pairs at most one page in twenty tells any difference that is none (Holm
1979). It assumes that runs are independent and their noise is about normal; an outlier widens the
intervals, so that less is told.

How many values a group has changes what can be seen, not how often chance is told as a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALPHA = 0.05  # of all pairs of a family together
UNEQUAL = 0.05  # of Bartlett's test, below which the groups do not share one noise
MANY = 1e6  # degrees of freedom of a noise that is assumed: t is normal then

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class PairTests:
    """Of each pair how far the first mean lies above the second, with an interval that holds the
    truth for all pairs of the family together, 19 times of 20; and whether it leaves out 0."""

    difference: Matrix
    low: Matrix
    high: Matrix
    is_told: NDArray[np.bool_]


def compare_all_pairs(
    groups: Sequence[Sequence[float]], *, floor: float, assumed: float
) -> PairTests:
    """Return the tests of all pairs of groups; each group has a value at least.

    floor: the least standard deviation of a group, whatever its few values show: what one value
    may be off by rounding. assumed: that of a run where no group has two.

    The groups share one noise, estimated from all of them, unless Bartlett's test speaks against
    it: then each pair is tested by its own (Welch). Also with a shared noise, a pair has to differ
    by its own alone, at 5 %: two noisy groups among many quiet ones would pass otherwise.
    """
    count = np.array([len(values) for values in groups])
    mean = np.array([np.mean(values) for values in groups])
    freedom = (count - 1).astype(float)
    variance = np.array([np.var(v, ddof=1) if len(v) > 1 else 0.0 for v in groups])
    variance = np.where(freedom > 0, np.maximum(variance, floor**2), 0.0)
    repeated = freedom > 0
    first, second = np.triu_indices(len(groups), 1)
    if not repeated.any():
        shared, of_shared, is_shared = assumed**2, MANY, True
    else:
        of_shared = freedom.sum()
        shared = (freedom * variance).sum() / of_shared
        is_shared = _test_bartlett(variance[repeated], freedom[repeated]) >= UNEQUAL
    # Of a group with one run nobody knows the noise: it is taken to be the largest there is.
    noisiest = int(np.argmax(variance))
    own = np.where(repeated, variance, shared if is_shared else variance[noisiest])
    of_own = np.where(repeated, freedom, of_shared if is_shared else freedom[noisiest])
    size = np.abs(mean[first] - mean[second])
    own_error, own_freedom = _combine(own / count, of_own, count, first, second)
    error, all_freedom = own_error, own_freedom
    if is_shared:
        error = np.sqrt(shared * (1 / count[first] + 1 / count[second]))
        all_freedom = np.full(len(first), of_shared)
    level, is_rejected = _apply_holm(_compute_p(size, error, all_freedom))
    far = _compute_reach(level, all_freedom) * error
    far_alone = _compute_reach(np.full(len(first), ALPHA), own_freedom) * own_error
    is_told = is_rejected & (far_alone < size)
    return _spread_over_matrix(mean, first, second, np.maximum(far, far_alone), is_told)


def _combine(
    part: Matrix, freedom: Matrix, count: Any, first: Any, second: Any
) -> tuple[Matrix, Matrix]:
    """Return the standard errors of the pairs by their own noise, and their degrees of freedom.

    Of as many runs each Student's, which unequal noises hardly disturb; else Welch's.
    """
    both = part[first] + part[second]
    with np.errstate(divide="ignore", invalid="ignore"):
        welch = both**2 / (part[first] ** 2 / freedom[first] + part[second] ** 2 / freedom[second])
    is_even = count[first] == count[second]
    return np.sqrt(both), np.where(is_even, freedom[first] + freedom[second], welch)


def _test_bartlett(variance: Matrix, freedom: Matrix) -> float:
    """Return how likely variances of equal noises lie as far apart as these (Bartlett 1937)."""
    from scipy.special import chdtrc

    if len(variance) < 2 or not (variance > 0).all():
        return 1.0
    all_freedom = freedom.sum()
    pooled = (freedom * variance).sum() / all_freedom
    statistic = all_freedom * np.log(pooled) - (freedom * np.log(variance)).sum()
    groups = len(variance) - 1
    correction = 1 + ((1 / freedom).sum() - 1 / all_freedom) / (3 * groups)
    return float(chdtrc(groups, max(statistic, 0.0) / correction))


def _compute_p(size: Matrix, error: Matrix, freedom: Matrix) -> Matrix:
    from scipy.special import stdtr

    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(size > 0, 2 * stdtr(freedom, -size / error), 1.0)


def _compute_reach(level: Matrix, freedom: Matrix) -> Matrix:
    """Return how many standard errors the interval of this level reaches to either side."""
    from scipy.special import stdtrit

    reach: Matrix = -stdtrit(freedom, level / 2)
    return reach


def _apply_holm(p: Matrix) -> tuple[Matrix, NDArray[np.bool_]]:
    """Return the level at which each pair was tested, and whether it passed: the least p first,
    until one does not."""
    order = np.argsort(p, kind="stable")
    levels = ALPHA / np.arange(len(p), 0, -1)
    is_beyond = p[order] > levels
    stop = int(np.argmax(is_beyond)) if is_beyond.any() else len(p)
    level, is_rejected = np.empty(len(p)), np.zeros(len(p), dtype=bool)
    level[order] = levels[np.minimum(np.arange(len(p)), max(stop, 0))] if len(p) else levels
    is_rejected[order[:stop]] = True
    return level, is_rejected


def _spread_over_matrix(
    mean: Matrix, first: Any, second: Any, far: Matrix, is_told: NDArray[np.bool_]
) -> PairTests:
    reach, told = np.zeros((len(mean), len(mean))), np.zeros((len(mean), len(mean)), dtype=bool)
    reach[first, second] = reach[second, first] = far
    told[first, second] = told[second, first] = is_told
    difference = mean[:, None] - mean[None, :]
    return PairTests(difference, difference - reach, difference + reach, told)
