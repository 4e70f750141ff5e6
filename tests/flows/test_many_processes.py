"""A training of several processes, as its user sees it: one command, one run."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from ruamel.yaml import YAML

from headroom.run.known_runs import list_known_runs
from tests.conftest import PYTHON, ROOT, desk_environment, free_port, query

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
    asked = ("--launch.processes", "2", "--checkpoint.every", "40steps")
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

    again = desk("--resume", run_id, "--train.epochs", "2000", "--train.end", "2s")
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


def test_the_command_of_a_trainjob_is_one_run_on_two_nodes(place: Path) -> None:
    """As it stands in the page, with the variables that Kubeflow Trainer sets in each pod."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    (text,) = re.findall(r"```\n(apiVersion: trainer.*?)```", page, re.DOTALL)
    trainer = YAML(typ="safe").load(text)["spec"]["trainer"]
    assert trainer["command"] == ["torchrun"] and trainer["numNodes"] == 2
    pet = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
    }
    # Kubernetes fills in $(NAME).
    words = [re.sub(r"\$\((\w+)\)", lambda name: pet[name[1]], w) for w in trainer["args"]]
    words[words.index("--train.epochs") + 1] = "2"
    pods = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words],
            cwd=place,
            env={**desk_environment(), **pet, "PET_NODE_RANK": str(node)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    said = [pod.communicate(timeout=200) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert sum(out.count("FINISHED") for out, _ in said) == 1
    assert query(place, "select status from runs") == [("FINISHED",)]
    assert dict(query(place, "select key, value from tags"))["ranks"] == "2"


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


FAULTY = """
import os, pathlib, time
import torch
from torch import nn
from torch.utils.data import Dataset

SAID = "row 7 of my table has no price"

class Model(nn.Module):
    def __init__(self, outputs, fails=False):
        super().__init__()
        self.layer, self.calls, self.fails = nn.Linear(64, outputs), 0, fails

    def forward(self, x):
        self.calls += self.training
        if self.training and "RANK" in os.environ:
            time.sleep(0.02)
            if self.calls == 35:
                pathlib.Path(f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))
            if self.fails and self.calls == 8 and os.environ["RANK"] == "1":
                raise ValueError(SAID)
        return self.layer(x.flatten(1))

class Rows(Dataset):
    classes = list("abcdefghij")

    def __len__(self):
        return 320

    def __getitem__(self, i):
        if os.environ.get("RANK") == "1" and i > 100:
            raise ValueError(SAID)
        return torch.ones(64) * i, i % 10

def rows():
    return Rows()
"""


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("--model.name", "faulty:Model", "--model.args", "{fails: true}"), 1, "failed: "),
        (("--data.source", "faulty:rows"), 2, "data.source: the loader raised: "),
    ],
    ids=["model", "data set"],
)
def test_what_one_process_raises_is_told_in_the_terminal_and_in_the_run(
    desk: Desk, place: Path, arguments: tuple[str, ...], code: int, told: str
) -> None:
    (place / "faulty.py").write_text(FAULTY)
    process = desk("--launch.processes", "2", *arguments)
    _, err = process.communicate(timeout=200)
    said = "row 7 of my table has no price"
    *_, first, last = err.splitlines()
    assert process.returncode == code and last.startswith(told) and last.endswith(said), err
    assert first == "rank 1 failed, which ends the others" and "Traceback" not in err
    assert query(place, "select status from runs") == [("FAILED",)]
    tags = dict(query(place, "select key, value from tags"))
    assert tags["failure"] == ("user_code" if code == 1 else "bad_input")
    assert tags["end.reason"].endswith(said) and said in tags["mlflow.note.content"]


def _find_rank(place: Path, number: int, process: subprocess.Popen[str]) -> psutil.Process:
    """That rank, when it is in mid-training."""
    file, until = place / f"rank-{number}", time.monotonic() + 120
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)
    return psutil.Process(int(file.read_text()))


@pytest.mark.parametrize("when", ["starting", "in mid-step", "rank 1 is stopped"])
def test_a_training_that_is_killed_leaves_one_ended_run_no_process_and_its_key(
    desk: Desk, place: Path, when: str
) -> None:
    """Its processes stayed where it was killed before they were there, or one was stopped."""
    (place / "faulty.py").write_text(FAULTY)
    asked = ("--launch.processes", "2", "--model.name", "faulty:Model", "--run.key", "night")
    asked += ("--train.epochs", "3", "--checkpoint.every", "10steps")
    process = desk(*asked, cold=True, TESTS_COLD="1", TESTS_MARK=str(place))
    if when == "starting":
        until = time.monotonic() + 60
        while not [p for p in _find_marked(place) if "headroom.launch.rank" in p.cmdline()]:
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.02)
    else:
        rank = _find_rank(place, 1, process)
        if when == "rank 1 is stopped":
            rank.suspend()
    process.kill()
    process.communicate(timeout=60)
    until = time.monotonic() + 60
    while (left := _find_marked(place)) and time.monotonic() < until:
        time.sleep(0.1)
    told = [one.cmdline() for one in left if one.is_running()]
    for one in left:
        one.kill()
    assert not told
    ((run_id, status),) = query(place, "select run_uuid, status from runs")
    assert status == "KILLED"
    shown = list_known_runs(place / ".headroom" / "runs", last=9)
    assert [(run.run_id, run.state) for run in shown] == [(run_id, "KILLED")], shown

    again = desk(*asked)
    _, err = again.communicate(timeout=200)
    assert again.returncode == 0, err
    found = dict(query(place, "select run_uuid, status from runs"))
    if when == "starting":  # with no checkpoint there is nothing to go on with
        assert sorted(found.values()) == ["FINISHED", "KILLED"]
    else:
        assert found == {run_id: "FINISHED"}
        tags = dict(query(place, "select key, value from tags"))
        assert int(tags["resumed_from_step"]) >= 10


def _find_marked(place: Path) -> list[psutil.Process]:
    """Processes that a training in `place` has started, but for Prefect's server of all tests."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE or "local_prefect" in str(
                process.cmdline()
            ):
                continue
            found += [process] * (process.environ().get("TESTS_MARK") == str(place))
    return found


LONELY = """
echo '127.0.0.1 localhost' > hosts; echo '10.11.12.13 far' >> hosts
mount --bind hosts /etc/hosts && hostname far || exit 77
[ "$1" = down ] || "$2" -c "
import fcntl, socket, struct
name = struct.pack('16sh14s', b'lo', 0x41, b'')  # up and running
fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8914, name)"
exec "$2" -m flows.train --launch.processes 2 --train.epochs 1
"""


@pytest.mark.skipif(
    subprocess.run(["sh", "-c", "unshare -rnum true"], capture_output=True).returncode != 0,
    reason="a network of its own is not allowed here",
)
@pytest.mark.parametrize("loopback", ["up", "down"])
def test_a_machine_needs_no_network_but_its_loopback(place: Path, loopback: str) -> None:
    """Its processes asked for the address of its name, and waited for ever."""
    process = subprocess.run(
        ["unshare", "-rnum", "sh", "-c", LONELY, "sh", loopback, PYTHON],
        cwd=place,
        env=desk_environment(place / "prefect") | {"TESTS_COLD": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if loopback == "up":
        assert process.returncode == 0, process.stderr
        assert query(place, "select status from runs") == [("FINISHED",)]
    else:
        assert process.returncode == 2 and not (place / "mlflow.db").exists()
        said = "would not be reached at 127.0.0.1 (Network is unreachable); turn on the loopback"
        assert process.stderr.splitlines()[-1].startswith("PREFECT_API_URL: names no server")
        assert said in process.stderr
