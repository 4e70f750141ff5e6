"""Reads NPZ archives without ever unpickling: what each member claims, its size unpacked and how
much it was shrunk are looked at before anything is unpacked, and never more is read than claimed.
"""

from __future__ import annotations

import lzma
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from tasks.engine.files.npy import Header, booleans, check_numeric, check_size, parse_header
from tasks.engine.files.source_data import (
    DataError,
    Raw,
    check_memory,
    listed,
    pick_target,
    shorten,
    size,
    source_file,
)
from tasks.engine.settings.data_config import DataConfig

FEATURE_NAMES = ("x", "data", "features", "images")
LABEL_NAMES = {"labels": "label", "targets": "target"}
CHANNELS = (1, 3, 4)
BOMB_BYTES, BOMB_RATIO = 64 * 1024**2, 200  # real measurements hardly shrink 10 times
MOST_ARRAYS = 1000
LAST_CHARACTER = 0x10FFFF
BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OSError,
    ValueError,
    KeyError,
    IndexError,
    OverflowError,
    MemoryError,
    NotImplementedError,
    RuntimeError,  # an encrypted member
)


def check_npz(data: DataConfig) -> None:
    """Raises DataError for an archive without one array of features and one of labels."""
    path = source_file(data)
    chosen(headers_of(path), data.target, path.name)


def read_npz(data: DataConfig) -> Raw:
    """Features and target of an archive; images (n, h, w) and (n, h, w, c) become (n, c, h, w).

    A four-dimensional array is taken as channels first, unless only its last axis is 1, 3 or 4.
    """
    path = source_file(data)
    headers = headers_of(path)
    x_name, y_name = chosen(headers, data.target, path.name)
    both = {name: headers[name] for name in (x_name, y_name)}
    needed = sum(header.value_bytes for header in both.values())
    what, remedy = f"data.path: {path.name}", "write it as npy, which is mapped"
    check_memory(2 * needed, what, remedy, data=data)
    (arrays,) = blocks(path, both, rows=both[x_name].shape[0])
    features, target = arrays[x_name], arrays[y_name]
    if target.dtype.kind == "U":
        target = _text(target, f"data.target: {path.name} array {y_name!r}")
    return Raw(
        features=channels_first(features),
        target=booleans(target[:, 0] if target.shape[1:] == (1,) else target),
        feature_names=None,
        target_name=y_name,
        label=path.name,
    )


def headers_of(
    path: Path, pick: Callable[[list[str]], Collection[str]] = lambda names: names
) -> dict[str, Header]:
    """The headers of those arrays in the archive that are picked by their names, each held against
    the member's own size. Errors: DataError."""
    headers: dict[str, Header] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            check_count(len(archive.infolist()), path.name)
            picked = pick([name.removesuffix(".npy") for name in archive.namelist()])
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                if name not in picked:
                    continue
                what = f"{path.name} array {shorten(name)}"
                if name in headers:
                    raise DataError(f"data.path: {what} is there twice; write the file anew")
                ratio = member.file_size / max(member.compress_size, 1)
                if member.file_size > BOMB_BYTES and ratio > BOMB_RATIO:
                    raise DataError(
                        f"data.path: {what} unpacks {size(member.compress_size)} to "
                        f"{size(member.file_size)}, more than {BOMB_RATIO} times; if that is "
                        "meant, save it with numpy.savez, which does not compress"
                    )
                with archive.open(member) as file:
                    headers[name] = parse_header(file, what)
                check_size(headers[name], member.file_size - headers[name].start, what)
    except DataError:
        raise
    except BROKEN as error:
        raise DataError(_damaged(path, error)) from None
    return headers


def check_count(arrays: int, label: str) -> None:
    """Raises DataError where looking at each array would take long."""
    if arrays > MOST_ARRAYS:
        raise DataError(
            f"data.path: {label} holds {arrays:,} arrays, and at most {MOST_ARRAYS:,} are looked "
            "at; save the features as one array and the labels as another"
        )


def _damaged(path: Path, error: BaseException) -> str:
    return (
        f"data.path: {path.name} is damaged or no NPZ archive "
        f"({shorten(str(error) or type(error).__name__, 120)}); copy or write it anew"
    )


def chosen(headers: Mapping[str, Header], target: str | None, label: str) -> tuple[str, str]:
    """The names of the features' and of the target's array, whose shapes fit each other."""
    if not headers:
        raise DataError(f"data.path: {label} holds no arrays; save features x and labels y")
    # numpy's users write labels and targets in the plural.
    plain = {LABEL_NAMES.get(name.lower(), name): name for name in headers}
    if target is not None and target in headers:
        y_name = target
    else:
        y_name = plain[pick_target(list(plain), target, label)]
    others = [name for name in headers if name != y_name]
    usual = [name for name in others if name.lower() in FEATURE_NAMES]
    found = usual if len(others) > 1 else others
    if len(found) != 1:
        raise DataError(
            f"data.path: {label} must hold one array of features beside {y_name!r}, or one named "
            f"{', '.join(FEATURE_NAMES)} (got {listed(others) or 'none'}); save it so"
        )
    x, y = headers[found[0]], headers[y_name]
    check_numeric(x, f"{label} array {found[0]!r}")
    if y.dtype.kind != "U":
        check_numeric(y, f"{label} array {y_name!r}")
    if x.shape[:1] == (0,):
        raise DataError(f"data.path: {label} array {found[0]!r} has no rows; write some")
    if not 2 <= len(x.shape) <= 4 or 0 in x.shape:
        raise DataError(
            f"data.path: {label} array {found[0]!r} must be rows (n, features) or images "
            f"(n, h, w), (n, c, h, w) or (n, h, w, c) (got shape {x.shape}); reshape it"
        )
    if not 1 <= len(y.shape) <= 2 or 0 in y.shape or (y.dtype.kind == "U" and y.shape[1:] > (1,)):
        raise DataError(
            f"data.target: {label} array {y_name!r} must hold one value a row, shape (n,), or "
            f"several numbers, shape (n, k) (got {y.dtype} {y.shape}); reshape it"
        )
    if x.shape[0] != y.shape[0]:
        raise DataError(
            f"data.path: {label} array {found[0]!r} has {x.shape[0]:,} rows, but {y_name!r} has "
            f"{y.shape[0]:,}; they must be as many"
        )
    return found[0], y_name


def blocks(path: Path, headers: Mapping[str, Header], *, rows: int) -> Iterator[dict[str, Any]]:
    """So many rows of these arrays of one length at once, and one block even of no rows; never more
    is read than their headers claim. Errors: DataError."""
    total = min(header.shape[0] for header in headers.values())
    try:
        with zipfile.ZipFile(path) as archive, ExitStack() as stack:
            members = {m.filename.removesuffix(".npy"): m for m in archive.infolist()}
            files = {name: stack.enter_context(archive.open(members[name])) for name in headers}
            for name, file in files.items():
                file.read(headers[name].start)
            for first in range(0, max(1, total), max(1, rows)):
                many = min(rows, total - first)
                yield {name: _next(file, headers[name], many) for name, file in files.items()}
            for file in files.values():
                file.read(1)  # the archive's checksum is compared at the end of a member
    except BROKEN as error:
        raise DataError(_damaged(path, error)) from None


def _next(file: IO[bytes], header: Header, rows: int) -> np.ndarray:
    """The next rows of an array; its rows lie together, or these are all of them."""
    shape = (rows, *header.shape[1:])
    flat = np.empty(math.prod(shape) * header.dtype.itemsize, dtype=np.uint8)
    filled = 0
    while filled < flat.size:
        part = file.read(min(flat.size - filled, 1 << 24))
        if not part:
            raise EOFError("an array is cut off")
        flat[filled : filled + len(part)] = np.frombuffer(part, dtype=np.uint8)
        filled += len(part)
    return flat.view(header.dtype).reshape(shape, order="F" if header.fortran else "C")


def channels_first(x: np.ndarray) -> np.ndarray:
    """Images as (n, c, h, w), of which the axis of channels was found by its length."""
    if x.ndim == 3:
        return x[:, np.newaxis]
    if x.ndim == 4 and x.shape[1] not in CHANNELS and x.shape[3] in CHANNELS:
        return np.moveaxis(x, 3, 1)
    return x


def _text(target: np.ndarray, what: str) -> np.ndarray:
    flat = np.ascontiguousarray(target.reshape(-1))
    codes = flat.view(np.dtype(np.uint32).newbyteorder(flat.dtype.byteorder))
    if (codes > LAST_CHARACTER).any():  # numpy would raise a SystemError for it
        raise DataError(f"{what} holds what is no text; write it anew")
    labels = np.empty(target.size, dtype=object)
    labels[:] = [str(text).strip() for text in flat]
    return labels
