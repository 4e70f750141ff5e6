"""A batch as every source of rows gives it, and every step and evaluation takes it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """Rows with their targets, on the device that computes: tensors, or structures of them."""

    x: Any
    y: Any
    rows: int  # of the whole batch: where several ranks share it out, those of the others too
    # How much these rows count in the mean over all ranks: their number times the ranks, divided by
    # that of the whole batch; 0 where they only fill in for none, 1 for a process that is alone.
    weight: float = 1.0
