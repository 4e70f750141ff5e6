"""When a training that failed is tried again, how often, and what a retry must find."""

import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from headroom.base.facts import DeviceFacts
from headroom.device.detection import TemporaryDeviceError
from headroom.run import resume
from headroom.run.failures import Failure
from headroom.run.known_runs import RunStart, read_start
from headroom.run.resume import find_failed_start, make_retry_tags, plan_retry
from headroom.settings.run_config import RunConfig

LOST = Failure("device_lost", "CUDA error: unspecified launch failure", cure="always")


def _run(folder: Path, start: RunStart, step: int = 0) -> Path:
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    for old in (folder / "checkpoints").iterdir():
        old.unlink()
    if step:
        (folder / "checkpoints" / f"step-{step:012d}.json").touch()
    start.write(folder)
    return folder


def test_the_wait_doubles_and_progress_begins_the_count_anew(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"run": {"retries": 9}})
    folder = _run(tmp_path / "a", RunStart("a", "1", "mine"), step=40)
    waits = []
    for number in range(1, 8):
        retry = plan_retry(folder, LOST, config)
        assert retry is not None and (retry.number, retry.step) == (number, 40)
        waits.append(round(retry.at - time.time(), -1))
    assert waits == [30, 60, 120, 240, 480, 600, 600]
    found = read_start(folder)
    assert found is not None and (found.retries, found.after) == (7, "device_lost")
    retry = plan_retry(_run(folder, found, step=41), LOST, config)
    assert retry is not None and retry.number == 1


@pytest.mark.parametrize(
    ("before", "most", "failure", "number"),
    [
        (0, 2, LOST, 1),
        (2, 2, LOST, None),
        (0, 0, LOST, None),
        (0, 2, Failure("server_away", "", cure="in a retry"), None),  # its user is there
        (1, 2, Failure("server_away", "", cure="in a retry"), 2),
        (1, 2, Failure("user_code", ""), None),
    ],
)
def test_a_retry_is_planned_where_it_helps_and_as_often_as_was_asked(
    tmp_path: Path, before: int, most: int, failure: Failure, number: int | None
) -> None:
    """Where no more comes the count is 0 again: whoever starts it by hand has all of them."""
    folder = _run(tmp_path / "a", RunStart("a", "1", "mine", retries=before, retried_at=7), step=7)
    retry = plan_retry(folder, failure, RunConfig.model_validate({"run": {"retries": most}}))
    assert (retry.number if retry else None) == number
    found = read_start(folder)
    assert found is not None and found.retries == (number or 0)
    assert plan_retry(tmp_path / "none", failure, RunConfig()) is None


def test_where_nobody_sits_a_first_start_waits_too(tmp_path: Path) -> None:
    """MLflow was away for a minute at 02:00, and the night was lost."""
    away = Failure("server_away", "tracking_uri: no answer", cure="in a retry")
    found = [plan_retry(tmp_path, away, RunConfig(), starts=starts) for starts in (1, 2, 3)]
    assert [retry and retry.number for retry in found] == [1, 2, None]
    assert plan_retry(tmp_path, Failure("bad_input", ""), RunConfig(), starts=1) is None


def test_what_cannot_be_counted_is_not_tried_again(tmp_path: Path) -> None:
    """As where the disk is full: it would never end, or hide why it failed."""
    folder = _run(tmp_path / "a", RunStart("a", "1", "mine"), step=7)
    (folder / "start.json.new").mkdir()
    assert plan_retry(folder, LOST, RunConfig()) is None


def test_no_retry_begins_after_train_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """06:30 would be that of the next day by then. Of a time that is counted each start has all."""
    soon = datetime.now() + timedelta(minutes=2)
    for wait_s, end, is_planned in (
        (30.0, soon.strftime("%H:%M"), True),
        (180.0, soon.strftime("%H:%M"), False),
        (30.0, "2020-01-31 06:30", False),
        (180.0, "2min", True),
    ):
        folder = _run(tmp_path / "a", RunStart("a", "1", "mine"), step=7)
        monkeypatch.setattr(resume, "FIRST_RETRY_S", wait_s)
        planned = plan_retry(folder, LOST, RunConfig.model_validate({"train": {"end": end}}))
        assert (planned is not None) == is_planned, end


def test_a_retry_does_not_fall_back_to_the_cpu_and_any_other_start_may(tmp_path: Path) -> None:
    cpu = DeviceFacts(
        *("cpu", "cpu", None, None, None, "no GPU works", None, None, "2", None, None),
        bf16=False,
        tf32=False,
    )
    was = RunStart("a", "1", "mine", device="cuda", retries=1, after="device_lost")
    with pytest.raises(
        TemporaryDeviceError, match="^device.name: the training was on cuda, and its retry finds"
    ):
        make_retry_tags(was, cpu, RunConfig().run, is_new=False)
    by_hand = RunStart("a", "1", "mine", device="cuda")
    assert make_retry_tags(by_hand, cpu, RunConfig().run, is_new=False) == {}
    assert make_retry_tags(None, cpu, RunConfig().run, is_new=True) == {}


def test_a_flow_run_knows_the_run_that_it_began_before(tmp_path: Path) -> None:
    """It has no checkpoint, so that nothing is gone on with."""
    _run(tmp_path / "20260101-000000-a", RunStart("a", "1", "mine", key="flow run x", retries=1))
    found = find_failed_start(tmp_path, "flow run x")
    assert found is not None and found.run_id == "a"
    assert (
        find_failed_start(tmp_path, "") is None
        and find_failed_start(tmp_path, "flow run y") is None
    )
    _run(tmp_path / "20260101-000000-a", RunStart("a", "1", "mine", key="flow run x"))
    assert find_failed_start(tmp_path, "flow run x") is None
