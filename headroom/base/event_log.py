"""The event log of a run: one append-only file in its folder, of which each line is there whole or
not at all. It says how the run began, what was measured, what became known meanwhile in words, and
how it ended: begin, metrics, tags, end. Who goes on with a run appends another begin. A run has
ended where the last line is its end. Whoever asks what a run is, or sends it to MLflow, reads this
file, and of `sent.json` beside it how far MLflow has it. Each line ends with a checksum of what is
before it, so that no flipped bit becomes a number that nobody measured. The log may be larger than
the host's memory.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import orjson

Line = tuple[int, int, dict[str, float]]  # Unix ms, step, metrics
Sample = tuple[str, float, int, int]  # name, value, unix ms, step
# Step, value, unix ms. No list: the garbage collector would look at each again and again.
Point = tuple[int, float, int]
# The files of a run's folder that say what becomes of it.
LOG = "events.jsonl"  # the event log
START = "start.json"  # who trains it, and how that began
SENT = "sent.json"  # how far MLflow has it; of whoever sends it
RESERVE = "reserve"  # holds the room for the run's end on a disk that fills up
TRAINING_LOCK = "training.lock"  # whoever trains it holds it
SENDING_LOCK = "sending.lock"  # the same of whoever sends it
BATCH = 20_000  # metrics: other runs wait some 0.1 s while so many are written to a database
ONCE = 0  # the step of what has one value a run: of a later one MLflow draws a curve of one dot
END_BYTES = 2**16  # of a log: some hundred log points
MOST_POINTS = 4096  # of a series: more than a picture shows
MOST_BYTES = 2**24  # of a line, or of a JSON file: some hundred times what a run writes
CHECK = b',"crc32":'  # behind what it is the checksum of
BEGIN, END, TAGS = "begin", "end", "tags"  # the events that are no metrics
_HEADS = {kind: b'{"%b":' % kind.encode() for kind in (BEGIN, END, TAGS)}  # of their lines
_EVENTS = tuple(_HEADS.values())


def read_metric_batches(
    log: BinaryIO,
    offset: int,
    *,
    most_bytes: float = math.inf,
    begun: float = math.inf,
    damaged: list[int] | None = None,
    tags: dict[str, str] | None = None,
) -> Iterator[tuple[list[Sample], int]]:
    """Yield the metrics of whole lines from `offset` on in batches, with the offset behind.

    Half a line at the end waits for its rest. most_bytes: stop after so many, at the end of
    a line. begun: stop before a begin that ends behind this offset. damaged: gets the offset of
    each line that had to be skipped. tags: gets the tags that the lines say.
    """
    log.seek(offset)
    until, sent = offset + most_bytes, offset
    batch: list[Sample] = []
    for line in log:
        if offset >= until or not line.endswith(b"\n"):
            break
        try:
            unix_ms, step, metrics = _parse_line(line)
            if not metrics and offset + len(line) > begun and line.startswith(_HEADS[BEGIN]):
                break
            if not metrics and tags is not None and line.startswith(_HEADS[TAGS]):
                tags |= json.loads(line)[TAGS]
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


def read_metrics_before(log: Path, offset: int) -> dict[str, float]:
    """Return the metrics of the last line of metrics before this offset, and of the last that is
    of a step: a run may end with what it has once, which says nothing of its steps. Empty where
    there is none.

    Raises OSError or ValueError where no line ends at this offset, or where the last is damaged.
    """
    begin = max(0, offset - 2**20)
    with open(log, "rb") as lines:
        lines.seek(begin)
        before = lines.read(offset - begin)
    if len(before) != offset - begin or not before.endswith(b"\n"):
        raise ValueError(f"no line ends at byte {offset}")
    newest: dict[str, float] = {}
    try:
        for line in reversed(before[:-1].split(b"\n")):
            _, step, metrics = _parse_line(line + b"\n")
            newest = newest or metrics
            if step != ONCE:
                return {**metrics, **newest}
    except _DAMAGE as error:
        raise ValueError(f"the line that ends at byte {offset} is damaged") from error
    return newest


def read_log_ends(log: Path) -> tuple[list[Line], list[Line]]:
    """Return the first lines of metrics and the newest, in order, without those between.

    Both are empty where the log can't be read. It is as cheap after a week of training
    as after a minute.
    """
    with suppress(OSError), open(log, "rb", opener=_open_own) as file:
        first = file.read(END_BYTES)
        at, last = _read_last_line(file)
        until = at if last.startswith(_EVENTS) else at + len(last)
        begin = max(0, until - END_BYTES)
        file.seek(begin)
        newest = file.read(until - begin)
        return (
            _parse_metrics(first.split(b"\n")[:-1]),
            _parse_metrics(newest.split(b"\n")[begin > 0 : -1]),
        )
    return [], []


def _read_last_line(file: BinaryIO) -> tuple[int, bytes]:
    """Return where the last whole line begins, and that line; it is empty where there is none."""
    at, text = file.seek(0, os.SEEK_END), b""
    while at > 0 and len(text) < MOST_BYTES:
        size = min(at, END_BYTES)
        at -= size
        file.seek(at)
        text = file.read(size) + text
        end = text.rfind(b"\n")
        begin = text.rfind(b"\n", 0, max(0, end)) + 1
        if begin > 0 or (at == 0 and end >= 0):
            return at + begin, text[begin : end + 1]
    return 0, b""


def _parse_metrics(texts: list[bytes]) -> list[Line]:
    lines = []
    for text in texts:
        with suppress(*_DAMAGE):
            line = _parse_line(text + b"\n")
            if line[2]:
                lines.append(line)
    return lines


def read_begins(log: Path, offset: int) -> list[tuple[dict[str, Any], int]]:
    """Return what each begin behind this offset says, with the offset behind it."""
    begins = []
    with suppress(FileNotFoundError), open(log, "rb", opener=_open_own) as lines:
        lines.seek(offset)
        for line in lines:
            offset += len(line)
            if line.startswith(_HEADS[BEGIN]) and line.endswith(b"\n"):
                with suppress(*_DAMAGE):
                    _check_line(line)
                    begins.append((dict(json.loads(line)[BEGIN]), offset))
    return begins


def read_logged_tags(log: Path) -> dict[str, str]:
    """Return the tags that the log says, the newest of each name."""
    tags: dict[str, str] = {}
    with suppress(FileNotFoundError), open(log, "rb") as lines:
        for line in lines:
            if line.startswith(_HEADS[TAGS]) and line.endswith(b"\n"):
                with suppress(*_DAMAGE):
                    _check_line(line)
                    tags |= json.loads(line)[TAGS]
    return tags


def read_end(folder: Path) -> dict[str, Any]:
    """Return what the end of the run in this folder says; empty where it has not ended, or where
    that can't be read."""
    with suppress(OSError, *_DAMAGE), open(folder / LOG, "rb", opener=_open_own) as log:
        _, line = _read_last_line(log)
        if line.startswith(_HEADS[END]):
            _check_line(line)
            return dict(json.loads(line)[END])
    return {}


def read_sent(folder: Path) -> dict[str, Any]:
    """Return how far MLflow has the run of this folder; empty where nobody knows."""
    return read_json(folder / SENT)


def is_sent(folder: Path) -> bool:
    """Return whether MLflow has all of the run of this folder, its end too."""
    sent = read_sent(folder)
    with suppress(FileNotFoundError):
        return bool(sent.get("closed")) and sent.get("offset", 0) == (folder / LOG).stat().st_size
    return bool(sent.get("closed"))


def read_json(file: Path) -> dict[str, Any]:
    """Return what a JSON file of a run's folder says.

    Empty where it is not there, or is damaged.
    """
    with suppress(OSError, ValueError), open(file, "rb", opener=_open_own) as opened:
        content = json.loads(opened.read(MOST_BYTES))
        if isinstance(content, dict):
            return content
    return {}


def _open_own(path: str, flags: int) -> int:
    """Open what may lie in anybody's folder: a link is no file there, and of a pipe nobody waits
    for the other end."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        raise


def refuse_links(folder: Path) -> None:
    """Raise OSError for what is neither file nor folder in that of a run. A run makes none, and
    who writes or sends it would reach through a link what is outside."""
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                problem = "is a link or a pipe, of which a run makes none; remove it"
                raise OSError(errno.EPERM, problem, str(path))


def remove_folder(folder: Path) -> None:
    """Remove the folder of a run; what makes it one goes last: interrupted, it is found again.

    Another process may be removing it too. Raises OSError.
    """
    for is_last in (False, True):
        for entry in _list_for_removal(folder):
            with suppress(FileNotFoundError):
                is_folder = entry.is_dir() and not entry.is_symlink()
                shutil.rmtree(entry) if is_folder else entry.unlink()
        try:
            return folder.rmdir()
        except FileNotFoundError:
            return
        except OSError:  # another process has tried a lock there, and so made its file anew
            if is_last:
                raise


def _list_for_removal(folder: Path) -> list[Path]:
    last = (LOG, SENT, START)
    with suppress(FileNotFoundError):
        return sorted(folder.iterdir(), key=lambda e: e.name in last and 1 + last.index(e.name))
    return []


def write_to_disk(*places: Path) -> None:
    """Wait until these files and folders are on the disk: a power cut takes away what is not.
    Raises OSError."""
    for place in places:
        opened = os.open(place, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


class _ThinnedSeries:
    """A series of which every 2nd, 4th, 8th, ... point is kept when it grows long, and the last."""

    def __init__(self) -> None:
        self._kept: list[Point] = []
        self._every = 1
        self._count = 0
        self._last: Point = (ONCE, 0.0, 0)

    def add(self, point: Point) -> None:
        if self._count % self._every == 0:
            self._kept.append(point)
            if len(self._kept) > MOST_POINTS:
                self._kept = self._kept[::2]
                self._every *= 2
        self._count += 1
        self._last = point

    def list_points(self) -> list[Point]:
        return self._kept if self._kept[-1] is self._last else [*self._kept, self._last]


def read_series(log: Path) -> dict[str, list[Point]]:
    """Return what was logged, by name: lists of (step, value, Unix ms), in order.

    A long series is thinned to at most MOST_POINTS points and the last one.
    """
    series: dict[str, _ThinnedSeries] = {}
    with suppress(FileNotFoundError), open(log, "rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            with suppress(*_DAMAGE):
                unix_ms, step, metrics = _parse_line(line)
                for key, value in metrics.items():
                    if key not in series:
                        series[key] = _ThinnedSeries()
                    series[key].add((step, value, unix_ms))
    return {key: thinned.list_points() for key, thinned in series.items()}


_DAMAGE = (ValueError, KeyError, TypeError, AttributeError)  # what reading a damaged line raises


def make_line(metrics: Mapping[str, float], step: int, *, unix_ms: int) -> bytes:
    """Return the line of a step's metrics as JSON, with its checksum.

    json.dumps() writes it only where a value is no number in JSON.
    """
    values = orjson.dumps(metrics)
    if b"null" in values:
        values = json.dumps(metrics).encode()
    return _add_check(b'{"step":%d,"t":%d,"metrics":%b' % (step, unix_ms, values))


def make_event(kind: str, content: Mapping[str, Any], *, unix_ms: int) -> bytes:
    """Return the line of a begin, of tags or of an end as JSON, with its checksum."""
    return _add_check(f'{{"{kind}":{json.dumps(content)},"t":{unix_ms}'.encode())


def _add_check(line: bytes) -> bytes:
    return b"%b%b%d}\n" % (line, CHECK, zlib.crc32(line))


def append_event(folder: Path, lines: bytes) -> None:
    """Append lines to the log of a run whose process has ended, all of them or none. Half a line
    that it has left is a damaged one from now on. Raises OSError."""
    with open(folder / LOG, "ab+", buffering=0, opener=_open_existing) as log:
        if log.seek(0, os.SEEK_END):
            log.seek(-1, os.SEEK_END)
            if log.read(1) != b"\n":
                lines = b"\n" + lines
        append_line(log, lines)


def _open_existing(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_CREAT)


def append_line(file: FileIO, line: bytes) -> None:
    """Append the whole line or none of it: half of one would spoil the next.

    Raises OSError where there is no room.
    """
    written = file.write(line)
    if written != len(line):
        file.truncate(file.tell() - (written or 0))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass(frozen=True)
class LogSummary:
    """What a log holds by now: the newest step and value of each metric."""

    steps: dict[str, int] = field(default_factory=dict)  # the newest, by metric
    values: dict[str, float] = field(default_factory=dict)  # of that step
    unix_ms: int = 0  # the latest

    def select_series(self) -> dict[str, float]:
        """Return the newest values of the metrics that have more than one a run."""
        return {name: self.values[name] for name, step in self.steps.items() if step != ONCE}

    def find_newest_step(self) -> int:
        return max(self.steps.values(), default=ONCE)


def summarize_log(log: Path) -> LogSummary:
    """Read the log; half a line at its end, of a process that died, is cut off."""
    steps: dict[str, int] = {}
    values: dict[str, float] = {}
    latest_ms = whole_bytes = 0
    with open(log, "rb+") as lines:
        for batch, whole_bytes in read_metric_batches(lines, 0):  # noqa: B007 (its last value is a result)
            for name, value, unix_ms, step in batch:
                steps[name], values[name] = step, value
                latest_ms = max(latest_ms, unix_ms)
        if lines.seek(0, os.SEEK_END) > whole_bytes:
            lines.seek(-1, os.SEEK_END)
            if lines.read(1) != b"\n":  # else another process has told of the end since
                lines.truncate(whole_bytes)
    return LogSummary(steps, values, latest_ms)


def _parse_line(line: bytes) -> Line:
    """Return Unix ms, step and metrics of a line; one of another event has none. Raises one of
    _DAMAGE."""
    _check_line(line)
    if line.startswith(_EVENTS):
        return 0, ONCE, {}
    entry = _decode_line(line)
    unix_ms, step = int(entry["t"]), int(entry["step"])
    if max(abs(unix_ms), abs(step)) >= 2**63:
        raise ValueError("no whole number of a database")
    return unix_ms, step, {key: float(value) for key, value in entry["metrics"].items()}


def is_whole_line(line: bytes) -> bool:
    """Return whether a line is what was written."""
    with suppress(ValueError):
        _check_line(line)
        return True
    return False


def _check_line(line: bytes) -> None:
    """Raise ValueError where a line is not what was written."""
    written, _, crc = line.rpartition(CHECK)
    if crc != b"%d}\n" % zlib.crc32(written):
        raise ValueError("it is not what was written")


def _decode_line(line: bytes) -> dict[str, Any]:
    """Return a line of metrics, decoded.

    json.loads() reads it only where it holds what is no number in JSON.
    """
    try:
        entry: dict[str, Any] = orjson.loads(line)
    except orjson.JSONDecodeError:
        entry = json.loads(line)
    return entry
