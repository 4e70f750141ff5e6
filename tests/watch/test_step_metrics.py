from typing import Any

import pytest
import torch

from headroom.watch import step_metrics
from headroom.watch.allocation_log import AllocationLog
from headroom.watch.memory_by_owner import MemoryByOwner
from headroom.watch.memory_meter import MemoryMeter
from headroom.watch.phases import HostClock, Phases, Stopwatch
from headroom.watch.step_metrics import AGE_S, Diverged, StepMetrics

CPU = torch.device("cpu")


class _Event:
    """A device's event; synchronize() is the wait that the loop must not make too early."""

    waits = 0
    now_ms = 0.0  # the device's own time

    def record(self) -> None:
        self.at_ms = _Event.now_ms

    def elapsed_time(self, end: "_Event") -> float:
        return end.at_ms - self.at_ms

    def synchronize(self) -> None:
        _Event.waits += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """StepMetrics of a device that works on its own, and what they logged."""
    monkeypatch.setattr(step_metrics, "make_event", lambda device, timed: _Event())
    monkeypatch.setattr(step_metrics, "READ_EVERY_S", 0.0)
    _Event.waits, _Event.now_ms = 0, 0.0
    logged: list[tuple[int, dict[str, float]]] = []
    made = StepMetrics(
        torch.device("cuda"),
        phases=Phases(
            HostClock(), MemoryMeter(CPU), MemoryByOwner(AllocationLog(CPU), dict), count_every=None
        ),
        watch=Stopwatch(),
        rate=lambda step: 0.1,
        speeds=lambda per_s: {"speed/tokens_per_s": 2 * per_s},
        last_step=4,
        log=lambda metrics, step: logged.append((step, metrics)),
    )
    made.begin(0)
    return made, logged


def _step(made: StepMetrics, loss: float, *, norm: float | None = None) -> torch.Tensor | None:
    _Event.now_ms += 10
    made.add(torch.tensor(loss), rows=4)
    return None if norm is None else torch.tensor(norm)


def test_a_reading_is_logged_one_late_and_waits_only_for_the_one_before(made) -> None:
    made, logged = made
    made.add_log_point(_step(made, 1.0, norm=3.0))
    assert logged == [] and _Event.waits == 0
    made.add_log_point(_step(made, 2.0))
    assert [step for step, _ in logged] == [1] and _Event.waits == 1
    made.drain()
    assert [step for step, _ in logged] == [1, 2] and _Event.waits == 2
    assert logged[0][1]["train/loss"] == 1.0 and logged[0][1]["train/grad_norm"] == 3.0
    assert "train/grad_norm" not in logged[1][1]


def test_points_that_are_read_together_keep_times_of_their_own(made, monkeypatch) -> None:
    """All had the time of their reading: a loss by time fell in vertical jumps."""
    made, logged = made
    monkeypatch.setattr(step_metrics, "READ_EVERY_S", 3600.0)
    clock = {"s": 100.0}
    monkeypatch.setattr(step_metrics, "perf_counter", lambda: clock["s"])
    for loss in (1.0, 2.0, 3.0):
        clock["s"] += 2.0
        made.add_log_point(_step(made, loss))
    made.drain()
    assert [metrics.pop(AGE_S, 0.0) for _, metrics in logged] == [4.0, 2.0, 0.0]
    state = made.state()
    made.restore({**state, "points": [(9, 0.1, 1, None)], "losses": 1, "values": torch.ones(1)})
    assert AGE_S not in logged[-1][1], "a step of another process, whose clock nobody knows"


def test_points_close_to_each_other_are_read_together(made, monkeypatch) -> None:
    made, logged = made
    monkeypatch.setattr(step_metrics, "READ_EVERY_S", 3600.0)
    for loss in (1.0, 2.0, 3.0):
        made.add_log_point(_step(made, loss))
    assert logged == []
    made.drain()
    assert [(step, m["train/loss"]) for step, m in logged] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert ["speed/tokens_per_s" in m for _, m in logged] == [False, False, True]


def test_the_first_step_counts_for_no_speed(made) -> None:
    made, logged = made
    outcome = _step(made, 1.0)
    made.restart()
    made.add_log_point(outcome)
    made.drain()
    assert "speed/samples_per_s" not in logged[0][1]


def test_each_window_has_the_speed_of_its_own_steps_by_the_devices_clock(made) -> None:
    """Two windows read back to back at an epoch's end: the second was told 13,000 times its speed,
    having no time left of the host's."""
    made, logged = made
    made.add_log_point(_step(made, 1.0))
    made.add_log_point(_step(made, 1.0))
    made.drain()
    _Event.now_ms += 5000  # an evaluation
    made.begin(1)
    made.add_log_point(_step(made, 1.0))
    made.drain()
    assert [m["speed/samples_per_s"] for _, m in logged] == pytest.approx([400, 400, 400])


def test_the_last_step_leaves_the_speed_to_the_whole_run(made) -> None:
    """MLflow's curve had two values there: the last window's, and the run's."""
    made, logged = made
    for _ in range(4):
        made.add_log_point(_step(made, 1.0))
    made.drain()
    assert ["speed/samples_per_s" in m for _, m in logged] == [True, True, True, False]
    assert "speed/tokens_per_s" not in logged[-1][1]


def test_a_bad_loss_is_found_one_reading_late_and_nothing_after_it_is_logged(made) -> None:
    made, logged = made
    made.add_log_point(_step(made, 1.0))
    made.add_log_point(_step(made, float("nan")))
    with pytest.raises(Diverged, match="became nan at step 2 .* good loss was 1 at step 1"):
        made.add_log_point(_step(made, 2.0))
    assert [step for step, _ in logged] == [1]
