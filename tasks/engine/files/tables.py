"""Reads CSV, TSV and Parquet into the columns of a table. The names of the columns decide
early, from the first line or the schema, which are left out, which is the target and which are
learnt from; then the rows are read in blocks, so that a table may be larger than memory. It
refuses what can't be learnt from all at once, each column by its name and its first bad cell.
Importing this costs pyarrow's 0.1 s, so it is imported only where such a file is read; pandas
(0.3 s more) is never touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from tasks.engine.files.columns import (
    CATEGORY,
    DATE,
    MIXED,
    NUMBER,
    OF_USE,
    TEXT,
    ColumnSource,
    ColumnSummary,
    Spool,
    Table,
    classify_type,
    describe_refused_type,
)
from tasks.engine.files.csv_blocks import (
    BELOW,
    BROKEN,
    TextTable,
    open_text_table,
    parse_as_text,
    read_cell,
    read_csv_blocks,
)
from tasks.engine.files.number_formats import Spelling, is_number
from tasks.engine.files.row_parts import compute_split_keys
from tasks.engine.files.source_data import (
    MOST_SHOWN,
    DataError,
    RawData,
    compute_allowed_bytes,
    describe_missing_name,
    find_source_file,
    find_source_files,
    format_list,
    format_size,
    pick_target,
    resolve_cache_folder,
    shorten,
)
from tasks.engine.models.raw_inputs import DATE_PARTS, NOTHING
from tasks.engine.settings.run_config import DataConfig


@dataclass(frozen=True)
class ChosenColumns:
    """The columns of a table by their place in it."""

    names: tuple[str, ...]  # of all
    features: tuple[int, ...]
    target: int
    notes: tuple[str, ...]

    @property
    def feature_names(self) -> tuple[str, ...]:
        return tuple(self.names[i] for i in self.features)

    @property
    def target_name(self) -> str:
        return self.names[self.target]


def choose_columns(names: Sequence[str], data: DataConfig, label: str) -> ChosenColumns:
    """Apply data.drop and data.target to a table's columns.

    Errors: DataError with a line for each name at fault.
    """
    aside = [*data.drop, *([data.split_column] if data.split_column is not None else [])]
    left = [name for name in names if name not in aside]
    unknown = [name for name in data.drop if name not in names]
    problems = [f"data.drop: {label} {describe_missing_name(name, names)}" for name in unknown]
    problems += _list_split_problems(names, data, label)
    problems += _list_name_problems(names, left, label)
    target = ""
    if data.target is not None and data.target == data.split_column:
        pass  # told already
    elif data.target is not None and data.target in data.drop:
        problems.append(
            f"data.drop: holds {shorten(data.target)}, which is data.target; take it out of one"
        )
    elif not left:
        problems.append(f"data.drop: leaves no column of {label}; keep the target and some others")
    else:
        try:
            target = pick_target(left, data.target, label)
        except DataError as error:
            problems.append(str(error))
            if any(is_number(name) for name in left):
                problems.append(
                    f"data.path: {label} has numbers for names; put the columns' names in line 1"
                )
        if target and len(left) < 2:
            gone = " that is not left out" if data.drop else ""
            problems.append(
                f"data.path: {label} has no column{gone} beside {target!r} to learn from; add "
                "features"
            )
    if problems:
        raise DataError("\n".join(problems))
    places = [i for i, name in enumerate(names) if name in left and name != target]
    notes = [f"left out by data.drop: {format_list(data.drop, 12)}"] if data.drop else []
    if data.split_column is not None:
        notes.append(f"split by {shorten(data.split_column)}, which is no feature")
    return ChosenColumns(tuple(names), tuple(places), list(names).index(target), tuple(notes))


def _list_split_problems(names: Sequence[str], data: DataConfig, label: str) -> list[str]:
    column = data.split_column
    if column is None:
        return []
    if column == data.target:
        return [f"data.split_column: is {shorten(column)}, the target; name another column"]
    if names.count(column) != 1:
        many = "has more than one" if column in names else describe_missing_name(column, names)
        told = f"{many} {shorten(column)}; rename one" if column in names else many
        return [f"data.split_column: {label} {told}"]
    return []


def _list_name_problems(names: Sequence[str], left: Sequence[str], label: str) -> list[str]:
    problems = []
    double = sorted(name for name, times in Counter(left).items() if times > 1 and name)
    if double:
        problems.append(
            f"data.path: {label} has columns of one name: {format_list(double)}; rename one, or "
            "leave "
            "them out by data.drop"
        )
    if "" in left:
        problems.append(
            f"data.path: {label} column {list(names).index('') + 1} has no name; name it, or leave "
            "it out by data.drop: [''] if it is a saved index (pandas: index=False)"
        )
    odd = [name for name in left if name and not name.isprintable()]
    if odd:
        problems.append(
            f"data.path: {label} has unprintable names: {format_list(odd)}; rename them"
        )
    return problems


def refuse_no_header(names: Sequence[str], label: str) -> None:
    """Raises DataError for a first line that is rather a row: numbers may be names where they rise,
    or are evenly apart, as wavelengths and years are."""
    steps = {b - a for a, b in pairwise(float(name) for name in names if is_number(name))}
    if steps and min(steps) <= 0 and (len(steps) > 1 or 0 in steps):
        raise DataError(
            f"data.path: {label} line 1 looks like a row, not like names "
            f"({format_list(names, 4)}); "
            "put the columns' names in line 1"
        )


PANDAS_INDEX = "__index_level_"
BUFFER_BYTES = 256 * 1024  # read at once of a column, instead of all of it in a row group


@dataclass(frozen=True)
class ParquetParts:
    """Parquet files of one schema."""

    files: tuple[Path, ...]
    counts: tuple[int, ...]  # rows of each, as it claims
    label: str
    chosen: ChosenColumns

    @property
    def rows(self) -> int:
        return sum(self.counts)

    def batches(self, *, together: int, rows: int) -> Iterator[tuple[list[int], pa.RecordBatch]]:
        """Yield so many rows of so many columns at once, the target first: their places among
        the features (the target's is after the last), and their values. All rows pass before
        the next columns. Errors: DataError for a file that is damaged."""
        features = self.chosen.features
        places = [len(features), *range(len(features))]
        for at in range(0, len(places), together):
            group = sorted(places[at : at + together])
            wanted = [self.chosen.names[(*features, self.chosen.target)[place]] for place in group]
            for path, count in zip(self.files, self.counts, strict=True):
                yield from (
                    (group, batch) for batch in read_parquet_batches(path, wanted, count, rows)
                )

    def column(self, name: str, *, rows: int) -> Iterator[pa.Array]:
        """Yield a column of all files, so many rows at once. Errors: DataError as
        `batches`."""
        for path, count in zip(self.files, self.counts, strict=True):
            yield from (
                batch.column(0) for batch in read_parquet_batches(path, [name], count, rows)
            )


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


def open_parquet_parts(files: Sequence[Path], data: DataConfig) -> ParquetParts:
    """Open Parquet files and compare their schemas.

    Errors: DataError where they differ, hold no rows, or have columns of no use.
    """
    first: list[pa.Field] = []
    counts = []
    label = files[0].name if len(files) == 1 else files[0].parent.name
    for path in files:
        with open_parquet_file(path) as file, _refuse_damaged(path):
            fields = list_fields(file.schema_arrow)
            counts.append(file.metadata.num_rows)
        first = first or fields
        _refuse_different_columns(first, fields, files[0].name, path.name)
    chosen = choose_columns([field.name for field in first], data, label)
    judged = [first[i] for i in (*chosen.features, chosen.target)]
    problems = []
    if sum(counts) <= 0 or min(counts) < 0:
        problems.append(f"data.path: {label} has no rows; write some")
    problems += [
        describe_refused_type(field.name, str(field.type), target=chosen.target_name, label=label)
        for field in judged
        if (kind := classify_type(field.type)) not in (*OF_USE, TEXT)
        or (kind == DATE and field.name == chosen.target_name)
    ]
    if problems:
        raise DataError("\n".join(problems))
    return ParquetParts(tuple(files), tuple(counts), label, chosen)


def list_fields(schema: pa.Schema) -> list[pa.Field]:
    """Return the columns of a table, without those that pandas keeps its index in and
    hides."""
    return [field for field in schema if not field.name.startswith(PANDAS_INDEX)]


def _refuse_different_columns(
    first: Sequence[pa.Field], fields: Sequence[pa.Field], name: str, other: str
) -> None:
    mine, theirs = (
        {field.name: _describe_type(field.type) for field in of} for of in (first, fields)
    )
    for column in {**mine, **theirs}:
        here, there = theirs.get(column, "missing"), mine.get(column, "missing")
        if here != there:
            raise DataError(
                f"data.path: {other} column {shorten(column)} is {here}, but in {name} it is "
                f"{there}; write all parts alike, or move it elsewhere"
            )


def _describe_type(kind: pa.DataType) -> str:
    # How wide the indices of a dictionary are depends on how many values a part happens to have.
    plain = f"dictionary of {kind.value_type}" if pa.types.is_dictionary(kind) else str(kind)
    return f"of type {plain}"


def open_parquet_file(path: Path) -> parquet.ParquetFile:
    """Open a Parquet file, of which nothing but its schema is read. Errors: DataError."""
    with _refuse_damaged(path):
        return parquet.ParquetFile(
            path, page_checksum_verification=True, buffer_size=BUFFER_BYTES, pre_buffer=False
        )


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


MIB = 1024**2
SMALLEST_ROW_BYTES = 6  # a target of one byte, its label, three masks
SPLIT_BYTES = {"random": 0, "time": 32, "group": 80}  # a row: keys, sorted, and their groups
WORK_BYTES = 24 * MIB  # blocks under way
BLOCK_BYTES = 4 * MIB  # of numbers; smaller ones take longer, for what each block costs
PAGE_BYTES = 4 * MIB  # of each Parquet column that is being read: pages of 1 MiB, packed and not


@dataclass(frozen=True)
class TableBudget:
    """How a table is read within its memory: bytes kept, rows of a block, columns at once."""

    kept_bytes: int  # of columns, before they go to a file
    block_rows: int  # of a block whose size is chosen
    together: int  # Parquet columns that are read at once


def plan_table_budget(data: DataConfig, *, columns: int) -> TableBudget:
    """Plan how to read a table within the host memory that preparing may take."""
    allowed = compute_allowed_bytes(data)
    return TableBudget(
        kept_bytes=allowed // 4,
        block_rows=max(1024, min(BLOCK_BYTES, allowed // 128) // (8 * columns)),
        together=max(1, allowed // 4 // PAGE_BYTES),
    )


def check_text_table(data: DataConfig) -> None:
    """Raises DataError for a CSV or TSV whose first line cannot be that of a table with this
    target."""
    table = _open_text(data)
    choose_columns(table.names, data, table.path.name)


def _open_text(data: DataConfig) -> TextTable:
    spelling = Spelling(data.decimal, tuple(NOTHING if data.na is None else data.na))
    allowed = compute_allowed_bytes(data)
    table = open_text_table(find_source_file(data), data.source, spelling, allowed_bytes=allowed)
    refuse_no_header(table.names, table.path.name)
    return table


def read_text_table(data: DataConfig) -> RawData:
    """Read a UTF-8 file whose first line names the columns, and decides what separates cells:
    commas, semicolons, tabs or bars.

    Errors: DataError. Rows are counted from 1 below the header, blank lines left out.
    """
    table = _open_text(data)
    label = table.path.name
    chosen = choose_columns(table.names, data, label)
    allowed = plan_table_budget(data, columns=len(chosen.features))

    def cell(name: str, row: int) -> str:
        return read_cell(table, table.names.index(name), row)

    origin = ColumnSource(label, BELOW, chosen.target_name, data.missing, table.spelling, cell)
    builder = TableBuilder(chosen, origin, data, allowed)
    places = [*chosen.features, chosen.target]
    for batch, _ in read_csv_blocks(table, places):
        builder.spool.reserve(batch.num_rows, block_rows=batch.num_rows)
        builder.add(range(len(places)), batch)
    mixed = builder.forget_mixed()
    if mixed:  # looked like numbers in some blocks: read as text in all of them
        again = [places[i] for i in mixed]
        for batch, _ in read_csv_blocks(table, again, [parse_as_text(again)]):
            builder.add(mixed, batch)
    if data.split_column is None:
        return builder.raw()
    place = [table.names.index(data.split_column)]
    column = (
        block.cells.column(0) for block in read_csv_blocks(table, place, [parse_as_text(place)])
    )
    return builder.raw(_read_split_keys(column, data, origin))


def check_parquet(data: DataConfig) -> None:
    """Raises DataError for Parquet whose schema cannot be learnt from."""
    open_parquet_parts(find_source_files(data), data)


def read_parquet(data: DataConfig) -> RawData:
    """Read a Parquet file, or all in a folder, in the order of their names; page checksums are
    verified where a file has them. Rows are counted from 1 over all files."""
    parts = open_parquet_parts(find_source_files(data), data)
    chosen = parts.chosen
    _check_row_memory(parts.rows, data, parts.label, row_bytes=SMALLEST_ROW_BYTES)
    allowed = plan_table_budget(data, columns=len(chosen.features))
    spelling = Spelling(na=tuple(data.na or ()))
    origin = ColumnSource(parts.label, "", chosen.target_name, data.missing, spelling, None)
    builder = TableBuilder(chosen, origin, data, allowed)
    builder.spool.reserve(parts.rows, block_rows=allowed.block_rows)
    for places, batch in parts.batches(together=allowed.together, rows=allowed.block_rows):
        builder.add(places, batch)
    if data.split_column is None:
        return builder.raw()
    column = parts.column(data.split_column, rows=allowed.block_rows)
    return builder.raw(_read_split_keys(column, data, origin))


def _read_split_keys(
    column: Iterable[pa.Array], data: DataConfig, origin: ColumnSource
) -> np.ndarray:
    words = origin.spelling.missing_words
    return compute_split_keys(column, data, label=origin.label, note=origin.note, nothing=words)


class TableBuilder:
    """Collects the blocks of a table: numbers and codes of features in a spool, the target
    beside it, and a summary of each column."""

    def __init__(
        self, chosen: ChosenColumns, origin: ColumnSource, data: DataConfig, allowed: TableBudget
    ) -> None:
        self._names, self._notes = chosen.feature_names, chosen.notes
        self._origin, self._data = origin, data
        count, folder = len(self._names), resolve_cache_folder(data)
        self.spool = Spool(count, folder=folder, kept_bytes=allowed.kept_bytes)
        self._columns = [self._column(place) for place in range(count + 1)]  # the target is last
        self._targets: list[np.ndarray] = []

    def _column(self, place: int) -> ColumnSummary:
        if place == len(self._names):
            return ColumnSummary(self._origin.target, self._origin, most=None)
        return ColumnSummary(self._names[place], self._origin)

    def add(self, places: Sequence[int], batch: pa.RecordBatch) -> None:
        """Add the next rows of the columns at these places, for which the spool has room."""
        for place, array in zip(places, batch.columns, strict=True):
            start = self._columns[place].rows
            values = self._columns[place].add(array)
            if place < len(self._names):
                self.spool.put(place, start, values)
            elif len(values):
                self._targets.append(_shrink_integers(values, self._columns[place].kind()))
        _check_row_memory(self.spool.rows, self._data, self._origin.label, row_bytes=self.row_bytes)

    def forget_mixed(self) -> list[int]:
        """Drop the columns that were numbers in some blocks and text in others, and return
        their places: they are to be added once more, as text."""
        mixed = [i for i, column in enumerate(self._columns) if column.kind() == MIXED]
        for place in mixed:
            self._columns[place] = self._column(place)
            if place == len(self._names):
                self._targets = []
        return mixed

    def raw(self, split_keys: np.ndarray | None = None) -> RawData:
        """Return the whole table. split_keys: of all rows. Raises DataError with a line for
        each column at fault."""
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
                name, words = shorten(column.name), format_list(sorted(column.na))
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
        return RawData(
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


def _shrink_integers(values: np.ndarray, kind: str) -> np.ndarray:
    """Of the target: in the smallest type of whole numbers that holds them, if they are such."""
    if kind == CATEGORY:
        values = np.where(np.isnan(values), -1, values).astype(np.int64)
    if values.dtype.kind in "iu":
        ends = (np.min_scalar_type(int(end)) for end in (values.min(), values.max()))
        return values.astype(np.result_type(*ends))
    return values.copy()  # not what lies in Arrow's memory


def _check_row_memory(rows: int, data: DataConfig, label: str, *, row_bytes: int) -> None:
    """Raises DataError where the labels and the split alone take more than there is."""
    needed, allowed = row_bytes * rows + WORK_BYTES, compute_allowed_bytes(data)
    if needed <= allowed:
        return
    setting = "data.path" if data.memory_mib is None else "data.memory_mib"
    remedy = "take fewer" if data.memory_mib is None else f"raise it to {-(-needed // MIB):,}"
    raise DataError(
        f"{setting}: {label} has {rows:,} rows or more, whose labels and split take about "
        f"{format_size(needed)} of memory, and there are {format_size(allowed)}; {remedy}"
    )
