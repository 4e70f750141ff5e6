"""Alerts come where something is wrong, once each, and never in a healthy training."""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from headroom.base.facts import DeviceFacts
from headroom.run import alerts
from headroom.run.alerts import (
    Alerts,
    describe_stack,
    find_creep,
    find_device_mib,
    is_within_step,
    read_told,
)
from headroom.watch.stack_samples import MAY_LOOK
from tests.run.healthy_series import make_healthy
from tests.watch.stacks import make_place

MIB = 1024**2
FREE_MIB = 16 * 1024

LOOKS = pytest.mark.skipif(not MAY_LOOK, reason="this Python may crash of a look")


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with 16 GiB that are free, and without mapped files."""
    monkeypatch.setattr(alerts.host_memory, "read_free_bytes", lambda: FREE_MIB * MIB)
    monkeypatch.setattr(alerts, "_read_files_mib", lambda: 0.0)


class Training:
    """Alerts of a training that is made up, and its clock."""

    def __init__(self) -> None:
        self.now_s, self.step = 0.0, 0
        self.told: list[str] = []
        self.alerts = Alerts(
            lambda cause, text: self.told.append(f"{cause} at {self.step}: {text}"),
            now_s=lambda: self.now_s,
        )

    def log(self, metrics: Mapping[str, float], *, after_s: float = 1.0) -> None:
        self.now_s += after_s
        self.step += 10
        self.alerts.add(metrics, self.step)
        if self.step % 50 == 0:
            self.alerts.look()


def test_in_200_healthy_trainings_there_is_no_alert() -> None:
    told: list[str] = []
    for number in range(200):
        draw, training = random.Random(number), Training()
        points = make_healthy(draw, number)
        training.alerts.device_mib = 40.0 * 1024
        if number % 2:
            training.alerts.steps, training.alerts.epochs = 10 * len(points), 3
        for metrics in points:
            training.log(metrics, after_s=draw.uniform(1, 10))
        told += training.told
    assert told == []


def test_a_loss_that_jumps_for_two_log_points_is_told_once() -> None:
    draw, training = random.Random(0), Training()
    for at in range(200):
        loss = (20.0 if at in (100, 101, 102, 150, 151) else 1.0) + draw.gauss(0, 0.05)
        training.log({"train/loss": loss})
    (said,) = training.told
    assert said.startswith("loss spike at 1020: loss spike: train/loss is ")
    assert "at step 1,020 and has jumped to 20" in said
    assert "times the median of the last 50 log points" in said


def test_one_bad_log_point_is_no_spike() -> None:
    draw, training = random.Random(0), Training()
    for at in range(200):
        training.log({"train/loss": (100.0 if at % 40 == 39 else 1.0) + draw.gauss(0, 0.05)})
    assert training.told == []


@pytest.mark.parametrize("count", [0, 10, 18])
def test_nothing_is_said_of_a_loss_before_20_log_points(count: int) -> None:
    draw, training = random.Random(0), Training()
    for _ in range(count):
        training.log({"loss": 1.0 + draw.gauss(0, 0.05)})
    for _ in range(2):
        training.log({"loss": 50.0})
    assert training.told == []


def test_a_spike_of_what_has_come_to_nothing_is_not_told() -> None:
    draw, training = random.Random(0), Training()
    for at in range(200):
        loss = 2.0 * math.exp(-at / 10) + 1e-6 * (1 + draw.gauss(0, 0.05))
        training.log({"train/loss": 1e-3 if at in (190, 191) else loss})
    assert training.told == []


def test_a_loss_that_doubles_at_each_log_point_is_on_its_way_to_no_number() -> None:
    draw, training = random.Random(0), Training()
    for at in range(60):
        training.log({"train/loss": 2.0 * 2.2 ** max(0, at - 30) * (1 + draw.gauss(0, 0.02))})
    spike, ahead = training.told
    assert spike.startswith("loss spike at 3")
    assert ahead.startswith("NaN ahead at 4")
    assert "train/loss has grown from " in ahead and "within 10 log points" in ahead


def test_a_loss_that_diverges_from_the_beginning_is_told_after_eleven_log_points() -> None:
    training = Training()
    for at in range(15):
        training.log({"train/loss": 2.0 * 3.0**at})
    assert [said[:16] for said in training.told] == ["NaN ahead at 110"]


def test_a_gradient_norm_that_stays_a_hundredfold_is_told_and_one_step_of_it_is_not() -> None:
    draw, training = random.Random(0), Training()
    for at in range(100):
        norm = 900.0 if at in (40, 70, 71) else 1.0
        training.log({"train/grad_norm": norm * (1 + at / 100) * math.exp(draw.gauss(0, 0.3))})
    (said,) = training.told
    assert said.startswith("NaN ahead at 720: NaN ahead: train/grad_norm is ")
    assert "stays above 100 times the median" in said


def test_what_is_no_number_is_no_alert_and_spoils_none() -> None:
    draw, training = random.Random(0), Training()
    for at in range(100):
        loss = math.nan if at % 7 == 0 else 1.0 + draw.gauss(0, 0.05)
        training.log({"train/loss": 30.0 if at > 90 and at % 7 else loss, "train/grad_norm": loss})
    assert [said[:14] for said in training.told] == ["loss spike at "]


@pytest.mark.parametrize(("name", "is_device"), [("host_rss", False), ("allocated", True)])
def test_memory_that_will_not_last_the_planned_steps_is_told_with_the_step(
    name: str, is_device: bool
) -> None:
    draw, training = random.Random(0), Training()
    training.alerts.steps = 10_000
    training.alerts.device_mib = 20.0 * 1024
    for at in range(100):
        size = 1000 + 30 * at + draw.gauss(0, 20)
        training.log({f"memory/{name}_mib": size})
    (said,) = training.told
    kind = "device" if is_device else "host"
    assert f"{kind} memory creeps: " in said and "ends in out of memory by about step" in said
    told_at = int(said.split("by about step ")[1].split(" of 10,000")[0].replace(",", ""))
    left = 19 * 1024 / 3 if is_device else FREE_MIB / 3
    assert told_at == pytest.approx(left + (0 if is_device else training.step / 5), rel=0.15)


def test_memory_that_lasts_the_planned_steps_is_not_told() -> None:
    training = Training()
    training.alerts.steps = 1_200
    for at in range(100):
        training.log({"memory/host_rss_mib": 1000.0 + 30 * at})
    assert training.told == []


def test_of_a_loop_without_a_plan_a_creep_is_told_when_a_quarter_of_what_is_free_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training()
    left_mib = 16 * 1024.0
    monkeypatch.setattr(alerts.host_memory, "read_free_bytes", lambda: left_mib * MIB)
    for _ in range(500):
        left_mib -= 20
        training.log({"memory/host_rss_mib": 1000 + 16 * 1024 - left_mib})
        if training.told:
            break
    assert 0.2 < 1 - left_mib / (16 * 1024) < 0.3


def test_what_the_first_epoch_caches_is_no_creep_and_what_would_end_it_is() -> None:
    for cached_mib, is_told in ((3000, False), (40_000, True)):
        training = Training()
        training.alerts.steps, training.alerts.epochs = 10_000, 10
        for at in range(100):
            training.log({"memory/host_rss_mib": 1000 + at * cached_mib / 100})
        for _ in range(100):
            training.log({"memory/host_rss_mib": 1000.0 + cached_mib})
        assert len(training.told) == is_told


def test_files_that_are_mapped_are_no_creep(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    training.alerts.steps = 100_000
    monkeypatch.setattr(alerts, "_read_files_mib", lambda: 300 + 3.0 * training.step)
    for at in range(200):
        training.log({"memory/host_rss_mib": 1000.0 + 30 * at})
    assert training.told == []


def test_memory_by_stairs_is_no_creep() -> None:
    readings = [(at, 1000.0 + 400 * (at // 50)) for at in range(200)]
    assert find_creep(readings, 100.0, 1e9) is None
    assert find_creep([(at, 1000.0 + 8 * at) for at in range(200)], 100.0, 1e9) is not None


@LOOKS
def test_a_step_that_does_not_come_is_told_with_where_it_stands() -> None:
    training = Training()
    training.alerts.is_within_step = lambda _: True
    for _ in range(10):
        training.log({"train/loss": 1.0}, after_s=2.0)
    for after_s, told in ((59, 0), (2, 1), (1000, 1)):
        training.now_s += after_s
        training.alerts.look()
        assert len(training.told) == told
    (said,) = training.told
    assert (
        "no step: nothing for 1:01 after step 100, where the longest wait before was 0:02" in said
    )
    assert "it stands at test_alerts.py:" in said and "`training.alerts.look()`" in said
    assert "healthy" not in said and "\n" not in said


@LOOKS
def test_the_longest_wait_before_makes_patient() -> None:
    training = Training()
    training.alerts.is_within_step = lambda _: True
    for _ in range(10):
        training.log({"train/loss": 1.0}, after_s=30.0)
    training.now_s += 599
    training.alerts.look()
    assert training.told == []
    training.now_s += 2
    training.alerts.look()
    assert len(training.told) == 1


@LOOKS
def test_beside_the_steps_ten_minutes_are_waited() -> None:
    training = Training()
    training.alerts.is_within_step = lambda _: False
    for _ in range(10):
        training.log({"train/loss": 1.0})
    training.now_s += 599
    training.alerts.look()
    assert training.told == []
    training.now_s += 2
    training.alerts.look()
    assert len(training.told) == 1


def test_a_thread_without_a_line_of_the_users_is_a_notebook_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training()
    monkeypatch.setattr(
        alerts, "list_positions", lambda _: [make_place(threading.__file__, 3, "wait")]
    )
    training.alerts.is_within_step = lambda _: True
    for _ in range(10):
        training.log({"train/loss": 1.0})
    training.now_s += 10_000
    training.alerts.look()
    assert training.told == []


def test_a_training_is_within_a_step_but_for_evaluation_checkpoint_and_compiling() -> None:
    loop = make_place("/x/headroom/training/loop.py", 1, "fit_model")
    user = make_place("/home/me/data.py", 1, "__getitem__")
    assert is_within_step([user, loop])
    for beside in ("/x/headroom/training/evaluation.py", "/y/torch/_dynamo/eval_frame.py"):
        assert not is_within_step([user, make_place(beside, 1, "go"), loop])
    assert not is_within_step([user])


def test_of_a_stack_the_users_lines_are_told_and_eight_at_most() -> None:
    library = make_place(threading.__file__, 1, "wait")
    mine = [make_place(f"/home/me/no_{number}.py", number, "go") for number in range(20)]
    assert describe_stack([library, *mine]).split(", called from ") == [
        f"no_{number}.py:{number}" for number in range(8)
    ]
    assert describe_stack([library]).startswith("threading.py:1")


def test_what_fails_within_it_ends_it_and_nothing_else() -> None:
    def fail(cause: str, text: str) -> None:
        raise OSError("no room")

    failing = Alerts(fail)
    for at in range(15):
        failing.add({"train/loss": 2.0 * 3.0**at}, at)


def test_after_the_end_nothing_is_told() -> None:
    training = Training()
    training.alerts.start()
    training.alerts.stop()
    training.alerts.stop()
    for at in range(15):
        training.log({"train/loss": 2.0 * 3.0**at})
    assert training.told == []


def test_what_a_damaged_file_says_was_told_is_nothing(tmp_path: Path) -> None:
    file = tmp_path / "alerts.json"
    for text in ("", "[1]", "{", "\x00"):
        file.write_text(text)
        assert read_told(file) == {}
    file.write_text(json.dumps({"a": "b"}))
    assert read_told(file) == {"a": "b"}


@pytest.mark.parametrize(
    ("kind", "total", "limit", "expected"),
    [
        ("cpu", 100, 50.0, None),
        ("cuda", 100, None, 90.0),
        ("cuda", 100, 50.0, 50.0),
        ("cuda", 100, 95.0, 90.0),
        ("mps", None, None, None),
        ("mps", None, 50.0, 50.0),
    ],
)
def test_what_a_run_may_have_of_its_device(
    kind: str, total: int | None, limit: float | None, expected: float | None
) -> None:
    device = DeviceFacts(
        *(kind, kind, None, None, None, "", total and total * MIB, None, "2", None, None),
        *(False, False),
        baseline_bytes=10 * MIB,
    )
    assert find_device_mib(device, limit) == expected


def test_a_log_point_costs_some_microseconds() -> None:
    from time import process_time

    silent: Callable[[str, str], None] = lambda cause, text: None  # noqa: E731
    taking, draw = Alerts(silent), random.Random(0)
    points = [
        {"train/loss": 1 + draw.random(), "train/grad_norm": 1 + draw.random()} for _ in range(5000)
    ]
    began_s = process_time()
    for at, metrics in enumerate(points):
        taking.add(metrics, at)
    assert (process_time() - began_s) / len(points) < 200e-6
