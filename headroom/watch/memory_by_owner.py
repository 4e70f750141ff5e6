"""Measure who owns the bytes of a training step at its peak: parameters, buffers, gradients,
optimizer state, data, batch, activations, what libraries and a recorded graph keep, and the
rest; and in which layer of the model they lie. It counts the steps that are watched, and says
nothing of a device whose steps were never watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from headroom.base import nested
from headroom.base.names import OWNERS
from headroom.watch.allocation_log import (
    LIBRARIES,
    MIB,
    REST,
    AllocationLog,
    sum_by_layer,
    sum_by_owner,
)
from headroom.watch.allocators import NoAllocator, Space
from headroom.watch.holders import find_live_tensors
from headroom.watch.layers import Layers, describe_layers

BEST_WEIGHTS = "best_weights"
OwnedTensors = Mapping[str, Iterable[Tensor]]


class MemoryByOwner:
    """Keeps the allocation log of a training. `owned` returns which tensors belong to whom at
    the time of the call."""

    def __init__(
        self,
        ledger: AllocationLog,
        owned: Callable[[], OwnedTensors],
        in_use: Callable[[], int | None] = lambda: None,
    ) -> None:
        """in_use: bytes that the allocator counts now, those of libraries included; None where
        there is none that does."""
        self.ledger = ledger
        self._owned, self._in_use = owned, in_use
        self._is_first = True
        self.find_layers: Callable[[], Layers] = Layers  # of the models, when a step is counted
        self._layers = Layers()  # of the step that is counted
        self._most = 0
        self._owners: dict[str, int] = {}
        self._by_layer: dict[str, dict[str, int]] = {}

    @contextmanager
    def count_memory(self, batch: Any) -> Iterator[None]:
        """Count what happens inside the block as one step on this batch: tensors, or structures
        of them."""
        if self._is_first and self._in_use() is not None:
            # Whatever else is there is no library's: what it held before the run, too.
            self._is_first = False
            self.ledger.track_tensors(live.tensor for live in find_live_tensors(self.ledger.device))
        self._layers = self.find_layers()
        self.ledger.know_layers(self._layers.paths)
        self._settle({**self._owned(), "batch": nested.find_tensors(batch)})
        self.ledger.begin_step()
        try:
            with self.ledger.count_allocations():
                yield
        finally:
            self._settle(self._owned())  # also what was made before a failure has its owner
            self._layers = Layers()  # nothing of the model is kept, nor looked for in a later step
            self.ledger.know_layers({})
        libraries_bytes = max(0, (self._in_use() or 0) - self.ledger.allocated_bytes)
        if self.ledger.step_peak_bytes + libraries_bytes > self._most:
            self._most = self.ledger.step_peak_bytes + libraries_bytes
            at_peak = self.ledger.list_at_peak()
            self._owners, self._by_layer = sum_by_owner(at_peak), sum_by_layer(at_peak)
            if libraries_bytes:
                self._owners[LIBRARIES] = self._owners.get(LIBRARIES, 0) + libraries_bytes

    def settle(self) -> None:
        """Say whose the tensors are that are there now, where a step is counted: they may be gone
        at its end."""
        if self.ledger.is_active:
            self._settle(self._owned())

    def forget(self) -> None:
        """Discard what was counted so far; steps do not hold it any longer."""
        self._most = 0

    def make_metrics(self, *, peak_mib: float | None = None) -> dict[str, float]:
        """Return the MiB by owner at the highest peak of a watched step, under the names of the
        record. They sum to peak_mib, the run's, where that is known: what steps held beyond it
        that nobody watched is the rest."""
        if not self._owners:
            return {}
        metrics = {owner: self._owners.get(owner, 0) / MIB for owner in OWNERS}
        metrics[REST] += max(0.0, (peak_mib or 0.0) - sum(metrics.values()))
        seldom = {BEST_WEIGHTS, LIBRARIES, "graph"}
        is_told = seldom & self._owners.keys()
        return {
            f"memory/{owner}_mib": mib
            for owner, mib in metrics.items()
            if owner not in seldom or owner in is_told
        }

    def describe_layers(self) -> dict[str, Any]:
        """Return the bytes by layer at the highest peak of a watched step, as JSON holds them;
        empty where no layer is known."""
        return describe_layers(self._owners, self._by_layer)

    def _settle(self, owned: OwnedTensors) -> None:
        for owner, tensors in owned.items():
            self.ledger.own(owner, tensors)
        self.ledger.place(self._layers.iterate_tensors())


class CountedAllocator(NoAllocator):
    """The CPU's allocator as far as the log has counted it: its statistics are absent between
    watched steps, unless a limit keeps the log counting."""

    def __init__(self, ledger: AllocationLog, limit_bytes: int | None) -> None:
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

    def read_space(self) -> Space | None:
        if self._limit is None:
            return None
        return Space(self._limit, max(0, self._limit - self._ledger.allocated_bytes))

    def read_stats(self) -> dict[str, Any]:
        return {}
