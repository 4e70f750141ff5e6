"""A model of the user's own: build it by its factory, call it, and find its outputs in what it
returns. Inputs may be a tensor, several or a dict, outputs a tensor, a tuple, a dict or an object
with `logits` or other tensors by name. A result of the factory that is no nn.Module is refused. It
travels with logged models, which are rebuilt by it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headroom.base.import_paths import bind_arguments, call_factory, import_callable
from headroom.base.raw_inputs import LABELS, NamedArrays
from headroom.base.secret_names import make_variable_name, restore_secrets
from headroom.settings.model_args import ModelError


class NoOutputsError(TypeError):
    """A model returned no outputs; the text says what it returned."""


@dataclass(frozen=True)
class BuiltinForward:
    """The forward pass of a built-in model: a tensor in, a tensor out."""

    model: Callable[..., Any]

    def __call__(self, x: Any) -> tuple[Tensor, Tensor | None]:
        """Return the outputs, and None for the loss, which a built-in model never returns."""
        return self.model(x), None


class TakesLoss(IntEnum):
    """The cases in which a loss that a model returns is the one that counts."""

    NEVER = 0
    WITH_LABELS = 1  # where inputs have an entry `labels`
    ALWAYS = 2


@dataclass(frozen=True)
class OwnForward:
    """The forward pass of a user's own model: several inputs by position, a dict by name.

    untaken: labels in a dict that the model has no parameter for. only: the name of the model's
    one parameter, which is given a dict whole where that has no entry of this name.
    """

    model: Callable[..., Any]
    untaken: frozenset[str]
    takes_loss: TakesLoss | bool
    only: str | None = None

    def __call__(self, x: Any) -> tuple[Tensor, Tensor | None]:
        if isinstance(x, Tensor):
            return self._read(self.model(x))
        if not isinstance(x, Mapping):
            return self._read(self.model(*x))
        if self.only is not None and self.only not in x:
            return self._read(self.model(x), x)
        taken = {name: value for name, value in x.items() if name not in self.untaken}
        return self._read(self.model(**taken), taken)

    def _read(self, result: Any, inputs: Collection[str] = ()) -> tuple[Tensor, Tensor | None]:
        has_labels = "labels" in inputs
        outputs, loss = read_outputs(result, has_labels=has_labels)
        return outputs, loss if self.takes_loss > (not has_labels) else None


Forward = BuiltinForward | OwnForward


def make_own_forward(model: nn.Module, *, takes_loss: TakesLoss | bool) -> OwnForward:
    """Return the forward pass of this model, by its signature."""
    takes = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        return OwnForward(model, frozenset(), takes_loss)
    only = next(iter(takes)) if len(takes) == 1 else None
    return OwnForward(model, frozenset(LABELS) - frozenset(takes), takes_loss, only)


def read_outputs(result: Any, *, has_labels: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return the outputs and the loss of what a model returned: of a dict without `logits` the
    first tensor in it that is no loss. has_labels: whether it was given labels; in a tuple, where
    nothing has a name, a single number is then the loss. Raises NoOutputsError."""
    if isinstance(result, Tensor):
        return result, None
    if isinstance(result, Mapping):
        logits, loss = result.get("logits"), result.get("loss")
        others = [part for name, part in result.items() if name != "loss"]
        parts = [part for part in others if isinstance(part, Tensor) and part.dim()]
        logits = next(iter(parts), None) if logits is None else logits
    else:
        logits, loss = getattr(result, "logits", None), getattr(result, "loss", None)
    if logits is None and isinstance(result, (tuple, list)):
        # Not a loss, which some give first.
        parts = [part for part in result if isinstance(part, Tensor)]
        logits = next((part for part in parts if part.dim()), None)
        if has_labels and loss is None:
            loss = next(iter(find_numbers(parts)), None)
    if not isinstance(logits, Tensor):
        got = type(result).__name__ if result is not None else "None"
        raise NoOutputsError(
            f"must return a tensor, a tuple with one, or an object with .logits (got {got})"
        )
    return logits, loss if isinstance(loss, Tensor) else None


def find_numbers(result: Any) -> list[Tensor]:
    """Return the single numbers in what a model returned, as losses are."""
    parts = result.values() if isinstance(result, Mapping) else result
    values = parts if isinstance(result, (tuple, list, Mapping)) else ()
    tensors = (part for part in values if isinstance(part, Tensor))
    return [tensor for tensor in tensors if not tensor.dim() and tensor.is_floating_point()]


@torch.inference_mode()
def find_labels(model: nn.Module, x: Any) -> list[str]:
    """Return the names of the inputs that are labels: without one of them the model gives outputs
    and no loss. x: a few rows, as batches hold them."""
    forward, names = make_own_forward(model.eval(), takes_loss=TakesLoss.ALWAYS), []
    for name in x if isinstance(x, Mapping) and forward(x)[1] is not None else ():
        try:
            _, loss = forward({other: value for other, value in x.items() if other != name})
        except (TypeError, ValueError, RuntimeError, LookupError, AttributeError):
            continue  # what it cannot do without
        if loss is None:
            names.append(name)
    return names


class OutputsOnly(nn.Module):
    """A module that returns only the outputs of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Tensor:
        return make_own_forward(self.model, takes_loss=False)(x)[0]


def split_inputs(arrays: NamedArrays, spec: Mapping[str, Any], rows: int) -> Iterator[Any]:
    """Yield the inputs as the model takes them, on the CPU, so many rows at a time."""
    whole = len(next(iter(arrays.values())))
    for start in range(0, whole, rows):
        parts = {n: torch.from_numpy(a[start : start + rows].copy()) for n, a in arrays.items()}
        yield _restore_structure(spec["inputs"], parts)


def _restore_structure(inputs: Mapping[str, Any], parts: dict[str, Tensor]) -> Any:
    if inputs["kind"] == "rows":
        return parts["x"]
    if inputs["kind"] == "dict":
        return parts
    return tuple(parts[str(i)] for i in range(len(inputs["of"])))


CODE = "code"  # the folder beside the weights in which the user's code travels


def construct_model(
    factory: Callable[..., Any],
    name: str,
    args: Mapping[str, Any],
    *,
    input_shape: Sequence[int],
    outputs: int,
) -> nn.Module:
    """Build the factory's model. outputs: 0 where they are unknown. Raises ModelError."""
    offered = {"input_shape": tuple(input_shape)} | ({"outputs": outputs} if outputs else {})
    arguments = bind_arguments(factory, args, offered, setting="model.args", refusal=ModelError)
    model = call_factory(factory, arguments, setting="model.name", path=name, refusal=ModelError)
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise ModelError(f"model.name: {name} must give an nn.Module (got {got}); return a model")
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            f"model.name: {name} gives TorchScript, whose training steps and evaluations exclude "
            "each other; give the nn.Module that it was made of (train.compile makes it faster)"
        )
    if "_parameters" not in vars(model):
        raise ModelError(
            f"model.name: {name} does not call super().__init__(); do so first in its __init__"
        )
    return model


def rebuild_model(spec: Mapping[str, Any], folder: Path) -> OutputsOnly:
    """Rebuild the model that spec.json describes, with the code that lies in its folder; its
    weights are new.

    Raises ModelError, also where import paths are forbidden.
    """
    code = str(folder / CODE)
    if code not in sys.path and (folder / CODE).is_dir():
        sys.path.insert(0, code)  # it stays: a forward pass may import too
    factory = import_callable(spec["model"], setting="model.name", refusal=ModelError)
    missing: list[str] = []
    args = restore_secrets(spec["args"], "model.args", missing)
    if missing:
        problem = f"{missing[0]}: was hidden when the model was kept; give it in the environment as"
        raise ModelError(f"{problem} {make_variable_name(missing[0])}")
    model = construct_model(
        factory,
        spec["model"],
        args,
        input_shape=spec["input_shape"],
        outputs=spec["offered_outputs"],
    )
    return OutputsOnly(model)
