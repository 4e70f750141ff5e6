"""Reads the rows to predict of NPY and NPZ files, mapped or unpacked a part at a time, since they
may be larger than memory. What a header claims is held against what is there, and nothing is ever
unpickled.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np

from tasks.engine.files.npy import Header, check_size, parse_header
from tasks.engine.files.npz import BROKEN
from tasks.engine.files.source_data import DataError, check_memory, listed, shorten
from tasks.engine.predict.input_batches import BATCH_BYTES, Batch, Needs, told_as_input
from tasks.engine.predict.request import Order

USUAL_NAMES = ("x", "data", "features", "images")


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


def read_npz(order: Order, needs: Needs) -> Iterator[Batch]:
    """The rows of the arrays that the model takes, unpacked a part at a time."""
    path = Path(order.input)
    headers = npz_headers(path, needs)
    total = min(header.shape[0] for header in headers.values())
    step = min(_rows_of(header) for header in headers.values())
    if any(header.fortran and len(header.shape) > 1 for header in headers.values()):
        needed = sum(header.value_bytes for header in headers.values())
        check_memory(2 * needed, f"input: {path.name}", "save it in C order")
        step = max(1, total)  # its rows lie apart: all of it at once
    try:
        with zipfile.ZipFile(path) as archive, ExitStack() as stack:
            files = {n: stack.enter_context(archive.open(f"{n}.npy")) for n in headers}
            for name, file in files.items():
                file.read(headers[name].start)
            for first in range(0, max(1, total), step):
                many = min(step, total - first)
                parts = {n: _next(files[n], headers[n], many) for n in headers}
                rows = parts if needs.inputs else next(iter(parts.values()))
                yield Batch(rows, None, path.name, first, first + many)
            for file in files.values():
                file.read(1)  # the archive's checksum is compared at the end of a member
    except BROKEN as error:
        raise DataError(_damaged(path, error)) from None


def _next(file: IO[bytes], header: Header, rows: int) -> np.ndarray:
    wanted = rows * (header.value_bytes // max(1, header.shape[0]))
    data = file.read(wanted)
    if len(data) != wanted:
        raise EOFError("it is cut off")
    shape = (rows, *header.shape[1:])
    flat = np.frombuffer(bytearray(data), header.dtype)
    return np.ascontiguousarray(flat.reshape(shape, order="F" if header.fortran else "C"))


def npy_header(path: Path) -> Header:
    """Of an array of numbers whose values are all there. Raises DataError."""
    with told_as_input(path), open(path, "rb") as file:
        header = parse_header(file, path.name)
        check_size(header, path.stat().st_size - header.start, path.name)
    return _numeric(header, path.name)


def npz_headers(path: Path, needs: Needs) -> dict[str, Header]:
    """Of the arrays that the model takes by name, or of x, or of the only one; of equal lengths.

    Raises DataError.
    """
    try:
        with told_as_input(path), zipfile.ZipFile(path) as archive:
            members = {m.filename.removesuffix(".npy"): m for m in archive.infolist()}
            found = {}
            for name in _picked(list(members), path.name, needs):
                what = f"{path.name} array {shorten(name)}"
                with archive.open(members[name]) as file:
                    header = parse_header(file, what)
                check_size(header, members[name].file_size - header.start, what)
                found[name] = _numeric(header, what)
    except DataError:
        raise
    except BROKEN as error:
        raise DataError(_damaged(path, error)) from None
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
    usual = [name for name in USUAL_NAMES if name in names]
    if not needs.inputs and len(names) != 1 and not usual:
        raise DataError(
            f"input: {label} must hold one array, or one named x (got {listed(names) or 'none'}); "
            "save it so"
        )
    return list(needs.inputs) or (names if len(names) == 1 else usual[:1])


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


def _damaged(path: Path, error: BaseException) -> str:
    said = shorten(str(error) or type(error).__name__, 120)
    return f"input: {path.name} is damaged or no NPZ archive ({said}); copy or write it anew"
