"""Training that goes on when memory runs out: what failed is done again in smaller micro-batches,
with the same rows, weights, buffers and random numbers, so that the global batch is as if nothing
had happened. It gives up where a single row does not fit, and then says what would have to change.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from headroom.base import nested
from headroom.base.import_paths import get_error_message
from headroom.base.seeds import get_random_state, set_random_state
from headroom.settings.model_args import ModelError
from headroom.training.state_changes import KeptState, StateChanges, StateKeeper, read_version
from headroom.watch.allocators import drop_cache
from headroom.watch.memory_by_owner import MemoryByOwner
from headroom.watch.out_of_memory import MemoryFailure, clear_frames, is_oom

log = logging.getLogger(__name__)
T = TypeVar("T")
B = TypeVar("B")  # a batch: tensors, or structures of them

GROW_AFTER = 100  # batches without a failure before the larger micro-batch is tried again
# What PyTorch says where a batch norm, which needs two values of a channel, is given one row.
TOO_FEW_FOR_NORM = "Expected more than 1 value per channel"


class MemoryExhausted(RuntimeError):
    """Memory ran out: not even one row fits, or not the optimizer's state, or nothing that can
    be retried."""

    def __init__(self, failure: MemoryFailure) -> None:
        why = f" ({failure.unrepeated})" if failure.unrepeated else ""
        super().__init__(f"memory ran out in {failure.phase}: {failure.text}{why}")
        self.failure = failure


@contextmanager
def name_oom_phase(phase: str, *, step: Callable[[], int] = int) -> Iterator[None]:
    """Turn whatever runs out of memory inside into MemoryExhausted, with this phase and step,
    unless code further inside has named them. step: 0 where unknown."""
    failure = None
    try:
        yield
    except MemoryExhausted as error:
        clear_frames(error)
        failure = error.failure
    except (RuntimeError, MemoryError) as error:
        if not is_oom(error):
            raise
        failure = MemoryFailure(extract_message(error), phase)
    if failure is not None:
        raise MemoryExhausted(replace(failure, step=failure.step or step()))


class OomRecorder(Protocol):
    """Records the last attempt of a training that runs out of memory."""

    def start(self) -> None:
        """Begin to record: the attempt is about to be made."""

    def write(self) -> None:
        """Keep what the device's memory looks like: the attempt has failed."""

    def read_allocator(self) -> dict[str, int]:
        """Return the allocator's statistics; see allocators.py."""


class MicroBatching(Protocol):
    """Runs what may run out of memory, in smaller micro-batches where it does."""

    rows: int  # of a micro-batch
    least: int  # rows that one must have
    recovered: int  # times that memory ran out and training went on
    copies: bool  # whether what it is given is a copy, since the user's code writes to it

    def fit(self, attempt: Callable[[B, int], T], batch: B) -> T:
        """Return what `attempt(batch, rows)` returns, for the largest number of rows that
        fits.

        attempt must not be a closure: the frame of one that failed keeps its cells in Python
        3.11, and whoever keeps the error keeps the batch and the model.
        """

    def retry_once(self, attempt: Callable[[], T]) -> T:
        """Return what `attempt()` returns; tried twice, since smaller micro-batches don't help
        it."""

    def ease(self, why: str) -> None:
        """Take less from here on, before it runs out."""


class SingleAttempt:
    """Tries once, at one size: for steps that are recorded, which cannot fail half-way."""

    least, recovered, copies = 1, 0, False

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def fit(self, attempt: Callable[[B, int], T], batch: B) -> T:
        return attempt(batch, self.rows)

    def retry_once(self, attempt: Callable[[], T]) -> T:
        return attempt()

    def ease(self, why: str) -> None:
        pass


class MicroBatches:
    """Runs attempts in micro-batches, halved when memory runs out and grown back later."""

    def __init__(
        self,
        rows: int,
        *,
        whole: int,
        what: str,
        device: torch.device,
        model: nn.Module,
        accounts: MemoryByOwner,
        witness: OomRecorder,
        give_back: Callable[[], bool] = bool,
        forget_graph: Callable[[], bool] = bool,
        changes: StateChanges = StateChanges(),  # noqa: B008 (frozen)
        beside: Mapping[str, Any] | None = None,
    ) -> None:
        """rows: to start with; whole: those of a batch, the most there can be. what: is repeated,
        "training" or "eval". witness: sees the last attempt. give_back: does without what only
        saves time, and says whether there was any; forget_graph: the same of recorded steps, which
        hold activations of their own. changes: what an attempt changes of the model, and of losses
        and metrics of the user's own, which are `beside` it by their settings."""
        self.rows, self._whole, self._what = min(rows, whole), whole, what
        self._device, self._accounts, self._witness = device, accounts, witness
        self._give_back, self._forget_graph = give_back, forget_graph
        self.copies, self._own = changes.inputs, changes.own
        self._keeper = StateKeeper(model, changes, beside)
        # Of our own models only those with dropout draw: reading the state costs 3 us a step.
        dropout = nn.modules.dropout._DropoutNd
        self._draws = changes.own or any(
            isinstance(layer, dropout) and layer.p > 0 for layer in model.modules()
        )
        # A batch norm of columns can't train on one value of each; others have those of pixels.
        is_normed = any(isinstance(m, nn.BatchNorm1d) for m in model.modules())
        self.least = 2 if is_normed and what == "training" else 1
        self.recovered = 0
        self.tried: list[int] = []  # sizes that failed
        self.fitted: int | None = None  # the largest that did not
        self.is_learnt = (
            True  # what rows are is what the device has room for, for all that is known
        )
        self._calm = 0
        self._patience = GROW_AFTER

    def fit(self, attempt: Callable[[B, int], T], batch: B) -> T:
        """Return what `attempt(batch, rows)` returns, for the largest number of rows that
        fits.

        attempt must give the same whatever it did before, and whatever number it is called
        with. Raises MemoryExhausted, ModelError where the batch was written to and no copy
        was, and anything else that attempt raises.
        """
        if self.rows < self._whole:
            self._grow()
        state, begun_with = self._copy_state(), self.rows
        versions = self._count_writes(batch) if self._own else []
        failure: str | None = None
        while True:
            last, failure, at_end = failure, None, False
            try:
                done = attempt(self._copy_batch(batch), self.rows)
            except ValueError as error:
                # A single row of the last micro-batch, or all that memory had room for.
                if last is None or TOO_FEW_FOR_NORM not in get_error_message(error):
                    raise
                clear_frames(error)
                failure, at_end = f"{last} (and a batch norm needs two rows)", True
            except (RuntimeError, MemoryError) as error:
                if not is_oom(error):
                    raise
                # Python's own error tells of the user's code and the host, not of the device.
                self.is_learnt = not isinstance(error, MemoryError)
                failure, at_end = extract_message(error), self.rows <= self.least
            # Only here, outside the except block, is the error gone and what its frames held.
            if failure is None:
                self._calm += 1
                self.fitted = max(self.rows, self.fitted or 0)
                if self._own:
                    self._refuse_written(batch, versions)
                return done
            self._refuse_unrepeatable(batch, versions, state, failure)
            self._restore(state)
            if self._forget_graph():
                self.recovered += 1
                drop_cache(self._device)
                continue
            drop_cache(self._device)
            if at_end and self._give_back():
                self.recovered += 1
                self.rows = begun_with
                log.warning("short of memory in %s: going on one batch at a time", self._what)
                continue
            if at_end:
                self.tried.append(self.rows)
                return self._attempt_watched(
                    partial(attempt, self._copy_batch(batch), self.rows),
                    failure,
                    phase=self._what,
                    batch=batch,
                )
            self._halve(failure)

    def retry_once(self, attempt: Callable[[], T]) -> T:
        """Return what `attempt()` returns; tried twice, with the caches freed in between.

        Smaller micro-batches don't help here: the activations are gone already.
        """
        failure = None
        try:
            return attempt()
        except MemoryExhausted:
            raise  # it says itself that it can't be tried again
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            failure = extract_message(error)
        self._forget_graph()
        self._give_back()
        drop_cache(self._device)
        log.warning("out of memory in the optimizer step: caches given back, tried again")
        return self._attempt_watched(attempt, failure, phase="optimizer", batch=())

    @property
    def smallest(self) -> int:
        """Return the rows of the smallest micro-batch that was taken."""
        return min([self.rows, *(-(-rows // 2) for rows in self.tried)])

    def state(self) -> list[Any]:
        """Return how large micro-batches are, and when they grow; see checkpoint/."""
        counts = [self.rows, self.recovered, self.fitted, self._calm, self._patience]
        return [*counts, list(self.tried), self.is_learnt]

    def restore(self, state: list[Any]) -> None:
        """Go back to where `state` was taken."""
        rows, self.recovered, self.fitted, self._calm, self._patience, tried, learnt = state
        self.tried = list(tried)
        self.is_learnt = learnt
        self.rows = min(rows, self._whole)

    def ease(self, why: str) -> None:
        """Halve without having failed, where the allocator is about to."""
        if self.rows > self.least:
            self._halve(why)
            self.recovered -= 1  # nothing was lost

    def _attempt_watched(self, attempt: Callable[[], T], text: str, *, phase: str, batch: Any) -> T:
        """Once more, and counted: either it fits now, or we know who holds the memory."""
        self._witness.start()
        allocator: dict[str, int] = {}
        try:
            with self._accounts.count_memory(batch):
                done = attempt()
        except MemoryExhausted:
            raise
        except (RuntimeError, MemoryError, ValueError) as error:
            if not is_oom(error) and TOO_FEW_FOR_NORM not in get_error_message(error):
                raise
            # While all that it held is still there.
            self._witness.write()
            allocator = self._witness.read_allocator()
            text = extract_message(error) if is_oom(error) else text
            clear_frames(error)
        else:
            self.recovered += 1
            return done
        drop_cache(self._device)
        shape = tuple(next((t.shape for t in nested.find_tensors(batch)), ()))
        tried = tuple(self.tried)
        failure = MemoryFailure(text, phase, 0, shape, tried, self.fitted, allocator)
        raise MemoryExhausted(failure)

    def _halve(self, why: str) -> None:
        self.tried.append(self.rows)
        self.rows = max(self.least, -(-self.rows // 2))
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
        if self._calm >= self._patience:
            self._calm = 0
            self.rows = min(self._whole, 2 * self.rows)
            self.is_learnt |= self.rows == self._whole

    def _copy_batch(self, batch: B) -> B:
        """Return the batch as an attempt may have it: where that writes to it, a copy."""
        return cast(B, nested.map_tensors(batch, Tensor.clone)) if self.copies else batch

    def _count_writes(self, batch: Any) -> list[int]:
        """Return how often the batch was written to, where code of the user's sees it itself."""
        watches = self._own and not self.copies
        return [read_version(t) for t in nested.find_tensors(batch)] if watches else []

    def _refuse_written(self, batch: Any, before: list[int]) -> None:
        """From the first time on that a batch of the training is written to, attempts get copies.
        Rows to be judged are there for the next epoch too. Raises ModelError."""
        if self._count_writes(batch) == before:
            return
        if self._what == "eval":
            raise ModelError(
                "model.name: its forward, or a loss or metric, writes to the rows that it is given "
                "when it is evaluated, and did not in training, so that later evaluations would "
                "see other rows; let it work on a copy (x = x.clone())"
            )
        self.copies = True

    def _refuse_unrepeatable(
        self, batch: Any, before: list[int], state: AttemptState, failure: str
    ) -> None:
        """Raises MemoryExhausted where a failed attempt has changed what no copy was kept of."""
        lost = state.kept.find_lost()
        if self._count_writes(batch) != before:
            lost = lost or "the rows of the batch"
        if lost:
            why = f"the batch was not taken again: the attempt had changed {lost}"
            tried = (*self.tried, self.rows)
            raise MemoryExhausted(
                MemoryFailure(failure, self._what, tried=tried, fitted=self.fitted, unrepeated=why)
            )

    def _copy_state(self) -> AttemptState:
        return AttemptState(
            self._keeper.keep(),
            (random.getstate(), np.random.get_state()) if self._own else None,
            get_random_state(self._device) if self._draws else None,
        )

    def _restore(self, state: AttemptState) -> None:
        state.kept.restore()
        self._restore_draws(state)

    def _restore_draws(self, state: AttemptState) -> None:
        if state.torch_random is not None:
            set_random_state(self._device, state.torch_random)
        if state.random is not None:
            random.setstate(state.random[0])
            np.random.set_state(state.random[1])


class AttemptState(NamedTuple):
    """What an attempt begins with."""

    kept: KeptState
    random: tuple[Any, Any] | None  # states of Python's and numpy's
    torch_random: list[Tensor] | None


def extract_message(error: BaseException) -> str:
    """Return the error's message, and clear its frames of what they hold."""
    clear_frames(error)
    return get_error_message(error) or type(error).__name__
