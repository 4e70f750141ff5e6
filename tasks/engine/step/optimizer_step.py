"""One optimizer step: forward, loss, backward, update. It never reads a number back from the
device, so that the host can run ahead; micro-batches give the gradients of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tasks.engine.base import nested
from tasks.engine.distributed.parallel import Parallel
from tasks.engine.distributed.shards import full
from tasks.engine.step.micro_batches import Fitting, Fixed
from tasks.engine.step.optim import Optimizer
from tasks.engine.step.phases import Watched

Loss = Callable[[Any, Any], Tensor]  # the mean over what its Count tells, a scalar
# Of inputs and targets: over how much a loss of these rows is the mean. Rows, or a tensor on the
# device where it depends on the targets, as where some labels are skipped.
Count = Callable[[Any, Any], Any]

ALONE = nullcontext()


def _one() -> float:
    return 1.0


def count_rows(x: Any, y: Any) -> int:
    return nested.rows_of(y)


class Outcome(NamedTuple):
    """What a step leaves, on its device: scalars, detached."""

    loss: Tensor  # mean over the rows of the batch
    grad_norm: Tensor | None  # of all gradients together, before clipping; None where not asked


class Steps(Protocol):
    """Something that takes optimizer steps."""

    def __call__(self, x: Any, y: Any, *, norm: bool, watched: Watched) -> Outcome:
        """Train on one batch: tensors, or structures of them (see nested.py). norm: also give the
        norm of the gradients."""


@dataclass
class Step:
    """The plain step, and the meaning of all faster ones."""

    compute: Loss  # of inputs and targets: the model's loss; compiled where that pays
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    autocast: Callable[[], AbstractContextManager[object]]
    clip_norm: float | None
    micro: Fitting  # how many rows go through the model at once
    mark: Callable[[str], None]  # a phase ends
    count: Count = count_rows
    # Of a model that several processes train: as it is called, and how much their mean counts the
    # rows of this one.
    parallel: Parallel | None = None
    weight: Callable[[], float] = _one

    def __call__(self, x: Any, y: Any, *, norm: bool, watched: Watched) -> Outcome:
        loss = self.micro.fit(self.gradients, (x, y))
        grad_norm = None
        if norm or self.clip_norm is not None:
            self.micro.again(self._unscale)
            grad_norm = self.micro.again(self._grad_norm)
        self.micro.again(self._update)
        self.scaler.update()
        self.mark("optimizer")
        return Outcome(loss, grad_norm)

    def gradients(self, x: Any, y: Any, rows: int) -> Tensor:
        """The loss of the batch; its gradients lie at the parameters, whatever was there before."""
        self.optimizer.zero_grad()
        losses = []
        count = nested.rows_of(y)
        whole = rows >= count
        parts = (
            [(x, y)] if whole else nested.split((x, y), rows, whole=count, least=self.micro.least)
        )
        weight = self.weight()
        shares = [1.0] if whole else self._shares(parts)
        for i, (part_x, part_y) in enumerate(parts):
            is_last = i + 1 == len(parts)
            with ALONE if is_last else self._alone():
                with self.autocast():
                    loss = self.compute(part_x, part_y)
                if not whole or weight != 1:
                    loss = scaled(loss, weight * shares[i])
                self.mark("forward")
                self.scaler.scale(loss).backward()
            self.mark("communication" if is_last and self.parallel is not None else "backward")
            losses.append(loss.detach())
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _shares(self, parts: list[Any]) -> list[Any]:
        """How much of the batch's loss each part is; on the device where only that knows."""
        counts = [self.count(x, y) for x, y in parts]
        of_all = sum(counts)
        return [count / of_all for count in counts]

    def forward(self, x: Any, y: Any) -> None:
        """Only through model and loss, in micro-batches as of now: to see a mistake once more."""
        rows, whole = self.micro.rows, nested.rows_of(y)
        for part in nested.split((x, y), rows, whole=whole, least=self.micro.least):
            with self._alone(), self.autocast():
                self.compute(*part)

    def _alone(self) -> AbstractContextManager[object]:
        return ALONE if self.parallel is None else self.parallel.alone()

    def recordable(self) -> Step:
        """The same step at the size of now, without what a recording can't hold: other ways out,
        and events of a clock."""
        return replace(self, micro=Fixed(self.micro.rows), mark=_unmarked)

    def _update(self) -> None:
        try:
            self.scaler.step(self.optimizer)  # type: ignore[arg-type] # fused, see optim.py
        finally:
            # Left behind by a step that failed, they would be multiplied into the next one's.
            self.optimizer.forget_scale()

    def _unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)  # type: ignore[arg-type]

    def _grad_norm(self) -> Tensor:
        if self.clip_norm is None:
            return total_norm(self.optimizer)
        return full(nn.utils.clip_grad_norm_(self.optimizer.params, self.clip_norm))


def scaled(loss: Tensor, share: Any) -> Tensor:
    """The loss times its share: a number, or a tensor, where a share of 0 makes it 0, also of a
    mean over nothing, which is no number."""
    if not isinstance(share, Tensor):
        return loss * share
    return torch.where(share > 0, loss * share, 0.0)


def _unmarked(phase: str) -> None:
    pass


def total_norm(optimizer: Optimizer) -> Tensor:
    """The Euclidean norm of all gradients together."""
    grads = [p.grad for p in optimizer.params if p.grad is not None]
    return full(nn.utils.get_total_norm(grads))
