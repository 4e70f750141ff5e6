"""Reads text tables (CSV, TSV) in blocks of whole lines, parsed in a few threads: the memory that
it takes depends on the blocks and not on the file. It refuses rows that are shorter or longer than
the header and bytes that are not UTF-8, each by its row or line.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import compute
from pyarrow import csv as pa_csv

from tasks.engine.base.ordered_threads import in_order
from tasks.engine.files.number_formats import CODE, Spelling, patterns
from tasks.engine.files.source_data import MOST_SHOWN, DataError, shorten, size

BROKEN = (
    pa.ArrowException,
    OSError,
    ValueError,
    TypeError,
    KeyError,
    OverflowError,
    MemoryError,
    RuntimeError,
    BufferError,
)
LONGEST_BYTES = 16 * 1024**2  # of a header, and of a row
CACHED_BYTES = 1 << 18  # looked at together: three times faster than a whole block
BELOW = " below the header"


@dataclass(frozen=True)
class TextTable:
    """A file of cells and how it is to be read."""

    path: Path
    mark: str  # between two cells
    start: int  # where the rows begin, in bytes
    width: int  # cells in a row
    block_bytes: int
    threads: int
    spelling: Spelling


class Way(NamedTuple):
    """How a block may be parsed in less time than by finding out each column's type."""

    types: Mapping[int, pa.DataType]  # of the columns at these places
    nulls: Sequence[str] | None = None  # None: all words for a missing cell


class Block(NamedTuple):
    """Some rows, and where their lines end in the file, in bytes."""

    cells: pa.RecordBatch
    end: int


class _RefusedError(Exception):
    """Lines that Arrow could not make a table of, and what it said."""


def as_text(places: Sequence[int]) -> list[Way]:
    """To read the columns at these places as they are written."""
    return [Way(dict.fromkeys(places, pa.string()))]


def batches(
    table: TextTable, places: Sequence[int], ways: Sequence[Way] | None = None
) -> Iterator[Block]:
    """The cells of the columns at these places, in blocks of rows; each block is read in the first
    of these ways that holds there, else as Arrow takes it. ways: None where the file tells them.

    Errors: DataError for rows of another width than the header, and for what is not UTF-8.
    """
    ways = _ways(table, places) if ways is None else ways
    row, end = 0, table.start
    try:
        for cells, size_bytes in in_order(
            partial(_parsed, table, places, ways), _lines(table), threads=table.threads
        ):
            if any(pa.types.is_binary(kind) for kind in cells.schema.types):
                check_utf8(table.path)
            row, end = row + cells.num_rows, end + size_bytes
            if cells.num_rows:
                yield Block(cells, end)
    except _RefusedError as refused:
        lines, said = refused.args
        raise DataError(_reason(table, lines, said, row)) from None


def written(table: TextTable, place: int, row: int) -> str:
    """What stands in a cell of the column at `place`, as it is written; the file is read up to
    it."""
    for lines in _lines(table):
        cells = _arrow(table, lines, [place], types={place: pa.string()}, nulls=[]).column(0)
        if row < len(cells):
            return str(cells[row].as_py())
        row -= len(cells)
    return ""


def _ways(table: TextTable, places: Sequence[int]) -> list[Way]:
    """By the first block: to find out that a column holds fractions takes a third of the time of
    reading it, to compare each cell with the words for a missing one a seventh. Among numbers such
    a word is NaN all the same, or no number: then the block is read once more."""
    with suppress(*BROKEN):
        for lines in islice(_lines(table), 1):
            first = _arrow(table, lines, places)
            kinds = dict(zip(places, first.schema.types, strict=True))
            fractions = {place: kind for place, kind in kinds.items() if kind == pa.float64()}
            is_plain = set(kinds.values()) <= {pa.int64(), pa.float64()}
            is_plain = is_plain and not any(column.null_count for column in first.columns)
            plain = [Way(kinds, [""])] if is_plain else []
            return [*plain, Way(fractions)] if fractions else plain
    return []


def _parsed(
    table: TextTable, places: Sequence[int], ways: Sequence[Way], lines: bytes
) -> tuple[pa.RecordBatch, int]:
    """The columns as Arrow takes them, in the first of these ways that holds here; and how many
    bytes they were."""
    try:
        for types, nulls in ways:
            with suppress(pa.ArrowInvalid):
                parsed = _arrow(table, lines, places, types=types, nulls=nulls)
                return _with_codes(table, lines, places, parsed), len(lines)
        return _with_codes(table, lines, places, _arrow(table, lines, places)), len(lines)
    except BROKEN as error:
        raise _RefusedError(lines, str(error)) from None


def _with_codes(
    table: TextTable, lines: bytes, places: Sequence[int], parsed: pa.RecordBatch
) -> pa.RecordBatch:
    """With text where Arrow made whole numbers of cells such as 007: the zeros are part of them."""
    whole = [i for i, kind in enumerate(parsed.schema.types) if pa.types.is_integer(kind)]
    if not whole or not _may_hold_codes(lines):
        return parsed
    again = [places[i] for i in whole]
    texts = _arrow(table, lines, again, types=dict.fromkeys(again, pa.string()))
    for i, cells in zip(whole, texts.columns, strict=True):
        if compute.any(compute.match_substring_regex(cells, patterns(".")[CODE])).as_py():
            parsed = parsed.set_column(i, parsed.schema.names[i], cells)
    return parsed


def _may_hold_codes(lines: bytes) -> bool:
    """Whether some cell may begin with a zero and another digit; sees gigabytes a second."""
    given = np.frombuffer(lines, np.uint8)
    for at in range(0, len(given), CACHED_BYTES):
        part = given[at : at + CACHED_BYTES + 2]
        found = part[1:-1] == ord("0")
        found &= part[:-2] <= ord(",")  # a tab, comma, blank, quote or end of line
        found &= part[2:] >= ord("0")
        if found.any():
            return True
    return lines[:1] == b"0" and lines[1:2] >= b"0"


def _arrow(
    table: TextTable,
    lines: bytes,
    wanted: Sequence[int],
    *,
    types: Mapping[int, pa.DataType] | None = None,
    nulls: Sequence[str] | None = None,
    keep: Any = None,
) -> pa.RecordBatch:
    names = [str(i) for i in range(table.width)]  # the user's may be twice there
    parsed = pa_csv.read_csv(
        pa.BufferReader(lines),
        read_options=pa_csv.ReadOptions(
            use_threads=False, block_size=len(lines) + 1, column_names=names
        ),
        parse_options=pa_csv.ParseOptions(
            delimiter=table.mark,
            quote_char='"' if b'"' in lines else False,  # a twentieth less time without
            invalid_row_handler=keep,
        ),
        convert_options=pa_csv.ConvertOptions(
            include_columns=[str(i) for i in wanted],
            column_types={str(i): kind for i, kind in (types or {}).items()},
            null_values=["", *table.spelling.na] if nulls is None else nulls,
            decimal_point=table.spelling.decimal,
        ),
    )
    columns = [c.chunk(0) if c.num_chunks == 1 else c.combine_chunks() for c in parsed.columns]
    return pa.RecordBatch.from_arrays(columns, schema=parsed.schema)


def _lines(table: TextTable) -> Iterator[bytes]:
    """The rows' bytes, cut where a line ends that is not within quotes."""
    at, total = table.start, table.path.stat().st_size
    with open(table.path, "rb", buffering=0) as file:
        while at < total:
            want = table.block_bytes
            while True:
                lines = os.pread(file.fileno(), want, at)
                if at + len(lines) >= total or not lines:
                    break
                end = _line_end(lines)
                if end:
                    lines = lines[:end]
                    break
                if want > LONGEST_BYTES:
                    raise DataError(
                        f"data.path: {table.path.name} has a row of more than "
                        f"{size(LONGEST_BYTES)}, or a quote that is never closed (from byte "
                        f"{at:,} on); mend it"
                    )
                want *= 2
            if not lines:
                return  # the file became shorter, which is told when it is looked at again
            at += len(lines)
            yield lines


def _line_end(lines: bytes) -> int:
    """Where the last whole line ends; 0 where there is none. A line that ends within quotes goes
    on."""
    mark = b"\n" if b"\n" in lines else b"\r"
    end = lines.rfind(mark) + 1
    if b'"' not in lines:  # found out five times faster than by counting
        return end
    # A quote within a cell is written as two, so that whole rows hold an even number.
    while end and lines.count(b'"', 0, end) % 2:
        end = lines.rfind(mark, 0, end - 1) + 1
    return end


def _reason(table: TextTable, lines: bytes, said: str, row: int) -> str:
    """Why these lines, from `row` on, are no rows of this table. said: by Arrow."""
    check_utf8(table.path)
    bad: list[Any] = []

    def keep(found: Any) -> str:
        bad.append(found)
        return "skip"

    try:
        _arrow(table, lines, range(table.width), keep=keep)
    except BROKEN as error:
        bad, said = [], str(error)
    if not bad:
        kind = {",": "comma", "\t": "tab"}[table.mark]
        return (
            f"data.path: {table.path.name} cannot be read as {kind}-separated text "
            f"({shorten(said, 160)}); mend it or write it anew"
        )
    return "\n".join(
        f"data.path: {table.path.name} row {row + found.number}{BELOW}: has "
        f"{found.actual_columns} cells where the header has {found.expected_columns} "
        f"({shorten(found.text)}); mend or drop the row"
        for found in bad[:MOST_SHOWN]
    )


def check_utf8(path: Path) -> None:
    """Raises DataError at the first byte that is not UTF-8; pyarrow would print a traceback."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with open(path, "rb") as file:
        while True:
            block = file.read(LONGEST_BYTES)
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                raise DataError(not_utf8(path.name, line, error)) from None
            if not block:
                return
            line += block.count(b"\n")


def not_utf8(label: str, line: int, error: UnicodeDecodeError) -> str:
    """The sentence for a line that is not UTF-8."""
    return (
        f"data.path: {label} line {line} is not UTF-8 "
        f"(at {error.object[max(0, error.start - 8) : error.start + 8]!r}); save it as UTF-8 "
        "(iconv -f LATIN1 -t UTF-8)"
    )
