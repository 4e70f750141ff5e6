"""Reads CSV and Parquet files into rows of numbers and a target. It never guesses: a column that
is text, a date, nested or decimal, a missing value, a short or long row, and two columns of one
name are refused by name, all of them at once. Importing this costs pyarrow's 0.1 s, so it is
imported only where such a file is read; pandas (0.3 s more) is never touched.
"""

from __future__ import annotations

import codecs
import csv
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv as pa_csv
from pyarrow import parquet as pa_parquet

from tasks.engine.columns import BROKEN, raw_rows, wrong_types
from tasks.engine.data_config import DataConfig
from tasks.engine.raw import (
    MOST_SHOWN,
    DataError,
    Raw,
    check_memory,
    listed,
    pick_target,
    shorten,
    source_file,
)

HEAD_BYTES = 16 * 1024**2  # the longest header, and the longest row
BELOW = " below the header"


def check_csv(data: DataConfig) -> None:
    """Raises DataError for a CSV whose first line cannot be that of a table with this target."""
    path = source_file(data)
    _target_of(_csv_header(path), data.target, path.name)


def read_csv(data: DataConfig) -> Raw:
    """The rows of a comma-separated UTF-8 file whose first line names the columns.

    Errors: DataError. Rows are counted from 1 below the header, blank lines left out.
    """
    path = source_file(data)
    names = _csv_header(path)
    target = _target_of(names, data.target, path.name)
    check_memory(4 * path.stat().st_size, f"data.path: {path.name}", "write it as npy")
    _check_utf8(path)
    table, bad = _parsed(path, threads=True)
    if bad:
        table, bad = _parsed(path, threads=False)  # only then are rows numbered
        raise DataError(_ragged(path.name, bad))
    if [name.strip() for name in table.column_names] != names:
        raise DataError(f"data.path: {path.name} has a header with unbalanced quotes; mend line 1")
    table = table.rename_columns(names)
    return raw_rows(table, target=target, label=path.name, note=BELOW)


def _check_utf8(path: Path) -> None:
    """Raises DataError at the first byte that is not UTF-8; pyarrow would print a traceback."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with open(path, "rb") as file:
        while True:
            block = file.read(HEAD_BYTES)
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                raise DataError(_not_utf8(path.name, line, error)) from None
            if not block:
                return
            line += block.count(b"\n")


def _not_utf8(label: str, line: int, error: UnicodeDecodeError) -> str:
    return (
        f"data.path: {label} line {line} is not UTF-8 "
        f"(at {error.object[max(0, error.start - 8) : error.start + 8]!r}); save it as UTF-8 "
        "(iconv -f LATIN1 -t UTF-8)"
    )


def _parsed(path: Path, *, threads: bool) -> tuple[pa.Table, list[Any]]:
    bad: list[Any] = []

    def keep(row: Any) -> str:
        if len(bad) < MOST_SHOWN or row.number is None:
            bad.append(row)
        return "skip"

    try:
        with pa.OSFile(str(path)) as file:  # not the path: a name in .gz would be unpacked
            table = pa_csv.read_csv(
                file,
                read_options=pa_csv.ReadOptions(use_threads=threads, block_size=HEAD_BYTES),
                parse_options=pa_csv.ParseOptions(invalid_row_handler=keep),
            )
    except BROKEN as error:
        raise DataError(
            f"data.path: {path.name} cannot be read as comma-separated text "
            f"({shorten(str(error), 160)}); mend it or write it anew"
        ) from None
    return table, bad


def _ragged(label: str, bad: Sequence[Any]) -> str:
    return "\n".join(
        f"data.path: {label} row {row.number - 1}{BELOW}: has {row.actual_columns} cells where "
        f"the header has {row.expected_columns} ({shorten(row.text)}); mend or drop the row"
        for row in bad[:MOST_SHOWN]
    )


def _csv_header(path: Path) -> list[str]:
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n")
    line = head.split(b"\n", 1)[0].split(b"\r", 1)[0]
    if head[:4096].count(0) > len(head[:4096]) // 8:
        raise DataError(
            f"data.path: {path.name} looks like UTF-16 or binary (it holds NUL bytes); "
            "save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"
        )
    try:
        cells = next(csv.reader(io.StringIO(line.decode("utf-8"))), [])
    except UnicodeDecodeError as error:
        raise DataError(_not_utf8(path.name, 1, error)) from None
    except csv.Error as error:
        raise DataError(f"data.path: {path.name} line 1 is no header ({error}); mend it") from None
    names = [cell.strip() for cell in cells]
    _comma_separated(names, path.name)
    return names


def _comma_separated(names: list[str], label: str) -> None:
    for mark, words in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(names) == 1 and mark in names[0]:
            raise DataError(
                f"data.path: {label} is separated by {words} ({shorten(names[0])}); "
                "separate its cells by commas"
            )


def _target_of(names: Sequence[str], target: str | None, label: str) -> str:
    """The target's column; raises DataError where names are missing or doubled."""
    problems = []
    double = sorted(name for name, times in Counter(names).items() if times > 1 and name)
    if double:
        problems.append(
            f"data.path: {label} has columns of one name: {listed(double)}; rename or drop one"
        )
    if "" in names:
        problems.append(
            f"data.path: {label} column {list(names).index('') + 1} has no name; name it, or drop "
            "it if it is a saved index (pandas: index=False)"
        )
    odd = [name for name in names if name and not name.isprintable()]
    if odd:
        problems.append(f"data.path: {label} has unprintable names: {listed(odd)}; rename them")
    try:
        chosen = pick_target(names, target, label)
        if len(names) < 2:
            problems.append(
                f"data.path: {label} has no column beside {chosen!r} to learn from; add features"
            )
    except DataError as error:
        problems.append(str(error))
        if any(_is_numeral(name) for name in names):
            problems.append(
                f"data.path: {label} has numbers for names; put the columns' names in line 1"
            )
    if problems:
        raise DataError("\n".join(problems))
    return chosen


def _is_numeral(name: str) -> bool:
    try:
        return float(name) == float(name)
    except ValueError:
        return False


def check_parquet(data: DataConfig) -> None:
    """Raises DataError for a Parquet file whose schema cannot be learnt from."""
    path = source_file(data)
    with _opened(path) as file:
        _schema(file, data.target, path.name)


def read_parquet(data: DataConfig) -> Raw:
    """The rows of a Parquet file; page checksums are verified where the file has them."""
    path = source_file(data)
    with _opened(path) as file:
        names, target = _schema(file, data.target, path.name)
        groups = range(file.metadata.num_row_groups)
        stored = sum(abs(file.metadata.row_group(i).total_byte_size) for i in groups)
        needed = stored + 8 * file.metadata.num_rows * len(names)
        check_memory(needed, f"data.path: {path.name}", "write it as npy")
        try:
            table = file.read(columns=names)
            table.validate(full=True)
        except BROKEN as error:
            raise DataError(_damaged(path.name, error)) from None
    return raw_rows(table, target=target, label=path.name, note="")


def _opened(path: Path) -> pa_parquet.ParquetFile:
    try:
        return pa_parquet.ParquetFile(path, page_checksum_verification=True)
    except BROKEN as error:
        raise DataError(_damaged(path.name, error)) from None


def _damaged(label: str, error: BaseException) -> str:
    return (
        f"data.path: {label} is damaged or no Parquet file "
        f"({shorten(str(error), 160)}); copy or write it anew"
    )


def _schema(file: pa_parquet.ParquetFile, target: str | None, label: str) -> tuple[list[str], str]:
    """The columns to read and the target among them."""
    try:
        schema, rows = file.schema_arrow, file.metadata.num_rows
    except BROKEN as error:
        raise DataError(_damaged(label, error)) from None
    # What pandas keeps its index in is no column of the table, and reading with pandas hides it.
    fields = [field for field in schema if not field.name.startswith("__index_level_")]
    names = [field.name for field in fields]
    chosen = _target_of(names, target, label)
    problems = [f"data.path: {label} has no rows; write some"] if rows <= 0 else []
    problems += wrong_types(fields, chosen, label)
    if problems:
        raise DataError("\n".join(problems))
    return names, chosen
