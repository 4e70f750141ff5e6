"""Reads text tables (CSV, TSV) in blocks of whole lines, parsed in a few threads: the memory that
it takes depends on the blocks and not on the file. It refuses rows that are shorter or longer than
the header and bytes that are not UTF-8, each by its row or line.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv as pa_csv

from tasks.engine.base.ordered_threads import in_order
from tasks.engine.files.number_formats import Spelling
from tasks.engine.files.source_data import MOST_SHOWN, DataError, shorten, size
from tasks.engine.tables.arrow_columns import AS_IT_IS, holds_codes, may_hold_codes
from tasks.engine.tables.column_gathering import BROKEN, Block, block_of

LONGEST_BYTES = 16 * 1024**2  # of a header, and of a row
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
    spelling: Spelling = AS_IT_IS


@dataclass(frozen=True)
class _Refused:
    """Lines that Arrow could not make a table of, and what it said."""

    lines: bytes
    reason: str


def blocks(
    table: TextTable, features: Sequence[int], target: int | None, *, as_text: bool = False
) -> Iterator[Block]:
    """The cells of these columns, in blocks of rows. as_text: whatever they look like.

    Errors: DataError for rows of another width than the header, and for what is not UTF-8.
    """
    lines = _lines(table)
    wanted = _Wanted(tuple(features), target, {})
    if as_text:
        wanted = replace(wanted, types=dict.fromkeys(wanted.places, pa.string()))
    first = [_parsed(table, wanted, some) for some in islice(lines, 1)]
    if not as_text and first and isinstance(first[0], Block):
        wanted = _known(wanted, first[0])
    others = in_order(partial(_parsed, table, wanted), lines, threads=table.threads)
    row = 0
    for block in chain(first, others):
        if isinstance(block, _Refused):
            raise DataError(_reason(table, block, row))
        if any("binary" in cells.kind for cells in (*block.cells, block.target) if cells):
            check_utf8(table.path)
        row += block.matrix.shape[1]
        if block.matrix.shape[1]:
            yield block


def written(table: TextTable, place: int, row: int) -> str:
    """What stands in a cell of the column at `place`, as it is written; the file is read up to
    it."""
    for lines in _lines(table):
        cells = _arrow(table, lines, [place], types={place: pa.string()}, nulls=[]).column(0)
        if row < len(cells):
            return str(cells[row].as_py())
        row -= len(cells)
    return ""


@dataclass(frozen=True)
class _Wanted:
    """Columns by their place in the file; those whose type need not be found out have it here."""

    features: tuple[int, ...]
    target: int | None
    types: dict[int, pa.DataType]
    plain: dict[int, pa.DataType] | None = None  # where all are numbers, and none seems missing

    @property
    def places(self) -> list[int]:
        return [*self.features, *([] if self.target is None else [self.target])]


def _known(wanted: _Wanted, block: Block) -> _Wanted:
    """To find out that a column holds fractions takes a third of the time of reading it."""
    kinds = zip(wanted.places, block.types, strict=True)
    plain = {i: kind for i, kind in kinds if kind in (pa.int64(), pa.float64())}
    fractions = {i: kind for i, kind in plain.items() if kind == pa.float64()}
    is_plain = len(plain) == len(wanted.places) and not block.has_holes
    return replace(wanted, types=fractions, plain=plain if is_plain else None)


def _parsed(table: TextTable, wanted: _Wanted, lines: bytes) -> Block | _Refused:
    try:
        columns = _plain(table, lines, wanted) or _typed(table, lines, wanted)
        rows = len(columns[0])
        target = None if wanted.target is None else columns.pop()
        return block_of(columns, target, rows, table.spelling)
    except BROKEN as error:
        return _Refused(lines, str(error))


def _plain(table: TextTable, lines: bytes, wanted: _Wanted) -> list[pa.Array] | None:
    """The columns where all are numbers, as in the first block; None where some are not."""
    if not wanted.plain:
        return None
    if pa.int64() in wanted.plain.values() and may_hold_codes(lines):
        return None
    with suppress(pa.ArrowInvalid):
        # To compare each cell with the words for a missing one takes a seventh of the time. Among
        # numbers such a word is NaN all the same, or no number: then they are read once more.
        parsed = _arrow(table, lines, wanted.places, types=wanted.plain, nulls=[""])
        return [_one(column) for column in parsed.columns]
    return None


def _typed(table: TextTable, lines: bytes, wanted: _Wanted) -> list[pa.Array]:
    """The columns as Arrow takes them, those whose type is known as that where it holds here."""
    parsed = None
    if wanted.types:
        with suppress(pa.ArrowInvalid):
            parsed = _arrow(table, lines, wanted.places, types=wanted.types)
    if parsed is None:
        parsed = _arrow(table, lines, wanted.places)
    columns = [_one(column) for column in parsed.columns]
    _keep_codes(table, lines, wanted.places, columns)
    return columns


def _keep_codes(
    table: TextTable, lines: bytes, places: Sequence[int], columns: list[pa.Array]
) -> None:
    """Puts text where Arrow made whole numbers of cells such as 007: the zeros are part of them."""
    whole = [i for i, column in enumerate(columns) if pa.types.is_integer(column.type)]
    if not whole or not may_hold_codes(lines):
        return
    again = [places[i] for i in whole]
    texts = _arrow(table, lines, again, types=dict.fromkeys(again, pa.string()))
    for i, column in zip(whole, texts.columns, strict=True):
        if holds_codes(_one(column)):
            columns[i] = _one(column)


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _arrow(
    table: TextTable,
    lines: bytes,
    wanted: Sequence[int],
    *,
    types: Mapping[int, pa.DataType] | None = None,
    nulls: Sequence[str] | None = None,
    keep: Any = None,
) -> pa.Table:
    names = [str(i) for i in range(table.width)]  # the user's may be twice there
    return pa_csv.read_csv(
        pa.BufferReader(lines),
        read_options=pa_csv.ReadOptions(
            use_threads=False, block_size=len(lines) + 1, column_names=names
        ),
        parse_options=pa_csv.ParseOptions(delimiter=table.mark, invalid_row_handler=keep),
        convert_options=pa_csv.ConvertOptions(
            include_columns=[str(i) for i in wanted],
            column_types={str(i): kind for i, kind in (types or {}).items()},
            null_values=["", *table.spelling.na] if nulls is None else nulls,
            decimal_point=table.spelling.decimal,
        ),
    )


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


def _reason(table: TextTable, refused: _Refused, row: int) -> str:
    """Why these lines, from `row` on, are no rows of this table."""
    check_utf8(table.path)
    bad: list[Any] = []

    def keep(found: Any) -> str:
        bad.append(found)
        return "skip"

    try:
        _arrow(table, refused.lines, range(table.width), keep=keep)
    except BROKEN as error:
        return _unreadable(table, str(error))
    if not bad:
        return _unreadable(table, refused.reason)
    return "\n".join(
        f"data.path: {table.path.name} row {row + found.number}{BELOW}: has "
        f"{found.actual_columns} cells where the header has {found.expected_columns} "
        f"({shorten(found.text)}); mend or drop the row"
        for found in bad[:MOST_SHOWN]
    )


def _unreadable(table: TextTable, reason: str) -> str:
    kind = {",": "comma", "\t": "tab"}[table.mark]
    return (
        f"data.path: {table.path.name} cannot be read as {kind}-separated text "
        f"({shorten(reason, 160)}); mend it or write it anew"
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
