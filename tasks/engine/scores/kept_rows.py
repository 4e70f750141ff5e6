"""What an evaluation keeps of its rows for the figures: outputs and targets, on their device, in
memory that is taken once. A small tensor kept of each batch would lie between the large ones that
are freed, so that none of these was used again. Of more rows than the bound it keeps every second,
third, ...: a part that is as good as drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Values of the outputs. Those of a classification are classes, of 2 or 4 bytes each with their
# targets'. To sort the scores of several labels takes 0.25 us for each.
MOST_VALUES = {"classification": 2**24, "regression": 2**22, "multilabel": 2**18}


def small(classes: Tensor, count: int) -> Tensor:
    """The same classes in as few bytes as the largest of `count` needs."""
    return classes.to(torch.int16 if count <= 2**15 else torch.int32)


class KeptRows:
    """Outputs and targets of rows as they come."""

    def __init__(self, task: str, rows: int) -> None:
        """rows: of the whole evaluation."""
        self._most, self._rows = MOST_VALUES.get(task, 0), rows
        self._kept: tuple[Tensor, Tensor] | None = None
        self._stride, self._seen, self._count = 1, 0, 0

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """outputs, targets: (rows, ...), the next ones."""
        if self._kept is None:
            width = max(1, outputs[:1].numel())
            self._stride = -(-self._rows * width // self._most)
            count = -(-self._rows // self._stride)
            self._kept = (
                outputs.new_empty(count, *outputs.shape[1:]),
                targets.new_empty(count, *targets.shape[1:]),
            )
        rows = slice(-self._seen % self._stride, None, self._stride)
        self._seen += len(outputs)
        end = min(self._count + len(outputs[rows]), len(self._kept[0]))
        for kept, given in zip(self._kept, (outputs, targets), strict=True):
            kept[self._count : end] = given[rows][: end - self._count]
        self._count = end

    def on_host(self) -> tuple[Tensor, Tensor] | None:
        """Waits for the device. None: no row came."""
        if self._kept is None:
            return None
        outputs, targets = self._kept
        return outputs[: self._count].cpu(), targets[: self._count].cpu()
