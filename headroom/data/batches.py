"""The protocol that every source of batches follows in a training, wherever its rows are kept:
prepared arrays on the device or streamed to it, or a loader of the user's own; and the share of a
rank where several train: the batches are those of one process, in its order, and of each a rank
reads its own part and no other row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, Protocol

import torch
from torch import Tensor

from headroom.data.batch import Batch
from headroom.data.dataloaders import BatchShare, LoaderBatches
from headroom.data.dataset_batches import ResidentBatches, StreamedBatches, make_ranges
from headroom.data.prefetch import Mark


class Batches(Protocol):
    """Rows with their targets, a batch at a time, on the device that trains."""

    @property
    def residency(self) -> str:
        """Return where the rows live: device, pinned, host or loader."""

    @property
    def reason(self) -> str:
        """Return one sentence that says why they live there."""

    @property
    def copy_s(self) -> float | None:
        """Return the mean seconds of a copy that runs beside the steps, where no phase of
        theirs shows it."""

    @property
    def begins_again(self) -> bool:
        """Return whether the epoch that a checkpoint was taken in is repeated from its start."""

    def __len__(self) -> int:
        """Return the rows of one epoch."""

    def count_steps(self, batch_size: int) -> int:
        """Return the batches of one epoch."""

    def draw_order(self, *, seed: int, epoch: int) -> Tensor:
        """Return the rows of an epoch, as `iterate_shuffled` takes them: the same for the same seed
        and epoch."""

    def state(self) -> dict[str, Any]:
        """Return what the batches to come depend on, beside the order; see checkpoint/."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to where `state` was taken."""

    def iterate_shuffled(self, batch_size: int, order: Tensor, mark: Mark) -> Iterator[Batch]:
        """Yield batches in the given order of rows (int64, on the host); `mark` ends data_wait
        and h2d.

        A batch is valid until the next one is asked for, which may come in the same memory.
        """

    def iterate_in_order(self, batch_size: int) -> Iterator[Batch]:
        """Yield batches in the order of the rows; each may be kept."""

    def list_tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that hold rows on the device for the whole run."""

    def give_back(self) -> bool:
        """Free memory that only saves time, from here on; return whether there was any."""

    def close(self) -> None:
        """Free what was kept for the next iteration."""


class RankShare:
    """Batches of which this rank gets its part; a loader gives no other by itself."""

    def __init__(
        self, batches: ResidentBatches | StreamedBatches | LoaderBatches, *, rank: int, size: int
    ) -> None:
        self.whole = batches
        self._share = BatchShare(rank, size)
        self.residency = batches.residency
        self.reason = f"{batches.reason}; part {rank + 1} of {size} of each batch"
        self.count_steps, self.draw_order = batches.count_steps, batches.draw_order
        self.state, self.restore = batches.state, batches.restore
        self.list_tensors, self.give_back, self.close = (
            batches.list_tensors,
            batches.give_back,
            batches.close,
        )

    @property
    def copy_s(self) -> float | None:
        return self.whole.copy_s

    @property
    def begins_again(self) -> bool:
        return self.whole.begins_again

    def __len__(self) -> int:
        """Rows of one epoch, those of the other ranks with them."""
        return len(self.whole)

    def iterate_shuffled(self, batch_size: int, order: Tensor, mark: Mark) -> Iterator[Batch]:
        """Yield this rank's part of each batch: batch_size and order are those of all ranks."""
        if isinstance(self.whole, LoaderBatches):
            return self._weigh_batches(self.whole.iterate_shuffled(batch_size, order, mark))
        chunks = order.split(batch_size)
        parts = [chunk[self._share.find_slice(len(chunk))] for chunk in chunks]
        # All but the last are of one size, as the whole batches are, and the last is no larger.
        batches = self.whole.iterate_shuffled(len(parts[0]), torch.cat(parts), mark)
        return self._weigh_batches(batches, map(len, chunks))

    def iterate_in_order(self, batch_size: int) -> Iterator[Batch]:
        """Yield this rank's part of each batch, in file order; as many on every rank."""
        if isinstance(self.whole, LoaderBatches):
            return self._weigh_batches(self.whole.iterate_in_order(batch_size))
        wholes = make_ranges(len(self.whole), batch_size)
        parts = [rows[self._share.find_slice(len(rows))] for rows in wholes]
        return self._weigh_batches(self.whole.iterate_ranges(parts), map(len, wholes))

    def _weigh_batches(
        self, batches: Iterator[Batch], wholes: Iterator[int] | None = None
    ) -> Iterator[Batch]:
        """Yield the same with their weights; wholes: the rows of each whole batch, None where the
        batches say that themselves."""
        with closing(batches):  # type: ignore[type-var]
            for batch in batches:
                rows = batch.rows if wholes is None else next(wholes)
                yield Batch(batch.x, batch.y, rows, self._share.compute_weight(rows))
                del batch  # gone before the next one comes
