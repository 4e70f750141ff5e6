"""How a model of the user's own is called, and which part of what it returns are its outputs:
inputs may be a tensor, several or a dict, outputs a tensor, a tuple, a dict or an object with
`logits`. It travels with logged models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tasks.engine.base.structured_inputs import LABELS, Inputs


class NoOutputsError(TypeError):
    """A model returned no outputs; the text says what it returned."""


@dataclass(frozen=True)
class BuiltinForward:
    """The forward pass of a built-in model: a tensor in, a tensor out."""

    model: Callable[..., Any]

    def __call__(self, x: Any) -> tuple[Tensor, Tensor | None]:
        """Return the outputs, and None for the loss, which a built-in model never returns."""
        return self.model(x), None


@dataclass(frozen=True)
class OwnForward:
    """The forward pass of a user's own model: several inputs by position, a dict by name.

    untaken: labels in a dict that the model has no parameter for. only: the name of the model's
    one parameter, which is given a dict whole where that has no entry of this name. takes_loss:
    where inputs have an entry `labels` and the model returns a loss, that one counts.
    """

    model: Callable[..., Any]
    untaken: frozenset[str]
    takes_loss: bool
    only: str | None = None

    def __call__(self, x: Any) -> tuple[Tensor, Tensor | None]:
        if isinstance(x, Tensor):
            return read_outputs(self.model(x))[0], None
        if not isinstance(x, Mapping):
            return read_outputs(self.model(*x))[0], None
        if self.only is not None and self.only not in x:
            outputs, loss = read_outputs(self.model(x))
            return outputs, loss if self.takes_loss and "labels" in x else None
        taken = {name: value for name, value in x.items() if name not in self.untaken}
        outputs, loss = read_outputs(self.model(**taken))
        return outputs, loss if self.takes_loss and "labels" in taken else None


Forward = BuiltinForward | OwnForward


def make_own_forward(model: nn.Module, *, takes_loss: bool) -> OwnForward:
    """Return the forward pass of this model, by its signature."""
    takes = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        return OwnForward(model, frozenset(), takes_loss)
    only = next(iter(takes)) if len(takes) == 1 else None
    return OwnForward(model, frozenset(LABELS) - frozenset(takes), takes_loss, only)


def read_outputs(result: Any) -> tuple[Tensor, Tensor | None]:
    """Return the outputs and the loss of what a model returned. Raises NoOutputsError."""
    if isinstance(result, Tensor):
        return result, None
    if isinstance(result, Mapping):
        logits, loss = result.get("logits"), result.get("loss")
    else:
        logits, loss = getattr(result, "logits", None), getattr(result, "loss", None)
    if logits is None and isinstance(result, (tuple, list)):
        # Not a loss, which some give first.
        parts = [part for part in result if isinstance(part, Tensor)]
        logits = next((part for part in parts if part.dim()), None)
    if not isinstance(logits, Tensor):
        got = type(result).__name__ if result is not None else "None"
        raise NoOutputsError(
            f"must return a tensor, a tuple with one, or an object with .logits (got {got})"
        )
    return logits, loss if isinstance(loss, Tensor) else None


class OutputsOnly(nn.Module):
    """A module that returns only the outputs of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Tensor:
        return make_own_forward(self.model, takes_loss=False)(x)[0]


def split_inputs(found: Inputs, spec: Mapping[str, Any], rows: int) -> Iterator[Any]:
    """Yield the inputs as the model takes them, on the CPU, so many rows at a time."""
    whole = len(next(iter(found.values())))
    for start in range(0, whole, rows):
        parts = {n: torch.from_numpy(a[start : start + rows].copy()) for n, a in found.items()}
        yield _restore_structure(spec["inputs"], parts)


def _restore_structure(inputs: Mapping[str, Any], parts: dict[str, Tensor]) -> Any:
    if inputs["kind"] == "rows":
        return parts["x"]
    if inputs["kind"] == "dict":
        return parts
    return tuple(parts[str(i)] for i in range(len(inputs["of"])))
