"""Rows to predict, as they stand between a file and a model: what a model takes of a file, one
batch of rows with the words by which a person finds a row again; and texts, a line each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.engine.files.source_data import DataError
from tasks.engine.models.raw_inputs import NOTHING
from tasks.engine.models.structured_inputs import is_structured, wanted
from tasks.engine.predict.request import Order, told_as_input

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_BYTES = 8 * 1024**2  # of a file, read at once


@dataclass(frozen=True)
class Needs:
    """What a model takes: columns by name, or rows of a shape."""

    task: str
    source: str
    input_shape: tuple[int, ...]
    columns: tuple[tuple[str, str], ...] | None  # name and kind: number, category or text
    inputs: tuple[str, ...] = ()  # names of arrays, where a model of the user's own takes several
    is_own: bool = False  # takes arrays of other types and shapes, which it judges itself
    width: int = 1  # values of a row
    na: tuple[str, ...] = ()  # words that mean missing in text, beside the empty cell
    decimal: str = "."  # the decimal mark of numbers in text


def needs_of(spec: Mapping[str, Any]) -> Needs:
    """What the model with this description takes."""
    columns: tuple[tuple[str, str], ...] | None = None
    if spec["task"] == "tokens" and spec["source"] == "text":
        columns = (("text", "text"),)
    elif spec.get("columns"):
        columns = tuple((column["name"], column["kind"]) for column in spec["columns"])
    elif spec["feature_names"]:
        columns = tuple((name, "number") for name in spec["feature_names"])
    own = wanted(spec) if is_structured(spec) and columns is None else {}
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
    """Some rows, in order."""

    rows: Any  # as Predictor.predict takes them: a DataFrame, or an array
    kept: pa.Table | None  # the columns to keep, one row each
    label: str  # the file's name
    first: int  # number of the first row in the file, from 0
    done: int  # of Total.amount, when these rows are done
    row: str = "row"  # what a row of the file is called
    note: str = ""  # how rows are counted, always from 1

    def at(self, index: int) -> str:
        """The words by which a person finds a row of this batch again; index from 0."""
        return f"{self.label} {self.row} {self.first + index + 1}{self.note}"


def cut(rows: Any, begin: int, end: int) -> Any:
    """These rows of a DataFrame, an array, or a mapping of arrays."""
    if isinstance(rows, Mapping):
        return {name: values[begin:end] for name, values in rows.items()}
    return rows.iloc[begin:end] if hasattr(rows, "iloc") else rows[begin:end]


def count(rows: Any) -> int:
    """How many rows there are."""
    return len(next(iter(rows.values()))) if isinstance(rows, Mapping) else len(rows)


def first_hole(rows: Any) -> int | None:
    """The first row with a number that is missing or infinite; None where there is none."""
    parts = rows.values() if isinstance(rows, Mapping) else [rows]
    for part in map(np.asarray, parts):
        if part.dtype.kind == "f" and not np.isfinite(part).all():
            return int((~np.isfinite(part)).reshape(len(part), -1).any(axis=1).argmax())
    return None


def read_txt(order: Order) -> Iterator[Batch]:
    """A text a line, as a DataFrame with the column `text`."""
    import pandas as pd

    path, first = Path(order.input), 0
    with open(path, "rb") as file:
        while True:
            with told_as_input(path):
                lines = file.readlines(BATCH_BYTES)
            if not lines and first:
                return
            texts = [_text(line, path.name, first + i) for i, line in enumerate(lines)]
            rows = pd.DataFrame({"text": pd.Series(texts, dtype=object)})
            yield Batch(rows, None, path.name, first, file.tell(), row="line")
            if not lines:
                return
            first += len(lines)


def _text(line: bytes, label: str, index: int) -> str:
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
