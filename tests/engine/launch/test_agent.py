"""Processes of a training, started by PyTorch's launcher: heard, ended and begun again."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.engine.base.facts import TrainFacts
from tasks.engine.data.preparation import prepare
from tasks.engine.device.detection import detect
from tasks.engine.launch import agent
from tasks.engine.launch.rank import Job
from tasks.engine.memory.leaks import baseline
from tasks.engine.settings.run_config import RunConfig
from tasks.engine.training.loop import Stop
from tasks.engine.training.similar_runs import Past
from tasks.release_memory import LeakError, release_memory

Own = Callable[[str, str], None]
MODEL = """
import os, signal, sys
import torch
from torch import nn

class Linear(nn.Module):
    def __init__(self, outputs, fault=""):
        super().__init__()
        assert not {"prefect", "mlflow"} & set(sys.modules), "a rank has imported them"
        self.layer, self.fault, self.calls = nn.Linear(64, outputs), fault, 0

    def forward(self, x):
        self.calls += self.training
        is_one = os.environ["RANK"] == "1" and self.calls == 30
        if self.fault == "lost" and is_one and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "always lost" and is_one:
            os.kill(os.getpid(), signal.SIGKILL)
        is_large = self.training and len(x) > 9 and self.calls > 15
        if self.fault == "greedy" and os.environ["RANK"] == "1" and is_large:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        if self.fault == "leak" and is_one:
            sys.kept = [torch.ones(1000)]
        if self.fault == "wrong" and is_one:
            raise ValueError("the thirtieth batch is not for me")
        return self.layer(x.flatten(1))
"""


def _train(
    folder: Path, fault: str = "", epochs: int = 3, parallel: str = "auto", **more: Any
) -> tuple[TrainFacts, list]:
    config = RunConfig.model_validate(
        {
            "data": {"cache": str(folder / "data")},
            "model": {"name": "agents_own:Linear", "args": {"fault": fault}},
            "train": {"epochs": epochs, "parallel": parallel},
            "checkpoint": {"every_steps": 10, "every_s": None},
        }
    )
    logged: list[tuple[str, int]] = []
    facts = agent.train(
        Job(config, prepare(config.data), Past(), folder, resumes=False),
        detect("cpu"),
        processes=2,
        restarts=1,
        log=lambda metrics, step: logged.extend((name, step) for name in metrics),
        **more,
    )
    return facts, logged


def _left() -> list[psutil.Process]:
    """Launchers that this process has started and that still run."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            found += [process] * ("torch.distributed.run" in process.cmdline())
    return found


def test_a_lost_process_begins_again_with_the_others_and_every_value_is_logged_once(
    own: Own, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own("agents_own", MODEL)
    with caplog.at_level(logging.INFO, "tasks"):
        facts, logged = _train(tmp_path, "lost")
    assert facts.steps == 69 and facts.tags["ranks.restarts"] == "1"
    assert facts.tags["ranks"] == "2" and int(facts.tags["resumed_from_step"]) in (10, 20)
    assert len(logged) == len(set(logged))
    assert {step for name, step in logged if name == "train/loss"} == {*range(10, 70, 10), 69}
    assert "going on from the checkpoint" in caplog.text
    assert not _left()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_where_memory_runs_out_in_one_all_begin_again_with_smaller_micro_batches(
    own: Own, tmp_path: Path, caplog: pytest.LogCaptureFixture, parallel: str
) -> None:
    """In mid-training: under ddp what is found out before the first step is not begun again."""
    own("agents_own", MODEL)
    with caplog.at_level(logging.INFO, "tasks"):
        facts, logged = _train(tmp_path, "greedy", parallel=parallel)
    assert facts.steps == 69 and facts.tags["micro_batch"] == "8", facts.tags
    assert "ranks.restarts" not in facts.tags  # none was lost
    assert facts.metrics["memory/ooms_recovered"] == 2 == facts.metrics["ranks/ooms_recovered_most"]
    assert len(logged) == len(set(logged)) and int(facts.tags["resumed_from_step"]) in (10, 20)
    said = "rank 1: short of memory with micro-batches of 32 rows: all begin again with 16"
    assert said in caplog.text and "was lost" not in caplog.text
    assert not _left()


def test_what_a_process_raises_is_raised_here_and_none_is_left(own: Own, tmp_path: Path) -> None:
    own("agents_own", MODEL)
    with pytest.raises(ValueError, match="the thirtieth batch is not for me"):
        _train(tmp_path, "wrong")
    assert not _left()


def test_what_a_process_does_not_give_back_is_told_with_its_rank(own: Own, tmp_path: Path) -> None:
    own("agents_own", MODEL)
    facts, _ = _train(tmp_path, "leak")
    (leak,) = facts.leaks
    assert leak.bytes == 4000 and leak.held_by.endswith("name 'kept', on rank 1"), leak
    assert facts.metrics["ranks/leaked_mib_most"] == 4000 / 2**20
    before_bytes = baseline("cpu").bytes
    with pytest.raises(LeakError, match=r"4,000 bytes were not given back: .* on rank 1"):
        release_memory.fn("cpu", baseline_bytes=before_bytes, leaks=facts.leaks, on_leak="fail")


def test_processes_that_are_lost_again_and_again_end_the_training(own: Own, tmp_path: Path) -> None:
    own("agents_own", MODEL)
    with pytest.raises(RuntimeError, match="launch.processes: the processes ended without"):
        _train(tmp_path, "always lost")
    assert not _left()


def test_a_stop_leaves_a_checkpoint_and_is_done_here(own: Own, tmp_path: Path) -> None:
    own("agents_own", MODEL)
    acted, began = [], []

    def act() -> None:
        acted.append(1)
        raise InterruptedError

    def asked() -> Stop | None:
        began.append(1)
        has_steps = (tmp_path / "checkpoints").is_dir()
        return Stop("", act=act) if has_steps and not acted else None

    with pytest.raises(InterruptedError):
        _train(tmp_path, epochs=5000, asked=asked)
    assert acted == [1] and list((tmp_path / "checkpoints").iterdir())
    assert not _left()


def test_no_process_outlives_the_one_that_asked_for_it(own: Own, tmp_path: Path) -> None:
    own("agents_own", MODEL)
    script = (
        "import sys; from pathlib import Path; from tests.engine.launch.test_agent import _train;"
        f"_train(Path({str(tmp_path)!r}), epochs=5000)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), "."])}
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=env)
    try:
        until = time.monotonic() + 120
        while not (tmp_path / "checkpoints").is_dir():
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 3  # the launcher and two ranks
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    for one in alive:
        one.kill()
    assert not alive
