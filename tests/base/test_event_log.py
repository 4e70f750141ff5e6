"""A log read back: its metrics in batches that begin where the last one ended, and as thinned
series; how the run began, and whether and how it ended."""

import io
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from headroom.base import event_log
from headroom.base.event_log import (
    END_BYTES,
    LOG,
    SENDING_LOCK,
    SENT,
    append_event,
    append_line,
    is_sent,
    make_event,
    make_line,
    read_begins,
    read_end,
    read_log_ends,
    read_logged_tags,
    read_metric_batches,
    read_metrics_before,
    read_series,
    remove_folder,
)
from headroom.base.file_lock import FileLock


def _lines(count: int) -> bytes:
    found = (({"a": 1 / s, "b": float(s)}, s) for s in range(1, count + 1))
    return b"".join(make_line(metrics, s, unix_ms=10 * s) for metrics, s in found)


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
    data = make_line({"a": math.nan, "b": math.inf}, 1, unix_ms=2)
    ((batch, offset),) = read_metric_batches(io.BytesIO(data), 0)
    assert len(batch) == 1 and batch[0][0] == "a" and math.isnan(batch[0][1])
    only = make_line({"b": -math.inf}, 1, unix_ms=2)
    assert list(read_metric_batches(io.BytesIO(only), 0)) == [([], len(only))]


@pytest.mark.parametrize("count", [1, 99, 4096, 4097, 30_001])
def test_a_long_series_is_thinned_evenly_and_keeps_both_ends(tmp_path: Path, count: int) -> None:
    (tmp_path / "events.jsonl").write_bytes(_lines(count))
    found = read_series(tmp_path / "events.jsonl")
    steps = [point[0] for point in found["a"]]
    assert steps[0] == 1 and steps[-1] == count
    assert len(steps) == count if count <= 4096 else 2048 < len(steps) <= 4097
    gaps = {b - a for a, b in zip(steps[:-1], steps[1:-1], strict=False)}
    assert len(gaps) <= 1  # but for the last, which may come earlier
    assert found["b"] == [(s, float(s), 10 * s) for s in steps]


def test_no_log_has_no_series(tmp_path: Path) -> None:
    assert read_series(tmp_path / "events.jsonl") == {}


def test_no_flipped_bit_becomes_a_number_that_nobody_measured(tmp_path: Path) -> None:
    """A bit of a dead run's journal once stopped the sending of healthy ones with a KeyError."""
    true = [({"a": 1 / s, "b/c": float(s)}, s) for s in range(1, 6)]
    data = b"".join(make_line(metrics, step, unix_ms=7) for metrics, step in true)
    whole = {(k, v, 7, step) for metrics, step in true for k, v in metrics.items()}
    journal = tmp_path / "events.jsonl"
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


def test_a_line_without_its_checksum_is_a_damaged_one() -> None:
    line, damaged = make_line({"a": 0.5}, 1, unix_ms=2), []
    bare = line[: line.index(b',"crc32"')] + b"}\n"
    assert json.loads(bare) == {"step": 1, "t": 2, "metrics": {"a": 0.5}}
    found = [*read_metric_batches(io.BytesIO(bare + line), 0, damaged=damaged)]
    assert found == [([("a", 0.5, 2, 1)], len(bare + line))] and damaged == [0]


BEGIN = {"name": "n", "tags": {"host": "here"}}
END = {"status": "FINISHED", "metrics": {"a": math.inf}}


def _log(folder: Path, *lines: bytes) -> Path:
    (folder / LOG).write_bytes(b"".join(lines))
    return folder / LOG


def test_no_flipped_bit_becomes_another_begin_or_end(tmp_path: Path) -> None:
    lines = [make_event("begin", BEGIN, unix_ms=1), make_line({"a": 0.5}, 1, unix_ms=2)]
    lines += [make_event("tags", {"a": "b"}, unix_ms=3), make_event("end", END, unix_ms=3)]
    data = b"".join(lines)
    for bit in range(0, 8 * len(data), 3):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        log = _log(tmp_path, bytes(flipped))
        assert [said for said, _ in read_begins(log, 0)] in ([], [BEGIN])
        assert read_logged_tags(log) in ({}, {"a": "b"}) and read_end(tmp_path) in ({}, END)
        damaged: list[int] = []
        with open(log, "rb") as file:
            list(read_metric_batches(file, 0, damaged=damaged))
        is_event = not len(lines[0]) <= bit // 8 < len(lines[0] + lines[1])
        assert damaged or bit // 8 == len(data) - 1 or not is_event, bit


def test_a_run_has_ended_where_the_last_whole_line_is_its_end(tmp_path: Path) -> None:
    first, end = make_event("begin", BEGIN, unix_ms=1), make_event("end", END, unix_ms=3)
    line = make_line({"a": 0.5}, 1, unix_ms=2)
    assert read_end(tmp_path) == {}  # no log
    for lines, has_ended in (
        ([], False),
        ([first], False),
        ([first, line], False),
        ([first, line, end], True),
        ([first, end, line], False),  # more was added: another end comes with it
        ([first, end, line, end], True),
        ([first, end, first], False),  # it goes on
        ([first, end, first[:-9]], True),  # whoever was to go on with it died then
        ([first, line, end[:-9]], False),
    ):
        _log(tmp_path, *lines)
        assert read_end(tmp_path) == (END if has_ended else {}), lines


def _read_tags(log: Path, offset: int, *, most_bytes: float = math.inf) -> dict[str, str]:
    """The tags that whoever sends this part of the log finds there."""
    tags: dict[str, str] = {}
    with open(log, "rb") as file:
        assert list(read_metric_batches(file, offset, most_bytes=most_bytes, tags=tags)) or not tags
    return tags


def test_tags_of_a_run_that_goes_on_are_read_between_any_lines(tmp_path: Path) -> None:
    first, line = make_event("begin", BEGIN, unix_ms=1), make_line({"a": 0.5}, 1, unix_ms=2)
    one, two = (make_event("tags", {"alerts": text}, unix_ms=3) for text in ("one", "two"))
    log = _log(tmp_path, first, line, one, line, two, line, one[:-9])
    between = len(first + line + one)
    assert read_logged_tags(log) == _read_tags(log, between) == {"alerts": "two"}
    assert _read_tags(log, 0, most_bytes=between) == {"alerts": "one"}
    assert _read_tags(log, len(first + line), most_bytes=0) == {}
    assert read_logged_tags(tmp_path / "gone") == {} and read_end(tmp_path) == {}
    damaged: list[int] = []
    with open(log, "rb") as file:
        ((batch, offset),) = read_metric_batches(file, 0, damaged=damaged)
    assert len(batch) == 3 and offset == log.stat().st_size - len(one[:-9]) and not damaged


def test_a_long_end_hides_no_metrics_before_it(tmp_path: Path) -> None:
    long = {"status": "FAILED", "error": "x" * 3 * END_BYTES}
    lines = [make_line({"a": float(step)}, step, unix_ms=step) for step in range(1, 4)]
    log = _log(tmp_path, make_event("begin", BEGIN, unix_ms=0), *lines)
    before = read_log_ends(log)
    assert [step for _, step, _ in before[1]] == [1, 2, 3]
    append_event(tmp_path, make_event("end", long, unix_ms=4))
    assert read_end(tmp_path) == long and read_log_ends(log) == before
    assert read_metrics_before(log, log.stat().st_size) == {"a": 3.0}


def test_what_is_appended_for_a_process_that_died_ends_half_a_line_of_it(tmp_path: Path) -> None:
    whole, half = make_line({"a": 0.5}, 1, unix_ms=1), b'{"step":2,"t":2,"met'
    log = _log(tmp_path, whole, half)
    append_event(tmp_path, make_event("end", END, unix_ms=3))
    damaged: list[int] = []
    with open(log, "rb") as file:
        ((batch, offset),) = read_metric_batches(file, 0, damaged=damaged)
    assert batch == [("a", 0.5, 1, 1)] and damaged == [len(whole)]
    assert offset == log.stat().st_size and read_end(tmp_path) == END
    with pytest.raises(FileNotFoundError):  # a log that was removed is not made of an end alone
        append_event(tmp_path / "gone", whole)


def test_metrics_behind_a_begin_that_nobody_was_told_of_wait_for_it(tmp_path: Path) -> None:
    """Whoever still sends the part before would send them to a run that has ended."""
    first, line = make_event("begin", BEGIN, unix_ms=1), make_line({"a": 0.5}, 1, unix_ms=2)
    log = _log(tmp_path, first, line, first, line)
    for told, offset in ((0, 0), (len(first), len(first + line)), (2 * len(first + line), None)):
        with open(log, "rb") as file:
            batches = list(read_metric_batches(file, 0, begun=told))
        ends = [end for _, end in batches]
        assert ends[-1:] == ([] if offset == 0 else [offset or log.stat().st_size])
    begins = [len(first), len(first + line + first)]
    assert [end for _, end in read_begins(log, 0)] == begins
    assert [end for _, end in read_begins(log, len(first))] == begins[1:]


def test_a_log_is_sent_when_its_last_byte_is_and_that_is_its_end(tmp_path: Path) -> None:
    log = _log(tmp_path, make_event("end", END, unix_ms=1))
    size = log.stat().st_size
    for sent, is_whole in (
        (None, False),
        ({"closed": False, "offset": size}, False),
        ({"closed": True, "offset": size}, True),
        ({"closed": True, "offset": size - 1}, False),
        ({"closed": True}, False),
        ([], False),
    ):
        if sent is not None:
            (tmp_path / SENT).write_text(json.dumps(sent))
        assert is_sent(tmp_path) is is_whole, sent
    (tmp_path / SENT).write_text(json.dumps({"closed": True, "offset": size}))
    log.unlink()  # a removal that was interrupted
    assert is_sent(tmp_path)


def test_a_folder_is_removed_though_another_process_removes_it_or_tries_a_lock_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two commands that tidied at once one said that the runs can't be written."""
    folder = tmp_path / "run"
    others: list[Callable[[], object]] = [
        lambda: FileLock(folder / SENDING_LOCK).close(),  # made anew
        lambda: shutil.rmtree(folder),
    ]
    real = Path.rmdir

    def remove(path: Path) -> None:
        if others:
            others.pop(0)()
        real(path)

    folder.mkdir()
    for name in (SENT, SENDING_LOCK):
        (folder / name).write_text("{}")
    monkeypatch.setattr(Path, "rmdir", remove)
    remove_folder(folder)
    assert not folder.exists() and not others
    remove_folder(folder)


def test_a_line_that_the_disk_takes_half_of_is_taken_back(tmp_path: Path) -> None:
    """Half a line would spoil the one after it, and the sending of both."""

    class Full(io.FileIO):
        def write(self, data: bytes) -> int:
            return super().write(data[:7] if room else data)

    file, room = Full(tmp_path / "events.jsonl", "ab"), []
    append_line(file, b'{"step": 1}\n')
    room.append(True)
    with pytest.raises(OSError, match="No space left"):
        append_line(file, b'{"step": 2}\n')
    room.clear()
    append_line(file, b'{"step": 3}\n')
    file.close()
    assert (tmp_path / "events.jsonl").read_bytes() == b'{"step": 1}\n{"step": 3}\n'
