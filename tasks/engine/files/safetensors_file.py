"""Reads safetensors files: arrays by name, of which one is the features and one the target. What
the header claims is held against the size of the file, and one array against the others, before
anything is believed; then the values are mapped, so that a file may be larger than memory. It
refuses types that numpy has no numbers for, and files of which some bytes belong to no array.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from tasks.engine.files.npy import MOST_VALUES, Header, booleans, mapped, too_many
from tasks.engine.files.npz import channels_first, check_count, chosen
from tasks.engine.files.source_data import (
    DataError,
    Raw,
    check_memory,
    listed,
    shorten,
    size,
    source_file,
)
from tasks.engine.settings.data_config import DataConfig

METADATA = "__metadata__"
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


class _Wrong(Exception):
    """What is wrong with a header, to follow the file's name."""


@dataclass(frozen=True)
class Tensor:
    """An array of the file. `header.start` counts from the file's first byte."""

    kind: str
    header: Header


def check_safetensors(data: DataConfig) -> None:
    """Raises DataError for a file without one array of features and one of labels."""
    path = source_file(data)
    chosen(_headers(_tensors(path)), data.target, path.name)


def read_safetensors(data: DataConfig) -> Raw:
    """Features, mapped, and target; images (n, h, w) and (n, h, w, c) become (n, c, h, w).

    Of the type BF16 the features are read as float32, which takes twice the file's size.
    """
    path = source_file(data)
    tensors = _tensors(path)
    x_name, y_name = chosen(_headers(tensors), data.target, path.name)
    features, target = (_values(path, tensors[name]) for name in (x_name, y_name))
    return Raw(
        features=channels_first(features),
        target=booleans(np.array(target[:, 0] if target.shape[1:] == (1,) else target)),
        feature_names=None,
        target_name=y_name,
        label=path.name,
    )


def _headers(tensors: Mapping[str, Tensor]) -> dict[str, Header]:
    return {name: tensor.header for name, tensor in tensors.items()}


def _tensors(path: Path) -> dict[str, Tensor]:
    """All arrays of the file; raises DataError where its header and its bytes do not fit."""
    file_bytes = path.stat().st_size
    try:
        text, start = _header_text(path, file_bytes)
        said = _parsed(text)
        check_count(len(said), path.name)
        tensors = {name: _tensor(name, entry, start) for name, entry in said.items()}
        _check_places(tensors, start, file_bytes)
        with safe_open(path, framework="numpy"):  # the format's own library has the last word
            pass
    except DataError:
        raise
    except _Wrong as wrong:
        raise DataError(f"data.path: {path.name} {wrong}; write it anew") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(
            f"data.path: {path.name} is damaged or no safetensors file "
            f"({shorten(str(error), 120)}); copy or write it anew"
        ) from None
    return tensors


def _header_text(path: Path, file_bytes: int) -> tuple[bytes, int]:
    """The header, and where the values begin. It is below 16 MiB, else `source_file` would not
    have taken the file for one of tensors."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > file_bytes:
            raise _Wrong(
                f"claims a header of {length:,} bytes but holds {file_bytes:,} in all: it is cut "
                "off or no safetensors file"
            )
        return file.read(length), 8 + length


def _parsed(text: bytes) -> dict[str, Any]:
    """The header's arrays by name, each written once."""
    try:
        said = json.loads(text.decode("utf-8"), object_pairs_hook=_once)
    except UnicodeDecodeError:
        raise _Wrong("has a header that is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise _Wrong(f"has a damaged header ({shorten(str(error), 80)})") from None
    if not isinstance(said, dict):
        raise _Wrong(f"has a damaged header ({shorten(said)})")
    said.pop(METADATA, None)
    return said


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = Counter(name for name, _ in pairs)
        twice = next(name for name, times in seen.items() if times > 1)
        raise _Wrong(f"has two entries named {shorten(twice)} in its header")
    return found


def _tensor(name: str, said: Any, start: int) -> Tensor:
    what = f"array {shorten(name)}"
    try:
        kind, shape, (begin, end) = said["dtype"], said["shape"], said["data_offsets"]
        counts = (*shape, begin, end)
        if not all(type(n) is int and 0 <= n < MOST_VALUES for n in counts) or too_many(shape):
            raise ValueError("no counts")
    except (ValueError, TypeError, KeyError):
        raise _Wrong(f"{what} has a damaged entry ({shorten(said)}) in the header") from None
    if not isinstance(kind, str) or kind not in TYPES:
        raise _Wrong(f"{what} is of type {shorten(kind)}, but only {', '.join(TYPES)} are read")
    header = Header(np.dtype(TYPES[kind]), tuple(shape), False, start + begin)
    if header.value_bytes != end - begin:
        raise _Wrong(
            f"{what} claims {header.shape} values of {kind} ({size(header.value_bytes)}) but has "
            f"a place of {end - begin:,} bytes"
        )
    return Tensor(kind, header)


def _check_places(tensors: Mapping[str, Tensor], start: int, file_bytes: int) -> None:
    """Each array begins where another ends: none overlap, and no byte is left over."""
    at, before = start, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: _place(item[1])):
        header = tensor.header
        if header.start < at:
            raise _Wrong(f"has arrays that overlap: {listed([before, name])}")
        if header.start > at:
            raise _Wrong(f"has {header.start - at:,} bytes that no array claims")
        at, before = header.start + header.value_bytes, name
    if at > file_bytes:
        raise _Wrong(f"claims {at:,} bytes but holds {file_bytes:,}: it is cut off")
    if at < file_bytes:
        raise _Wrong(f"has {file_bytes - at:,} bytes that no array claims")


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.header.start, tensor.header.value_bytes


def _values(path: Path, tensor: Tensor) -> np.ndarray:
    header = tensor.header
    flat = mapped(path, header)
    if tensor.kind != "BF16":
        return flat
    check_memory(2 * header.value_bytes, f"data.path: {path.name}", "save it as F32")
    wide = np.empty(flat.shape, dtype=np.float32)
    bits, flat = wide.view(np.uint32).reshape(-1), flat.reshape(-1)
    for at in range(0, len(flat), BLOCK_VALUES):
        part = slice(at, at + BLOCK_VALUES)
        bits[part] = np.left_shift(flat[part], 16, dtype=np.uint32)
    return wide
