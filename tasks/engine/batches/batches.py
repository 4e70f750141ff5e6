"""The protocol that every source of rows follows in a training, wherever the rows are kept:
prepared arrays on the device or streamed to it, or a loader of the user's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from tasks.engine.batches.pinned_staging import Mark


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
    def weight(self) -> float:
        """Return how much the last batch counts in the mean over all ranks: its rows here
        times the ranks, divided by those of the whole batch; 1 for a process that trains
        alone."""

    @property
    def rows_of_whole(self) -> int | None:
        """Return the rows of the last batch on all ranks together; None: those that came."""

    @property
    def begins_again(self) -> bool:
        """Return whether the epoch that a checkpoint was taken in is repeated from its
        start."""

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

    def iterate_shuffled(
        self, batch_size: int, order: Tensor, mark: Mark
    ) -> Iterator[tuple[Any, Any]]:
        """Yield batches in the given order of rows (int64, on the host); `mark` ends data_wait
        and h2d.

        A batch is valid until the next one is asked for, which may come in the same memory.
        """

    def iterate_in_order(self, batch_size: int) -> Iterator[tuple[Any, Any]]:
        """Yield batches in the order of the rows; each may be kept."""

    def list_tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that hold rows on the device for the whole run."""

    def give_back(self) -> bool:
        """Free memory that only saves time, from here on; return whether there was any."""

    def close(self) -> None:
        """Free what was kept for the next iteration."""
