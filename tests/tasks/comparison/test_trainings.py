"""What a comparison finds that goes on after it was killed, without a training."""

import json
import threading
from pathlib import Path

from flows.cli.compare_command import parse
from tasks.comparison.trainings import Ended, Grid, opened, play
from tasks.engine.base.file_lock import FileLock
from tasks.run_folders import LOCK, Start


def test_a_training_that_outlived_its_comparison_is_waited_for_and_not_repeated(
    tmp_path: Path,
) -> None:
    (cell,) = parse(["--vary", "optim.lr=0.1"]).cells
    comparison = opened(tmp_path / "comparisons", "words")
    folder = tmp_path / "runs" / "1"
    folder.mkdir(parents=True)
    key = f"{comparison.folder.name}/0001"
    Start("id-of-it", "1", "name", key=key).write(folder)
    lock = FileLock(folder / LOCK)
    assert lock.take()

    def end() -> None:
        (folder / "run.json").write_text(json.dumps({"status": "FINISHED"}))
        lock.close()

    threading.Timer(0.3, end).start()
    told: list[object] = []
    runs = tmp_path / "runs"
    play(comparison, Grid(comparison, [cell]), runs=runs, tell=lambda *what: told.append(what))
    assert not told and comparison.ended == {1: Ended(1, "FINISHED", "id-of-it")}


def test_the_cpu_trains_when_no_gpu_does_since_it_would_take_the_cores_that_feed_it(
    tmp_path: Path,
) -> None:
    words = ["--devices", "cpu,cuda:0", "--vary", "optim.lr=0.1,0.2"]
    grid = parse(words).cells
    comparison = opened(tmp_path, "words")
    source = Grid(comparison, grid)
    assert list(source.devices) == ["cuda:0", "cpu"]
    for number in (3, 4):
        assert source.next("cpu") is None
        cell = source.next("cuda:0")
        assert cell is not None and cell.number == number
        source.over(cell, Ended(number, "FAILED"), None)
    assert [source.next(device) for device in source.devices] == [None, grid[0]]


def test_the_same_words_go_on_only_with_what_is_not_over_and_nobody_holds(tmp_path: Path) -> None:
    first = opened(tmp_path, "words")
    first.ended[1] = Ended(1, "FINISHED", "a", "")
    first.run_id = "parent"
    first.keep()
    assert opened(tmp_path, "words").folder != first.folder, "held by the first"
    assert first.lock is not None
    first.lock.close()
    assert opened(tmp_path, "other words").folder != first.folder
    again = opened(tmp_path, "words")
    assert (again.folder, again.ended, again.run_id) == (first.folder, first.ended, "parent")
    assert again.lock is not None
    again.is_over = True
    again.keep()
    again.lock.close()
    assert opened(tmp_path, "words").folder != first.folder, "it was over"
