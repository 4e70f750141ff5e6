"""The processes of a training, started on this machine by PyTorch's launcher (torchrun), and heard
until they are done. One that is lost is started again with the others, from the last checkpoint;
so are all where the launcher itself is lost. None outlives this process.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import psutil

from tasks.engine.accounts.step_metrics import Log
from tasks.engine.base.facts import DeviceFacts, TrainFacts
from tasks.engine.launch.parent_death import PARENT
from tasks.engine.launch.placement import count_threads
from tasks.engine.launch.rank import ADDRESS, Job
from tasks.engine.training.loop import StopCheck

ASK_EVERY_S = 0.1
EASINGS = 10  # times that all may begin again with half the rows of a micro-batch
END_S = 10.0  # for processes that were told to end
LAUNCH_S = 60.0  # for a launcher to start them: it waits 30 s for one that hears no signal
SETTLE_S = 1.0  # for what the ranks have sent before their launcher ended
LINES = 5  # of what the processes printed, where none of them told why it ended
log = logging.getLogger(__name__)


def train_in_processes(
    job: Job,
    device: DeviceFacts,
    *,
    processes: int,
    restarts: int,
    log: Log,
    asked: StopCheck = lambda: None,
) -> TrainFacts:
    """What so many processes have trained together, the first of them on `device`. restarts: how
    often all of them begin again from the last checkpoint, where one is lost.

    Raises what the first failing of them raised, LostProcess where they were lost too often, and
    RuntimeError where they ended without a word.
    """
    heard = _RankMessages(restarts, log, asked, wait_s=job.config.launch.wait_s)
    while True:
        with _launch_ranks(job, device, processes=processes, restarts=restarts) as ranks:
            facts = heard.wait_for_result(ranks)
        if facts is not None:
            return facts
        job = replace(job, resumes=True)  # the launcher was lost


class LostProcess(RuntimeError):
    """Processes of the training were lost more often than it may begin again."""


class _LaunchedRanks:
    """The launcher's process, and what its ranks send."""

    def __init__(self, process: subprocess.Popen[bytes], printed: Path) -> None:
        self.process, self._printed = process, printed
        self.messages: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.lead: Connection | None = None
        self._connections: list[Connection] = []
        self._lock = threading.Lock()
        self._here = 0  # ranks that are connected
        self._alone_s = time.monotonic()  # since when none is
        self._processes: dict[int, psutil.Process] = {}  # by rank
        self._is_over = False

    def accept(self, listener: Listener, job: Job, device: DeviceFacts) -> None:
        """Give the job to each rank that comes, until there is no listener any more."""
        with suppress(OSError, EOFError):
            while not self._is_over:
                connection = listener.accept()
                self._connections.append(connection)
                if self._is_over:  # it waited here before the listener was closed
                    connection.close()
                    return
                told = connection, (job, device)
                threading.Thread(target=self._serve, args=told, daemon=True).start()

    def _serve(self, connection: Connection, job: tuple[Job, DeviceFacts]) -> None:
        """Give one rank its job, and hear it until it is gone; it may be before it has that."""
        with self._counted(), suppress(OSError, EOFError):
            connection.send(job)
            while True:
                message = connection.recv()
                if message[:2] == ("here", 0):  # the lead
                    self.lead = connection
                if message[0] == "here":
                    with suppress(psutil.NoSuchProcess):
                        self._processes[message[1]] = psutil.Process(message[3])
                self.messages.put(message)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self._here += 1
        try:
            yield
        finally:
            with self._lock:
                self._here, self._alone_s = self._here - 1, time.monotonic()

    def alone_s(self) -> float:
        """Return for how long none of the ranks has been there."""
        with self._lock:
            return 0.0 if self._here else time.monotonic() - self._alone_s

    def printed(self) -> str:
        return self._printed.read_text(errors="replace").strip()

    def kill(self, numbers: Iterable[int]) -> None:
        """Kill these ranks: what is stopped, or waits in a driver, hears nothing else."""
        _kill(self._processes[number] for number in numbers if number in self._processes)

    def kill_launcher(self) -> None:
        """Kill it, and those that it has started: it may be stopped, as they may."""
        started = _list_children(self.process)
        self.process.kill()
        _kill(started)

    def end(self) -> None:
        """Return when the launcher and its ranks have ended, by themselves or killed."""
        started = _list_children(self.process)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)  # it ends its processes first
            _wait_for_end(self.process)
        self._is_over = True
        for connection in self._connections:
            # A rank whose launcher is gone ends by it. To close it is not enough: a thread reads.
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as line:
                line.shutdown(socket.SHUT_RDWR)
        _, alive = psutil.wait_procs([*{*self._processes.values(), *started}], END_S)
        _kill(alive)
        psutil.wait_procs(alive, END_S)


class _RankMessages:
    """What the ranks have told so far, whoever launched them."""

    def __init__(self, restarts: int, log: Log, asked: StopCheck, *, wait_s: float) -> None:
        self._most, self._log, self._asked, self._wait_s = restarts, log, asked, wait_s
        self._stop: Any = None  # that the lead was told of
        self._failed: Exception | None = None
        self._left = False
        self._facts: TrainFacts | None = None
        self._before = 0  # times that all began again under launchers that were lost
        self._restarts = self._eased = 0  # times that all began again; for lack of memory
        self._is_easing = False
        self._lost: list[str] = []  # why, each time
        self._is_lost = False  # and will begin again
        self._given_up = ""  # why the launcher is killed
        self._logged: dict[str, int] = {}  # last steps, by the name of a metric

    def wait_for_result(self, ranks: _LaunchedRanks) -> TrainFacts | None:
        """Return what was trained; None where the launcher was lost, and all are to begin again."""
        self._ranks, ended_s = ranks, None
        while self._facts is None:
            with suppress(queue.Empty):
                self._hear(*ranks.messages.get(timeout=ASK_EVERY_S))
            self._ask()
            if ranks.process.poll() is not None:
                ended_s = ended_s or time.monotonic()
                if self._facts is None and time.monotonic() - ended_s > SETTLE_S:
                    self._launcher_ended()
                    return None
            if self._failed is not None:
                raise self._failed
            patience_s = LAUNCH_S + self._wait_s
            if ranks.alone_s() > patience_s and ranks.process.poll() is None:
                self._given_up = f"their launcher started none of them within {patience_s:g} s"
                ranks.kill_launcher()
            if self._left:
                _wait_for_end(ranks.process)
                self._stop.act()
                raise AssertionError("a stop that ends the training returned")
        _wait_for_end(ranks.process)  # a rank that is stopped would keep it
        if count := self._restarts - self._eased:
            lost = {"ranks.restarts": str(count), "ranks.lost": "; ".join(self._lost)}
            return replace(self._facts, tags=self._facts.tags | lost)
        return self._facts

    def _ask(self) -> None:
        if self._stop is None and self._ranks.lead is not None:
            self._stop = self._asked()
            if self._stop is not None:
                with suppress(OSError):
                    self._ranks.lead.send(self._stop.ends)

    def _hear(self, kind: str, rank: int, *told: Any) -> None:
        if kind == "here" and rank == 0:
            self._begin_again(self._before + told[0])
        elif kind == "log":
            self._tell(*told)
        elif kind == "line":
            name, level, text = told
            logging.getLogger(name).log(level, "%s", text)
        elif kind == "failed":
            if self._failed is None:
                log.warning("rank %d failed, which ends the others", rank)
            self._failed = self._failed or told[0]
        elif kind == "too large":
            self._eased += not self._is_easing  # more than one may say so
            self._is_easing = True
        elif kind == "lost" and not self._is_easing:
            text, missing = told
            self._lose(text)
            self._ranks.kill(missing)
        elif kind == "kept" and self._stop is not None and not self._stop.ends:
            self._stop.act()
            self._stop = None
        elif kind == "left" and rank == 0:
            self._left = True
        elif kind == "done" and rank == 0:
            self._facts = told[0]

    def _lose(self, text: str) -> None:
        """A process is lost; each that is left says so, and the first one is heard."""
        if not self._is_lost:
            self._is_lost = True
            self._lost.append(text)
            log.warning("a process of the training was lost: %s", text)

    def _begin_again(self, restarts: int) -> None:
        """The lead is here, for the first time or once more."""
        lost = restarts - self._eased
        if restarts > self._restarts and not self._is_easing:
            self._lose(_name_killed(self._ranks.printed()) or "it said nothing")
            if lost > self._most:
                self._failed = LostProcess(
                    "launch.processes: a process of the training was lost more often than "
                    f"run.retries allows ({self._most}): {self._lost[-1]}"
                )
            else:
                log.warning("all begin again from the last checkpoint (%d of %d)", lost, self._most)
        self._restarts, self._is_easing, self._is_lost = restarts, False, False

    def _launcher_ended(self) -> None:
        """Raise RuntimeError where the launcher ended by itself, without a result, and LostProcess
        where it is lost once too often; else all are to begin again."""
        code, printed = self._ranks.process.returncode, self._ranks.printed()
        found = re.search(r"SignalException: Process \d+ got signal: (\d+)", printed)
        number = -code if code < 0 else int(found[1]) if found else 0
        if not number:
            said = " | ".join(line.strip() for line in printed.splitlines()[-LINES:])
            raise RuntimeError(
                "launch.processes: the processes ended without a result "
                f"({said[:600] or 'they printed nothing'})"
            )
        self._is_lost = False
        self._lose(self._given_up or f"their launcher was ended by {_name(number)}")
        self._given_up = ""
        self._before = self._restarts + 1
        self._begin_again(self._before)
        if self._failed is not None:
            raise self._failed

    def _tell(self, metrics: dict[str, float], step: int) -> None:
        """Log what is new: after a start anew steps come a second time."""
        new = {k: v for k, v in metrics.items() if step > self._logged.get(k, -1)}
        self._logged |= dict.fromkeys(new, step)
        if new:
            self._log(new, step)


def _name_killed(printed: str) -> str:
    """Return which rank the launcher has last seen end, and how; empty where it does not say."""
    found = re.findall(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", printed)
    if not found:
        return ""
    code, rank = found[-1]
    how = f"was ended by {_name(-int(code))}" if code.startswith("-") else f"ended with code {code}"
    return f"rank {rank} {how}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextmanager
def _launch_ranks(
    job: Job, device: DeviceFacts, *, processes: int, restarts: int
) -> Iterator[_LaunchedRanks]:
    with tempfile.TemporaryDirectory(prefix="headroom-") as folder, Listener() as listener:
        printed = Path(folder) / "printed"
        with printed.open("wb") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tasks.engine.launch.parent_death"),
                    *("torch.distributed.run", "--standalone", "--local-addr=localhost"),
                    *(f"--nproc-per-node={processes}", f"--max-restarts={restarts + EASINGS}"),
                    *("--monitor-interval=0.1", "-m", "tasks.engine.launch.rank"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_make_environment(str(listener.address), processes),
                start_new_session=True,  # a Ctrl-C is for this process
            )
        ranks = _LaunchedRanks(process, printed)
        threading.Thread(target=ranks.accept, args=(listener, job, device), daemon=True).start()
        try:
            yield ranks
        finally:
            ranks.end()


def _make_environment(address: str, processes: int) -> dict[str, str]:
    project = str(Path(__file__).parents[3])
    path = os.pathsep.join(p for p in (project, os.environ.get("PYTHONPATH")) if p)
    given = {"OMP_NUM_THREADS": str(count_threads(processes)), **os.environ}
    return given | {ADDRESS: address, PARENT: str(os.getpid()), "PYTHONPATH": path}


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _list_children(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children()
    except psutil.NoSuchProcess:
        return []


def _wait_for_end(process: subprocess.Popen[bytes]) -> None:
    """Return when it has ended, by itself or killed with what it started."""
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
