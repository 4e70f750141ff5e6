"""How rows are kept on a device or on disk, in which order an epoch takes them, and how a batch of
them becomes what a model takes: tokens as narrow as they were written, images in the memory format
that convolutions like. It refuses arrays whose rows do not lie side by side: each gathering would
copy all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tasks.engine.batches.file_rows import Unmapped
from tasks.engine.batches.pinned_staging import dtype_of

BLOCK_BYTES = 16 * 1024**2  # of one copy on the way to the device: the host never holds all rows


@dataclass(frozen=True)
class Layout:
    """Integers are kept as narrow as they are and widened to int64 after they were gathered.

    uint16, for which PyTorch has few operations, travels as the int16 of the same bits.
    """

    context: int | None  # of tokens: the text is kept, in which a row may begin at any token
    unsigned: tuple[bool, ...]  # by kept array: whether it was uint16
    channels_last: bool

    def rows(self, length: int) -> int:
        """Rows of an epoch that a kept array of this length holds."""
        return (length - 1) // self.context if self.context else length

    def whole(self, part: Tensor) -> Tensor:
        """A kept array as its rows, those of tokens one after the other: a view."""
        return part.unfold(0, self.context + 1, self.context) if self.context else part

    def span(self, first: int, last: int) -> slice | np.ndarray:
        """The rows from `first` to before `last` as they lie, by where they begin."""
        return np.arange(first, last) * self.context if self.context else slice(first, last)

    def order(self, length: int, *, seed: int, epoch: int) -> Tensor:
        """The rows of an epoch in their order, int64, the same for the same seed and epoch.

        Rows of tokens by where they begin, which is shifted in each epoch: what a row's end has
        hidden from the model is seen in another. The last row is moved back where it would not fit.
        """
        order = row_order(self.rows(length), seed=seed, epoch=epoch)
        if not self.context:
            return order
        shift = torch.randint(self.context, (), generator=_generator(seed, epoch))
        return (order * self.context + shift).clamp_(max=length - 1 - self.context)

    def gathered(self, part: Tensor, chosen: Tensor, *, out: Tensor | None) -> Tensor:
        """The chosen rows of a kept array, as `order` names them."""
        if not self.context:
            return torch.index_select(part, 0, chosen, out=out)
        # By each token's place: not every device selects rows of a view that overlap.
        at = chosen[:, None] + torch.arange(self.context + 1, device=chosen.device)
        flat = None if out is None else out.view(-1)
        return torch.index_select(part, 0, at.view(-1), out=flat).view(at.shape)

    def moved(self, array: np.ndarray, device: torch.device) -> Tensor:
        """All of a kept array on the device, sent in blocks."""
        images = self.channels_last and array.ndim == 4
        whole = torch.empty(
            array.shape,
            dtype=dtype_of(array),
            device=device,
            memory_format=torch.channels_last if images else torch.contiguous_format,
        )
        rows = max(1, BLOCK_BYTES * len(array) // max(1, array.nbytes))
        for start in range(0, len(array), rows):
            # A copy even on the CPU: a memory map would bring its page faults into the step.
            block = torch.from_numpy(np.array(array[start : start + rows]))
            whole[start : start + rows] = block.to(device)
        return whole

    def open(self, parts: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the gathered parts; the parts themselves where nothing changes."""
        kept = tuple(parts)
        x, y = (kept[0][:, :-1], kept[0][:, 1:]) if self.context else kept
        x, y = _widened(x, self.unsigned[0]), _widened(y, self.unsigned[-1])
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        return x, y


class Windows:
    """The rows of `length` tokens that begin at each token of a text, with as much of an array as
    readers use."""

    def __init__(self, text: np.ndarray | Unmapped, length: int) -> None:
        self.shape, self.dtype = (len(text) - length + 1, length), text.dtype
        self._text = text

    def __len__(self) -> int:
        return self.shape[0]

    def take(
        self, starts: np.ndarray, axis: int = 0, out: np.ndarray | None = None, mode: str = "raise"
    ) -> np.ndarray:
        """The rows that begin at these tokens, in their order; `axis` is 0."""
        found = np.empty((len(starts), self.shape[1]), self.dtype) if out is None else out
        for row, start in zip(found, starts.tolist(), strict=True):
            row[:] = self._text[start : start + self.shape[1]]
        return found


def laid_out(
    x: np.ndarray, y: np.ndarray, *, channels_last: bool
) -> tuple[tuple[np.ndarray, ...], Layout]:
    """The arrays to keep of x and y, one or two, and how a batch of them is opened."""
    text = _text(x, y)
    kept = (x, y) if text is None else (text,)
    unsigned = tuple(array.dtype == np.uint16 for array in kept)
    # np.asarray: a plain array over the map, whose own class would cost a call for each batch.
    arrays = tuple(
        np.asarray(array).view(np.int16) if narrow else np.asarray(array)
        for array, narrow in zip(kept, unsigned, strict=True)
    )
    assert all(array.flags.c_contiguous for array in arrays), "rows must lie side by side"
    context = None if text is None else x.shape[1]
    return arrays, Layout(context, unsigned, channels_last and x.ndim == 4)


def row_order(rows: int, *, seed: int, epoch: int) -> Tensor:
    """A permutation of the rows, int64 (rows,), the same for the same seed and epoch."""
    return torch.randperm(rows, generator=_generator(seed, epoch))


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)


def _text(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """The tokens that x is rows of and y the same one token further on; None: there are none.

    Tokens and their successors are such views; moving both would move nearly everything twice.
    """
    whole = x.base
    if whole is not y.base or not isinstance(whole, np.ndarray) or x.shape != y.shape:
        return None
    if whole.ndim != 1 or x.ndim != 2 or whole.dtype != x.dtype or len(whole) <= x.size:
        return None
    is_first, is_next = (
        _is_view(rows, whole[at : at + x.size].reshape(x.shape)) for at, rows in enumerate((x, y))
    )
    return whole if is_first and is_next else None


def _is_view(array: np.ndarray, other: np.ndarray) -> bool:
    here, there = array.__array_interface__, other.__array_interface__
    return all(here[key] == there[key] for key in ("data", "strides", "shape", "typestr"))


def _widened(part: Tensor, unsigned: bool) -> Tensor:
    if part.is_floating_point():
        return part
    wide = part.to(torch.int64).contiguous()
    return wide.bitwise_and_(0xFFFF) if unsigned else wide
