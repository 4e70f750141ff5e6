"""Phases that are sampled stand for all steps: they sum to what every step took."""

from __future__ import annotations

import random

import pytest

from headroom.watch.sampled_clock import FIRST_BLOCK, WAIT, SampledHostClock


class Steps:
    """Drives a clock by made-up times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("headroom.watch.sampled_clock.perf_counter", lambda: self.now_s)
        monkeypatch.setattr("headroom.watch.phases.perf_counter", lambda: self.now_s)
        self.clock = SampledHostClock()
        self.clock._next_reference = 1e9  # no piece of work between the steps

    def take(self, phases: dict[str, float], *, sample: bool) -> None:
        if sample:
            self.clock.begin(sample=True)
            for phase, seconds in phases.items():
                self.now_s += seconds
                self.clock.mark(phase)
        self.clock.add_step(sum(phases.values()), phases.get(WAIT, 0.0))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def test_phases_sum_to_the_steps_of_which_few_were_sampled(steps: Steps) -> None:
    draw = random.Random(3)
    truth = dict.fromkeys((WAIT, "forward", "backward"), 0.0)
    for step in range(1, 2001):
        phases = {WAIT: draw.expovariate(100), "forward": 0.004, "backward": 0.006}
        for phase, seconds in phases.items():
            truth[phase] += seconds / 2000
        steps.take(phases, sample=step <= FIRST_BLOCK or step % 16 == 0)
    found = steps.clock.compute_step_seconds()
    assert found == pytest.approx(truth)
    assert sum(found.values()) * 2000 == pytest.approx(steps.clock.compute_step_s())
    assert steps.clock.compute_error_pct() == pytest.approx(0.0, abs=1e-5)


def test_a_step_that_grows_is_not_told_by_its_beginning(steps: Steps) -> None:
    """By the first twenty steps and a sixteenth of the others it was 35 % too short."""
    truth = dict.fromkeys(("forward", "backward"), 0.0)
    for step in range(1, 1001):
        phases = {"forward": 0.001 + 1e-5 * step, "backward": 0.002 + 4e-5 * step}
        for phase, seconds in phases.items():
            truth[phase] += seconds / 1000
        steps.take(phases, sample=step <= FIRST_BLOCK or step % 16 == 0)
    assert steps.clock.compute_step_seconds() == pytest.approx(truth, rel=0.02)


def test_the_error_says_how_far_a_share_may_be_off(steps: Steps) -> None:
    """Of shares that vary by chance, two in three lie within one standard error."""
    draw = random.Random(7)
    truth = 0.0
    for step in range(1, 3001):
        share = draw.random()
        truth += share / 3000
        phases = {"forward": 0.01 * share, "backward": 0.01 * (1 - share)}
        steps.take(phases, sample=step <= FIRST_BLOCK or draw.random() < 1 / 16)
    found = steps.clock.compute_step_seconds()["forward"] / 0.01
    error = steps.clock.compute_error_pct()
    assert error is not None and 1.0 < error < 4.0  # 100 x 0.29 / sqrt(200) is 2
    assert abs(found - truth) < 3 * error / 100


def test_a_clock_that_has_seen_no_step_says_nothing(steps: Steps) -> None:
    assert steps.clock.compute_step_seconds() == {}
    assert steps.clock.compute_error_pct() is None and steps.clock.count_sampled_steps() == 0
    steps.take({"forward": 0.1}, sample=True)
    steps.clock.reset()
    assert steps.clock.compute_step_seconds() == {}
