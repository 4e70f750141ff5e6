"""Whose the bytes of a training step are: parameters, buffers, gradients, optimizer state, data,
batch, activations and the rest, where the step holds most. It counts the steps that are watched,
and says nothing of a device whose steps were never watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tasks.engine import tree
from tasks.engine.allocators import NoAllocator, Space
from tasks.engine.ledger import MIB, Ledger

OWNERS = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer_state",
    "data",
    "batch",
    "activations",
    "rest",
)
Owned = Mapping[str, Iterable[Tensor]]


class Accounts:
    """Keeps the ledger of a training. `owned` tells what belongs to whom at the time of asking."""

    def __init__(self, ledger: Ledger, owned: Callable[[], Owned]) -> None:
        self.ledger = ledger
        self._owned = owned
        self._most = 0
        self._owners: dict[str, int] = {}

    @contextmanager
    def counting(self, batch: Any) -> Iterator[None]:
        """What happens inside is one step on this batch: tensors, or structures of them."""
        self._settle({**self._owned(), "batch": tree.tensors(batch)})
        self.ledger.begin_step()
        try:
            with self.ledger.active():
                yield
        finally:
            self._settle(self._owned())  # also what was made before a failure has its owner
        if self.ledger.step_peak_bytes > self._most:
            self._most = self.ledger.step_peak_bytes
            self._owners = self.ledger.owners_at_peak()

    def metrics(self) -> dict[str, float]:
        """MiB by owner at the highest peak of a watched step, under the names of the record."""
        return {
            f"memory/{owner}_mib": self._owners.get(owner, 0) / MIB
            for owner in OWNERS
            if self._owners
        }

    def _settle(self, owned: Owned) -> None:
        for owner, tensors in owned.items():
            self.ledger.own(owner, tensors)


class CountedAllocator(NoAllocator):
    """The CPU's allocator as far as the ledger has counted it: what it tells is absent between
    watched steps, unless a limit keeps it counting."""

    def __init__(self, ledger: Ledger, limit_bytes: int | None) -> None:
        self._ledger, self._limit = ledger, limit_bytes
        self._is_fresh = False

    def read(self) -> dict[str, int]:
        self._is_fresh = self._is_fresh or self._ledger.is_active
        if not self._is_fresh:
            return {}
        return {
            "allocated": self._ledger.allocated_bytes,
            "peak_allocated": self._ledger.peak_bytes,
        }

    def reset_peaks(self) -> None:
        self._is_fresh = self._ledger.is_active
        self._ledger.reset_peak()

    def space(self) -> Space | None:
        if self._limit is None:
            return None
        return Space(self._limit, max(0, self._limit - self._ledger.allocated_bytes))

    def stats(self) -> dict[str, Any]:
        return {}
