"""What is told to change does: by a slope beyond chance, whatever a few readings are."""

from __future__ import annotations

import random

import pytest

from headroom.watch.trends import MOST, Trends, estimate_slope


def test_a_slope_is_that_of_most_readings() -> None:
    xs = [float(x) for x in range(40)]
    ys = [3 * x + (1000 if x % 9 == 0 else 0) for x in xs]
    slope = estimate_slope(xs, ys)
    assert slope is not None and slope.value == pytest.approx(3, rel=0.05)
    assert slope.low <= 3 <= slope.high


def test_what_does_not_change_has_a_slope_of_none_in_99_of_100() -> None:
    draw = random.Random(1)
    outside = 0
    for _ in range(400):
        slope = estimate_slope([*map(float, range(30))], [draw.gauss(0, 1) for _ in range(30)])
        assert slope is not None
        outside += not slope.low <= 0 <= slope.high
    assert outside <= 12


def test_many_readings_become_few_and_say_the_same() -> None:
    trends = Trends()
    for at in range(5000):
        trends.add_steps(2, 0.02 * (1 + at / 5000), 0.01)
    assert len(trends.steps) <= 2 * MOST
    assert 9_900 < sum(steps for steps, _, _ in trends.steps) <= 10_000
    growth = trends.compute_step_growth()
    assert growth is not None
    assert growth.start <= growth.first
    assert growth.first == pytest.approx(0.01, rel=0.02)
    assert growth.change == pytest.approx(0.01, rel=0.05) and growth.least > 0.009
    by_processor = trends.compute_step_growth(by_processor=True)
    assert by_processor is not None and by_processor.change == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("of_device", [False, True])
def test_memory_that_creeps_is_told_and_memory_that_warms_up_is_not(of_device: bool) -> None:
    def measure(size: float) -> Trends:
        return (0.0, size) if of_device else (size, 0.0)  # type: ignore[return-value]

    creeping, warming, noisy = Trends(), Trends(), Trends()
    draw = random.Random(5)
    for step in range(0, 2000, 10):
        creeping.add_memory(step, *measure(400 + step / 4))
        warming.add_memory(step, *measure(400 + min(step, 300)))
        noisy.add_memory(step, *measure(400 + draw.uniform(0, 80)))
    growth = creeping.compute_memory_growth(of_device=of_device)
    assert growth is not None and growth.change == pytest.approx(400, rel=0.05)
    assert warming.compute_memory_growth(of_device=of_device) is None
    assert noisy.compute_memory_growth(of_device=of_device) is None


def test_of_few_readings_nothing_is_said() -> None:
    trends = Trends()
    for step in range(6):
        trends.add_steps(1, step + 1.0, step + 1.0)
        trends.add_memory(step, 100.0 * step, 0.0)
    assert trends.compute_step_growth() is None and trends.compute_memory_growth() is None
