"""What the tests of a page find and where they cry wolf, on made-up runs that go the way of real
ones; the intervals against scipy's."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.compare_pages import ROWS, Row, measure_share
from headroom.comparison.pairwise_tests import ALPHA, Noise, PairTests, compare_all_pairs

PAGES, FEW = 400, 100  # of what is rare, and of what is the rule


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_a_page_tells_what_is_so_and_nothing_that_is_chance(row: Row) -> None:
    """By the range of the runs equal settings were slower on 65 % of pages, and a true 10 % were
    told the less the more runs there were."""
    share = measure_share(row, PAGES if 0 < row.high < 1 else FEW, seed=1)
    assert row.low <= share <= row.high, f"{share:.1%} of pages; {row.must}"


def test_of_two_groups_it_is_students_test() -> None:
    draw = np.random.default_rng(0)
    for count in (2, 3, 10):
        a, b = draw.normal(1, 0.1, count), draw.normal(1.1, 0.1, count)
        tests = compare_all_pairs([a, b], floor=0.0, assumed=0.0)
        known = stats.ttest_ind(a, b)
        low, high = known.confidence_interval(1 - ALPHA)
        assert (tests.low[0, 1], tests.high[0, 1]) == pytest.approx((low, high))
        assert tests.is_told[0, 1] == (known.pvalue < ALPHA)


def test_of_unequal_noises_it_is_welchs_test() -> None:
    """Two noisy settings among quiet ones were tested by the noise of those."""
    draw = np.random.default_rng(1)
    quiet, noisy = draw.normal(1, 0.001, 9), draw.normal(1.1, 0.2, 6)
    tests = compare_all_pairs([quiet, noisy], floor=0.0, assumed=0.0)
    low, high = stats.ttest_ind(quiet, noisy, equal_var=False).confidence_interval(1 - ALPHA)
    assert (tests.low[0, 1], tests.high[0, 1]) == pytest.approx((low, high))


def test_more_pairs_widen_the_intervals_of_all() -> None:
    pair = [[1.0, 1.1, 1.2], [2.0, 2.1, 2.2]]
    two = compare_all_pairs(pair, floor=0.0, assumed=0.0)
    five = compare_all_pairs([*pair, *[[3.0, 3.1, 3.2]] * 3], floor=0.0, assumed=0.0)
    assert five.is_told[0, 1] and not five.is_told[2, 3]
    assert two.high[0, 1] - two.low[0, 1] < five.high[2, 3] - five.low[2, 3]


def test_of_single_runs_the_noise_is_assumed_and_of_equal_ones_floored() -> None:
    single = compare_all_pairs([[1.0], [1.2]], floor=0.0, assumed=0.05)
    assert single.high[0, 1] + 0.2 == pytest.approx(1.96 * 0.05 * 2**0.5, rel=0.01)
    equal = [[1.0] * 5, [1.01] * 5]
    assert compare_all_pairs(equal, floor=0.005, assumed=0.0).is_told[0, 1]
    assert not compare_all_pairs(equal, floor=0.05, assumed=0.0).is_told[0, 1]


@pytest.mark.parametrize("counts", [(2, 2), (3, 3), (2, 15), (3,) * 8])
def test_a_difference_of_the_size_that_is_named_is_told_four_times_of_five(
    counts: tuple[int, ...],
) -> None:
    draw = np.random.default_rng(2)

    def find(values: list[np.ndarray]) -> PairTests:
        return compare_all_pairs([list(of) for of in values], floor=1e-4, assumed=0.05)

    known = [draw.normal(size=count) for count in counts]  # of a noise of 3 %, to the last digit
    known = [0.03 * (of - of.mean()) / of.std(ddof=1) for of in known]
    size = find(known).find_told_difference(0.8)
    told = 0
    for _ in range(1000):
        drawn = [draw.normal(0, 0.03, count) for count in counts]
        drawn[0] += size
        told += bool(find(drawn).is_told[0, 1])
    assert told / 1000 == pytest.approx(0.8, abs=0.04)


def test_the_difference_that_is_named_for_single_runs_is_that_of_their_own_noise() -> None:
    draw, noises = np.random.default_rng(2), (Noise(0.15, 4.0), Noise(0.1, 3.0))
    size = compare_all_pairs([[0.0], [0.0]], floor=1e-4, assumed=noises).find_told_difference(0.8)
    told = 0
    for _ in range(1000):
        seen = [
            Noise(n.deviation * (draw.chisquare(n.freedom) / n.freedom) ** 0.5, n.freedom)
            for n in noises
        ]
        pair = [[draw.normal(size, 0.15)], [draw.normal(0, 0.1)]]
        told += bool(compare_all_pairs(pair, floor=1e-4, assumed=seen).is_told[0, 1])
    assert told / 1000 == pytest.approx(0.8, abs=0.04)
