"""The files of rows to predict, by kind: what each must be for a model, how much there is of it,
and its rows batch by batch. It refuses, by the head of a file, what the model could never take.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tasks.engine.files.source_data import DataError
from tasks.engine.predict.array_inputs import npy_header, npz_headers, read_npy, read_npz
from tasks.engine.predict.input_batches import Batch, Needs, read_txt
from tasks.engine.predict.request import TABLES, Order

TABLES_WORDS = "a csv, tsv or parquet file"


def check_rows(order: Order, needs: Needs) -> None:
    """Raises DataError where the model cannot take rows of this file, by its head."""
    _check_kind(order, needs)
    if order.reads in TABLES:
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
    path = Path(order.input)
    if order.reads == "npy":
        return npy_header(path).shape[0]
    if order.reads == "npz":
        return next(iter(npz_headers(path, needs).values())).shape[0]
    return path.stat().st_size


def batches(order: Order, needs: Needs) -> Iterator[Batch]:
    """All rows in order; one batch of none where there are none. Raises DataError."""
    check_rows(order, needs)
    if order.reads in TABLES:
        from tasks.engine.predict import table_inputs

        is_parquet = order.reads == "parquet"
        read = table_inputs.read_parquet if is_parquet else table_inputs.read_csv
        return read(order, needs)
    if order.reads == "npz":
        return read_npz(order, needs)
    return read_npy(order) if order.reads == "npy" else read_txt(order)


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
    path = Path(order.input)
    headers = {"": npy_header(path)} if order.reads == "npy" else npz_headers(path, needs)
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
            f"input: {path.name} must hold {wanted} (got {header.dtype} {shape}); save it so"
        )


def _in_words(needs: Needs) -> str:
    if needs.columns is None:
        return f"rows of the shape {needs.input_shape}"
    return f"the columns {', '.join(repr(name) for name, _ in needs.columns[:12])}"
