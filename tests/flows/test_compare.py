"""A comparison as its user sees it: a grid that fails in one place, is ended in its middle, and
goes on; then runs that exist."""

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.conftest import query

MODEL = """
import torch

class Net(torch.nn.Sequential):
    def __init__(self, input_shape, outputs, fails=False):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, outputs))
        self.fails, self.calls = fails, 0

    def forward(self, x):
        self.calls += self.training
        if self.fails and self.calls > 30:
            raise ValueError("this one always fails")
        return super().forward(x)
"""
Start = Callable[..., subprocess.Popen[str]]


def test_a_grid_is_trained_to_its_end_whatever_comes_between(compare: Start, place: Path) -> None:
    (place / "own.py").write_text(MODEL)
    words = ("--model.name", "own:Net", "--vary", "model.args.fails=false,true", "--repeats", "2")
    words = (*words, "--train.epochs=3", "--checkpoint.every=none")
    process = compare(*words)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("3/4") and "begins" in line:
            break
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    told = process.stderr.read().splitlines()[-2:]
    assert told[0].startswith(
        "2 of 4 trainings have ended; the same command goes on with the others: "
    )
    assert told[0].endswith(shlex.join(["python", "-m", "flows.compare", *words]))
    assert told[1] == "terminated", "all that it said"
    left = [c for c in children if c.is_running() and "headroom train" in " ".join(c.cmdline())]
    assert not left, "a training outlived its comparison"
    assert query(place, "select status from runs where name like 'compare-%'") == [("KILLED",)]

    process = compare(*words)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "going on: 2 of 4 have ended" in err and "1/4" not in err and "4/4" in err
    assert "fails=true: FAILED: this one always fails" in " ".join(out.split()), out
    ((parent, status),) = query(
        place, "select run_uuid, status from runs where name like 'compare-%'"
    )
    assert status == "FINISHED"
    part_of = f"from tags where key = 'mlflow.parentRunId' and value = '{parent}'"
    states = query(place, f"select status from runs where run_uuid in (select run_uuid {part_of})")
    ended = sorted(state for (state,) in states if state != "KILLED")
    assert ended == ["FAILED", "FAILED", "FINISHED", "FINISHED"]
    kept = {file.name for file in (place / "mlartifacts").rglob(f"{parent}/artifacts/**/*")}
    assert {"comparison.html", "comparison.csv", "speed.png", "loss.png", "time.png"} <= kept
    told = dict(query(place, f"select key, value from tags where run_uuid = '{parent}'"))
    assert "| false" in told["mlflow.note.content"]
    (state,) = (place / ".headroom/comparisons").glob("*/comparison.json")
    assert json.loads(state.read_text())["is_over"], "the same words would go on"

    # Runs that exist: the comparison is none of them.
    process = compare("--last", "10")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "FAILED" in out and "FINISHED" in out and "compare-" not in out
    process = compare("--runs", f"{parent},nonsense")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2
    assert f"--runs {parent}: is no training" in err and "--runs nonsense: no such run" in err
    process = compare("--last", "3", "--run.experiment", "new")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2 and "run.experiment: 'new' is not there" in err
    assert not query(place, "select name from experiments where name = 'new'"), "only read"


def test_nothing_is_trained_where_one_of_the_grid_can_not_be(compare: Start, place: Path) -> None:
    process = compare("--devices", "cpu,cuda:7", "--vary", "train.batch_size=32,64")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2
    assert "device.name: cuda:7 is not here" in err and "begins" not in err
    assert not (place / ".headroom/comparisons").exists()


def test_to_compare_runs_that_exist_needs_neither_pytorch_nor_prefect() -> None:
    """They took half of the time of a comparison of 10,000 runs."""
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, flows.cli.compare_command, headroom.comparison.comparison\n"
            "print([m for m in ('torch', 'prefect', 'mlflow') if m in sys.modules])",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "[]\n"
