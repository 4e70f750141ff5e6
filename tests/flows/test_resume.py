"""A training over several nights, as its user sees it: killed, out of time, gone on with."""

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.train import train
from headroom.run.known_runs import list_known_runs
from headroom.settings.read_settings import ConfigError
from headroom.tracking.tracking_settings import TrackingError
from headroom.training.kept_steps import list_steps
from tests.conftest import is_training
from tests.run_folders import TRAINING_LOCK, is_held, list_folders, read_end

Desk = Callable[..., subprocess.Popen[str]]


def _query(place: Path, text: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(place / "mlflow.db") as database:
        return database.execute(text).fetchall()


def _runs(place: Path) -> list[Path]:
    return sorted(file.parent for file in (place / ".headroom" / "runs").glob("*/start.json"))


def test_a_training_goes_on_where_it_was_killed_and_where_its_time_was_over(
    desk: Desk, place: Path
) -> None:
    asked = ("--run.key", "night", "--train.epochs", "200", "--checkpoint.every", "40steps")
    first = desk(*asked)
    until = time.monotonic() + 120
    while not any(len(list_steps(run / "checkpoints")) > 1 for run in _runs(place)):
        assert time.monotonic() < until and first.poll() is None
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()

    second = desk(*asked, "--train.end", "1s")
    out, err = second.communicate(timeout=200)
    assert second.returncode == 0, err
    assert "going on from the checkpoint of step" in err
    assert "train.end: 1s are over" in out
    (run,) = _runs(place)
    assert read_end(run)["stopped"]
    ((run_id, status),) = _query(place, "select run_uuid, status from runs")
    assert status == "FINISHED" and f"--resume {run_id}" in err

    third = desk("--resume", run_id, "--train.end", "none")
    out, err = third.communicate(timeout=200)
    assert third.returncode == 0, err
    assert _query(place, "select run_uuid, status from runs") == [(run_id, "FINISHED")]
    tags = dict(_query(place, "select key, value from tags"))
    assert tags["resumed"] == "2" and int(tags["resumed_from_step"]) > 40
    assert "end.reason" not in tags and "warnings" not in tags
    told = "from inputs where source_type = 'DATASET'"
    assert _query(place, f"select count(*) {told}") == [(2,)], "not twice"
    total = "where key = 'time/total_s'"
    ((newest_s,),) = _query(place, f"select value from latest_metrics {total}")
    assert newest_s == max(_query(place, f"select value from metrics {total}"))[0], "it adds up"
    # Without a gap or a double: 23 steps an epoch, a log point every 10.
    for name, points in (("train/loss", 460), ("train/epoch", 200), ("val/accuracy", 200)):
        found = _query(place, f"select step from metrics where key='{name}'")
        at = [step for (step,) in found]
        assert len(set(at)) == points, name
        # At the last step also what the weights are judged by that are logged.
        assert len([step for step in at if step < 4600]) == points - 1, name


def test_from_python_a_run_goes_on_with_its_own_settings_and_another_one_leaves_it_alone(
    prefect_api: str, place: Path
) -> None:
    run = train({"train": {"epochs": 1}, "optim": {"lr": 1e-3}})
    again = train(resume="latest", overrides={"train.epochs": 2})
    assert (again["run_id"], again["metrics"]["train/epoch"]) == (run["run_id"], 2)
    assert again["params"]["optim.lr"] == 1e-3
    assert again["metrics"]["time/total_s"] > run["metrics"]["time/total_s"]
    with pytest.raises(ConfigError, match="^optim.lr: was 0.001 when the checkpoint was written"):
        train(resume=run["run_id"], overrides={"optim.lr": 0.5})
    assert _query(place, "select status from runs") == [("FINISHED",)]
    assert _query(place, "select count(*) from tags where key = 'end.reason'") == [(0,)]


def test_a_run_whose_folder_was_removed_in_mid_run_is_found_and_gone_on_with(
    prefect_api: str, place: Path
) -> None:
    """Its record was written anew, and it was neither listed nor found by --resume."""
    seen: list[bool] = []

    def remove() -> None:
        while not is_training(place):
            time.sleep(0.01)
        (place / ".headroom" / "runs").rename(
            place / "gone"
        )  # a run writes while a tree is removed
        shutil.rmtree(place / "gone")
        while not [*place.glob(".headroom/runs/*/config.yaml")]:
            time.sleep(0.01)
        seen.append(is_held(_runs(place)[0] / TRAINING_LOCK))

    removing = threading.Thread(target=remove, daemon=True)
    removing.start()
    run = train({"train": {"epochs": 10_000, "end": "3s"}})
    removing.join(10)
    assert seen == [True], "while it was trained"
    assert [one.run_id for one in list_known_runs(place / ".headroom" / "runs")] == [run["run_id"]]
    again = train(resume="latest", overrides={"train.end": "0.1s"})
    assert again["run_id"] == run["run_id"] and again["metrics"]["train/epoch"] > 1


KEYED = {"run": {"key": "night"}, "train": {"epochs": 60, "end": "0.05s"}}


def _execute(place: Path, *texts: str) -> None:
    with sqlite3.connect(place / "mlflow.db") as database:
        for text in texts:
            database.execute(text)


def test_a_key_whose_run_is_gone_begins_a_new_one_and_says_why(
    prefect_api: str, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was refused at each start, and told to "train anew", which was what its user did."""
    ways: dict[str, Callable[[Path], object]] = {
        "its run .* was deleted in MLflow": lambda run: _execute(
            place, "update runs set lifecycle_stage = 'deleted'"
        ),
        "MLflow does not know its run .* any more": lambda run: _execute(
            place,
            *(f"delete from {t}" for t in ("metrics", "latest_metrics", "params", "tags", "runs")),
        ),
        "no checkpoint of it is what was written .step-": lambda run: [
            file.write_bytes(b"x") for file in (run / "checkpoints").glob("*.safetensors")
        ],
    }
    train(KEYED)
    for why, lose in ways.items():
        old = list_folders(place)[0]
        lose(old)
        with pytest.raises((ConfigError, TrackingError), match=f"^--resume {old}: {why}.*remove"):
            train(resume="latest")
        caplog.clear()
        run = train(KEYED)
        new = list_folders(place)[0]
        assert new != old and run["status"] == "FINISHED" and run["stopped"]
        assert re.search(f"run.key: night begins a new run: .*{why}.*{old} is left", caplog.text)
        assert re.search(why, run["tags"]["anew"]) and "night begins a new" in run["warnings"][0]
        assert train(KEYED)["run_id"] == run["run_id"], "with that one it goes on"


def test_a_copy_of_a_folder_whose_run_went_on_is_refused_or_begins_anew(
    prefect_api: str, place: Path
) -> None:
    """A restored backup went on with a run that had gone on: 117 steps were in it twice."""
    runs, backup = place / ".headroom" / "runs", place / "backup"
    run_id = train(KEYED)["run_id"]
    shutil.copytree(runs, backup)
    assert train(KEYED)["run_id"] == run_id, "the folder itself goes on, as often as it likes"
    assert train(KEYED)["run_id"] == run_id
    shutil.rmtree(runs)
    shutil.copytree(backup, runs)
    (old,) = _runs(place)
    told = _query(place, "select key, step, value from metrics order by key, step, timestamp")
    why = f"its run {run_id} was gone on with since by .* from step .*, in another copy of this"
    with pytest.raises((ConfigError, TrackingError), match=f"^--resume {old}: {why} folder"):
        train(resume="latest")
    assert _query(place, "select run_uuid, status from runs") == [(run_id, "FINISHED")]
    anew = train(KEYED)
    assert anew["run_id"] != run_id and re.search(why, anew["tags"]["anew"])
    metrics = f"from metrics where run_uuid = '{run_id}' order by key, step, timestamp"
    assert _query(place, f"select key, step, value {metrics}") == told
    # The copy that went on is lost, and somebody says so.
    _execute(place, "delete from tags where key like 'resumed.by.%'")
    assert train(resume=str(old))["run_id"] == run_id


def test_of_two_first_starts_of_a_key_one_trains(desk: Desk, place: Path) -> None:
    asked = ("--run.key", "night", "--train.epochs", "300")
    both = [desk(*asked), desk(*asked)]
    told = [process.communicate(timeout=200) for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], told
    assert "run.key: night is being trained by process" in "".join(err for _, err in told)
    assert _query(place, "select status from runs") == [("FINISHED",)]


def test_a_run_that_was_done_tells_nothing_twice_when_it_is_gone_on_with(
    prefect_api: str, place: Path
) -> None:
    """All curves of the validation got a point at step 0."""
    curves = "select key, step from metrics where key like 'val/%' or key like 'train/%'"
    speeds = "select key, step from metrics where key like 'speed/%'"
    run = train({"train": {"epochs": 2}})
    told = [sorted(_query(place, text)) for text in (curves, speeds)]
    again = train(resume="latest")
    assert [sorted(_query(place, text)) for text in (curves, speeds)] == told
    for name in ("val/accuracy", "val/loss", "train/loss", "train/epoch"):
        assert again["metrics"][name] == run["metrics"][name]
