"""The processes of a training, started on this machine by PyTorch's launcher (torchrun), and heard
until they are done. One that is lost is started again with the others, from the last checkpoint.
None outlives this process.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from tasks.engine.base.facts import DeviceFacts, TrainFacts
from tasks.engine.launch.processes import threads_of
from tasks.engine.launch.rank import ADDRESS, Job
from tasks.engine.training.budget import Asked
from tasks.engine.training.step_metrics import Log

ASK_EVERY_S = 0.1
EASINGS = 10  # times that all may begin again with half the rows of a micro-batch
END_S = 10.0  # for processes that were told to end
LINES = 5  # of what the processes printed, where none of them told why it ended
log = logging.getLogger(__name__)


def train(
    job: Job,
    device: DeviceFacts,
    *,
    processes: int,
    restarts: int,
    log: Log,
    asked: Asked = lambda: None,
) -> TrainFacts:
    """What so many processes have trained together, the first of them on `device`. restarts: how
    often all of them begin again from the last checkpoint, where one is lost.

    Raises what the first failing of them raised, and RuntimeError where they ended without a word.
    """
    with _launched(job, device, processes=processes, restarts=restarts) as ranks:
        return _Heard(ranks, restarts, log, asked).to_the_end()


class _Ranks:
    """The launcher's process, and what its ranks send."""

    def __init__(self, process: subprocess.Popen[bytes], printed: Path) -> None:
        self.process, self.printed = process, printed
        self.messages: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.lead: Connection | None = None

    def accept(self, listener: Listener, job: Job, device: DeviceFacts) -> None:
        """Give the job to each rank that comes, until there is no listener any more."""
        with suppress(OSError, EOFError):
            while True:
                connection = listener.accept()
                connection.send((job, device))
                threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: Connection) -> None:
        with suppress(OSError, EOFError):
            while True:
                message = connection.recv()
                if message[:2] == ("here", 0):  # the lead
                    self.lead = connection
                self.messages.put(message)


class _Heard:
    """What the ranks have told so far."""

    def __init__(self, ranks: _Ranks, restarts: int, log: Log, asked: Asked) -> None:
        self._ranks, self._most, self._log, self._asked = ranks, restarts, log, asked
        self._stop: Any = None  # that the lead was told of
        self._failed: Exception | None = None
        self._left = False
        self._facts: TrainFacts | None = None
        self._restarts = self._eased = 0  # times that all began again; for lack of memory
        self._is_easing = False
        self._logged: dict[str, int] = {}  # last steps, by the name of a metric

    def to_the_end(self) -> TrainFacts:
        ranks = self._ranks
        while ranks.process.poll() is None or not ranks.messages.empty():
            try:
                self._hear(*ranks.messages.get(timeout=ASK_EVERY_S))
            except queue.Empty:
                self._ask()
            if self._failed is not None:
                raise self._failed
            if self._left:
                _wait(ranks.process)
                self._stop.act()
                break
        if self._facts is None:
            raise RuntimeError(self._wordless())
        if lost := self._restarts - self._eased:
            tags = self._facts.tags | {"ranks.restarts": str(lost)}
            return replace(self._facts, tags=tags)
        return self._facts

    def _ask(self) -> None:
        if self._stop is None and self._ranks.lead is not None:
            self._stop = self._asked()
            if self._stop is not None:
                with suppress(OSError):
                    self._ranks.lead.send(self._stop.ends)

    def _hear(self, kind: str, rank: int, *told: Any) -> None:
        if kind == "here" and rank == 0:
            self._restarts, self._is_easing = told[0], False
            if self._restarts - self._eased > self._most:
                self._failed = RuntimeError(self._wordless())
        elif kind == "log":
            self._tell(*told)
        elif kind == "line":
            name, level, text = told
            logging.getLogger(name).log(level, "%s", text)
        elif kind == "failed":
            self._failed = told[0]
        elif kind == "too large":
            self._eased += not self._is_easing  # more than one may say so
            self._is_easing = True
        elif kind == "lost" and not self._is_easing:
            log.warning("a process of the training was lost; all go on from the last checkpoint")
        elif kind == "kept" and self._stop is not None and not self._stop.ends:
            self._stop.act()
            self._stop = None
        elif kind == "left" and rank == 0:
            self._left = True
        elif kind == "done" and rank == 0:
            self._facts = told[0]

    def _tell(self, metrics: dict[str, float], step: int) -> None:
        """Log what is new: after a start anew steps come a second time."""
        new = {k: v for k, v in metrics.items() if step > self._logged.get(k, -1)}
        self._logged |= dict.fromkeys(new, step)
        if new:
            self._log(new, step)

    def _wordless(self) -> str:
        printed = self._ranks.printed.read_text(errors="replace").strip().splitlines()
        said = " | ".join(line.strip() for line in printed[-LINES:]) or "they printed nothing"
        return f"launch.processes: the processes ended without a result ({said:.600})"


@contextmanager
def _launched(job: Job, device: DeviceFacts, *, processes: int, restarts: int) -> Iterator[_Ranks]:
    with tempfile.TemporaryDirectory(prefix="headroom-") as folder, Listener() as listener:
        printed = Path(folder) / "printed"
        with printed.open("wb") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                    *(f"--nproc-per-node={processes}", f"--max-restarts={restarts + EASINGS}"),
                    *("--monitor-interval=0.1", "-m", "tasks.engine.launch.rank"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(str(listener.address), processes),
                start_new_session=True,  # a Ctrl-C is for this process
            )
        ranks = _Ranks(process, printed)
        threading.Thread(target=ranks.accept, args=(listener, job, device), daemon=True).start()
        try:
            yield ranks
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # it ends its processes first
                _wait(process)


def _environment(address: str, processes: int) -> dict[str, str]:
    project = str(Path(__file__).parents[3])
    path = os.pathsep.join(p for p in (project, os.environ.get("PYTHONPATH")) if p)
    given = {"OMP_NUM_THREADS": str(threads_of(processes)), **os.environ}
    return given | {ADDRESS: address, "PYTHONPATH": path}


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Return when it has ended, by itself or killed with what it started."""
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
