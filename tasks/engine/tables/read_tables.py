"""Reads CSV, TSV and Parquet into the columns of a table: from the first line or the schema it
tells early what can't be learnt from, and it reads in blocks, so that a table may be larger than
memory. What is refused when all blocks have passed is told all at once, each column by its name and
its first bad cell. Importing this costs pyarrow's 0.1 s, so it is imported only where such a file
is read; pandas (0.3 s more) is never touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tasks.engine.files.number_formats import Spelling
from tasks.engine.files.source_data import (
    MOST_SHOWN,
    DataError,
    Raw,
    allowed_bytes,
    cache_folder,
    listed,
    shorten,
    size,
    source_file,
    source_files,
)
from tasks.engine.models.raw_inputs import DATE_PARTS, NOTHING
from tasks.engine.settings.data_config import DataConfig
from tasks.engine.tables import parquet
from tasks.engine.tables.columns import CATEGORY, DATE, MIXED, NUMBER, ColumnSummary, Origin
from tasks.engine.tables.columns_table import Spool, Table
from tasks.engine.tables.csv_blocks import BELOW, TextTable, as_text, batches, opened, written
from tasks.engine.tables.split_column import keys_of
from tasks.engine.tables.table_header import Chosen, choose, refuse_no_header

MIB = 1024**2
SMALLEST_ROW_BYTES = 6  # a target of one byte, its label, three masks
SPLIT_BYTES = {"random": 0, "time": 32, "group": 80}  # a row: keys, sorted, and their groups
WORK_BYTES = 24 * MIB  # blocks under way
BLOCK_BYTES = 4 * MIB  # of numbers; smaller ones take longer, for what each block costs
PAGE_BYTES = 4 * MIB  # of each Parquet column that is being read: pages of 1 MiB, packed and not


@dataclass(frozen=True)
class Budget:
    """How a table is read within its memory."""

    kept_bytes: int  # of columns, before they go to a file
    block_rows: int  # of a block whose size is chosen
    together: int  # Parquet columns that are read at once


def budget(data: DataConfig, *, columns: int) -> Budget:
    """Within the bytes of host memory that there are for all that preparing takes."""
    allowed = allowed_bytes(data)
    return Budget(
        kept_bytes=allowed // 4,
        block_rows=max(1024, min(BLOCK_BYTES, allowed // 128) // (8 * columns)),
        together=max(1, allowed // 4 // PAGE_BYTES),
    )


def check_text(data: DataConfig) -> None:
    """Raises DataError for a CSV or TSV whose first line cannot be that of a table with this
    target."""
    table = _text(data)
    choose(table.names, data, table.path.name)


def _text(data: DataConfig) -> TextTable:
    spelling = Spelling(data.decimal, tuple(NOTHING if data.na is None else data.na))
    allowed = allowed_bytes(data)
    table = opened(source_file(data), data.source, spelling, allowed_bytes=allowed)
    refuse_no_header(table.names, table.path.name)
    return table


def read_text(data: DataConfig) -> Raw:
    """The rows of a UTF-8 file whose first line names the columns, and tells by what cells are
    separated: commas, semicolons, tabs or bars.

    Errors: DataError. Rows are counted from 1 below the header, blank lines left out.
    """
    table = _text(data)
    label = table.path.name
    chosen = choose(table.names, data, label)
    allowed = budget(data, columns=len(chosen.features))

    def cell(name: str, row: int) -> str:
        return written(table, table.names.index(name), row)

    origin = Origin(label, BELOW, chosen.target_name, data.missing, table.spelling, cell)
    builder = TableBuilder(chosen, origin, data, allowed)
    places = [*chosen.features, chosen.target]
    for batch, _ in batches(table, places):
        builder.spool.reserve(batch.num_rows, block_rows=batch.num_rows)
        builder.add(range(len(places)), batch)
    mixed = builder.forget_mixed()
    if mixed:  # looked like numbers in some blocks: read as text in all of them
        again = [places[i] for i in mixed]
        for batch, _ in batches(table, again, [as_text(again)]):
            builder.add(mixed, batch)
    if data.split_column is None:
        return builder.raw()
    place = [table.names.index(data.split_column)]
    column = (block.cells.column(0) for block in batches(table, place, [as_text(place)]))
    return builder.raw(_split_keys(column, data, origin))


def check_parquet(data: DataConfig) -> None:
    """Raises DataError for Parquet whose schema cannot be learnt from."""
    parquet.opened(source_files(data), data)


def read_parquet(data: DataConfig) -> Raw:
    """The rows of a Parquet file, or of all in a folder, in the order of their names; page
    checksums are verified where a file has them. Rows are counted from 1 over all files."""
    parts = parquet.opened(source_files(data), data)
    chosen = parts.chosen
    _check_rows(parts.rows, data, parts.label, row_bytes=SMALLEST_ROW_BYTES)
    allowed = budget(data, columns=len(chosen.features))
    spelling = Spelling(na=tuple(data.na or ()))
    origin = Origin(parts.label, "", chosen.target_name, data.missing, spelling, None)
    builder = TableBuilder(chosen, origin, data, allowed)
    builder.spool.reserve(parts.rows, block_rows=allowed.block_rows)
    for places, batch in parts.batches(together=allowed.together, rows=allowed.block_rows):
        builder.add(places, batch)
    if data.split_column is None:
        return builder.raw()
    column = parts.column(data.split_column, rows=allowed.block_rows)
    return builder.raw(_split_keys(column, data, origin))


def _split_keys(column: Iterable[pa.Array], data: DataConfig, origin: Origin) -> np.ndarray:
    words = origin.spelling.missing_words
    return keys_of(column, data, label=origin.label, note=origin.note, nothing=words)


class TableBuilder:
    """Holds what has passed of a table: numbers and codes of features in a spool, the target beside
    it, and what was seen of each column."""

    def __init__(self, chosen: Chosen, origin: Origin, data: DataConfig, allowed: Budget) -> None:
        self._names, self._notes = chosen.feature_names, chosen.notes
        self._origin, self._data = origin, data
        count, folder = len(self._names), cache_folder(data)
        self.spool = Spool(count, folder=folder, kept_bytes=allowed.kept_bytes)
        self._columns = [self._column(place) for place in range(count + 1)]  # the target is last
        self._targets: list[np.ndarray] = []

    def _column(self, place: int) -> ColumnSummary:
        if place == len(self._names):
            return ColumnSummary(self._origin.target, self._origin, most=None)
        return ColumnSummary(self._names[place], self._origin)

    def add(self, places: Sequence[int], batch: pa.RecordBatch) -> None:
        """The next rows of the columns at these places, for which the spool has room."""
        for place, array in zip(places, batch.columns, strict=True):
            start = self._columns[place].rows
            values = self._columns[place].add(array)
            if place < len(self._names):
                self.spool.put(place, start, values)
            elif len(values):
                self._targets.append(_smallest(values, self._columns[place].kind()))
        _check_rows(self.spool.rows, self._data, self._origin.label, row_bytes=self.row_bytes)

    def forget_mixed(self) -> list[int]:
        """The places of the columns that were numbers in some blocks and text in others: to be
        added once more, as text."""
        mixed = [i for i, column in enumerate(self._columns) if column.kind() == MIXED]
        for place in mixed:
            self._columns[place] = self._column(place)
            if place == len(self._names):
                self._targets = []
        return mixed

    def raw(self, split_keys: np.ndarray | None = None) -> Raw:
        """The whole table. split_keys: of all rows. Raises DataError with a line for each column
        at fault."""
        label, (*features, target) = self._origin.label, self._columns
        if not self.spool.rows:
            raise DataError(f"data.path: {label} has no rows{self._origin.note}; write some")
        problems = [said for column in (target, *features) if (said := column.problem())]
        if problems:
            more = len(problems) - MOST_SHOWN
            rest = [f"data.path: and {more} more columns like these"] if more > 0 else []
            raise DataError("\n".join(problems[:MOST_SHOWN] + rest))
        table = Table(
            names=self._names,
            words=tuple(tuple(c.words) if c.kind() == CATEGORY else None for c in features),
            dates=tuple(
                DATE_PARTS[: 5 if c.has_times else 4] if c.kind() == DATE else () for c in features
            ),
            whole=tuple(c.kind() == NUMBER and c.whole for c in features),
            holes=tuple(c.holes for c in features),
            spool=self.spool,
            missing=self._data.missing,
        )
        notes = list(self._notes)
        for column in features:
            if column.na:
                name, words = shorten(column.name), listed(sorted(column.na))
                notes.append(f"{words} was read as missing in {name} (data.na)")
        values, kept = self._target(), None
        if self._data.missing == "drop" and any(table.holes):
            kept = table.whole_rows()
            table, values = table.only(kept), values[kept]
            split_keys = None if split_keys is None else split_keys[kept]
            left_out = len(kept) - len(table)
            if not len(table):
                raise DataError(
                    f"data.missing: drop would leave no row of {label}: each of its {left_out:,} "
                    "has a missing value; set it to mean, or leave columns out by data.drop"
                )
            notes += [f"{left_out:,} of {len(kept):,} rows with missing values were left out"]
        return Raw(
            features=table,
            target=values,
            feature_names=self._names,
            target_name=target.name,
            label=label,
            row_note=self._origin.note,
            notes=tuple(notes),
            kept=kept,
            split_keys=split_keys,
            decimal=self._data.decimal if self._origin.written else None,
            na=self._data.na,
        )

    def _target(self) -> np.ndarray:
        values, known = np.concatenate(self._targets), self._columns[-1].words
        self._targets = []
        if self._columns[-1].kind() == NUMBER:
            return values
        words = np.empty(len(known), dtype=object)
        words[:] = list(known)
        return words[values]

    @property
    def row_bytes(self) -> int:
        """What each row takes of memory beside its features, from its reading to the split: the
        target, its label, the masks, and text as an array of objects; what it is split by, sorted
        and in order."""
        kinds = {values.dtype for values in self._targets}
        value_bytes = np.result_type(*kinds).itemsize if kinds else 1
        text_bytes = 8 if self._columns[-1].kind() == CATEGORY else 0
        split_bytes = SPLIT_BYTES[self._data.split]
        return 2 * value_bytes + 4 + text_bytes + split_bytes


def _smallest(values: np.ndarray, kind: str) -> np.ndarray:
    """Of the target: in the smallest type of whole numbers that holds them, if they are such."""
    if kind == CATEGORY:
        values = np.where(np.isnan(values), -1, values).astype(np.int64)
    if values.dtype.kind in "iu":
        ends = (np.min_scalar_type(int(end)) for end in (values.min(), values.max()))
        return values.astype(np.result_type(*ends))
    return values.copy()  # not what lies in Arrow's memory


def _check_rows(rows: int, data: DataConfig, label: str, *, row_bytes: int) -> None:
    """Raises DataError where the labels and the split alone take more than there is."""
    needed, allowed = row_bytes * rows + WORK_BYTES, allowed_bytes(data)
    if needed <= allowed:
        return
    setting = "data.path" if data.memory_mib is None else "data.memory_mib"
    remedy = "take fewer" if data.memory_mib is None else f"raise it to {-(-needed // MIB):,}"
    raise DataError(
        f"{setting}: {label} has {rows:,} rows or more, whose labels and split take about "
        f"{size(needed)} of memory, and there are {size(allowed)}; {remedy}"
    )
