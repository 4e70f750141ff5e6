"""One optimizer step: forward, loss, backward, update. It never reads a number back from the
device, so that the host can run ahead; micro-batches give the gradients of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from headroom.base import nested
from headroom.base.nested import gather_full
from headroom.data.batch import Batch
from headroom.ranks.sharding import ParallelModel
from headroom.training.micro_batches import MicroBatching, SingleAttempt
from headroom.training.optim import Optimizer
from headroom.watch.phases import Watched

Loss = Callable[[Any, Any], Tensor]  # the mean over what its Count tells, a scalar
# Of inputs and targets: over how much a loss of these rows is the mean. Rows, or a tensor on the
# device where it depends on the targets, as where some labels are skipped.
Count = Callable[[Any, Any], Any]

NO_CONTEXT = nullcontext()


def count_rows(x: Any, y: Any) -> int:
    return nested.count_rows(y)


class StepOutcome(NamedTuple):
    """The results of a step, on its device: scalars, detached."""

    loss: Tensor  # mean over the rows of the batch
    grad_norm: Tensor | None  # of all gradients together, before clipping; None where not asked


class StepTaker(Protocol):
    """Takes optimizer steps."""

    def __call__(self, batch: Batch, *, norm: bool, watched: Watched) -> StepOutcome:
        """Train on one batch. norm: also return the norm of the gradients."""


@dataclass
class Step:
    """The plain step; all faster ones compute the same."""

    compute: Loss  # of inputs and targets: the model's loss; compiled where that pays
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    autocast: Callable[[], AbstractContextManager[object]]
    clip_norm: float | None
    micro: MicroBatching  # how many rows go through the model at once
    mark: Callable[[str], None]  # a phase ends
    count: Count = count_rows
    parallel: ParallelModel | None = None  # the model as it is called, where several train it
    # The same as compute for micro-batches, where it would give no numbers for one without labels.
    compute_part: Loss | None = None

    def __call__(self, batch: Batch, *, norm: bool, watched: Watched) -> StepOutcome:
        loss = self.micro.fit(self.compute_gradients, batch)
        grad_norm = None
        if norm or self.clip_norm is not None:
            self.micro.retry_once(self._unscale)
            grad_norm = self.micro.retry_once(self._compute_grad_norm)
        update = self._update
        if self.optimizer.needs_closure:
            update = partial(self._update, partial(self._compute_again, batch))
        self.micro.retry_once(update)
        self.scaler.update()
        self.mark("optimizer")
        return StepOutcome(loss, grad_norm)

    def compute_gradients(self, batch: Batch, rows: int) -> Tensor:
        """Return the loss of the batch, in micro-batches of so many rows; its gradients replace
        whatever the parameters had before."""
        self.optimizer.zero_grad()
        x, y, _, weight = batch
        count = nested.count_rows(y)
        if rows >= count:
            parts, shares = [(x, y)], [None if weight == 1 else weight]  # None: all of it
        else:
            parts = nested.split_batch((x, y), rows, whole=count, least=self.micro.least)
            shares = [weight * share for share in self._compute_shares(parts)]
        losses, is_shared = [], self.parallel is not None
        for part, share in zip(parts, shares, strict=True):
            is_last = part is parts[-1]
            compute = self.compute_part if isinstance(share, Tensor) else None
            with NO_CONTEXT if is_last else self._work_alone():
                with self.autocast():
                    loss = (compute or self.compute)(*part)
                if share is not None:
                    loss = scale_loss(loss, share)
                self.mark("forward")
                self.scaler.scale(loss).backward()
            self.mark("communication" if is_last and is_shared else "backward")
            losses.append(loss.detach())
            del loss  # with its graph, before the next part comes
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _compute_shares(self, parts: list[Any]) -> list[Any]:
        """Return how much of the batch's loss each part is; on the device where only that knows."""
        counts = [self.count(x, y) for x, y in parts]
        of_all = sum(counts)
        return [count / of_all for count in counts]

    def forward(self, x: Any, y: Any) -> None:
        """Run only model and loss, in micro-batches as of now: to see a mistake once more."""
        rows, whole = self.micro.rows, nested.count_rows(y)
        for part in nested.split_batch((x, y), rows, whole=whole, least=self.micro.least):
            with self._work_alone(), self.autocast():
                self.compute(*part)

    def _work_alone(self) -> AbstractContextManager[object]:
        return NO_CONTEXT if self.parallel is None else self.parallel.alone()

    def make_recordable(self) -> Step:
        """Return the same step at its current size, without what a recording can't hold:
        retries, and events of a clock."""
        return replace(self, micro=SingleAttempt(self.micro.rows), mark=_ignore_phase)

    def _compute_again(self, batch: Batch) -> Tensor:
        """Return the loss of the same batch, with the weights of now; gradients are its own."""
        loss = self.micro.fit(self.compute_gradients, batch)
        if self.clip_norm is not None:
            self._compute_grad_norm()
        return loss

    def _update(self, closure: Callable[[], Tensor] | None = None) -> None:
        try:
            if closure is None:
                self.scaler.step(self.optimizer)  # type: ignore[arg-type] # fused, see optim.py
            else:
                self.optimizer.step(closure)  # a scaler takes none: fp16 was refused
        finally:
            # Left behind by a step that failed, they would be multiplied into the next one's.
            self.optimizer.forget_scale()

    def _unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)  # type: ignore[arg-type]

    def _compute_grad_norm(self) -> Tensor:
        if self.clip_norm is None:
            return compute_total_norm(self.optimizer)
        return gather_full(nn.utils.clip_grad_norm_(self.optimizer.params, self.clip_norm))


def scale_loss(loss: Tensor, share: Any) -> Tensor:
    """Return the loss times its share: a number, or a tensor, where a share of 0 makes it 0,
    also of a mean over nothing, which is no number."""
    if not isinstance(share, Tensor):
        return loss * share
    return torch.where(share > 0, loss * share, 0.0)


def stop_empty_gradients(outputs: Tensor, loss: Tensor) -> None:
    """Let no gradient come to the outputs of a loss that counts for nothing. One that divides by
    the labels it counts sends 0 / 0 there where it counts none, and 0 times that is no number."""
    if not (loss.requires_grad and outputs.requires_grad):
        return
    weights: list[Tensor] = []  # of the loss; it has its gradient before the outputs have theirs
    loss.register_hook(weights.append)
    outputs.register_hook(
        lambda gradient: torch.where(weights[0] != 0, gradient, 0) if weights else gradient
    )


def _ignore_phase(phase: str) -> None:
    pass


def compute_total_norm(optimizer: Optimizer) -> Tensor:
    """Compute the Euclidean norm of all gradients together."""
    grads = [p.grad for p in optimizer.params if p.grad is not None]
    return gather_full(nn.utils.get_total_norm(grads))
