"""How a training is shown by what its folder holds, from its first line to its end."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from headroom.base.file_lock import FileLock
from headroom.run.known_runs import (
    Announcement,
    KnownRun,
    RunStart,
    find_called_runs,
    list_known_runs,
)
from tests.run_folders import make_line, write_end

LOSS, PEAK = "train/loss", "memory/peak_allocated_mib"


@pytest.fixture(autouse=True)
def leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADROOM_LEASES", str(tmp_path / "leases"))


def _folder(runs: Path, place: str = "20260101-000000-a", **start: Any) -> Path:
    folder = runs / place
    folder.mkdir(parents=True)
    known = {"run_id": "abc", "name": "mine", "steps": 100, "epochs": 4, **start}
    RunStart(experiment_id="1", **known).write(folder)
    return folder


def _log(folder: Path, *points: tuple[float, int, dict[str, float]]) -> None:
    with open(folder / "events.jsonl", "ab") as journal:
        for at_s, step, metrics in points:
            journal.write(make_line(metrics, step, unix_ms=round(at_s * 1000)))


def _one(runs: Path) -> KnownRun:
    (run,) = list_known_runs(runs)
    return run


def test_what_is_left_follows_from_the_pace_since_it_began_or_went_on(tmp_path: Path) -> None:
    now = time.time()
    folder = _folder(tmp_path, began_at=now - 60, spent_s=100.0)
    _log(folder, (now - 9000, 5, {LOSS: 3.0, PEAK: 7.0}))  # the night before
    _log(folder, (now - 40, 10, {LOSS: 2.0, PEAK: 5.0}), (now, 30, {LOSS: 1.0}))
    with Announcement(folder, "mine") as mine:
        mine.tell(stage="train model", run_id="abc", steps=100, epochs=4, device="cuda:0")
        run = _one(tmp_path)
    assert (run.state, run.live, run.device, run.pid) == ("training", True, "cuda:0", os.getpid())
    assert (run.step, run.steps, run.epoch, run.epochs) == (30, 100, 2, 4)
    assert (run.loss, run.peak_mib) == (1.0, 7.0)
    assert run.eta_s == pytest.approx(140, abs=3) and run.total_s == pytest.approx(160, abs=3)


def test_of_a_journal_of_gigabytes_only_the_ends_are_read(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    _log(folder, (1.0, 1, {PEAK: 7.0}))
    with open(folder / "events.jsonl", "r+b") as journal:
        journal.truncate(5 << 30)  # a hole, which costs no disk
    _log(folder, (2.0, 9, {LOSS: 1.0}), (3.0, 10, {LOSS: 0.5}))
    began = time.process_time()
    run = _one(tmp_path)
    assert (run.step, run.loss, run.peak_mib) == (10, 0.5, 7.0)
    assert time.process_time() - began < 1


def test_another_user_s_folder_is_told_of_by_its_announcement_alone(tmp_path: Path) -> None:
    with Announcement(tmp_path / "not to be read", "theirs") as theirs:
        theirs.tell(stage="train model", run_id="abc", steps=100, epochs=4)
        run = _one(tmp_path)
    assert (run.name, run.state, run.steps, run.step) == ("theirs", "training", 100, None)


@pytest.mark.parametrize("word", ["abcdef", "abcdef12", "mine", "night", "20260101-000000-a"])
def test_a_person_calls_it_by_its_id_name_key_or_folder(tmp_path: Path, word: str) -> None:
    folder = _folder(tmp_path, run_id="abcdef12", key="night")
    _folder(tmp_path, "20260102-000000-b", run_id="b" * 8, name="another")
    (run,) = find_called_runs(word, list_known_runs(tmp_path))
    assert run.folder == str(folder)
    with Announcement(folder, "mine") as mine:
        mine.tell(stage="train model", run_id="abcdef12", steps=100)
        (run,) = find_called_runs(word, list_known_runs(tmp_path))
        assert run.live


def test_how_a_run_ended_its_folder_says(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "device.json").write_text('{"name": "cpu"}')
    assert (_one(tmp_path).state, _one(tmp_path).device) == ("gone", "cpu")
    assert "flows.tidy" in _one(tmp_path).reason and not _one(tmp_path).resume
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step-000000000007.json").touch()
    assert _one(tmp_path).resume == "python -m flows.train --resume abc"
    with FileLock(folder / "sending.lock") as lock:
        lock.take()
        assert _one(tmp_path).state == "sending"
    with FileLock(folder / "training.lock") as lock:
        lock.take()
        assert (_one(tmp_path).state, _one(tmp_path).live) == ("training", True)
    (folder / "sent.json").write_text('{"closed": true}')
    assert _one(tmp_path).state == "ended"
    end = {"status": "FAILED", "error": "it\nbroke", "tags": {"device": "cuda:1"}, "metrics": {}}
    write_end(folder, end)
    run = _one(tmp_path)
    assert (run.state, run.reason, run.device) == ("FAILED", "it broke", "cuda:1")
    stopped = {"status": "FINISHED", "stopped": "train.end: 2s are over"}
    write_end(folder, stopped)
    assert _one(tmp_path).resume and _one(tmp_path).reason == stopped["stopped"]
    write_end(folder, {**stopped, "stopped": ""})
    assert (_one(tmp_path).state, _one(tmp_path).resume) == ("FINISHED", "")


def test_the_newest_come_first_and_no_more_than_asked_for(tmp_path: Path) -> None:
    for day in (1, 3, 2):
        _folder(tmp_path, f"2026010{day}-000000-a")
    (tmp_path / "20260104-000000-a").mkdir()
    (tmp_path / "20260104-000000-a" / "start.json").write_text("{")
    found = [Path(run.folder).name for run in list_known_runs(tmp_path, last=2)]
    assert found == ["20260103-000000-a", "20260102-000000-a"]
    assert list_known_runs(tmp_path, last=0) == [] and len(list_known_runs(tmp_path)) == 3


def test_a_person_calls_all_trainings_of_a_process_by_its_number() -> None:
    """An id by its first letters is one training, and a process may have several."""
    runs = [KnownRun(name, "training", live=True, pid=7) for name in "abb"]
    runs.append(KnownRun("c", "training", live=True, pid=7, run_id="abcdef0123"))
    assert [run.name for run in find_called_runs("abcdef", runs)] == ["c"]
    assert find_called_runs("7", runs) == runs
