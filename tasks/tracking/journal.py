"""A run's record as the training process keeps it: every metric goes to a local file first, and a
second process (`mlflow_sender.py`) sends it to MLflow, so that no step ever waits for a database
and nothing is lost where MLflow is away, where that process is killed (another goes on), or where
the run's folder is removed. This process never imports mlflow.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from io import FileIO
from pathlib import Path
from typing import Any

from tasks.engine.base import host_memory
from tasks.process import children
from tasks.process.redaction import redacted
from tasks.tracking.environment import spawn
from tasks.tracking.journal_lines import ONCE, Told, append, line_of, told_by
from tasks.tracking.where import TrackingError, Where

OPEN_S = 180.0  # the first use of a new database on a busy machine, with room to spare
CLOSE_S = 120.0  # without a sign of it, beside the time for a store that is away
# A server that is there answers in less. A new SQLite database takes long, and is waited for.
SILENT_S = 15.0
RESTARTS = 5  # of a sending process that ends in mid-run: on a host without memory each may
RESTARTS_AT_START = 2  # before the run has begun: its user is there
BEGIN = "begin.json"  # how the run began, as long as MLflow has not been told of it
RESERVE = "reserve"  # a file that holds the room for a run's end on a disk that fills up
RESERVE_BYTES = 1 << 20

log = logging.getLogger(__name__)
_spare: list[subprocess.Popen[str]] = []


def warm_up(where: Where) -> None:
    """Start the sending process ahead of need: it imports mlflow while this one imports torch."""
    _spare.append(spawn(where))


class JournalError(RuntimeError):
    """A run that has begun can't be kept any more; the text starts with the setting at fault."""


class SenderEnded(RuntimeError):
    """The process that tells MLflow of the run ended, each time, before the run had begun."""


class RunGone(TrackingError):
    """MLflow has no such run any more, or it was deleted there; the text says which."""


class Journal:
    """One run's record. A context manager: left by an exception, it leaves no process behind."""

    def __init__(self, where: Where, folder: Path) -> None:
        self.where = where
        self.folder = folder
        self.run_id = ""  # MLflow's, once it has been told of the run
        self.experiment_id = ""
        self.is_begun = False
        self.notes: list[str] = []  # what befell the record on its way
        self.put_back: Callable[[], None] = lambda: None  # what else the folder held, if removed
        self._histories: queue.SimpleQueue[list[dict[str, Any]] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._metrics: FileIO | None = None
        self.told = Told()  # before this process
        self._ms, self._ms_at = 0, time.monotonic()  # of the newest line, and when that was
        self._sender: subprocess.Popen[str] | None = None
        self._orders: list[dict[str, Any]] = []  # open and begin
        self._opening: dict[str, Any] | None = None  # the answer
        self._closing: dict[str, Any] | None = None
        self._is_left = False
        self._telling = threading.Lock()  # while orders go to a sending process, or it is replaced

    def __enter__(self) -> Journal:
        self._sender = _spare.pop() if _spare else spawn(self.where)
        here = copy_context()  # Prefect knows by it which run's log this is
        threading.Thread(target=here.run, args=(self._listen,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_left = True
        if self._metrics is not None:
            self._metrics.close()
        if self._sender is not None:
            children.let_go(self._sender)  # it ends by itself: what is unsent, it still sends

    @property
    def ids(self) -> dict[str, str]:
        return {"run_id": self.run_id, "experiment_id": self.experiment_id}

    def open(self, experiment: str | None) -> None:
        """Begin to open the experiment. `create` waits for it."""
        where = self.where.model_copy(update={"experiment": experiment or self.where.experiment})
        prefect_api = os.environ.get("PREFECT_API_URL", "")  # a desk has set it
        order = {"do": "open", "where": where.model_dump(), "prefect_api": prefect_api}
        self._orders = [{**order, "pid": os.getpid()}]
        self._tell(self._orders[0])

    def create(
        self,
        name: str,
        *,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        data: Sequence[Mapping[str, str]] = (),
        wanted: Sequence[str] = (),
        start: Mapping[str, Any] | None = None,
    ) -> dict[str, float]:
        """Open the run in MLflow. Raises TrackingError where that can't be done; where MLflow is
        away, and not required, it is told as soon as it is there. Returns the newest values of the
        wanted metrics among finished runs with the same `alike`. start: what start.json is to say,
        with the run's ids: it is there with the run, whatever becomes of this process meanwhile.
        """
        given = {k: "" if v is None else str(v) for k, v in params.items()}
        begin = {"name": name, "params": given, "data": [*data], "start": start}
        return self._begun(begin, tags, wanted)

    def reopen(
        self, ids: Mapping[str, str], *, tags: Mapping[str, str], wanted: Sequence[str] = ()
    ) -> dict[str, float]:
        """The same for a run that goes on, with the journal of before: what that has told of a step
        is not told again. ids: run_id and experiment_id. Raises RunGone too: nothing is begun then,
        and another run may be, in another folder."""
        try:
            begin = json.loads((self.folder / BEGIN).read_text())
        except (OSError, ValueError):
            begin = ids
        return self._begun(begin, tags, wanted)

    def _begun(
        self, begin: Mapping[str, Any], tags: Mapping[str, str], wanted: Sequence[str]
    ) -> dict[str, float]:
        if self._opening is None:
            self._answer("open", OPEN_S)  # it has imported MLflow
            self._opening = self._unless_away("open")
        is_away = "away" in (answer := self._opening)
        order = {"start_ms": int(time.time() * 1000), **begin}
        order["experiment"] = self._orders[0]["where"]["experiment"]
        order["tags"] = {"alike": "", **begin.get("tags", {}), **tags}
        try:
            self._metrics = self._opened()
            self.told = told_by(self.folder / "metrics.jsonl")
            self._ms = self.told.unix_ms
            with open(self.folder / RESERVE, "wb") as reserve:
                os.posix_fallocate(reserve.fileno(), 0, RESERVE_BYTES)
        except OSError as error:
            raise TrackingError(self._refusal(error)) from None
        order |= {"do": "begin", "folder": str(self.folder), "wanted": list(wanted)}
        with self._telling:
            self._orders.append(order)
            if is_away:
                self._begin_without(answer["away"])
            self._tell({**order, "late": is_away})
        try:
            answer = answer if is_away else self._unless_away("begin")
        except (SenderEnded, TrackingError):
            self._leave_nothing()
            raise
        if not is_away and "away" in answer:
            self._begin_without(answer["away"])
        if "gone" in answer:
            self._forget()
            raise RunGone(answer["gone"])
        (self.folder / "run.json").unlink(missing_ok=True)  # its end of then
        self.is_begun = True
        return dict(answer.get("past", {}))

    def _leave_nothing(self) -> None:
        """Of a run that did not begin, and of which nothing was logged before."""
        with suppress(OSError):
            self.make_room()
            if not (self.folder / "metrics.jsonl").stat().st_size:
                for name in (BEGIN, "metrics.jsonl"):
                    (self.folder / name).unlink(missing_ok=True)
                self.folder.rmdir()  # not where anything else is in it

    def _forget(self) -> None:
        """Of a run that was to be gone on with, and can't be."""
        assert self._metrics is not None
        self._metrics.close()
        self.make_room()
        self._metrics, self.told, self._ms = None, Told(), 0
        self._orders.pop()

    def history(self) -> list[dict[str, Any]] | None:
        """Gate and metrics of the newest runs of the same `gate.of`; None where it is not known."""
        with suppress(queue.Empty):
            return self._histories.get(timeout=SILENT_S if self.run_id else 0)
        return None

    def _begin_without(self, away: str) -> None:
        self._note(f"{away}; the run is kept in {self.folder}, and sent when MLflow is there")
        with suppress(OSError):  # the disk is full: close() has room
            self._keep_begin()

    def _keep_begin(self) -> None:
        """For whoever tells MLflow of the run, where this process does not live to see it."""
        half = self.folder / f"{BEGIN}.new"
        half.write_text(json.dumps(self._orders[1]))
        half.rename(self.folder / BEGIN)

    def log(self, metrics: Mapping[str, float], step: int, *, again: bool = False) -> None:
        """Keep metrics of a step. Costs one short write; sent later, by the other process. again:
        also those that were told of this very step before this process."""
        assert self._metrics is not None, "log() before create()"
        if self.told.steps and step != ONCE:
            told, first = self.told.steps, step + again
            metrics = {k: v for k, v in metrics.items() if told.get(k, -1) < first}
        if not metrics:
            return
        try:
            self._restore()
            append(self._metrics, line_of(metrics, step, unix_ms=self._now_ms()))
        except OSError as error:
            raise JournalError(self._refusal(error)) from None

    def _now_ms(self) -> int:
        """Unix time; never before what was told: of a step that is told of twice MLflow shows the
        later one, and a clock may be set back."""
        now_s = time.monotonic()
        passed_ms = int((now_s - self._ms_at) * 1000)
        self._ms, self._ms_at = max(int(time.time() * 1000), self._ms + passed_ms), now_s
        return self._ms

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
        self.put_back()
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
            if not self.run_id:
                self._keep_begin()
            (self.folder / "run.json").write_text(json.dumps(run, indent=1))
        with self._telling:
            self._closing = {"do": "close", "run": dict(run)}
            self._tell(self._closing)
        answer: dict[str, Any] = {}
        while "closed" not in answer:  # there may be much of it
            patience_s = self.where.give_up_s + CLOSE_S if self.run_id else 2 * SILENT_S
            answer = self._answer("close", patience_s)
        if answer.get("registered"):
            log.warning("run.registered_model: %s", answer["registered"])
        return dict(answer["times"])

    def _tell(self, what: dict[str, Any]) -> None:
        assert self._sender is not None and self._sender.stdin is not None, "not entered"
        with suppress(OSError):  # it is gone: the answer that is missing says so
            self._sender.stdin.write(json.dumps(what) + "\n")
            self._sender.stdin.flush()

    def _unless_away(self, to: str) -> dict[str, Any]:
        """The answer; with `away` where there is none, and MLflow is not required."""
        if self.where.required or self.where.database is not None:
            return self._answer(to, OPEN_S)
        return self._answer(to, SILENT_S, silent="away")

    def _answer(self, to: str, timeout_s: float, *, silent: str = "error") -> dict[str, Any]:
        answer: dict[str, Any] = {}
        try:
            while answer.get("to", "") not in (to, None):  # None: to all that is asked
                answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            uri = redacted(self.where.tracking_uri)
            answer = {silent: f"tracking_uri: {uri} gave no answer within {timeout_s:.0f} s"}
        if "error" in answer:
            is_lost = "ended" in answer and not self.is_begun
            raise (SenderEnded if is_lost else TrackingError)(redacted(answer["error"]))
        return answer

    def _listen(self) -> None:
        """Hand on the answers, of one sending process after the other where they end too early."""
        kills = host_memory.kills()
        for restarts in range(1 + RESTARTS):
            sender = self._sender
            assert sender is not None and sender.stdout is not None
            with sender.stdout as answers:
                for line in answers:
                    with suppress(json.JSONDecodeError):  # a library that prints
                        self._hear(json.loads(line))
            code = sender.wait()
            killed = host_memory.killed_since(kills) if code == -signal.SIGKILL else ""
            ended = (
                f"the sending process ended in mid-run (exit code {code}{killed and ', '}{killed})"
            )
            if not self.is_begun:
                ended = ended.replace(" in mid-run", " before the run began")
            if self._is_left:
                break
            is_last = restarts >= (RESTARTS if self.is_begun else RESTARTS_AT_START)
            self._note(ended if is_last else f"{ended}; it is started again")
            if is_last:
                break
            time.sleep(2**restarts - 1)
            if not self._replaced():
                break
        self._histories.put(None)
        error = f"tracking_uri: {ended}; see {self.where.runs}/tracking.log"
        self._answers.put({"to": None, "error": error, "ended": True})

    def _hear(self, answer: dict[str, Any]) -> None:
        if "history" in answer:
            return self._histories.put(answer["history"])
        for told in answer.get("notes", ()):
            self._note(told)
        if "run_id" in answer:
            if self.is_begun and not self.run_id:
                log.info("MLflow is there, and has the run: %s", answer["run_id"])
            self.run_id, self.experiment_id = answer["run_id"], answer["experiment_id"]
        self._answers.put(answer)

    def _replaced(self) -> bool:
        """Whether another sending process goes on where the last one was."""
        with self._telling:
            assert self._sender is not None
            children.let_go(self._sender)
            try:
                self._sender = spawn(self.where)
            except TrackingError:
                return False
            for order in self._orders[:1]:
                self._tell(order)
            for begin in self._orders[1:]:
                known = {**self.ids, "again": True} if self.run_id else {}
                if not self.is_begun:  # the other may have made the run: it is looked for
                    with suppress(OSError):
                        self._keep_begin()
                self._tell({**begin, **known, "late": self.is_begun})
            if self._closing is not None:
                self._tell(self._closing)
        return True
