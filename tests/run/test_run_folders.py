"""Which of the runs on disk is the newest."""

from dataclasses import replace
from pathlib import Path

import pytest

from headroom.run import known_runs
from headroom.run.known_runs import RunStart, choose_start_time, list_run_folders, read_start
from headroom.run.resume import find_resumed_folder, find_unfinished_folder
from tests.run_folders import START


def _run(runs: Path, name: str, start: RunStart) -> Path:
    folder = runs / name
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "step-000000000007.json").touch()
    start.write(folder)
    return folder


def test_the_newest_run_is_the_one_that_was_made_last_whatever_the_clock_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the end of summer time, and from a container in UTC, a key ignored its checkpoint."""
    start = RunStart("a", "1", "mine", key="night", made_at=1e9)
    old = _run(tmp_path, "20261025-023000-a", start)
    new = _run(tmp_path, "20261025-020000-b", replace(start, run_id="b", made_at=1e9 + 1800))
    assert (
        list_run_folders(tmp_path) == [new, old]
        and find_unfinished_folder(tmp_path, "night") == new
    )
    monkeypatch.setattr(known_runs, "time", lambda: 1e9 - 3600)  # it was set back
    last = _run(tmp_path, "20261024-230000-c", replace(start, made_at=choose_start_time(tmp_path)))
    assert list_run_folders(tmp_path) == [last, new, old]
    monkeypatch.setattr(known_runs, "time", lambda: 2e9)
    assert choose_start_time(tmp_path) == 2e9


def test_a_run_that_was_gone_on_with_is_newer_than_one_begun_since(tmp_path: Path) -> None:
    """`flows.verdict` told of the run that began last, not of one that had been resumed since."""
    resumed = _run(tmp_path, "1-resumed", RunStart("a", "1", "mine", made_at=1e9))
    begun = _run(tmp_path, "2-begun", RunStart("b", "1", "mine", made_at=4e9))
    assert list_run_folders(tmp_path) == [begun, resumed]
    start = read_start(resumed)
    assert start is not None
    start.make_next(resumed).write(resumed)  # the clock was set back: still it is the newer one
    assert list_run_folders(tmp_path) == [resumed, begun]
    assert find_resumed_folder(tmp_path, "latest") == resumed


def test_damaged_runs_come_after_the_others(tmp_path: Path) -> None:
    old = _run(tmp_path, "9-old", RunStart("a", "1", "mine", made_at=1e9))
    new = _run(tmp_path, "1-new", RunStart("b", "1", "mine", made_at=1.5e9))
    for name, text in (("a", "{"), ("b", '{"made_at": []}'), ("c", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / START).write_text(text)
    assert list_run_folders(tmp_path)[:2] == [new, old] and len(list_run_folders(tmp_path)) == 5
