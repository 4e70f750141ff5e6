"""A judgement as its user sees it: settings, a commit and a loop of one's own, in a project that
has a package `flows` of its own; one that is ended in its middle goes on."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from headroom import judge
from headroom.settings.read_settings import ConfigError
from tests.conftest import desk_environment, query

MODEL = """
from torch import nn

def Net(width=2):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
"""
METRIC = """
def mine(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()
"""
LOOP = """
import argparse
import torch
from torch import nn
from headroom import account

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--loss", type=float, default=1.0)
options = parser.parse_args()
torch.manual_seed(options.seed)
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.01)
with account(model=net, optimizer=optimizer, quiet=True) as run:
    for _ in range(5):
        net(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    run.log({"val/loss": options.loss + 0.01 * torch.randn(()).item()})
"""
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "answers.schema.json").read_text())
Start = Callable[..., subprocess.Popen[str]]
Run = Callable[..., tuple[int, Any, str]]
WORDS = ("--model.name", "own:Net", "--train.epochs", "1", "--device.name", "cpu")


@pytest.fixture
def project(place: Path) -> Path:
    (place / "flows").mkdir()
    (place / "flows" / "__init__.py").touch()
    for name in ("train", "judge", "session"):
        (place / "flows" / f"{name}.py").write_text("raise SystemExit('theirs')")
    (place / "own.py").write_text(MODEL)
    (place / "loop.py").write_text(LOOP)
    return place


@pytest.fixture
def start(desk: Callable[..., subprocess.Popen[str]]) -> Start:
    return partial(desk, module="headroom")


@pytest.fixture
def run(start: Start) -> Callable[..., tuple[int, Any, str]]:
    """Runs it to its end; returns its exit code, its answer and what it said meanwhile."""

    def run_to_its_end(*words: str) -> tuple[int, Any, str]:
        process = start(*words, "--json")
        out, err = process.communicate(timeout=400)
        answer = json.loads(out) if out else None
        if answer is not None:
            is_judgement = "judge" in words
            jsonschema.validate(answer, SCHEMA["$defs"]["judgement" if is_judgement else "session"])
        return process.returncode, answer, err

    return run_to_its_end


def git(*words: str) -> None:
    who = ("-c", "user.name=me", "-c", "user.email=me@here")
    subprocess.run(["git", *who, *words], check=True, capture_output=True)


@pytest.mark.timeout(480)
def test_a_session_goes_on_and_a_commit_is_trained_in_its_own_folder(
    project: Path, start: Start, run: Run
) -> None:
    git("init", "-q", "-b", "main")
    git("add", "own.py")
    git("commit", "-qm", "narrow")
    git("checkout", "-qb", "wide")
    (project / "own.py").write_text(MODEL.replace("width=2", "width=64"))
    git("commit", "-qam", "wide")
    git("checkout", "-q", "main")
    (project / "own.py").write_text(MODEL + METRIC)
    git("commit", "-qam", "a metric")
    metric = ("--train.metrics", "{mine: 'own:mine'}")
    code, _, told = run("session", "new", "night", "--goal", "val/loss", *WORDS, *metric)
    assert code == 0, told
    code, _, told = run("session", "judge", "night", "--candidate", "git:wide")
    assert code == 2 and "its code of train.metrics.mine is not that of the base" in told
    git("checkout", "-q", "wide")
    (project / "own.py").write_text(MODEL.replace("width=2", "width=64") + METRIC)
    git("commit", "-qam", "the same metric")
    git("checkout", "-q", "main")
    process = start("session", "judge", "night", "--candidate", "git:wide")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("2. base") and "begins" in line:
            break
    beside = run("session", "judge", "night", "--candidate", "optim.lr=1")
    assert beside[0] == 2, beside
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143, process.stderr.read()
    code, answer, told = run("session", "judge", "night", "--candidate", "git:wide")
    assert code == 0 and answer["verdict"] == "keep", told
    assert answer["tried"]["mean"] < answer["base"]["mean"] and answer["gain"]["low"] > 0
    assert answer["base"]["runs"] >= 4, "that of before the end among them"
    parent = answer["run_id"]
    of_parent = f"key = 'mlflow.parentRunId' AND value = '{parent}'"
    children = {row[0] for row in query(project, f"SELECT run_uuid FROM tags WHERE {of_parent}")}
    assert {*answer["base"]["run_ids"], *answer["tried"]["run_ids"]} <= children
    status = query(project, f"SELECT status FROM runs WHERE run_uuid = '{parent}'")
    assert status == [("FINISHED",)]
    code, closed, told = run("session", "close", "night")
    assert code == 0 and closed["base"]["change"] == "git:wide", told
    assert not list(project.glob(".headroom/sessions/night/worktrees/*"))
    assert run("session", "judge", "night", "--candidate", "git:wide")[0] == 2, "it is closed"


def test_a_loop_of_ones_own_is_judged_by_what_it_logs(project: Path, run: Run) -> None:
    command = "cmd:python loop.py --seed {seed}"
    words = ("judge", "--base", command, "--goal", "val/loss", "--candidate")
    code, answer, told = run(*words, f"{command} --loss 3")
    assert code == 1 and answer["verdict"] == "discard" and answer["tried"]["runs"] == 1, told
    code, again, told = run(*words, f"{command} --loss 3")
    assert again["cost"]["runs"] == 1, "the runs of the base were there"
    assert again["base"]["run_ids"] == answer["base"]["run_ids"]


def test_bad_input_is_one_sentence_before_anything_is_trained(project: Path, run: Run) -> None:
    for words, why in {
        ("judge", "--candidate", "data.split_seed=1", *WORDS): "data.split_seed can't differ",
        ("judge", "--candidate", "optim.lr=-1", *WORDS): "optim.lr",
        ("judge", "--candidate", "train.batch_size=64", *WORDS): "changes nothing of its base",
        ("judge", "--candidate", "cmd:python loop.py", *WORDS): "takes no seed",
        ("judge", "--candidate", "optim.lr=1", "--not-worse", "speed", *WORDS): "METRIC:SHARE",
        ("judge", "--candidate", "optim.lr=1", "--goal", "val/nothing", *WORDS): "val/nothing",
        (
            "session",
            "judge",
            "nowhere",
            "--candidate",
            "optim.lr=1",
        ): "there is none called nowhere",
    }.items():
        code, answer, told = run(*words)
        assert code == 2 and answer is None and why in told, (words, told)
        assert "Traceback" not in told and len(told.strip().splitlines()) == 1, told
    assert not list(project.glob(".headroom/runs/*"))


def test_from_python_it_is_the_same_answer(
    project: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = desk_environment()
    for name in {*os.environ} - {*desk}:
        monkeypatch.delenv(name)
    for name, value in desk.items():
        monkeypatch.setenv(name, value)
    settings = {"model.name": "own:Net", "train.epochs": 1, "device.name": "cpu"}
    answer = judge("optim.lr=1e-6", goal="val/loss", settings=settings, runs=1)
    assert answer["verdict"] == "undecided" and answer["base"]["runs"] == 1
    again = run(
        "judge", "--candidate", "optim.lr=1e-6", "--goal", "val/loss", *WORDS, "--runs", "1"
    )
    assert again[1]["base"]["runs"] == 2 and again[1]["session"] == answer["session"]
    with pytest.raises(ConfigError, match="data.split_seed can't differ"):
        judge("data.split_seed=1", settings=settings)
