"""Processes of a training, started by PyTorch's launcher: heard, ended and begun again."""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tasks.engine.base.facts import TrainFacts
from tasks.engine.checkpoint.kept_steps import list_steps
from tasks.engine.data.preparation import prepare_dataset
from tasks.engine.device.detection import detect_best_device
from tasks.engine.launch import supervisor
from tasks.engine.launch.rank import Job
from tasks.engine.memory.leaks import LeakError, take_baseline
from tasks.engine.settings.run_config import RunConfig
from tasks.engine.training.admission import PastRuns
from tasks.engine.training.loop import StopRequest
from tasks.release_memory import release_memory

Own = Callable[[str, str], None]
NCCL = """NCCL error in: NCCLUtils.cpp:94, invalid usage, NCCL version 2.27.7
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000
Exception raised from create at NCCLUtils.cpp:94 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation)"""
MODEL = """
import os, signal, sys, time
import torch, torch.distributed
from torch import nn

class Linear(nn.Module):
    def __init__(self, outputs, fault=""):
        super().__init__()
        # The name of a machine may have an address that is out of reach, or none.
        assert os.environ["MASTER_ADDR"] == "localhost", os.environ["MASTER_ADDR"]
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
        if self.fault == "hangs" and is_one and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(1000)
        if self.fault == "slow" and self.training:
            time.sleep(0.05)
        if self.fault.startswith("NCCL") and is_one:
            raise torch.distributed.DistBackendError(self.fault)
        if self.fault == "leak" and is_one:
            sys.kept = [torch.ones(1000)]
        if self.fault == "wrong" and is_one:
            raise ValueError("the thirtieth batch is not for me")
        return self.layer(x.flatten(1))
"""


def _train(
    folder: Path,
    fault: str = "",
    epochs: int = 3,
    parallel: str = "auto",
    timeout_s: float = 600,
    wait_s: float = 600,
    **more: Any,
) -> tuple[TrainFacts, list]:
    config = RunConfig.model_validate(
        {
            "data": {"cache": str(folder / "data")},
            "model": {"name": "agents_own:Linear", "args": {"fault": fault}},
            "train": {"epochs": epochs, "parallel": parallel},
            "checkpoint": {"every_steps": 10, "every_s": None},
            "launch": {"timeout_s": timeout_s, "wait_s": wait_s},
        }
    )
    logged: list[tuple[str, int]] = []
    facts = supervisor.train_in_processes(
        Job(config, prepare_dataset(config.data), PastRuns(), folder, resumes=False),
        detect_best_device("cpu"),
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
    with pytest.raises(supervisor.LostProcess, match=said):
        _train(tmp_path, "always lost")
    assert not _left()


def _on_checkpoint(folder: Path, act: Callable[[], None], times: int = 1) -> Callable[[], None]:
    """Whether to stop, as the supervisor asks: it acts once after each checkpoint, `times`."""
    seen: list[list[int]] = []

    def asked() -> None:
        there = list_steps(folder / "checkpoints")  # written to their end
        if there and len(seen) < times and there not in seen and _left():
            seen.append(there)
            act()

    return asked


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_lost_launcher_is_told_and_all_begin_again_to_the_same_bits(
    own: Own, tmp_path: Path, caplog: pytest.LogCaptureFixture, number: signal.Signals
) -> None:
    """It was FAILED, "ended without a result (they printed nothing)", and its ranks went on."""
    own("agents_own", MODEL)
    _train(tmp_path / "whole")
    ranks: list[psutil.Process] = []

    def kill() -> None:
        (launcher,) = _left()
        ranks.extend(launcher.children())
        launcher.send_signal(number)

    folder = tmp_path / "lost"
    with caplog.at_level(logging.INFO, "tasks"):
        facts, logged = _train(folder, "slow", asked=_on_checkpoint(folder, kill))
    assert len(ranks) == 2 and not any(rank.is_running() for rank in ranks)
    told = f"their launcher was ended by {number.name}"
    assert facts.tags["ranks.restarts"] == "1" and facts.tags["ranks.lost"] == told
    assert f"lost: {told}" in caplog.text and "last checkpoint (1 of 1)" in caplog.text
    assert int(facts.tags["resumed_from_step"]) >= 10 and len(logged) == len(set(logged))
    whole, again = (torch.load(f / "model" / "weights.pt") for f in (tmp_path / "whole", folder))
    assert whole.keys() == again.keys() and all(torch.equal(whole[k], again[k]) for k in whole)
    assert not _left()


def test_a_launcher_that_is_lost_again_and_again_ends_the_training(
    own: Own, tmp_path: Path
) -> None:
    own("agents_own", MODEL)
    ranks: list[psutil.Process] = []

    def kill() -> None:
        ranks.extend(_left()[0].children())
        _left()[0].kill()

    with pytest.raises(
        supervisor.LostProcess, match=r"allows \(1\): their launcher was ended by SIGK"
    ):
        _train(tmp_path, "slow", asked=_on_checkpoint(tmp_path, kill, times=2))
    assert len(ranks) == 4 and not any(rank.is_running() for rank in ranks) and not _left()


@pytest.mark.parametrize("fault", ["hangs", "is stopped"])
def test_who_does_not_come_is_named_given_up_and_begun_again(
    own: Own, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """It was silent for 638 s, and then told that a process was lost."""
    own("agents_own", MODEL)
    began_s = time.monotonic()

    def stop() -> None:
        for rank in _left()[0].children():
            if rank.environ()["RANK"] == "1":
                rank.suspend()

    asked = _on_checkpoint(tmp_path, stop) if fault == "is stopped" else lambda: None
    with caplog.at_level(logging.INFO, "tasks"):
        facts, _ = _train(tmp_path, fault, timeout_s=20, asked=asked)
    what = r"is at agents_own.py:\d+, forward" if fault == "hangs" else "tells nothing any more"
    named = rf"no step for \d+ s: rank 1 has not come \(.*, process \d+; it {what}\)"
    given_up = r"\(given up after 20 s: launch.timeout_s\)"
    assert re.search(rf"{named} {given_up}", caplog.text), caplog.text
    assert re.match(rf"{named} \(Timed out waiting", facts.tags["ranks.lost"])
    assert facts.tags["ranks.restarts"] == "1" and facts.steps == 69
    assert time.monotonic() - began_s < 150 and not _left()


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
        _train(tmp_path, epochs=5000, asked=asked)
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
        "from tests.engine.launch.test_supervisor import _train;"
        f"_train(Path({str(tmp_path)!r}), epochs=5000)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), "."])}
    env["TESTS_MARK"] = str(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=env)
    try:
        until = time.monotonic() + 120
        is_there = (tmp_path / "checkpoints").is_dir
        while not (psutil.Process(process.pid).children() if when == "starting" else is_there()):
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.02 if when == "starting" else 0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 3 or when == "starting"  # the launcher and two ranks
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


def test_one_that_is_gone_before_it_has_its_job_keeps_no_other_from_its_own(tmp_path: Path) -> None:
    """Nobody was given one any more, and the training waited for ever."""
    with Listener() as listener, subprocess.Popen([sys.executable, "-c", ""]) as launcher:
        ranks = supervisor._LaunchedRanks(launcher, tmp_path / "printed")
        Client(listener.address).close()
        job = ("a job", "a device")
        threading.Thread(target=ranks.accept, args=(listener, *job), daemon=True).start()
        with Client(listener.address) as second:
            assert second.poll(10) and second.recv() == job
        ranks.end()


def test_a_launcher_that_starts_nobody_is_given_up_and_all_begin_again(
    own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was stopped at the start: the run was RUNNING for ever."""
    own("agents_own", MODEL)
    monkeypatch.setattr(supervisor, "LAUNCH_S", 0.0)
    stopped: list[psutil.Process] = []

    def stop() -> None:
        while not stopped:
            stopped.extend(_left())
            time.sleep(0.01)
        stopped[0].suspend()

    threading.Thread(target=stop, daemon=True).start()
    facts, _ = _train(tmp_path, wait_s=20)
    told = "their launcher started none of them within 20 s"
    assert facts.tags["ranks.restarts"] == "1" and facts.tags["ranks.lost"] == told
    assert facts.steps == 69 and not stopped[0].is_running() and not _left()
