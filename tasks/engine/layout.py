"""How rows are kept on a device or on disk, and how a batch of them becomes what a model takes:
tokens as narrow as they were written, images in the memory format that convolutions like. It
refuses arrays whose rows do not lie side by side: each gathering would copy all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Integers are kept as narrow as they are and widened to int64 after they were gathered.

    uint16, for which PyTorch has few operations, travels as the int16 of the same bits.
    """

    shared: bool  # y is x one column further on: both are kept as one array
    unsigned: tuple[bool, ...]  # by kept array: whether it was uint16
    channels_last: bool

    def open(self, parts: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the gathered parts; the parts themselves where nothing changes."""
        kept = tuple(parts)
        x, y = (kept[0][:, :-1], kept[0][:, 1:]) if self.shared else kept
        x, y = _widened(x, self.unsigned[0]), _widened(y, self.unsigned[-1])
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        return x, y


def laid_out(
    x: np.ndarray, y: np.ndarray, *, channels_last: bool
) -> tuple[tuple[np.ndarray, ...], Layout]:
    """The arrays to keep of x and y, one or two, and how a batch of them is opened."""
    shared = _shared(x, y)
    kept = (x, y) if shared is None else (shared,)
    unsigned = tuple(array.dtype == np.uint16 for array in kept)
    # np.asarray: a plain array over the map, whose own class would cost a call for each batch.
    arrays = tuple(
        np.asarray(array).view(np.int16) if narrow else np.asarray(array)
        for array, narrow in zip(kept, unsigned, strict=True)
    )
    assert all(array.flags.c_contiguous for array in arrays), "rows must lie side by side"
    return arrays, Layout(shared is not None, unsigned, channels_last and x.ndim == 4)


def _shared(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """The array that x is all but the last column of, and y all but the first; None: there is none.

    Tokens and their successors are such views; moving both would move nearly everything twice.
    """
    whole = x.base
    if whole is not y.base or not isinstance(whole, np.ndarray) or x.shape != y.shape:
        return None
    if whole.ndim != 2 or whole.shape != (len(x), x.shape[-1] + 1) or whole.dtype != x.dtype:
        return None
    is_first, is_last = _is_view(x, whole[:, :-1]), _is_view(y, whole[:, 1:])
    return whole if is_first and is_last else None


def _is_view(array: np.ndarray, other: np.ndarray) -> bool:
    here, there = array.__array_interface__, other.__array_interface__
    return all(here[key] == there[key] for key in ("data", "strides", "shape", "typestr"))


def _widened(part: Tensor, unsigned: bool) -> Tensor:
    if part.is_floating_point():
        return part
    wide = part.to(torch.int64).contiguous()
    return wide.bitwise_and_(0xFFFF) if unsigned else wide
