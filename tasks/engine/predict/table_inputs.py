"""Reads the rows to predict of CSV, TSV and Parquet batch by batch, only the columns that the model
takes and those to keep. Columns are taken by the type that the model was trained on, never by a
guess of a file's first rows; what does not fit is refused by file, row and column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
from pyarrow import compute

from tasks.engine.files.number_formats import Spelling
from tasks.engine.files.source_data import DataError, has_no, listed, shorten
from tasks.engine.predict.input_batches import Batch, Needs
from tasks.engine.predict.request import Order, parts, told_as_input
from tasks.engine.tables import parquet
from tasks.engine.tables.columns import CATEGORY, DATE, EMPTY, NUMBER, TEXT, kind_of
from tasks.engine.tables.csv_blocks import BELOW, TextTable, Way, as_text, batches, opened

PARQUET_ROWS = 65_536
TAKEN = {"number": ({NUMBER}, "numbers"), "date": ({DATE, TEXT}, "dates")}
Chosen = list[tuple[str, str]]  # names and kinds of the model's columns, in its order


def check_table(order: Order, needs: Needs) -> None:
    """Raises DataError where the columns of the file, or of any part, are not those needed."""
    if order.reads == "parquet":
        for path in parts(Path(order.input)):
            _part(path, order, needs)
    else:
        _text(order, needs)


def read_csv(order: Order, needs: Needs) -> Iterator[Batch]:
    """The rows of comma- or tab-separated UTF-8 text whose first line names the columns."""
    table, chosen = _text(order, needs)
    names, kinds, path, first = table.names, dict(chosen), table.path, 0
    used = [name for name in names if name in kinds or name in order.keep]
    numbers = [name for name in used if kinds.get(name) == "number"]
    places = [names.index(name) for name in used]
    # What is only kept stays as it is written: 007 is no 7.
    types = [pa.float64() if name in numbers else pa.string() for name in used]
    with told_as_input(path):
        ways = [Way(dict(zip(places, types, strict=True))), as_text(places)]
        for cells, end in batches(table, places, ways):
            rows = cells.rename_columns(used)
            for name in numbers:
                if rows[name].type == pa.string():
                    column = _numbers(rows[name], f"{path.name} row", first, name, needs)
                    rows = rows.set_column(used.index(name), name, column)
            yield _batch(rows, chosen, order, path.name, first, end, BELOW)
            first += len(rows)
    if not first:
        none = pa.schema(list(zip(used, types, strict=True))).empty_table()
        yield _batch(none, chosen, order, path.name, 0, path.stat().st_size, BELOW)


def read_parquet(order: Order, needs: Needs) -> Iterator[Batch]:
    """The rows of a Parquet file, or of all parts of a folder in the order of their names."""
    done = 0
    for path in parts(Path(order.input)):
        schema, count, chosen = _part(path, order, needs)
        names, first = [name for name, _ in chosen], 0
        wanted = [*names, *(name for name in order.keep if name not in names)]
        with told_as_input(path):
            for part in parquet.batches(path, wanted, count, PARQUET_ROWS):
                done += len(part)
                yield _batch(part, chosen, order, path.name, first, done, "")
                first += len(part)
    if not done:
        yield _batch(schema.empty_table().select(wanted), chosen, order, path.name, 0, 0, "")


def parquet_rows(order: Order) -> int:
    """Rows of the file or of all parts, by their metadata."""
    total = 0
    for path in parts(Path(order.input)):
        with told_as_input(path), parquet.open_file(path) as file:
            total += file.metadata.num_rows
    return total


def _batch(
    table: pa.RecordBatch | pa.Table,
    chosen: Chosen,
    order: Order,
    label: str,
    first: int,
    done: int,
    note: str,
) -> Batch:
    rows = table.select([name for name, _ in chosen]).to_pandas()
    kept = pa.table(table.select(list(order.keep))) if order.keep else None
    return Batch(rows, kept, label, first, done, note=note)


def _text(order: Order, needs: Needs) -> tuple[TextTable, Chosen]:
    """The table as it is to be read, and the model's columns."""
    path = Path(order.input)
    with told_as_input(path):
        table = opened(path, order.reads, Spelling(needs.decimal, needs.na))
    return table, _chosen(table.names, path.name, order, needs)


def _numbers(cells: pa.Array, rows: str, first: int, name: str, needs: Needs) -> pa.Array:
    """The numbers or booleans of a block that is not all numbers, or the first cell that is none.
    first: the number of its first row, from 0."""
    cells = compute.utf8_trim_whitespace(cells)
    missing = compute.is_in(cells, pa.array(["", *needs.na]))
    cells = compute.if_else(missing, pa.scalar(None, pa.string()), cells)
    with suppress(pa.ArrowInvalid):
        return cells.cast(pa.bool_())
    comma, values = needs.decimal == ",", []
    for row, text in enumerate(cells.to_pylist(), first + 1):
        try:
            plain = text and ("no" if comma and "." in text else text.replace(needs.decimal, "."))
            values.append(None if text is None else float(plain))
        except ValueError:
            mark = ", with a decimal comma as data.decimal of the training" if comma else ""
            raise DataError(
                f"input: {rows} {row}{BELOW}, column {shorten(name)}: must be a number{mark} (got "
                f"{shorten(text)}); mend the cell"
            ) from None
    return pa.array(values, pa.float64())


def _part(path: Path, order: Order, needs: Needs) -> tuple[pa.Schema, int, Chosen]:
    """Of a Parquet file its schema, how many rows it claims, and the model's columns."""
    with told_as_input(path), parquet.open_file(path) as file:
        schema, count = pa.schema(parquet.fields_of(file.schema_arrow)), file.metadata.num_rows
    chosen = _chosen(schema.names, path.name, order, needs)
    problems = []
    for name, kind in chosen:
        found = schema.field(name).type
        taken, what = TAKEN.get(kind, ({TEXT, CATEGORY}, "text"))
        if kind_of(found) not in taken | {EMPTY}:
            problems.append(
                f"input: {path.name} column {shorten(name)} is of type {found}; the model takes "
                f"{what} there: turn it into {what}"
            )
    if problems:
        raise DataError("\n".join(problems))
    return schema, count, chosen


def _chosen(names: Sequence[str], label: str, order: Order, needs: Needs) -> Chosen:
    """The model's columns among those of the file. Raises DataError with all that are missing."""
    wanted = [name for name, _ in needs.columns or ()]
    problems = [
        f"{setting}: {label} {has_no(name, names, 'column ')}"
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
