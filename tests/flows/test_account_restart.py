"""A loop that goes on after its process is gone goes on in its run: each step once, and none left
out, as if nothing had been."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headroom import account
from headroom.run.known_runs import list_known_runs
from tests.conftest import ROOT, desk_environment, query
from tests.flows.restarted_loops import EVERY, FRAMEWORKS, STEPS, train

pytestmark = pytest.mark.filterwarnings("ignore")  # what frameworks warn of is theirs
RUNS = Path(".headroom/runs")
LEFT = {"kill": -signal.SIGKILL, "term": 128 + signal.SIGTERM, "error": 1}


@pytest.fixture(autouse=True)
def alone(place: Path) -> Iterator[None]:
    """Frameworks keep states of the process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if "accelerate" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(True)


def _end(framework: str, how: str, *, key: str = "") -> None:
    """Let a training end in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.flows.restarted_loops", framework, how, key],
        env={**desk_environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == LEFT[how], done.stderr


def _find_left() -> Path:
    """Return the folder of the only run."""
    [run] = list_known_runs(RUNS)
    return Path(run.folder).absolute()


def _read_curve(place: Path, run_id: str) -> dict[int, float]:
    """Return the loss by its step, as MLflow has it; each step once."""
    where = f"key = 'train/loss' and run_uuid = '{run_id}'"
    points = query(place, f"select distinct step, value from metrics where {where} order by step")
    assert len(points) == len(dict(points))
    return dict(points)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_killed_training_goes_on_in_its_run_with_the_next_step(
    place: Path, framework: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It was a second run, whose steps began at 1."""
    if framework != "own":
        pytest.importorskip(framework)
    _end(framework, "kill")
    left = _find_left()
    run = train(framework)
    assert run.folder == left
    assert run.run["status"] == "FINISHED" and run.loop.done == STEPS
    tags = dict(query(place, f"select key, value from tags where run_uuid = '{run.run['run_id']}'"))
    assert (tags["resumed"], tags["resumed_from_step"]) == ("1", str(EVERY))
    assert query(place, "select status from runs") == [("FINISHED",)]  # and nothing of another
    curve = _read_curve(place, run.run["run_id"])
    assert [*curve] == [*range(1, STEPS + 1)]
    elsewhere = tmp_path_factory.mktemp("undisturbed")
    os.chdir(elsewhere)
    assert _read_curve(elsewhere, train(framework).run["run_id"]) == curve


@pytest.mark.parametrize("how", ["term", "error"])
def test_a_loop_goes_on_by_whatever_way_it_ended_and_its_times_add_up(
    place: Path, how: str
) -> None:
    _end("own", how)
    left = _find_left()
    run = train("own")
    assert run.folder == left
    assert [*_read_curve(place, run.run["run_id"])] == [*range(1, STEPS + 1)]
    told = "select count(*) from metrics where key = 'train/loss'"
    assert query(place, told) == [(STEPS,)]  # those between the checkpoint and the end once
    assert run.run["status"] == "FINISHED" and "end.reason" not in run.run["tags"]
    assert run.run["metrics"]["time/total_s"] > run._clock.total_s()
    assert query(place, "select count(*) from tags where key = 'end.reason'") == [(0,)]


def test_each_process_of_torchrun_goes_on_in_its_own_run_from_the_checkpoint_of_the_first(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of rank 1 took the run of rank 0, or found it locked."""
    folders, states = [], []
    for rank, loaded in (("0", 0), ("1", 0), ("1", 1), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        run = account(run_name="ddp", quiet=True)
        if loaded:
            run.load_state_dict(states[0])
        with run, run.step():
            pass
        folders.append(run.folder)
        states.append(run.state_dict())
    assert folders[2:] == folders[1::-1] and folders[0] != folders[1]
    assert states[2]["step"] == 2


def test_a_key_alone_goes_on_after_the_newest_step_and_begins_anew_when_it_is_done(
    place: Path,
) -> None:
    runs = []
    for is_failing in (True, False, False):
        try:
            with account(key="nightly", quiet=True) as run:
                for _ in range(5):
                    with run.step():
                        pass
                    run.log({"train/loss": 0.5})
                if is_failing:
                    raise ValueError("no such thing")
        except ValueError:
            assert is_failing
        runs.append(run)
    assert runs[0].folder == runs[1].folder != runs[2].folder
    assert [*_read_curve(place, runs[1].run["run_id"])] == [*range(1, 11)]
    assert run.run["tags"]["run.key"] == "nightly" and "resumed" not in run.run["tags"]


def test_a_key_of_a_run_that_still_trains_is_refused_and_one_that_a_cell_left_open_is_taken(
    place: Path,
) -> None:
    first = account(key="nightly", quiet=True).begin()
    with account(key="nightly", quiet=True) as second:
        assert first.run["stopped"] == "another account was opened with its key"
        with pytest.raises(ValueError, match="^key: nightly is being trained by process"):
            account(key="nightly", quiet=True).begin()
    assert second.folder == first.folder and second.run["tags"]["resumed"] == "1"


@pytest.mark.parametrize("framework", [f for f in FRAMEWORKS if f != "own"])
def test_a_checkpoint_from_before_the_adapter_begins_a_new_run_and_says_so(
    place: Path, framework: str
) -> None:
    pytest.importorskip(framework)
    with pytest.raises(ValueError, match="no such thing"):
        train(framework, end="error", is_told=False)
    run = train(framework)
    assert run.run["status"] == "FINISHED" and run.loop.done == STEPS - EVERY
    assert run.run["tags"]["anew"] == "its checkpoint names no run"
    assert run.run["warnings"] == ["account: a new run begins: its checkpoint names no run"]
    again = train(framework)  # its own checkpoints name it
    assert again.folder == run.folder


def test_of_two_who_go_on_from_one_checkpoint_the_second_has_a_run_of_its_own(place: Path) -> None:
    with account(quiet=True) as first:
        with first.step():
            pass
        with account(quiet=True) as second:
            second.load_state_dict(first.state_dict())
            second.log({"train/loss": 0.5})
    assert second.folder != first.folder and second.run["status"] == "FINISHED"
    assert "that run is being trained by process" in second.run["tags"]["anew"]
    assert first.run["warnings"] == []


@pytest.mark.parametrize("gone", ["folder", "run"])
def test_a_checkpoint_whose_run_is_gone_begins_a_new_one_and_says_so(
    place: Path, gone: str
) -> None:
    with pytest.raises(ValueError, match="no such thing"):
        train("own", end="error")
    left = _find_left()
    if gone == "folder":
        left.rename(place / "elsewhere")
    else:
        with sqlite3.connect(place / "mlflow.db") as database:
            database.execute("update runs set lifecycle_stage = 'deleted'")
    run = train("own")
    assert run.folder != left and run.run["status"] == "FINISHED"
    why = {"folder": "no folder in", "run": "was deleted in MLflow"}[gone]
    assert why in run.run["tags"]["anew"] and why in run.run["warnings"][0]
    assert [*_read_curve(place, run.run["run_id"])] == [*range(1, STEPS - EVERY + 1)]


def test_a_run_that_had_begun_when_the_checkpoint_was_loaded_leaves_nothing(place: Path) -> None:
    with account(run_name="first", quiet=True) as first:
        with first.step():
            pass
        state = first.state_dict()
    with account(run_name="fresh", quiet=True) as run:
        fresh = run.folder
        until = time.monotonic() + 60
        while not run._journal.run_id and time.monotonic() < until:
            time.sleep(0.05)  # until MLflow knows it
        run.load_state_dict(state)
        with run.step():
            run.log({"train/loss": 0.5, "word": "kept"})
    assert not fresh.exists() and run.folder == first.folder
    assert run.run["name"] == "first" and run.run["tags"]["log.word"] == "kept"
    sql = "select name, status from runs where lifecycle_stage = 'active'"
    assert query(place, sql) == [("first", "FINISHED")]
    assert query(place, "select step from metrics where key = 'train/loss'") == [(2,)]


def test_while_mlflow_is_away_a_run_goes_on_in_its_folder_and_waits_no_longer_for_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end waited three minutes for an answer that nobody gives again."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with account(quiet=True) as first:
        with first.step():
            pass
        state = first.state_dict()
    with account(quiet=True) as run:
        run.load_state_dict(state)
        with run.step():
            pass
        assert run._journal._has_heard.is_set()  # what the end waits for
    assert (run.folder, run.loop.done) == (first.folder, 2)


def test_a_run_that_was_done_goes_on_from_its_checkpoint(place: Path) -> None:
    """As a training of our own does by --resume."""
    first = train("own")
    run = train("own")
    assert run.folder == first.folder and run.run["status"] == "FINISHED"


def test_what_is_no_state_or_comes_too_late_is_told_and_the_loop_goes_on(place: Path) -> None:
    with account(quiet=True) as run:
        run.load_state_dict({"version": 99, "run_id": "x"})
        with run.step():
            pass
        run.load_state_dict({"version": 1, "run_id": "", "folder": "x", "step": 3})
        run.load_state_dict(run.state_dict())  # of this very run, as before a last evaluation
    assert run.run["status"] == "FINISHED" and run.loop.done == 1
    assert run.run["warnings"] == [
        "account: a new run begins: its checkpoint names no run",
        "load_state_dict: comes before the first step; this run goes on",
    ]
