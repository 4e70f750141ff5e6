"""What is to blame for a loss that is no number: a row of the user's own loader, or a loss of the
user's own. Of each step only sums are kept, on the device, and nobody waits for them; they are
looked at when a loss turns out bad. It refuses to blame what it has not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tasks.engine.base import nested
from tasks.engine.step.optimizer_step import Loss

Sums = tuple[tuple[str, Tensor], ...]  # of each row, by the name of the entry


@dataclass
class Seen:
    """A loss of the user's own that keeps the sum of the outputs of each call, for who takes them.
    Nothing is kept while it is compiled."""

    path: str
    loss: Loss
    kept: list[tuple[str, Tensor]]

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        if isinstance(outputs, Tensor) and not torch.compiler.is_compiling():
            self.kept.append((self.path, outputs.detach().sum()))
        return self.loss(outputs, targets)


@dataclass(frozen=True)
class NanOrigin:
    """Of one step. rows: sums of a batch's rows; outputs: what a Seen has kept."""

    rows: Sums = ()
    outputs: Sums = ()

    def blamed(self) -> tuple[str, str] | None:
        """The setting to blame and the sentence about it; None where neither is. Waits."""
        for name, sums in self.rows:
            bad = (~sums.isfinite()).nonzero()
            if len(bad):
                return "data.source", (
                    f"{name} holds a number there that is not finite, in row {int(bad[0]) + 1} of "
                    "that step's batch: mend or drop such rows"
                )
        if self.outputs and all(bool(total.isfinite()) for _, total in self.outputs):
            return "train.loss", (
                f"{self.outputs[0][0]} gave it for outputs and targets that are finite: look there "
                "for a division by 0, a log or a root of less"
            )
        return None


NOBODY = NanOrigin()


def row_sums(x: Any, y: Any) -> Sums:
    """The sum of each row of each entry with floating-point numbers: finite where all are."""
    return tuple(_sums(x, "inputs")) + tuple(_sums(y, "targets"))


def _sums(part: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    for path, tensor in nested.named(part, name):
        if tensor.is_floating_point() and tensor.dim() and tensor.layout is torch.strided:
            wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
            yield path, tensor.detach().unsqueeze(-1).flatten(1).sum(1, dtype=wide)
