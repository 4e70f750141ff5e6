"""Reads arrays from NPY, NPZ and safetensors files without ever unpickling. numpy and safetensors
parse the headers; what an NPY header claims is compared with the bytes that are there before
memory is taken or anything is unpacked, since numpy trusts it. Arrays are mapped where the file
allows it, so that a file may be larger than memory. It refuses arrays of objects, types that
numpy has no numbers for, and files of which some bytes belong to no array.
"""

from __future__ import annotations

import lzma
import math
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic
from safetensors import SafetensorError, safe_open

from headroom.data.source_data import (
    DataError,
    check_memory,
    format_list,
    format_size,
    pick_target,
    shorten,
)


@dataclass(frozen=True)
class ArrayHeader:
    """The header of an array; `start` is where its values begin, in bytes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    fortran: bool
    start: int

    @property
    def value_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# What numpy raises for one header or another, of those that a fuzzer made too.
BAD_HEADER = (
    ValueError,
    TypeError,
    LookupError,
    SyntaxError,
    TokenError,
    RecursionError,
    MemoryError,
    OverflowError,
)


def parse_header(file: IO[bytes], what: str) -> ArrayHeader:
    """Parse the header of an array whose bytes begin here.

    Errors: DataError where there is none, or where the array is of objects or records.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of headers that Python 2 wrote
            version = read_magic(file)
            if version not in ((1, 0), (2, 0)):  # 3.0 is for records
                raise ValueError(f"format {version}")
            read = read_array_header_1_0 if version == (1, 0) else read_array_header_2_0
            shape, fortran, dtype = read(file)
    except BAD_HEADER as error:
        words = shorten(str(error).partition("\n")[0], 120)
        raise DataError(
            f"data.path: {what} is no array that numpy can read ({words}), and a pickle is never "
            "loaded; save it anew with numpy.savez or numpy.save"
        ) from None
    if dtype.hasobject:
        raise DataError(
            f"data.path: {what} is an array of Python objects (a pickle), which is never loaded; "
            "save it as numbers or text, e.g. with .astype(str)"
        )
    if dtype.names is not None or dtype.subdtype is not None:
        raise DataError(f"data.path: {what} is an array of records; save plain numbers")
    # numpy takes what it reads as it is, and cannot hold all of it.
    most = math.prod(max(1, length) for length in shape) * dtype.itemsize
    if min(shape, default=0) < 0 or len(shape) > 32 or not 0 < most < 2**63:
        raise DataError(
            f"data.path: {what} has a damaged header (it claims the shape {shorten(shape)} of "
            f"{shorten(dtype.str)}); write it anew"
        )
    return ArrayHeader(dtype, shape, fortran, file.tell())


def check_array_size(header: ArrayHeader, there_bytes: int, what: str) -> None:
    """Raises DataError where the values claimed are not just the bytes that are there."""
    if header.value_bytes == there_bytes:
        return
    claim = f"claims {header.shape} values of {header.dtype} ({format_size(header.value_bytes)})"
    verdict = "it is cut off" if header.value_bytes > there_bytes else "something else follows"
    raise DataError(
        f"data.path: {what} {claim} but holds {there_bytes:,} bytes: {verdict}; write it anew"
    )


def map_array(path: Path, header: ArrayHeader) -> np.ndarray:
    """Map the array of a file into memory. Errors: DataError."""
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


def read_header(path: Path) -> ArrayHeader:
    """Read the header of a file that holds an array with all its values. Errors: DataError."""
    with open(path, "rb") as file:
        header = parse_header(file, path.name)
    check_array_size(header, path.stat().st_size - header.start, path.name)
    return header


def check_numeric_type(header: ArrayHeader, what: str) -> None:
    if header.dtype.kind not in "biuf" or header.dtype.itemsize > 8:
        raise DataError(
            f"data.path: {what} must hold real numbers of at most 64 bits (got {header.dtype}); "
            "save it as float32"
        )


def normalize_booleans(values: np.ndarray) -> np.ndarray:
    """Return the values of a file, with each boolean either True or False. A damaged file may
    hold the byte 2, which numpy takes for a third value."""
    return values.view(np.uint8) != 0 if values.dtype.kind == "b" else values


FEATURE_NAMES = ("x", "data", "features", "images")
LABEL_NAMES = {"labels": "label", "targets": "target"}
CHANNELS = (1, 3, 4)
BOMB_BYTES, BOMB_RATIO = 64 * 1024**2, 200  # real measurements hardly shrink 10 times
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


def read_headers(
    path: Path, pick: Callable[[list[str]], Collection[str]] = lambda names: names
) -> dict[str, ArrayHeader]:
    """Read the headers of the arrays that `pick` chooses by name, each compared with the
    member's own size. Errors: DataError."""
    headers: dict[str, ArrayHeader] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            picked = pick([name.removesuffix(".npy") for name in archive.namelist()])
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                if name not in picked:
                    continue
                what = f"{path.name} array {shorten(name)}"
                ratio = member.file_size / max(member.compress_size, 1)
                if member.file_size > BOMB_BYTES and ratio > BOMB_RATIO:
                    raise DataError(
                        f"data.path: {what} unpacks {format_size(member.compress_size)} to "
                        f"{format_size(member.file_size)}, more than {BOMB_RATIO} times; if that "
                        "is meant, save it with numpy.savez, which does not compress"
                    )
                with archive.open(member) as file:
                    headers[name] = parse_header(file, what)
                check_array_size(headers[name], member.file_size - headers[name].start, what)
    except DataError:
        raise
    except BROKEN as error:
        raise DataError(_describe_damage(path, error)) from None
    return headers


def _describe_damage(path: Path, error: BaseException) -> str:
    return (
        f"data.path: {path.name} is damaged or no NPZ archive "
        f"({shorten(str(error) or type(error).__name__, 120)}); copy or write it anew"
    )


def choose_arrays(
    headers: Mapping[str, ArrayHeader], target: str | None, label: str
) -> tuple[str, str]:
    """Choose the features' and the target's array, whose shapes fit each other; return their
    names."""
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
    features = usual if len(others) > 1 else others
    if len(features) != 1:
        raise DataError(
            f"data.path: {label} must hold one array of features beside {y_name!r}, or one named "
            f"{', '.join(FEATURE_NAMES)} (got {format_list(others) or 'none'}); save it so"
        )
    x, y = headers[features[0]], headers[y_name]
    check_numeric_type(x, f"{label} array {features[0]!r}")
    if y.dtype.kind != "U":
        check_numeric_type(y, f"{label} array {y_name!r}")
    if x.shape[:1] == (0,):
        raise DataError(f"data.path: {label} array {features[0]!r} has no rows; write some")
    if not 2 <= len(x.shape) <= 4 or 0 in x.shape:
        raise DataError(
            f"data.path: {label} array {features[0]!r} must be rows (n, features) or images "
            f"(n, h, w), (n, c, h, w) or (n, h, w, c) (got shape {x.shape}); reshape it"
        )
    if not 1 <= len(y.shape) <= 2 or 0 in y.shape or (y.dtype.kind == "U" and y.shape[1:] > (1,)):
        raise DataError(
            f"data.target: {label} array {y_name!r} must hold one value a row, shape (n,), or "
            f"several numbers, shape (n, k) (got {y.dtype} {y.shape}); reshape it"
        )
    if x.shape[0] != y.shape[0]:
        raise DataError(
            f"data.path: {label} array {features[0]!r} has {x.shape[0]:,} rows, but {y_name!r} has "
            f"{y.shape[0]:,}; they must be as many"
        )
    return features[0], y_name


def read_blocks(
    path: Path, headers: Mapping[str, ArrayHeader], *, rows: int
) -> Iterator[dict[str, Any]]:
    """Yield blocks of `rows` rows of these arrays of one length, and one block even of no
    rows; never more is read than their headers claim. Errors: DataError."""
    total = min(header.shape[0] for header in headers.values())
    try:
        with zipfile.ZipFile(path) as archive, ExitStack() as stack:
            members = {m.filename.removesuffix(".npy"): m for m in archive.infolist()}
            files = {name: stack.enter_context(archive.open(members[name])) for name in headers}
            for name, file in files.items():
                file.read(headers[name].start)
            for first in range(0, max(1, total), max(1, rows)):
                many = min(rows, total - first)
                yield {name: _read_rows(file, headers[name], many) for name, file in files.items()}
            for file in files.values():
                file.read(1)  # the archive's checksum is compared at the end of a member
    except BROKEN as error:
        raise DataError(_describe_damage(path, error)) from None


def _read_rows(file: IO[bytes], header: ArrayHeader, rows: int) -> np.ndarray:
    """The next rows of an array; its rows lie together, or these are all of them."""
    shape = (rows, *header.shape[1:])
    flat = np.empty(math.prod(shape) * header.dtype.itemsize, dtype=np.uint8)
    rest = flat.data
    while rest:
        read = file.readinto(rest[: 1 << 24])  # type: ignore[attr-defined]
        if not read:
            raise EOFError("an array is cut off")
        rest = rest[read:]
    return flat.view(header.dtype).reshape(shape, order="F" if header.fortran else "C")


def move_channels_first(x: np.ndarray) -> np.ndarray:
    """Return images as (n, c, h, w); the axis of channels is found by its length."""
    if x.ndim == 3:
        return x[:, np.newaxis]
    if x.ndim == 4 and x.shape[1] not in CHANNELS and x.shape[3] in CHANNELS:
        return np.moveaxis(x, 3, 1)
    return x


def convert_text(target: np.ndarray, what: str) -> np.ndarray:
    """Return labels of text, (n,) or (n, 1), as `str` in an object array. Errors: DataError."""
    flat = np.ascontiguousarray(target.reshape(-1))
    codes = flat.view(np.dtype(np.uint32).newbyteorder(flat.dtype.byteorder))
    if (codes > LAST_CHARACTER).any():  # numpy would raise a SystemError for it
        raise DataError(f"{what} holds what is no text; write it anew")
    labels = np.empty(target.size, dtype=object)
    labels[:] = [str(text).strip() for text in flat]
    return labels


TYPES = {
    "BOOL": "|b1",
    "U8": "|u1",
    "U16": "<u2",
    "U32": "<u4",
    "U64": "<u8",
    "I8": "|i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "BF16": "<u2",  # the upper half of a float32; numpy has no such type
}
BLOCK_VALUES = 1 << 20


@dataclass(frozen=True)
class StoredTensor:
    """An array of the file. `header.start` counts from the file's first byte."""

    kind: str
    header: ArrayHeader


def _read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return all arrays of the file. The library refuses a header whose arrays overlap, leave a
    byte between them or do not end where the file ends, so the sizes tell where each begins."""
    tensors = {}
    try:
        with open(path, "rb") as head:
            start = 8 + int.from_bytes(head.read(8), "little")
        with safe_open(path, framework="numpy") as file:
            names = file.offset_keys()  # in the order of their bytes
            for name in names:
                part = file.get_slice(name)
                kind, shape = part.get_dtype(), tuple(part.get_shape())
                if kind not in TYPES:
                    raise DataError(
                        f"data.path: {path.name} array {shorten(name)} is of type {kind}, but only "
                        f"{', '.join(TYPES)} are read; save it as one of them"
                    )
                header = ArrayHeader(np.dtype(TYPES[kind]), shape, False, start)
                tensors[name] = StoredTensor(kind, header)
                start += header.value_bytes
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"data.path: {path.name} is damaged or no safetensors file "
            f"({shorten(str(error), 120)}); copy or write it anew"
        ) from None
    return tensors


@dataclass(frozen=True)
class NpyFile:
    """A file of one array, which has no name."""

    path: Path
    header: ArrayHeader

    @property
    def headers(self) -> dict[str, ArrayHeader]:
        return {"": self.header}

    def load(self, names: Sequence[str], memory_mib: float | None) -> list[np.ndarray]:
        """Map the array. Errors: DataError."""
        return [map_array(self.path, self.header) for _ in names]

    def read(self, names: Sequence[str], block_bytes: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield blocks of rows, copied, so that the file stays as it is. Errors: DataError."""
        return _copy_blocks({"": map_array(self.path, self.header)}, block_bytes)


def open_npy(path: Path, pick: Callable[[list[str]], Collection[str]]) -> NpyFile:
    """Open a file that holds an array with all its values. Errors: DataError."""
    return NpyFile(path, read_header(path))


@dataclass(frozen=True)
class NpzFile:
    """An archive of arrays."""

    path: Path
    headers: dict[str, ArrayHeader]

    def load(self, names: Sequence[str], memory_mib: float | None) -> list[np.ndarray]:
        """Read whole arrays of one length, which cannot be mapped. Errors: DataError."""
        both = {name: self.headers[name] for name in names}
        needed = sum(header.value_bytes for header in both.values())
        what, remedy = f"data.path: {self.path.name}", "write it as npy, which is mapped"
        check_memory(2 * needed, what, remedy, memory_mib=memory_mib)
        (arrays,) = read_blocks(self.path, both, rows=both[names[0]].shape[0])
        return [arrays[name] for name in names]

    def read(self, names: Sequence[str], block_bytes: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield blocks of rows. Errors: DataError."""
        headers = {name: self.headers[name] for name in names}
        step = _count_block_rows(headers, block_bytes)
        if any(header.fortran and len(header.shape) > 1 for header in headers.values()):
            needed = sum(header.value_bytes for header in headers.values())
            check_memory(2 * needed, f"data.path: {self.path.name}", "save it in C order")
            # Its rows lie apart: all of it at once.
            step = max(1, next(iter(headers.values())).shape[0])
        return read_blocks(self.path, headers, rows=step)


def open_npz(path: Path, pick: Callable[[list[str]], Collection[str]]) -> NpzFile:
    """Open an archive. Errors: DataError."""
    return NpzFile(path, read_headers(path, pick))


@dataclass(frozen=True)
class SafetensorsFile:
    """A file of arrays whose values lie one behind the other."""

    path: Path
    tensors: dict[str, StoredTensor]

    @property
    def headers(self) -> dict[str, ArrayHeader]:
        return {name: tensor.header for name, tensor in self.tensors.items()}

    def load(self, names: Sequence[str], memory_mib: float | None) -> list[np.ndarray]:
        """Map arrays; BF16 is read as float32, which takes twice the file's size. Errors:
        DataError."""
        return [self._load_values(self.tensors[name]) for name in names]

    def _load_values(self, tensor: StoredTensor) -> np.ndarray:
        flat = map_array(self.path, tensor.header)
        if tensor.kind != "BF16":
            return flat
        needed = 2 * tensor.header.value_bytes
        check_memory(needed, f"data.path: {self.path.name}", "save it as F32")
        wide = np.empty(flat.shape, dtype=np.float32)
        values, flat = wide.reshape(-1), flat.reshape(-1)
        for at in range(0, len(flat), BLOCK_VALUES):
            part = slice(at, at + BLOCK_VALUES)
            values[part] = widen_bf16(flat[part])
        return wide

    def read(self, names: Sequence[str], block_bytes: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield blocks of rows, copied. Errors: DataError."""
        there = {name: map_array(self.path, self.tensors[name].header) for name in names}
        for block in _copy_blocks(there, block_bytes):
            yield {
                name: widen_bf16(values) if self.tensors[name].kind == "BF16" else values
                for name, values in block.items()
            }


def open_safetensors(path: Path, pick: Callable[[list[str]], Collection[str]]) -> SafetensorsFile:
    """Open a file whose header the library has found to be sound. Errors: DataError."""
    tensors = _read_tensors(path)
    picked = pick(list(tensors))
    return SafetensorsFile(path, {name: tensors[name] for name in tensors if name in picked})


def widen_bf16(bits: np.ndarray) -> np.ndarray:
    """Return float32 of the upper halves of such numbers."""
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


def _count_block_rows(headers: Mapping[str, ArrayHeader], block_bytes: int) -> int:
    total = max(1, next(iter(headers.values())).shape[0])
    row_bytes = max(header.value_bytes for header in headers.values()) // total
    return max(1, block_bytes // max(1, row_bytes))


def _copy_blocks(
    arrays: Mapping[str, np.ndarray], block_bytes: int
) -> Iterator[dict[str, np.ndarray]]:
    total = len(next(iter(arrays.values())))
    row_bytes = max(array.nbytes for array in arrays.values()) // max(1, total)
    step = max(1, block_bytes // max(1, row_bytes))
    for first in range(0, max(1, total), step):
        part = slice(first, first + step)
        yield {name: np.array(array[part], order="C") for name, array in arrays.items()}
