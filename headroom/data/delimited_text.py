"""Reads CSV and TSV, block by block: the first line names the columns and tells what separates
cells, and pyarrow reads the rows, with every cell as it is written. It refuses rows of another
width than the header, and what is not UTF-8, by row or line.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv as pa_csv

from headroom.data.source_data import MOST_SHOWN, DataError, format_size, shorten

MARKS = {"csv": ",", "tsv": "\t"}  # where the first line does not tell
OTHER_MARKS = ",;\t|"
BLOCK_BYTES = 2 << 20  # of text: larger blocks leave the processor's cache
HEAD_BYTES = 1 << 16  # that are read at once until the first line ends
LONGEST_BYTES = 16 << 20  # of a header, and of a row
TOO_LONG = "straddling"  # in what Arrow says of a row that is longer than a block
BELOW = " below the header"


@dataclass(frozen=True)
class DelimitedText:
    """A file of cells and how it is to be read."""

    path: Path
    mark: str  # between two cells
    names: tuple[str, ...]  # of the columns; in a file to predict one may be there twice
    start: int  # where the rows begin, in bytes
    block_bytes: int  # of text that is parsed at once
    is_written = True
    note = BELOW
    rows = None
    column_bytes = 0

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return (pa.string(),) * len(self.names)

    @property
    def amount(self) -> int:
        return self.path.stat().st_size

    def count_most_cells(self, columns: int) -> int:
        """Return the most cells that there may be: each takes a byte, of the mark behind it."""
        return self.amount

    def read(self, places: Sequence[int]) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield the rows; blank lines are left out.

        Errors: DataError for rows of another width than the header, and for what is not UTF-8.
        """
        seen = 0
        for size_bytes in (self.block_bytes, LONGEST_BYTES):  # where a row fits into no block
            # Each reader has its own, closed with the last reference to it: Arrow reads ahead in a
            # thread, which may still take a block from it after an error.
            file, skipped = pa.OSFile(os.fsencode(self.path)), 0
            try:
                for cells in _stream_rows(replace(self, block_bytes=size_bytes), file, places):
                    count = min(seen - skipped, cells.num_rows)
                    skipped, rest = skipped + count, cells.slice(count)
                    if rest.num_rows:
                        yield rest, file.tell()
                        seen = skipped = seen + rest.num_rows
                return
            except pa.ArrowException as error:
                if TOO_LONG not in str(error) or size_bytes >= LONGEST_BYTES:
                    raise DataError(_describe_bad_rows(self, str(error))) from None


def open_delimited(
    path: Path, source: str, *, allowed_bytes: int, skips_late: bool
) -> DelimitedText:
    """Open a table by its first line. allowed_bytes: what reading it may take. Errors:
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
    block_bytes = min(BLOCK_BYTES, max(1 << 19, allowed_bytes // 128))
    # Rows of many columns are about as long as their names.
    return DelimitedText(path, mark, names, start, max(block_bytes, 4 * len(line)))


def _split_header(line: str, rows: list[bytes], usual: str) -> tuple[str, list[str]]:
    """What separates cells, and those of the first line: as many as there can be, and as many as
    in the first row, where one mark makes it so."""
    lines, candidates = [line, *(row.decode(errors="replace") for row in rows)], []
    for mark in usual + OTHER_MARKS:
        cells, *others = csv.reader(lines, delimiter=mark)
        is_alike = len(cells) > 1 and all(len(other) == len(cells) for other in others)
        candidates.append((is_alike, len(cells), mark, cells))
    return max(candidates, key=lambda one: one[:2])[2:]


def _stream_rows(
    table: DelimitedText,
    file: pa.OSFile,
    places: Sequence[int],
    keep: Callable[[Any], str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """keep: is called with each row of another width than the header."""
    names = [str(i) for i in range(len(table.names))]
    file.seek(table.start)
    if not file.read(HEAD_BYTES).strip(b"\r\n") and file.tell() == file.size():
        return  # for which Arrow has no table
    file.seek(table.start)
    yield from pa_csv.open_csv(
        file,
        read_options=pa_csv.ReadOptions(
            block_size=table.block_bytes,
            column_names=names,
            use_threads=keep is None,  # else Arrow does not count the rows
        ),
        parse_options=pa_csv.ParseOptions(
            delimiter=table.mark, newlines_in_values=True, invalid_row_handler=keep
        ),
        convert_options=pa_csv.ConvertOptions(
            include_columns=[names[i] for i in places],
            column_types=dict.fromkeys(names, pa.string()),
        ),
    )


def _describe_bad_rows(table: DelimitedText, said: str) -> str:
    """Why the rows are not those of this table. said: by Arrow."""
    label = table.path.name
    too_long = (
        f"data.path: {label} has a row of more than {format_size(LONGEST_BYTES)}, or a quote "
        "that is never closed; mend it"
    )
    with open(table.path, "rb") as lines:
        number = 0
        while line := lines.readline(LONGEST_BYTES + 1):
            number += 1
            if len(line) > LONGEST_BYTES:  # it may be larger than the memory
                return too_long
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:  # in a bad row pyarrow would print a traceback
                return _describe_not_utf8(label, number, error)
    if TOO_LONG in said:
        return too_long
    bad: list[Any] = []

    def keep(row: Any) -> str:
        bad.append(row)
        return "skip"

    file = pa.OSFile(os.fsencode(table.path))
    with suppress(pa.ArrowException):
        for _ in _stream_rows(table, file, [0], keep):
            if bad:
                break
    if not bad:
        return (
            f"data.path: {label} cannot be read as text separated by {table.mark!r} "
            f"({shorten(said, 160)}); mend it or write it anew"
        )
    return "\n".join(
        f"data.path: {label} row {row.number}{BELOW}: has {row.actual_columns} cells where the "
        f"header has {row.expected_columns} ({shorten(row.text)}); mend or drop the row"
        for row in bad[:MOST_SHOWN]
    )


def _describe_not_utf8(label: str, line: int, error: UnicodeDecodeError) -> str:
    return (
        f"data.path: {label} line {line} is not UTF-8 "
        f"(at {error.object[max(0, error.start - 8) : error.start + 8]!r}); save it as UTF-8 "
        "(iconv -f LATIN1 -t UTF-8)"
    )
