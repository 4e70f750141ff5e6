"""What feeds the loop. A data set that fits lives on the device whole and its batches are gathered
there; one that does not is read from memory-mapped arrays, ahead of the loop. The order of the
rows depends on the seed and the epoch alone, so that it is the same on every device.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tasks.engine.base.units import mebibytes
from tasks.engine.batches.file_rows import Unmapped
from tasks.engine.batches.memory_format import Layout, Windows, laid_out
from tasks.engine.batches.pinned_staging import PINNING, Lane, Mark, Rows, pin_or_not, read
from tasks.engine.memory.allocator_stats import drop_cache
from tasks.engine.memory.memory_meter import clear_frames, is_oom

TRAIN_SHARE, VAL_SHARE = 2 / 3, 1 / 3  # of the room: both parts may then live there
RESIDENT_SHARE = 0.5  # of the room; the rest is for the model, its gradients and activations
MIB = 1024**2

log = logging.getLogger(__name__)


def ranges(rows: int, batch_size: int) -> list[range]:
    """The rows of each batch, as they lie."""
    return [range(rows)[at : at + batch_size] for at in range(0, rows, batch_size)]


class _Kept:
    """What rows have in common wherever they are kept."""

    begins_again = False
    weight, rows_of_whole = 1.0, None

    def __init__(self, first: Tensor | np.ndarray, layout: Layout) -> None:
        self._layout = layout
        self._rows, self.order = layout.rows(len(first)), partial(layout.order, len(first))

    def __len__(self) -> int:
        return self._rows

    def steps(self, batch_size: int) -> int:
        return math.ceil(len(self) / batch_size)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass

    def in_order(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        return self.in_ranges(ranges(len(self), batch_size))

    def in_ranges(self, batches: Sequence[range]) -> Iterator[tuple[Tensor, Tensor]]:
        """A batch of the rows of each range, as they lie; no other row is read."""
        raise NotImplementedError


class Resident(_Kept):
    """Rows on the device, one tensor or two as the layout says.

    in_place: all batches come in the memory of the first, as a recorded graph reads them.
    """

    residency = "device"
    copy_s = None

    def __init__(
        self, parts: tuple[Tensor, ...], layout: Layout, *, reason: str, in_place: bool
    ) -> None:
        super().__init__(parts[0], layout)
        self.reason = reason
        self._parts, self._in_place = parts, in_place
        self._batch: list[Tensor] = []  # where the batches are gathered, if in place

    @property
    def x(self) -> Tensor:
        """All inputs, as a batch would hold them."""
        return self._layout.open(self._wholes())[0]

    @property
    def y(self) -> Tensor:
        """All targets."""
        return self._layout.open(self._wholes())[1]

    def shuffled(
        self, batch_size: int, order: Tensor, mark: Mark
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Gathered on the device: 8 bytes a row cross the bus once an epoch, and nothing else."""
        if (device := self._parts[0].device).type in PINNING:
            order = pin_or_not(partial(torch.empty_like, order)).copy_(order)
        order = order.to(device, non_blocking=order.is_pinned())
        rows = min(batch_size, len(order))
        if self._in_place and (not self._batch or len(self._batch[0]) != rows):
            self._batch = [torch.empty_like(self._flat(part)[:rows]) for part in self._wholes()]
        for chosen in order.split(batch_size):
            batch = self._layout.open(self._gathered(chosen))
            mark("data_wait")
            yield batch
            del batch  # before the next one

    def in_ranges(self, batches: Sequence[range]) -> Iterator[tuple[Tensor, Tensor]]:
        wholes = self._wholes()
        for rows in batches:
            yield self._layout.open(part[rows.start : rows.stop] for part in wholes)

    def tensors(self) -> tuple[Tensor, ...]:
        return self._parts

    def give_back(self) -> bool:
        return False

    def close(self) -> None:
        self._batch = []

    def _gathered(self, chosen: Tensor) -> Iterator[Tensor]:
        for i, part in enumerate(self._parts):
            out = self._batch[i][: len(chosen)] if self._in_place else None
            rows = self._layout.gathered(self._flat(part), chosen, out=out)
            yield rows.permute(0, 3, 1, 2) if self._is_images(part) else rows

    def _wholes(self) -> list[Tensor]:
        return [self._layout.whole(part) for part in self._parts]

    def _flat(self, part: Tensor) -> Tensor:
        # index_select returns contiguous rows whatever it is given; in this view images are.
        return part.permute(0, 2, 3, 1) if self._is_images(part) else part

    def _is_images(self, part: Tensor) -> bool:
        return self._layout.channels_last and part.dim() == 4


class Streamed(_Kept):
    """Rows on disk, memory-mapped; each batch is gathered on the host, then sent."""

    def __init__(
        self,
        arrays: tuple[np.ndarray, ...],
        layout: Layout,
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
        self._arrays: tuple[Any, ...] = tuple(map(Unmapped, arrays)) if is_spare else arrays
        if layout.context:
            length = layout.context + 1
            # None is asked for a slice: span() names rows by where they begin.
            self._arrays = tuple(Windows(a, length) for a in self._arrays)
        self._idle: Lane | None = None  # of the last iteration, for the next
        self._busy: list[Lane] = []
        self._is_ahead = True  # while there is room for two batches

    def shuffled(
        self, batch_size: int, order: Tensor, mark: Mark
    ) -> Iterator[tuple[Tensor, Tensor]]:
        chosen = order.split(batch_size)

        def rows_from(batch: int) -> Iterator[Rows]:
            # Sorted, since a disk reads forwards; the rows of a batch have no order of their own.
            return (np.sort(rows.numpy()) for rows in chosen[batch:])

        return self._read(rows_from, most_rows=min(batch_size, len(order)), mark=mark)

    def in_ranges(self, batches: Sequence[range]) -> Iterator[tuple[Tensor, Tensor]]:
        def rows_from(batch: int) -> Iterator[Rows]:
            return (self._layout.span(rows.start, rows.stop) for rows in batches[batch:])

        return self._read(rows_from, most_rows=max(map(len, batches)), mark=lambda phase: None)

    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def give_back(self) -> bool:
        """The batch that was sent ahead, where there is one."""
        was_ahead, self._is_ahead = self._is_ahead, False
        for lane in self._busy:
            lane.give_back()
        return was_ahead and bool(self._busy)

    def close(self) -> None:
        """Drop the pinned buffers."""
        self._idle = None

    def _read(
        self, rows_from: Callable[[int], Iterable[Rows]], *, most_rows: int, mark: Mark
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches, rows_from(0) and on; one by one from where two of them found no room."""
        done = 0
        while True:
            try:
                for batch in self._arriving(rows_from(done), most_rows=most_rows, mark=mark):
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

    def _arriving(
        self, batches: Iterable[Rows], *, most_rows: int, mark: Mark
    ) -> Iterator[tuple[Tensor, Tensor]]:
        if self.residency != "pinned":
            with closing(read(self._arrays, batches, device=self._device, mark=mark)) as found:
                yield from map(self._layout.open, found)
            return
        # Taken while it is in use: an iteration beside this one makes a lane of its own.
        lane, self._idle = self._idle, None
        if lane is None or lane.rows < most_rows:
            lane = None
            try:
                lane = Lane(self._arrays, most_rows, device=self._device)
            except (RuntimeError, MemoryError) as error:
                if not is_oom(error):
                    raise
                clear_frames(error)
            if lane is None:
                self.residency = "host"
                self.reason += ", but the host has none left to pin"
                log.warning("%s", self.reason)
                yield from self._arriving(batches, most_rows=most_rows, mark=mark)
                return
        lane.is_ahead = self._is_ahead
        self._busy.append(lane)
        try:
            with closing(lane.read(batches, mark)) as found:
                yield from map(self._layout.open, found)
        finally:
            self._busy.remove(lane)
            self._idle, self.copy_s = lane, lane.copy_s


def feed(
    x: np.ndarray,
    y: np.ndarray,
    *,
    device: torch.device,
    room_bytes: float,
    channels_last: bool = False,
    is_spare: bool = False,
) -> Resident | Streamed:
    """Rows of x with their targets y, where they are fastest to reach.

    They move to the device whole if they take at most half of `room_bytes`. channels_last: images
    come in that memory format, if x holds images. is_spare: rows on disk take no memory there.
    """
    arrays, layout = laid_out(x, y, channels_last=channels_last)
    need_bytes = sum(array.nbytes for array in arrays)
    need, room = mebibytes(need_bytes / MIB), mebibytes(room_bytes / MIB)
    if need_bytes <= RESIDENT_SHARE * room_bytes:
        reason = f"{need} of rows take at most half of the {room} of room on {device}"
        parts = tuple(layout.moved(array, device) for array in arrays)
        return Resident(parts, layout, reason=reason, in_place=device.type == "cuda")
    pins = device.type in PINNING
    how = "through pinned memory" if pins else "from disk"
    reason = f"{need} of rows are over half of the {room} of room on {device}: streamed {how}"
    residency = "pinned" if pins else "host"
    return Streamed(
        arrays, layout, device=device, residency=residency, reason=reason, is_spare=is_spare
    )
