import time

import pytest
import torch

from tasks.engine.base import timing


def test_on_a_cpu_phases_add_up_to_the_steps() -> None:
    clock = timing.phase_clock(torch.device("cpu"))
    for _ in range(3):
        clock.begin(sample=False)
        time.sleep(0.004)
        clock.mark("forward")
        time.sleep(0.012)
        clock.mark("backward")
    phases = clock.seconds_per_step()
    assert phases["backward"] > phases["forward"] >= 0.004
    assert phases["backward"] >= 0.012


def test_a_reset_forgets_the_first_step() -> None:
    clock = timing.HostClock()
    clock.begin(sample=False)
    time.sleep(0.02)
    clock.mark("forward")
    clock.reset()
    assert clock.seconds_per_step() == {}
    clock.begin(sample=False)
    clock.mark("forward")
    assert clock.seconds_per_step()["forward"] < 0.02


class _Event:
    """A device's event that was reached at the time it is made with, in milliseconds."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: "_Event") -> float:
        return later.at_ms - self.at_ms


def test_events_are_read_on_sampled_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = timing.EventClock(torch.device("cuda"))
    times = iter([0.0, 3.0, 10.0, 100.0, 105.0, 114.0])
    monkeypatch.setattr(timing, "new_event", lambda device, timed: _Event(next(times)))
    for sample in (True, False, True):
        clock.begin(sample=sample)
        clock.mark("forward")
        clock.mark("backward")
    assert clock.seconds_per_step() == {}
    clock.collect()
    assert clock.seconds_per_step() == pytest.approx({"forward": 0.004, "backward": 0.008})
    clock.collect()
    assert clock.seconds_per_step() == pytest.approx({"forward": 0.004, "backward": 0.008})


def test_laps_share_out_the_whole_time() -> None:
    watch = timing.Stopwatch()
    for part in ("a", "b", "a"):
        time.sleep(0.005)
        watch.lap(part)
    assert watch.seconds["a"] >= 0.01
    assert sum(watch.seconds.values()) == pytest.approx(watch.total_s(), abs=0.01)


def test_a_fast_step_is_what_one_in_twenty_is_faster_than(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that something else came between, four of five, do not move it."""
    now = [0.0]
    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])
    clock = timing.HostClock()
    for step in range(101):  # the first is forgotten
        assert clock.fast_step_s() is None or step > timing.LEAST
        clock.begin(sample=False)
        now[0] += 0.002 if step % 5 == 0 else 0.009
        clock.mark("forward")
        if step == 0:
            clock.reset()
        now[0] += 1.0  # between two steps
    assert clock.fast_step_s() == pytest.approx(0.002, rel=0.002)
