"""Phases that are sampled stand for all steps: they sum to what every step took."""

from __future__ import annotations

import random

import pytest
import torch

from headroom.watch.sampled_clock import (
    FIRST_BLOCK,
    WAIT,
    SampledEventClock,
    SampledHostClock,
)


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


class Event:
    """Is reached when the device is done with what was before it."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at_s = gpu, 0.0

    def record(self) -> None:
        self.at_s = max(self.gpu.host_s, self.gpu.device_s)

    def query(self) -> bool:
        return self.at_s <= self.gpu.host_s

    def elapsed_time(self, later: Event) -> float:
        return 1000 * (later.at_s - self.at_s)


class Gpu:
    """A host and a device that works on while the host does something else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host_s = self.device_s = 100.0
        monkeypatch.setattr("headroom.watch.phases.make_event", lambda *_, timed: Event(self))
        monkeypatch.setattr("headroom.watch.phases.perf_counter", lambda: self.host_s)
        self.clock = SampledEventClock(torch.device("cuda"))
        self.began_s, self.log_s = self.host_s, 0.0

    def call(self, host_s: float, device_s: float) -> None:
        """Launch work: the host takes so long for its calls, the device so long for it."""
        begin_s = max(self.host_s, self.device_s)
        self.host_s += host_s
        self.device_s = max(begin_s + device_s, self.host_s)

    def wait(self) -> None:
        self.host_s = max(self.host_s, self.device_s)

    def step(self, host_s: float, device_s: float, *, sample: bool = True) -> None:
        """Forward, backward and optimizer: a third, a half and a sixth of both."""
        self.clock.begin(sample=sample)
        for phase, share in (("forward", 1 / 3), ("backward", 1 / 2), ("optimizer", 1 / 6)):
            self.call(share * host_s, share * device_s)
            self.clock.mark(phase)
        self.clock.add_step(0.0, 0.0)

    def log(self, seconds: float) -> None:
        """Wait for the device, and then do something."""
        began_s = self.host_s
        self.clock.begin_part()
        self.wait()
        self.host_s += seconds
        self.log_s += self.host_s - began_s
        self.clock.end_part("log", self.host_s - began_s)

    def between_ms(self, steps: int) -> float:
        """What is left of the loop beside the device's steps and the log, of a step."""
        waits_s = self.clock.compute_waits_s().get("log", 0.0)
        left_s = self.host_s - self.began_s - self.log_s + waits_s - self.clock.compute_step_s()
        return 1000 * left_s / steps


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_on_a_gpu_a_step_is_what_it_takes_the_device(gpu: Gpu) -> None:
    """Whether the host reads a loss after each step, or never."""
    for is_read in (True, False):
        gpu.clock.reset()
        gpu.began_s = gpu.host_s
        for step in range(1, 401):
            gpu.step(0.001, 0.006, sample=step <= FIRST_BLOCK or step % 16 == 0)
            if is_read:
                gpu.wait()
        gpu.wait()
        gpu.clock.collect()
        found = gpu.clock.compute_step_seconds()
        assert found == pytest.approx({"forward": 0.002, "backward": 0.003, "optimizer": 0.001})
        assert gpu.between_ms(400) == pytest.approx(0.0, abs=0.01)
        assert gpu.clock.compute_host_bound_share() == 0.0


def test_what_a_log_waits_for_the_steps_is_the_steps(gpu: Gpu) -> None:
    """A log that took two fifths of the time was told to take 72 %."""
    for _ in range(100):
        gpu.step(0.001, 0.006)
        gpu.log(0.004)
    gpu.clock.collect()
    assert gpu.log_s == pytest.approx(100 * 0.009)
    assert gpu.clock.compute_waits_s() == pytest.approx({"log": 100 * 0.005})
    assert gpu.between_ms(100) == pytest.approx(0.0, abs=0.01)


def test_code_between_the_steps_is_what_the_device_waits_for_it(gpu: Gpu) -> None:
    for _ in range(100):
        gpu.step(0.001, 0.006)
        gpu.host_s += 0.020  # of which the device works five
    gpu.clock.collect()
    assert gpu.between_ms(100) == pytest.approx(15.0, abs=0.2)


def test_a_device_that_waits_for_each_call_is_bound_by_the_host(gpu: Gpu) -> None:
    for _ in range(50):
        gpu.step(0.006, 0.001)
        gpu.wait()
    gpu.clock.collect()
    assert gpu.clock.compute_host_bound_share() == 1.0
    assert SampledHostClock().compute_host_bound_share() is None


def test_steps_of_a_gpu_that_grow_are_not_told_by_their_beginning(gpu: Gpu) -> None:
    whole_s = 0.0
    for step in range(1, 1001):
        device_s = 0.002 + 1e-5 * step
        whole_s += device_s
        gpu.step(0.001, device_s, sample=step <= FIRST_BLOCK or step % 16 == 0)
    gpu.wait()
    gpu.clock.collect()
    assert gpu.clock.compute_step_s() == pytest.approx(whole_s, rel=0.02)
    error = gpu.clock.compute_error_pct()
    assert error is not None and error < 1.0


def test_an_event_clock_forgets_what_was_before_the_first_step(gpu: Gpu) -> None:
    gpu.step(0.001, 3.0)
    gpu.clock.reset()
    assert gpu.clock.compute_step_seconds() == {} and gpu.clock.compute_step_s() == 0.0
    gpu.wait()
    gpu.step(0.001, 0.006)
    gpu.wait()
    gpu.clock.collect()
    assert sum(gpu.clock.compute_step_seconds().values()) == pytest.approx(0.006)
