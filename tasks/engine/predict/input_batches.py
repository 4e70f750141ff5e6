"""Reads the rows to predict from files: tables, arrays and texts, batch by batch, since they
may be larger than memory, with the words by which a person finds a row again. Columns are
taken by the type that the model was trained on, never by a guess of a file's first rows;
arrays are mapped or unpacked a part at a time. It refuses, by the head of a file, what the
model could never take, and what does not fit by file, row and column.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tasks.engine.base.raw_inputs import NOTHING, describe_inputs, is_structured
from tasks.engine.files import arrays
from tasks.engine.files.columns import (
    CATEGORY,
    DATE,
    EMPTY,
    NUMBER,
    TEXT,
    Spelling,
    classify_type,
    find_stray_cell,
    parse_cells,
)
from tasks.engine.files.source_data import (
    DataError,
    check_memory,
    describe_missing_name,
    format_list,
    shorten,
)
from tasks.engine.files.table_files import (
    BELOW,
    TextTable,
    open_text_table,
    read_parquet_batches,
    read_schema,
    read_text_rows,
)
from tasks.engine.predict.request import Order, list_parts, report_as_input
from tasks.engine.settings.run_config import TABLE_FILES

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_BYTES = 8 * 1024**2  # of a file, read at once


@dataclass(frozen=True)
class Needs:
    """The inputs that a model takes: columns by name, or rows of a shape."""

    task: str
    source: str
    input_shape: tuple[int, ...]
    columns: tuple[tuple[str, str], ...] | None  # name and kind: number, category or text
    inputs: tuple[str, ...] = ()  # names of arrays, where a model of the user's own takes several
    is_own: bool = False  # takes arrays of other types and shapes, which it judges itself
    width: int = 1  # values of a row
    na: tuple[str, ...] = ()  # words that mean missing in text, beside the empty cell
    decimal: str = "."  # the decimal mark of numbers in text


def read_needs(spec: Mapping[str, Any]) -> Needs:
    """Return the inputs that the model with this description takes."""
    columns: tuple[tuple[str, str], ...] | None = None
    if spec["task"] == "tokens" and spec["source"] == "text":
        columns = (("text", "text"),)
    elif spec.get("columns"):
        columns = tuple((column["name"], column["kind"]) for column in spec["columns"])
    elif spec["feature_names"]:
        columns = tuple((name, "number") for name in spec["feature_names"])
    own = describe_inputs(spec) if is_structured(spec) and columns is None else {}
    shapes = [need["shape"] for need in own.values()] or [spec["input_shape"]]
    return Needs(
        spec["task"],
        spec.get("source", ""),
        tuple(spec["input_shape"]),
        columns,
        inputs=tuple(own) if len(own) > 1 else (),
        is_own=bool(own),
        width=max(1, sum(map(math.prod, shapes))),
        na=tuple(NOTHING if spec.get("na") is None else spec["na"]),
        decimal=spec.get("decimal", "."),
    )


@dataclass(frozen=True)
class Batch:
    """A batch of rows, in order."""

    rows: Any  # as Predictor.predict takes them: a DataFrame, or an array
    kept: pa.Table | None  # the columns to keep, one row each
    label: str  # the file's name
    first: int  # number of the first row in the file, from 0
    done: int  # of Total.amount, when these rows are done
    row: str = "row"  # what a row of the file is called
    note: str = ""  # how rows are counted, always from 1

    def at(self, index: int) -> str:
        """Describe where a row of this batch is, so that a person finds it again; index from
        0."""
        return f"{self.label} {self.row} {self.first + index + 1}{self.note}"


def cut_rows(rows: Any, begin: int, end: int) -> Any:
    """Return these rows of a DataFrame, an array, or a mapping of arrays."""
    if isinstance(rows, Mapping):
        return {name: values[begin:end] for name, values in rows.items()}
    return rows.iloc[begin:end] if hasattr(rows, "iloc") else rows[begin:end]


def count_rows(rows: Any) -> int:
    """Count the rows of a DataFrame, an array, or a mapping of arrays."""
    return len(next(iter(rows.values()))) if isinstance(rows, Mapping) else len(rows)


def find_first_hole(rows: Any) -> int | None:
    """Return the first row with a number that is missing or infinite; None where there is none."""
    parts = rows.values() if isinstance(rows, Mapping) else [rows]
    for part in map(np.asarray, parts):
        if part.dtype.kind == "f" and not np.isfinite(part).all():
            return int((~np.isfinite(part)).reshape(len(part), -1).any(axis=1).argmax())
    return None


def read_txt(order: Order) -> Iterator[Batch]:
    """Yield a text a line, as a DataFrame with the column `text`."""
    import pandas as pd

    path, first = Path(order.input), 0
    with open(path, "rb") as file:
        while True:
            with report_as_input(path):
                lines = file.readlines(BATCH_BYTES)
            if not lines and first:
                return
            texts = [_decode_line(line, path.name, first + i) for i, line in enumerate(lines)]
            rows = pd.DataFrame({"text": pd.Series(texts, dtype=object)})
            yield Batch(rows, None, path.name, first, file.tell(), row="line")
            if not lines:
                return
            first += len(lines)


def _decode_line(line: bytes, label: str, index: int) -> str:
    try:
        text = line.removesuffix(b"\n").removesuffix(b"\r").decode()
    except UnicodeDecodeError:
        raise DataError(
            f"input: {label} line {index + 1} is not UTF-8; save it as UTF-8 "
            "(iconv -f LATIN1 -t UTF-8)"
        ) from None
    if not text:
        raise DataError(f"input: {label} line {index + 1} is blank; fill it in or drop it")
    return text


PARQUET_ROWS = 65_536
TAKEN = {"number": ({NUMBER}, "numbers"), "date": ({DATE, TEXT}, "dates")}
ChosenColumns = list[tuple[str, str]]  # names and kinds of the model's columns, in its order


def check_table(order: Order, needs: Needs) -> None:
    """Raise DataError where the columns of the file, or of any part, are not those needed."""
    if order.reads == "parquet":
        for path in list_parts(Path(order.input)):
            _read_part_schema(path, order, needs)
    else:
        _open_text(order, needs)


def read_csv(order: Order, needs: Needs) -> Iterator[Batch]:
    """Yield the rows of comma- or tab-separated UTF-8 text whose first line names the columns."""
    table, chosen = _open_text(order, needs)
    kinds, label, first = dict(chosen), table.path.name, 0
    # What is only kept stays as it is written: 007 is no 7.
    used = [name for name in table.names if name in kinds or name in order.keep]
    with report_as_input(table.path):
        for cells, end in read_text_rows(table, [table.names.index(name) for name in used]):
            columns = {
                name: _parse_numbers(column, f"{label} row", first, name, needs)
                if kinds.get(name) == "number"
                else column
                for name, column in zip(used, cells.columns, strict=True)
            }
            rows = pa.record_batch(columns)
            yield _make_batch(rows, chosen, order, label, first, end, BELOW)
            first += rows.num_rows
    if not first:
        types = [pa.float64() if kinds.get(name) == "number" else pa.string() for name in used]
        none = pa.schema(list(zip(used, types, strict=True))).empty_table()
        yield _make_batch(none, chosen, order, label, 0, table.path.stat().st_size, BELOW)


def read_parquet(order: Order, needs: Needs) -> Iterator[Batch]:
    """Yield the rows of a Parquet file, or of all parts of a folder in the order of their names."""
    done = 0
    for path in list_parts(Path(order.input)):
        schema, count, chosen = _read_part_schema(path, order, needs)
        names, first = [name for name, _ in chosen], 0
        wanted = [*names, *(name for name in order.keep if name not in names)]
        with report_as_input(path):
            for part in read_parquet_batches(path, wanted, count, PARQUET_ROWS):
                done += len(part)
                yield _make_batch(part, chosen, order, path.name, first, done, "")
                first += len(part)
    if not done:
        yield _make_batch(schema.empty_table().select(wanted), chosen, order, path.name, 0, 0, "")


def count_parquet_rows(order: Order) -> int:
    """Count the rows of the file or of all parts, by their metadata."""
    total = 0
    for path in list_parts(Path(order.input)):
        with report_as_input(path):
            total += read_schema(path)[1]
    return total


def _make_batch(
    table: pa.RecordBatch | pa.Table,
    chosen: ChosenColumns,
    order: Order,
    label: str,
    first: int,
    done: int,
    note: str,
) -> Batch:
    rows = table.select([name for name, _ in chosen]).to_pandas()
    kept = pa.table(table.select(list(order.keep))) if order.keep else None
    return Batch(rows, kept, label, first, done, note=note)


def _open_text(order: Order, needs: Needs) -> tuple[TextTable, ChosenColumns]:
    """The table as it is to be read, and the model's columns."""
    path = Path(order.input)
    with report_as_input(path):
        table = open_text_table(path, order.reads)
    return table, _choose_columns(table.names, path.name, order, needs)


def _parse_numbers(cells: pa.Array, rows: str, first: int, name: str, needs: Needs) -> pa.Array:
    """The numbers or booleans of a block. Raises DataError with the first cell that is none.
    first: the number of its first row, from 0."""
    spelling = Spelling(needs.decimal, needs.na)
    for kind in (pa.float64(), pa.bool_()):
        with suppress(pa.ArrowInvalid):
            return parse_cells(cells, kind, spelling)
    row = find_stray_cell(cells, [pa.float64()], spelling)
    mark = ", with a decimal comma as data.decimal of the training" if needs.decimal == "," else ""
    raise DataError(
        f"input: {rows} {first + row + 1}{BELOW}, column {shorten(name)}: must be a number{mark} "
        f"(got {shorten(cells[row].as_py().strip())}); mend the cell"
    )


def _read_part_schema(
    path: Path, order: Order, needs: Needs
) -> tuple[pa.Schema, int, ChosenColumns]:
    """Of a Parquet file its schema, how many rows it claims, and the model's columns."""
    with report_as_input(path):
        fields, count = read_schema(path)
    schema = pa.schema(fields)
    chosen = _choose_columns(schema.names, path.name, order, needs)
    problems = []
    for name, kind in chosen:
        found = schema.field(name).type
        taken, what = TAKEN.get(kind, ({TEXT, CATEGORY}, "text"))
        if classify_type(found) not in taken | {EMPTY}:
            problems.append(
                f"input: {path.name} column {shorten(name)} is of type {found}; the model takes "
                f"{what} there: turn it into {what}"
            )
    if problems:
        raise DataError("\n".join(problems))
    return schema, count, chosen


def _choose_columns(names: Sequence[str], label: str, order: Order, needs: Needs) -> ChosenColumns:
    """The model's columns among those of the file. Raises DataError with all that are missing."""
    wanted = [name for name, _ in needs.columns or ()]
    problems = [
        f"{setting}: {label} {describe_missing_name(name, names, 'column ')}"
        for setting, group in (("input", wanted), ("keep", order.keep))
        for name in group
        if name not in names
    ]
    used = {*(wanted or names), *order.keep}
    double = sorted(name for name in used if list(names).count(name) > 1)
    if double:
        problems.append(
            f"input: {label} has columns of one name: {format_list(double)}; rename one"
        )
    rest: ChosenColumns = [(name, "number") for name in names if name not in order.keep]
    if needs.columns is None and len(rest) != needs.width:
        problems.append(
            f"input: {label} has {len(rest)} columns beside those to keep, and the model takes "
            f"{needs.width} numbers a row, shape {needs.input_shape}; give as many, in order"
        )
    if problems:
        raise DataError("\n".join(problems[:12]))
    return rest if needs.columns is None else list(needs.columns)


TABLES_WORDS = "a csv, tsv or parquet file"


def check_rows(order: Order, needs: Needs) -> None:
    """Raise DataError where the model cannot take rows of this file, by its head."""
    _check_kind(order, needs)
    if order.reads in TABLE_FILES:
        check_table(order, needs)
    elif order.reads != "txt":
        _check_shape(order, needs)


def measure_amount(order: Order, needs: Needs) -> int:
    """Return how much there is to do, in the units of Batch.done: bytes of text, or rows."""
    if order.reads == "parquet":
        return count_parquet_rows(order)
    if order.reads in ("npy", "npz"):
        return next(iter(_read_headers(order, needs).values())).shape[0]
    return Path(order.input).stat().st_size


def read_batches(order: Order, needs: Needs) -> Iterator[Batch]:
    """Yield all rows in order; one batch of none where there are none. Raises DataError."""
    check_rows(order, needs)
    if order.reads in TABLE_FILES:
        is_parquet = order.reads == "parquet"
        read = read_parquet if is_parquet else read_csv
        return read(order, needs)
    return read_txt(order) if order.reads == "txt" else _read_arrays(order, needs)


def _check_kind(order: Order, needs: Needs) -> None:
    is_array = order.reads in ("npy", "npz")
    kinds = {kind for _, kind in needs.columns or ()}
    if needs.task == "tokens" and needs.columns is None and not is_array:
        raise DataError(
            f"input: the model takes tokens, whole numbers in an npy or npz file (got {order.reads}"
            "); give such a file"
        )
    if order.reads == "txt" and "text" not in kinds:
        raise DataError(
            f"input: the model takes {_describe_needs(needs)}, not a text a line (got txt); give "
            f"{TABLES_WORDS}" + ("" if kinds - {"number"} else ", or an npy or npz file")
        )
    if needs.is_own and not is_array:
        raise DataError(
            f"input: the model takes arrays (got {order.reads}); give an npz file with "
            f"{', '.join(needs.inputs) or 'x'}"
        )
    if order.reads == "npy" and needs.inputs:
        raise DataError(
            f"input: the model takes {', '.join(needs.inputs)}, and an npy file holds one array; "
            "give an npz file with them"
        )
    if is_array and kinds - {"number"}:
        names = ", ".join(repr(name) for name, kind in needs.columns or () if kind != "number")
        raise DataError(
            f"input: the model takes text in {names}, and an {order.reads} file holds numbers "
            f"alone; give {TABLES_WORDS}"
        )


def _check_shape(order: Order, needs: Needs) -> None:
    headers = _read_headers(order, needs)
    if needs.is_own:
        return
    (header,) = headers.values()
    shape, sizes = header.shape, ", ".join(map(str, needs.input_shape))
    if needs.task == "tokens":
        fits = len(shape) == 2 and 1 <= shape[1] <= needs.width and header.dtype.kind in "iu"
        wanted = f"whole numbers of the shape (rows, 1 to {needs.width})"
    else:
        flat = len(shape) == 2 and shape[1] == needs.width
        fits = shape[1:] == needs.input_shape or flat
        wanted = f"numbers of the shape (rows, {sizes})"
    if not fits:
        raise DataError(
            f"input: {Path(order.input).name} must hold {wanted} (got {header.dtype} {shape}); "
            "save it so"
        )


def _read_headers(order: Order, needs: Needs) -> dict[str, arrays.ArrayHeader]:
    """Of the arrays that the model takes by name, or of x, or of the only one; of equal lengths."""
    path = Path(order.input)
    with report_as_input(path):
        if order.reads == "npy":
            found = {"": arrays.read_header(path)}
        else:
            there = arrays.read_headers(path, lambda names: _pick_arrays(names, path.name, needs))
            found = {name: there[name] for name in needs.inputs or there}
        for name, header in found.items():
            arrays.check_numeric_type(header, f"{path.name} array {name!r}" if name else path.name)
    if any(not header.shape for header in found.values()):
        raise DataError(f"input: {path.name} is a single value; save rows, shape (rows, ...)")
    lengths = {name: header.shape[0] for name, header in found.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"input: the arrays of {path.name} must have as many rows (got {lengths})")
    return found


def _pick_arrays(names: list[str], label: str, needs: Needs) -> list[str]:
    missing = [name for name in needs.inputs if name not in names]
    if missing:
        raise DataError(
            f"input: {label} has no array {missing[0]!r} (got {format_list(names) or 'none'}); the "
            f"model takes {', '.join(needs.inputs)}: save them so"
        )
    usual = names if len(names) == 1 else [n for n in arrays.FEATURE_NAMES if n in names]
    if not needs.inputs and not usual:
        raise DataError(
            f"input: {label} must hold one array, or one named x (got "
            f"{format_list(names) or 'none'}); save it so"
        )
    return list(needs.inputs) or usual[:1]


def _read_arrays(order: Order, needs: Needs) -> Iterator[Batch]:
    path, headers, first = Path(order.input), _read_headers(order, needs), 0
    for found in _read_parts(path, headers):
        rows = found if needs.inputs else next(iter(found.values()))
        many = len(next(iter(found.values())))
        yield Batch(rows, None, path.name, first, first + many)
        first += many


def _read_parts(
    path: Path, headers: dict[str, arrays.ArrayHeader]
) -> Iterator[dict[str, np.ndarray]]:
    total = next(iter(headers.values())).shape[0]
    row_bytes = max(header.value_bytes for header in headers.values()) // max(1, total)
    step = max(1, BATCH_BYTES // max(1, row_bytes))
    with report_as_input(path):
        if "" in headers:
            array = arrays.map_array(path, headers[""])
            for first in range(0, max(1, total), step):
                # A copy: the file stays as it is.
                yield {"": np.array(array[first : first + step], order="C")}
            return
        if any(header.fortran and len(header.shape) > 1 for header in headers.values()):
            needed = sum(header.value_bytes for header in headers.values())
            check_memory(2 * needed, f"input: {path.name}", "save it in C order")
            step = max(1, total)  # its rows lie apart: all of it at once
        yield from arrays.read_blocks(path, headers, rows=step)


def _describe_needs(needs: Needs) -> str:
    if needs.columns is None:
        return f"rows of the shape {needs.input_shape}"
    return f"the columns {', '.join(repr(name) for name, _ in needs.columns[:12])}"
