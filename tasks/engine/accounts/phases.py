"""Measures what each phase of a step takes, in time and in memory. The clock measures time;
memory is read on sampled steps only, and counted by owner on some of these, since both cost
time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch

from tasks.engine.base.timing import PhaseClock
from tasks.engine.memory.memory_by_owner import MemoryByOwner
from tasks.engine.memory.memory_meter import MemoryMeter

# On an asynchronous device a timed step keeps the host busy with events and statistics. The first
# is taken phase by phase, those after it as steps are taken by then: replayed, perhaps.
TIME_EVERY = 100
# So many from the second step on are timed by events alone, some 10 us each: a short run has no
# more steps, and one step says little. More are timed at log points.
TIME_FIRST = 20
# A counted step takes about 2 ms longer on a CPU (an mlp of three layers: 2.8 instead of 0.6 ms).
COUNT_EVERY = 5000
NOT_COUNTED = nullcontext()


class Watched(Enum):
    """What is measured of a step while it is taken."""

    NOT = "not"
    TIMED = "timed"  # phase by phase: taken plainly, also where steps are replayed as a whole
    WHOLE = "whole"  # timed as it is taken
    COUNTED = "counted"  # storage by storage: the plain step only


class Phases:
    """Marks where a phase ends. Steps are measured at log points, where they are read anyway:
    some timed, some counted by owner.

    Where the clock times every step there is no need to choose; see timing.py.
    """

    def __init__(
        self,
        clock: PhaseClock,
        meter: MemoryMeter,
        accounts: MemoryByOwner,
        *,
        count_every: int | None,
    ) -> None:
        """count_every: steps between two counted ones, at least; None: one in the run."""
        self.clock, self.meter, self.accounts = clock, meter, accounts
        self._count_every = count_every
        self._counted: int | None = None
        self._timed: int | None = None
        self._whole: int | None = None
        self._first: int | None = None  # of those that are all timed
        self._once: set[str] = set()
        self.watched = Watched.NOT

    def begin(self, step: int, *, is_log_point: bool) -> None:
        """Begin step number `step`."""
        self.watched = Watched.NOT
        if is_log_point and _is_due(step, self._counted, self._count_every):
            self.watched, self._counted = Watched.COUNTED, step
        elif is_log_point and _is_due(step, self._timed, None):
            self.watched, self._timed = Watched.TIMED, step
        elif is_log_point and _is_due(step, self._whole, TIME_EVERY):
            self.watched, self._whole = Watched.WHOLE, step
        if self.watched is not Watched.NOT:
            self.meter.end_phase("between")
        self._first = step if self._first is None else self._first
        if self.watched is not Watched.COUNTED:  # counting takes time of its own
            is_early = step < self._first + TIME_FIRST
            self.clock.begin(sample=is_early or self.watched is not Watched.NOT)

    def count_memory(self, batch: Sequence[Any]) -> AbstractContextManager[None]:
        """Count the memory of this step, if it is to be counted."""
        if self.watched is Watched.COUNTED:
            return self.accounts.count_memory(batch)
        return NOT_COUNTED

    def count_memory_once(self, phase: str, batch: Sequence[Any]) -> AbstractContextManager[None]:
        """Count the memory of something beside the steps, the first time only, as a phase of
        its own."""
        if phase in self._once:
            return NOT_COUNTED
        self._once.add(phase)
        return self._count_phase(phase, batch)

    @contextmanager
    def _count_phase(self, phase: str, batch: Sequence[Any]) -> Iterator[None]:
        self.meter.end_phase("between")
        # In inference mode an operation that is made of others would come to the ledger whole, and
        # below autocast: the loss of a classification would then be computed in bf16.
        with torch.inference_mode(False), torch.no_grad(), self.accounts.count_memory(batch):
            yield
            self.accounts.ledger.end_phase(phase)
            self.meter.end_phase(phase)

    def restart(self) -> None:
        """Forget the first step, which holds warm-up and compilation."""
        self.clock.reset()
        self._timed = self._whole = self._counted = self._first = None

    def recount(self) -> None:
        """Count again, steps and what is beside them: from here on they hold something
        else."""
        self._counted = None
        self._once.clear()
        self.accounts.forget()

    def mark(self, phase: str) -> None:
        """End `phase` here."""
        if self.watched is Watched.NOT:  # nearly always, four times a step
            return self.clock.mark(phase)
        if self.watched is Watched.COUNTED:
            self.accounts.ledger.end_phase(phase)
        else:
            self.clock.mark(phase)
        self.meter.end_phase(phase)


def _is_due(step: int, last: int | None, every: int | None) -> bool:
    # The same step again: it was begun after an epoch's last batch, and never came.
    return last is None or step == last or (every is not None and step - last >= every)
