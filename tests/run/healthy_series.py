"""Made-up metrics of trainings in which nothing is wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

Points = list[dict[str, float]]  # of the log points, in order


def _fall(draw: random.Random, count: int) -> list[float]:
    """A loss that falls by a power law, with noise that multiplies it."""
    power, noise = draw.uniform(0.1, 0.8), draw.uniform(0.01, 0.4)
    return [3 * (1 + at) ** -power * math.exp(draw.gauss(0, noise)) for at in range(count)]


def _converge(draw: random.Random, count: int) -> list[float]:
    """One that comes to next to nothing, where the last digits jump."""
    rate = draw.uniform(0.02, 0.1)
    return [2.3 * math.exp(-rate * at) + 1e-6 * math.exp(draw.gauss(0, 2.0)) for at in range(count)]


def _restart(draw: random.Random, count: int) -> list[float]:
    """One under a schedule with warm restarts: each lifts it for a while."""
    period = draw.randrange(30, 90)
    return [
        0.6 + 0.25 * math.cos(math.pi * (at % period) / period) + draw.gauss(0, 0.03)
        for at in range(count)
    ]


def _single_rows(draw: random.Random, count: int) -> list[float]:
    """One of batches of a row or two, whose tail is heavy."""
    noise = draw.uniform(0.5, 1.0)
    return [math.exp(draw.gauss(0, noise)) for _ in range(count)]


def _adversary(draw: random.Random, count: int) -> list[float]:
    """One of two models against each other: it swings around nothing."""
    period = draw.uniform(15, 60)
    return [math.sin(at / period) + draw.gauss(0, 0.3) for at in range(count)]


def _margin(draw: random.Random, count: int) -> list[float]:
    """One of a margin: nothing, most of the time."""
    share = draw.uniform(0.1, 0.6)
    return [draw.expovariate(1) if draw.random() < share else 0.0 for _ in range(count)]


def _warm_up(draw: random.Random, count: int) -> list[float]:
    """One whose larger part is faded in, by a power of the time."""
    power, until = draw.choice((1, 2, 3)), draw.randrange(20, 100)
    return [
        1e-3 + min(1.0, at / until) ** power * math.exp(draw.gauss(0, 0.05)) for at in range(count)
    ]


def _rise(draw: random.Random, count: int) -> list[float]:
    """One of a policy, whose values rise with what it earns."""
    rate = draw.uniform(0.005, 0.03)
    return [math.exp(rate * at) + draw.gauss(0, 0.3) for at in range(count)]


def _epochs(draw: random.Random, count: int) -> list[float]:
    """One that learns by heart: it falls with each epoch, by a step."""
    each = draw.randrange(20, 60)
    return [2.0 * 0.6 ** (at // each) * math.exp(draw.gauss(0, 0.1)) for at in range(count)]


def _outliers(draw: random.Random, count: int) -> list[float]:
    """One with a bad batch now and then, which the training overcomes at once."""
    losses = [1 + draw.gauss(0, 0.1) for _ in range(count)]
    for at in range(30, count - 2, 40):
        losses[at] *= draw.uniform(3, 100)
    return losses


LOSSES: tuple[Callable[[random.Random, int], list[float]], ...] = (
    *(_fall, _converge, _restart, _single_rows, _adversary),
    *(_margin, _warm_up, _rise, _epochs, _outliers),
)


def _norms(draw: random.Random, count: int) -> list[float]:
    """Norms of the gradients, with single steps up to a thousand times the usual."""
    noise = draw.uniform(0.1, 1.0)
    norms = [math.exp(draw.gauss(0, noise)) for _ in range(count)]
    for at in range(30, count - 2, 50):
        norms[at] *= draw.uniform(10, 1000)
    return norms


def _memory(draw: random.Random, count: int) -> list[float]:
    """Memory of a process: it gets warm, fills a cache, walks at random, or is taken by steps."""
    kind, size, sizes = draw.randrange(4), draw.uniform(500, 4000), []
    first_epoch = count // 3 - 1
    cached = draw.uniform(500, 3000) / first_epoch
    for at in range(count):
        if kind == 0:
            size += 2000 * math.exp(-at / 10) / 10
        elif kind == 1:
            size += cached if at < first_epoch else 0
        elif kind == 2:
            size += draw.gauss(0, 20)
        else:
            size += draw.choice((300, -300, 0)) if at % 40 == 0 else 0
        sizes.append(max(300.0, size + draw.gauss(0, 2)))
    return sizes


def make_healthy(draw: random.Random, number: int) -> Points:
    """Return the metrics of a training, of the kind with this number."""
    count = draw.randrange(100, 600)
    losses = LOSSES[number % len(LOSSES)](draw, count)
    norms, rss, device = _norms(draw, count), _memory(draw, count), _memory(draw, count)
    return [
        {
            "train/loss": losses[at],
            "train/grad_norm": norms[at],
            "memory/host_rss_mib": rss[at],
            "memory/allocated_mib": device[at],
        }
        for at in range(count)
    ]
