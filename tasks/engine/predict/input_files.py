"""The files of rows to predict, by kind: what each must be for a model, how much there is of it,
and its rows batch by batch, arrays mapped or unpacked a part at a time, since they may be larger
than memory. It refuses, by the head of a file, what the model could never take.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tasks.engine.files import npy, npz
from tasks.engine.files.source_data import DataError, check_memory, listed
from tasks.engine.predict.input_batches import BATCH_BYTES, Batch, Needs, read_txt
from tasks.engine.predict.request import Order, told_as_input
from tasks.engine.settings.data_config import TABLE_FILES

TABLES_WORDS = "a csv, tsv or parquet file"


def check_rows(order: Order, needs: Needs) -> None:
    """Raises DataError where the model cannot take rows of this file, by its head."""
    _check_kind(order, needs)
    if order.reads in TABLE_FILES:
        from tasks.engine.predict import (
            table_inputs,  # 0.1 s for pyarrow, and arrays need none of it
        )

        table_inputs.check_table(order, needs)
    elif order.reads != "txt":
        _check_shape(order, needs)


def amount(order: Order, needs: Needs) -> int:
    """How much there is to do, in the units of Batch.done: bytes of text, or rows."""
    if order.reads == "parquet":
        from tasks.engine.predict import table_inputs

        return table_inputs.parquet_rows(order)
    if order.reads in ("npy", "npz"):
        return next(iter(_headers(order, needs).values())).shape[0]
    return Path(order.input).stat().st_size


def batches(order: Order, needs: Needs) -> Iterator[Batch]:
    """All rows in order; one batch of none where there are none. Raises DataError."""
    check_rows(order, needs)
    if order.reads in TABLE_FILES:
        from tasks.engine.predict import table_inputs

        is_parquet = order.reads == "parquet"
        read = table_inputs.read_parquet if is_parquet else table_inputs.read_csv
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
            f"input: the model takes {_in_words(needs)}, not a text a line (got txt); give "
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
    headers = _headers(order, needs)
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


def _headers(order: Order, needs: Needs) -> dict[str, npy.Header]:
    """Of the arrays that the model takes by name, or of x, or of the only one; of equal lengths."""
    path = Path(order.input)
    with told_as_input(path):
        if order.reads == "npy":
            found = {"": npy.header_of(path)}
        else:
            there = npz.headers_of(path, lambda names: _picked(names, path.name, needs))
            found = {name: there[name] for name in needs.inputs or there}
        for name, header in found.items():
            npy.check_numeric(header, f"{path.name} array {name!r}" if name else path.name)
    if any(not header.shape for header in found.values()):
        raise DataError(f"input: {path.name} is a single value; save rows, shape (rows, ...)")
    lengths = {name: header.shape[0] for name, header in found.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"input: the arrays of {path.name} must have as many rows (got {lengths})")
    return found


def _picked(names: list[str], label: str, needs: Needs) -> list[str]:
    missing = [name for name in needs.inputs if name not in names]
    if missing:
        raise DataError(
            f"input: {label} has no array {missing[0]!r} (got {listed(names) or 'none'}); the "
            f"model takes {', '.join(needs.inputs)}: save them so"
        )
    usual = names if len(names) == 1 else [n for n in npz.FEATURE_NAMES if n in names]
    if not needs.inputs and not usual:
        raise DataError(
            f"input: {label} must hold one array, or one named x (got {listed(names) or 'none'}); "
            "save it so"
        )
    return list(needs.inputs) or usual[:1]


def _read_arrays(order: Order, needs: Needs) -> Iterator[Batch]:
    path, headers, first = Path(order.input), _headers(order, needs), 0
    for found in _parts(path, headers):
        rows = found if needs.inputs else next(iter(found.values()))
        many = len(next(iter(found.values())))
        yield Batch(rows, None, path.name, first, first + many)
        first += many


def _parts(path: Path, headers: dict[str, npy.Header]) -> Iterator[dict[str, np.ndarray]]:
    total = next(iter(headers.values())).shape[0]
    row_bytes = max(header.value_bytes for header in headers.values()) // max(1, total)
    step = max(1, BATCH_BYTES // max(1, row_bytes))
    with told_as_input(path):
        if "" in headers:
            array = npy.mapped(path, headers[""])
            for first in range(0, max(1, total), step):
                # A copy: the file stays as it is.
                yield {"": np.array(array[first : first + step], order="C")}
            return
        if any(header.fortran and len(header.shape) > 1 for header in headers.values()):
            needed = sum(header.value_bytes for header in headers.values())
            check_memory(2 * needed, f"input: {path.name}", "save it in C order")
            step = max(1, total)  # its rows lie apart: all of it at once
        yield from npz.blocks(path, headers, rows=step)


def _in_words(needs: Needs) -> str:
    if needs.columns is None:
        return f"rows of the shape {needs.input_shape}"
    return f"the columns {', '.join(repr(name) for name, _ in needs.columns[:12])}"
