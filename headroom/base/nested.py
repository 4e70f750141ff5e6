"""Functions on batches of any structure: tensors, or tuples, lists and dicts of them, where what is
no tensor is passed on as it is, and a list of dicts has one of them for each row, as the boxes in
an image are given; and on tensors that may be sharded among ranks (DTensor), for which
nothing is imported: torch.distributed.tensor would cost half a second. For a batch that is one
tensor each function costs one isinstance check more than the tensor's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor


def get_local_part(tensor: Tensor) -> Tensor:
    """Return the part of the tensor that this rank holds; of a DTensor, that which has the
    memory."""
    # Not to_local(), which autograd and dispatch modes would take for an operation.
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def gather_full(tensor: Tensor) -> Tensor:
    """Return the whole tensor. Collective, where it is sharded."""
    full_tensor = getattr(tensor, "full_tensor", None)
    return tensor if full_tensor is None else cast(Tensor, full_tensor())


def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that every rank has whole, sharded as `like` is; nothing is sent for it."""
    if not hasattr(like, "device_mesh") or hasattr(whole, "device_mesh"):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor  # imported already: see `like`

    assert isinstance(like, DTensor)
    there = whole.to(like.device)
    return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None)


PLAIN = (str, int, float, bool, type(None))


def find_tensors(part: Any) -> Iterator[Tensor]:
    """Yield all tensors, in their order."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, Mapping):
        for value in part.values():
            yield from find_tensors(value)
    elif isinstance(part, (tuple, list)):
        for value in part:
            yield from find_tensors(value)


def find_named_tensors(part: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors, each with the expression that reaches it: ("inputs['mask']", tensor)."""
    if isinstance(part, Tensor):
        yield name, part
    elif isinstance(part, Mapping):
        for key, value in part.items():
            yield from find_named_tensors(value, f"{name}[{key!r}]")
    elif isinstance(part, (tuple, list)):
        for i, value in enumerate(part):
            yield from find_named_tensors(value, f"{name}[{i}]")


def map_tensors(part: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same structure with each tensor changed; a mapping of any kind becomes a dict."""
    if isinstance(part, Tensor):
        return change(part)
    if isinstance(part, Mapping):
        return {key: map_tensors(value, change) for key, value in part.items()}
    if isinstance(part, (tuple, list)):
        make = getattr(type(part), "_make", type(part))  # a named tuple's own way
        return make(map_tensors(value, change) for value in part)
    return part


def count_rows(part: Any) -> int:
    """Return the number of rows of the first tensor, or list of dicts, that has any; 0 where there
    is none."""
    if isinstance(part, Tensor):
        shape = part.shape  # len() of one takes ten times as long, which each step would pay
        return shape[0] if shape else 0
    return next(_iterate_rows(part), 0)


def _iterate_rows(part: Any) -> Iterator[int]:
    if isinstance(part, Tensor):
        yield from part.shape[:1]
    elif is_list_of_rows(part):
        yield len(part)
    elif isinstance(part, (Mapping, tuple, list)):
        for value in part.values() if isinstance(part, Mapping) else part:
            yield from _iterate_rows(value)


def is_list_of_rows(part: Any) -> bool:
    """Return whether this is a list with a dict for each row."""
    is_one = isinstance(part, list) and bool(part)
    return is_one and all(isinstance(row, Mapping) for row in part)


def find_shapes(part: Any) -> Any:
    """Return the shape of a tensor, or the shapes of all tensors that a structure holds."""
    if isinstance(part, Tensor):
        return part.shape
    return tuple(tensor.shape for tensor in find_tensors(part))


def split_batch(part: Any, rows: int, *, whole: int, least: int = 1) -> list[Any]:
    """Split a batch into parts of at most `rows` rows.

    whole: rows of the batch. least: where fewer rows would be left for the last part, the one
    before it takes them.
    """
    if rows >= whole:
        return [part]
    starts = [*range(0, whole, rows)]
    if whole - starts[-1] < least:
        starts.pop()
    return [_cut_rows(part, a, b, whole) for a, b in zip(starts, [*starts[1:], whole], strict=True)]


def split_by_sizes(part: Any, sizes: Sequence[int]) -> list[Any]:
    """Split a batch into parts of these sizes, which are all of its rows."""
    stops = [*accumulate(sizes)]
    whole = stops[-1]
    return [_cut_rows(part, b - rows, b, whole) for rows, b in zip(sizes, stops, strict=True)]


def take_first_rows(part: Any, rows: int) -> Any:
    """Return the first rows."""
    return _cut_rows(part, 0, rows, count_rows(part))


def _cut_rows(part: Any, start: int, stop: int, whole: int) -> Any:
    def cut(tensor: Tensor) -> Tensor:
        return tensor[start:stop] if tensor.dim() and len(tensor) == whole else tensor

    if is_list_of_rows(part):
        return part[start:stop] if len(part) == whole else part
    if isinstance(part, Mapping):
        return {key: _cut_rows(value, start, stop, whole) for key, value in part.items()}
    if isinstance(part, (tuple, list)):
        make = getattr(type(part), "_make", type(part))  # a named tuple's own way
        return make(_cut_rows(value, start, stop, whole) for value in part)
    return map_tensors(part, cut)


def describe_structure(part: Any, rows: int) -> Any:
    """Describe the structure in plain values, from which `make_zeros` makes a structure of the
    same shapes."""
    if isinstance(part, Tensor):
        by_rows = bool(part.dim()) and len(part) == rows
        shape = tuple(part.shape[1:] if by_rows else part.shape)
        return {
            "kind": "rows" if by_rows else "whole",
            "shape": shape,
            "dtype": _get_dtype_name(part.dtype),
        }
    if isinstance(part, Mapping):
        return {
            "kind": "dict",
            "of": {str(k): describe_structure(v, rows) for k, v in part.items()},
        }
    if is_list_of_rows(part) and len(part) == rows:
        return {"kind": "each", "of": [describe_structure(part[0], -1)]}
    if isinstance(part, (tuple, list)):
        kind = "list" if isinstance(part, list) else "tuple"
        return {"kind": kind, "of": [describe_structure(value, rows) for value in part]}
    return {"kind": "value", "value": part if isinstance(part, PLAIN) else None}


def make_zeros(description: Any, rows: int, *, device: torch.device) -> Any:
    """Return zeros in the structure that `describe_structure` described, with that many rows."""
    kind = description["kind"]
    if kind == "value":
        return description["value"]
    if kind == "dict":
        return {k: make_zeros(v, rows, device=device) for k, v in description["of"].items()}
    if kind == "each":
        (row,) = description["of"]
        return [make_zeros(row, rows, device=device) for _ in range(rows)]
    if kind in ("list", "tuple"):
        parts = [make_zeros(value, rows, device=device) for value in description["of"]]
        return parts if kind == "list" else tuple(parts)
    shape = tuple(description["shape"])
    dtype = getattr(torch, description["dtype"])
    return torch.zeros((rows, *shape) if kind == "rows" else shape, dtype=dtype, device=device)


@dataclass(frozen=True)
class PackedTensor:
    """A tensor in plain values. by_rows: whether its first axis is that of the batch's rows."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    by_rows: bool

    def unpack(self, rows: int) -> Tensor:
        """Return the tensor on the host, with so many rows: the last is repeated where there are
        fewer."""
        dtype = getattr(torch, self.dtype)
        whole = torch.empty(self.shape, dtype=dtype)
        if self.data:
            whole.reshape(-1).view(torch.uint8)[:] = torch.frombuffer(
                bytearray(self.data), dtype=torch.uint8
            )
        if not self.by_rows:
            return whole
        return whole[torch.arange(rows).clamp_(max=len(whole) - 1)]


@dataclass(frozen=True)
class PackedRows:
    """A list with a dict for each row, their tensors packed."""

    rows: tuple[Any, ...]


def pack_rows(part: Any, *, whole: int, most: int) -> Any:
    """Return the structure with at most so many rows, its tensors packed; what is neither a tensor
    nor a plain value becomes None. whole: the rows of the batch."""
    if isinstance(part, Tensor):
        if part.layout is not torch.strided or part.is_quantized or part.is_nested:
            return None
        by_rows = bool(part.dim()) and len(part) == whole
        kept = (part[:most] if by_rows else part).detach().cpu().contiguous()
        data = kept.reshape(-1).view(torch.uint8).numpy().tobytes() if kept.numel() else b""
        return PackedTensor(_get_dtype_name(part.dtype), tuple(kept.shape), data, by_rows)
    if isinstance(part, Mapping):
        return {k: pack_rows(v, whole=whole, most=most) for k, v in part.items()}
    if is_list_of_rows(part) and len(part) == whole:
        return PackedRows(tuple(pack_rows(row, whole=-1, most=most) for row in part[:most]))
    if isinstance(part, (tuple, list)):
        make = getattr(type(part), "_make", type(part))  # a named tuple's own way
        return make(pack_rows(value, whole=whole, most=most) for value in part)
    return part if isinstance(part, PLAIN) else None


def unpack_rows(packed: Any, rows: int) -> Any:
    """Return what `pack_rows` packed, on the host and with so many rows."""
    if isinstance(packed, PackedTensor):
        return packed.unpack(rows)
    if isinstance(packed, PackedRows):
        last = len(packed.rows) - 1
        return [unpack_rows(packed.rows[min(i, last)], rows) for i in range(rows)]
    if isinstance(packed, Mapping):
        return {k: unpack_rows(v, rows) for k, v in packed.items()}
    if isinstance(packed, (tuple, list)):
        make = getattr(type(packed), "_make", type(packed))
        return make(unpack_rows(value, rows) for value in packed)
    return packed


def _get_dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
