"""One rank's rows of a training on several. The batches are those of one process, in its order; of
each, a rank reads the part that is its own, and no other row. It refuses nothing: a loader that
cannot be split is refused where it is made one of the rank's, in shared_loader.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from tasks.engine.batches.dataloaders import BatchShare, LoaderBatches
from tasks.engine.batches.dataset_batches import ResidentBatches, StreamedBatches, make_ranges
from tasks.engine.batches.pinned_staging import Mark


class RankShare:
    """Batches of which this rank gets its part; a loader gives no other by itself.

    After each batch, `rows_of_whole` is how many the whole batch has, and `weight` what a mean
    over this part counts for in the mean over the ranks: 0 where a row only fills in for none.
    """

    def __init__(
        self, batches: ResidentBatches | StreamedBatches | LoaderBatches, *, rank: int, size: int
    ) -> None:
        self.whole = batches
        self.weight, self.rows_of_whole = 1.0, 0
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

    def iterate_shuffled(
        self, batch_size: int, order: Tensor, mark: Mark
    ) -> Iterator[tuple[Any, Any]]:
        """Yield this rank's part of each batch: batch_size and order are those of all
        ranks."""
        if isinstance(self.whole, LoaderBatches):
            return self._weigh_loaded(self.whole.iterate_shuffled(batch_size, order, mark))
        chunks = order.split(batch_size)
        parts = [chunk[self._share.find_slice(len(chunk))] for chunk in chunks]
        # All but the last are of one size, as the whole batches are, and the last is no larger.
        found = self.whole.iterate_shuffled(len(parts[0]), torch.cat(parts), mark)
        return self._weigh_batches(found, map(len, chunks))

    def iterate_in_order(self, batch_size: int) -> Iterator[tuple[Any, Any]]:
        """Yield this rank's part of each batch, in file order; as many on every rank."""
        if isinstance(self.whole, LoaderBatches):
            return self._weigh_loaded(self.whole.iterate_in_order(batch_size))
        wholes = make_ranges(len(self.whole), batch_size)
        parts = [rows[self._share.find_slice(len(rows))] for rows in wholes]
        return self._weigh_batches(self.whole.iterate_ranges(parts), map(len, wholes))

    def _weigh_loaded(self, found: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        assert isinstance(self.whole, LoaderBatches)
        loaded = self.whole
        return self._weigh_batches(found, iter(lambda: loaded.batch_rows, -1))

    def _weigh_batches(
        self, found: Iterator[tuple[Any, Any]], rows: Iterator[int]
    ) -> Iterator[tuple[Any, Any]]:
        """Yield the same, with what is said of each; rows: of each whole batch, asked for after
        it came, since batches may be read ahead."""
        with closing(found):  # type: ignore[type-var]
            for batch in found:
                self.rows_of_whole = next(rows)
                self.weight = self._share.compute_weight(self.rows_of_whole)
                yield batch
                del batch  # gone before the next one comes
