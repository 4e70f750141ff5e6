"""Reads files of any format that holds a table into its columns. Their names decide early, as the
head of the file tells them, which are left out, which is the target and which are learnt
from; then the rows are read in blocks, so that a table may be larger than memory. It refuses what
can't be learnt from all at once, each column by its name and its first bad cell. pandas, whose
import costs 0.3 s, is never touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa

from headroom.base.raw_inputs import NOTHING
from headroom.base.threads import read_ahead
from headroom.data.columns import (
    CATEGORY,
    DATE,
    OF_USE,
    TEXT,
    WAYS,
    ColumnSource,
    ColumnSummary,
    Spelling,
    classify_type,
    describe_refused_type,
    is_number,
)
from headroom.data.prepared_cache import check_disk_room
from headroom.data.readers import TableFile, open_table, read_cell
from headroom.data.source_data import (
    MOST_SHOWN,
    DataError,
    RawData,
    compute_allowed_bytes,
    describe_missing_name,
    find_source_files,
    format_list,
    format_size,
    pick_target,
    resolve_cache_folder,
    shorten,
)
from headroom.data.split_column import compute_split_keys
from headroom.data.table_store import VALUE_BYTES, RowStore, Table
from headroom.settings.file_formats import FORMATS
from headroom.settings.run_config import DataConfig


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

    @property
    def places(self) -> tuple[int, ...]:
        """Of those that are learnt from, and the target's."""
        return (*self.features, self.target)


def choose_columns(
    names: Sequence[str], data: DataConfig, label: str, *, useless: Sequence[str] = ()
) -> ChosenColumns:
    """Apply data.args.drop and data.target to a table's columns. useless: columns of types that
    nothing can be learnt from, which rows may still be split by.

    Errors: DataError with a line for each name at fault.
    """
    by = data.split_column
    # A time is learnt from: what is sold in the morning, on a Sunday, and more each year.
    is_aside = data.split_by != "time" or by in useless
    drop = data.table.drop
    left = [name for name in names if name not in drop and not (is_aside and name == by)]
    unknown = [name for name in drop if name not in names]
    problems = [f"data.args.drop: {label} {describe_missing_name(name, names)}" for name in unknown]
    problems += _list_split_problems(names, data, label)
    problems += _list_name_problems(names, left, label)
    target = ""
    if data.target is not None and data.target == data.split_column:
        pass  # told already
    elif data.target is not None and data.target in data.table.drop:
        problems.append(
            f"data.args.drop: holds {shorten(data.target)}, which is data.target; take it out of "
            "one"
        )
    elif not left:
        problems.append(
            f"data.args.drop: leaves no column of {label}; keep the target and some others"
        )
    else:
        try:
            target = pick_target([name for name in left if name != by], data.target, label)
        except DataError as error:
            problems.append(str(error))
            if FORMATS[data.source].is_delimited and any(is_number(name) for name in left):
                problems.append(
                    f"data.path: {label} has numbers for names; put the columns' names in line 1"
                )
        if target and len(left) < 2:
            gone = " that is not left out" if data.table.drop else ""
            problems.append(
                f"data.path: {label} has no column{gone} beside {target!r} to learn from; add "
                "features"
            )
    if problems:
        raise DataError("\n".join(problems))
    places = [i for i, name in enumerate(names) if name in left and name != target]
    notes = [f"left out by data.args.drop: {format_list(drop, 12)}"] if drop else []
    if by is not None:
        notes.append(f"split by {shorten(by)}" + ("" if by in left else ", which is no feature"))
    return ChosenColumns(tuple(names), tuple(places), list(names).index(target), tuple(notes))


def _list_split_problems(names: Sequence[str], data: DataConfig, label: str) -> list[str]:
    column = data.split_column
    if column is None:
        return []
    if column == data.target:
        return [f"data.split: is {shorten(column)}, the target; name another column"]
    if names.count(column) != 1:
        many = "has more than one" if column in names else describe_missing_name(column, names)
        problem = f"{many} {shorten(column)}; rename one" if column in names else many
        return [f"data.split: {label} {problem}"]
    return []


def _list_name_problems(names: Sequence[str], left: Sequence[str], label: str) -> list[str]:
    problems = []
    double = sorted(name for name, times in Counter(left).items() if times > 1 and name)
    if double:
        problems.append(
            f"data.path: {label} has columns of one name: {format_list(double)}; rename one, or "
            "leave them out by data.args.drop"
        )
    if "" in left:
        problems.append(
            f"data.path: {label} column {list(names).index('') + 1} has no name; name it, or leave "
            "it out by data.args.drop: [''] if it is a saved index (pandas: index=False)"
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
            f"({format_list(names, 4)}); put the columns' names in line 1"
        )


MIB = 1024**2
SPLIT_BYTES = {"random": 0, "time": 32, "group": 80}  # a row: keys, sorted, and their groups
KEPT = 4  # a fourth of the memory may hold the features; else they lie in a file
WORK_BYTES = 24 * MIB  # blocks under way
BLOCK_BYTES = MIB  # of numbers that are kept together: more leave the cache of the processor


@dataclass(frozen=True)
class SourceTable:
    """A file, or several parts of a folder that have the same columns."""

    parts: Sequence[TableFile]
    label: str
    rows: int | None  # of all parts; None where only reading tells
    chosen: ChosenColumns

    def read(self, places: Sequence[int]) -> Iterator[pa.RecordBatch]:
        """Yield all rows of the columns at these places."""
        for part in self.parts:
            for rows, _ in part.read(places):
                yield rows

    def read_cell(self, name: str, row: int) -> str:
        """Return a cell as it is written. Only folders of typed columns have several parts."""
        return read_cell(self.parts[0], self.chosen.names.index(name), row)


def check_table(data: DataConfig) -> None:
    """Raises DataError for a table whose head says that it cannot be learnt from."""
    _open_source(data)


def _open_source(data: DataConfig) -> SourceTable:
    allowed = compute_allowed_bytes(data)
    files = find_source_files(data)
    label = files[0].name if len(files) == 1 else files[0].parent.name
    parts = [open_table(path, data.source, allowed_bytes=allowed) for path in files]
    refuse_different_parts(parts)
    names, types = parts[0].names, parts[0].types
    if FORMATS[data.source].is_delimited:
        refuse_no_header(names, label)
    kinds = [classify_type(arrow_type) for arrow_type in types]
    useless = [name for name, kind in zip(names, kinds, strict=True) if kind not in OF_USE]
    chosen = choose_columns(names, data, label, useless=useless)
    problems = []
    counts = [part.rows for part in parts if part.rows is not None]
    if counts and (sum(counts) <= 0 or min(counts) < 0):
        problems.append(f"data.path: {label} has no rows; write some")
    for i in chosen.places:
        target = chosen.target_name
        if kinds[i] not in OF_USE or (kinds[i] == DATE and names[i] == target):
            refused = describe_refused_type(names[i], str(types[i]), target=target, label=label)
            problems.append(refused)
    if problems:
        raise DataError("\n".join(problems))
    return SourceTable(parts, label, sum(counts) if counts else None, chosen)


def refuse_different_parts(parts: Sequence[TableFile]) -> None:
    """Raises DataError where parts of a folder have not the same columns."""

    def list_columns(part: TableFile) -> dict[str, str]:
        return {n: _describe_type(t) for n, t in zip(part.names, part.types, strict=True)}

    first = list_columns(parts[0])
    for part in parts[1:]:
        mine = list_columns(part)
        for column in {**first, **mine}:
            here, there = mine.get(column, "missing"), first.get(column, "missing")
            if here != there:
                raise DataError(
                    f"data.path: {part.path.name} column {shorten(column)} is {here}, but in "
                    f"{parts[0].path.name} it is {there}; write all parts alike, or move it "
                    "elsewhere"
                )


def _describe_type(kind: pa.DataType) -> str:
    # How wide the indices of a dictionary are depends on how many values a part happens to have.
    plain = f"dictionary of {kind.value_type}" if pa.types.is_dictionary(kind) else str(kind)
    return f"of type {plain}"


def read_table(data: DataConfig) -> RawData:
    """Read all rows of a table: of cells that are written the kinds of columns are found as they
    come, of others they are known.

    Errors: DataError. Rows are counted from 1, over all parts.
    """
    table = _open_source(data)
    chosen, allowed, first = table.chosen, compute_allowed_bytes(data), table.parts[0]
    missing_words = data.table.na
    if missing_words is None:
        missing_words = list(NOTHING) if first.is_written else []
    origin = ColumnSource(
        table.label,
        first.note,
        chosen.target_name,
        data.table.missing,
        Spelling(data.table.decimal, tuple(missing_words)),
        table.read_cell if first.is_written else None,
        data.table.decimal if FORMATS[data.source].is_delimited else None,
    )
    ways = WAYS if first.is_written else ()
    columns = [
        ColumnSummary(chosen.names[i], origin, first.types[i], ways=ways) for i in chosen.places
    ]
    cells = sum(part.count_most_cells(len(chosen.features)) for part in table.parts)
    block_rows = min(BLOCK_BYTES, allowed // 128) // (VALUE_BYTES * len(chosen.features))
    least = 1 if first.is_written else 1024  # a line of many cells is long
    builder = TableBuilder(
        chosen, columns, data, VALUE_BYTES * cells, block_rows=max(least, block_rows)
    )
    if table.rows is not None:
        builder.expect(table.rows)
    together = max(1, allowed // 4 // first.column_bytes) if first.column_bytes else 1 << 30
    return builder.read(table.read, together=together)


class TableBuilder:
    """Collects the blocks of a table: the features in a store, the target beside it, and a
    summary of each column, of which the target's is the last."""

    def __init__(
        self,
        chosen: ChosenColumns,
        columns: list[ColumnSummary],
        data: DataConfig,
        most_bytes: int,
        *,
        block_rows: int,
    ) -> None:
        """most_bytes: of the features, at most. block_rows: that are kept together."""
        self._chosen, self._columns, self._data = chosen, columns, data
        self._origin = columns[-1].origin
        is_small = most_bytes <= compute_allowed_bytes(data) // KEPT
        folder = resolve_cache_folder(data)
        self._store = RowStore(len(columns) - 1, folder, block_rows=block_rows, is_small=is_small)
        self._targets: list[np.ndarray] = []
        columns[-1].most = None

    def expect(self, rows: int) -> None:
        """Make room for so many rows more. Raises DataError where there is none."""
        rows_then = self._store.rows + rows
        _check_row_memory(rows_then, self._data, self._origin.label, row_bytes=self.row_bytes)
        check_disk_room(resolve_cache_folder(self._data), VALUE_BYTES * rows * self._store.columns)
        self._store.reserve(rows)

    def read(
        self,
        source: Callable[[Sequence[int]], Iterator[pa.RecordBatch]],
        *,
        together: int = 1 << 30,
    ) -> RawData:
        """Read and return the whole table. source: yields all rows of the columns at some places,
        of which so many are read together.

        Raises DataError with a line for each column at fault.
        """
        left = [len(self._columns) - 1, *range(len(self._columns) - 1)]  # the target first
        while left:
            for some in (left[at : at + together] for at in range(0, len(left), together)):
                start = 0
                for rows in read_ahead(source([self._chosen.places[i] for i in some])):
                    self._add(some, rows.columns, start)
                    start += rows.num_rows
            left = [i for i in left if self._columns[i].is_stale]
            for i in left:
                self._columns[i] = self._columns[i].start_anew()
        by = self._data.split_column
        split_by = () if by is None else source([self._chosen.names.index(by)])
        return self._make_raw(rows.column(0) for rows in split_by)

    def _add(self, places: Sequence[int], arrays: Sequence[pa.Array], start: int) -> None:
        """Add rows of some columns; start: the first of them."""
        end = start + len(arrays[0])
        if end > self._store.rows:
            self.expect(end - self._store.rows)
        if self._store.columns in places and not start:
            self._targets = []

        for place, array in zip(places, arrays, strict=True):
            column = self._columns[place]
            values = column.add(array)
            if values is not None and place < self._store.columns:
                self._store.put(place, start, values)
            elif values is not None:
                self._targets.append(_shrink_integers(values, column.kind))

    def _make_raw(self, split_by: Iterable[pa.Array]) -> RawData:
        label, note, data = self._origin.label, self._origin.note, self._data
        *features, target = self._columns
        if not target.rows:
            raise DataError(f"data.path: {label} has no rows{note}; write some")
        problems = [said for column in (target, *features) if (said := column.problem())]
        if problems:
            more = len(problems) - MOST_SHOWN
            rest = [f"data.path: and {more} more columns like these"] if more > 0 else []
            raise DataError("\n".join(problems[:MOST_SHOWN] + rest))
        keys = None
        if data.split_column is not None:
            spelling = self._origin.spelling
            keys = compute_split_keys(split_by, data, label=label, note=note, spelling=spelling)
        notes = list(self._chosen.notes)
        for column in features:
            if column.na:
                name, words = shorten(column.name), format_list(sorted(column.na))
                notes.append(f"{words} was read as missing in {name} (data.args.na)")
        table = Table(tuple(c.learnt() for c in features), self._store, data.table.missing)
        values, kept = self._target(), None
        if data.table.missing == "drop" and any(column.holes for column in features):
            kept = table.find_whole_rows()
            table, values = replace(table, kept=kept), values[kept]
            keys = None if keys is None else keys[kept]
            left_out = len(kept) - len(table)
            if not len(table):
                raise DataError(
                    f"data.args.missing: drop would leave no row of {label}: each of its "
                    f"{left_out:,} has a missing value; set it to mean, or leave columns out by "
                    "data.args.drop"
                )
            notes += [f"{left_out:,} of {len(kept):,} rows with missing values were left out"]
        return RawData(
            features=table,
            target=values,
            feature_names=self._chosen.feature_names,
            target_name=target.name,
            label=label,
            row_note=note,
            notes=tuple(notes),
            kept=kept,
            split_keys=keys,
            decimal=self._origin.decimal,
            na=data.table.na,
        )

    def _target(self) -> np.ndarray:
        values, class_names = np.concatenate(self._targets), self._columns[-1].learnt().words
        self._targets = []
        if class_names is None:
            return values
        words = np.empty(len(class_names), dtype=object)
        words[:] = list(class_names)
        return words[values]

    @property
    def row_bytes(self) -> int:
        """What each row takes of memory beside its features, from its reading to the split: the
        target, its label, the masks, and text as an array of objects; what it is split by, sorted
        and in order."""
        kinds = {values.dtype for values in self._targets}
        value_bytes = np.result_type(*kinds).itemsize if kinds else 1
        text_bytes = 8 if self._columns[-1].kind in (TEXT, CATEGORY) else 0
        return 2 * value_bytes + 4 + text_bytes + SPLIT_BYTES[self._data.split_by]


def _shrink_integers(values: np.ndarray, kind: str) -> np.ndarray:
    """Of the target: in the smallest type of whole numbers that holds them, if they are such."""
    if kind in (TEXT, CATEGORY):
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
