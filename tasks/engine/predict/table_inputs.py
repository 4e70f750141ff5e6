"""Reads the rows to predict of CSV, TSV and Parquet batch by batch, only the columns that the model
takes and those to keep. Columns are taken by the type that the model was trained on, never by a
guess of a file's first rows; what does not fit is refused by file, row and column, which a slow
second look finds.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv as pa_csv
from pyarrow import parquet as pa_parquet

from tasks.engine.files.source_data import DataError, listed, shorten
from tasks.engine.predict.input_batches import Batch, Needs
from tasks.engine.predict.request import Order, parts
from tasks.engine.tables.csv_blocks import BROKEN

BELOW = " below the header"
BLOCK_BYTES = 2 * 1024**2  # the longest row; Arrow reads up to 32 blocks ahead
DELIMITERS = {"csv": ",", "tsv": "\t"}
PARQUET_ROWS = 65_536
Chosen = list[tuple[str, str]]  # names and kinds of the model's columns, in its order


def check_table(order: Order, needs: Needs) -> None:
    """Raises DataError where the columns of the file, or of any part, are not those needed."""
    if order.reads != "parquet":
        _csv_schema(order, needs)
        return
    for path in parts(Path(order.input)):
        with _opened(path) as file:
            _parquet_columns(file.schema_arrow, path.name, order, needs)


def read_csv(order: Order, needs: Needs) -> Iterator[Batch]:
    """The rows of comma- or tab-separated UTF-8 text whose first line names the columns."""
    path, first = Path(order.input), 0
    types, chosen = _csv_schema(order, needs)
    try:
        with open(path, "rb", buffering=0) as file:
            reader = _reader(file, order, types, needs)
            while True:
                try:
                    part = reader.read_next_batch()
                except StopIteration:
                    break
                table = _stripped(pa.Table.from_batches([part]))
                yield _batch(table, chosen, order, path.name, first, file.tell(), BELOW)
                first += len(table)
    except BROKEN as error:
        raise DataError(_found_in_csv(order, types, needs, error)) from None
    if not first:
        none = pa.schema(list(types.items())).empty_table()
        yield _batch(_stripped(none), chosen, order, path.name, 0, path.stat().st_size, BELOW)


def read_parquet(order: Order, needs: Needs) -> Iterator[Batch]:
    """The rows of a Parquet file, or of all parts of a folder in the order of their names."""
    done, is_empty = 0, True
    for path in parts(Path(order.input)):
        with _opened(path) as file:
            first = 0
            chosen = _parquet_columns(file.schema_arrow, path.name, order, needs)
            names = [name for name, _ in chosen]
            wanted = [*names, *(name for name in order.keep if name not in names)]
            try:
                for part in file.iter_batches(batch_size=PARQUET_ROWS, columns=wanted):
                    table = pa.Table.from_batches([part])
                    table.validate(full=True)
                    done += len(table)
                    yield _batch(table, chosen, order, path.name, first, done, "")
                    first, is_empty = first + len(table), False
            except BROKEN as error:
                raise DataError(_damaged(path.name, error)) from None
            last = file.schema_arrow.empty_table().select(wanted)
    if is_empty:
        yield _batch(last, chosen, order, path.name, 0, 0, "")


def parquet_rows(order: Order) -> int:
    """Rows of the file or of all parts, by their metadata."""
    total = 0
    for path in parts(Path(order.input)):
        with _opened(path) as file:
            total += file.metadata.num_rows
    return total


def _batch(
    table: pa.Table, chosen: Chosen, order: Order, label: str, first: int, done: int, note: str
) -> Batch:
    rows = table.select([name for name, _ in chosen]).to_pandas()
    kept = table.select(list(order.keep)) if order.keep else None
    return Batch(rows, kept, label, first, done, note=note)


def _stripped(table: pa.Table) -> pa.Table:
    return table.rename_columns([name.strip() for name in table.column_names])


def _reader(
    file: Any,
    order: Order,
    types: dict[str, pa.DataType] | None,
    needs: Needs,
    on_ragged: Callable[[Any], str] | None = None,
) -> Any:
    """A streaming reader of the columns of `types`, or of all as pyarrow would take them.

    on_ragged: called with rows of another length, which only then are numbered.
    """
    return pa_csv.open_csv(
        file,
        read_options=pa_csv.ReadOptions(block_size=BLOCK_BYTES, use_threads=on_ragged is None),
        parse_options=pa_csv.ParseOptions(
            delimiter=DELIMITERS[order.reads], invalid_row_handler=on_ragged
        ),
        convert_options=pa_csv.ConvertOptions(
            include_columns=list(types or ()),
            column_types=types,
            null_values=["", *needs.na],
            strings_can_be_null=False,
            decimal_point=needs.decimal,
        ),
    )


def _csv_schema(order: Order, needs: Needs) -> tuple[dict[str, pa.DataType], Chosen]:
    """The types to read the columns as, by their names in the file; and the model's columns."""
    path = Path(order.input)
    try:
        with open(path, "rb", buffering=0) as file:
            fields = list(_reader(file, order, None, needs).schema)
    except BROKEN as error:
        raise DataError(_found_in_csv(order, None, needs, error)) from None
    names = [field.name.strip() for field in fields]
    if len(names) == 1 and any(mark in names[0] for mark in ",;\t|"):
        raise DataError(
            f"input: {path.name} has one column only, {shorten(names[0])}; its ending says that "
            f"cells are separated by {DELIMITERS[order.reads]!r}: rename the file, or write it anew"
        )
    chosen = _chosen(names, path.name, order, needs)
    kinds = dict(chosen)
    types = {}
    for field, name in zip(fields, names, strict=True):
        if name in kinds or name in order.keep:
            number = pa.bool_() if pa.types.is_boolean(field.type) else pa.float64()
            # What is only kept stays as it is written: 007 is no 7.
            types[field.name] = number if kinds.get(name) == "number" else pa.string()
    return types, chosen


def _parquet_columns(schema: pa.Schema, label: str, order: Order, needs: Needs) -> Chosen:
    # What pandas keeps its index in is no column of the table.
    names = [name for name in schema.names if not name.startswith("__index_level_")]
    chosen = _chosen(names, label, order, needs)
    problems = []
    for name, kind in chosen:
        found = schema.field(name).type
        if kind == "number" and not _is_number(found):
            problems.append(
                f"input: {label} column {shorten(name)} is of type {found}; the model takes numbers"
                " there: turn it into numbers"
            )
        if kind != "number" and not _is_text(found):
            problems.append(
                f"input: {label} column {shorten(name)} is of type {found}; the model takes text "
                "there: turn it into text"
            )
    if problems:
        raise DataError("\n".join(problems))
    return chosen


def _chosen(names: Sequence[str], label: str, order: Order, needs: Needs) -> Chosen:
    """The model's columns among those of the file. Raises DataError with all that are missing."""
    wanted = [name for name, _ in needs.columns or ()]
    problems = [
        f"{setting}: {label} has no column {shorten(name)}{_near(name, names)}; it has "
        f"{listed(names, 12)}"
        for setting, group in (("input", wanted), ("keep", order.keep))
        for name in group
        if name not in names
    ]
    used = {*(wanted or names), *order.keep}
    double = sorted(name for name in used if list(names).count(name) > 1)
    if double:
        problems.append(f"input: {label} has columns of one name: {listed(double)}; rename one")
    rest: Chosen = [(name, "number") for name in names if name not in order.keep]
    if needs.columns is None and len(rest) != needs.width:
        problems.append(
            f"input: {label} has {len(rest)} columns beside those to keep, and the model takes "
            f"{needs.width} numbers a row, shape {needs.input_shape}; give as many, in order"
        )
    if problems:
        raise DataError("\n".join(problems[:12]))
    return rest if needs.columns is None else list(needs.columns)


def _near(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _found_in_csv(
    order: Order, types: dict[str, pa.DataType] | None, needs: Needs, error: BaseException
) -> str:
    """What pyarrow stumbled over, by row and column: read again, all of it as bytes."""
    path, first = Path(order.input), 0
    ragged: list[Any] = []

    def keep(row: Any) -> str:
        ragged.append(row)
        return "error"

    plain = None if types is None else dict.fromkeys(types, pa.binary())
    numbers = [name for name, kind in (types or {}).items() if not _is_text(kind)]
    try:
        with open(path, "rb", buffering=0) as file:
            reader = _reader(file, order, plain, needs, on_ragged=keep)
            for part in reader if plain else ():
                for name, column in zip(part.schema.names, part.columns, strict=True):
                    for i, cell in enumerate(column.to_pylist()):
                        wrong = _wrong_cell(cell, needs, is_number=name in numbers)
                        if wrong:
                            row = f"row {first + i + 1}{BELOW}, column {shorten(name.strip())}"
                            return f"input: {path.name} {row}: {wrong}; mend the cell"
                first += len(part)
    except BROKEN:
        pass  # told below
    if ragged and ragged[0].number is not None:
        row = ragged[0]
        return (
            f"input: {path.name} row {row.number - 1}{BELOW}: has {row.actual_columns} cells where "
            f"the header has {row.expected_columns} ({shorten(row.text)}); mend or drop the row"
        )
    if "straddling" in str(error):
        return (
            f"input: {path.name} has a row of more than {BLOCK_BYTES:,} bytes; write it as parquet"
        )
    return f"input: {path.name} cannot be read as text ({shorten(str(error), 160)}); mend it"


def _wrong_cell(cell: bytes | None, needs: Needs, *, is_number: bool) -> str:
    if cell is None:
        return ""
    try:
        text = cell.decode()
    except UnicodeDecodeError:
        return f"is not UTF-8 (got {shorten(cell)})"
    if not is_number or text in ("", *needs.na):
        return ""
    comma = needs.decimal == ","
    with suppress(ValueError):
        float("no" if comma and "." in text else text.replace(needs.decimal, "."))
        return ""
    as_trained = ", with a decimal comma as data.decimal of the training" if comma else ""
    return f"must be a number{as_trained} (got {shorten(text)})"


def _opened(path: Path) -> pa_parquet.ParquetFile:
    try:
        return pa_parquet.ParquetFile(path, page_checksum_verification=True)
    except BROKEN as error:
        raise DataError(_damaged(path.name, error)) from None


def _damaged(label: str, error: BaseException) -> str:
    return (
        f"input: {label} is damaged or no Parquet file ({shorten(str(error), 160)}); copy or write "
        "it anew"
    )


def _is_number(kind: pa.DataType) -> bool:
    null = pa.types.is_null(kind)
    return (
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind) or null
    )


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_text(kind) for is_text in texts) or pa.types.is_null(kind)
