"""The least that a step of a model can cost: its convolutions and matrix products alone, forward
and backward, on inputs that are there already. What a training takes above it is everything else:
activations, pooling, the loss, the optimizer, the batches, the accounting.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.trial import Reading, Span, Trial
from headroom.base.seeds import seed_everything
from headroom.device.detection import AMP_DTYPES

Call = Callable[[], object]


def floor(trial: Trial, layout: torch.memory_format) -> Reading:
    """As many steps as the others take, in the same precision, on all of PyTorch's threads."""
    span = Span(trial)
    with seed_everything(trial.config.train.seed, deterministic=False), torch.no_grad():
        calls = _calls(trial, layout)
        for _ in span.timed(lambda: range(trial.steps)):
            for call in calls:
                call()
        return span.reading()


def _calls(trial: Trial, layout: torch.memory_format) -> list[Call]:
    """The products of one step, forward and backward, ready to be called."""
    dtype = AMP_DTYPES.get(trial.precision, torch.float32)
    model = trial.module().to(dtype, memory_format=layout)  # type: ignore[call-overload]
    calls: list[Call] = []

    def note(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weight, bias = layer.parameters()
        arguments = (torch.randn_like(output), inputs[0], weight, bias)
        is_first = not calls  # nobody asks for the gradient of the rows
        products = _convolution if isinstance(layer, nn.Conv2d) else _linear
        calls.extend(products(*arguments, needs_input=not is_first))

    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    shape = trial.config.train.batch_size, *trial.data.input_shape
    model(torch.randn(shape, device=trial.target, dtype=dtype).to(memory_format=layout))
    for hook in hooks:
        hook.remove()
    return calls


def _convolution(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor, *, needs_input: bool
) -> list[Call]:
    """Of the built-in cnn: stride 1, padding 1, one group, not transposed."""
    ones = [1, 1]
    return [
        partial(nn.functional.conv2d, x, weight, bias, padding=1),
        partial(
            torch.ops.aten.convolution_backward,
            *(gradient, x, weight, [len(bias)], ones, ones, ones, False, [0, 0], 1),
            [needs_input, True, True],
        ),
    ]


def _linear(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor, *, needs_input: bool
) -> list[Call]:
    products: list[Call] = [
        partial(nn.functional.linear, x, weight, bias),
        partial(torch.mm, gradient.t(), x),
    ]
    return [*products, partial(torch.mm, gradient, weight)] if needs_input else products
