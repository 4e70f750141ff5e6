"""Turns Arrow columns, as CSV and Parquet are read into, into a matrix of numbers and a target.
What is not a number, a boolean or (for the target) text is refused, each column by its name and
its first bad cell, all columns at once. No path through here imports pandas.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from pyarrow import compute

from tasks.engine.raw import MOST_SHOWN, DataError, Raw, shorten

BROKEN = (
    pa.ArrowException,
    OSError,
    ValueError,
    TypeError,
    KeyError,
    OverflowError,
    MemoryError,
    RuntimeError,
    BufferError,
)


def raw_rows(table: pa.Table, *, target: str, label: str, note: str) -> Raw:
    """The table as a float64 matrix (n, columns) and a target (n,).

    Errors: DataError with one line for each column at fault, the first few of them.
    """
    names = [name for name in table.column_names if name != target]
    if table.num_rows == 0:
        raise DataError(f"data.path: {label} has no rows{note}; write some")
    try:
        problems = wrong_types(table.schema, target, label)
        problems = problems or _unusable(table, target=target, label=label, note=note)
        if problems:
            raise DataError("\n".join(problems[:MOST_SHOWN] + _rest(problems)))
        features = np.empty((table.num_rows, len(names)), dtype=np.float64)
        columns = dict(zip(table.column_names, table.columns, strict=True))
        for i, name in enumerate(names):
            features[:, i] = _numbers(columns[name].cast(pa.float64(), safe=False))
        return Raw(
            features=features,
            target=_target(columns[target]),
            feature_names=tuple(names),
            target_name=target,
            label=label,
            row_note=note,
        )
    except DataError:
        raise
    except BROKEN as error:
        raise DataError(
            f"data.path: {label} cannot be turned into numbers ({shorten(str(error), 160)}); "
            "write it anew"
        ) from None


def _rest(problems: Sequence[str]) -> list[str]:
    more = len(problems) - MOST_SHOWN
    return [f"data.path: and {more} more columns like these"] if more > 0 else []


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def wrong_types(fields: Sequence[pa.Field], target: str, label: str) -> list[str]:
    """A line for each column of a type that is of no use, such as dates, lists and decimals."""
    problems = []
    for field in fields:
        name, kind = shorten(field.name), field.type
        if _is_number(kind) or _is_text(kind) or pa.types.is_null(kind):
            continue
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            remedy = "holds bytes that are not UTF-8 text; save it as UTF-8"
        elif field.name == target:
            remedy = f"is of type {kind}; a target must be numbers, booleans or text"
        else:
            remedy = f"is of type {shorten(str(kind))}; turn it into numbers or drop it"
        problems.append(f"data.path: {label} column {name} {remedy}")
    return problems


def _unusable(table: pa.Table, *, target: str, label: str, note: str) -> list[str]:
    """A line for each column with missing cells, and each feature that is text."""
    problems = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        setting = "data.target" if name == target else "data.path"
        where = f"{setting}: {label} column {shorten(name)}"
        if column.null_count == table.num_rows:
            problems.append(f"{where}: holds no value in any row; drop the column")
        elif column.null_count:
            row = compute.index(column.is_null(), True).as_py()
            problems.append(
                f"{setting}: {label} row {row + 1}{note}, column {shorten(name)}: is missing "
                f"(as in {column.null_count} rows); fill it in or drop the rows"
            )
        elif name != target and _is_text(column.type):
            row, cell = _first_text(column)
            problems.append(
                f"data.path: {label} row {row + 1}{note}, column {shorten(name)}: must be a number "
                f"(got {shorten(cell)}); turn the column into numbers or drop it"
            )
    return problems


def _first_text(column: pa.ChunkedArray) -> tuple[int, str]:
    first = ""
    for row, cell in enumerate(cell for chunk in column.chunks for cell in chunk.to_pylist()):
        first = first or cell
        try:
            float(cell)
        except ValueError:
            return row, cell
    return 0, first


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    # DLPack, since Arrow's own to_numpy imports pandas.
    parts = [np.from_dlpack(chunk) for chunk in column.chunks if len(chunk)]
    return np.concatenate(parts)


def _target(column: pa.ChunkedArray) -> np.ndarray:
    """The labels: numbers of their own type, booleans, or an object array of stripped text."""
    if _is_text(column.type):
        labels = np.empty(len(column), dtype=object)
        labels[:] = [text.strip() for text in column.to_pylist()]
        return labels
    if pa.types.is_boolean(column.type):
        return _numbers(column.cast(pa.uint8())).astype(bool)
    return _numbers(column)
