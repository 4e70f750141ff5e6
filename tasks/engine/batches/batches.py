"""What every source of rows is to a training, wherever they are kept: prepared arrays on the device
or streamed to it, or a loader of the user's own. It says what they must do and does nothing.
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
        """Where the rows live: device, pinned, host or loader."""

    @property
    def reason(self) -> str:
        """One sentence: why there."""

    @property
    def copy_s(self) -> float | None:
        """Mean seconds of a copy that runs beside the steps, where no phase of theirs shows it."""

    @property
    def weight(self) -> float:
        """How much the mean of all ranks counts the batch that came last: its rows here times the
        ranks by those of the whole batch; 1 for a process that trains alone."""

    @property
    def rows_of_whole(self) -> int | None:
        """Rows of that batch on all ranks together; None: those that came."""

    @property
    def begins_again(self) -> bool:
        """Whether the epoch that a checkpoint was taken in is taken from its start."""

    def __len__(self) -> int:
        """Rows of one epoch."""

    def steps(self, batch_size: int) -> int:
        """Batches of one epoch."""

    def order(self, *, seed: int, epoch: int) -> Tensor:
        """The rows of an epoch, as `shuffled` takes them: the same for the same seed and epoch."""

    def state(self) -> dict[str, Any]:
        """What the batches that come depend on, beside the order; see checkpoint/."""

    def restore(self, state: dict[str, Any]) -> None:
        """Be as when `state` was taken."""

    def shuffled(self, batch_size: int, order: Tensor, mark: Mark) -> Iterator[tuple[Any, Any]]:
        """Batches in the given order of rows (int64, on the host); `mark` ends data_wait and h2d.

        A batch is whole until the next one is asked for, which may come in the same memory.
        """

    def in_order(self, batch_size: int) -> Iterator[tuple[Any, Any]]:
        """Batches as the rows lie; each may be kept."""

    def tensors(self) -> tuple[Tensor, ...]:
        """What holds rows on the device for the whole run."""

    def give_back(self) -> bool:
        """Do without what only saves time, from here on; whether there was any."""

    def close(self) -> None:
        """Give back what was kept for the next iteration."""
