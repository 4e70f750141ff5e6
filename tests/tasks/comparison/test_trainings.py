"""What a comparison finds that goes on after it was killed, without a training."""

import json
import threading
from pathlib import Path

from flows.cli.compare_command import parse_comparison
from tasks.comparison.trainings import GridSource, TrainingEnd, open_comparison, run_trainings
from tasks.engine.base.file_lock import FileLock
from tasks.run.known_runs import LOCK, RunStart


def test_a_training_that_outlived_its_comparison_is_waited_for_and_not_repeated(
    tmp_path: Path,
) -> None:
    (cell,) = parse_comparison(["--vary", "optim.lr=0.1"]).cells
    comparison = open_comparison(tmp_path / "comparisons", "words")
    folder = tmp_path / "runs" / "1"
    folder.mkdir(parents=True)
    key = f"{comparison.folder.name}/0001"
    RunStart("id-of-it", "1", "name", key=key).write(folder)
    lock = FileLock(folder / LOCK)
    assert lock.take()

    def end() -> None:
        (folder / "run.json").write_text(json.dumps({"status": "FINISHED"}))
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
