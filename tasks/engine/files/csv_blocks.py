"""Process one block after another in a few threads and return the results in the order of the
blocks. Only a few blocks are under way at once, so that their memory is bounded. It suits work
that releases Python's lock, as Arrow and numpy do on large arrays.
"""

from __future__ import annotations

import csv
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from pyarrow import compute
from pyarrow import csv as pa_csv

from tasks.engine.files.number_formats import CODE, Spelling, make_patterns
from tasks.engine.files.source_data import MOST_SHOWN, DataError, format_size, shorten

T = TypeVar("T")
R = TypeVar("R")
MOST_THREADS = 8


def count_usable_threads() -> int:
    """Return the number of processors that this process may use, at most 8: beyond that, one
    thread cannot hand out work fast enough."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0))))


def map_in_order(work: Callable[[T], R], items: Iterable[T], *, threads: int) -> Iterator[R]:
    """Yield work(item) for each item, in the items' order; at most `threads` + 1 are under way.

    Raises what `work` raises, at its turn. Closed early, it waits for what is under way.
    """
    pool = ThreadPoolExecutor(threads)
    under_way: deque[Future[R]] = deque()
    try:
        for item in items:
            under_way.append(pool.submit(work, item))
            if len(under_way) > threads:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


PYTHONS = (OSError, ValueError, TypeError, LookupError, ArithmeticError, BufferError, MemoryError)
BROKEN = (pa.ArrowException, RuntimeError, *PYTHONS)  # what Arrow raises
MARKS = {"csv": ",", "tsv": "\t"}  # where the first line does not tell
OTHER_MARKS = ",;\t|"
BLOCK_BYTES = 2 << 20  # of text: larger blocks leave the processor's cache
HEAD_BYTES = 1 << 16  # that are read at once until the first line ends
LONGEST_BYTES = 16 << 20  # of a header, and of a row
BELOW = " below the header"
# White space alone is a missing cell too: Arrow compares whole cells with these.
BLANKS = [*("\u00a0" * n for n in range(1, 5)), *(" " * n for n in range(1, 33)), "\t"]


@dataclass(frozen=True)
class TextTable:
    """A file of cells and how it is to be read."""

    path: Path
    mark: str  # between two cells
    names: tuple[str, ...]  # of the columns; in a file to predict one may be there twice
    start: int  # where the rows begin, in bytes
    spelling: Spelling
    threads: int
    block_bytes: int  # of text that is parsed at once, in each thread


class ParseTypes(NamedTuple):
    """The types to parse the columns of a block as."""

    types: Mapping[int, pa.DataType]  # of the columns at these places; Arrow finds out the others
    nulls: Sequence[str] | None = None  # None: all words for a missing cell


class Block(NamedTuple):
    """Some rows, and where their lines end in the file, in bytes."""

    cells: pa.RecordBatch
    end: int


ANY_TYPES = ParseTypes({})


class _RefusedError(Exception):
    """Lines that Arrow could not make a table of, and what it said."""


def parse_as_text(places: Sequence[int]) -> ParseTypes:
    """Return the types that read the columns at these places as they are written."""
    return ParseTypes(dict.fromkeys(places, pa.string()))


def open_text_table(
    path: Path, source: str, spelling: Spelling, *, allowed_bytes: int = 1 << 30
) -> TextTable:
    """Open a text table by its first line. allowed_bytes: what reading it may take. Errors:
    DataError."""
    whole = head = b""
    with open(path, "rb") as file:
        while len(whole) < LONGEST_BYTES and b"\n" not in head and b"\r" not in head:
            if not (more := file.read(HEAD_BYTES)):
                break
            whole += more
            head = whole.removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n")
    line, *rows = head.splitlines()[:2] or [b""]
    if head[:4096].count(0) > len(head[:4096]) // 8:
        raise DataError(
            f"data.path: {path.name} looks like UTF-16 or binary (it holds NUL bytes); "
            "save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"
        )
    try:
        text = line.decode("utf-8")
        mark, cells = _split_header(text, [row[:HEAD_BYTES] for row in rows], MARKS[source])
    except UnicodeDecodeError as error:
        raise DataError(_describe_not_utf8(path.name, 1, error)) from None
    except csv.Error as error:
        raise DataError(f"data.path: {path.name} line 1 is no header ({error}); mend it") from None
    if text.count('"') % 2:
        raise DataError(f"data.path: {path.name} has a header with unbalanced quotes; mend line 1")
    names, start = tuple(cell.strip() for cell in cells), len(whole) - len(head) + len(line)
    threads = count_usable_threads() if allowed_bytes >= 1 << 30 else 2
    block_bytes = min(BLOCK_BYTES, max(1 << 19, allowed_bytes // 128))
    return TextTable(path, mark, names, start, spelling, threads, block_bytes)


def _split_header(line: str, rows: list[bytes], usual: str) -> tuple[str, list[str]]:
    """What separates cells, and those of the first line: as many as there can be, and as many as
    in the first row, where one mark makes it so."""
    lines, found = [line, *(row.decode(errors="replace") for row in rows)], []
    for mark in usual + OTHER_MARKS:
        cells, *others = csv.reader(lines, delimiter=mark)
        is_alike = len(cells) > 1 and all(len(other) == len(cells) for other in others)
        found.append((is_alike, len(cells), mark, cells))
    return max(found, key=lambda one: one[:2])[2:]


def read_csv_blocks(
    table: TextTable, places: Sequence[int], ways: Sequence[ParseTypes] = ()
) -> Iterator[Block]:
    """Yield the cells of the columns at these places, in blocks of rows; each block is parsed
    by the first of `ways` that fits, else as Arrow takes it. Without ways, the file's first
    block decides.

    Errors: DataError for rows of another width than the header, and for what is not UTF-8.
    """
    ways = [*(ways or [_guess_types(table, places)]), ANY_TYPES]
    row, end = 0, table.start
    try:
        for cells, size_bytes in map_in_order(
            partial(_parse_block, table, places, ways),
            _read_line_blocks(table),
            threads=table.threads,
        ):
            if any(pa.types.is_binary(kind) for kind in cells.schema.types):
                _check_utf8(table.path)
            row, end = row + cells.num_rows, end + size_bytes
            if cells.num_rows:
                yield Block(cells, end)
    except _RefusedError as refused:
        lines, said = refused.args
        raise DataError(_describe_bad_lines(table, lines, said, row)) from None


def read_cell(table: TextTable, place: int, row: int) -> str:
    """Return a cell of the column at `place` as it is written; the file is read up to it."""
    for lines in _read_line_blocks(table):
        cells = _parse_with_arrow(
            table, lines, [place], parse_as_text([place])._replace(nulls=[])
        ).column(0)
        if row < len(cells):
            return str(cells[row].as_py())
        row -= len(cells)
    return ""


def _guess_types(table: TextTable, places: Sequence[int]) -> ParseTypes:
    """By the first block: to find out that a column holds fractions takes a third of the time of
    reading it, to compare each cell with the words for a missing one a seventh. Among numbers such
    a word is NaN all the same, or no number: then the block is read once more."""
    with suppress(*BROKEN):
        first = _parse_with_arrow(table, next(_read_line_blocks(table), b""), places, ANY_TYPES)
        kinds = dict(zip(places, first.schema.types, strict=True))
        numbers = set(kinds.values()) <= {pa.int64(), pa.float64()}
        if numbers and not any(column.null_count for column in first.columns):
            return ParseTypes(kinds, [""])
        return ParseTypes({place: kind for place, kind in kinds.items() if kind == pa.float64()})
    return ANY_TYPES


def _parse_block(
    table: TextTable, places: Sequence[int], ways: Sequence[ParseTypes], lines: bytes
) -> Block:
    """The columns in the first of these ways that holds here; its end counts from its start."""
    said = ""
    for way in ways:
        try:
            parsed = _parse_with_arrow(table, lines, places, way)
            return Block(_restore_codes(table, lines, places, parsed), len(lines))
        except BROKEN as error:
            said = str(error)
    raise _RefusedError(lines, said)


def _restore_codes(
    table: TextTable, lines: bytes, places: Sequence[int], parsed: pa.RecordBatch
) -> pa.RecordBatch:
    """With text where Arrow made whole numbers of cells such as 007: the zeros are part of them."""
    whole = [i for i, kind in enumerate(parsed.schema.types) if pa.types.is_integer(kind)]
    if not whole or not _may_hold_codes(lines):
        return parsed
    again = [places[i] for i in whole]
    texts = _parse_with_arrow(table, lines, again, parse_as_text(again))
    for i, cells in zip(whole, texts.columns, strict=True):
        if compute.any(compute.match_substring_regex(cells, make_patterns(".")[CODE])).as_py():
            parsed = parsed.set_column(i, parsed.schema.names[i], cells)
    return parsed


def _may_hold_codes(lines: bytes) -> bool:
    """Whether some cell may begin with a zero and another digit; sees gigabytes a second."""
    given = np.frombuffer(lines, np.uint8)
    found = given[1:-1] == ord("0")
    found &= given[:-2] <= ord(",")  # a tab, comma, blank, quote or end of line
    found &= given[2:] >= ord("0")
    return bool(found.any()) or (lines[:1] == b"0" and lines[1:2] >= b"0")


def _parse_with_arrow(
    table: TextTable, lines: bytes, wanted: Sequence[int], way: ParseTypes, keep: Any = None
) -> pa.RecordBatch:
    parsed = pa_csv.read_csv(
        pa.BufferReader(lines),
        read_options=pa_csv.ReadOptions(
            use_threads=False,
            block_size=len(lines) + 1,
            column_names=[str(i) for i in range(len(table.names))],
        ),
        parse_options=pa_csv.ParseOptions(delimiter=table.mark, invalid_row_handler=keep),
        convert_options=pa_csv.ConvertOptions(
            include_columns=[str(i) for i in wanted],
            column_types={str(i): kind for i, kind in way.types.items()},
            null_values=["", *BLANKS, *table.spelling.na] if way.nulls is None else way.nulls,
            decimal_point=table.spelling.decimal,
        ),
    )
    columns = [c.chunk(0) if c.num_chunks == 1 else c.combine_chunks() for c in parsed.columns]
    return pa.RecordBatch.from_arrays(columns, schema=parsed.schema)


def _read_line_blocks(table: TextTable) -> Iterator[bytes]:
    """The rows' bytes, cut where a line ends that is not within quotes."""
    at, left = table.start, b""
    with open(table.path, "rb", buffering=0) as file:
        file.seek(at)
        while block := file.read(table.block_bytes):
            lines = left + block
            end = _find_line_end(lines)
            at, left = at + end, lines[end:]
            if end:
                yield lines[:end]
            elif len(left) > LONGEST_BYTES:
                raise DataError(
                    f"data.path: {table.path.name} has a row of more than "
                    f"{format_size(LONGEST_BYTES)}, or a quote that is never closed (from byte "
                    f"{at:,} on); mend it"
                )
    if left:
        yield left


def _find_line_end(lines: bytes) -> int:
    """Where the last whole line ends; 0 where there is none. A line that ends within quotes goes
    on: a quote within a cell is written as two, so that whole rows hold an even number."""
    mark = b"\n" if b"\n" in lines else b"\r"
    end = lines.rfind(mark) + 1
    if b'"' not in lines or lines.count(b'"', 0, end) % 2 == 0:  # seen faster than counted
        return end
    given = np.frombuffer(lines, np.uint8)
    outside = np.cumsum(given == ord('"')) % 2 == 0
    ends = np.flatnonzero((given == ord(mark)) & outside)
    return int(ends[-1]) + 1 if len(ends) else 0


def _describe_bad_lines(table: TextTable, lines: bytes, said: str, row: int) -> str:
    """Why these lines, from `row` on, are no rows of this table. said: by Arrow."""
    _check_utf8(table.path)
    bad: list[Any] = []

    def keep(found: Any) -> str:
        bad.append(found)
        return "skip"

    try:
        _parse_with_arrow(table, lines, range(len(table.names)), ANY_TYPES, keep)
    except BROKEN as error:
        bad, said = [], str(error)
    if not bad:
        return (
            f"data.path: {table.path.name} cannot be read as text separated by {table.mark!r} "
            f"({shorten(said, 160)}); mend it or write it anew"
        )
    return "\n".join(
        f"data.path: {table.path.name} row {row + found.number}{BELOW}: has "
        f"{found.actual_columns} cells where the header has {found.expected_columns} "
        f"({shorten(found.text)}); mend or drop the row"
        for found in bad[:MOST_SHOWN]
    )


def _check_utf8(path: Path) -> None:
    """Raises DataError at the first line that is not UTF-8; pyarrow would print a traceback."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(_describe_not_utf8(path.name, number, error)) from None


def _describe_not_utf8(label: str, line: int, error: UnicodeDecodeError) -> str:
    return (
        f"data.path: {label} line {line} is not UTF-8 "
        f"(at {error.object[max(0, error.start - 8) : error.start + 8]!r}); save it as UTF-8 "
        "(iconv -f LATIN1 -t UTF-8)"
    )
