"""Micro-batches of a model that several processes train: as many rows on each as fit on all. They
are found out before the first step, without communication, since a rank that runs out of memory in
the middle of it leaves the others waiting: all then begin again, with less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tasks.engine.distributed.ranks import BeginAgain, Ranks
from tasks.engine.memory.memory_meter import is_oom
from tasks.engine.step.micro_batches import Failure, MemoryExhausted, MicroBatches, words

T = TypeVar("T")


class TooLarge(BeginAgain):
    """A micro-batch did not fit, where a rank cannot try again without the others."""

    def __init__(self, rows: int, why: str) -> None:
        super().__init__(
            f"short of memory with micro-batches of {rows} rows: all begin again with "
            f"{-(-rows // 2)}, from the last checkpoint ({'. '.join(why.split('. ')[:2])})"
        )
        self.smaller = -(-rows // 2)


class FixedMicroBatches(MicroBatches):
    """One size for all, of a model that is shared out: to try again, a rank needs the others."""

    def fit(self, attempt: Callable[..., T], batch: Sequence[Any]) -> T:
        """What `attempt(*batch, rows)` returns. Raises TooLarge."""
        before = self._written(batch)
        try:
            done = attempt(*self._given(batch), self.rows)
            self._refuse_written(batch, before)
            return done
        except (RuntimeError, MemoryError) as error:
            if self.rows == 1 or not is_oom(error):
                raise
            why = words(error)
        raise TooLarge(self.rows, why)

    def restore(self, state: list[Any]) -> None:
        """Be as when `state` was taken, with no more rows than these."""
        rows = self.rows
        super().restore(state)
        self.rows = min(rows, self.rows)

    def ease(self, why: str) -> None:
        """All would have to."""


class AgreedMicroBatches(FixedMicroBatches):
    """The size that the smallest needs, kept to the end of this process."""

    def __init__(
        self,
        rows: int,
        *,
        ranks: Ranks,
        together: Callable[[], None],
        **others: Any,
    ) -> None:
        """others: of MicroBatches. together: from there on the ranks wait for each other."""
        super().__init__(rows, **others)
        self._ranks, self._together, self._is_agreed = ranks, together, False

    def fit(self, attempt: Callable[..., T], batch: Sequence[Any]) -> T:
        """What `attempt(*batch, rows)` returns. Raises MemoryExhausted on all ranks, where one of
        them has no room for a row."""
        if not self._is_agreed:
            self._agree(attempt, batch)
        return super().fit(attempt, batch)

    def _agree(self, attempt: Callable[..., T], batch: Sequence[Any]) -> None:
        before, failure = self._state(), None
        try:
            MicroBatches.fit(self, attempt, batch)
        except MemoryExhausted as error:
            failure = error.failure
        self._restore(before)
        told: list[tuple[int, Failure | None]] = self._ranks.all_of((self.rows, failure))
        for rank, (_, found) in enumerate(told):
            if found is not None:
                raise MemoryExhausted(replace(found, text=f"on rank {rank}: {found.text}"))
        self.rows = min(rows for rows, _ in told)
        self._together()
        self._is_agreed = True
