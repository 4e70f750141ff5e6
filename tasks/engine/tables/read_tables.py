"""Reads CSV, TSV and Parquet into the columns of a table: from the first line or the schema it
tells early what can't be learnt from, and it reads in blocks, so that a table may be larger than
memory. Importing this costs pyarrow's 0.1 s, so it is imported only where such a file is read;
pandas (0.3 s more) is never touched.
"""

from __future__ import annotations

import csv
import io
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from tasks.engine.base.ordered_threads import usable_threads
from tasks.engine.files.number_formats import Spelling
from tasks.engine.files.source_data import (
    DataError,
    Raw,
    allowed_bytes,
    cache_folder,
    listed,
    shorten,
    source_file,
    source_files,
)
from tasks.engine.models.raw_inputs import NOTHING
from tasks.engine.settings.data_config import DataConfig
from tasks.engine.tables import parquet
from tasks.engine.tables.column_gathering import Gathering
from tasks.engine.tables.column_names import Chosen, choose, looks_headless
from tasks.engine.tables.csv_blocks import (
    BELOW,
    LONGEST_BYTES,
    TextTable,
    blocks,
    not_utf8,
    written,
)
from tasks.engine.tables.memory_budget import SMALLEST_ROW_BYTES, Budget, budget, check_rows
from tasks.engine.tables.spill_file import Spool

HEAD_ROWS, HEAD_BYTES = 50, 1 << 16  # held against the names
MARKS = {"csv": (",", "commas"), "tsv": ("\t", "tabs")}


def check_text(data: DataConfig) -> None:
    """Raises DataError for a CSV or TSV whose first line cannot be that of a table with this
    target."""
    path = source_file(data)
    choose(_header(path, data.source)[0], data, path.name)


def read_text(data: DataConfig) -> Raw:
    """The rows of a UTF-8 file of cells separated by commas (csv) or tabs (tsv), whose first line
    names the columns.

    Errors: DataError. Rows are counted from 1 below the header, blank lines left out.
    """
    path = source_file(data)
    names, start = _header(path, data.source)
    chosen = choose(names, data, path.name)
    allowed = budget(allowed_bytes(data), columns=len(chosen.features))
    table = TextTable(
        path,
        MARKS[data.source][0],
        start,
        width=len(names),
        block_bytes=allowed.block_bytes,
        threads=allowed.threads or usable_threads(),
        spelling=Spelling(data.decimal, tuple(NOTHING if data.na is None else data.na)),
    )
    gathering = _gathering(data, chosen, allowed, label=path.name, table=table)
    for block in blocks(table, chosen.features, chosen.target):
        gathering.append(block)
        check_rows(gathering.spool.rows, data, path.name, row_bytes=gathering.row_bytes)
    _once_more(gathering, table, chosen)
    raw = gathering.raw()
    return replace(raw, notes=chosen.notes + raw.notes)


def _once_more(gathering: Gathering, table: TextTable, chosen: Chosen) -> None:
    """Columns that looked like numbers in some blocks are read as text in all of them."""
    mixed = gathering.mixed()
    if not mixed:
        return
    target = chosen.target if chosen.target_name in mixed else None
    places = [i for i, name in enumerate(chosen.feature_names) if name in mixed]
    features = [chosen.features[i] for i in places]
    for block, start in zip(
        blocks(table, features, target, as_text=True), gathering.spool.starts, strict=False
    ):
        gathering.put(block, places, start)


def _gathering(
    data: DataConfig,
    chosen: Chosen,
    allowed: Budget,
    *,
    label: str,
    table: TextTable | None = None,
) -> Gathering:
    """table: the file of text, if it is one."""
    folder, kept = cache_folder(data), allowed.kept_bytes
    spool = Spool(len(chosen.features), folder=folder, kept_bytes=kept)

    def look(name: str, row: int) -> str:
        assert table is not None
        return written(table, chosen.names.index(name), row)

    return Gathering(
        chosen.feature_names,
        chosen.target_name,
        spool=spool,
        label=label,
        note="" if table is None else BELOW,
        data=data,
        look=None if table is None else look,
    )


def _header(path: Path, source: str) -> tuple[list[str], int]:
    """The names in the first line, and where the rows begin, in bytes."""
    with open(path, "rb") as file:
        whole = file.read(LONGEST_BYTES)
    head = whole.removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n")
    line = head.split(b"\n", 1)[0].split(b"\r", 1)[0]
    if head[:4096].count(0) > len(head[:4096]) // 8:
        raise DataError(
            f"data.path: {path.name} looks like UTF-16 or binary (it holds NUL bytes); "
            "save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"
        )
    try:
        text = line.decode("utf-8")
        cells = next(csv.reader(io.StringIO(text), delimiter=MARKS[source][0]), [])
    except UnicodeDecodeError as error:
        raise DataError(not_utf8(path.name, 1, error)) from None
    except csv.Error as error:
        raise DataError(f"data.path: {path.name} line 1 is no header ({error}); mend it") from None
    if text.count('"') % 2:
        raise DataError(f"data.path: {path.name} has a header with unbalanced quotes; mend line 1")
    names = [cell.strip() for cell in cells]
    _refuse_other_marks(names, source, path.name)
    if looks_headless(names, _first_rows(head[len(line) :], MARKS[source][0])):
        raise DataError(
            f"data.path: {path.name} line 1 looks like a row, not like names ({listed(names, 4)}); "
            "put the columns' names in line 1"
        )
    return names, len(whole) - len(head) + len(line)


def _first_rows(lines: bytes, mark: str) -> list[list[str]]:
    text = io.StringIO(lines[:HEAD_BYTES].decode("utf-8", "replace"))
    with suppress(csv.Error):
        return list(islice(csv.reader(text, delimiter=mark), HEAD_ROWS))
    return []


def _refuse_other_marks(names: list[str], source: str, label: str) -> None:
    others = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
    mine, words = MARKS[source]
    for mark, found in others.items():
        if len(names) == 1 and mark != mine and mark in names[0]:
            known = next((kind for kind, (other, _) in MARKS.items() if other == mark), None)
            remedy = f"set data.source to {known}" if known else f"separate its cells by {words}"
            raise DataError(
                f"data.path: {label} is separated by {found} ({shorten(names[0])}); {remedy}"
            )


def check_parquet(data: DataConfig) -> None:
    """Raises DataError for Parquet whose schema cannot be learnt from."""
    parquet.opened(source_files(data), data)


def read_parquet(data: DataConfig) -> Raw:
    """The rows of a Parquet file, or of all in a folder, in the order of their names; page
    checksums are verified where a file has them. Rows are counted from 1 over all files."""
    parts = parquet.opened(source_files(data), data)
    chosen, label = parts.chosen, parts.label
    check_rows(parts.rows, data, label, row_bytes=SMALLEST_ROW_BYTES)
    allowed = budget(allowed_bytes(data), columns=len(chosen.features))
    gathering = _gathering(data, chosen, allowed, label=label)
    gathering.spool.reserve(parts.rows, block_rows=allowed.block_rows)
    for block, places, start in parts.blocks(allowed):
        gathering.put(block, places, start)
        check_rows(parts.rows, data, label, row_bytes=gathering.row_bytes)
    raw = gathering.raw()
    return replace(raw, notes=chosen.notes + raw.notes)
