"""Batches of any structure: tensors, or tuples, lists and dicts of them. What is no tensor is
handed on as it is, and so is a tensor whose first axis is not the rows. Where a batch is one
tensor, as those of the built-in sources are, each function costs one question more than the
tensor's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

PLAIN = (str, int, float, bool, type(None))


def tensors(part: Any) -> Iterator[Tensor]:
    """All tensors, in their order."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, Mapping):
        for value in part.values():
            yield from tensors(value)
    elif isinstance(part, (tuple, list)):
        for value in part:
            yield from tensors(value)


def named(part: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """All tensors with how each is reached: ("inputs['mask']", tensor)."""
    if isinstance(part, Tensor):
        yield name, part
    elif isinstance(part, Mapping):
        for key, value in part.items():
            yield from named(value, f"{name}[{key!r}]")
    elif isinstance(part, (tuple, list)):
        for i, value in enumerate(part):
            yield from named(value, f"{name}[{i}]")


def mapped(part: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with each tensor changed; a mapping of any kind becomes a dict."""
    if isinstance(part, Tensor):
        return change(part)
    if isinstance(part, Mapping):
        return {key: mapped(value, change) for key, value in part.items()}
    if isinstance(part, (tuple, list)):
        make = getattr(type(part), "_make", type(part))  # a named tuple's own way
        return make(mapped(value, change) for value in part)
    return part


def rows_of(part: Any) -> int:
    """Rows of the first tensor that has any; 0 where there is none."""
    if isinstance(part, Tensor):
        return len(part)
    return next((len(tensor) for tensor in tensors(part) if tensor.dim()), 0)


def shape_of(part: Any) -> Any:
    """The shape of a tensor, or the shapes of all that a structure holds."""
    if isinstance(part, Tensor):
        return part.shape
    return tuple(tensor.shape for tensor in tensors(part))


def split(part: Any, rows: int, *, whole: int, least: int = 1) -> list[Any]:
    """Parts of at most so many rows. whole: rows of the batch. least: where fewer would be left for
    the last part, the one before it takes them."""
    if rows >= whole:
        return [part]
    starts = [*range(0, whole, rows)]
    if whole - starts[-1] < least:
        starts.pop()
    return [_rows(part, a, b, whole) for a, b in zip(starts, [*starts[1:], whole], strict=True)]


def head(part: Any, rows: int) -> Any:
    """The first rows."""
    return _rows(part, 0, rows, rows_of(part))


def _rows(part: Any, start: int, stop: int, whole: int) -> Any:
    def cut(tensor: Tensor) -> Tensor:
        return tensor[start:stop] if tensor.dim() and len(tensor) == whole else tensor

    return mapped(part, cut)


def described(part: Any, rows: int) -> Any:
    """The structure in plain values, from which `made` makes one alike; see there."""
    if isinstance(part, Tensor):
        by_rows = bool(part.dim()) and len(part) == rows
        shape = tuple(part.shape[1:] if by_rows else part.shape)
        return {"kind": "rows" if by_rows else "whole", "shape": shape, "dtype": _named(part.dtype)}
    if isinstance(part, Mapping):
        return {"kind": "dict", "of": {str(k): described(v, rows) for k, v in part.items()}}
    if isinstance(part, (tuple, list)):
        kind = "list" if isinstance(part, list) else "tuple"
        return {"kind": kind, "of": [described(value, rows) for value in part]}
    return {"kind": "value", "value": part if isinstance(part, PLAIN) else None}


def made(description: Any, rows: int, *, device: torch.device) -> Any:
    """Zeros of the structure that was described, with that many rows."""
    kind = description["kind"]
    if kind == "value":
        return description["value"]
    if kind == "dict":
        return {k: made(v, rows, device=device) for k, v in description["of"].items()}
    if kind in ("list", "tuple"):
        parts = [made(value, rows, device=device) for value in description["of"]]
        return parts if kind == "list" else tuple(parts)
    shape = tuple(description["shape"])
    dtype = getattr(torch, description["dtype"])
    return torch.zeros((rows, *shape) if kind == "rows" else shape, dtype=dtype, device=device)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
