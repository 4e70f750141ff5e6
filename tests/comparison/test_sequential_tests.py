"""What is kept, discarded and refused of made-up runs, and how often luck is kept."""

import math
from random import Random

import pytest
from scipy import stats

from benchmarks.referee import ROWS, SEED, keep_lower_than_best, play_night
from headroom.comparison import sequential_tests
from headroom.comparison.sequential_tests import (
    LEAST_KEEP_RUNS,
    MOST_RUNS,
    Goal,
    Judgement,
    Measurement,
    NextRun,
    PooledVariance,
    RunsNeeded,
    check_not_worse,
    choose_next_run,
    compute_normal_score,
    estimate_difference,
    forecast_runs,
    judge,
    measure_base_noise,
    measure_candidate_noise,
)

LEVEL = 1e-3
LOSS = Goal()
BASE = [1.02, 0.99, 1.0, 0.98, 1.01, 1.0]  # a standard deviation of 0.014
NIGHTS = 60


def make_runs(*values: float, begin: int = 0) -> list[Measurement]:
    return [Measurement(value, at, float(at)) for at, value in enumerate(values, begin)]


def judge_values(*values: float, base: list[float] = BASE, goal: Goal = LOSS) -> Judgement:
    return judge(make_runs(*base), make_runs(*values), goal=goal, level=LEVEL)


def test_a_plainly_worse_candidate_ends_after_one_run() -> None:
    assert judge_values(1.05).verdict == "discard"


def test_a_few_good_runs_are_never_kept_however_good() -> None:
    """Lower than the best so far was."""
    noise = PooledVariance(0.014**2 * 200, 200)
    for count in range(1, LEAST_KEEP_RUNS + 1):
        runs = make_runs(*[0.8, 0.81, 0.8, 0.79][:count])
        judgement = judge(make_runs(*BASE * 2), runs, goal=LOSS, level=LEVEL, earlier=noise)
        assert judgement.p_value < LEVEL
        assert judgement.verdict == ("keep" if count == LEAST_KEEP_RUNS else "undecided")


def test_a_clear_gain_is_kept_with_its_interval() -> None:
    judgement = judge_values(0.95, 0.94, 0.955, 0.945, 0.95)
    assert judgement.verdict == "keep" and judgement.p_value < LEVEL
    found = judgement.difference
    assert found is not None
    assert found.gain == pytest.approx(0.052) and 0 < found.low < 0.052 < found.high


def test_a_look_without_the_one_before_is_no_easier_to_pass() -> None:
    """Its line was nearer by all the runs at once."""
    base, runs = make_runs(*BASE * 2), make_runs(0.97, 0.965, 0.975, 0.97, 0.968)
    before = judge(base, runs[:-1], goal=LOSS, level=LEVEL).information
    after = judge(base, runs, goal=LOSS, level=LEVEL, information=before).p_value
    assert judge(base, runs, goal=LOSS, level=LEVEL).p_value == pytest.approx(after, rel=0.3)


def test_runs_of_seeds_that_the_base_lacks_wait_for_it() -> None:
    base, runs = make_runs(*BASE), make_runs(*BASE)
    others = [*runs, Measurement(0.1, seed=99, time_s=99.0)]
    goal = Goal(design="paired")
    assert judge(base, others, goal=goal, level=LEVEL) == judge(base, runs, goal=goal, level=LEVEL)


def test_a_smaller_level_needs_more() -> None:
    base, runs = make_runs(*BASE * 2), make_runs(0.97, 0.965, 0.975, 0.97, 0.968)
    p_value = judge(base, runs, goal=LOSS, level=0.5).p_value
    assert judge(base, runs, goal=LOSS, level=p_value * 1.01).verdict == "keep"
    assert judge(base, runs, goal=LOSS, level=p_value * 0.99).verdict == "undecided"


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize("values", [(1.05,), (0.99,), (0.95, 0.94, 0.955, 0.945)])
def test_higher_is_better_is_the_mirror(scale: str, values: tuple[float, ...]) -> None:
    def mirror(value: float) -> float:
        return -value if scale == "linear" else 1 / value

    low = judge_values(*values, goal=Goal("min", scale))  # type: ignore[arg-type]
    base = [mirror(value) for value in BASE]
    high = judge_values(*map(mirror, values), base=base, goal=Goal("max", scale))  # type: ignore[arg-type]
    assert low.verdict == high.verdict and low.difference is not None
    assert high.p_value == pytest.approx(low.p_value)
    assert high.difference is not None
    assert high.difference.low == pytest.approx(low.difference.low)


def test_a_run_that_diverged_discards_the_candidate_and_is_no_base() -> None:
    for value in (math.nan, math.inf, -math.inf):
        judgement = judge_values(0.9, value)
        assert judgement.verdict == "discard" and str(value) in judgement.reason
        with pytest.raises(ValueError, match="a base needs finite figures"):
            judge_values(1.0, base=[1.0, value])


def test_what_cannot_be_judged_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"level: 1\.0 is no probability"):
        judge(make_runs(*BASE), make_runs(1.0), goal=Goal(), level=1.0)
    for goal, match in (
        (Goal(design="paired"), "one of the candidate like it"),
        (Goal(design="interleaved"), "time_s: an interleaved base needs runs in order"),
    ):
        base, runs = [Measurement(1.0, 1), Measurement(1.1, 2)], [Measurement(1.0, 3)]
        with pytest.raises(ValueError, match=match):
            estimate_difference(base, runs, goal=goal)
    with pytest.raises(ValueError, match="margin: -0.1; not worse needs a margin above 0"):
        check_not_worse(estimate_difference(make_runs(*BASE), make_runs(1.0), goal=LOSS), -0.1)
    with pytest.raises(ValueError, match="scale: log needs a figure above 0, not 0"):
        judge_values(0.0, goal=Goal(scale="log"))
    with pytest.raises(ValueError, match="resolution: a figure with steps"):
        Goal(scale="log", resolution=0.1)


def test_runs_that_never_vary_are_equal_or_beyond_judgement() -> None:
    pairs = Goal(design="paired")
    assert judge_values(*[1.0] * 4, base=[1.0] * 4).verdict == "discard"
    refused = judge_values(0.5, 1.5, 2.5, 3.5, base=[1.0, 2.0, 3.0, 4.0], goal=pairs)
    assert refused.verdict == "refused" and "Give the resolution" in refused.reason


def test_equal_accuracies_have_the_noise_of_a_step_at_least() -> None:
    """Of runs that all came out equal every difference was certain."""
    base, goal = [0.95] * 6, Goal("max")
    assert judge_values(*[0.96] * 4, base=base, goal=goal).verdict == "undecided"
    assert judge_values(*[0.96] * 8, base=[0.95] * 13, goal=goal).verdict == "keep"
    finer = Goal("max", resolution=0.001)
    assert judge_values(*[0.96] * 4, base=base, goal=finer).verdict == "keep"
    coarser = Goal("max", resolution=0.1)
    assert judge_values(*[0.96] * 4, base=base, goal=coarser).verdict == "discard"


def test_a_gain_that_one_run_carries_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one run in ten is off by far, it is luck."""
    monkeypatch.setattr(sequential_tests, "UNEQUAL", 0.0)  # which would widen its noise
    monkeypatch.setattr(sequential_tests, "LEAST_UNEQUAL", 0.0)
    base, noise = make_runs(*BASE * 3), PooledVariance(0.014**2 * 200, 200)

    def find(*values: float) -> Judgement:
        return judge(base, make_runs(*values), goal=LOSS, level=LEVEL, earlier=noise)

    lucky = find(0.99, 0.99, 0.86, 0.99)
    assert lucky.verdict == "undecided" and "A single run carries" in lucky.reason
    assert lucky.p_value < LEVEL
    assert find(0.96, 0.955, 0.96, 0.955).verdict == "keep", "of the same mean"
    monkeypatch.setattr(sequential_tests, "MOST_RUNS", 4)
    assert find(0.99, 0.99, 0.86, 0.99).verdict == "refused", "no more runs are to come"


def test_a_candidate_of_which_the_runs_show_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequential_tests, "MOST_RUNS", 3)
    judgement = judge_values(0.985, 0.98, 0.985)
    assert judgement.verdict == "discard" and judgement.reason == "3 runs show no gain."
    assert judge_values(0.985, 0.98).verdict == "undecided"


def test_a_base_that_drifts_is_refused() -> None:
    draw = Random(0)
    base = make_runs(*[1 - 0.02 * at + draw.gauss(0, 0.01) for at in range(12)])
    runs = make_runs(*[0.5 + draw.gauss(0, 0.01) for _ in range(5)], begin=12)
    judgement = judge(base, runs, goal=Goal(), level=LEVEL)
    assert judgement.verdict == "refused" and "drift with time" in judgement.reason
    assert judge(base, runs, goal=Goal(design="interleaved"), level=LEVEL).verdict == "keep"


def test_a_machine_that_got_faster_makes_no_gain_where_runs_are_interleaved() -> None:
    draw = Random(1)
    values = [10 - 0.5 * at + draw.gauss(0, 0.05) for at in range(20)]
    runs = make_runs(*values)
    base, candidate = [*runs[:4], *runs[5::2]], runs[4::2]
    judgement = judge(base, candidate, goal=Goal(design="interleaved"), level=LEVEL)
    assert judgement.verdict != "keep" and judgement.difference is not None
    assert abs(judgement.difference.gain) < 0.1
    apart = judge(runs[:10], runs[10:], goal=Goal(), level=LEVEL)
    assert apart.difference is not None and apart.difference.gain > 4


def test_pairs_of_one_seed_see_what_the_seeds_would_hide() -> None:
    draw = Random(2)
    effects = [draw.gauss(0, 1) for _ in range(8)]
    base = make_runs(*[effect + draw.gauss(0, 0.01) for effect in effects])
    runs = make_runs(*[effect - 0.1 + draw.gauss(0, 0.01) for effect in effects])
    assert judge(base, runs, goal=Goal(design="paired"), level=LEVEL).verdict == "keep"
    assert judge(base, runs, goal=Goal(), level=LEVEL).verdict != "keep"


def test_a_noisier_group_is_tested_by_its_own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quiet runs of others would lend it their noise."""
    noise = PooledVariance(0.014**2 * 50, 50)
    base, runs = make_runs(*BASE), make_runs(0.9, 0.96, 0.88, 0.97, 0.9, 0.94)

    def find() -> str:
        return judge(base, runs, goal=LOSS, level=LEVEL, earlier=noise).verdict

    assert find() == "undecided"
    monkeypatch.setattr(sequential_tests, "UNEQUAL", 0.0)
    monkeypatch.setattr(sequential_tests, "LEAST_UNEQUAL", 0.0)
    assert find() == "keep"


def test_a_base_with_one_bad_run_makes_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequential_tests, "UNEQUAL", 0.0)
    monkeypatch.setattr(sequential_tests, "LEAST_UNEQUAL", 0.0)
    noise = PooledVariance(0.014**2 * 2000, 2000)
    base, runs = make_runs(1.0, 0.99, 1.3, 1.01), make_runs(1.0, 1.001, 0.99, 1.01)
    judgement = judge(base, runs, goal=LOSS, level=LEVEL, earlier=noise)
    assert judgement.verdict == "undecided" and "A single run carries" in judgement.reason


def test_the_noise_of_pairs_is_half_that_of_their_differences() -> None:
    base, runs = make_runs(1.0, 5.0, 3.0), make_runs(0.9, 4.6, 2.9)
    noise = measure_candidate_noise(base, runs, goal=Goal(design="paired"))
    assert noise.variance == pytest.approx(stats.tvar([0.1, 0.4, 0.1]) / 2)
    assert noise.freedom == 2


def test_a_look_is_walds_ratio_on_the_information_of_the_pairs() -> None:
    """By hand: 3 pairs; 2 degrees of freedom of the base, of which half the noise is."""
    earlier = PooledVariance(0.04 * 1e6, 1e6)
    base, runs = make_runs(1.0, 2.0, 3.0), make_runs(0.8, 1.9, 2.7)
    judgement = judge(base, runs, goal=Goal(design="paired"), level=LEVEL, earlier=earlier)
    information, freedom = 3 / 2, 4 / (1 / 1e6 + 1 / 2)
    t = 0.2 / (0.2 / math.sqrt(information))
    score = stats.norm.isf(stats.t.sf(t, freedom))
    ratio = 1.8 * score * math.sqrt(information) - 1.8**2 * information / 2
    step = 0.583 * 1.8 * math.sqrt(information / 3)
    assert judgement.information == pytest.approx(information, rel=1e-5)
    assert judgement.p_value == pytest.approx(min(1.0, math.exp(-ratio - step)), rel=1e-4)


@pytest.mark.parametrize(
    ("design", "base", "candidate", "following"),
    [
        ("independent", [0, 1, 2], [], NextRun("base")),
        ("independent", [0, 1, 2, 3], [], NextRun("candidate")),
        ("independent", [0, 1, 2, 3], [4, 5], NextRun("candidate")),
        ("independent", [0, 1, 2, 3], [4, 5, 6], NextRun("base")),
        ("interleaved", [0, 1, 2, 3], [4], NextRun("base")),
        ("interleaved", [0, 1, 2, 3, 5], [4], NextRun("candidate")),
        ("paired", [], [], NextRun("base")),
        ("paired", [7], [], NextRun("candidate", 7)),
        ("paired", [7], [7], NextRun("base")),
        ("paired", [7, 3], [7], NextRun("candidate", 3)),
    ],
)
def test_the_next_run_is_of_the_one_that_lags(
    design: str, base: list[int], candidate: list[int], following: NextRun
) -> None:
    def make(seeds: list[int]) -> list[Measurement]:
        return [Measurement(1.0, seed, float(seed)) for seed in seeds]

    goal = Goal(design=design)  # type: ignore[arg-type]
    assert choose_next_run(make(base), make(candidate), goal=goal) == following


@pytest.mark.parametrize(
    ("level", "needed"),
    [(1e-3, RunsNeeded(3, 3)), (1e-4, RunsNeeded(5, 6)), (1e-5, RunsNeeded(6, 7))],
)
def test_the_runs_that_are_forecast_decide_where_the_gain_stays(
    level: float, needed: RunsNeeded
) -> None:
    noise, base = PooledVariance(0.014**2 * 2000, 2000), make_runs(*BASE)
    runs = make_runs(0.97, 0.971)
    now = judge(base, runs, goal=LOSS, level=level, earlier=noise)
    assert now.verdict == "undecided"
    assert forecast_runs(now, base, runs, goal=LOSS, level=level) == needed

    def look(more: int) -> str:
        tried = make_runs(0.97, 0.971, *[0.9705] * more)
        of_base = max(math.ceil(1 + 1.5 * len(tried)), len(BASE))
        grown = make_runs(*BASE, *[1.0] * (of_base - len(BASE)))
        return judge(grown, tried, goal=LOSS, level=level, earlier=noise).verdict

    assert look(needed.candidate - 1) == "undecided" and look(needed.candidate) == "keep"


def test_pairs_are_forecast_to_need_as_many_runs_of_the_base() -> None:
    noise, base = PooledVariance(0.014**2 * 2000, 2000), make_runs(*BASE)
    runs, goal = make_runs(0.99, 0.96), Goal(design="paired")
    now = judge(base, runs, goal=goal, level=LEVEL, earlier=noise)
    needed = forecast_runs(now, base, runs, goal=goal, level=1e-6)
    assert now.verdict == "undecided" and needed is not None
    assert needed.candidate > 4 and needed.base == needed.candidate - 4


def test_no_forecast_where_the_noise_is_not_known() -> None:
    base, runs = make_runs(1.0), make_runs(0.9)
    judgement = judge(base, runs, goal=Goal(), level=LEVEL)
    assert judgement.verdict == "undecided"
    assert forecast_runs(judgement, base, runs, goal=Goal(), level=LEVEL) is None


def test_noise_adds_up_to_the_pooled_variance() -> None:
    a, b = make_runs(1.0, 2.0, 4.0), make_runs(3.0, 3.5)
    noise = measure_base_noise(a, goal=Goal()) + measure_candidate_noise(a, b, goal=Goal())
    assert noise.freedom == 3
    assert noise.variance == pytest.approx((2 * stats.tvar([1, 2, 4]) + stats.tvar([3, 3.5])) / 3)


def test_the_degrees_of_freedom_of_runs_in_turns_are_those_that_they_vary_by() -> None:
    draw, goal = Random(5), Goal(design="interleaved")
    noises = [
        measure_base_noise(make_runs(*[draw.gauss(0, 1) for _ in range(6)]), goal=goal)
        for _ in range(5000)
    ]
    spread = stats.tvar([noise.variance for noise in noises])
    assert noises[0].freedom == pytest.approx(2 / spread, rel=0.1)


def test_noisier_pairs_count_for_both_of_their_runs() -> None:
    earlier = PooledVariance(0.01 * 1e6, 1e6)
    base, runs = make_runs(1.0, 2.0, 3.0, 4.0), make_runs(0.0, 2.5, 1.5, 4.5)
    goal = Goal(design="paired")
    judgement = judge(base, runs, goal=goal, level=LEVEL, earlier=earlier)
    own = measure_candidate_noise(base, runs, goal=goal).variance
    assert judgement.information == pytest.approx(4 / 2 * 0.01 / own, rel=1e-3)


def test_the_noise_of_runs_in_turns_leaves_a_slow_drift_out() -> None:
    draw = Random(3)
    runs = make_runs(*[0.1 * at + draw.gauss(0, 1) for at in range(400)])
    in_turns = measure_base_noise(runs, goal=Goal(design="interleaved"))
    assert in_turns.variance == pytest.approx(1, rel=0.2)
    assert measure_base_noise(runs, goal=Goal()).variance > 50


@pytest.mark.parametrize("freedom", [3, 10, 999])
@pytest.mark.parametrize("t", [-4.0, -0.3, 0.0, 2.0, 8.0])
def test_a_normal_score_is_as_probable_as_its_t(t: float, freedom: float) -> None:
    score = compute_normal_score(t, freedom)
    assert stats.norm.sf(score) == pytest.approx(stats.t.sf(t, freedom), rel=1e-6)


def test_an_interval_holds_at_all_looks_together() -> None:
    """A t interval at each look left the truth out for a quarter of candidates."""
    missed, fixed = 0, 0
    for seed in range(300):
        draw = Random(seed)
        base = make_runs(*[draw.gauss(0, 1) for _ in range(4)])
        runs: list[Measurement] = []
        is_missed, is_fixed = False, False
        for _ in range(MOST_RUNS):
            runs.append(Measurement(draw.gauss(0, 1)))
            base.append(Measurement(draw.gauss(0, 1)))
            found = estimate_difference(base, runs, goal=Goal())
            is_missed |= not found.low <= 0 <= found.high
            count = 1 / len(runs) + 1 / len(base)
            reach = stats.norm.isf(0.025) * found.deviation * math.sqrt(count)
            is_fixed |= abs(found.gain) > reach
        missed, fixed = missed + is_missed, fixed + is_fixed
    assert missed / 300 <= 0.05 < 0.15 < fixed / 300


def test_an_interval_narrows_to_the_truth() -> None:
    draw = Random(4)
    base = make_runs(*[draw.gauss(5, 1) for _ in range(2000)])
    runs = make_runs(*[draw.gauss(3, 1) for _ in range(2000)])
    found = estimate_difference(base, runs, goal=Goal())
    assert 1.8 < found.low < 2 < found.high < 2.2
    wider = estimate_difference(base, runs, goal=Goal(), alpha=0.001)
    assert wider.low < found.low and wider.high > found.high


def test_a_difference_of_figures_that_never_vary_is_known() -> None:
    """Peaks of memory are, where nothing else runs."""
    found = estimate_difference(make_runs(100, 100), make_runs(90, 90), goal=Goal())
    assert (found.low, found.gain, found.high, found.deviation) == (10, 10, 10, 0)
    single = estimate_difference(make_runs(100), make_runs(90), goal=Goal())
    assert (single.low, single.gain, single.high) == (-math.inf, 10, math.inf)
    with pytest.raises(ValueError, match="needs a run of the base and one of the candidate"):
        estimate_difference([], make_runs(90), goal=Goal())


def test_not_worse_holds_fails_or_is_unclear_by_the_interval() -> None:
    speed, goal = [1000.0, 1004.0, 998.0, 1001.0, 999.0, 1002.0], Goal("max", "log")

    def check(times: float, count: int = 6) -> str:
        runs = make_runs(*[value * times for value in speed[:count]])
        return check_not_worse(estimate_difference(make_runs(*speed), runs, goal=goal), 0.02)

    assert check(1.0) == "holds" and check(1.1) == "holds"
    assert check(0.9) == "fails"
    assert check(0.98) == "unclear"


@pytest.mark.parametrize("row", [0, 1, 2], ids=lambda at: ROWS[at].what)
def test_a_night_keeps_gains_and_no_luck(row: int) -> None:
    """The bars of benchmarks.referee, with room for 60 nights: 5 % of nights are 3, 9 of them
    happen once in 1,500 times."""
    nights = [play_night(ROWS[row], seed) for seed in range(SEED, SEED + NIGHTS)]
    assert sum(night.false > 0 for night in nights) <= 5
    kept = sum(night.kept for night in nights) / (10 * NIGHTS)
    assert kept >= (0, 0.86, 0.97)[row]
    assert sum(night.runs for night in nights) / (100 * NIGHTS) <= 3.2


def test_lower_than_the_best_keeps_luck_in_most_nights() -> None:
    nights = [keep_lower_than_best(ROWS[0], seed) for seed in range(SEED, SEED + NIGHTS)]
    assert sum(night.false > 0 for night in nights) >= 55


@pytest.mark.parametrize(
    "what",
    [
        "one run in ten off by 5: null",
        "noise of Student's t, 3 degrees: null",
        "noisy",
        "steps of 2",
    ],
)
def test_a_night_of_another_noise_keeps_no_luck_either(what: str) -> None:
    row = next(row for row in ROWS if what in row.what)
    nights = [play_night(row, seed) for seed in range(SEED, SEED + NIGHTS)]
    assert sum(night.false > 0 for night in nights) <= 5


@pytest.mark.parametrize("design", ["paired", "interleaved"])
def test_a_night_of_another_design_keeps_gains_and_no_luck(design: str) -> None:
    row = next(row for row in ROWS if row.goal.design == design and row.gain)
    nights = [play_night(row, seed) for seed in range(SEED, SEED + 15)]
    assert sum(night.false > 0 for night in nights) <= 2
    assert sum(night.kept for night in nights) / (10 * 15) >= 0.7
