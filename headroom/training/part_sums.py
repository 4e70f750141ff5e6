"""How the loss of a batch comes of those of its parts: the rule that was proven, and the sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headroom.training.loss_counts import CountWatch, SeenCount
from headroom.training.state_changes import Slot

CLOSE = 1e-4  # of a count: what float32 sums of some million labels round off


class NotProven(Exception):
    """Parts of the batch do not add up to the batch, for all that is known; the text says why."""


class Rule(NamedTuple):
    """How the loss of a batch comes of its parts: as the mean over what each counts."""

    kind: str  # rows, told (by the step itself), counted (by what is divided by), sum
    counts: tuple[int, ...] = ()  # what is divided by that goes with the rows, by its number
    of: int = 0  # how often something is divided by in a pass
    is_watched: bool = False
    adding: frozenset[Slot] = frozenset()  # state that parts add up as the batch would


class PartAdder:
    """Adds up the losses of the parts of one batch."""

    def __init__(self, rule: Rule, rows: Sequence[int]) -> None:
        self.rule, self._rows = rule, rows
        self._unit: float | None = None  # what shares are of: the whole, as the first part promises
        self._losses: list[Tensor] = []
        self._weights: list[float] = []
        self.seen: list[list[SeenCount]] = []

    def weigh(self, weight: float | None, watch: CountWatch | None) -> float:
        """Return the share of the next part, whose loss is the mean over `weight`."""
        rows, whole = self._rows[len(self._weights)], sum(self._rows)
        if watch is not None:
            self.seen.append(watch.counts)
        if self.rule.kind == "sum":
            self._weights.append(1.0)
            return 1.0
        found = float(rows)
        if self.rule.kind == "told":
            found = -1.0 if weight is None else weight
        elif self.rule.kind == "counted":
            assert watch is not None
            found = watch.counts[self.rule.counts[0]].value if self._is_alike(watch) else -1.0
        if not 0 <= found < math.inf:
            raise NotProven("not each part of a batch tells what its loss is the mean over")
        if self.rule.kind == "rows":
            self._unit = float(whole)
        elif self._unit is None and found:
            self._unit = found / rows * whole
        self._weights.append(found)
        return found / self._unit if self._unit else 0.0

    def add(self, loss: Tensor) -> None:
        """Add the loss of the part that was weighed last."""
        self._losses.append(loss)

    def finish(self) -> tuple[Tensor, float]:
        """Return the loss of the batch, and by what its gradients are to be multiplied. Raises
        NotProven where the parts divide by what does not go together."""
        total = sum(self._weights)
        if self.rule.kind == "sum":
            return torch.stack(self._losses).sum(), 1.0
        for number in self.rule.counts if self.rule.is_watched else ():
            counts = [seen[number].value for seen in self.seen if number < len(seen)]
            if not self._go_together(counts, total):
                raise NotProven(
                    "its loss divides by several things that are not in proportion in each part; "
                    "let it return (loss, weight), the weight what the loss is the mean over"
                )
        counted = [(n, x) for n, x in zip(self._weights, self._losses, strict=True) if n]
        if not counted:
            return self._losses[0], 1.0
        loss = torch.stack([x * (n / total) for n, x in counted]).sum()
        return loss, (self._unit or total) / total

    def make_shares(self) -> list[float]:
        """Return how much of the batch each part was."""
        weights = self._rows if self.rule.kind == "sum" else self._weights
        return [weight / (sum(weights) or 1.0) for weight in weights]

    def _is_alike(self, watch: CountWatch) -> bool:
        return len(watch.counts) == self.rule.of

    def _go_together(self, counts: list[float], total: float) -> bool:
        whole = sum(counts)
        return len(counts) == len(self._weights) and all(
            abs(count * total - weight * whole) <= CLOSE * abs(total * whole)
            for count, weight in zip(counts, self._weights, strict=True)
        )
