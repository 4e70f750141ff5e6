"""The built-in models, each a plain nn.Module made from the data's shape and the arguments under
`model.args`; a wrong argument or a shape that does not fit is refused here, before a device is
touched. Models take raw inputs of shape (batch, *input_shape) and return (batch, outputs).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tasks.engine.memory import is_oom


class ModelError(ValueError):
    """A model that can't be built as asked; the text starts with the setting at fault."""


class Standardize(nn.Module):
    """(x - offset) / scale, so that a saved model takes the rows that its user has.

    offset and scale hold one value, or one for each feature of the last axis.
    """

    offset: Tensor
    scale: Tensor

    def __init__(self, offset: Sequence[float], scale: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("offset", torch.tensor(offset, dtype=torch.float32))
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.offset) / self.scale


def linear(input_shape: Sequence[int], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), outputs))


def mlp(
    input_shape: Sequence[int],
    outputs: int,
    *,
    hidden: Sequence[int] = (128, 64),
    dropout: float = 0.0,
) -> nn.Module:
    widths = _positive("hidden", hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in zip([math.prod(input_shape), *widths], widths, strict=False):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU(), *_dropout(dropout)]
    last = widths[-1] if widths else math.prod(input_shape)
    return nn.Sequential(*layers, nn.Linear(last, outputs))


def cnn(
    input_shape: Sequence[int], outputs: int, *, width: int = 32, dropout: float = 0.0
) -> nn.Module:
    """Two stages of 3x3 convolutions, each halving the image, and one linear layer."""
    (wide,) = _positive("width", [width])
    if len(input_shape) != 3 or min(input_shape[1:]) < 4:
        raise ModelError(
            "model.name: cnn needs images of shape (channels, height, width) of at least 4 x 4 "
            f"pixels (got {tuple(input_shape)}); use mlp or linear for rows of features"
        )
    channels, height, width_px = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, wide, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(wide, wide, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(wide, 2 * wide, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *_dropout(dropout),
        nn.Linear(2 * wide * (height // 4) * (width_px // 4), outputs),
    )


MODELS: dict[str, Callable[..., nn.Module]] = {"linear": linear, "mlp": mlp, "cnn": cnn}


def build(
    name: str, *, input_shape: Sequence[int], outputs: int, args: Mapping[str, Any]
) -> nn.Module:
    """The model on the current default device, with freshly drawn weights.

    Raises ModelError for an unknown argument or one out of range.
    """
    factory = MODELS[name]
    known = list(inspect.signature(factory).parameters)[2:]
    for unknown in sorted(set(args) - set(known)):
        takes = f"takes {', '.join(known)}" if known else "takes no arguments"
        raise ModelError(f"model.args: {unknown!r} is unknown; the model {name} {takes}")
    return factory(tuple(input_shape), outputs, **args)


def check(name: str, *, input_shape: Sequence[int], outputs: int, args: Mapping[str, Any]) -> int:
    """Build the model on the host, send two rows through it, and return the multiply-adds of a row.

    On the host and not on the meta device, whose first use costs more seconds than the model.
    Raises ModelError where it can't be built or gives another shape than (2, outputs).
    """
    try:
        model = build(name, input_shape=input_shape, outputs=outputs, args=args)
        with torch.inference_mode(), _multiply_adds(model) as work:
            got = tuple(model(torch.zeros(2, *input_shape)).shape)
    except (RuntimeError, MemoryError) as error:
        if not is_oom(error):
            raise
        raise ModelError(
            f"model.args: {name} with {dict(args)} and inputs of shape {tuple(input_shape)} needs "
            "more memory than this host has; make it smaller"
        ) from None
    if got != (2, outputs):
        raise ModelError(f"model.name: {name} must return (2, {outputs}) for two rows (got {got})")
    return sum(work) // 2


@contextmanager
def _multiply_adds(model: nn.Module) -> Iterator[list[int]]:
    """Counts the work of the linear and convolution layers, as they are called."""
    work: list[int] = []

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        work.append(output.numel() // weight.shape[0] * weight.numel())

    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    yield work
    for hook in hooks:
        hook.remove()


def _positive(name: str, values: Any) -> list[int]:
    fits = isinstance(values, Sequence) and not isinstance(values, str)
    if not fits or not all(type(v) is int and 1 <= v <= 2**20 for v in values):
        raise ModelError(
            f"model.args: {name} must be whole numbers from 1 to {2**20} (got {values!r})"
        )
    return list(values)


def _dropout(share: Any) -> list[nn.Module]:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise ModelError(f"model.args: dropout must be from 0 to below 1 (got {share!r})")
    return [nn.Dropout(share)] if share else []
