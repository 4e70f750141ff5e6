"""How many CPU threads a training step deserves. A small step is slower on several threads than on
one, since each of its operations waits for all of them; on a busy machine by a factor of ten and
more. The count follows from the step's work alone, so that the same run gets the same count, and the
same bits, on every day.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Multiply-adds of a forward pass below which one thread is used: about 2 ms of work for a core.
# Measured with an mlp of 17,000 weights at batch 64 (1 million): 0.6 ms a step on one thread, 3.6 to
# 30 ms on two, on 2 shared cores; see benchmarks/results.
SMALL_MULTIPLY_ADDS = 50_000_000


def multiply_adds(model: nn.Module, input_shape: Sequence[int], rows: int) -> int:
    """Multiply-adds of the linear and convolution layers in one forward pass of `rows` rows.

    model: on the meta device, so that nothing is computed.
    """
    total = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        weight = module.weight
        assert isinstance(weight, Tensor)
        total += output.numel() // weight.shape[0] * weight.numel()

    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    model(torch.empty(rows, *input_shape, device="meta"))
    for hook in hooks:
        hook.remove()
    return total


@contextmanager
def fitting_threads(work: int, device: torch.device) -> Iterator[int]:
    """One thread for small work on a CPU, else as many as PyTorch was given. Yields the count."""
    before = torch.get_num_threads()
    is_small = device.type == "cpu" and work < SMALL_MULTIPLY_ADDS
    torch.set_num_threads(1 if is_small else before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
