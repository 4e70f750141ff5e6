"""The rows of a training as its device will hold them, made of tensors without bytes: on the device
whole where `batches.feed` would keep them there, else a batch at a time. It reads shapes and types
of the prepared arrays and none of their rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tasks.engine.base import nested
from tasks.engine.batches.dataset_batches import RESIDENT_SHARE, TRAIN_SHARE, VAL_SHARE
from tasks.engine.batches.memory_format import BLOCK_BYTES, laid_out
from tasks.engine.batches.pinned_staging import PINNING, dtype_of
from tasks.engine.data.preparation import load
from tasks.engine.device.memory_limit import rows_room_bytes
from tasks.engine.step.plan import Plan


@dataclass(frozen=True)
class _Part:
    """One kept array: inputs, targets, or both in one."""

    rows: int
    shape: tuple[int, ...]  # of a row; of a text's tokens ()
    dtype: torch.dtype
    bytes: int
    channels_last: bool

    def empty(self, rows: int, device: torch.device) -> Tensor:
        return torch.empty(
            (rows, *self.shape),
            dtype=self.dtype,
            device=device,
            memory_format=torch.channels_last if self.channels_last else torch.contiguous_format,
        )


class Rows:
    """Inputs with their targets. kind: of the device meant; device: of the tensors."""

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        *,
        kind: str,
        device: torch.device,
        room_bytes: float,
        channels_last: bool,
        is_shuffled: bool,
    ) -> None:
        arrays, self._layout = laid_out(x, y, channels_last=channels_last)
        is_resident = sum(array.nbytes for array in arrays) <= RESIDENT_SHARE * room_bytes
        images = (
            self._layout.channels_last and is_resident
        )  # streamed ones are converted on the way
        self._parts = [
            _Part(len(a), a.shape[1:], dtype_of(a), a.nbytes, images and a.ndim == 4)
            for a in arrays
        ]
        self._device = device
        self._in_place = is_resident and kind == "cuda"
        self._reads_ahead = not is_resident and kind in PINNING
        self._batch: list[Tensor] = []  # where batches are gathered in place
        self._next: list[Tensor] = []  # what was sent ahead
        self._whole = [self._sent(part) for part in self._parts] if is_resident else []
        self._order: list[Tensor] = []
        if is_shuffled and (is_resident or kind == "cpu"):  # where it is gathered
            self._order = [torch.empty(len(x), dtype=torch.int64, device=device)]

    def tensors(self) -> list[Tensor]:
        """What holds rows, and their order, on the device for the whole run."""
        return [*self._whole, *self._order]

    def gathered(self, rows: int) -> tuple[Tensor, Tensor]:
        """A batch to train on."""
        if self._in_place:
            self._batch = self._batch or self._made(rows)
            return self._layout.open(self._batch)
        parts, self._next = self._next or self._made(rows), []
        if self._reads_ahead:
            self._next = self._made(rows)
        return self._layout.open(parts)

    def in_order(self, rows: int) -> tuple[Tensor, Tensor]:
        """A batch to validate on."""
        whole = [self._layout.whole(part)[:rows] for part in self._whole]
        return self._layout.open(whole or self._made(rows))

    def let_go(self) -> None:
        """An epoch is over: no batch is left but the memory that all of them come in."""
        self._next = []

    def _made(self, rows: int) -> list[Tensor]:
        if self._layout.context is None:
            return [part.empty(rows, self._device) for part in self._parts]
        shape = (rows, self._layout.context + 1)
        if self._whole:  # where each token of the rows lies
            torch.empty(shape, dtype=torch.int64, device=self._device)
        text = self._parts[0].dtype
        return [torch.empty(shape, dtype=text, device=self._device)]

    def _sent(self, part: _Part) -> Tensor:
        whole = part.empty(part.rows, self._device)
        # In blocks, each of which is there twice while it is copied.
        torch.empty(min(part.bytes, BLOCK_BYTES), dtype=torch.uint8, device=self._device)
        return whole


class Loader:
    """Batches of a loader of the user's own: each is made anew, and may be any structure."""

    def __init__(self, description: Any, device: torch.device) -> None:
        self._description, self._device = description, device

    def tensors(self) -> list[Tensor]:
        return []

    def gathered(self, rows: int) -> tuple[Any, Any]:
        x, y = nested.made(self._description, rows, device=self._device)
        return x, y

    def let_go(self) -> None:
        pass

    in_order = gathered


def make_empty_rows(
    plan: Plan, *, device: torch.device, channels_last: bool
) -> tuple[Rows, Rows] | tuple[Loader, Loader]:
    """Return the rows to train on and those to validate on, with the room that a training gives
    each. device: of the tensors."""
    if plan.data.batch is not None:
        return Loader(plan.data.batch, device), Loader(plan.data.batch, device)
    arrays, settings = load(plan.data), plan.settings
    room = rows_room_bytes(
        plan.device, limit_mib=settings.memory.limit_mib, rows_mib=settings.data.memory_mib
    )

    def rows(x: np.ndarray, y: np.ndarray, *, share: float, is_shuffled: bool) -> Rows:
        return Rows(
            x,
            y,
            kind=plan.torch_device.type,
            device=device,
            room_bytes=share * room,
            channels_last=channels_last,
            is_shuffled=is_shuffled,
        )

    return (
        rows(arrays.train_x, arrays.train_y, share=TRAIN_SHARE, is_shuffled=True),
        rows(arrays.val_x, arrays.val_y, share=VAL_SHARE, is_shuffled=False),
    )
