"""The built-in models, each a plain nn.Module made from the data's shape and the arguments under
`model.args`; a wrong argument or a shape that does not fit is refused here, before a device is
touched. Models take raw inputs of shape (batch, *input_shape) and return (batch, outputs), for
tokens (batch, tokens, outputs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tasks.engine.models.transformer import Transformer
from tasks.engine.settings.model_args import ModelError, problems

CHECKED_TOKENS = 8  # of a row: a context of 1,024 would cost GPT-2's size 3 s on two cores


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
    widths = list(hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in zip([math.prod(input_shape), *widths], widths, strict=False):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU(), *_dropout(dropout)]
    last = widths[-1] if widths else math.prod(input_shape)
    return nn.Sequential(*layers, nn.Linear(last, outputs))


def cnn(
    input_shape: Sequence[int], outputs: int, *, width: int = 32, dropout: float = 0.0
) -> nn.Module:
    """Two stages of 3x3 convolutions, each halving the image, and one linear layer."""
    if len(input_shape) != 3 or min(input_shape[1:]) < 4:
        raise ModelError(
            "model.name: cnn needs images of shape (channels, height, width) of at least 4 x 4 "
            f"pixels (got {tuple(input_shape)}); use mlp or linear for rows of features"
        )
    channels, height, width_px = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *_dropout(dropout),
        nn.Linear(2 * width * (height // 4) * (width_px // 4), outputs),
    )


def transformer(
    input_shape: Sequence[int],
    outputs: int,
    *,
    layers: int = 4,
    heads: int = 4,
    width: int = 128,
    dropout: float = 0.0,
    positions: str = "rope",
) -> nn.Module:
    """A GPT. The smallest GPT-2 has layers 12, heads 12, width 768, positions learned."""
    (context,) = input_shape
    return Transformer(
        outputs,
        context=context,
        layers=layers,
        heads=heads,
        width=width,
        dropout=dropout,
        rope=positions == "rope",
    )


MODELS: dict[str, Callable[..., nn.Module]] = {
    "linear": linear,
    "mlp": mlp,
    "cnn": cnn,
    "transformer": transformer,
}


def build(
    name: str, *, input_shape: Sequence[int], outputs: int, args: Mapping[str, Any]
) -> nn.Module:
    """The model on the current default device, with freshly drawn weights.

    Raises ModelError for an unknown argument or one out of range.
    """
    if wrong := problems(name, args):
        raise ModelError(f"model.args: {wrong[0]}")
    return MODELS[name](tuple(input_shape), outputs, **args)


def check(
    name: str,
    *,
    input_shape: Sequence[int],
    outputs: int,
    args: Mapping[str, Any],
    task: str,
) -> tuple[int, int]:
    """Build the model on the host, send two rows through it, and return the multiply-adds of a row
    and the bytes of the weights.

    On the host and not on the meta device, whose first use costs more seconds than the model. Of
    rows of tokens only the first few are sent: at each the layers do the same work.
    Raises ModelError where it can't be built, does not fit the task, or gives another shape than
    (2, outputs), for tokens (2, tokens, outputs).
    """
    # Here, since builtin.py travels with every logged model and memory_meter.py does not.
    from tasks.engine.memory.memory_meter import is_oom

    _refuse_other_task(name, task)
    sent = (min(*input_shape, CHECKED_TOKENS),) if task == "tokens" else tuple(input_shape)
    rows = torch.zeros(2, *sent, dtype=torch.int64 if task == "tokens" else torch.float32)
    try:
        model = build(name, input_shape=input_shape, outputs=outputs, args=args)
        with torch.inference_mode(), multiply_adds(model) as work:
            got = tuple(model(rows).shape)
    except (RuntimeError, MemoryError) as error:
        if not is_oom(error):
            raise
        raise ModelError(
            f"model.args: {name} with {dict(args)} and inputs of shape {tuple(input_shape)} needs "
            "more memory than this host has; make it smaller"
        ) from None
    expected = (2, *sent, outputs) if task == "tokens" else (2, outputs)
    if got != expected:
        raise ModelError(f"model.name: {name} must return {expected} for two rows (got {got})")
    weights_bytes = bytes_of(model)
    if isinstance(model, Transformer):
        products = model.products(input_shape[0])
        return sum(work) * input_shape[0] // rows.numel() + products, weights_bytes
    return sum(work) // 2, weights_bytes


def bytes_of(model: nn.Module) -> int:
    """Bytes of the weights and buffers, as they are kept."""
    return sum(value.nbytes for value in model.state_dict().values())


def _refuse_other_task(name: str, task: str) -> None:
    if task == "tokens" and name != "transformer":
        raise ModelError(
            f"model.name: {name} learns from rows of features, and this data is tokens; "
            "set model.name to transformer"
        )
    if task != "tokens" and name == "transformer":
        raise ModelError(
            f"model.name: transformer learns from tokens, and this data is for {task}; choose "
            "another model, or set data.source to text or tokens"
        )


@contextmanager
def multiply_adds(model: nn.Module) -> Iterator[list[int]]:
    """Counts the work of the linear and convolution layers, as they are called."""
    work: list[int] = []

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        # One row of the weights for each output channel; of Hugging Face's Conv1D one column.
        channels = weight.shape[1 if type(module).__name__ == "Conv1D" else 0]
        work.append(output.numel() // channels * weight.numel())

    layers = [m for m in model.modules() if _is_counted(m)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    yield work
    for hook in hooks:
        hook.remove()


def _is_counted(module: nn.Module) -> bool:
    kinds = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    theirs = (type(module).__module__, type(module).__name__)
    return isinstance(module, kinds) or theirs == ("transformers.pytorch_utils", "Conv1D")


def _dropout(share: float) -> list[nn.Module]:
    return [nn.Dropout(share)] if share else []
