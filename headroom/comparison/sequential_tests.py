"""Judges a candidate against its base after every run: keep, discard, or go on. For searches that
try many changes, where "lower than the best so far" would keep luck: of a null change the
probability of a keep is at most the level that it was given, however often it is looked at.

The test is Wald's sequential probability ratio test (Wald 1945) of a gain of DESIGN_GAIN standard
deviations of a run against none, on the information that base and candidate have together, as
group-sequential trials use it (Jennison & Turnbull 2000, chapters 3 and 11). The standard deviation
is that of all runs of a session, pooled. Scores for t and lines nearer by the overshoot are
approximations; what they hold is measured by benchmarks.referee.

It assumes independent runs with noise about normal; where that fails, a keep needs more than one
run that carries it, or is refused. Drift over time is only seen where it is strong, so figures of a
machine need the interleaved design.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Direction = Literal["min", "max"]
Scale = Literal["linear", "log"]
Design = Literal["independent", "paired", "interleaved"]
Verdict = Literal["keep", "discard", "undecided", "refused"]

ALPHA = 0.05  # of an interval, and of a whole session
# In standard deviations of a run. With MISS it was chosen on made runs: nine gains of 2 in ten are
# kept, for 3.2 runs of a candidate; of larger gains more, of those of 1 one in fourteen.
DESIGN_GAIN = 1.8
MISS = 0.1  # nominal probability that a gain of DESIGN_GAIN is discarded
OVERSHOOT = 0.583  # of a random walk over a line, in steps (Siegmund 1985, p. 50)
LEAST_BASE_RUNS = 4  # before a candidate is looked at: their noise has 3 degrees of freedom
BASE_SHARE = 1.5  # runs of the base for each of the candidate: the base is used again, so more
MOST_RUNS = 20  # of a candidate; what they cannot show is given up
LEAST_KEEP_RUNS = 4  # of a candidate, below which nobody knows if its own noise is larger
LEAST_SCORE = 3.0  # standard errors, without the run that speaks most for a keep
UNEQUAL = 0.01  # of the F test, below which a group has a noise of its own
LEAST_UNEQUAL = 0.2  # the same, for a keep: a few noisy runs may lie together by luck
DRIFT = 0.001  # of the test for a trend of the base's runs, below which they drift
MIXTURE = 4.0  # variance of the gains that an interval is tightest for, in variances of a run
KEPT = "The gain is beyond what chance does at the level of this candidate."
MANY = 1000.0  # degrees of freedom from which on t is normal


@dataclass(frozen=True)
class Measurement:
    """One run's figure, the seed that it was trained with, and when it ended, in seconds of any
    clock that all runs share."""

    value: float
    seed: int = 0
    time_s: float = 0.0


@dataclass(frozen=True)
class Goal:
    """What is judged: which direction is better, and by which design runs are compared.

    scale: "log" for losses and speeds, whose gains are then shares, as log(candidate / base).
    design: "independent" compares means, for scores with seeds of their own. "paired" compares
    runs of one seed, where seeds matter. "interleaved" compares each run of the candidate with the
    runs of the base nearest in time, for speeds, as a machine drifts.
    resolution: the least step of the figure, 1 / rows of an accuracy; 0 where it has none.
    """

    direction: Direction = "min"
    scale: Scale = "linear"
    design: Design = "independent"
    resolution: float = 0.0

    def __post_init__(self) -> None:
        if self.scale == "log" and self.resolution:
            raise ValueError("resolution: a figure with steps is judged on the linear scale")

    def score(self, value: float) -> float:
        """Return the figure on a scale where more is better.

        Raises ValueError for a figure that is not above 0 where its logarithm is taken.
        """
        if self.scale == "log" and value <= 0:
            raise ValueError(f"scale: log needs a figure above 0, not {value}; use linear")
        scaled = math.log(value) if self.scale == "log" else value
        return scaled if self.direction == "max" else -scaled


@dataclass(frozen=True)
class PooledVariance:
    """The variance of a run as sum of squares and degrees of freedom: what groups share of it can
    be added up."""

    sum_squares: float = 0.0
    freedom: float = 0.0

    @property
    def variance(self) -> float:
        """Return the variance of a run; 0 where no group has two runs."""
        return self.sum_squares / self.freedom if self.freedom else 0.0

    def __add__(self, other: PooledVariance) -> PooledVariance:
        return PooledVariance(self.sum_squares + other.sum_squares, self.freedom + other.freedom)


NO_NOISE = PooledVariance()  # of a session without earlier groups


@dataclass(frozen=True)
class Difference:
    """How much better the candidate is than its base (more than 0 is better) in units of the
    figure, or as a logarithm; with an interval that holds the truth 19 times of 20 at all looks
    together, and the standard deviation of a run."""

    gain: float
    low: float
    high: float
    deviation: float


@dataclass(frozen=True)
class RunsNeeded:
    """How many more runs of each would decide, were the gain what it is estimated to be."""

    candidate: int
    base: int


@dataclass(frozen=True)
class NextRun:
    """Whose run comes next, and with which seed; None is one that neither had."""

    of: Literal["base", "candidate"]
    seed: int | None = None


@dataclass(frozen=True)
class Judgement:
    """What a look came to.

    reason: one sentence. p_value: the level from which on this look would keep it. information:
    that of this look, in runs, which the next one needs. following: the run that an undecided
    candidate needs next.
    """

    verdict: Verdict
    reason: str
    difference: Difference | None = None
    p_value: float = 1.0
    information: float = 0.0
    following: NextRun | None = None


class _Scored(NamedTuple):
    """A run on the scale where more is better; a tuple, as each look makes hundreds of them."""

    score: float
    seed: int
    time_s: float


@dataclass(frozen=True)
class _Estimate:
    """A gain, and by which shares of the noise of a candidate's run, and of a run of the base, it
    varies.

    seeds: of a paired design, those of the base; 0 in others.
    """

    gain: float
    per_candidate: float
    per_base: float
    seeds: int = 0

    def cap_freedom(self, freedom: float) -> float:
        """Return the degrees of freedom of the noise of pairs: half of it is the base's, whose few
        runs stand in the pairs of all candidates (Satterthwaite 1946)."""
        if not self.seeds:
            return freedom
        return min(freedom, 4 / (1 / freedom + 1 / max(self.seeds - 1, 1)))


@dataclass(frozen=True)
class _Noise:
    """The variance of a run: of all groups, and the one that is taken for either group."""

    pooled: PooledVariance
    candidate: PooledVariance
    base: PooledVariance


@dataclass(frozen=True)
class _Look:
    """A gain as a test sees it: its standard error and degrees of freedom, and its information in
    runs, which is the variance of a run by that of the gain."""

    gain: float
    error: float
    freedom: float
    information: float

    @property
    def score(self) -> float:
        """Return the normal score that is as probable as the t that was found."""
        return compute_normal_score(self.gain / self.error, self.freedom)

    @property
    def log_likelihood_ratio(self) -> float:
        """Return the logarithm of how much more likely a gain of DESIGN_GAIN makes the runs than
        none does (Wald 1945)."""
        drift = DESIGN_GAIN * self.score * math.sqrt(self.information)
        return drift - DESIGN_GAIN**2 * self.information / 2


def judge(
    base: Sequence[Measurement],
    candidate: Sequence[Measurement],
    *,
    goal: Goal,
    level: float,
    earlier: PooledVariance = NO_NOISE,
    information: float = 0.0,
) -> Judgement:
    """Return what base and candidate have shown so far.

    base, candidate: in order of time. level: the probability of a false keep that this candidate
    may use up. earlier: the noise of groups of the same session that have ended. information: that
    of the look before; where it is not given, a look counts as if all runs before it had been
    looked at.

    A run of the candidate that came to NaN or infinity discards it. Raises ValueError for such a
    run of the base, and for a level that is no probability.
    """
    if not 0 < level < 1:
        raise ValueError(f"level: {level} is no probability; it lies between 0 and 1")
    broken = [run.value for run in candidate if not math.isfinite(run.value)]
    runs = _score_runs(base, goal)
    if broken:
        return Judgement("discard", f"A run of the candidate came to {broken[0]}.")
    tried = _select_comparable(runs, _score_runs(candidate, goal), goal)
    following = choose_next_run(base, candidate, goal=goal)
    noise = _estimate_noise(runs, tried, goal, earlier, UNEQUAL)
    if not _is_enough(runs, tried, goal, noise):
        return Judgement("undecided", "There are too few runs to look at.", following=following)
    if not noise.pooled.variance:
        return _judge_without_noise(_estimate_gain(runs, tried, goal).gain)
    look = _take_look(_estimate_gain(runs, tried, goal), noise)
    gained = min(look.information - information, look.information / len(tried))
    step = OVERSHOOT * DESIGN_GAIN * math.sqrt(max(gained, 0.0))
    verdict, reason = _decide(look.log_likelihood_ratio, step, level, len(tried))
    if verdict == "keep":
        verdict, reason = _examine_keep(runs, tried, goal, earlier)
    return Judgement(
        verdict,
        reason,
        _make_difference(look, noise, ALPHA),
        p_value=min(1.0, math.exp(min(0.0, -look.log_likelihood_ratio - step))),
        information=look.information,
        following=following if verdict == "undecided" else None,
    )


def choose_next_run(
    base: Sequence[Measurement], candidate: Sequence[Measurement], *, goal: Goal
) -> NextRun:
    """Return whose run comes next, were there a next one.

    The base has BASE_SHARE runs for each of the candidate; in a paired design one of each seed, in
    an interleaved one a run after each of the candidate.
    """
    if goal.design == "paired":
        unpaired = [run.seed for run in base if run.seed not in {tried.seed for tried in candidate}]
        return NextRun("candidate", unpaired[0]) if unpaired else NextRun("base")
    least = LEAST_BASE_RUNS
    if goal.design == "independent":
        wanted = math.ceil(1 + BASE_SHARE * len(candidate)) if candidate else least
        return NextRun("base" if len(base) < max(wanted, least) else "candidate")
    is_behind = bool(candidate and base and candidate[-1].time_s > base[-1].time_s)
    return NextRun("base" if is_behind or len(base) < least else "candidate")


def estimate_difference(
    base: Sequence[Measurement],
    candidate: Sequence[Measurement],
    *,
    goal: Goal,
    earlier: PooledVariance = NO_NOISE,
    alpha: float = ALPHA,
) -> Difference:
    """Return how much better the candidate is, for any figure: speed, memory, what a gain costs.

    alpha: the probability that the interval ever leaves out the truth, at all looks together. Of
    a figure without resolution that never varied, such as a peak of memory, it is a point.
    Raises ValueError for a group without runs, in a paired design for seeds of which none is in
    both, and for a figure that is not finite.
    """
    runs = _score_runs(base, goal)
    tried = _select_comparable(runs, _score_runs(candidate, goal), goal)
    if not runs or not tried:
        raise ValueError("a difference needs a run of the base and one of the candidate like it")
    estimate = _estimate_gain(runs, tried, goal)
    noise = _estimate_noise(runs, tried, goal, earlier, UNEQUAL)
    if not noise.pooled.freedom:
        return Difference(estimate.gain, -math.inf, math.inf, math.nan)
    is_known = _is_constant(runs) and _is_constant(tried) and not goal.resolution
    if not noise.pooled.variance or (is_known and not earlier.variance):
        return Difference(estimate.gain, estimate.gain, estimate.gain, 0.0)
    return _make_difference(_take_look(estimate, noise), noise, alpha)


def check_not_worse(difference: Difference, margin: float) -> Literal["holds", "fails", "unclear"]:
    """Return what the runs show of "not worse by more than the margin", a test of non-inferiority
    by the interval (Schuirmann 1987): at most alpha / 2 of those that are worse hold.

    margin: in units of the figure; of a goal on a log scale the share, 0.02 for 2 %.
    Of a keep that needs this too, the probability of a false one grows by nothing, where the
    interval is of twice the level of the keep (intersection-union, Berger 1982). Raises ValueError
    for a margin that is not above 0.
    """
    if not margin > 0:
        raise ValueError(f"margin: {margin}; not worse needs a margin above 0")
    if difference.low > -margin:
        return "holds"
    return "fails" if difference.high < -margin else "unclear"


def forecast_runs(
    judgement: Judgement,
    base: Sequence[Measurement],
    candidate: Sequence[Measurement],
    *,
    goal: Goal,
    level: float,
) -> RunsNeeded | None:
    """Return how many more runs would decide, were the gain what it is estimated to be; None where
    no number of runs up to MOST_RUNS would, or nothing is known of the noise yet."""
    found = judgement.difference
    if found is None or not found.deviation:
        return None
    for more in range(1, MOST_RUNS - len(candidate) + 1):
        of_candidate = len(candidate) + more
        of_base = of_candidate
        if goal.design == "independent":
            of_base = max(math.ceil(1 + BASE_SHARE * of_candidate), LEAST_BASE_RUNS, len(base))
        information = 1 / (1 / of_candidate + 1 / of_base)
        look = _Look(found.gain, found.deviation / math.sqrt(information), MANY, information)
        step = OVERSHOOT * DESIGN_GAIN * math.sqrt(information / of_candidate)
        verdict, _ = _decide(look.log_likelihood_ratio, step, level, of_candidate)
        is_kept_too_early = verdict == "keep" and of_candidate < LEAST_KEEP_RUNS
        if verdict != "undecided" and not is_kept_too_early:
            return RunsNeeded(more, max(of_base - len(base), 0))
    return None


def measure_candidate_noise(
    base: Sequence[Measurement], candidate: Sequence[Measurement], *, goal: Goal
) -> PooledVariance:
    """Return what the candidate's runs show of the noise, to be added to that of earlier groups."""
    tried = _score_runs([run for run in candidate if math.isfinite(run.value)], goal)
    if goal.design != "paired":
        return _measure_runs(tried, goal)
    return _measure_group(_score_runs(base, goal), tried, goal)


def measure_base_noise(base: Sequence[Measurement], *, goal: Goal) -> PooledVariance:
    """Return what the runs of a base that is replaced show of the noise."""
    return _measure_base(_score_runs(base, goal), goal)


def compute_normal_score(t: float, freedom: float) -> float:
    """Return the normal score that is exceeded as often as this t (the significance level approach,
    Jennison & Turnbull 2000, section 4.4)."""
    from scipy.special import ndtri, stdtr

    if freedom >= MANY:
        return t
    size = -float(ndtri(max(float(stdtr(freedom, -abs(t))), 1e-300)))
    return math.copysign(size, t)


def _score_runs(runs: Sequence[Measurement], goal: Goal) -> list[_Scored]:
    """Raises ValueError for a figure that is not finite."""
    for run in runs:
        if not math.isfinite(run.value):
            raise ValueError(f"a run of the base came to {run.value}; a base needs finite figures")
    score = goal.score
    return [_Scored(score(run.value), run.seed, run.time_s) for run in runs]


def _is_enough(
    base: Sequence[_Scored], candidate: Sequence[_Scored], goal: Goal, noise: _Noise
) -> bool:
    """True if there is something to compare, and its noise is known a little."""
    if not candidate or not base:
        return False
    if goal.design == "paired":
        return noise.pooled.freedom >= 2 and bool(_pair_runs(base, candidate))
    return len(base) >= LEAST_BASE_RUNS


def _select_comparable(
    base: Sequence[_Scored], candidate: Sequence[_Scored], goal: Goal
) -> Sequence[_Scored]:
    """Return the candidate's runs that the design can compare: those whose seed the base has.

    Raises ValueError where runs that are to be compared by their time have none.
    """
    if goal.design == "paired":
        seeds = {run.seed for run in base}
        return [run for run in candidate if run.seed in seeds]
    if goal.design == "interleaved":
        times = [run.time_s for run in base]
        if any(b <= a for a, b in zip(times, times[1:], strict=False)):
            raise ValueError("time_s: an interleaved base needs runs in order of time")
    return candidate


def _is_constant(runs: Sequence[_Scored]) -> bool:
    return len(runs) > 1 and len({run.score for run in runs}) == 1


def _judge_without_noise(gain: float) -> Judgement:
    if gain == 0:
        return Judgement("discard", "Every run came to the same figure as the base.")
    reason = "No group of runs varies, so that nobody knows what a difference by chance would be."
    return Judgement("refused", f"{reason} Give the resolution of the figure.")


def _decide(ratio: float, step: float, level: float, count: int) -> tuple[Verdict, str]:
    """Return the verdict of the two lines, each nearer by the step that a walk goes beyond it on
    average (Whitehead & Stratton 1983)."""
    if ratio >= -math.log(level) - step:
        return "keep", KEPT
    if ratio <= math.log(MISS) + step:
        return "discard", "The runs speak against a gain that is worth finding."
    if count >= MOST_RUNS:
        return "discard", f"{MOST_RUNS} runs show no gain."
    return "undecided", "The runs so far speak neither for a gain nor against it."


def _examine_keep(
    base: Sequence[_Scored], candidate: Sequence[_Scored], goal: Goal, earlier: PooledVariance
) -> tuple[Verdict, str]:
    """Return keep, if it does not hang on one run and the base does not drift."""
    if goal.design == "independent" and _is_drifting(base):
        return "refused", "The runs of the base drift with time; judge it by an interleaved design."
    if len(candidate) >= LEAST_KEEP_RUNS and _is_carried_by_many(base, candidate, goal, earlier):
        return "keep", KEPT
    if len(candidate) < MOST_RUNS:
        return "undecided", "A single run carries the gain so far."
    return "refused", "A single run carries the gain: the noise is not near normal."


def _is_carried_by_many(
    base: Sequence[_Scored], candidate: Sequence[_Scored], goal: Goal, earlier: PooledVariance
) -> bool:
    """True if the gain stays LEAST_SCORE standard errors without the run of the candidate that
    speaks most for it, and without that of the base: one that is far off would carry it alone."""
    if goal.design == "paired":
        against = {run.seed: run.score for run in base}
        best = max(candidate, key=lambda run: run.score - against.get(run.seed, math.inf))
        left = base
    else:
        best = max(candidate, key=lambda run: run.score)
        worst = min(base, key=lambda run: run.score)
        left = [run for run in base if run is not worst]
    noise = _estimate_noise(base, candidate, goal, earlier, LEAST_UNEQUAL)
    rest = [run for run in candidate if run is not best]
    return _take_look(_estimate_gain(left, rest, goal), noise).score >= LEAST_SCORE


def _is_drifting(base: Sequence[_Scored]) -> bool:
    """True if the base's runs follow a straight line in time beyond chance (Pearson's r)."""
    from scipy.special import stdtr

    count = len(base)
    mean_time, mean = _average([run.time_s for run in base]), _average([run.score for run in base])
    times = [run.time_s - mean_time for run in base]
    scores = [run.score - mean for run in base]
    squares = sum(t * t for t in times) * sum(s * s for s in scores)
    if count < 4 or squares == 0:
        return False
    r = sum(t * s for t, s in zip(times, scores, strict=True)) / math.sqrt(squares)
    t = abs(r) * math.sqrt((count - 2) / max(1 - r * r, 1e-12))
    return bool(2 * stdtr(count - 2, -t) < DRIFT)


def _estimate_gain(base: Sequence[_Scored], candidate: Sequence[_Scored], goal: Goal) -> _Estimate:
    if goal.design == "paired":
        pairs = _pair_runs(base, candidate)
        return _Estimate(_average(pairs), 1 / len(pairs), 1 / len(pairs), len(base))
    mean = _average([run.score for run in candidate])
    if goal.design == "independent":
        return _Estimate(
            mean - _average([run.score for run in base]), 1 / len(candidate), 1 / len(base)
        )
    weights = _weigh_nearest(base, candidate)
    level = sum(weight * run.score for weight, run in zip(weights, base, strict=True))
    return _Estimate(mean - level, 1 / len(candidate), sum(weight**2 for weight in weights))


def _pair_runs(base: Sequence[_Scored], candidate: Sequence[_Scored]) -> list[float]:
    """Return how much better the candidate is with each seed that both were trained with."""
    against = {run.seed: run.score for run in base}
    return [run.score - against[run.seed] for run in candidate if run.seed in against]


def _weigh_nearest(base: Sequence[_Scored], candidate: Sequence[_Scored]) -> list[float]:
    """Return the weight of each of the base's runs, which are in order of time: each run of the
    candidate is compared with the line between those just before and just after it."""
    times = [run.time_s for run in base]
    weights = [0.0] * len(base)
    for run in candidate:
        after = bisect_left(times, run.time_s)
        if after in (0, len(base)):
            weights[min(after, len(base) - 1)] += 1 / len(candidate)
            continue
        share = (run.time_s - times[after - 1]) / (times[after] - times[after - 1])
        weights[after] += share / len(candidate)
        weights[after - 1] += (1 - share) / len(candidate)
    return weights


def _estimate_noise(
    base: Sequence[_Scored],
    candidate: Sequence[_Scored],
    goal: Goal,
    earlier: PooledVariance,
    unequal: float,
) -> _Noise:
    """Return the noise that all groups share; of a group that is noisier than the others beyond
    chance (F test), its own."""
    of_candidate = _measure_group(base, candidate, goal)
    of_base = _measure_base(base, goal)
    floor = _find_floor([run.score for run in (*base, *candidate)], goal)
    pooled = _raise_to(earlier + of_candidate + of_base, floor)
    for_candidate = _choose_noise(of_candidate, earlier + of_base, pooled, unequal)
    if goal.design == "paired":  # what pairs vary by is of both
        return _Noise(pooled, for_candidate, for_candidate)
    for_base = _choose_noise(of_base, earlier + of_candidate, pooled, unequal)
    return _Noise(pooled, for_candidate, for_base)


def _choose_noise(
    own: PooledVariance, others: PooledVariance, pooled: PooledVariance, unequal: float
) -> PooledVariance:
    from scipy.special import fdtrc

    if own.variance <= pooled.variance or not own.freedom or not others.variance:
        return pooled
    is_noisier = fdtrc(own.freedom, others.freedom, own.variance / others.variance) < unequal
    return own if is_noisier else pooled


def _measure_base(base: Sequence[_Scored], goal: Goal) -> PooledVariance:
    """Return the noise of the base's runs; in a paired design their seeds hide it."""
    return PooledVariance() if goal.design == "paired" else _measure_runs(base, goal)


def _measure_group(
    base: Sequence[_Scored], candidate: Sequence[_Scored], goal: Goal
) -> PooledVariance:
    """Return the noise of the candidate's runs; in a paired design half that of the pairs."""
    if goal.design != "paired":
        return _measure_runs(candidate, goal)
    noise = _measure_spread(_pair_runs(base, candidate))
    return PooledVariance(noise.sum_squares / 2, noise.freedom)


def _measure_runs(runs: Sequence[_Scored], goal: Goal) -> PooledVariance:
    scores = [run.score for run in runs]
    return _measure_steps(scores) if goal.design == "interleaved" else _measure_spread(scores)


def _measure_spread(scores: Sequence[float]) -> PooledVariance:
    if len(scores) < 2:
        return PooledVariance()
    mean = _average(scores)
    return PooledVariance(sum((score - mean) ** 2 for score in scores), len(scores) - 1.0)


def _measure_steps(scores: Sequence[float]) -> PooledVariance:
    """Return the noise by what each run differs from the one before it, as a slow drift does not
    count then (von Neumann, Kent, Bellinson & Hart 1941)."""
    steps = len(scores) - 1
    if steps < 1:
        return PooledVariance()
    squares = sum((b - a) ** 2 for a, b in zip(scores, scores[1:], strict=False))
    freedom = 2 * steps**2 / (3 * steps - 1)
    return PooledVariance(squares / (2 * steps) * freedom, freedom)


def _find_floor(scores: Sequence[float], goal: Goal) -> float:
    """Return the least standard deviation to take: half a step of the figure, the most that
    rounding to two neighbours can hide (Popoviciu 1935).

    Without a resolution it is the least difference among the runs, where some of them are equal.
    """
    if goal.resolution:
        return goal.resolution / 2
    distinct = sorted(set(scores))
    if len(distinct) == len(scores) or len(distinct) < 2:
        return 0.0
    return min(b - a for a, b in zip(distinct, distinct[1:], strict=False)) / 2


def _raise_to(noise: PooledVariance, floor: float) -> PooledVariance:
    return PooledVariance(max(noise.sum_squares, floor**2 * noise.freedom), noise.freedom)


def _take_look(estimate: _Estimate, noise: _Noise) -> _Look:
    """Return the gain with its standard error; its degrees of freedom are Welch's (1947) where the
    two groups do not share one noise."""
    of_candidate = noise.candidate.variance * estimate.per_candidate
    of_base = noise.base.variance * estimate.per_base
    variance = of_candidate + of_base
    freedom = estimate.cap_freedom(noise.pooled.freedom)
    if noise.candidate is not noise.pooled or noise.base is not noise.pooled:
        freedom = variance**2 / (
            of_candidate**2 / noise.candidate.freedom + of_base**2 / noise.base.freedom
        )
    information = noise.pooled.variance / variance
    return _Look(estimate.gain, math.sqrt(variance), freedom, information)


def _make_difference(look: _Look, noise: _Noise, alpha: float) -> Difference:
    reach = _compute_reach(look, alpha)
    deviation = math.sqrt(noise.pooled.variance)
    return Difference(look.gain, look.gain - reach, look.gain + reach, deviation)


def _compute_reach(look: _Look, alpha: float) -> float:
    """Return how far the confidence sequence reaches to either side: where the t statistic's
    likelihood, mixed over gains of variance MIXTURE, is 1 / alpha times that of no gain (Robbins
    1970; for t Lai 1976, Wang & Ramdas 2025)."""
    growth = 1 + MIXTURE * look.information
    bound = (growth / alpha**2) ** (1 / (look.freedom + 1))
    if bound >= growth:
        return math.inf
    return look.error * math.sqrt(look.freedom * (bound - 1) / (1 - bound / growth))


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)
