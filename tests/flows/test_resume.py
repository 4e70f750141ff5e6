"""A training over several nights, as its user sees it: killed, out of time, gone on with."""

import json
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.train import train
from tasks.engine.checkpoint.kept_steps import steps
from tasks.engine.settings.read_settings import ConfigError
from tasks.resume import asked_for, held, of_key
from tasks.run_folders import Start

Desk = Callable[..., subprocess.Popen[str]]


def _query(place: Path, text: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(place / "mlflow.db") as database:
        return database.execute(text).fetchall()


def _runs(place: Path) -> list[Path]:
    return sorted(file.parent for file in (place / ".headroom" / "runs").glob("*/start.json"))


def test_a_training_goes_on_where_it_was_killed_and_where_its_time_was_over(
    desk: Desk, place: Path
) -> None:
    asked = ("--run.key", "night", "--train.epochs", "200", "--checkpoint.every_steps", "40")
    first = desk(*asked)
    until = time.monotonic() + 120
    while not any(len(steps(run / "checkpoints")) > 1 for run in _runs(place)):
        assert time.monotonic() < until and first.poll() is None
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()

    second = desk(*asked, "--train.max_s", "1")
    out, err = second.communicate(timeout=200)
    assert second.returncode == 0, err
    assert "going on from the checkpoint of step" in err
    assert "train.max_s: 1.00 s are over" in out
    (run,) = _runs(place)
    assert json.loads((run / "run.json").read_text())["stopped"]
    ((run_id, status),) = _query(place, "select run_uuid, status from runs")
    assert status == "FINISHED" and f"--resume {run_id}" in err

    third = desk("--resume", run_id, "--train.max_s", "none")
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


def _left(runs: Path, name: str, start: Start, *, kept: bool = True) -> Path:
    folder = runs / name
    (folder / "checkpoints").mkdir(parents=True)
    start.write(folder)
    if kept:
        (folder / "checkpoints" / "step-000000000007.json").touch()
    return folder


def test_what_cannot_be_gone_on_with_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^--resume latest: no run in .* has a checkpoint$"):
        asked_for(tmp_path, "latest")
    with pytest.raises(ConfigError, match="^--resume abc: is neither latest, nor the id of a run"):
        asked_for(tmp_path, "abc")
    bare = _left(tmp_path, "20260101-000000-a", Start("abc", "1", "mine"), kept=False)
    for words in ("abc", str(bare)):
        with pytest.raises(ConfigError, match="that run wrote no checkpoint; train anew$"):
            asked_for(tmp_path, words)
    folder = _left(tmp_path, "20260102-000000-b", Start("def", "1", "mine", pid=42))
    for words in ("latest", "def", str(folder), str(folder / "checkpoints")):
        assert asked_for(tmp_path, words) == folder
    with (
        held(folder),
        pytest.raises(ConfigError, match=f"is being trained by process {os.getpid()}$"),
    ):
        held(folder)
    held(folder).close()


def test_a_key_that_is_being_trained_is_not_trained_twice(tmp_path: Path) -> None:
    folder = _left(tmp_path, "20260101-000000-a", Start("a", "1", "mine", key="night"), kept=False)
    assert of_key(tmp_path, "night") is None
    with held(folder):
        assert of_key(tmp_path, "night") == folder
        with pytest.raises(ConfigError, match="that run is being trained by process"):
            held(folder)


def test_a_key_goes_on_with_its_newest_run_until_that_is_done(tmp_path: Path) -> None:
    _left(tmp_path, "20260101-000000-a", Start("a", "1", "mine", key="night"))
    newest = _left(tmp_path, "20260102-000000-b", Start("b", "1", "mine", key="night"))
    _left(tmp_path, "20260103-000000-c", Start("c", "1", "mine", key="another"))
    assert of_key(tmp_path, "night") == newest and of_key(tmp_path, "none of them") is None
    for end, goes_on in (
        ({"status": "KILLED"}, True),
        ({"status": "FINISHED", "stopped": "train.until: it is 06:30"}, True),
        ({"status": "FINISHED", "stopped": ""}, False),
    ):
        (newest / "run.json").write_text(json.dumps(end))
        assert (of_key(tmp_path, "night") == newest) is goes_on
