"""A run's journal, line by line: written, and read back in batches for MLflow, and as series for
the pictures.
It may be larger than the host's memory, and damaged: each line ends with a checksum of what is
before it, so that no flipped bit becomes a number that nobody measured.
"""

from __future__ import annotations

import errno
import json
import math
import os
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
START = "start.json"  # of a run's folder: how the run began
TRAINING_LOCK = "training.lock"  # the same of whoever trains it
LOCK = "sending.lock"  # of a run's folder: whoever sends it holds it
BATCH = 10_000  # metrics: other runs wait some 0.1 s while so many are written to a database
ONCE = 0  # the step of what has one value a run: of a later one MLflow draws a curve of one dot
END_BYTES = 2**16  # of a journal: some hundred log points
MOST_POINTS = 4096  # of a series: more than a picture shows
CHECK = b',"crc32":'  # behind what it is the checksum of; journals of older versions have none


def batches(
    journal: BinaryIO,
    offset: int,
    *,
    most_bytes: float = math.inf,
    damaged: list[int] | None = None,
) -> Iterator[tuple[list[Sample], int]]:
    """Whole lines from `offset` on, as batches, each with the offset behind it; half a line waits
    for its end. most_bytes: to stop after, at the end of a line. damaged: gets the offset of each
    line that had to be skipped."""
    journal.seek(offset)
    until, sent = offset + most_bytes, offset
    batch: list[Sample] = []
    for line in journal:
        if offset >= until or not line.endswith(b"\n"):
            break
        try:
            unix_ms, step, metrics = _read(line)
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


def metrics_before(journal: Path, offset: int) -> dict[str, float]:
    """The metrics of the line that ends there. Raises OSError or ValueError where none does."""
    begin = max(0, offset - 2**20)
    with open(journal, "rb") as lines:
        lines.seek(begin)
        before = lines.read(offset - begin)
    if len(before) != offset - begin or not before.endswith(b"\n"):
        raise ValueError(f"no line ends at byte {offset}")
    try:
        return _read(before[:-1].rpartition(b"\n")[2] + b"\n")[2]
    except _DAMAGE as error:
        raise ValueError(f"the line that ends at byte {offset} is damaged") from error


def ends(journal: Path) -> tuple[list[Line], list[Line]]:
    """The first lines and the newest, in order, without those between; none where it can't be read.
    As cheap after a week of training as after a minute."""
    with suppress(OSError), open(journal, "rb") as file:
        first = file.read(END_BYTES)
        begin = max(0, file.seek(0, os.SEEK_END) - END_BYTES)
        file.seek(begin)
        newest = file.read(END_BYTES)
        return _lines(first.split(b"\n")[:-1]), _lines(newest.split(b"\n")[begin > 0 : -1])
    return [], []


def _lines(found: list[bytes]) -> list[Line]:
    lines = []
    for line in found:
        with suppress(*_DAMAGE):
            lines.append(_read(line + b"\n"))
    return lines


class _Thinned:
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

    def points(self) -> list[list[float]]:
        return self._kept if self._kept[-1] is self._last else [*self._kept, self._last]


def series(journal: Path) -> dict[str, list[list[float]]]:
    """What was logged, by name: [step, value, unix ms], in order; of a long series a part."""
    found: dict[str, _Thinned] = {}
    with suppress(FileNotFoundError), open(journal, "rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            with suppress(*_DAMAGE):
                unix_ms, step, metrics = _read(line)
                for key, value in metrics.items():
                    if key not in found:
                        found[key] = _Thinned()
                    found[key].add([step, value, unix_ms])
    return {key: thinned.points() for key, thinned in found.items()}


_DAMAGE = (ValueError, KeyError, TypeError, AttributeError)  # what reading a damaged line raises


def line_of(metrics: Mapping[str, float], step: int, *, unix_ms: int) -> bytes:
    """The line as JSON, by json.dumps() only where it takes its words for what is no number."""
    values = orjson.dumps(metrics)
    if b"null" in values:
        values = json.dumps(metrics).encode()
    line = b'{"step":%d,"t":%d,"metrics":%b' % (step, unix_ms, values)
    return b"%b%b%d}\n" % (line, CHECK, zlib.crc32(line))


def append(file: FileIO, line: bytes) -> None:
    """The whole line or none of it: half of one would spoil the next."""
    written = file.write(line)
    if written != len(line):
        file.truncate(file.tell() - (written or 0))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass(frozen=True)
class Told:
    """What a journal has told by now."""

    steps: dict[str, int] = field(default_factory=dict)  # the newest, by metric
    values: dict[str, float] = field(default_factory=dict)  # of that step
    unix_ms: int = 0  # the latest

    def series(self) -> dict[str, float]:
        """The newest values of what has more than one a run."""
        return {name: self.values[name] for name, step in self.steps.items() if step != ONCE}

    def step(self) -> int:
        return max(self.steps.values(), default=ONCE)


def told_by(journal: Path) -> Told:
    """All of it; half a line at its end, of a process that died, is cut off."""
    steps: dict[str, int] = {}
    values: dict[str, float] = {}
    latest_ms = whole_bytes = 0
    with open(journal, "rb+") as lines:
        for batch, whole_bytes in batches(lines, 0):  # noqa: B007 (its last value is a result)
            for name, value, unix_ms, step in batch:
                steps[name], values[name] = step, value
                latest_ms = max(latest_ms, unix_ms)
        lines.truncate(whole_bytes)
    return Told(steps, values, latest_ms)


def _read(line: bytes) -> Line:
    """Unix ms, step and metrics of a line; raises one of _DAMAGE."""
    said, mark, crc = line.rpartition(CHECK)
    if mark and crc != b"%d}\n" % zlib.crc32(said):
        raise ValueError("it is not what was written")
    entry = _decoded(line)
    unix_ms, step = int(entry["t"]), int(entry["step"])
    if max(abs(unix_ms), abs(step)) >= 2**63:
        raise ValueError("no whole number of a database")
    return unix_ms, step, {key: float(value) for key, value in entry["metrics"].items()}


def _decoded(line: bytes) -> dict[str, Any]:
    """A line of the journal, by json.loads() only where it holds what is no number in JSON."""
    try:
        entry: dict[str, Any] = orjson.loads(line)
    except orjson.JSONDecodeError:
        entry = json.loads(line)
    return entry
