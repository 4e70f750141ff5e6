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

from headroom.base.raw_inputs import NOTHING, describe_inputs, is_structured
from headroom.data import arrays
from headroom.data.columns import (
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
from headroom.data.readers import ArrayFile, TableFile, open_arrays, open_table
from headroom.data.source_data import (
    DataError,
    describe_missing_name,
    format_list,
    shorten,
)
from headroom.prediction.request import (
    ARRAY_FILES,
    LINES,
    Order,
    list_input_files,
    report_as_input,
)
from headroom.settings.file_formats import FORMATS, MATRIX
from headroom.settings.run_config import TABLE_FILES

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


def _read_lines(order: Order) -> Iterator[Batch]:
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


TAKEN = {"number": ({NUMBER}, "numbers"), "date": ({DATE, TEXT}, "dates")}
ChosenColumns = list[tuple[str, str]]  # names and kinds of the model's columns, in its order


@dataclass(frozen=True)
class _Part:
    """A file of the input, and the model's columns in it."""

    file: TableFile
    chosen: ChosenColumns
    spelling: Spelling


def _open_parts(order: Order, needs: Needs) -> list[_Part]:
    """Raises DataError where the columns of the file, or of any part, are not those needed."""
    parts = []
    for path in list_input_files(order):
        with report_as_input(path):
            file = open_table(path, order.reads, skips_late=True)
        chosen = _choose_columns(file.names, path.name, order, needs)
        if not file.is_written:
            _refuse_types(file, chosen)
        decimal = needs.decimal if FORMATS[order.reads].is_delimited else "."
        parts.append(_Part(file, chosen, Spelling(decimal, needs.na)))
    return parts


def _refuse_types(file: TableFile, chosen: ChosenColumns) -> None:
    problems = []
    for name, kind in chosen:
        arrow_type = file.types[file.names.index(name)]
        taken, what = TAKEN.get(kind, ({TEXT, CATEGORY}, "text"))
        if classify_type(arrow_type) not in taken | {EMPTY}:
            problems.append(
                f"input: {file.path.name} column {shorten(name)} is of type {arrow_type}; the "
                f"model takes {what} there: turn it into {what}"
            )
    if problems:
        raise DataError("\n".join(problems))


def _read_table(order: Order, needs: Needs) -> Iterator[Batch]:
    """Yield the rows of all parts; rows are counted in each part."""
    parts, done, has_rows = _open_parts(order, needs), 0, False
    for part in parts:
        file, first, read = part.file, 0, 0
        used = [*dict.fromkeys([*(name for name, _ in part.chosen), *order.keep])]
        with report_as_input(file.path):
            for cells, read in file.read([file.names.index(name) for name in used]):
                rows = _parse_rows(cells, part, used, first)
                yield _make_batch(rows, part, order, first, done + read)
                first, has_rows = first + rows.num_rows, True
        done += file.amount
    if not has_rows:
        none = [pa.array([], file.types[file.names.index(name)]) for name in used]
        rows = _parse_rows(pa.record_batch(none, names=used), part, used, 0)
        yield _make_batch(rows, part, order, 0, done)


def _parse_rows(
    cells: pa.RecordBatch, part: _Part, names: Sequence[str], first: int
) -> pa.RecordBatch:
    """Rows with numbers where the model takes some. What is only kept stays as it is written: 007
    is no 7. first: the number of the first row, from 0."""
    kinds = dict(part.chosen) if part.file.is_written else {}
    columns = {
        name: _parse_numbers(column, part, first, name) if kinds.get(name) == "number" else column
        for name, column in zip(names, cells.columns, strict=True)
    }
    return pa.record_batch(columns)


def _make_batch(rows: pa.RecordBatch, part: _Part, order: Order, first: int, done: int) -> Batch:
    table = rows.select([name for name, _ in part.chosen]).to_pandas()
    kept = pa.table(rows.select(list(order.keep))) if order.keep else None
    return Batch(table, kept, part.file.path.name, first, done, note=part.file.note)


def _parse_numbers(cells: pa.Array, part: _Part, first: int, name: str) -> pa.Array:
    """The numbers or booleans of a block. Raises DataError with the first cell that is none."""
    for kind in (pa.float64(), pa.bool_()):
        with suppress(pa.ArrowInvalid):
            return parse_cells(cells, kind, part.spelling)
    row = find_stray_cell(cells, [pa.float64()], part.spelling)
    where = f"{part.file.path.name} row {first + row + 1}{part.file.note}"
    mark = ""
    if part.spelling.decimal == ",":
        mark = ", with a decimal comma as data.args.decimal of the training"
    raise DataError(
        f"input: {where}, column {shorten(name)}: must be a number{mark} "
        f"(got {shorten(cells[row].as_py().strip())}); mend the cell"
    )


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


TABLES_WORDS = f"a {', '.join(TABLE_FILES[:-1])} or {TABLE_FILES[-1]} file"
ARRAYS_WORDS = f"an {', '.join(ARRAY_FILES[:-1])} or {ARRAY_FILES[-1]} file"


def check_rows(order: Order, needs: Needs) -> None:
    """Raise DataError where the model cannot take rows of this file, by its head."""
    _check_kind(order, needs)
    if order.reads in TABLE_FILES:
        _open_parts(order, needs)
    elif order.reads in ARRAY_FILES:
        _open_arrays(order, needs)


def measure_amount(order: Order, needs: Needs) -> int:
    """Return how much there is to do, in the units of Batch.done: bytes of text, or rows."""
    if order.reads in TABLE_FILES:
        return sum(part.file.amount for part in _open_parts(order, needs))
    if order.reads in ARRAY_FILES:
        file, names = _open_arrays(order, needs)
        return file.headers[names[0]].shape[0]
    return Path(order.input).stat().st_size


def read_batches(order: Order, needs: Needs) -> Iterator[Batch]:
    """Yield all rows in order; one batch of none where there are none. Raises DataError."""
    check_rows(order, needs)
    if order.reads in TABLE_FILES:
        return _read_table(order, needs)
    return _read_arrays(order, needs) if order.reads in ARRAY_FILES else _read_lines(order)


def _check_kind(order: Order, needs: Needs) -> None:
    is_array = order.reads in ARRAY_FILES
    kinds = {kind for _, kind in needs.columns or ()}
    if needs.task == "tokens" and needs.columns is None and not is_array:
        raise DataError(
            f"input: the model takes tokens, whole numbers in {ARRAYS_WORDS} (got {order.reads}); "
            "give such a file"
        )
    if order.reads == LINES and "text" not in kinds:
        raise DataError(
            f"input: the model takes {_describe_needs(needs)}, not a text a line (got txt); give "
            f"{TABLES_WORDS}" + ("" if kinds - {"number"} else f", or {ARRAYS_WORDS}")
        )
    if needs.is_own and not is_array:
        raise DataError(
            f"input: the model takes arrays (got {order.reads}); give an npz file with "
            f"{', '.join(needs.inputs) or 'x'}"
        )
    if is_array and needs.inputs and FORMATS[order.reads].holds == MATRIX:
        raise DataError(
            f"input: the model takes {', '.join(needs.inputs)}, and an {order.reads} file holds "
            "one array; "
            "give an npz file with them"
        )
    if is_array and kinds - {"number"}:
        names = ", ".join(repr(name) for name, kind in needs.columns or () if kind != "number")
        raise DataError(
            f"input: the model takes text in {names}, and an {order.reads} file holds numbers "
            f"alone; give {TABLES_WORDS}"
        )


def _open_arrays(order: Order, needs: Needs) -> tuple[ArrayFile, list[str]]:
    """The file, and the names of the arrays that the model takes: those of its inputs, or x, or the
    only one; of equal lengths and of the shape that it takes."""
    path = Path(order.input)
    with report_as_input(path):
        file = open_arrays(path, order.reads, lambda names: _pick_arrays(names, path.name, needs))
        headers = {name: file.headers[name] for name in needs.inputs or file.headers}
        for name, header in headers.items():
            arrays.check_numeric_type(header, f"{path.name} array {name!r}" if name else path.name)
    if any(not header.shape for header in headers.values()):
        raise DataError(f"input: {path.name} is a single value; save rows, shape (rows, ...)")
    lengths = {name: header.shape[0] for name, header in headers.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"input: the arrays of {path.name} must have as many rows (got {lengths})")
    if not needs.is_own:
        (header,) = headers.values()
        _refuse_shape(header, path.name, needs)
    return file, list(headers)


def _refuse_shape(header: arrays.ArrayHeader, label: str, needs: Needs) -> None:
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
            f"input: {label} must hold {wanted} (got {header.dtype} {shape}); save it so"
        )


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
    path, first = Path(order.input), 0
    file, names = _open_arrays(order, needs)
    with report_as_input(path):
        for block in file.read(names, BATCH_BYTES):
            many = len(block[names[0]])
            yield Batch(
                block if needs.inputs else block[names[0]], None, path.name, first, first + many
            )
            first += many


def _describe_needs(needs: Needs) -> str:
    if needs.columns is None:
        return f"rows of the shape {needs.input_shape}"
    return f"the columns {', '.join(repr(name) for name, _ in needs.columns[:12])}"
