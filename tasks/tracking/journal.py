"""A run's record as the training process keeps it: every metric goes to a local file first, and a
second process (`mlflow_sender.py`) sends it to MLflow, so that no step ever waits for a database
and nothing is lost where MLflow is away, where that process is killed (another goes on), or where
the run's folder is removed. This process never imports mlflow.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from io import FileIO
from pathlib import Path
from typing import Any

from tasks.process.redaction import redacted
from tasks.tracking.journal_lines import batches, line_of
from tasks.tracking.where import TrackingError, Where

OPEN_S = 180.0  # the first use of a new database on a busy machine, with room to spare
CLOSE_S = 120.0  # without a sign of it, beside the time for a store that is away
RESTARTS = 5  # of a sending process that ends in mid-run: on a host without memory each may
RESERVE = "reserve"  # a file that holds the room for a run's end on a disk that fills up
RESERVE_BYTES = 1 << 20

log = logging.getLogger(__name__)
_spare: list[subprocess.Popen[str]] = []


def warm_up(where: Where) -> None:
    """Start the sending process ahead of need: it imports mlflow while this one imports torch."""
    _spare.append(_spawn(where))


class JournalError(RuntimeError):
    """A run that has begun can't be kept any more; the text starts with the setting at fault."""


class Journal:
    """One run's record. A context manager: left by an exception, it leaves no process behind."""

    def __init__(self, where: Where, folder: Path) -> None:
        self.where = where
        self.folder = folder
        self.run_id = ""
        self.experiment_id = ""
        self.notes: list[str] = []  # what befell the record on its way
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._metrics: FileIO | None = None
        self._told: dict[str, int] = {}  # the newest step of each metric, before this process
        self._sender: subprocess.Popen[str] | None = None
        self._closing: dict[str, Any] | None = None
        self._is_left = False
        self._telling = threading.Lock()  # while orders go to a sending process, or it is replaced

    def __enter__(self) -> Journal:
        self._sender = _spare.pop() if _spare else _spawn(self.where)
        here = copy_context()  # Prefect knows by it which run's log this is
        threading.Thread(target=here.run, args=(self._listen,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_left = True
        if self._metrics is not None:
            self._metrics.close()
        if self._sender is not None:
            _let_go(self._sender)  # it ends by itself: what is unsent, it still sends

    def open(self, experiment: str | None) -> None:
        """Begin to open the experiment. `create` waits for it."""
        where = self.where.model_copy(update={"experiment": experiment or self.where.experiment})
        prefect_api = os.environ.get("PREFECT_API_URL", "")  # a desk has set it
        self._tell({"do": "open", "where": where.model_dump(), "prefect_api": prefect_api})

    def create(
        self,
        *,
        name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        wanted: Sequence[str] = (),
    ) -> dict[str, float]:
        """Open the run in MLflow. Raises TrackingError where that can't be done.

        Returns the newest values of the wanted metrics among finished runs with the same tag
        `alike`.
        """
        given = {k: "" if v is None else str(v) for k, v in params.items()}
        return self._begun({"do": "create", "name": name, "params": given}, tags, wanted)

    def reopen(
        self, ids: Mapping[str, str], *, tags: Mapping[str, str], wanted: Sequence[str] = ()
    ) -> dict[str, float]:
        """The same for a run that goes on, with the journal of before: what that has told of a step
        is not told again. ids: run_id and experiment_id."""
        return self._begun({"do": "reopen", **ids}, tags, wanted)

    def _begun(
        self, order: dict[str, Any], tags: Mapping[str, str], wanted: Sequence[str]
    ) -> dict[str, float]:
        self._answer(OPEN_S)
        try:
            self._metrics = self._opened()
            self._told = _newest_steps(self.folder / "metrics.jsonl")
            with open(self.folder / RESERVE, "wb") as reserve:
                os.posix_fallocate(reserve.fileno(), 0, RESERVE_BYTES)
        except OSError as error:
            raise TrackingError(self._refusal(error)) from None
        order |= {"tags": {"alike": "", **tags}, "wanted": list(wanted)}
        self._tell({"folder": str(self.folder), **order})
        answer = self._answer(OPEN_S)
        self.run_id, self.experiment_id = answer["run_id"], answer["experiment_id"]
        past: dict[str, float] = answer["past"]
        return past

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep metrics of a step. Costs one short write; sent later, by the other process."""
        assert self._metrics is not None, "log() before create()"
        if self._told:
            metrics = {k: v for k, v in metrics.items() if self._told.get(k, -1) < step}
            if not metrics:
                return
        try:
            self._restore()
            _append(self._metrics, line_of(metrics, step, unix_ms=int(time.time() * 1000)))
        except OSError as error:
            raise JournalError(self._refusal(error)) from None

    def make_room(self) -> None:
        """Give the run's end the room that was kept for it."""
        with suppress(OSError):
            (self.folder / RESERVE).unlink()

    def _opened(self) -> FileIO:
        self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        # Unbuffered: what was logged survives the death of this process.
        return open(self.folder / "metrics.jsonl", "ab+", buffering=0)

    def _restore(self) -> None:
        """A journal that was removed is still there as long as it is open: it is written anew."""
        if self._metrics is None or os.path.exists(self.folder / "metrics.jsonl"):
            return
        new = self._opened()
        self._metrics.seek(0)
        shutil.copyfileobj(self._metrics, new)
        self._metrics.close()
        self._metrics = new
        self._note(f"{self.folder} was removed in mid-run; it was written anew")

    def _refusal(self, error: OSError) -> str:
        return f"runs: {self.folder} can't be written ({error.strerror}); make room there"

    def _note(self, text: str) -> None:
        self.notes.append(text)
        log.warning("%s", text)

    def close(self, run: Mapping[str, Any]) -> dict[str, float]:
        """Send what is left, with the files of the folder, and end the run with `run["status"]`.

        Returns the times that only the end could tell. Raises TrackingError where MLflow does not
        answer; everything is then still in the folder.
        """
        with suppress(OSError):  # a full disk; it is for sending later, and also goes by the pipe
            self._restore()
            (self.folder / "run.json").write_text(json.dumps(run, indent=1))
        with self._telling:
            self._closing = {"do": "close", "run": dict(run)}
            self._tell(self._closing)
        while "closed" not in (answer := self._answer(self.where.give_up_s + CLOSE_S)):
            pass  # there is much of it, and it goes on
        times: dict[str, float] = answer["times"]
        return times

    def _tell(self, what: dict[str, Any]) -> None:
        assert self._sender is not None and self._sender.stdin is not None, "not entered"
        with suppress(OSError):  # it is gone: the answer that is missing says so
            self._sender.stdin.write(json.dumps(what) + "\n")
            self._sender.stdin.flush()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            answer = {"error": f"tracking_uri: no answer within {timeout_s:.0f} s"}
        if "error" in answer:
            raise TrackingError(redacted(answer["error"]))
        return answer

    def _listen(self) -> None:
        """Hand on the answers, of one sending process after the other where they end too early."""
        for restarts in range(1 + RESTARTS):
            sender = self._sender
            assert sender is not None and sender.stdout is not None
            with sender.stdout as answers:
                for line in answers:
                    with suppress(json.JSONDecodeError):  # a library that prints
                        self._answers.put(json.loads(line))
            code = sender.wait()
            if self._is_left or not self.run_id:
                break
            again = "; it is started again" if restarts < RESTARTS else ""
            self._note(f"the sending process ended in mid-run (exit code {code}){again}")
            if restarts == RESTARTS:
                break
            time.sleep(2**restarts - 1)
            if not self._replaced():
                break
        seen = Path(self.where.runs) / "tracking.log"
        self._answers.put({"error": f"tracking_uri: the sending process ended; see {seen}"})

    def _replaced(self) -> bool:
        """Whether another sending process goes on where the last one was."""
        order = {
            "do": "resume",
            "where": self.where.model_dump(),
            "prefect_api": os.environ.get("PREFECT_API_URL", ""),
            "folder": str(self.folder),
            "run_id": self.run_id,
            "experiment_id": self.experiment_id,
        }
        with self._telling:
            assert self._sender is not None
            _let_go(self._sender)
            try:
                self._sender = _spawn(self.where)
            except TrackingError:
                return False
            self._tell(order)
            if self._closing is not None:
                self._tell(self._closing)
        return True


def _let_go(sender: subprocess.Popen[str]) -> None:
    assert sender.stdin is not None
    with suppress(OSError):  # it has gone already
        sender.stdin.close()


def _newest_steps(journal: Path) -> dict[str, int]:
    """Of each metric in it; half a line at its end, of a process that died, is cut off."""
    newest: dict[str, int] = {}
    whole_bytes = 0
    with open(journal, "rb+") as lines:
        for batch, whole_bytes in batches(lines, 0):  # noqa: B007 (its last value is a result)
            newest.update((name, step) for name, _, _, step in batch)
        lines.truncate(whole_bytes)
    return newest


def _append(file: FileIO, line: bytes) -> None:
    """The whole line or none of it: half of one would spoil the next."""
    written = file.write(line)
    if written != len(line):
        file.truncate(file.tell() - (written or 0))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _spawn(where: Where) -> subprocess.Popen[str]:
    runs = Path(where.runs)
    try:
        runs.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = open(runs / "tracking.log", "a", opener=_private)  # noqa: SIM115
    except OSError as error:
        raise TrackingError(f"runs: {runs} can't be written ({error.strerror})") from None
    with log:
        return subprocess.Popen(
            [sys.executable, "-m", "tasks.tracking.mlflow_sender"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": _project_first()},
            start_new_session=True,  # Ctrl-C is for the training; the record still has to be closed
        )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _project_first() -> str:
    project = str(Path(__file__).parent.parent.parent)
    return os.pathsep.join(p for p in (project, os.environ.get("PYTHONPATH")) if p)
