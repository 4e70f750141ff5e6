"""A run's journal read back, line by line: in batches for MLflow, and as series for the pictures.
It may be larger than the host's memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import orjson

Sample = tuple[str, float, int, int]  # name, value, unix ms, step
BATCH = 10_000  # metrics: other runs wait some 0.1 s while so many are written to a database
MOST_POINTS = 4096  # of a series: more than a picture shows


def batches(
    journal: BinaryIO, offset: int, *, most_bytes: float = math.inf
) -> Iterator[tuple[list[Sample], int]]:
    """Whole lines from `offset` on, as batches, each with the offset behind it; half a line waits
    for its end. most_bytes: to stop after, at the end of a line."""
    journal.seek(offset)
    until, sent = offset + most_bytes, offset
    batch: list[Sample] = []
    for line in journal:
        if offset >= until or not line.endswith(b"\n"):
            break
        entry = _decoded(line)
        unix_ms, step = entry["t"], entry["step"]
        # MLflow would store an infinity as 1.797e308, a number that nobody measured.
        batch += [(k, v, unix_ms, step) for k, v in entry["metrics"].items() if not math.isinf(v)]
        offset += len(line)
        if len(batch) >= BATCH:
            yield batch, offset
            batch, sent = [], offset
    if offset > sent:
        yield batch, offset


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
            entry = _decoded(line)
            for key, value in entry["metrics"].items():
                if key not in found:
                    found[key] = _Thinned()
                found[key].add([entry["step"], value, entry["t"]])
    return {key: thinned.points() for key, thinned in found.items()}


def _decoded(line: bytes) -> dict[str, Any]:
    """A line of the journal, by json.loads() only where it holds what is no number in JSON."""
    try:
        entry: dict[str, Any] = orjson.loads(line)
    except orjson.JSONDecodeError:
        entry = json.loads(line)
    return entry
