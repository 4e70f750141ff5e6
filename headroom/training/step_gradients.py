"""The gradients of the parameters of somebody else's loop, while a batch is taken: those of earlier
batches lie aside, so that an attempt that fails leaves them as they were.
"""

from __future__ import annotations

import torch
from torch import Tensor


class StepGradients:
    """The gradients that parameters have of earlier batches, out of the way of those of this one:
    an attempt that fails in its backward pass has added to some of them."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self._before: list[tuple[Tensor, Tensor]] | None = None

    def put_aside(self) -> None:
        """Begin with none, unless that was done already."""
        if self._before is None:
            self._before = [(p, g) for p in self.parameters if (g := p.grad) is not None]
            for parameter, _ in self._before:
                parameter.grad = None

    @torch.no_grad()
    def join(self, factor: float = 1.0) -> None:
        """Add what has come, times the factor, to what was there before."""
        before, self._before = self._before or [], None
        if factor != 1.0:
            torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], factor)
        sums: list[tuple[Tensor, Tensor]] = []
        for parameter, old in before:
            new, parameter.grad = parameter.grad, old
            if new is not None and (old.is_sparse or new.is_sparse):
                parameter.grad = old + new
            elif new is not None:
                sums.append((old, new))
        if sums:
            torch._foreach_add_([old for old, _ in sums], [new for _, new in sums])

    def bring_back(self) -> None:
        """Be as before, without what has come."""
        if self._before is None:  # no backward pass has begun
            return
        before, self._before = self._before, None
        self.take()
        for parameter, old in before:
            parameter.grad = old

    def take(self) -> list[Tensor | None]:
        """Return all gradients, which the parameters have no longer."""
        gradients = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def put(self, gradients: list[Tensor | None]) -> None:
        """Give the parameters these gradients."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
