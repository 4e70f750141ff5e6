"""Rows to predict, as they stand between a file and a model: what a model takes of a file, one
batch of rows with the words by which a person finds a row again, and the readers of arrays and
texts, which map or stream what may be larger than memory. Nothing in a file is ever unpickled.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.engine.archives import BROKEN
from tasks.engine.arrays import Header, check_size, parse_header
from tasks.engine.predict_order import Order
from tasks.engine.raw import DataError, check_memory, listed, shorten

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_BYTES = 8 * 1024**2  # of a file, read at once
USUAL_NAMES = ("x", "data", "features", "images")


@dataclass(frozen=True)
class Needs:
    """What a model takes: columns by name, or rows of a shape."""

    task: str
    source: str
    input_shape: tuple[int, ...]
    columns: tuple[tuple[str, str], ...] | None  # name and kind: number, category or text

    @property
    def width(self) -> int:
        return math.prod(self.input_shape)


def needs_of(spec: Mapping[str, Any]) -> Needs:
    """What the model with this description takes."""
    columns: tuple[tuple[str, str], ...] | None = None
    if spec["task"] == "tokens" and spec["source"] == "text":
        columns = (("text", "text"),)
    elif spec.get("columns"):
        columns = tuple((column["name"], column["kind"]) for column in spec["columns"])
    elif spec["feature_names"]:
        columns = tuple((name, "number") for name in spec["feature_names"])
    return Needs(spec["task"], spec.get("source", ""), tuple(spec["input_shape"]), columns)


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


def read_npy(order: Order) -> Iterator[Batch]:
    """The rows of an array, mapped."""
    path = Path(order.input)
    header = npy_header(path)
    try:
        array = (
            np.memmap(
                path,
                header.dtype,
                mode="r",
                offset=header.start,
                shape=header.shape,
                order="F" if header.fortran else "C",
            )
            if header.value_bytes
            else np.empty(header.shape, header.dtype)
        )
    except (OSError, ValueError, OverflowError) as error:
        raise DataError(
            f"input: {path.name} cannot be mapped ({shorten(str(error), 120)}); copy it to a local "
            "disk"
        ) from None
    step = _rows_of(header)
    for first in range(0, max(1, len(array)), step):
        rows = np.array(array[first : first + step], order="C")  # a copy: the file stays as it is
        yield Batch(rows, None, path.name, first, first + len(rows))


def read_npz(order: Order) -> Iterator[Batch]:
    """The rows of the array x, or of the only one, unpacked a part at a time."""
    path = Path(order.input)
    name, header = npz_header(path)
    step = _rows_of(header)
    if header.fortran and len(header.shape) > 1:
        check_memory(2 * header.value_bytes, f"input: {path.name}", "save it in C order")
        step = max(1, header.shape[0])  # its rows lie apart: all of it at once
    row_bytes = header.value_bytes // max(1, header.shape[0])
    try:
        with zipfile.ZipFile(path) as archive, archive.open(name) as file:
            file.read(header.start)
            for first in range(0, max(1, header.shape[0]), step):
                many = min(step, header.shape[0] - first)
                data = file.read(many * row_bytes)
                if len(data) != many * row_bytes:
                    raise EOFError("it is cut off")
                shape = (many, *header.shape[1:])
                flat = np.frombuffer(bytearray(data), header.dtype)
                rows = flat.reshape(shape, order="F" if header.fortran else "C")
                yield Batch(np.ascontiguousarray(rows), None, path.name, first, first + many)
            file.read(1)  # the archive's checksum is compared at the end of a member
    except BROKEN as error:
        raise DataError(_damaged(path, error)) from None


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


def npy_header(path: Path) -> Header:
    """Of an array of numbers whose values are all there. Raises DataError."""
    with told_as_input(path), open(path, "rb") as file:
        header = parse_header(file, path.name)
        check_size(header, path.stat().st_size - header.start, path.name)
    return _numeric(header, path.name)


def npz_header(path: Path) -> tuple[str, Header]:
    """The member that holds the array x, or the only one, and its header. Raises DataError."""
    try:
        with told_as_input(path), zipfile.ZipFile(path) as archive:
            members = {m.filename.removesuffix(".npy"): m for m in archive.infolist()}
            usual = [name for name in USUAL_NAMES if name in members]
            name = usual[0] if usual and len(members) > 1 else next(iter(members), "")
            if not name or (len(members) > 1 and not usual):
                raise DataError(
                    f"input: {path.name} must hold one array, or one named x (got "
                    f"{listed(list(members)) or 'none'}); save it so"
                )
            what = f"{path.name} array {shorten(name)}"
            with archive.open(members[name]) as file:
                header = parse_header(file, what)
            check_size(header, members[name].file_size - header.start, what)
            return members[name].filename, _numeric(header, what)
    except DataError:
        raise
    except BROKEN as error:
        raise DataError(_damaged(path, error)) from None


@contextmanager
def told_as_input(path: Path) -> Iterator[None]:
    """What a reader says of data.path is said of the input; so are the system's own errors."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace("data.path: ", "input: ")) from None
    except OSError as error:
        raise DataError(
            f"input: {path.name} cannot be read ({error.strerror or error}); mend that or name "
            "another file"
        ) from None


def _numeric(header: Header, what: str) -> Header:
    if header.dtype.kind not in "biuf" or header.dtype.itemsize > 8:
        raise DataError(
            f"input: {what} must hold real numbers of at most 64 bits (got {header.dtype}); save "
            "it as float32"
        )
    if not header.shape:
        raise DataError(f"input: {what} is a single value; save rows, shape (rows, ...)")
    return header


def _rows_of(header: Header) -> int:
    row_bytes = header.value_bytes // max(1, header.shape[0])
    return max(1, BATCH_BYTES // max(1, row_bytes))


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


def _damaged(path: Path, error: BaseException) -> str:
    said = shorten(str(error) or type(error).__name__, 120)
    return f"input: {path.name} is damaged or no NPZ archive ({said}); copy or write it anew"
