"""Keeps a run's record in the training process: all that is told of the run goes to its event log
first (`event_log.py`), and a second process (`mlflow_sender.py`) follows that and sends it to
MLflow, so that no step ever waits for a database and nothing is lost where MLflow is away, where
that process is killed (another goes on), or where the run's folder is removed. This process never
imports mlflow.

What the two say to each other: this one tells, in one line, where MLflow is; after that, only that
there is more to read in a run's folder. The sending process answers what somebody waits for: that
the run has begun, what runs alike have measured, that it has ended.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from io import FileIO
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

from headroom.base.event_log import (
    BEGIN,
    END,
    LOG,
    ONCE,
    RESERVE,
    SENT,
    START,
    TAGS,
    LogSummary,
    append_event,
    append_line,
    make_event,
    make_line,
    read_sent,
    remove_folder,
    summarize_log,
    write_to_disk,
)
from headroom.process import children
from headroom.process.redaction import redact
from headroom.tracking.tracking_settings import TrackingError, TrackingSettings
from headroom.watch import host_memory

OPEN_S = 180.0  # the first use of a new database on a busy machine, with room to spare
CLOSE_S = 120.0  # without a sign of it, beside the time for a store that is away
# A server that is there answers in less. A new SQLite database takes long, and is waited for.
SILENT_S = 15.0
RESTARTS = 5  # in a row, in mid-run: on a host without memory each sending process may end
LIVED_S = 3600.0  # after which one that ends is no more of that row
RESTARTS_AT_START = 2  # before the run has begun: its user is there
LOOK_S = 1.0  # between two looks whether the log is still there: one costs more than a short line
RESERVE_BYTES = 1 << 20

log = logging.getLogger(__name__)
_spare: list[subprocess.Popen[str]] = []


def warm_up(where: TrackingSettings) -> None:
    """Start the sending process early: it imports mlflow while this one imports torch."""
    _spare.append(start_sender(where))


def start_sender(where: TrackingSettings) -> subprocess.Popen[str]:
    """Start the sending process. Raises TrackingError where it could write nothing."""
    runs = Path(where.runs)
    try:
        runs.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = open(runs / "tracking.log", "a", opener=partial(os.open, mode=0o600))  # noqa: SIM115
    except OSError as error:
        raise TrackingError(f"runs: {runs} can't be written ({error.strerror})") from None
    with log:
        return children.start_child("headroom.tracking.mlflow_sender", stderr=log)


class JournalError(RuntimeError):
    """A run that has begun can't be recorded any more.

    The text starts with the setting at fault.
    """


class SenderEnded(RuntimeError):
    """The process that tells MLflow of the run ended, each time, before the run had begun."""


class RunGone(TrackingError):
    """The run can't be gone on with: MLflow has no such run any more, it was deleted there, or
    another copy of its folder went on with it; the text says which."""


class Journal:
    """The record of one run.

    A context manager: left by an exception, it leaves no process behind.
    """

    def __init__(self, where: TrackingSettings, folder: Path) -> None:
        self.where = where
        self.folder = folder
        self.run_id = ""  # MLflow's, once it has been told of the run
        self.experiment_id = ""
        self.is_begun = False
        self.notes: list[str] = []  # what befell the record on its way
        self.put_back: Callable[[], None] = lambda: None  # what else the folder held, if removed
        self._histories: queue.SimpleQueue[list[dict[str, Any]] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._log: FileIO | None = None
        self._writing = threading.RLock()  # a signal's handler may log, too
        self._is_ended = False  # the log says so: nothing comes after that
        self.told = LogSummary()  # before this process
        self._ms = 0  # of the newest line
        self._now_ms, self._now_at = 0, monotonic()  # when that was written
        self._look_at = 0.0  # by monotonic(): whether the log is still there
        self._sender: subprocess.Popen[str] | None = None
        self._order: dict[str, Any] = {}  # where MLflow is
        self._opening: dict[str, Any] | None = None  # the answer
        self._earlier_ids: Mapping[str, str] = {}  # of the run that is gone on with
        self._begin_at: int | None = None  # where the log says how this process began
        self._wanted: list[str] | None = None  # of runs alike; None: nobody waits for the begin
        self._unkept_end: dict[str, Any] | None = None  # for which the disk had no room
        self._is_left = False
        self._telling = threading.Lock()  # while orders go to a sending process, or it is replaced
        self._is_taken_back = False  # the run of before, until it is gone
        self._is_late = False  # nobody waits for MLflow's answers
        self._listener: threading.Thread | None = None
        self._is_closed = False  # the sending process has told that all is sent
        self._has_heard = threading.Event()  # of the run in MLflow, or why it is not there

    def __enter__(self) -> Journal:
        self._sender = _spare.pop() if _spare else start_sender(self.where)
        here = copy_context()  # Prefect knows by it which run's log this is
        self._listener = threading.Thread(target=here.run, args=(self._listen,), daemon=True)
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            self._log.close()
        with self._telling:
            self._is_left = True
            if self._sender is not None:
                children.leave(self._sender)  # it ends by itself: what is unsent, it still sends
        if self._is_closed and self._listener is not None:
            self._listener.join()  # it has heard the last that there is to hear

    @property
    def ids(self) -> dict[str, str]:
        """Return run_id and experiment_id; both are empty until MLflow knows the run."""
        return {"run_id": self.run_id, "experiment_id": self.experiment_id}

    def open(self, experiment: str | None) -> None:
        """Begin to open the experiment; `create` waits for it."""
        where = self.where.model_copy(update={"experiment": experiment or self.where.experiment})
        prefect_api = os.environ.get("PREFECT_API_URL", "")  # a desk has set it
        with self._telling:
            self._order = {"where": where.model_dump(), "prefect_api": prefect_api}
            self._order["pid"] = os.getpid()
            self._tell(self._order)

    def create(
        self,
        name: str,
        *,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        data: Sequence[Mapping[str, str]] = (),
        wanted: Sequence[str] = (),
        start: Mapping[str, Any] | None = None,
        waits: bool = True,
    ) -> dict[str, float]:
        """Open the run in MLflow. Raises TrackingError where that can't be done; where MLflow is
        away, and not required, it is told as soon as it is there. Returns the newest values of the
        wanted metrics among finished runs with the same `alike`. start: what start.json is to say:
        it is there with the run, whatever becomes of this process meanwhile.
        waits: for MLflow; else it is told of the run when it is there, where it is not required.
        """
        self._is_late = not (waits or self.where.required)
        texts = {k: "" if v is None else str(v) for k, v in params.items()}
        begin = {"name": name, "params": texts, "data": [*data]}
        return self._begin(begin, tags, wanted, start=start)

    def reopen(
        self,
        ids: Mapping[str, str],
        *,
        tags: Mapping[str, str],
        wanted: Sequence[str] = (),
        claim: Mapping[str, Any] | None = None,
    ) -> dict[str, float]:
        """Open a run that goes on, like `create`: what its journal has of a step is not told again.

        ids: run_id and experiment_id. claim: the `marks` of this folder, the newest last, and `by`
        whom it is gone on with. Raises RunGone too, where another copy of the folder has gone on:
        nothing is begun then, and another run may be, in another folder.
        """
        self._earlier_ids = {name: ids.get(name, "") for name in ("run_id", "experiment_id")}
        return self._begin({"claim": dict(claim or {})}, tags, wanted)

    def _begin(
        self,
        begin: Mapping[str, Any],
        tags: Mapping[str, str],
        wanted: Sequence[str],
        *,
        start: Mapping[str, Any] | None = None,
    ) -> dict[str, float]:
        if not self._is_late:
            self._wait_until_open()
        is_away = "away" in (answer := self._opening or {})
        event = {
            "start_ms": int(time() * 1000),
            "experiment": self._order["where"]["experiment"],
            **begin,
            "tags": {"alike": "", **tags},
        }
        self._wanted = None if is_away or self._is_late else list(wanted)
        try:
            self._append_begin(event, start)
        except OSError as error:
            if self._log is not None:
                self._forget()
            self._earlier_ids = {}  # another run may begin, in another folder
            raise TrackingError(self._describe_refusal(error)) from None
        if is_away:
            self._note_away(answer["away"])
        with self._telling:
            self._wake()
        try:
            answer = answer if self._wanted is None else self._answer_unless_away("begin")
        except (SenderEnded, TrackingError):
            self._leave_nothing()
            self.told, self._ms, self._earlier_ids = LogSummary(), 0, {}
            raise
        if not is_away and "away" in answer:
            self._note_away(answer["away"])
        if "gone" in answer:
            self._forget()
            raise RunGone(answer["gone"])
        self.is_begun, self._wanted = True, None
        return dict(answer.get("past", {}))

    def _wait_until_open(self) -> None:
        if self._opening is None:
            self._answer("open", OPEN_S)  # it has imported MLflow
            self._opening = self._answer_unless_away("open")

    def take_back(self) -> None:
        """Let nothing be left of a run that has begun and of which nothing was measured, here nor
        in MLflow: another one is gone on with in its place. Raises TrackingError and OSError; the
        run then goes on."""
        assert self._log is not None, "take_back() before create()"
        self._wait_until_open()
        with self._telling:
            self._is_taken_back = True
            self._tell({"take_back": str(self.folder), "again": False})
        try:
            answer = self._answer("take_back", OPEN_S)
            if "away" in answer:
                raise TrackingError(answer["away"])
        except TrackingError:
            with self._telling:
                self._is_taken_back = False
                self._wake()  # it goes on, in MLflow too
            raise
        self._log.close()
        remove_folder(self.folder)
        with self._telling:
            self._is_taken_back = False
            self._log, self._begin_at, self.told, self._ms = None, None, LogSummary(), 0
        self.run_id = self.experiment_id = ""
        self.is_begun = self._is_late = False
        if "away" not in (self._opening or {}):  # else nobody asks again before the end
            self._has_heard.clear()

    def _append_begin(self, event: Mapping[str, Any], start: Mapping[str, Any] | None) -> None:
        """Open the log, and let it say how the run begins or goes on. Raises OSError."""
        self._log = self._open_log()
        self.told = summarize_log(self.folder / LOG)
        self._ms = self._now_ms = self.told.unix_ms
        with open(self.folder / RESERVE, "wb") as reserve:
            os.posix_fallocate(reserve.fileno(), 0, RESERVE_BYTES)
        begin_at = self._log.seek(0, os.SEEK_END)
        append_line(self._log, make_event(BEGIN, event, unix_ms=event["start_ms"]))
        self._begin_at = begin_at
        if start is not None and not (self.folder / START).exists():
            half = self.folder / f"{START}.new"
            half.write_text(json.dumps(start))
            half.rename(self.folder / START)

    def _leave_nothing(self) -> None:
        """Remove the files of a run that did not begin, and of which nothing was logged."""
        with suppress(OSError):
            self._take_back_begin()
            if not (self.folder / LOG).stat().st_size:
                names = (LOG, START) if read_sent(self.folder).get("run_id") else (LOG, START, SENT)
                for name in names:
                    (self.folder / name).unlink(missing_ok=True)
                self.folder.rmdir()  # not where anything else is in it

    def _forget(self) -> None:
        """Let go of the run that was to be gone on with, and can't be."""
        self._take_back_begin()
        self._log, self.told, self._ms, self._earlier_ids = None, LogSummary(), 0, {}

    def _take_back_begin(self) -> None:
        """Let the log say nothing of a begin that was refused."""
        assert self._log is not None
        with suppress(OSError):
            if self._begin_at is not None:
                self._log.truncate(self._begin_at)
        self._begin_at = None
        self._log.close()
        self.make_room()

    def wait_until_begun(self) -> None:
        """Wait until MLflow knows of a run that has begun without it, or is known to be away."""
        self._has_heard.wait(OPEN_S)

    def wait_for_history(self) -> list[dict[str, Any]] | None:
        """Wait for gate and metrics of the newest runs of the same `gate.of`, and return them.

        None where they are not known in time.
        """
        with suppress(queue.Empty):
            return self._histories.get(timeout=SILENT_S if self.run_id else 0)
        return None

    def _note_away(self, away: str) -> None:
        self._note(f"{away}; the run is kept in {self.folder}, and sent when MLflow is there")

    def log(
        self,
        metrics: Mapping[str, float],
        step: int,
        *,
        again: bool = False,
        age_s: float = 0.0,
    ) -> None:
        """Keep metrics of a step. Costs one short write; sent later, by the other process. again:
        also those that were told of this very step before this process. age_s: how long ago the
        step was taken."""
        self.log_steps([(metrics, step, age_s)], again=again)

    def log_steps(
        self,
        entries: Sequence[tuple[Mapping[str, float], int, float]],
        *,
        again: bool = False,
    ) -> None:
        """Keep metrics of several steps, each with its age, by one write."""
        assert self._log is not None, "log() before create()"
        new = [
            (metrics, step, age_s)
            for told, step, age_s in entries
            if (metrics := self._select_untold(told, step, again=again))
        ]
        if not new:
            return
        try:
            if monotonic() >= self._look_at:
                self._restore()
            lines = [
                make_line(metrics, step, unix_ms=self._compute_ms(age_s))
                for metrics, step, age_s in new
            ]
            with self._writing:
                append_line(self._log, b"".join(lines))
        except OSError as error:
            raise JournalError(self._describe_refusal(error)) from None

    def _select_untold(
        self, metrics: Mapping[str, float], step: int, *, again: bool
    ) -> Mapping[str, float]:
        """Return the metrics that were not told of this step, or of a later one, before this
        process."""
        if not self.told.steps or step == ONCE:
            return metrics
        steps, first = self.told.steps, step + again
        return {k: v for k, v in metrics.items() if steps.get(k, -1) < first}

    def tag(self, tags: Mapping[str, str]) -> None:
        """Keep tags of a run that goes on; any thread may do so. What the disk has no room for the
        end still says."""
        line = make_event(TAGS, tags, unix_ms=int(time() * 1000))
        with suppress(OSError), self._writing:
            if self._log is not None and not self._is_ended:
                append_line(self._log, line)

    def _compute_ms(self, age_s: float) -> int:
        """Return the Unix time in ms of so many seconds ago, but none before the newest line's.

        Of a step that is told of twice MLflow shows the later one, and a clock may be set back.
        """
        now_s = monotonic()
        passed_ms = int((now_s - self._now_at) * 1000)
        self._now_ms = max(int(time() * 1000), self._now_ms + passed_ms)
        self._now_at = now_s
        self._ms = max(self._ms, self._now_ms - int(age_s * 1000))
        return self._ms

    def make_room(self) -> None:
        """Remove the file that reserves room on the disk, for the end of the run."""
        with suppress(OSError):
            (self.folder / RESERVE).unlink()

    def _open_log(self) -> FileIO:
        self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        # Unbuffered: what was logged survives the death of this process.
        return open(self.folder / LOG, "ab+", buffering=0)

    def _restore(self) -> None:
        """Write the log anew where its folder was removed.

        The open file still has its content.
        """
        if self._log is None or os.path.exists(self.folder / LOG):
            self._look_at = monotonic() + LOOK_S
            return
        new = self._open_log()
        self._log.seek(0)
        shutil.copyfileobj(self._log, new)
        self._log.close()
        self._log = new
        self.put_back()
        self._note(f"{self.folder} was removed in mid-run; it was written anew")

    def _describe_refusal(self, error: OSError) -> str:
        return f"runs: {self.folder} can't be written ({error.strerror}); make room there"

    def _note(self, text: str) -> None:
        self.notes.append(text)
        log.warning("%s", text)

    def close(
        self, run: Mapping[str, Any], *, beside: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Send what is left, and end the run with `run["status"]`.

        The files of the folder are sent too. beside: what is done meanwhile. Returns the times
        that are only known at the end. Raises TrackingError where MLflow does not answer;
        everything is then still in the folder.
        """
        assert self._log is not None, "close() before create()"
        end = None
        try:
            self._restore()
            with self._writing:
                self._is_ended = True
                append_line(self._log, make_event(END, run, unix_ms=int(time() * 1000)))
        except OSError:  # a full disk: it goes by the pipe
            end = dict(run)
        with suppress(OSError):  # where a folder can't be waited for, as of some mounts
            # Else a power cut takes away what MLflow is told now, or the name of where it is.
            write_to_disk(self.folder / LOG, self.folder, self.folder.parent)
        with self._telling:
            self._unkept_end = end
            self._wake()
        beside()
        answer: dict[str, Any] = {}
        while "closed" not in answer:  # there may be much of it
            patience_s = self.where.give_up_s + CLOSE_S if self.run_id else 2 * SILENT_S
            answer = self._answer("close", patience_s)
        if answer.get("registered"):
            log.warning("run.registered_model: %s", answer["registered"])
        return dict(answer["times"])

    def hurry(self) -> None:
        """Wait no more for the sending process: it sends the rest by itself."""
        self._histories.put(None)
        self._answers.put({"to": None, "error": "tracking_uri: its answer was not waited for"})

    def add(self, metrics: Mapping[str, float], step: int, run: Mapping[str, Any]) -> None:
        """Add metrics to a run that has ended, in its folder. MLflow gets them by `send_added`, or
        with the next run. Raises OSError."""
        unix_ms = self._compute_ms(0.0)
        lines = make_line(metrics, step, unix_ms=unix_ms) + make_event(END, run, unix_ms=unix_ms)
        append_event(self.folder, lines)

    def send_added(self) -> None:
        """Send what was added after the end, by a process that nobody waits for."""
        sender = start_sender(self.where)
        assert sender.stdin is not None and sender.stdout is not None
        sender.stdout.close()  # nobody reads its answers
        with suppress(OSError):
            for order in (self._order, self._make_wake()):
                sender.stdin.write(json.dumps(order) + "\n")
            sender.stdin.flush()
        children.leave(sender)

    def _wake(self) -> None:
        """Tell the sending process that the log says more."""
        self._tell(self._make_wake())

    def _make_wake(self) -> dict[str, Any]:
        ids = self.ids if self.run_id else self._earlier_ids
        wake: dict[str, Any] = {"folder": str(self.folder), **ids}
        if self._wanted is not None:
            wake["wanted"] = self._wanted
        if self._unkept_end is not None:
            wake["end"] = self._unkept_end
        return wake

    def _tell(self, what: Mapping[str, Any]) -> None:
        assert self._sender is not None and self._sender.stdin is not None, "not entered"
        with suppress(OSError):  # it is gone: the answer that is missing says so
            self._sender.stdin.write(json.dumps(what) + "\n")
            self._sender.stdin.flush()

    def _answer_unless_away(self, to: str) -> dict[str, Any]:
        """Return the answer; `away` is its key where MLflow is silent and not required."""
        if self.where.required or self.where.database is not None:
            return self._answer(to, OPEN_S)
        return self._answer(to, SILENT_S, silent="away")

    def _answer(self, to: str, timeout_s: float, *, silent: str = "error") -> dict[str, Any]:
        answer: dict[str, Any] = {}
        try:
            while answer.get("to", "") not in (to, None):  # None: to all that is asked
                answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            uri = redact(self.where.tracking_uri)
            answer = {silent: f"tracking_uri: {uri} gave no answer within {timeout_s:.0f} s"}
        if "error" in answer:
            is_lost = "ended" in answer and not self.is_begun
            raise (SenderEnded if is_lost else TrackingError)(redact(answer["error"]))
        return answer

    def _listen(self) -> None:
        """Pass on the answers of the sending process; start another where it ends too early."""
        kills, restarts = host_memory.count_kills(), 0
        while True:
            sender, began_s = self._sender, monotonic()
            assert sender is not None and sender.stdout is not None
            with sender.stdout as answers:
                for line in answers:
                    with suppress(json.JSONDecodeError):  # a library that prints
                        self._hear(json.loads(line))
                    if self._is_closed:
                        return self._histories.put(None)
            code = sender.wait()
            killed = host_memory.describe_kills_since(kills) if code == -signal.SIGKILL else ""
            ended = (
                f"the sending process ended in mid-run (exit code {code}{killed and ', '}{killed})"
            )
            if not self.is_begun:
                ended = ended.replace(" in mid-run", " before the run began")
            if self._is_left:
                break
            restarts = restarts + 1 if monotonic() - began_s < LIVED_S else 1
            is_last = restarts > (RESTARTS if self.is_begun else RESTARTS_AT_START)
            self._note(ended if is_last else f"{ended}; it is started again")
            if is_last:
                break
            sleep(2 ** (restarts - 1) - 1)
            if not self._replace_sender():
                break
        self._histories.put(None)
        error = f"tracking_uri: {ended}; see {self.where.runs}/tracking.log"
        self._answers.put({"to": None, "error": error, "ended": True})
        self._has_heard.set()

    def _hear(self, answer: dict[str, Any]) -> None:
        if "history" in answer:
            return self._histories.put(answer["history"])
        for note in answer.get("notes", ()):
            self._note(note)
        why = answer.get("away") or answer.get("error")
        if self._is_late and why and not self._has_heard.is_set():
            self._note(f"{redact(why)}; the run is kept in {self.folder}, to be sent later")
        if why or "run_id" in answer:
            self._has_heard.set()
        if "run_id" in answer:
            if self.is_begun and not self.run_id and not self._is_late:
                log.info("MLflow is there, and has the run: %s", answer["run_id"])
            self.run_id, self.experiment_id = answer["run_id"], answer["experiment_id"]
        self._is_closed = self._is_closed or "closed" in answer
        self._answers.put(answer)

    def _replace_sender(self) -> bool:
        """Start another sending process, which goes on where the last one was.

        Return whether that worked; not where nobody waits for it any more.
        """
        with self._telling:
            assert self._sender is not None
            if self._is_left:
                return False
            children.close_stdin(self._sender)
            try:
                self._sender = start_sender(self.where)
            except TrackingError:
                return False
            if self._order:
                self._tell(self._order)
            if self._is_taken_back:
                self._tell({"take_back": str(self.folder), "again": True})
            elif self._begin_at is not None:
                self._wake()
        return True
