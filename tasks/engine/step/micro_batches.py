"""Training that goes on when memory runs out: what failed is done again in smaller micro-batches,
with the same rows, weights and random numbers, so that the global batch is as if nothing had
happened. It gives up where a single row does not fit, and then says what would have to change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from tasks.engine.base import nested
from tasks.engine.base.seeds import random_state, set_random_state
from tasks.engine.memory.allocator_stats import drop_cache
from tasks.engine.memory.memory_by_owner import MemoryByOwner
from tasks.engine.memory.memory_meter import clear_frames, is_oom

log = logging.getLogger(__name__)
T = TypeVar("T")

GROW_AFTER = 100  # batches without a failure before the larger micro-batch is tried again


@dataclass(frozen=True)
class Failure:
    """The last attempt, in plain values."""

    text: str  # the device's own words
    phase: str  # training, optimizer, eval, sending or set-up
    step: int = 0  # of the training; 0 before its first
    batch_shape: tuple[int, ...] = ()
    tried: tuple[int, ...] = ()  # rows of the micro-batches that did not fit
    fitted: int | None = None  # of the largest that did
    allocator: dict[str, int] = field(default_factory=dict)  # see allocator_stats.py


class MemoryExhausted(RuntimeError):
    """Not even one row fits, or not the optimizer's state, or nothing that is not tried again."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"memory ran out in {failure.phase}: {failure.text}")
        self.failure = failure


@contextmanager
def told_in(phase: str, *, step: Callable[[], int] = int) -> Iterator[None]:
    """Inside, whatever runs out of memory is MemoryExhausted, in this phase and at this step, where
    nobody further inside has told them. step: 0 for those who don't know."""
    failure = None
    try:
        yield
    except MemoryExhausted as error:
        clear_frames(error)
        failure = error.failure
    except (RuntimeError, MemoryError) as error:
        if not is_oom(error):
            raise
        failure = Failure(words(error), phase)
    if failure is not None:
        raise MemoryExhausted(replace(failure, step=failure.step or step()))


class Witness(Protocol):
    """Sees the last attempt of a training that runs out of memory."""

    def start(self) -> None:
        """It is about to be made."""

    def write(self) -> None:
        """It has failed: keep what the device's memory looks like."""

    def reading(self) -> dict[str, int]:
        """What the allocator tells; see allocator_stats.py."""


class Fitting(Protocol):
    """Runs what may run out of memory."""

    rows: int  # of a micro-batch
    recovered: int  # times that memory ran out and training went on

    def fit(self, attempt: Callable[..., T], batch: Sequence[Any]) -> T:
        """What `attempt(*batch, rows)` returns, for the largest number of rows that fits.

        attempt must not be a closure: the frame of one that failed keeps its cells in Python 3.11,
        and whoever keeps the error keeps the batch and the model.
        """

    def again(self, attempt: Callable[[], T]) -> T:
        """What `attempt()` returns; tried twice, since smaller micro-batches don't help it."""

    def ease(self, why: str) -> None:
        """Take less from here on, before it runs out."""


class Fixed:
    """Tries once: for steps that are recorded, which cannot fail half-way."""

    recovered = 0

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def fit(self, attempt: Callable[..., T], batch: Sequence[Any]) -> T:
        return attempt(*batch, self.rows)

    def again(self, attempt: Callable[[], T]) -> T:
        return attempt()

    def ease(self, why: str) -> None:
        pass


class MicroBatches:
    """The size of a micro-batch, halved when memory runs out and grown back later."""

    def __init__(
        self,
        rows: int,
        *,
        whole: int,
        what: str,
        device: torch.device,
        model: nn.Module,
        accounts: MemoryByOwner,
        witness: Witness,
        give_back: Callable[[], bool] = bool,
    ) -> None:
        """rows: to start with; whole: those of a batch, the most there can be. what: is repeated,
        "training" or "eval". witness: sees the last attempt. give_back: does without what only
        saves time, and says whether there was any."""
        self.rows, self._whole, self._what = min(rows, whole), whole, what
        self._device, self._accounts, self._witness = device, accounts, witness
        self._give_back = give_back
        # What a forward pass changes beside the gradients: running means, and random numbers.
        kinds = nn.modules.batchnorm._NormBase  # instance norms may keep running means too
        norms = [m for m in model.modules() if isinstance(m, kinds)]
        self._running = [b for m in norms for b in m.buffers()]
        self.recovered = 0
        self.tried: list[int] = []  # sizes that failed
        self.fitted: int | None = None  # the largest that did not
        self._calm = 0
        self._patience = GROW_AFTER

    def fit(self, attempt: Callable[..., T], batch: Sequence[Any]) -> T:
        """What `attempt(*batch, rows)` returns, for the largest number of rows that fits.

        attempt must give the same whatever it did before, and whatever number it is called with.
        Raises MemoryExhausted, and anything else that attempt raises.
        """
        self._grow()
        state, begun_with = self._state(), self.rows
        while True:
            failure = None
            try:
                done = attempt(*batch, self.rows)
            except (RuntimeError, MemoryError) as error:
                if not is_oom(error):
                    raise
                failure = words(error)
            # Only here, outside the except block, is the error gone and what its frames held.
            if failure is None:
                self._calm += 1
                self.fitted = max(self.rows, self.fitted or 0)
                return done
            self._restore(state)
            drop_cache(self._device)
            if self.rows == 1 and self._give_back():
                self.recovered += 1
                self.rows = begun_with
                log.warning("short of memory in %s: going on one batch at a time", self._what)
                continue
            if self.rows == 1:
                self.tried.append(1)
                return self._watched(
                    partial(attempt, *batch, 1), failure, phase=self._what, batch=batch
                )
            self._halve(failure)

    def again(self, attempt: Callable[[], T]) -> T:
        """What `attempt()` returns; tried twice, with the caches given back in between.

        Smaller micro-batches don't help here: the activations are gone already.
        """
        failure = None
        try:
            return attempt()
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            failure = words(error)
        self._give_back()
        drop_cache(self._device)
        log.warning("out of memory in the optimizer step: caches given back, tried again")
        return self._watched(attempt, failure, phase="optimizer", batch=())

    def state(self) -> list[Any]:
        """How large they are, and when they grow; see checkpoint/."""
        counts = [self.rows, self.recovered, self.fitted, self._calm, self._patience]
        return [*counts, list(self.tried)]

    def restore(self, state: list[Any]) -> None:
        """Be as when `state` was taken."""
        rows, self.recovered, self.fitted, self._calm, self._patience, self.tried = state
        self.rows = min(rows, self._whole)

    def ease(self, why: str) -> None:
        """Halve without having failed, where the allocator is about to."""
        if self.rows > 1:
            self._halve(why)
            self.recovered -= 1  # nothing was lost

    def _watched(
        self, attempt: Callable[[], T], text: str, *, phase: str, batch: Sequence[Any]
    ) -> T:
        """Once more, and counted: either it fits now, or we know who holds the memory."""
        self._witness.start()
        allocator: dict[str, int] = {}
        try:
            with self._accounts.counting(batch):
                done = attempt()
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            # While all that it held is still there.
            self._witness.write()
            allocator = self._witness.reading()
            text = words(error)
        else:
            self.recovered += 1
            return done
        drop_cache(self._device)
        shape = tuple(next((t.shape for t in nested.tensors(batch)), ()))
        tried = tuple(self.tried)
        failure = Failure(text, phase, 0, shape, tried, self.fitted, allocator)
        raise MemoryExhausted(failure)

    def _halve(self, why: str) -> None:
        self.tried.append(self.rows)
        self.rows = -(-self.rows // 2)
        self.recovered += 1
        if self._calm < GROW_AFTER and self.fitted is not None:
            self._patience *= 2  # the larger size was tried again and failed again
        self._calm = 0
        log.warning(
            "short of memory in %s with micro-batches of %s rows: going on with %s (%s)",
            self._what,
            self.tried[-1],
            self.rows,
            ". ".join(why.split(". ")[:2]),  # a device's own words go on for a paragraph
        )

    def _grow(self) -> None:
        if self.rows < self._whole and self._calm >= self._patience:
            self._calm = 0
            self.rows = min(self._whole, 2 * self.rows)

    def _state(self) -> tuple[Any, ...]:
        return (random_state(self._device), [b.clone() for b in self._running])

    def _restore(self, state: tuple[Any, ...]) -> None:
        random, running = state
        set_random_state(self._device, random)
        for buffer, kept in zip(self._running, running, strict=True):
            buffer.copy_(kept)


def words(error: BaseException) -> str:
    """What the error says; its frames let go of what they hold."""
    clear_frames(error)
    return str(error) or type(error).__name__
