"""A search as its user sees it: trainings that finish, fail and are pruned; killed and interrupted
in its middle, it goes on."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.conftest import query

MODEL = """
import time
import torch

class Net(torch.nn.Sequential):
    def __init__(self, input_shape, outputs, how="good", scale=1):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, outputs))
        self.how, self.calls, self.least = how, 0, 1 // scale

    def forward(self, x):
        self.calls += self.training
        if self.how == "fails" and self.calls > 30:
            raise ValueError("this one always fails")
        if self.how == "slow":
            time.sleep(0.01)
        if self.how == "poor" and self.training:
            time.sleep(0.03)
        return super().forward(x) * (0 if self.how == "poor" else 1)
"""
Start = Callable[..., subprocess.Popen[str]]


def _until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    assert any(words in line for line in process.stderr), f"it never said {words!r}"


def test_a_search_comes_to_its_end_whatever_comes_between(compare: Start, place: Path) -> None:
    (place / "own.py").write_text(MODEL)
    words = ("--model.name=own:Net", "--search", "grid", "--train.epochs=6", "--optim.lr=0.01")
    words = (*words, "--vary", "model.args.how=slow,good,poor,fails", "--checkpoint.every=none")
    process = compare(*words)
    _until(process, "1/4 model.args.how=slow: begins")
    process.kill()
    process.wait()

    process = compare(*words)  # which waits for the first, or begins it anew
    _until(process, "3/4 model.args.how=poor: begins")
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert process.stderr is not None
    so_far, goes_on, _ = process.stderr.read().splitlines()[-3:]
    assert so_far.startswith("So far #") and "has the best val/accuracy" in so_far
    assert goes_on.startswith("2 of 4 trainings have ended; the same command goes on")
    left = [c for c in children if c.is_running() and "headroom train" in " ".join(c.cmdline())]
    assert not left, "a training outlived its search"
    assert query(place, "select status from runs where name like 'search-%'") == [("KILLED",)]

    process = compare(*words)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "going on: 2 of 4 have ended" in err and "1/4" not in err and "2/4" not in err
    assert "3/4 model.args.how=poor: PRUNED: after epoch" in err
    assert "4/4 model.args.how=fails: FAILED: this one always fails" in err
    rows = [line.split()[:4] for line in out.splitlines()[1:5]]
    assert [row[0] for row in rows[2:]] == ["3", "4"] and {row[0] for row in rows[:2]} == {"1", "2"}
    assert [row[3] for row in rows] == ["FINISHED", "FINISHED", "PRUNED", "FAILED"]
    assert "4 trials by grid: 2 finished, 1 pruned, 1 failed" in out

    ((parent, status),) = query(
        place, "select run_uuid, status from runs where name like 'search-%'"
    )
    assert status == "FINISHED"
    told = dict(query(place, f"select key, value from tags where run_uuid = '{parent}'"))
    best = told["best"].partition("=")[2]
    assert best in ("slow", "good") and told["best"] == f"model.args.how={best}"
    value = f"run_uuid = '{told['best.run_id']}' and key = 'val/accuracy' and value = "
    assert query(place, f"select step from latest_metrics where {value}{told['best.value']}")
    assert told["best.command"] in out and told["best.command"].endswith(f"how {best}")
    assert "--search" not in told["best.command"] and "--optim.lr=0.01" in told["best.command"]
    params = query(place, f"select key, value from params where run_uuid = '{parent}'")
    assert params == [("model.args.how", best)]
    ((pruned,),) = query(place, "select run_uuid from tags where key = 'pruned'")
    poor = f"run_uuid = '{pruned}' and key = 'model.args.how' and value = 'poor'"
    assert query(place, f"select key from params where {poor}")
    kept = {file.name for file in (place / "mlartifacts").rglob(f"{parent}/artifacts/**/*")}
    assert {"comparison.html", "comparison.csv", "history.png", "speed.png"} <= kept
    (state,) = (place / ".headroom/comparisons").glob("*/comparison.json")
    ended = json.loads(state.read_text())["ended"]
    assert sorted(one["number"] for one in ended) == [1, 2, 3, 4]


def test_nothing_is_trained_where_an_end_can_not_be(compare: Start, place: Path) -> None:
    (place / "own.py").write_text(MODEL)
    words = ("--search", "tpe", "--model.name=own:Net", "--vary", "model.args.scale=0..4")
    process = compare(*words)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2 and "begins" not in err
    assert "own:Net" in err and "(with model.args.scale=0)" in err, err
    assert not (place / ".headroom/comparisons").exists()
