import time

import pytest
import torch

from headroom.watch import phases
from headroom.watch.allocation_log import AllocationLog


def test_on_a_cpu_phases_add_up_to_the_steps() -> None:
    clock = phases.make_phase_clock(torch.device("cpu"))
    for _ in range(3):
        clock.begin(sample=False)
        time.sleep(0.004)
        clock.mark("forward")
        time.sleep(0.012)
        clock.mark("backward")
    spent = clock.compute_step_seconds()
    assert spent["backward"] > spent["forward"] >= 0.004
    assert spent["backward"] >= 0.012


def test_a_reset_forgets_the_first_step() -> None:
    clock = phases.HostClock()
    clock.begin(sample=False)
    time.sleep(0.02)
    clock.mark("forward")
    clock.reset()
    assert clock.compute_step_seconds() == {}
    clock.begin(sample=False)
    clock.mark("forward")
    assert clock.compute_step_seconds()["forward"] < 0.02


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
    clock = phases.EventClock(torch.device("cuda"))
    times = iter([0.0, 3.0, 10.0, 100.0, 105.0, 114.0])
    assert (clock.count_sampled_steps(), phases.HostClock().count_sampled_steps()) == (0, None)
    monkeypatch.setattr(phases, "make_event", lambda device, timed: _Event(next(times)))
    for sample in (True, False, True):
        clock.begin(sample=sample)
        clock.mark("forward")
        clock.mark("backward")
    assert clock.compute_step_seconds() == {}
    clock.collect()
    assert clock.compute_step_seconds() == pytest.approx({"forward": 0.004, "backward": 0.008})
    clock.collect()
    assert clock.compute_step_seconds() == pytest.approx({"forward": 0.004, "backward": 0.008})
    assert clock.count_sampled_steps() == 2


def test_one_step_that_was_held_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices that are the same were told to take 39.5 and 0.9 ms."""
    clock = phases.EventClock(torch.device("cuda"))
    times = iter([0.0, 40.0, 100.0, 101.0, 200.0, 201.2])
    monkeypatch.setattr(phases, "make_event", lambda device, timed: _Event(next(times)))
    for _ in range(3):
        clock.begin(sample=True)
        clock.mark("forward")
    clock.collect()
    assert clock.compute_step_seconds() == pytest.approx({"forward": 0.0012})


def test_what_ends_a_pass_over_a_loader_is_a_wait_and_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [10.0]
    monkeypatch.setattr(phases, "perf_counter", lambda: now[0])
    clock = phases.HostClock()
    clock._next_reference = 1e9
    clock.begin(sample=False)
    clock.end_pass()  # of a training that goes on at the end of one
    assert clock.compute_step_seconds() == {}
    for _ in range(2):
        clock.begin(sample=False)
        for phase in ("data_wait", "forward"):
            now[0] += 1.0
            clock.mark(phase)
    clock.begin(sample=False)
    now[0] += 4.0  # its workers end
    clock.end_pass()
    clock.end_pass()
    assert clock.compute_step_seconds() == {"data_wait": 3.0, "forward": 1.0}
    clock.begin(sample=False)
    clock.collect()
    assert clock._fast._counts.total() == 2


def test_laps_share_out_the_whole_time() -> None:
    watch = phases.Stopwatch()
    for part in ("a", "b", "a"):
        time.sleep(0.005)
        watch.lap(part)
    assert watch.seconds["a"] >= 0.01
    assert sum(watch.seconds.values()) == pytest.approx(watch.compute_total_s(), abs=0.01)


def test_a_fast_step_is_what_one_in_twenty_is_faster_than(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that something else came between, four of five, do not move it."""
    now = [0.0]
    monkeypatch.setattr(phases, "perf_counter", lambda: now[0])
    clock = phases.HostClock()
    for step in range(101):  # the first is forgotten
        assert clock.compute_fast_step_s() is None or step > phases.LEAST_TIMES
        clock.begin(sample=False)
        now[0] += 0.002 if step % 5 == 0 else 0.009
        clock.mark("forward")
        if step == 0:
            clock.reset()
        now[0] += 1.0  # between two steps
    assert clock.compute_fast_step_s() == pytest.approx(0.002, rel=0.002)


def test_the_machine_is_timed_by_a_fixed_piece_of_work_between_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As often as time passes, not steps; it belongs to no step and to no phase."""
    now, took = [0.0], iter([0.0001] * 20 + [0.0009] * 60)
    monkeypatch.setattr(phases, "perf_counter", lambda: now[0])

    def work(*_: object, **__: object) -> None:
        now[0] += next(took)

    clock = phases.HostClock()
    monkeypatch.setattr(torch, "mm", work)
    for _ in range(4 * 79):
        clock.begin(sample=False)
        now[0] += phases.REFERENCE_EVERY_S / 4
        clock.mark("forward")
    assert clock.compute_reference_s() == pytest.approx(0.0001, rel=0.002)
    assert clock.compute_fast_step_s() == pytest.approx(phases.REFERENCE_EVERY_S / 4, rel=0.002)
    assert sum(clock.compute_step_seconds().values()) == pytest.approx(phases.REFERENCE_EVERY_S / 4)
    clock.reset()
    assert clock.compute_reference_s() is None


def test_nobody_is_told_the_memory_of_that_work() -> None:
    seen = AllocationLog(torch.device("cpu"))
    with seen.count_allocations():
        clock = phases.HostClock()
        clock.begin(sample=False)
    assert seen.peak_bytes == 0


def test_a_fixed_piece_of_work_is_kept_evenly_over_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headroom.watch.phases.REFERENCE_EVERY_S", 0.0)
    monkeypatch.setattr("headroom.watch.phases.REFERENCE_LATER_S", 0.0)
    monkeypatch.setattr("headroom.watch.phases.MOST_REFERENCES", 16)
    clock = phases.HostClock()
    for _ in range(200):
        clock.begin(sample=True)
    kept = clock.list_references()
    assert 8 <= len(kept) < 16 and all(seconds > 0 for _, seconds in kept)
    times = [at_s for at_s, _ in kept]
    assert times == sorted(times)
    assert phases.EventClock(torch.device("cpu")).list_references() == []
