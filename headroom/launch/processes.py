"""A training that several processes (ranks) make together on this machine, as the process that
asks for it sees it: PyTorch's elastic agent, which is that of torchrun, starts and watches them,
and ends all where one fails. What they tell lies in a folder. Where one was lost, the agent starts
all again from the last checkpoint. By itself it would do so whatever the reason, and not say which
it was, so that is decided here.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api

from headroom.base.facts import DeviceFacts, TrainFacts
from headroom.launch.launcher import silence_agent
from headroom.launch.placement import count_threads
from headroom.launch.rank import EVENTS, FACTS, JOB, STOP, Job, name_error, name_stack
from headroom.ranks.ranks import FailedRank, LostProcess, LostRank
from headroom.training.loop import StopCheck, StopRequest
from headroom.training.shared_model import MicroBatchTooLarge
from headroom.watch.step_metrics import Log

ASK_EVERY_S = 0.1
END_S = 10.0  # for the others, when one has come to the end
LINES = 5  # of what a process printed that ended without an error of its own
_PROJECT = Path(__file__).parents[2]
_PYTORCH = os.path.dirname(torch.__file__)
log = logging.getLogger(__name__)


def train_in_processes(
    job: Job,
    device: DeviceFacts,
    *,
    processes: int,
    restarts: int,
    log: Log,
    check_stop: StopCheck = lambda: None,
) -> TrainFacts:
    """Return what so many processes have trained together, the first of them on `device`. restarts:
    how often all of them begin again from the last checkpoint, where one is lost.

    Raises what the first failing of them raised, and LostProcess where they were lost too often.
    """
    events, lost = _EventReader(log, check_stop), list[str]()
    while True:
        with tempfile.TemporaryDirectory(prefix="headroom-") as folder:
            ended = _Start(Path(folder), job, device, processes).follow(events)
        if ended.facts is not None:
            count = {"ranks.restarts": str(len(lost)), "ranks.lost": "; ".join(lost)}
            return replace(ended.facts, tags=ended.facts.tags | (count if lost else {}))
        if isinstance(ended.error, MicroBatchTooLarge):
            job = replace(job, tried=(*job.tried, ended.error.smaller), resumes=True)
            continue
        if ended.error is not None:
            raise ended.error
        events.leave()
        lost.append(ended.lost)
        _log_loss(lost, restarts)
        job = replace(job, resumes=True)


def _log_loss(lost: list[str], restarts: int) -> None:
    """Say that a process was lost. Raises LostProcess where that was once too often."""
    log.warning("a process of the training was lost: %s", lost[-1])
    if len(lost) > restarts:
        raise LostProcess(
            "launch.processes: a process of the training was lost more often than "
            f"run.retries allows ({restarts}): {lost[-1]}"
        )
    log.warning("all begin again from the last checkpoint (%d of %d)", len(lost), restarts)


class _EventReader:
    """Logs what the ranks tell, whatever start of theirs it comes from, and asks for stops."""

    def __init__(self, log: Log, check_stop: StopCheck) -> None:
        self._log, self._check_stop = log, check_stop
        self._last_steps: dict[str, int] = {}  # by the name of a metric
        self._stop: StopRequest | None = None  # that the ranks know of
        self._has_left = False
        self.end_s = 0.0  # when the first of the ranks had come to its end

    def open(self, folder: Path) -> None:
        """Read from now on what the ranks of this folder tell."""
        self._folder, self._offset, self.end_s = folder, 0, 0.0
        if self._stop is not None:
            self._ask_for(self._stop)

    def read(self) -> None:
        """Log what is new, and hand on what is asked for."""
        with (self._folder / EVENTS).open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if line.endswith(b"\n"):
                    self._offset += len(line)
                    self._take(*json.loads(line))
        if self._stop is None:
            self._stop = self._check_stop()
            if self._stop is not None:
                self._ask_for(self._stop)

    def leave(self) -> None:
        """Do what the stop was to do, where the ranks have left the training for it."""
        if self._has_left and self._stop is not None:
            self._stop.act()
            raise AssertionError("a stop that ends the training returned")

    def _ask_for(self, stop: StopRequest) -> None:
        part = self._folder / f"{STOP}.part"
        part.write_text(str(stop.ends))
        part.replace(self._folder / STOP)

    def _take(self, kind: str, *values: Any) -> None:
        if kind == "log":  # all have begun, and read their job, which may hold logins
            (self._folder / JOB).unlink(missing_ok=True)
            self._log_new(*values)
        elif kind == "line":
            name, level, text = values
            logging.getLogger(name).log(level, "%s", text)
        elif kind == "kept" and self._stop is not None:
            stop, self._stop = self._stop, None
            stop.act()
        elif kind in ("end", "left"):
            self.end_s = self.end_s or time.monotonic()
            self._has_left = kind == "left"

    def _log_new(self, metrics: dict[str, float], step: int) -> None:
        """Log what is new: after a start anew steps come a second time."""
        new = {k: v for k, v in metrics.items() if step > self._last_steps.get(k, -1)}
        self._last_steps |= dict.fromkeys(new, step)
        if new:
            self._log(new, step)


class _Start:
    """One start of all ranks, and what came of it."""

    def __init__(self, folder: Path, job: Job, device: DeviceFacts, processes: int) -> None:
        self._folder, self._processes = folder, processes
        self.facts: TrainFacts | None = None
        self.error: Exception | None = None  # of a rank, which no new start would cure
        self.lost = ""  # why, where a process was lost
        (folder / JOB).write_bytes(pickle.dumps((job, device)))
        (folder / EVENTS).touch()

    def follow(self, events: _EventReader) -> _Start:
        """Return when all have ended. Whatever is raised meanwhile ends them."""
        events.open(self._folder)
        with ThreadPoolExecutor(1) as pool:
            agent = pool.submit(self._run_agent)  # outside of the main thread it takes no signals
            try:
                while not wait([agent], ASK_EVERY_S).done:
                    events.read()
                    if events.end_s and time.monotonic() - events.end_s > END_S:
                        self._kill()
            finally:
                while not agent.done():
                    self._kill()
                    wait([agent], ASK_EVERY_S)
        events.read()
        self._explain(agent)
        return self

    def _run_agent(self) -> None:
        """Return when all ranks have ended well. Raises ChildFailedError."""
        silence_agent()
        paths = [str(_PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
        threads = os.environ.get("OMP_NUM_THREADS", str(count_threads(self._processes)))
        config = api.LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self._processes,
            run_id=self._folder.name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(str(self._folder / "logs")),
        )
        start = api.elastic_launch(config, "env")  # the only way to give them an environment
        start(
            f"PYTHONPATH={os.pathsep.join(paths)}",
            f"OMP_NUM_THREADS={threads}",
            *(sys.executable, "-m", "headroom.launch.rank", self._folder, os.getpid()),
        )

    def _kill(self) -> None:
        """Kill all ranks: what is stopped, or waits in a driver, hears nothing else."""
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if str(self._folder) in child.cmdline():
                    child.kill()

    def _explain(self, agent: Future[None]) -> None:
        """Find the facts, the error, or how a process was lost."""
        failures: Mapping[int, ProcessFailure] = {}
        if (self._folder / FACTS).exists():
            self.facts = pickle.loads((self._folder / FACTS).read_bytes())
            return
        try:
            agent.result()
        except ChildFailedError as error:
            failures = error.failures
        errors = self._read_errors()
        own = [e for e in errors.values() if not isinstance(e, (LostRank, FailedRank))]
        words = [e for e in errors.values() if isinstance(e, FailedRank)]
        self.error = next(iter([*own, *words]), None)
        if self.error is not None and not isinstance(self.error, MicroBatchTooLarge):
            rank = next(rank for rank, error in errors.items() if error is self.error)
            log.warning("rank %d failed, which ends the others", rank)
        losses = [e for e in errors.values() if isinstance(e, LostRank)]
        self.lost = self._describe_loss(losses, failures)

    def _read_errors(self) -> dict[int, Exception]:
        """Return what the ranks raised, the first of them first."""
        files = {r: self._folder / name_error(r) for r in range(self._processes)}
        by_time = sorted((f.stat().st_mtime_ns, r) for r, f in files.items() if f.exists())
        return {rank: pickle.loads(files[rank].read_bytes()) for _, rank in by_time}

    def _describe_loss(self, losses: list[LostRank], failures: Mapping[int, ProcessFailure]) -> str:
        """Return who was lost, and how: the agent knows who ended, the others who did not come."""
        for loss in losses:
            if loss.missing:
                return "; ".join([str(loss), *self._find_places(loss.missing)])
        for rank, failure in failures.items():
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                sentences = [f"rank {rank} was ended by {failure.signal_name()}"]
                if failure.exitcode == -signal.SIGABRT:  # as by NCCL, after it waited for others
                    sentences += self._find_places(range(self._processes))
                return "; ".join(sentences)
            if failure.exitcode > 0 and not (self._folder / name_error(rank)).exists():
                said = " | ".join(self._read_last_lines(rank))
                return (
                    f"rank {rank} ended with code {failure.exitcode} ({said or 'it said nothing'})"
                )
        return str(losses[0]) if losses else "they ended without a result"

    def _find_places(self, ranks: Iterable[int]) -> Iterator[str]:
        """Yield where ranks were when the agent ended them, as far as that is no code of
        PyTorch's."""
        for rank in ranks:
            file = self._folder / name_stack(rank)
            text = file.read_text() if file.exists() else ""
            for name, line, function in re.findall(r'File "(.+)", line (\d+) in (.+)', text):
                if not name.startswith((_PYTORCH, "<frozen")):
                    yield f"rank {rank} was at {os.path.basename(name)}:{line}, {function}"
                    break

    def _read_last_lines(self, rank: int) -> list[str]:
        printed = self._folder / f"printed-{rank}"
        text = printed.read_text(errors="replace") if printed.exists() else ""
        return text.strip().splitlines()[-LINES:]
