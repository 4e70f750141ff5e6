"""What a comparison finds that goes on after it was killed, without a training."""

import threading
from pathlib import Path

import pytest

from flows.cli.compare_command import parse_comparison
from headroom.base.file_lock import FileLock
from headroom.comparison.grid import Cell
from headroom.comparison.trainings import (
    ComparisonFolder,
    GridSource,
    Inputs,
    TrainingEnd,
    describe_inputs,
    open_comparison,
    run_trainings,
)
from headroom.settings.read_settings import ConfigError, override_config
from headroom.settings.run_config import RunConfig
from tests.run_folders import TRAINING_LOCK, write_end, write_start


def test_a_training_that_outlived_its_comparison_is_waited_for_and_not_repeated(
    tmp_path: Path,
) -> None:
    (cell,) = parse_comparison(["--vary", "optim.lr=0.1"]).cells
    comparison = open_comparison(tmp_path / "comparisons", "words")
    folder = tmp_path / "runs" / "1"
    folder.mkdir(parents=True)
    key = f"{comparison.folder.name}/0001"
    write_start(folder, "id-of-it", name="name", key=key)
    lock = FileLock(folder / TRAINING_LOCK)
    assert lock.take()

    def end() -> None:
        write_end(folder, {"status": "FINISHED"})
        lock.close()

    threading.Timer(0.3, end).start()
    told: list[object] = []
    runs = tmp_path / "runs"
    run_trainings(
        comparison, GridSource(comparison, [cell]), runs=runs, tell=lambda *what: told.append(what)
    )
    assert not told and comparison.ended == {1: TrainingEnd(1, "FINISHED", "id-of-it")}


def test_the_cpu_trains_when_no_gpu_does_since_it_would_take_the_cores_that_feed_it(
    tmp_path: Path,
) -> None:
    words = ["--devices", "cpu,cuda:0", "--vary", "optim.lr=0.1,0.2"]
    grid = parse_comparison(words).cells
    comparison = open_comparison(tmp_path, "words")
    source = GridSource(comparison, grid)
    assert list(source.devices) == ["cuda:0", "cpu"]
    for number in (3, 4):
        assert source.take_next("cpu") is None
        cell = source.take_next("cuda:0")
        assert cell is not None and cell.number == number
        source.take_end(cell, TrainingEnd(number, "FAILED"), None)
    assert [source.take_next(device) for device in source.devices] == [None, grid[0]]


def test_the_same_words_go_on_only_with_what_is_not_over_and_nobody_holds(tmp_path: Path) -> None:
    first = open_comparison(tmp_path, "words")
    first.ended[1] = TrainingEnd(1, "FINISHED", "a", "")
    first.run_id = "parent"
    first.keep()
    assert open_comparison(tmp_path, "words").folder != first.folder, "held by the first"
    assert first.lock is not None
    first.lock.close()
    assert open_comparison(tmp_path, "other words").folder != first.folder
    again = open_comparison(tmp_path, "words")
    assert (again.folder, again.ended, again.run_id) == (first.folder, first.ended, "parent")
    assert again.lock is not None
    again.is_over = True
    again.keep()
    again.lock.close()
    assert open_comparison(tmp_path, "words").folder != first.folder, "it was over"


def _interrupt(place: Path, inputs: Inputs, *ended: int) -> ComparisonFolder:
    begun = open_comparison(place, "words", inputs)
    for number in ended:
        begun.add(TrainingEnd(number, "FINISHED", "a"))
    begun.keep()
    assert begun.lock is not None
    begun.lock.close()
    return begun


def test_what_changed_since_an_interruption_is_named_and_not_mixed(tmp_path: Path) -> None:
    """It went on by its words alone: half of the trainings were of another learning rate."""
    was = {"settings": {"optim.lr": "0.01"}, "code": {"own.py": "a"}, "data": {"d.csv": "1"}}
    now = {"settings": {"optim.lr": "0.1"}, "code": {"own.py": "b"}, "data": {"d.csv": "2"}}
    begun = _interrupt(tmp_path, was, 1, 2)
    with pytest.raises(ConfigError) as refused:
        open_comparison(tmp_path, "words", now)
    told = str(refused.value)
    assert told.startswith("--anew: these words were interrupted when 2 of the trainings had ended")
    assert (
        "optim.lr was 0.01 and is 0.1; the code differs (own.py); the data differs (d.csv)." in told
    )
    for kind in was:
        with pytest.raises(ConfigError):
            open_comparison(tmp_path, "words", {**was, kind: now[kind]})
    again = open_comparison(tmp_path, "words", was)
    assert (again.folder, again.taken_over) == (begun.folder, [1, 2])


def test_anew_begins_anew_and_is_what_the_same_words_go_on_with_then(tmp_path: Path) -> None:
    begun = _interrupt(tmp_path, {"data": {"d.csv": "1"}}, 1)
    now = {"data": {"d.csv": "2"}}
    anew = open_comparison(tmp_path, "words", now, is_anew=True)
    assert anew.folder != begun.folder and not anew.ended
    anew.keep()
    assert anew.lock is not None
    anew.lock.close()
    again = open_comparison(tmp_path, "words", now)
    assert again.folder == anew.folder
    again.is_over = True
    again.keep()
    assert again.lock is not None
    again.lock.close()
    assert open_comparison(tmp_path, "words", {"data": {"d.csv": "1"}}).folder != begun.folder


def test_where_nothing_had_ended_nothing_is_refused(tmp_path: Path) -> None:
    begun = _interrupt(tmp_path, {"data": {"d.csv": "1"}})
    assert open_comparison(tmp_path, "words", {"data": {"d.csv": "2"}}).folder != begun.folder


def test_trainings_are_made_of_settings_code_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_net.py").write_text("class Net: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = override_config(RunConfig(), {"model.name": "own_net:Net", "optim.lr": 0.25})
    cells = [Cell(1, {"optim.lr": "0.25"}, config)]
    found = describe_inputs(cells, {"digits": "ab"})
    assert found["settings"]["optim.lr"] == "0.25" and found["data"] == {"digits": "ab"}
    own = str(tmp_path / "own_net.py")
    assert set(found["code"]) == {"Headroom", own}
    assert describe_inputs(cells, {"digits": "ab"}) == found
    (tmp_path / "own_net.py").write_text("class Net: depth = 2\n")
    changed = describe_inputs(cells, {"digits": "ab"})
    assert changed["code"][own] != found["code"][own]
    assert changed["code"]["Headroom"] == found["code"]["Headroom"]
