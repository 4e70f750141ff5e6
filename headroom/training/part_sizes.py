"""Micro-batches of somebody else's loop: its batches may be of any size, and are halved only where
that is proven to change nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from torch import Tensor, nn

from headroom.base import nested
from headroom.base.seeds import get_random_state
from headroom.training.micro_batches import AttemptState, MemoryExhausted, MicroBatches
from headroom.training.part_sums import NotProven
from headroom.training.state_changes import (
    ChangeFinder,
    KeptState,
    StateChanges,
    StateKeeper,
    list_restorable,
)
from headroom.watch.own_loop import OwnLoop

T = TypeVar("T")
B = TypeVar("B")
LEARN = 3  # calls after which it is known whether a step draws from Python's or numpy's numbers


class NotRepeatable(NotProven):
    """The attempt that failed has changed what cannot be put back."""

    failure = ""  # in the device's own words


class _NoRecorder:
    """Records nothing: the last attempt is left to whoever records the loop."""

    def start(self) -> None:
        pass

    def write(self) -> None:
        pass

    def read_allocator(self) -> dict[str, int]:
        return {}


class PartSizes(MicroBatches):
    """Micro-batches of a loop whose batches may be of any size, halved only where that is proven
    to change nothing. What cannot be taken in parts fails as it would without."""

    def __init__(
        self,
        loop: OwnLoop,
        beside: Mapping[str, Any],
        prove: Callable[[Any], None],
        ignored: Set[str],
    ) -> None:
        """prove: raises NotProven."""
        self._model, self._others = loop.models[0], beside
        super().__init__(
            1,
            whole=1,
            what="training",
            device=loop.device,
            model=self._model,
            accounts=loop.accounts.phases.accounts,
            witness=_NoRecorder(),
            changes=StateChanges(own=True, slots=list_restorable(self._model, beside)),
            beside=beside,
        )
        self._prove, self._ignored = prove, ignored
        self._batch: Any = None
        self.batch_rows = 0  # of this batch
        self._begun: AttemptState | None = None
        self._draws_python, self._fits = False, 0
        self._learnt: StateChanges | None = None  # what a pass changes

    def fit(self, attempt: Callable[[B, int], T], batch: B) -> T:
        """Return what `attempt(batch, rows)` returns, for the largest number of rows that fits.

        Raises NotProven, with the state as it began, and whatever attempt raises."""
        self.batch_rows = whole = nested.count_rows(batch)
        if whole == 1:
            return attempt(batch, whole)
        if whole > self._whole:
            self.rows, self._whole = whole if self.rows == self._whole else self.rows, whole
        finder = self.make_finder() if self._learnt is None else None
        self._batch = batch
        try:
            done = super().fit(attempt, batch)
        finally:
            self._batch = None
        begun, self._begun = self._begun, None
        self._fits += 1
        if begun is not None and begun.random is not None and self._fits <= LEARN:
            self._draws_python |= not _is_same_state(begun.random, _read_python_state())
        if finder is not None and self._learnt is None:
            self.learn(finder.find_changes())
        return done

    def make_finder(self) -> ChangeFinder:
        """Return what finds the changes of a pass from now on."""
        return ChangeFinder(self._model, (), self._others, is_light=True, ignored=self._ignored)

    def make_keeper(self, changes: StateChanges) -> StateKeeper:
        """Return what keeps these changes."""
        return StateKeeper(self._model, changes, self._others)

    def learn(self, changes: StateChanges) -> None:
        """Keep what a pass changes, and that alone."""
        if self._learnt is not None:
            changes = replace(
                changes,
                slots=changes.slots | self._learnt.slots,
                mutated=changes.mutated | self._learnt.mutated,
                trained=changes.trained | self._learnt.trained,
            )
        self._learnt, self._keeper = changes, self.make_keeper(changes)

    def keep_slots(self) -> KeptState:
        """Return the state of now, but for random numbers."""
        return self._keeper.keep()

    def begin_again(self) -> KeptState:
        """Go back to where this batch began; return that state."""
        assert self._begun is not None
        self._restore(self._begun)
        return self._begun.kept

    def begin_draws_again(self) -> None:
        """Let the next numbers that are drawn be those that the batch began with."""
        assert self._begun is not None
        self._restore_draws(self._begun)

    def list_given(self) -> set[int]:
        """Return the tensors of the batch, by their ids."""
        return {id(tensor) for tensor in nested.find_tensors(self._batch)}

    def start_again(self) -> None:
        """Go back to where this batch began, if it has begun."""
        if self._begun is not None:
            self._restore(self._begun)

    def name_parameters(self, parameters: list[Tensor]) -> list[str]:
        """Return the names of these parameters, as their models have them."""
        models = (self._model, *(m for m in self._others.values() if isinstance(m, nn.Module)))
        names = {id(p): name for model in models for name, p in model.named_parameters()}
        return [names.get(id(p), "a parameter") for p in parameters]

    def _copy_state(self) -> AttemptState:
        is_asked = self._draws_python or self._fits < LEARN  # 200 us, where nobody draws
        python = _read_python_state() if is_asked else None
        self._begun = AttemptState(self._keeper.keep(), python, get_random_state(self._device))
        return self._begun

    def _halve(self, why: str) -> None:
        self._prove(self._batch)
        self.rows = min(self.rows, nested.count_rows(self._batch))
        super()._halve(why)

    def _refuse_unrepeatable(
        self, batch: Any, before: list[int], state: AttemptState, failure: str
    ) -> None:
        try:
            super()._refuse_unrepeatable(batch, before, state, failure)
        except MemoryExhausted as error:
            lost = NotRepeatable(str(error.failure.unrepeated))
        else:
            return
        lost.failure = failure
        raise lost

    def _attempt_watched(self, attempt: Callable[[], T], text: str, *, phase: str, batch: Any) -> T:
        if not nested.count_rows(batch):
            self._prove(batch)
        done = attempt()  # or else the error goes on as it comes
        self.recovered += 1
        return done


def _read_python_state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _is_same_state(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    numbers = [(state[1][1].tobytes(), state[1][2:]) for state in (one, other)]
    return one[0] == other[0] and numbers[0] == numbers[1]
