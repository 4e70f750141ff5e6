"""Reads the files that hold a table, block by block: text, whose first line names the columns and
whose rows pyarrow reads with every cell as it is written, and Parquet. It refuses rows of another
width than the header, what is not UTF-8, and a damaged file, by row, line or part.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv as pa_csv
from pyarrow import parquet

from tasks.engine.files.source_data import MOST_SHOWN, DataError, format_size, shorten

MARKS = {"csv": ",", "tsv": "\t"}  # where the first line does not tell
OTHER_MARKS = ",;\t|"
BLOCK_BYTES = 2 << 20  # of text: larger blocks leave the processor's cache
HEAD_BYTES = 1 << 16  # that are read at once until the first line ends
LONGEST_BYTES = 16 << 20  # of a header, and of a row
TOO_LONG = "straddling"  # in what Arrow says of a row that is longer than a block
BELOW = " below the header"


@dataclass(frozen=True)
class TextTable:
    """A file of cells and how it is to be read."""

    path: Path
    mark: str  # between two cells
    names: tuple[str, ...]  # of the columns; in a file to predict one may be there twice
    start: int  # where the rows begin, in bytes
    block_bytes: int  # of text that is parsed at once


def open_text_table(path: Path, source: str, *, allowed_bytes: int = 1 << 30) -> TextTable:
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
    block_bytes = min(BLOCK_BYTES, max(1 << 19, allowed_bytes // 128))
    # Rows of many columns are about as long as their names.
    return TextTable(path, mark, names, start, max(block_bytes, 4 * len(line)))


def _split_header(line: str, rows: list[bytes], usual: str) -> tuple[str, list[str]]:
    """What separates cells, and those of the first line: as many as there can be, and as many as
    in the first row, where one mark makes it so."""
    lines, found = [line, *(row.decode(errors="replace") for row in rows)], []
    for mark in usual + OTHER_MARKS:
        cells, *others = csv.reader(lines, delimiter=mark)
        is_alike = len(cells) > 1 and all(len(other) == len(cells) for other in others)
        found.append((is_alike, len(cells), mark, cells))
    return max(found, key=lambda one: one[:2])[2:]


def read_text_rows(table: TextTable, places: Sequence[int]) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yield some rows of the columns at these places, each cell as it is written, and how much of
    the file has been read, in bytes.

    Errors: DataError for rows of another width than the header, and for what is not UTF-8.
    """
    # Closed with the last reference to it: Arrow reads ahead in a thread of its own.
    seen, file = 0, pa.OSFile(os.fsencode(table.path))
    for size_bytes in (table.block_bytes, LONGEST_BYTES):  # where a row fits into no block
        skipped = 0
        try:
            for cells in _stream_rows(replace(table, block_bytes=size_bytes), file, places):
                known = min(seen - skipped, cells.num_rows)
                skipped, rest = skipped + known, cells.slice(known)
                if rest.num_rows:
                    yield rest, file.tell()
                    seen = skipped = seen + rest.num_rows
            return
        except pa.ArrowException as error:
            if TOO_LONG not in str(error) or size_bytes >= LONGEST_BYTES:
                raise DataError(_describe_bad_rows(table, str(error))) from None


def read_cell(table: TextTable, place: int, row: int) -> str:
    """Return a cell of the column at `place` as it is written; the file is read up to it."""
    for cells, _ in read_text_rows(table, [place]):
        if row < len(cells):
            return str(cells[0][row].as_py())
        row -= len(cells)
    return ""


def _stream_rows(
    table: TextTable,
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


def _describe_bad_rows(table: TextTable, said: str) -> str:
    """Why the rows are not those of this table. said: by Arrow."""
    label = table.path.name
    with open(table.path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:  # in a bad row pyarrow would print a traceback
                return _describe_not_utf8(label, number, error)
    if TOO_LONG in said:
        return (
            f"data.path: {label} has a row of more than {format_size(LONGEST_BYTES)}, or a quote "
            "that is never closed; mend it"
        )
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


PANDAS_INDEX = "__index_level_"
BUFFER_BYTES = 256 * 1024  # read at once of a column, instead of all of it in a row group
PYTHONS = (OSError, ValueError, TypeError, LookupError, ArithmeticError, BufferError, MemoryError)
BROKEN = (pa.ArrowException, RuntimeError, *PYTHONS)  # what Arrow raises


def open_parquet_file(path: Path) -> parquet.ParquetFile:
    """Open a Parquet file, of which nothing but its schema is read. Errors: DataError."""
    with _refuse_damaged(path):
        return parquet.ParquetFile(
            path, page_checksum_verification=True, buffer_size=BUFFER_BYTES, pre_buffer=False
        )


def read_schema(path: Path) -> tuple[list[pa.Field], int]:
    """Return the columns of a file, without those that pandas keeps its index in and hides, and
    how many rows it claims. Errors: DataError."""
    with open_parquet_file(path) as file, _refuse_damaged(path):
        fields = [f for f in file.schema_arrow if not f.name.startswith(PANDAS_INDEX)]
        return fields, file.metadata.num_rows


def read_common_schema(files: Sequence[Path]) -> tuple[list[pa.Field], list[int]]:
    """Return the columns that all parts have, and how many rows each claims.

    Errors: DataError where they differ.
    """
    found = [read_schema(path) for path in files]
    first = {field.name: _describe_type(field.type) for field in found[0][0]}
    for path, (fields, _) in zip(files, found, strict=True):
        mine = {field.name: _describe_type(field.type) for field in fields}
        for column in {**first, **mine}:
            here, there = mine.get(column, "missing"), first.get(column, "missing")
            if here != there:
                raise DataError(
                    f"data.path: {path.name} column {shorten(column)} is {here}, but in "
                    f"{files[0].name} it is {there}; write all parts alike, or move it elsewhere"
                )
    return found[0][0], [count for _, count in found]


def read_parquet_batches(
    path: Path, names: list[str], count: int, rows: int
) -> Iterator[pa.RecordBatch]:
    """Yield so many rows of these columns at once. count: of the file's rows, as it claims.

    Errors: DataError for a file that is damaged.
    """
    seen = 0
    with open_parquet_file(path) as file, _refuse_damaged(path):
        for batch in file.iter_batches(batch_size=rows, columns=names):
            batch.validate(full=True)
            seen += batch.num_rows
            if seen <= count:
                yield batch.select(names)
        if seen != count:
            raise ValueError(f"it claims {count:,} rows and holds {seen:,}")


def _describe_type(kind: pa.DataType) -> str:
    # How wide the indices of a dictionary are depends on how many values a part happens to have.
    plain = f"dictionary of {kind.value_type}" if pa.types.is_dictionary(kind) else str(kind)
    return f"of type {plain}"


@contextmanager
def _refuse_damaged(path: Path) -> Iterator[None]:
    """What Arrow says of a file is that it is damaged."""
    try:
        yield
    except BROKEN as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"data.path: {path.name} is damaged or no Parquet file "
            f"({shorten(str(error), 160)}); copy or write it anew"
        ) from None
