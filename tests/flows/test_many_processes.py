"""A training of several processes, as its user sees it: one command, one run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import desk_environment, free_port, query

Desk = Callable[..., subprocess.Popen[str]]

NO_TRACKING = """
import os, sys
from torch import nn

class Model(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        known = {"prefect", "mlflow"} & set(sys.modules)
        assert os.environ["RANK"] == "0" or not known, f"rank 1 has imported {known}"
        self.layer = nn.Linear(64, outputs)

    def forward(self, x):
        return self.layer(x.flatten(1))
"""


def _torchrun(place: Path, *arguments: str, processes: int = 2) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={processes}", "-m", "flows.train", *arguments),
        ],
        cwd=place,
        env=desk_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_are_one_run_with_a_checkpoint_where_it_is_ended(
    desk: Desk, place: Path
) -> None:
    asked = ("--launch.processes", "2", "--checkpoint.every_steps", "40")
    first = desk(*asked, "--train.epochs", "2000")
    until = time.monotonic() + 120
    while not list((place / ".headroom" / "runs").glob("*/checkpoints/*")):
        assert time.monotonic() < until and first.poll() is None
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    _, err = first.communicate(timeout=120)
    assert first.returncode == 128 + signal.SIGTERM, err
    ((run_id, status),) = query(place, "select run_uuid, status from runs")
    assert status == "KILLED" and f"--resume {run_id}" in err

    again = desk("--resume", run_id, "--train.epochs", "2000", "--train.max_s", "2")
    out, err = again.communicate(timeout=200)
    assert again.returncode == 0, err
    assert "2 processes" in out and "communication" in out
    assert query(place, "select run_uuid, status from runs") == [(run_id, "FINISHED")]
    tags = dict(query(place, "select key, value from tags"))
    assert tags["ranks"] == "2" and tags["device"] == "cpu"
    ((most,),) = query(
        place, "select value from latest_metrics where key = 'ranks/run_peak_allocated_mib_most'"
    )
    assert most > 0
    losses = query(place, "select step from metrics where key = 'train/loss'")
    assert len(losses) == len(set(losses)) > 4


def test_torchrun_plays_one_flow_and_its_other_processes_know_of_no_tracking(place: Path) -> None:
    (place / "known.py").write_text(NO_TRACKING)
    process = _torchrun(place, "--model.name", "known:Model", "--train.epochs", "2")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert out.count("FINISHED") == 1 and "2 processes" in out
    assert query(place, "select status from runs") == [("FINISHED",)]


def test_torchrun_that_is_ended_leaves_a_checkpoint_of_that_step(place: Path) -> None:
    process = _torchrun(place, "--model.name", "cnn", "--train.epochs", "3000")
    until = time.monotonic() + 120
    while not (place / "mlflow.db").exists() or not query(
        place, "select 1 from metrics where key = 'train/loss'"
    ):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert " is kept; go on with `python -m flows.train --resume" in err, err
    assert err.count("terminated") == 1  # the lead alone says so
    assert query(place, "select status from runs") == [("KILLED",)]


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is not set up")
def test_what_is_wrong_on_several_machines_is_told_once(place: Path) -> None:
    """By the first of them, which here is this machine by another address."""
    asked = ("--launch.nodes", "127.0.0.1,127.0.0.2", "--launch.port", str(free_port()))
    asked += ("--train.parallel", "fsdp", "--optim.name", "Adafactor", "--run.retries", "0")
    both = []
    for number in (1, 2):
        command = [sys.executable, "-m", "flows.train", *asked]
        env = desk_environment(place / f"prefect-{number}")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        both.append(subprocess.Popen(command, cwd=place, env=env, text=True, **pipes))
    said = [process.communicate(timeout=120)[0] for process in both]
    by_code = dict(zip([process.returncode for process in both], said, strict=True))
    assert by_code.keys() == {1, 2}, said
    assert by_code[2].count("optim.name: Adafactor cannot train a model that is shared out") == 1
    assert by_code[1].endswith("launch.nodes: 127.0.0.1 has ended, and told why\n")
    assert "Traceback" not in "".join(said)


def test_processes_that_cannot_train_are_refused_in_a_sentence(desk: Desk, place: Path) -> None:
    refused = {
        ("--launch.processes", "0"): "launch.processes: must be auto, or a whole number",
        ("--launch.processes", "many"): "launch.processes: must be auto, or a whole number",
        ("--launch.processes", "4", "--train.batch_size", "3"): (
            "train.batch_size: must be at least launch.processes, 4 (got 3)"
        ),
    }
    for arguments, sentence in refused.items():
        process = desk(*arguments)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 2 and sentence in err, err
        assert len(err.strip().splitlines()) <= 3
    assert not os.path.exists(place / "mlflow.db") or not query(place, "select 1 from runs")
