"""Arrays of the user's own, as their factory gave them: numbers with a target for each row, made
into what the readers of files hand over. It refuses what holds no numbers or no rows.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tasks.engine.files.source_data import DataError, Raw
from tasks.engine.settings.data_config import DataConfig

Pair = tuple[np.ndarray, np.ndarray]


def is_array(part: Any) -> bool:
    return isinstance(part, (Tensor, np.ndarray)) or hasattr(part, "__array__")


def raw_of(data: DataConfig, pairs: list[Pair], *, columns: Any) -> Raw:
    """One table or stack of images; the second pair, where there is one, is to validate on."""
    x, y = pairs[0]
    validation = None
    if len(pairs) == 2:
        vx, vy = pairs[1]
        if vx.shape[1:] != x.shape[1:] or vy.shape[1:] != y.shape[1:]:
            raise DataError(
                f"data.source: {data.source} gives training rows of {x.shape[1:]} and validation "
                f"rows of {vx.shape[1:]}; give both the same columns"
            )
        validation = np.arange(len(x) + len(vx)) >= len(x)
        x, y = np.concatenate((x, vx)), np.concatenate((y, vy))
    return Raw(
        features=x,
        target=y,
        feature_names=None if columns is None else tuple(map(str, columns)),
        target_name="y",
        label=data.source,
        validation=validation,
    )


def sha256(raw: Raw) -> str:
    """Of the arrays and what is known about them."""
    said = hashlib.sha256(repr((raw.feature_names, raw.target_name)).encode())
    for array in (raw.features, raw.target, raw.validation):
        if array is not None:
            said.update(repr((array.shape, array.dtype.str)).encode())
            is_text = array.dtype == object
            said.update(
                "\0".join(array.tolist()).encode()
                if is_text
                else np.ascontiguousarray(array).view(np.uint8).data
            )
    return said.hexdigest()


def tensor(array: np.ndarray) -> Tensor:
    """The array as what a data set gives: 64-bit floats narrowed to the 32 that models have."""
    narrow = array.astype(np.float32) if array.dtype == np.float64 else array
    return torch.from_numpy(np.ascontiguousarray(narrow))


def checked(x: Any, y: Any, data: DataConfig, name: str) -> Pair:
    """Both as arrays of numbers, x (rows, ...) and y (rows,) or (rows, ...); y may be text.

    name: training or validation. Raises DataError.
    """
    features, target = _numpy(x, data, f"{name} x"), _numpy(y, data, f"{name} y")
    if features.dtype.kind not in "fiub":
        raise DataError(
            f"data.source: {data.source} {name} x must hold numbers (got {features.dtype}); encode "
            "text as numbers first, or write a csv or parquet file"
        )
    if target.dtype.kind in "OUS":
        target = np.array([str(value) for value in target.tolist()], dtype=object)
    elif target.dtype.kind not in "fiub":
        raise DataError(f"data.source: {data.source} {name} y must hold numbers or text")
    if features.ndim == 1:
        features = features[:, None]
    if target.ndim == 2 and target.shape[1] == 1:
        target = target[:, 0]
    if not target.ndim or len(features) != len(target):
        rows = len(target) if target.ndim else "no"
        raise DataError(
            f"data.source: {data.source} gives {len(features):,} rows of {name} x and {rows} of y; "
            "give one y for each row"
        )
    if not len(target) or not features.size:
        raise DataError(
            f"data.source: {data.source} gives no {name} rows; give some (got x of shape "
            f"{features.shape})"
        )
    return features, target


def _numpy(part: Any, data: DataConfig, name: str) -> np.ndarray:
    try:
        if isinstance(part, Tensor):
            part = part.detach().cpu()
            part = (part.float() if part.dtype == torch.bfloat16 else part).numpy()
        array = np.asarray(part)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"data.source: {data.source} {name} cannot be made an array ({str(error)[:200]}); "
            "return a dense array of numbers"
        ) from None
    if not array.ndim:
        raise DataError(f"data.source: {data.source} {name} must have rows (got a single value)")
    return array.astype(np.float32) if array.dtype == np.float16 else array
