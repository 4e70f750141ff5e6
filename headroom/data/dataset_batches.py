"""How rows are kept on a device or on disk, in which order an epoch takes them, and how a batch of
them becomes what a model takes: tokens as narrow as they were written, images in the memory format
that convolutions like. It refuses arrays whose rows do not lie side by side: each gathering would
copy all of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headroom.base.units import format_mebibytes
from headroom.data.batch import Batch
from headroom.data.prefetch import (
    FileRows,
    Mark,
    PinnedStaging,
    RowSelection,
    find_dtype,
    read_batches,
)
from headroom.watch.allocators import drop_cache
from headroom.watch.out_of_memory import clear_frames, is_oom
from headroom.watch.pinned_memory import PINNING, allocate_pinned

BLOCK_BYTES = 16 * 1024**2  # of one copy on the way to the device: the host never holds all rows


@dataclass(frozen=True)
class RowLayout:
    """How rows are kept on the device or on disk, and how a batch of them is opened. Integers
    are kept as narrow as they are and widened to int64 after they were gathered.

    uint16, for which PyTorch has few operations, travels as the int16 of the same bits.
    """

    context: int | None  # of tokens: the text is kept, in which a row may begin at any token
    unsigned: tuple[bool, ...]  # by kept array: whether it was uint16
    channels_last: bool

    def count_rows(self, length: int) -> int:
        """Return how many rows of an epoch a kept array of this length holds."""
        return (length - 1) // self.context if self.context else length

    def view_rows(self, part: Tensor) -> Tensor:
        """Return a kept array as its rows, those of tokens one after the other: a view."""
        return part.unfold(0, self.context + 1, self.context) if self.context else part

    def select_span(self, first: int, last: int) -> slice | np.ndarray:
        """Return the rows from `first` to before `last` in file order, by where they begin."""
        return np.arange(first, last) * self.context if self.context else slice(first, last)

    def draw_order(self, length: int, *, seed: int, epoch: int) -> Tensor:
        """Return the rows of an epoch in their order, int64, the same for the same seed and epoch.

        Rows of tokens by where they begin, which is shifted in each epoch: what a row's end has
        hidden from the model is seen in another. The last row is moved back where it would not fit.
        """
        order = draw_row_order(self.count_rows(length), seed=seed, epoch=epoch)
        if not self.context:
            return order
        shift = torch.randint(self.context, (), generator=_make_generator(seed, epoch))
        return (order * self.context + shift).clamp_(max=length - 1 - self.context)

    def gather(self, part: Tensor, chosen: Tensor, *, out: Tensor | None) -> Tensor:
        """Gather the chosen rows of a kept array, as `order` names them."""
        if not self.context:
            return torch.index_select(part, 0, chosen, out=out)
        # By each token's place: not every device selects rows of a view that overlap.
        at = chosen[:, None] + torch.arange(self.context + 1, device=chosen.device)
        flat = None if out is None else out.view(-1)
        return torch.index_select(part, 0, at.view(-1), out=flat).view(at.shape)

    def move_array(self, array: np.ndarray, device: torch.device) -> Tensor:
        """Send all of a kept array to the device, in blocks."""
        images = self.channels_last and array.ndim == 4
        whole = torch.empty(
            array.shape,
            dtype=find_dtype(array),
            device=device,
            memory_format=torch.channels_last if images else torch.contiguous_format,
        )
        rows = max(1, BLOCK_BYTES * len(array) // max(1, array.nbytes))
        for start in range(0, len(array), rows):
            # A copy even on the CPU: a memory map would bring its page faults into the step.
            block = torch.from_numpy(np.array(array[start : start + rows]))
            whole[start : start + rows] = block.to(device)
        return whole

    def open(self, parts: Iterable[Tensor]) -> Batch:
        """Return the gathered parts as a batch; the parts themselves where nothing changes."""
        kept = tuple(parts)
        x, y = (kept[0][:, :-1], kept[0][:, 1:]) if self.context else kept
        x, y = _widen_integers(x, self.unsigned[0]), _widen_integers(y, self.unsigned[-1])
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        return Batch(x, y, x.shape[0])


class TokenWindows:
    """The rows of `length` tokens that begin at each token of a text, with as much of an array
    as readers use."""

    def __init__(self, text: np.ndarray | FileRows, length: int) -> None:
        self.shape, self.dtype = (len(text) - length + 1, length), text.dtype
        self._text = text

    def __len__(self) -> int:
        return self.shape[0]

    def take(
        self, starts: np.ndarray, axis: int = 0, out: np.ndarray | None = None, mode: str = "raise"
    ) -> np.ndarray:
        """Return the rows that begin at these tokens, in their order; `axis` is 0."""
        windows = np.empty((len(starts), self.shape[1]), self.dtype) if out is None else out
        for row, start in zip(windows, starts.tolist(), strict=True):
            row[:] = self._text[start : start + self.shape[1]]
        return windows


def choose_layout(
    x: np.ndarray, y: np.ndarray, *, channels_last: bool
) -> tuple[tuple[np.ndarray, ...], RowLayout]:
    """Return the arrays to keep of x and y, one or two, and how a batch of them is opened."""
    text = _find_text(x, y)
    kept = (x, y) if text is None else (text,)
    unsigned = tuple(array.dtype == np.uint16 for array in kept)
    # np.asarray: a plain array over the map, whose own class would cost a call for each batch.
    arrays = tuple(
        np.asarray(array).view(np.int16) if narrow else np.asarray(array)
        for array, narrow in zip(kept, unsigned, strict=True)
    )
    assert all(array.flags.c_contiguous for array in arrays), "rows must lie side by side"
    context = None if text is None else x.shape[1]
    return arrays, RowLayout(context, unsigned, channels_last and x.ndim == 4)


def draw_row_order(rows: int, *, seed: int, epoch: int) -> Tensor:
    """Draw a permutation of the rows, int64 (rows,), the same for the same seed and epoch."""
    return torch.randperm(rows, generator=_make_generator(seed, epoch))


def _make_generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)


def _find_text(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """Return the tokens that x is rows of and y the same one token further on; None: there are
    none.

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


def _widen_integers(part: Tensor, unsigned: bool) -> Tensor:
    if part.is_floating_point() or (part.dtype is torch.int64 and part.is_contiguous()):
        return part
    wide = part.to(torch.int64).contiguous()
    return wide.bitwise_and_(0xFFFF) if unsigned else wide


TRAIN_SHARE, VAL_SHARE = 2 / 3, 1 / 3  # of the room: both parts may then live there
RESIDENT_SHARE = 0.5  # of the room; the rest is for the model, its gradients and activations
MIB = 1024**2

log = logging.getLogger(__name__)


def make_ranges(rows: int, batch_size: int) -> list[range]:
    """Return the rows of each batch in file order."""
    return [range(rows)[at : at + batch_size] for at in range(0, rows, batch_size)]


class _StoredBatches:
    """What rows have in common wherever they are kept."""

    begins_again = False

    def __init__(self, first: Tensor | np.ndarray, layout: RowLayout) -> None:
        self._layout = layout
        self._rows, self.draw_order = (
            layout.count_rows(len(first)),
            partial(layout.draw_order, len(first)),
        )

    def __len__(self) -> int:
        return self._rows

    def count_steps(self, batch_size: int) -> int:
        return math.ceil(len(self) / batch_size)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass

    def iterate_in_order(self, batch_size: int) -> Iterator[Batch]:
        return self.iterate_ranges(make_ranges(len(self), batch_size))

    def iterate_ranges(self, batches: Sequence[range]) -> Iterator[Batch]:
        """A batch of the rows of each range, as they lie; no other row is read."""
        raise NotImplementedError


class ResidentBatches(_StoredBatches):
    """Batches of rows that live on the device, one tensor or two as the layout says.

    in_place: all batches come in the memory of the first, as a recorded graph reads them.
    """

    residency = "device"
    copy_s = None

    def __init__(
        self, parts: tuple[Tensor, ...], layout: RowLayout, *, reason: str, in_place: bool
    ) -> None:
        super().__init__(parts[0], layout)
        self.reason = reason
        self._parts, self._in_place = parts, in_place
        self._batch: list[Tensor] = []  # where the batches are gathered, if in place

    @property
    def x(self) -> Tensor:
        """Return all inputs, as a batch would hold them."""
        return self._layout.open(self._view_parts()).x

    @property
    def y(self) -> Tensor:
        """Return all targets."""
        return self._layout.open(self._view_parts()).y

    def iterate_shuffled(self, batch_size: int, order: Tensor, mark: Mark) -> Iterator[Batch]:
        """Yield batches gathered on the device: 8 bytes a row cross the bus once an epoch, and
        nothing else."""
        if (device := self._parts[0].device).type in PINNING:
            order = allocate_pinned(partial(torch.empty_like, order)).copy_(order)
        order = order.to(device, non_blocking=order.is_pinned())
        rows = min(batch_size, len(order))
        if self._in_place and (not self._batch or len(self._batch[0]) != rows):
            self._batch = [
                torch.empty_like(self._flatten(part)[:rows]) for part in self._view_parts()
            ]
        # index_select returns contiguous rows whatever it is given; in this view images are.
        flat = [self._flatten(part) for part in self._parts]
        for chosen in order.split(batch_size):
            batch = self._layout.open(self._gather_chosen(flat, chosen))
            mark("data_wait")
            yield batch
            del batch  # before the next one

    def iterate_ranges(self, batches: Sequence[range]) -> Iterator[Batch]:
        wholes = self._view_parts()
        for rows in batches:
            yield self._layout.open(part[rows.start : rows.stop] for part in wholes)

    def list_tensors(self) -> tuple[Tensor, ...]:
        return self._parts

    def give_back(self) -> bool:
        return False

    def close(self) -> None:
        self._batch = []

    def _gather_chosen(self, flat: Sequence[Tensor], chosen: Tensor) -> Iterator[Tensor]:
        for i, (part, kept) in enumerate(zip(flat, self._parts, strict=True)):
            out = self._batch[i][: len(chosen)] if self._in_place else None
            rows = self._layout.gather(part, chosen, out=out)
            yield rows if part is kept else rows.permute(0, 3, 1, 2)

    def _view_parts(self) -> list[Tensor]:
        return [self._layout.view_rows(part) for part in self._parts]

    def _flatten(self, part: Tensor) -> Tensor:
        return part.permute(0, 2, 3, 1) if self._is_images(part) else part

    def _is_images(self, part: Tensor) -> bool:
        return self._layout.channels_last and part.dim() == 4


class StreamedBatches(_StoredBatches):
    """Batches of rows on disk, memory-mapped; each is gathered on the host, then sent."""

    def __init__(
        self,
        arrays: tuple[np.ndarray, ...],
        layout: RowLayout,
        *,
        device: torch.device,
        residency: str,
        reason: str,
        is_spare: bool,
    ) -> None:
        """is_spare: rows are read and not mapped, so that the files take no memory."""
        super().__init__(arrays[0], layout)
        self.residency, self.reason = residency, reason
        self.copy_s: float | None = None
        self._device = device
        # Arrays, or what is read as one.
        self._arrays: tuple[Any, ...] = tuple(map(FileRows, arrays)) if is_spare else arrays
        if layout.context:
            length = layout.context + 1
            # Never a slice of it: of tokens `select_span` names the rows by where they begin.
            self._arrays = tuple(TokenWindows(a, length) for a in self._arrays)
        self._idle: PinnedStaging | None = None  # of the last iteration, for the next
        self._busy: list[PinnedStaging] = []
        self._is_ahead = True  # while there is room for two batches

    def iterate_shuffled(self, batch_size: int, order: Tensor, mark: Mark) -> Iterator[Batch]:
        chosen = order.split(batch_size)

        def rows_from(batch: int) -> Iterator[RowSelection]:
            # Sorted, since a disk reads forwards; the rows of a batch have no order of their own.
            return (np.sort(rows.numpy()) for rows in chosen[batch:])

        return self._read(rows_from, most_rows=min(batch_size, len(order)), mark=mark)

    def iterate_ranges(self, batches: Sequence[range]) -> Iterator[Batch]:
        def rows_from(batch: int) -> Iterator[RowSelection]:
            return (self._layout.select_span(rows.start, rows.stop) for rows in batches[batch:])

        return self._read(rows_from, most_rows=max(map(len, batches)), mark=lambda phase: None)

    def list_tensors(self) -> tuple[Tensor, ...]:
        return ()

    def give_back(self) -> bool:
        """Free the batch that was sent ahead; return whether there was one."""
        was_ahead, self._is_ahead = self._is_ahead, False
        for lane in self._busy:
            lane.give_back()
        return was_ahead and bool(self._busy)

    def close(self) -> None:
        """Drop the pinned buffers."""
        self._idle = None

    def _read(
        self, rows_from: Callable[[int], Iterable[RowSelection]], *, most_rows: int, mark: Mark
    ) -> Iterator[Batch]:
        """The batches, rows_from(0) and on; one by one from where two of them found no room."""
        done = 0
        while True:
            try:
                for batch in self._read_arriving(rows_from(done), most_rows=most_rows, mark=mark):
                    done += 1
                    yield batch
                    del batch  # gone before the next one is sent
                return
            except (RuntimeError, MemoryError) as error:
                if not self._is_ahead or not is_oom(error):
                    raise
                clear_frames(error)
            log.warning("short of memory for two batches: going on with one")
            self._is_ahead = False
            drop_cache(self._device)

    def _read_arriving(
        self, batches: Iterable[RowSelection], *, most_rows: int, mark: Mark
    ) -> Iterator[Batch]:
        if self.residency != "pinned":
            with closing(
                read_batches(self._arrays, batches, device=self._device, mark=mark)
            ) as arriving:
                yield from map(self._layout.open, arriving)
            return
        # Taken while it is in use: an iteration beside this one makes a lane of its own.
        lane, self._idle = self._idle, None
        if lane is None or lane.rows < most_rows:
            lane = None
            try:
                lane = PinnedStaging(self._arrays, most_rows, device=self._device)
            except (RuntimeError, MemoryError) as error:
                if not is_oom(error):
                    raise
                clear_frames(error)
            if lane is None:
                self.residency = "host"
                self.reason += ", but the host has none left to pin"
                log.warning("%s", self.reason)
                yield from self._read_arriving(batches, most_rows=most_rows, mark=mark)
                return
        lane.is_ahead = self._is_ahead
        self._busy.append(lane)
        try:
            with closing(lane.read(batches, mark)) as arriving:
                yield from map(self._layout.open, arriving)
        finally:
            self._busy.remove(lane)
            self._idle, self.copy_s = lane, lane.copy_s


def place_rows(
    x: np.ndarray,
    y: np.ndarray,
    *,
    device: torch.device,
    room_bytes: float,
    channels_last: bool = False,
    is_spare: bool = False,
) -> ResidentBatches | StreamedBatches:
    """Place rows of x with their targets y where they are fastest to reach.

    They move to the device whole if they take at most half of `room_bytes`. channels_last: images
    come in that memory format, if x holds images. is_spare: rows on disk take no memory there.
    """
    arrays, layout = choose_layout(x, y, channels_last=channels_last)
    need_bytes = sum(array.nbytes for array in arrays)
    need, room = format_mebibytes(need_bytes / MIB), format_mebibytes(room_bytes / MIB)
    if need_bytes <= RESIDENT_SHARE * room_bytes:
        reason = f"{need} of rows take at most half of the {room} of room on {device}"
        parts = tuple(layout.move_array(array, device) for array in arrays)
        return ResidentBatches(parts, layout, reason=reason, in_place=device.type == "cuda")
    pins = device.type in PINNING
    how = "through pinned memory" if pins else "from disk"
    reason = f"{need} of rows are over half of the {room} of room on {device}: streamed {how}"
    residency = "pinned" if pins else "host"
    return StreamedBatches(
        arrays, layout, device=device, residency=residency, reason=reason, is_spare=is_spare
    )
