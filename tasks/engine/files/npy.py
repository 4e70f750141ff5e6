"""Reads NPY files without ever unpickling: an array of objects is refused by its name before a
byte of it is read, and what a header claims is held against the bytes that are there before memory
is taken for it. The header is parsed here, since numpy's own reader trusts it.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from tasks.engine.files.source_data import DataError, Raw, shorten, size, source_file
from tasks.engine.settings.data_config import DataConfig

MOST_VALUES = 2**62
LONGEST_TYPE = 64  # as text; what numpy.save writes takes less than 20


@dataclass(frozen=True)
class Header:
    """What an array says of itself; `start` is where its values begin, in bytes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    fortran: bool
    start: int

    @property
    def value_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def parse_header(file: IO[bytes], what: str) -> Header:
    """The header of an array whose bytes begin here.

    Errors: DataError where there is none, or where the array is of objects or records.
    """
    magic = file.read(8)
    wide = magic[6:7] in (b"\x02", b"\x03")
    length_bytes = file.read(4 if wide else 2)
    if magic[:6] != b"\x93NUMPY" or magic[6:7] not in (b"\x01", b"\x02", b"\x03"):
        raise DataError(
            f"data.path: {what} is no array (it starts with {magic[:6]!r}), and a pickle is never "
            "loaded; save it with numpy.savez or numpy.save"
        )
    length = int.from_bytes(length_bytes, "little")
    text = file.read(min(length, 65536))
    try:
        said = ast.literal_eval(text.decode("latin-1").strip())
        descr, fortran, shape = said["descr"], said["fortran_order"], said["shape"]
        sound = isinstance(shape, tuple) and all(
            type(n) is int and 0 <= n < MOST_VALUES for n in shape
        )
        if not sound or type(fortran) is not bool or too_many(shape):
            raise ValueError("shape or order")
        plain = isinstance(descr, str) and "," not in descr and "(" not in descr
        if isinstance(descr, str) and len(descr) > LONGEST_TYPE:
            raise ValueError("no type")
        dtype = np.dtype(descr) if plain else np.dtype(object)
        if dtype.itemsize == 0:
            raise ValueError("values of no size")
    except (ValueError, TypeError, SyntaxError, KeyError, RecursionError, MemoryError):
        raise DataError(
            f"data.path: {what} has a damaged header ({shorten(text)}); write it anew"
        ) from None
    if not plain:
        raise DataError(f"data.path: {what} is an array of records; save plain numbers")
    if dtype.hasobject:
        raise DataError(
            f"data.path: {what} is an array of Python objects (a pickle), which is never loaded; "
            "save it as numbers or text, e.g. with .astype(str)"
        )
    return Header(dtype, shape, fortran, len(magic) + len(length_bytes) + length)


def too_many(shape: Sequence[int]) -> bool:
    """Whether a shape is beyond what numpy can hold: its axes, or the count of its values."""
    return len(shape) > 32 or math.prod(shape) > MOST_VALUES


def check_size(header: Header, there_bytes: int, what: str) -> None:
    """Raises DataError where the values claimed are not just the bytes that are there."""
    if header.value_bytes == there_bytes:
        return
    claim = f"claims {header.shape} values of {header.dtype} ({size(header.value_bytes)})"
    verdict = "it is cut off" if header.value_bytes > there_bytes else "something else follows"
    raise DataError(
        f"data.path: {what} {claim} but holds {there_bytes:,} bytes: {verdict}; write it anew"
    )


def check_npy(data: DataConfig) -> None:
    """Raises DataError for an NPY file that is not a whole matrix of numbers."""
    _npy_header(source_file(data), data.target)


def read_npy(data: DataConfig) -> Raw:
    """The matrix (n, columns + 1) mapped from the file; its last column is the target."""
    path = source_file(data)
    matrix = mapped(path, _npy_header(path, data.target))
    return Raw(
        features=matrix[:, :-1],
        target=booleans(np.array(matrix[:, -1])),
        feature_names=None,
        target_name="the last column",
        label=path.name,
    )


def mapped(path: Path, header: Header) -> np.ndarray:
    """The array of a file as a map of it. Errors: DataError."""
    if not header.value_bytes:
        return np.empty(header.shape, header.dtype)  # nothing cannot be mapped
    try:
        return np.memmap(
            path,
            header.dtype,
            mode="r",
            offset=header.start,
            shape=header.shape,
            order="F" if header.fortran else "C",
        )
    except (OSError, ValueError, OverflowError) as error:
        raise DataError(
            f"data.path: {path.name} cannot be mapped ({shorten(str(error), 120)})"
            "; copy it to a local disk"
        ) from None


def header_of(path: Path) -> Header:
    """Of a file that holds an array with all its values. Errors: DataError."""
    with open(path, "rb") as file:
        header = parse_header(file, path.name)
    check_size(header, path.stat().st_size - header.start, path.name)
    return header


def _npy_header(path: Path, target: str | None) -> Header:
    if target is not None:
        raise DataError(
            f"data.target: has no meaning for source npy (got {shorten(target)}), whose last "
            "column is the target; drop it, or use an npz file"
        )
    header = header_of(path)
    check_numeric(header, path.name)
    if len(header.shape) != 2 or header.shape[1] < 2 or header.shape[0] < 1:
        raise DataError(
            f"data.path: {path.name} must hold rows of features with the target as last column, "
            f"shape (rows, features + 1) (got {header.shape}); save it so, or use an npz file"
        )
    return header


def check_numeric(header: Header, what: str) -> None:
    if header.dtype.kind not in "biuf" or header.dtype.itemsize > 8:
        raise DataError(
            f"data.path: {what} must hold real numbers of at most 64 bits (got {header.dtype}); "
            "save it as float32"
        )


def booleans(values: np.ndarray) -> np.ndarray:
    """The values of a file; of booleans each is True or False. A damaged file may hold the byte 2,
    which numpy takes for a third one."""
    return values.view(np.uint8) != 0 if values.dtype.kind == "b" else values
