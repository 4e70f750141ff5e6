"""A journal read back: in batches that begin where the last one ended, and as thinned series."""

import io
import json
import math
from pathlib import Path

import pytest

from headroom.base import event_log
from headroom.base.event_log import make_line, read_metric_batches, read_series


def _lines(count: int) -> bytes:
    entries = (
        {"step": s, "t": 10 * s, "metrics": {"a": 1 / s, "b": float(s)}}
        for s in range(1, count + 1)
    )
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


def test_batches_hold_every_line_once_and_say_where_they_end(monkeypatch) -> None:
    monkeypatch.setattr(event_log, "BATCH", 6)
    data = _lines(10)
    found = list(read_metric_batches(io.BytesIO(data), 0))
    assert [len(batch) for batch, _ in found] == [6, 6, 6, 2]
    assert found[0][0][:3] == [("a", 1.0, 10, 1), ("b", 1.0, 10, 1), ("a", 0.5, 20, 2)]
    assert found[-1][1] == len(data)
    for at in range(4):  # each begins where the one before it ended
        offset = found[at - 1][1] if at else 0
        assert list(read_metric_batches(io.BytesIO(data), offset)) == found[at:]


def test_a_piece_ends_behind_the_line_that_fills_it() -> None:
    data = _lines(10)
    line = len(_lines(1))
    offset, pieces = 0, []
    while offset < len(data):
        ((batch, offset),) = read_metric_batches(io.BytesIO(data), offset, most_bytes=2.5 * line)
        pieces.append([sample[3] for sample in batch[::2]])
    assert sum(pieces, []) == list(range(1, 11))
    assert max(map(len, pieces)) <= 3 and len(pieces) >= 4


def test_half_a_line_waits_for_its_end() -> None:
    data, half = _lines(2), b'{"step":3,"t":30,"met'
    ((batch, offset),) = read_metric_batches(io.BytesIO(data + half), 0)
    assert len(batch) == 4 and offset == len(data)
    assert list(read_metric_batches(io.BytesIO(data + half), offset)) == []


def test_what_is_no_number_is_told_apart_from_what_nobody_measured() -> None:
    data = b'{"step":1,"t":2,"metrics":{"a": NaN, "b": Infinity}}\n'
    ((batch, offset),) = read_metric_batches(io.BytesIO(data), 0)
    assert len(batch) == 1 and batch[0][0] == "a" and math.isnan(batch[0][1])
    only = b'{"step":1,"t":2,"metrics":{"b": -Infinity}}\n'
    assert list(read_metric_batches(io.BytesIO(only), 0)) == [([], len(only))]


@pytest.mark.parametrize("count", [1, 99, 4096, 4097, 30_001])
def test_a_long_series_is_thinned_evenly_and_keeps_both_ends(tmp_path: Path, count: int) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(_lines(count))
    found = read_series(tmp_path / "metrics.jsonl")
    steps = [point[0] for point in found["a"]]
    assert steps[0] == 1 and steps[-1] == count
    assert len(steps) == count if count <= 4096 else 2048 < len(steps) <= 4097
    gaps = {b - a for a, b in zip(steps[:-1], steps[1:-1], strict=False)}
    assert len(gaps) <= 1  # but for the last, which may come earlier
    assert found["b"] == [[s, float(s), 10 * s] for s in steps]


def test_no_journal_has_no_series(tmp_path: Path) -> None:
    assert read_series(tmp_path / "metrics.jsonl") == {}


def test_no_flipped_bit_becomes_a_number_that_nobody_measured(tmp_path: Path) -> None:
    """A bit of a dead run's journal once stopped the sending of healthy ones with a KeyError."""
    true = [({"a": 1 / s, "b/c": float(s)}, s) for s in range(1, 6)]
    data = b"".join(make_line(metrics, step, unix_ms=7) for metrics, step in true)
    whole = {(k, v, 7, step) for metrics, step in true for k, v in metrics.items()}
    journal = tmp_path / "metrics.jsonl"
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged: list[int] = []
        found = [
            s
            for batch, _ in read_metric_batches(io.BytesIO(flipped), 0, damaged=damaged)
            for s in batch
        ]
        assert set(found) <= whole and len(found) >= 6  # the flipped line, and one that joined it
        assert damaged or len(found) == len(whole) or bit // 8 == len(data) - 1, bit
        if bit % 37 == 0:
            journal.write_bytes(flipped)
            drawn = {
                (k, v, t, s) for k, points in read_series(journal).items() for s, v, t in points
            }
            assert drawn == set(found)
