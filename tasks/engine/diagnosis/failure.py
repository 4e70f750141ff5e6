"""What was there when a step failed, in words: PyTorch's message, the line of the user's code, what
met in it, the layer and the loss that raised, the batch and the model. The sentences about a
mistake are made of this; no tensor outlives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tasks.engine.diagnosis.tensor_names import (
    ENTRY,
    Inventory,
    Seen,
    inventory,
    tensors_in,
    weights,
)
from tasks.engine.diagnosis.traceback_frames import Call, trace

LONGEST = 240  # characters of PyTorch's message


@dataclass(frozen=True)
class Layer:
    """The layer whose forward raised."""

    path: str  # "" for the model itself
    what: str  # its class, and its size where it is one of PyTorch's
    name: str  # its class
    is_torchs: bool
    is_known: bool  # it was made before the step, so that the model can find it
    inputs: tuple[Seen, ...]
    weights: tuple[Seen, ...]
    sizes: dict[str, Any]  # in_features and the like
    takes: tuple[str, ...]  # the parameters of its forward

    @property
    def words(self) -> str:
        """As a sentence speaks of it."""
        if not self.is_known:
            return f"a layer made in forward ({self.what})"
        return f"layer {self.path} ({self.what})" if self.path else f"the model ({self.what})"


@dataclass(frozen=True)
class Scene:
    """What was there when a step failed."""

    text: str  # PyTorch's
    line: str | None
    is_backward: bool
    operands: tuple[Seen, ...]  # what met in that line
    mentioned: tuple[Seen, ...]  # and what its parts are made of
    layer: Layer | None
    in_model: bool  # whether a layer of the model was running, and not the loss
    function: str  # of torch.nn.functional, "" where none was running
    given: tuple[Seen, ...]  # to that function
    around: Inventory

    @property
    def place(self) -> str:
        """Where it failed: layer and line, as far as they are known."""
        where = [self.layer.words] if self.layer is not None else []
        if not where and self.function:
            where = [self.function]
        return ", ".join([*where, *([self.line] if self.line else [])]) or "the step"

    @property
    def setting(self) -> str:
        """The setting that named the code that failed."""
        is_models = self.in_model or self.is_backward or self.line is None
        return "model.name" if is_models else "train.loss"

    @property
    def met(self) -> tuple[Seen, ...]:
        """The tensors that met: what a layer of PyTorch was given and has, or what the line names,
        or what a function was given."""
        if self.layer is not None and self.layer.is_torchs:
            return (*self.layer.inputs, *self.layer.weights)
        if self.given and len(self.given) >= len(self.operands):
            return self.given
        if self.operands:
            return self.operands
        return self.layer.inputs if self.layer is not None else ()

    @property
    def quoted(self) -> str:
        """The end of a sentence: PyTorch's own words."""
        return f" (PyTorch: {self.text})"

    def batch(self, of: str) -> str:
        """The batch, each entry with its shape, dtype or device."""
        words = [f"{one.name} {getattr(one, of)}" for one in self.around.entries]
        return listed(words) or "no tensors"


def scene(error: BaseException, model: nn.Module, batch: tuple[Any, Any]) -> Scene:
    """What the error's traceback tells, beside what the model and the batch hold."""
    around = inventory(model, batch)
    seen = trace(error)
    calls = [call for call in seen.layers if call.layer is not None]
    given = seen.function.given if seen.function is not None else {}
    return Scene(
        text=quoted(error),
        line=seen.line,
        is_backward=seen.is_backward,
        operands=_named(seen.operands, around),
        mentioned=_named(seen.mentioned, around),
        layer=_layer(calls[-1], around) if calls else None,
        in_model=any(id(call.layer) in around.layers for call in calls),
        function=seen.function.name if seen.function is not None else "",
        given=_named(given, around),
        around=around,
    )


def quoted(error: BaseException) -> str:
    """PyTorch's message on one line, its end left out where it is long."""
    text = " ".join(str(error).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def named(one: Seen) -> str:
    """A tensor by the name it has in the line, and by that of the batch or the model."""
    if not one.known or one.known == one.name:
        return one.name
    if one.kind == ENTRY:
        return f"{one.name} (the batch's {one.known})"
    return f"{one.name} ({one.kind} {one.known})"


def _named(given: dict[str, Any], around: Inventory) -> tuple[Seen, ...]:
    return tuple(
        around.seen(path, tensor)
        for name, value in given.items()
        for path, tensor in tensors_in(name, value)
    )


def _layer(call: Call, around: Inventory) -> Layer:
    layer = call.layer
    assert layer is not None
    held = {name: value for name, value in vars(layer).items() if isinstance(value, int | tuple)}
    return Layer(
        path=around.layers.get(id(layer), ""),
        what=_described(layer),
        name=call.name,
        is_torchs=_is_torchs(layer),
        is_known=id(layer) in around.layers,
        inputs=_named(call.given, around),
        weights=tuple(around.seen(name, tensor) for name, tensor in weights(layer)),
        takes=call.takes,
        sizes=held if _is_torchs(layer) else {},
    )


def _described(layer: nn.Module) -> str:
    """The class of a layer, and its size where that is one of PyTorch's."""
    name, held = type(layer).__name__, vars(layer)
    for first, second in (
        ("in_features", "out_features"),
        ("in_channels", "out_channels"),
        ("input_size", "hidden_size"),
    ):
        if _is_torchs(layer) and first in held and second in held:
            return f"{name} {held[first]} -> {held[second]}"
    if _is_torchs(layer) and {"num_embeddings", "embedding_dim"} <= set(held):
        return f"{name} of {held['num_embeddings']} rows"
    sizes = ("num_features", "normalized_shape", "num_channels", "embed_dim")
    of = next((held[size] for size in sizes if _is_torchs(layer) and size in held), None)
    return name if of is None else f"{name} of {of}"


def _is_torchs(layer: nn.Module) -> bool:
    """Whether the layer is one of PyTorch's own, and no container."""
    containers = nn.Sequential | nn.ModuleList | nn.ModuleDict
    return type(layer).__module__.startswith("torch.nn.") and not isinstance(layer, containers)


def listed(names: Sequence[str], most: int = 5) -> str:
    """The names, the first few of them where they are many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
