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
DRAWS = 20_000  # for a power: its difference is then known to about one part in a hundred

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Noise:
    """What the runs of a group of one are taken to vary by, where no group has two."""

    deviation: float
    freedom: float = MANY


@dataclass(frozen=True)
class _Pairs:
    """What is known of the noise of each pair's two groups: numbers of runs, variances and their
    degrees of freedom; and the noise that all groups share, where they do."""

    count: tuple[Any, Any]
    variance: tuple[Any, Any]
    freedom: tuple[Any, Any]
    shared: Any = None
    of_shared: float = 0.0

    def find_own_errors(self) -> tuple[tuple[Matrix, Matrix], tuple[Matrix, Matrix]]:
        """Return two standard errors of the difference by the pair's own noise, each with its
        degrees of freedom; a difference has to pass by both.

        Of as many runs both are Student's, which unequal noises hardly disturb. Of different
        numbers the first is Welch's; where the fewer runs are the noisier ones, and lie together
        by luck, that is too small. So the second is Student's of as many runs as the fewer are.
        """
        (n1, n2), (v1, v2), (f1, f2) = self.count, self.variance, self.freedom
        both, fewer = v1 / n1 + v2 / n2, np.minimum(n1, n2)
        with np.errstate(divide="ignore", invalid="ignore"):
            welch = both**2 / ((v1 / n1) ** 2 / f1 + (v2 / n2) ** 2 / f2)
        is_even, is_single = (n1 == n2) & (fewer > 1), fewer == 1
        own = np.sqrt(both), np.where(is_even, f1 + f2, welch)
        evened = np.sqrt((v1 + v2) / fewer), np.where(is_even, f1 + f2, 2.0 * (fewer - 1))
        second = (np.where(is_single, a, b) for a, b in zip(own, evened, strict=True))
        return own, (next(second), next(second))

    def find_error(self) -> tuple[Matrix, Matrix]:
        """Return the standard error by which the pairs of a family are tested, and its freedom."""
        if self.shared is None:
            return self.find_own_errors()[0]
        error: Matrix = np.sqrt(self.shared * (1 / self.count[0] + 1 / self.count[1]))
        return error, np.full_like(error, self.of_shared)

    def compute_reach(self, level: Any) -> Matrix:
        """Return how large a difference has to be, to be told at this level in its family."""
        error, freedom = self.find_error()
        reach = _compute_quantile(level, freedom) * error
        for own, of_own in self.find_own_errors():
            reach = np.maximum(reach, _compute_quantile(np.full_like(own, ALPHA), of_own) * own)
        return reach

    def draw_again(self, at: int, draw: np.random.Generator, count: int) -> _Pairs:
        """Return what so many repetitions of that pair would find of a noise that is as found."""

        def draw_variance(true: float, freedom: float) -> Any:
            if freedom >= MANY:
                return np.full(count, true)
            return true * draw.chisquare(freedom, count) / freedom if freedom > 0 else 0.0

        numbers = tuple(float(of[at]) for of in self.count)
        freedom = tuple(float(of[at]) for of in self.freedom)
        if self.shared is None:
            drawn = [
                draw_variance(float(v[at]), f) for v, f in zip(self.variance, freedom, strict=True)
            ]
            return _Pairs(numbers, (drawn[0], drawn[1]), freedom)  # type: ignore[arg-type]
        own = [n - 1 for n in numbers]
        drawn = [draw_variance(self.shared, f) for f in own]
        rest = self.of_shared - sum(own)
        shared = sum(f * v for f, v in zip(own, drawn, strict=True))
        shared = (shared + rest * draw_variance(self.shared, rest)) / self.of_shared
        drawn = [v if f else shared for f, v in zip(own, drawn, strict=True)]
        of_own = tuple(f or self.of_shared for f in own)
        return _Pairs(numbers, (drawn[0], drawn[1]), of_own, shared, self.of_shared)  # type: ignore[arg-type]


@dataclass(frozen=True)
class PairTests:
    """Of each pair how far the first mean lies above the second, with an interval that holds the
    truth for all pairs of the family together, 19 times of 20; and whether it leaves out 0."""

    difference: Matrix
    low: Matrix
    high: Matrix
    is_told: NDArray[np.bool_]
    pairs: _Pairs

    @property
    def deviation(self) -> float:
        """Return the standard deviation of a run, of the noisiest group."""
        return float(np.sqrt(max(np.max(v) for v in self.pairs.variance)))

    def find_told_difference(self, power: float, *, least: float = 0.0) -> float:
        """Return the true difference that would be told with this probability, of any pair, if the
        noise is as it was found and no other groups differ.

        least: differences below it are never told. It is found by drawing what the runs of the pair
        that is seen worst would come to, a fixed number of times.
        """
        level = ALPHA / len(self.pairs.count[0])
        worst = int(np.argmax(self.pairs.compute_reach(np.full(len(self.pairs.count[0]), level))))
        draw = np.random.default_rng(0)
        drawn = self.pairs.draw_again(worst, draw, DRAWS)
        reach = np.maximum(drawn.compute_reach(np.full(DRAWS, level)), least)
        error = np.sqrt(
            sum(
                float(v[worst] / n[worst])
                for v, n in zip(self._find_true_variances(), self.pairs.count, strict=True)
            )
        )
        return float(np.quantile(reach - error * draw.standard_normal(DRAWS), power))

    def _find_true_variances(self) -> tuple[Any, Any]:
        if self.pairs.shared is None:
            return self.pairs.variance
        same = np.full_like(self.pairs.variance[0], self.pairs.shared)
        return same, same


def compare_all_pairs(
    groups: Sequence[Sequence[float]], *, floor: float, assumed: float | Sequence[Noise]
) -> PairTests:
    """Return the tests of all pairs of groups; each group has a value at least.

    floor: the least standard deviation of a group, whatever its few values show: what one value
    may be off by rounding. assumed: the noise where no group has two values: one for all, or that
    of each group.

    The groups share one noise, estimated from all of them, unless Bartlett's test speaks against
    it: then each pair is tested by its own (Welch). Also with a shared noise, a pair has to differ
    by its own alone, at 5 %: two noisy groups among many quiet ones would pass otherwise.
    """
    count = np.array([len(values) for values in groups], dtype=float)
    mean = np.array([np.mean(values) for values in groups])
    first, second = np.triu_indices(len(groups), 1)
    variance, freedom, shared, of_shared = _estimate_noise(groups, floor=floor, assumed=assumed)
    pairs = _Pairs(
        (count[first], count[second]),
        (variance[first], variance[second]),
        (freedom[first], freedom[second]),
        shared,
        of_shared,
    )
    size = np.abs(mean[first] - mean[second])
    level, is_rejected = _apply_holm(_compute_p(size, *pairs.find_error()))
    far = pairs.compute_reach(level)
    is_told = is_rejected & (far < size)
    return _spread_over_matrix(mean, far, is_told, pairs)


def _estimate_noise(
    groups: Sequence[Sequence[float]], *, floor: float, assumed: float | Sequence[Noise]
) -> tuple[Matrix, Matrix, float | None, float]:
    """Return the variance of each group's runs and its degrees of freedom, and the shared ones; the
    shared variance is None where the groups share none."""
    freedom = np.array([len(values) - 1.0 for values in groups])
    variance = np.array([np.var(v, ddof=1) if len(v) > 1 else 0.0 for v in groups])
    variance = np.where(freedom > 0, np.maximum(variance, floor**2), 0.0)
    repeated = freedom > 0
    if not repeated.any():
        if isinstance(assumed, float):
            many = np.full(len(groups), MANY)
            return np.full(len(groups), assumed**2), many, assumed**2, MANY
        taken = np.array([noise.deviation**2 for noise in assumed])
        return taken, np.array([noise.freedom for noise in assumed]), None, 0.0
    of_shared = float(freedom.sum())
    shared = float((freedom * variance).sum() / of_shared)
    is_shared = _test_bartlett(variance[repeated], freedom[repeated]) >= UNEQUAL
    # Of a group with one run nobody knows the noise: it is taken to be the largest there is.
    noisiest = int(np.argmax(variance))
    own = np.where(repeated, variance, shared if is_shared else variance[noisiest])
    of_own = np.where(repeated, freedom, of_shared if is_shared else freedom[noisiest])
    return own, of_own, shared if is_shared else None, of_shared


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


def _compute_quantile(level: Matrix, freedom: Matrix) -> Matrix:
    """Return how many standard errors the interval of this level reaches to either side."""
    from scipy.special import stdtrit

    quantile: Matrix = -stdtrit(freedom, level / 2)
    return quantile


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
    mean: Matrix, far: Matrix, is_told: NDArray[np.bool_], pairs: _Pairs
) -> PairTests:
    reach, is_different = (
        np.zeros((len(mean), len(mean))),
        np.zeros((len(mean), len(mean)), dtype=bool),
    )
    first, second = np.triu_indices(len(mean), 1)
    reach[first, second] = reach[second, first] = far
    is_different[first, second] = is_different[second, first] = is_told
    difference = mean[:, None] - mean[None, :]
    return PairTests(difference, difference - reach, difference + reach, is_different, pairs)
