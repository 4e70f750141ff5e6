"""Keeps a run's record in the training process: every metric goes to a local file first,
the journal, and a second process (`mlflow_sender.py`) sends it to MLflow, so that no step
ever waits for a database and nothing is lost where MLflow is away, where that process is
killed (another goes on), or where the run's folder is removed. This process never imports
mlflow. The journal may be larger than the host's memory, and damaged: each line ends with a
checksum of what is before it, so that no flipped bit becomes a number that nobody measured.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import queue
import shutil
import signal
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any, BinaryIO

import orjson

from headroom.process import children
from headroom.process.redaction import redact
from headroom.tracking.tracking_settings import TrackingError, TrackingSettings
from headroom.watch import host_memory

Line = tuple[int, int, dict[str, float]]  # Unix ms, step, metrics
Sample = tuple[str, float, int, int]  # name, value, unix ms, step
START = "start.json"  # of a run's folder: how the run began
TRAINING_LOCK = "training.lock"  # the same of whoever trains it
SENDING_LOCK = "sending.lock"  # of a run's folder: whoever sends it holds it
BATCH = 10_000  # metrics: other runs wait some 0.1 s while so many are written to a database
ONCE = 0  # the step of what has one value a run: of a later one MLflow draws a curve of one dot
END_BYTES = 2**16  # of a journal: some hundred log points
MOST_POINTS = 4096  # of a series: more than a picture shows
CHECK = b',"crc32":'  # behind what it is the checksum of; journals of older versions have none


def read_metric_batches(
    journal: BinaryIO,
    offset: int,
    *,
    most_bytes: float = math.inf,
    damaged: list[int] | None = None,
) -> Iterator[tuple[list[Sample], int]]:
    """Yield the metrics of whole lines from `offset` on in batches, with the offset behind.

    Half a line at the end waits for its rest. most_bytes: stop after so many, at the end of
    a line. damaged: gets the offset of each line that had to be skipped.
    """
    journal.seek(offset)
    until, sent = offset + most_bytes, offset
    batch: list[Sample] = []
    for line in journal:
        if offset >= until or not line.endswith(b"\n"):
            break
        try:
            unix_ms, step, metrics = _parse_line(line)
            # MLflow would store an infinity as 1.797e308, a number that nobody measured.
            batch += [(k, v, unix_ms, step) for k, v in metrics.items() if not math.isinf(v)]
        except _DAMAGE:
            if damaged is not None:
                damaged.append(offset)
        offset += len(line)
        if len(batch) >= BATCH:
            yield batch, offset
            batch, sent = [], offset
    if offset > sent:
        yield batch, offset


def read_metrics_before(journal: Path, offset: int) -> dict[str, float]:
    """Return the metrics of the line that ends at this offset.

    Raises OSError or ValueError where no line ends there.
    """
    begin = max(0, offset - 2**20)
    with open(journal, "rb") as lines:
        lines.seek(begin)
        before = lines.read(offset - begin)
    if len(before) != offset - begin or not before.endswith(b"\n"):
        raise ValueError(f"no line ends at byte {offset}")
    try:
        return _parse_line(before[:-1].rpartition(b"\n")[2] + b"\n")[2]
    except _DAMAGE as error:
        raise ValueError(f"the line that ends at byte {offset} is damaged") from error


def read_journal_ends(journal: Path) -> tuple[list[Line], list[Line]]:
    """Return the first lines and the newest, in order, without those between.

    Both are empty where the journal can't be read. It is as cheap after a week of training
    as after a minute.
    """
    with suppress(OSError), open(journal, "rb") as file:
        first = file.read(END_BYTES)
        begin = max(0, file.seek(0, os.SEEK_END) - END_BYTES)
        file.seek(begin)
        newest = file.read(END_BYTES)
        return _parse_lines(first.split(b"\n")[:-1]), _parse_lines(
            newest.split(b"\n")[begin > 0 : -1]
        )
    return [], []


def _parse_lines(found: list[bytes]) -> list[Line]:
    lines = []
    for line in found:
        with suppress(*_DAMAGE):
            lines.append(_parse_line(line + b"\n"))
    return lines


class _ThinnedSeries:
    """A series of which every 2nd, 4th, 8th, ... point is kept when it grows long, and the last."""

    def __init__(self) -> None:
        self._kept: list[list[float]] = []
        self._every = 1
        self._count = 0
        self._last: list[float] = []

    def add(self, point: list[float]) -> None:
        if self._count % self._every == 0:
            self._kept.append(point)
            if len(self._kept) > MOST_POINTS:
                self._kept = self._kept[::2]
                self._every *= 2
        self._count += 1
        self._last = point

    def list_points(self) -> list[list[float]]:
        return self._kept if self._kept[-1] is self._last else [*self._kept, self._last]


def read_series(journal: Path) -> dict[str, list[list[float]]]:
    """Return what was logged, by name: lists of [step, value, Unix ms], in order.

    A long series is thinned to at most MOST_POINTS points and the last one.
    """
    series: dict[str, _ThinnedSeries] = {}
    with suppress(FileNotFoundError), open(journal, "rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            with suppress(*_DAMAGE):
                unix_ms, step, metrics = _parse_line(line)
                for key, value in metrics.items():
                    if key not in series:
                        series[key] = _ThinnedSeries()
                    series[key].add([step, value, unix_ms])
    return {key: thinned.list_points() for key, thinned in series.items()}


_DAMAGE = (ValueError, KeyError, TypeError, AttributeError)  # what reading a damaged line raises


def make_line(metrics: Mapping[str, float], step: int, *, unix_ms: int) -> bytes:
    """Return the line of a step's metrics as JSON, with its checksum.

    json.dumps() writes it only where a value is no number in JSON.
    """
    values = orjson.dumps(metrics)
    if b"null" in values:
        values = json.dumps(metrics).encode()
    line = b'{"step":%d,"t":%d,"metrics":%b' % (step, unix_ms, values)
    return b"%b%b%d}\n" % (line, CHECK, zlib.crc32(line))


def append_line(file: FileIO, line: bytes) -> None:
    """Append the whole line or none of it: half of one would spoil the next.

    Raises OSError where there is no room.
    """
    written = file.write(line)
    if written != len(line):
        file.truncate(file.tell() - (written or 0))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass(frozen=True)
class JournalSummary:
    """What a journal holds by now: the newest step and value of each metric."""

    steps: dict[str, int] = field(default_factory=dict)  # the newest, by metric
    values: dict[str, float] = field(default_factory=dict)  # of that step
    unix_ms: int = 0  # the latest

    def select_series(self) -> dict[str, float]:
        """Return the newest values of the metrics that have more than one a run."""
        return {name: self.values[name] for name, step in self.steps.items() if step != ONCE}

    def find_newest_step(self) -> int:
        return max(self.steps.values(), default=ONCE)


def summarize_journal(journal: Path) -> JournalSummary:
    """Read the journal; half a line at its end, of a process that died, is cut off."""
    steps: dict[str, int] = {}
    values: dict[str, float] = {}
    latest_ms = whole_bytes = 0
    with open(journal, "rb+") as lines:
        for batch, whole_bytes in read_metric_batches(lines, 0):  # noqa: B007 (its last value is a result)
            for name, value, unix_ms, step in batch:
                steps[name], values[name] = step, value
                latest_ms = max(latest_ms, unix_ms)
        lines.truncate(whole_bytes)
    return JournalSummary(steps, values, latest_ms)


def _parse_line(line: bytes) -> Line:
    """Return Unix ms, step and metrics of a line. Raises one of _DAMAGE."""
    said, mark, crc = line.rpartition(CHECK)
    if mark and crc != b"%d}\n" % zlib.crc32(said):
        raise ValueError("it is not what was written")
    entry = _decode_line(line)
    unix_ms, step = int(entry["t"]), int(entry["step"])
    if max(abs(unix_ms), abs(step)) >= 2**63:
        raise ValueError("no whole number of a database")
    return unix_ms, step, {key: float(value) for key, value in entry["metrics"].items()}


def _decode_line(line: bytes) -> dict[str, Any]:
    """Return a line of the journal, decoded.

    json.loads() reads it only where it holds what is no number in JSON.
    """
    try:
        entry: dict[str, Any] = orjson.loads(line)
    except orjson.JSONDecodeError:
        entry = json.loads(line)
    return entry


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
        self._metrics: FileIO | None = None
        self.told = JournalSummary()  # before this process
        self._ms = 0  # of the newest line
        self._now_ms, self._now_at = 0, monotonic()  # when that was written
        self._sender: subprocess.Popen[str] | None = None
        self._orders: list[dict[str, Any]] = []  # open and begin
        self._opening: dict[str, Any] | None = None  # the answer
        self._closing: dict[str, Any] | None = None
        self._is_left = False
        self._telling = threading.Lock()  # while orders go to a sending process, or it is replaced
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
        self._is_left = True
        if self._metrics is not None:
            self._metrics.close()
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
        waits: bool = True,
    ) -> dict[str, float]:
        """Open the run in MLflow. Raises TrackingError where that can't be done; where MLflow is
        away, and not required, it is told as soon as it is there. Returns the newest values of the
        wanted metrics among finished runs with the same `alike`. start: what start.json is to say,
        with the run's ids: it is there with the run, whatever becomes of this process meanwhile.
        waits: for MLflow; else it is told of the run when it is there, where it is not required.
        """
        self._is_late = not (waits or self.where.required)
        texts = {k: "" if v is None else str(v) for k, v in params.items()}
        begin = {"name": name, "params": texts, "data": [*data], "start": start}
        return self._begin(begin, tags, wanted)

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
        try:
            begin = json.loads((self.folder / BEGIN).read_text())
        except (OSError, ValueError):
            begin = ids
        return self._begin({**begin, "claim": dict(claim or {})}, tags, wanted)

    def _begin(
        self, begin: Mapping[str, Any], tags: Mapping[str, str], wanted: Sequence[str]
    ) -> dict[str, float]:
        if self._opening is None and not self._is_late:
            self._answer("open", OPEN_S)  # it has imported MLflow
            self._opening = self._answer_unless_away("open")
        is_away = "away" in (answer := self._opening or {})
        order = {"start_ms": int(time() * 1000), **begin}
        order["experiment"] = self._orders[0]["where"]["experiment"]
        order["tags"] = {"alike": "", **begin.get("tags", {}), **tags}
        try:
            self._metrics = self._open_metrics()
            self.told = summarize_journal(self.folder / "metrics.jsonl")
            self._ms = self._now_ms = self.told.unix_ms
            with open(self.folder / RESERVE, "wb") as reserve:
                os.posix_fallocate(reserve.fileno(), 0, RESERVE_BYTES)
        except OSError as error:
            raise TrackingError(self._describe_refusal(error)) from None
        order |= {"do": "begin", "folder": str(self.folder), "wanted": list(wanted)}
        with self._telling:
            self._orders.append(order)
            if is_away:
                self._begin_while_away(answer["away"])
            elif self._is_late:
                with suppress(OSError):  # the disk is full: close() has room
                    self._keep_begin()
            self._tell({**order, "late": is_away or self._is_late})
        try:
            answer = answer if is_away or self._is_late else self._answer_unless_away("begin")
        except (SenderEnded, TrackingError):
            self._leave_nothing()
            raise
        if not is_away and "away" in answer:
            self._begin_while_away(answer["away"])
        if "gone" in answer:
            self._forget()
            raise RunGone(answer["gone"])
        (self.folder / "run.json").unlink(missing_ok=True)  # its end of then
        self.is_begun = True
        return dict(answer.get("past", {}))

    def _leave_nothing(self) -> None:
        """Remove the files of a run that did not begin, and of which nothing was logged."""
        with suppress(OSError):
            self.make_room()
            if not (self.folder / "metrics.jsonl").stat().st_size:
                for name in (BEGIN, "metrics.jsonl"):
                    (self.folder / name).unlink(missing_ok=True)
                self.folder.rmdir()  # not where anything else is in it

    def _forget(self) -> None:
        """Let go of the run that was to be gone on with, and can't be."""
        assert self._metrics is not None
        self._metrics.close()
        self.make_room()
        self._metrics, self.told, self._ms = None, JournalSummary(), 0
        self._orders.pop()

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

    def _begin_while_away(self, away: str) -> None:
        self._note(f"{away}; the run is kept in {self.folder}, and sent when MLflow is there")
        with suppress(OSError):  # the disk is full: close() has room
            self._keep_begin()

    def _keep_begin(self) -> None:
        """Write how the run began, for another process to send if this one ends before."""
        half = self.folder / f"{BEGIN}.new"
        half.write_text(json.dumps(self._orders[1]))
        half.rename(self.folder / BEGIN)

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
        if self.told.steps and step != ONCE:
            told, first = self.told.steps, step + again
            metrics = {k: v for k, v in metrics.items() if told.get(k, -1) < first}
        if metrics:
            self.log_steps([(metrics, step, age_s)])

    def log_steps(self, found: Sequence[tuple[Mapping[str, float], int, float]]) -> None:
        """Keep metrics of several steps, each with its age, by one write."""
        assert self._metrics is not None, "log() before create()"
        try:
            self._restore()
            lines = [
                make_line(metrics, step, unix_ms=self._compute_ms(age_s))
                for metrics, step, age_s in found
            ]
            append_line(self._metrics, b"".join(lines))
        except OSError as error:
            raise JournalError(self._describe_refusal(error)) from None

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

    def _open_metrics(self) -> FileIO:
        self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        # Unbuffered: what was logged survives the death of this process.
        return open(self.folder / "metrics.jsonl", "ab+", buffering=0)

    def _restore(self) -> None:
        """Write the journal anew where its folder was removed.

        The open file still has its content.
        """
        if self._metrics is None or os.path.exists(self.folder / "metrics.jsonl"):
            return
        new = self._open_metrics()
        self._metrics.seek(0)
        shutil.copyfileobj(self._metrics, new)
        self._metrics.close()
        self._metrics = new
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
        with suppress(OSError):  # a full disk; it is for sending later, and also goes by the pipe
            self._restore()
            if not self.run_id:
                self._keep_begin()
            (self.folder / "run.json").write_text(json.dumps(run, indent=1))
        with self._telling:
            self._closing = {"do": "close", "run": dict(run)}
            self._tell(self._closing)
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
        with open(self.folder / "metrics.jsonl", "rb+", buffering=0) as file:
            file.seek(0, os.SEEK_END)
            append_line(file, make_line(metrics, step, unix_ms=self._compute_ms(0.0)))
        (self.folder / "run.json").write_text(json.dumps(run, indent=1))
        with suppress(FileNotFoundError):  # MLflow has nothing of it yet
            sent = self.folder / "sent.json"
            half = self.folder / "sent.json.half"
            half.write_text(json.dumps({**json.loads(sent.read_text()), "closed": False}))
            half.rename(sent)

    def send_added(self) -> None:
        """Send what was added after the end, by a process that nobody waits for."""
        sender = start_sender(self.where)
        assert sender.stdin is not None and sender.stdout is not None
        sender.stdout.close()  # nobody reads its answers
        with suppress(OSError):
            for order in (self._orders[0], {"do": "add", "folder": str(self.folder)}):
                sender.stdin.write(json.dumps(order) + "\n")
            sender.stdin.flush()
        children.leave(sender)

    def _tell(self, what: dict[str, Any]) -> None:
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
        kills = host_memory.count_kills()
        for restarts in range(1 + RESTARTS):
            sender = self._sender
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
            is_last = restarts >= (RESTARTS if self.is_begun else RESTARTS_AT_START)
            self._note(ended if is_last else f"{ended}; it is started again")
            if is_last:
                break
            sleep(2**restarts - 1)
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

        Return whether that worked.
        """
        with self._telling:
            assert self._sender is not None
            children.close_stdin(self._sender)
            try:
                self._sender = start_sender(self.where)
            except TrackingError:
                return False
            for order in self._orders[:1]:
                self._tell(order)
            for begin in self._orders[1:]:
                ids = {**self.ids, "again": True} if self.run_id else {}
                if not self.is_begun:  # the other may have made the run: it is looked for
                    with suppress(OSError):
                        self._keep_begin()
                self._tell({**begin, **ids, "late": self.is_begun})
            if self._closing is not None:
                self._tell(self._closing)
        return True
