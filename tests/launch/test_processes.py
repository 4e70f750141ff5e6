"""Processes of a training, started by PyTorch's launcher: heard, ended and begun again."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from headroom.base.facts import TrainFacts
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.launch import processes
from headroom.launch.processes import train_in_processes
from headroom.launch.rank import Job
from headroom.ranks.ranks import LostProcess
from headroom.settings.run_config import RunConfig
from headroom.training.admission import PastRuns
from headroom.training.kept_steps import list_steps
from headroom.training.loop import StopRequest
from headroom.watch.leaks import LeakError, take_baseline
from tasks.release_memory import release_memory

Own = Callable[[str, str], None]
NCCL = """NCCL error in: NCCLUtils.cpp:94, invalid usage, NCCL version 2.27.7
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000
Exception raised from create at NCCLUtils.cpp:94 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation)"""
MODEL = """
import os, signal, sys, threading, time
import torch, torch.distributed
from torch import nn

class Linear(nn.Module):
    def __init__(self, outputs, fault=""):
        super().__init__()
        # The name of a machine may have an address that is out of reach, or none.
        assert os.environ["MASTER_ADDR"] == "localhost", os.environ["MASTER_ADDR"]
        assert not {"prefect", "mlflow"} & set(sys.modules), "a rank has imported them"
        self.layer, self.fault, self.calls = nn.Linear(64, outputs), fault, 0
        self.dropout = nn.Dropout(0.2)  # each rank goes on with its own random numbers

    def forward(self, x):
        self.calls += self.training
        is_one = os.environ["RANK"] == "1" and self.calls == 30
        is_first = is_one and not os.path.exists("begun")
        if is_one:
            open("begun", "w").close()
        if self.fault == "lost" and is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "always lost" and is_one:
            os.kill(os.getpid(), signal.SIGKILL)
        is_large = self.training and len(x) > 9 and self.calls > 15
        if self.fault == "greedy" and os.environ["RANK"] == "1" and is_large:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        if self.fault == "hangs" and is_first:
            time.sleep(1000)
        if self.fault == "slow" and self.training:
            time.sleep(0.05)
        if self.fault.startswith("NCCL") and is_one:
            raise torch.distributed.DistBackendError(self.fault)
        if self.fault == "aborts" and is_one:
            time.sleep(1000)
        if self.fault == "aborts" and self.training and self.calls == 30:
            threading.Timer(3, os.abort).start()
        if self.fault == "exits" and is_one:
            print("the disk of my table is full", file=sys.stderr, flush=True)
            os._exit(7)
        if self.fault == "leak" and is_one:
            sys.kept = [torch.ones(1000)]
        if self.fault == "wrong" and is_one:
            raise ValueError("the thirtieth batch is not for me")
        return self.layer(self.dropout(x.flatten(1)))
"""

ENDLESS = """
_events = sys.modules["__main__"]._Events
write, is_one = _events.append, os.environ["RANK"] == "1"
def append(self, kind, *values):
    if kind == "end" and is_one:
        os.kill(os.getpid(), signal.SIGSTOP)
    write(self, kind, *values)
_events.append = append
"""


def _train(
    folder: Path,
    fault: str = "",
    epochs: int = 3,
    parallel: str = "auto",
    timeout_s: float = 600,
    **more: Any,
) -> tuple[TrainFacts, list]:
    config = RunConfig.model_validate(
        {
            "data": {"cache": str(folder / "data")},
            "model": {"name": "agents_own:Linear", "args": {"fault": fault}},
            "train": {"epochs": epochs, "parallel": parallel},
            "checkpoint": {"every": "10steps"},
            "launch": {"timeout_s": timeout_s},
        }
    )
    logged: list[tuple[str, int]] = []
    facts = train_in_processes(
        Job(config, prepare_dataset(config.data), PastRuns(), folder, resumes=False),
        detect_best_device("cpu"),
        processes=2,
        restarts=1,
        log=lambda metrics, step: logged.extend((name, step) for name in metrics),
        **more,
    )
    return facts, logged


def _left() -> list[psutil.Process]:
    """Ranks that this process has started and that still run."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            found += [process] * ("headroom.launch.rank" in process.cmdline())
    return found


def test_a_lost_process_begins_again_with_the_others_and_every_value_is_logged_once(
    own: Own, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own("agents_own", MODEL)
    with caplog.at_level(logging.INFO, "headroom"):
        facts, logged = _train(tmp_path, "lost")
    assert facts.steps == 69 and facts.tags["ranks.restarts"] == "1"
    assert facts.tags["ranks.lost"] == "rank 1 was ended by SIGKILL"
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
    with caplog.at_level(logging.INFO, "headroom"):
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
    before_bytes = take_baseline("cpu").bytes
    with pytest.raises(LeakError, match=r"4,000 bytes were not given back: .* on rank 1"):
        release_memory.fn(
            replace(detect_best_device("cpu"), baseline_bytes=before_bytes),
            leaks=facts.leaks,
            on_leak="fail",
        )


def test_processes_that_are_lost_again_and_again_end_the_training(own: Own, tmp_path: Path) -> None:
    own("agents_own", MODEL)
    said = r"launch.processes: .* more often than run.retries allows \(1\): rank 1 .* by SIGKILL"
    with pytest.raises(LostProcess, match=said):
        _train(tmp_path, "always lost")
    assert not _left()


def _on_checkpoint(folder: Path, act: Callable[[], None]) -> Callable[[], None]:
    """A check whether to stop, which acts once, after the first checkpoint."""
    acted: list[int] = []

    def asked() -> None:
        if not acted and list_steps(folder / "checkpoints") and len(_left()) == 2:
            acted.append(1)
            act()

    return asked


def _find_rank(number: int) -> psutil.Process:
    (found,) = [rank for rank in _left() if rank.environ()["RANK"] == str(number)]
    return found


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_is_killed_is_named_and_all_begin_again_to_the_same_bits(
    own: Own, tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    own("agents_own", MODEL)
    _train(tmp_path / "whole")
    folder = tmp_path / "lost"
    with caplog.at_level(logging.INFO, "headroom"):
        asked = _on_checkpoint(folder, lambda: _find_rank(number).kill())
        facts, logged = _train(folder, "slow", check_stop=asked)
    told = f"rank {number} was ended by SIGKILL"
    assert facts.tags["ranks.restarts"] == "1" and facts.tags["ranks.lost"] == told
    assert f"lost: {told}" in caplog.text and "last checkpoint (1 of 1)" in caplog.text
    assert int(facts.tags["resumed_from_step"]) >= 10 and len(logged) == len(set(logged))
    whole, again = (torch.load(f / "model" / "weights.pt") for f in (tmp_path / "whole", folder))
    assert whole.keys() == again.keys() and all(torch.equal(whole[k], again[k]) for k in whole)
    assert not _left()


def test_a_process_that_ends_itself_is_named_with_its_code_and_its_last_words(
    own: Own, tmp_path: Path
) -> None:
    own("agents_own", MODEL)
    said = r"rank 1 ended with code 7 \(.*the disk of my table is full"
    with pytest.raises(LostProcess, match=said):
        _train(tmp_path, "exits")
    assert not _left()


@pytest.mark.parametrize("fault", ["hangs", "is stopped"])
def test_who_does_not_come_is_named_given_up_and_begun_again(
    own: Own, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """It was silent for 638 s, and then told that a process was lost."""
    own("agents_own", MODEL)
    began_s = time.monotonic()

    asked = (
        _on_checkpoint(tmp_path, lambda: _find_rank(1).suspend())
        if fault == "is stopped"
        else lambda: None
    )
    with caplog.at_level(logging.INFO, "headroom"):
        facts, _ = _train(tmp_path, fault, timeout_s=20, check_stop=asked)
    named = r"rank 1 \(.*, process \d+\) did not come \(Timed out waiting 20000ms .*\)"
    place = r"; rank 1 was at agents_own.py:\d+, forward" if fault == "hangs" else ""
    assert re.fullmatch(f"{named}{place}", facts.tags["ranks.lost"]), facts.tags["ranks.lost"]
    assert facts.tags["ranks.lost"] in caplog.text
    assert facts.tags["ranks.restarts"] == "1" and facts.steps == 69
    assert time.monotonic() - began_s < 150 and not _left()


def test_where_pytorch_ends_one_that_waits_the_others_are_named_with_their_place(
    own: Own, tmp_path: Path
) -> None:
    """As the watchdog of NCCL does."""
    own("agents_own", MODEL)
    said = r"rank 0 was ended by SIGABRT; rank 1 was at agents_own.py:\d+, forward"
    with pytest.raises(LostProcess, match=said):
        _train(tmp_path, "aborts")


def test_an_error_that_no_new_start_cures_is_raised_in_its_own_words(
    own: Own, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every error of NCCL was taken for a lost process: begun again, and its words dropped."""
    own("agents_own", MODEL)
    with pytest.raises(RuntimeError) as raised:
        _train(tmp_path, NCCL)
    said = str(raised.value)
    assert "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000" in said
    assert "Exception raised from" not in said and "was lost" not in caplog.text
    assert not _left()


def test_a_stop_leaves_a_checkpoint_and_is_done_here(own: Own, tmp_path: Path) -> None:
    own("agents_own", MODEL)
    acted, began = [], []

    def act() -> None:
        acted.append(1)
        raise InterruptedError

    def asked() -> StopRequest | None:
        began.append(1)
        has_steps = (tmp_path / "checkpoints").is_dir()
        return StopRequest("", act=act) if has_steps and not acted else None

    with pytest.raises(InterruptedError):
        _train(tmp_path, epochs=5000, check_stop=asked)
    assert acted == [1] and list((tmp_path / "checkpoints").iterdir())
    assert not _left()


def _find_marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            found += [process] * (is_alive and process.environ().get("TESTS_MARK") == mark)
    return found


@pytest.mark.parametrize("when", ["starting", "training", "stopped"])
def test_no_process_outlives_the_one_that_asked_for_it(own: Own, tmp_path: Path, when: str) -> None:
    """Its launcher started them a dozen times more where it was killed before they were there; one
    that was stopped stayed."""
    if when == "stopped" and sys.platform != "linux":
        pytest.skip("only Linux kills what is stopped")
    own("agents_own", MODEL)
    script = (
        "import sys; from pathlib import Path;"
        "from tests.launch.test_processes import _train;"
        f"_train(Path({str(tmp_path)!r}), epochs=5000)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), "."])}
    env["TESTS_MARK"] = str(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=env)
    try:
        until = time.monotonic() + 120
        is_there = (tmp_path / "checkpoints").is_dir
        while not (psutil.Process(process.pid).children() if when == "starting" else is_there()):
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.02 if when == "starting" else 0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2 or when == "starting"
        if when == "stopped":
            for one in children:
                one.suspend()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    until = time.monotonic() + 20
    while (left := _find_marked(str(tmp_path))) and time.monotonic() < until:
        time.sleep(0.1)
    for one in left:
        one.kill()
    assert not left


def test_one_that_is_stopped_at_its_end_keeps_no_result(
    own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent waits for all of them, for as long as one is stopped."""
    own("agents_own", MODEL + ENDLESS)
    monkeypatch.setattr(processes, "END_S", 1.0)
    facts, _ = _train(tmp_path)
    assert facts.steps == 69 and "ranks.restarts" not in facts.tags and not _left()
