"""The referee on real trainings: nights of a hundred changes to a small network on the handwritten
digits, of which ten are gains and all others change nothing that matters: where the random numbers
come from, the order in which rows lie before they are shuffled. Beside it "lower than the best so
far" on the same changes. `python -m benchmarks.referee_trainings [--nights 20]`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks.conditions import publish_whole
from headroom.comparison.platform_trial import PlatformTrial
from headroom.comparison.sequential_tests import Goal, Measurement

NIGHTS, CANDIDATES, GAINS = 20, 100, 10
SEED = 38  # of the first night
TRUTH_RUNS = 40  # of a training, by which its gain is known
RATE, FACTOR = 4e-4, 1.35  # of the first base; what a gain makes of a rate


@dataclass(frozen=True)
class Training:
    """What a candidate may change: the rate matters, all else does not."""

    lr: float = RATE
    offset: int = 0  # of the seed
    is_turned: bool = False  # rows lie the other way round before they are shuffled
    names: int = 0  # of a setting that nothing reads


@cache
def load_rows() -> tuple[Tensor, Tensor]:
    """Return the digits, 1,797 x 64 from 0 to 1, and their labels."""
    digits = load_digits()
    return torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)


def train(training: Training, seed: int) -> float:
    """Return the loss of the last 397 rows after two epochs of the others."""
    draw = torch.Generator().manual_seed(2**20 * training.offset + seed)
    x, y = load_rows()
    order = torch.arange(1400).flip(0) if training.is_turned else torch.arange(1400)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    for parameter in net.parameters():
        nn.init.trunc_normal_(parameter, std=0.1, generator=draw)
    optimizer = torch.optim.Adam(net.parameters(), training.lr)
    for _ in range(2):
        for part in order[torch.randperm(1400, generator=draw)].split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[part]), y[part]).backward()
            optimizer.step()
    with torch.no_grad():
        return nn.functional.cross_entropy(net(x[1400:]), y[1400:]).item()


@dataclass
class Night:
    """What was kept of a night, and what it took."""

    false: int = 0
    true: int = 0
    runs: int = 0


def play(seed: int) -> tuple[Night, Night]:
    """Return a night as the session judges it, and as "lower than the best so far" does."""
    draw = Random(seed)
    changes = [draw_null(draw) for _ in range(CANDIDATES - GAINS)] + [None] * GAINS
    draw.shuffle(changes)
    return judge_night(changes, Random(seed)), keep_lower(changes, Random(seed))


def draw_null(draw: Random) -> dict[str, int | bool]:
    """Return a change that is none."""
    return draw.choice(
        [
            {"offset": draw.randrange(1, 1000)},
            {"is_turned": True},
            {"is_turned": False},
            {"names": draw.randrange(1000)},
        ]
    )


def change_training(base: Training, change: dict[str, int | bool] | None) -> Training:
    """Return the training of a candidate; None is the gain."""
    if change is None:
        return replace(base, lr=base.lr * FACTOR)
    return replace(base, **change)  # type: ignore[arg-type]


def judge_night(changes: list[dict[str, int | bool] | None], draw: Random) -> Night:
    """Return what a session keeps of these changes."""
    night, base = Night(), Training()
    session = PlatformTrial(Goal("min", "log"))
    for change in changes:
        session = session.open_candidate()
        candidate = change_training(base, change)
        while True:
            following = session.choose_next_run()
            which = base if following.of == "base" else candidate
            seed = draw.randrange(2**20) if following.seed is None else following.seed
            night.runs += 1
            run = Measurement(train(which, seed), seed, float(night.runs))
            session = session.add_run(run, following.of)
            judgement = session.judge()
            session = session.record(judgement)
            if judgement.verdict != "undecided":
                break
        if judgement.verdict == "keep":
            night.true += change is None
            night.false += change is not None
            base = candidate
    return night


def keep_lower(changes: list[dict[str, int | bool] | None], draw: Random) -> Night:
    """Return what is kept by one run each, where that is lower than the best so far."""
    base = Training()
    night, best = Night(runs=1), train(base, draw.randrange(2**20))
    for change in changes:
        candidate = change_training(base, change)
        loss = train(candidate, draw.randrange(2**20))
        night.runs += 1
        if loss < best:
            base, best = candidate, loss
            night.true += change is None
            night.false += change is not None
    return night


def measure(nights: int) -> Iterator[str]:
    """Yield the table."""
    rates = [RATE * FACTOR**number for number in range(GAINS + 1)]
    told = [[train(Training(lr), 2**19 + seed) for seed in range(TRUTH_RUNS)] for lr in rates]
    gains = [
        (statistics.mean(before) - statistics.mean(after)) / statistics.stdev(before)
        for before, after in itertools.pairwise(told)
    ]
    shares = [100 * statistics.stdev(values) / statistics.mean(values) for values in told]
    yield f"- one run is good to {min(shares):.1f} to {max(shares):.1f} % (standard deviation)"
    said = ", ".join(f"{gain:.1f}" for gain in gains)
    yield f"- the {GAINS} gains, one after the other, in standard deviations of a run: {said}"
    yield f"- nights: {nights} of {CANDIDATES} changes, {GAINS} of them gains; seeds from {SEED} on"
    yield ""
    yield "| | nights with a false keep | false keeps a night | gains kept | runs per candidate |"
    yield "|:--|--:|--:|--:|--:|"
    played = [play(SEED + number) for number in range(nights)]
    for name, part in (("a session", 0), ("lower than the best so far", 1)):
        ended = [both[part] for both in played]
        of_false = sum(night.false > 0 for night in ended)
        yield (
            f"| {name} | {of_false} of {nights} | {statistics.mean(n.false for n in ended):.2f} | "
            f"{100 * sum(n.true for n in ended) / (GAINS * nights):.0f} % | "
            f"{sum(n.runs for n in ended) / (CANDIDATES * nights):.2f} |"
        )


def main() -> None:
    """Print the table; keep it where it is of as many nights as is the rule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nights", type=int, default=NIGHTS)
    nights = parser.parse_args().nights
    torch.set_num_threads(1)
    publish_whole(
        "referee-trainings",
        "The referee on real trainings",
        measure(nights),
        is_whole=nights >= NIGHTS,
    )


if __name__ == "__main__":
    main()
