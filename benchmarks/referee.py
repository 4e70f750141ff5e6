"""How often a session of a hundred candidates keeps one that is no better, how many true gains it
keeps and what that costs in runs: `python -m benchmarks.referee [--nights 100]`. The runs are made
up, with fixed seeds; what judges them is the real code. A gain is in standard deviations of a run.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from random import Random

from benchmarks.conditions import publish_whole
from headroom.comparison.platform_trial import PlatformTrial
from headroom.comparison.sequential_tests import (
    MOST_RUNS,
    Goal,
    Measurement,
    check_not_worse,
    estimate_difference,
)

NIGHTS, CANDIDATES, TRUE = 2_000, 100, 10
SEED = 38  # of the first night; the others have those after it
OUTLIERS = math.sqrt(1 + 0.1 * 25)  # standard deviation, where one run in ten is off by 5
LONG = 1_000


@dataclass(frozen=True)
class Place:
    """Where a made run stands: the true mean and deviation, its seed, and how many came before."""

    mean: float
    deviation: float
    seed: int
    before: int


Draw = Callable[[Place], float]
Noise = Callable[[Random], Draw]


def draw_normal(draw: Random) -> Draw:
    """Return runs with normal noise."""
    return lambda run: draw.gauss(run.mean, run.deviation)


def draw_outliers(draw: Random, *, sides: tuple[int, ...] = (-1, 1)) -> Draw:
    """Return runs of which one in ten is off by 5 to one of the sides."""

    def make(run: Place) -> float:
        off = 5 * draw.choice(sides) if draw.random() < 0.1 else 0
        return draw.gauss(run.mean, 1.0) + off

    return make


def draw_student(draw: Random) -> Draw:
    """Return runs with the noise of Student's t of 3 degrees of freedom."""
    return lambda run: run.mean + draw.gauss(0, 1) / math.sqrt(draw.gammavariate(1.5, 1 / 1.5))


def draw_steps(draw: Random, *, step: float) -> Draw:
    """Return runs of a figure that has steps, as the accuracy of few rows."""
    offset = draw.random() * step
    return lambda run: round((draw.gauss(run.mean, 1.0) + offset) / step) * step


def draw_seeds(draw: Random, *, effect: float) -> Draw:
    """Return runs whose seeds matter: by a normal effect that all runs of a seed share."""
    night = draw.randrange(2**32)
    return lambda run: draw.gauss(run.mean, 1.0) + effect * Random(night + run.seed).gauss(0, 1)


def draw_drift(draw: Random, *, kind: str) -> Draw:
    """Return runs on a machine that changes over the night."""
    phase, period = draw.random() * math.tau, draw.uniform(40, 200)
    walk = [0.0]

    def drift(before: int) -> float:
        while len(walk) <= before:
            walk.append(walk[-1] + draw.gauss(0, 0.2))
        by_kind = {
            "none": 0.0,
            "better": -before / 60,
            "worse": before / 60,
            "in waves": 3 * math.sin(before / period * math.tau + phase),
            "by chance": walk[before],
            "in steps": -3.0 * (before // 70 % 2),
        }
        return by_kind[kind]

    return lambda run: draw.gauss(run.mean, 1.0) + drift(run.before)


@dataclass(frozen=True)
class Row:
    """Nights of one kind.

    gain: of TRUE of the candidates; the others have none, but for half of them that lose `worse`.
    noisy: the deviation of each fifth candidate. has_shared_seeds: base and candidate count theirs
    from 0.
    """

    what: str
    bar: str
    noise: Noise = draw_normal
    goal: Goal = Goal()
    gain: float = 0.0
    worse: float = 0.0
    noisy: float = 1.0
    has_shared_seeds: bool = False
    candidates: int = CANDIDATES

    @property
    def spared(self) -> int:
        """Return which share of the nights is played, one in so many: of those that take long, and
        of those whose bar is for false keeps alone, fewer."""
        if self.candidates == LONG:
            return 10
        return 4 if self.goal.design == "interleaved" else 1 if "runs" in self.bar else 2


@dataclass(frozen=True)
class Night:
    """What came of a night: keeps of candidates that are better and of others, runs, candidates
    that it refused to judge, and those of which an interval ever left out the truth."""

    kept: int
    false: int
    runs: int
    refused: int
    missed: int


NULL, KEPT_2, KEPT_3 = "false <= 5 %", "kept >= 80 %, runs <= 3.2", "kept >= 95 %, runs <= 3.2"
TURNS, PAIRS = Goal(design="interleaved"), Goal(design="paired")
DRIFTS = ("none", "better", "in waves", "by chance", "in steps")
ROWS = (
    Row("null changes", f"{NULL}, runs <= 3.2"),
    Row("gains of 2", KEPT_2, gain=2),
    Row("gains of 3", KEPT_3, gain=3),
    Row("gains of 1", NULL, gain=1),
    Row("gains of 2, half of the others worse by 2", KEPT_2, gain=2, worse=2),
    Row("null changes, 1,000 a night", NULL, candidates=LONG),
    Row("one run in ten off by 5: null", NULL, draw_outliers),
    Row("one run in ten better by 5: null", NULL, partial(draw_outliers, sides=(-1,))),
    Row("one run in ten worse by 5: null", NULL, partial(draw_outliers, sides=(1,))),
    Row("one run in ten off by 5: gains of 2", NULL, draw_outliers, gain=2 * OUTLIERS),
    Row("noise of Student's t, 3 degrees: null", NULL, draw_student),
    Row("each fifth candidate 3 times as noisy: null", NULL, noisy=3.0),
    Row("accuracies in steps of 0.5: null", NULL, partial(draw_steps, step=0.5)),
    Row("accuracies in steps of 2: null", NULL, partial(draw_steps, step=2.0)),
    Row("accuracies in steps of 5: null", NULL, partial(draw_steps, step=5.0)),
    Row("accuracies in steps of 1: gains of 2", NULL, partial(draw_steps, step=1.0), gain=2),
    Row(
        "seeds that matter 3 times the noise, the same for all: null",
        NULL,
        partial(draw_seeds, effect=3.0),
        has_shared_seeds=True,
    ),
    Row("the same, paired: null", NULL, partial(draw_seeds, effect=3.0), PAIRS),
    Row("the same, paired: gains of 2", NULL, partial(draw_seeds, effect=3.0), PAIRS, 2),
    *(
        Row(f"drift, interleaved: {kind}: null", NULL, partial(draw_drift, kind=kind), TURNS)
        for kind in DRIFTS
    ),
    Row(
        "drift, interleaved: in steps: gains of 2",
        NULL,
        partial(draw_drift, kind="in steps"),
        TURNS,
        2,
    ),
    Row(
        "drift, as if there were none: by chance: null",
        "none: wrong design",
        partial(draw_drift, kind="by chance"),
    ),
)


def play_night(row: Row, seed: int) -> Night:
    """Return what the real session makes of a night of made runs, looked at after each of them."""
    draw = Random(seed)
    make, session = row.noise(draw), PlatformTrial(row.goal)
    base, deviation, runs, kept, false, refused, missed = 0.0, 1.0, 0, 0, 0, 0, 0
    for number, gain in enumerate(draw_gains(row, draw)):
        session = session.open_candidate()
        own = row.noisy if number % 5 == 0 else 1.0
        verdict, is_missed = "undecided", False
        while verdict == "undecided":
            following = session.choose_next_run()
            is_base = following.of == "base"
            seed = choose_seed(session, following.of, following.seed, row, draw)
            truth = (base, deviation) if is_base else (base - gain, own)
            value = make(Place(*truth, seed, runs))
            runs += 1
            session = session.add_run(Measurement(value, seed, float(runs)), following.of)
            judgement = session.judge()
            if (found := judgement.difference) is not None:
                is_missed |= not found.low <= gain <= found.high
            session, verdict = session.record(judgement), judgement.verdict
        missed, refused = missed + is_missed, refused + (verdict == "refused")
        if verdict == "keep":
            base, deviation = base - gain, own
            kept, false = kept + (gain > 0), false + (gain <= 0)
    return Night(kept, false, runs, refused, missed)


def choose_seed(session: PlatformTrial, of: str, wanted: int | None, row: Row, draw: Random) -> int:
    """Return the seed of the next run: the one that the design wants, or a new one."""
    if wanted is not None:
        return wanted
    if row.has_shared_seeds:
        return len(session.base if of == "base" else session.candidate or ())
    return draw.randrange(2**32)


def draw_gains(row: Row, draw: Random) -> list[float]:
    """Return the gain of each candidate over the base that it meets."""
    gains = [-row.worse * draw.randrange(2) for _ in range(row.candidates)]
    for place in draw.sample(range(row.candidates), TRUE) if row.gain else ():
        gains[place] = row.gain
    return gains


def keep_lower_than_best(row: Row, seed: int) -> Night:
    """Return what the same night comes to, where one run is made of each candidate, and what is
    lower than the best so far is kept."""
    draw = Random(seed)
    make = row.noise(draw)
    base, kept, false = 0.0, 0, 0
    best = make(Place(base, 1.0, draw.randrange(2**32), 0))
    for number, gain in enumerate(draw_gains(row, draw), 1):
        value = make(Place(base - gain, 1.0, draw.randrange(2**32), number))
        if value < best:
            best, base = value, base - gain
            kept, false = kept + (gain > 0), false + (gain <= 0)
    return Night(kept, false, row.candidates, 0, 0)


def measure_row(
    row: Row, nights: int, pool: ProcessPoolExecutor, play: Callable[[Row, int], Night] = play_night
) -> str:
    """Return the row of the table."""
    count = max(nights // row.spared, 1)
    seeds = range(SEED, SEED + count)
    played = list(pool.map(play, repeat(row), seeds, chunksize=max(count // 40, 1)))
    all_tried = count * row.candidates
    false = sum(night.false > 0 for night in played) / count
    kept = f"{sum(n.kept for n in played) / (count * TRUE):.1%}" if row.gain else ""
    shares = [sum(n.refused for n in played), sum(n.missed for n in played)]
    refused, missed = (f"{share / all_tried:.2%}" for share in shares)
    runs = sum(night.runs for night in played) / all_tried
    figures = f"{false:.1%} | {kept} | {runs:.2f} | {refused} | {missed}"
    return f"| {row.what} | {row.bar} | {count:,} | {figures} |"


def measure_not_worse(nights: int) -> Iterator[str]:
    """Yield how often "not worse" holds at any of the looks up to MOST_RUNS runs, of candidates
    that are worse by just the margin, and of those that are not."""
    yield "\n## Not worse by more than a margin, looked at after each run\n"
    yield "| true loss | margin | bar | it holds at some look |\n|--:|--:|:--|--:|"
    for loss, margin, bar in ((2.0, 2.0, "<= 2.5 %"), (4.0, 4.0, "<= 2.5 %"), (0.0, 4.0, "")):
        held = sum(is_held_at_some_look(loss, margin, seed) for seed in range(SEED, SEED + nights))
        yield f"| {loss} | {margin} | {bar} | {held / nights:.1%} |"


def is_held_at_some_look(loss: float, margin: float, seed: int) -> bool:
    """True if "not worse" holds after any run of this candidate."""
    draw = Random(seed)
    base = [Measurement(draw.gauss(0, 1)) for _ in range(4)]
    candidate: list[Measurement] = []
    for _ in range(MOST_RUNS):
        candidate.append(Measurement(draw.gauss(loss, 1)))
        base.append(Measurement(draw.gauss(0, 1)))
        found = estimate_difference(base, candidate, goal=Goal())
        if check_not_worse(found, margin) == "holds":
            return True
    return False


def measure(nights: int) -> Iterator[str]:
    """Yield the tables."""
    yield f"\nSeeds of the nights: {SEED} and those after it. The noise of a run has a deviation of"
    yield f"1. {TRUE} of {CANDIDATES} candidates are true gains where a row has gains.\n"
    yield (
        "false: nights with any keep of a candidate that is no better. kept: true gains that were"
        " kept. runs: of a candidate, those of its base included. refused: candidates of which it"
        " said that it cannot judge. missed: those whose interval left out the truth at any look"
        " (bar: 5 %).\n"
    )
    yield "| nights of 100 candidates | bar | nights | false | kept | runs | refused | missed |"
    yield "|:--|:--|--:|--:|--:|--:|--:|--:|"
    with ProcessPoolExecutor(2) as pool:
        for row in ROWS[:3]:
            line = measure_row(row, nights, pool, keep_lower_than_best)
            yield line.replace("| ", '| "lower than the best so far": ', 1)
        for row in ROWS:
            yield measure_row(row, nights, pool)
    yield from measure_not_worse(nights)


def main() -> None:
    """Print the tables; keep them where they are of as many nights as is the rule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nights", type=int, default=NIGHTS, help="nights of each row")
    nights = parser.parse_args().nights
    publish_whole("referee", "The referee on made runs", measure(nights), is_whole=nights >= NIGHTS)


if __name__ == "__main__":
    main()
