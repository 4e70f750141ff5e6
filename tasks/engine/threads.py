"""How many CPU threads a training step deserves. A small step is slower on several threads than on
one, since each of its operations waits for all of them; on a busy machine by a factor of ten and
more. The count follows from the step's work alone, so that the same run gets the same count, and
the same bits, every day.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Multiply-adds of a forward pass below which one thread is used: about 2 ms of work for a core.
# An mlp of 17,000 weights at batch 64 (1 million): 0.6 to 1.4 ms a step on one thread, 3.6 to 30 ms
# on two, on 2 shared and busy cores.
SMALL_MULTIPLY_ADDS = 50_000_000


@contextmanager
def fitting_threads(work: int, device: torch.device) -> Iterator[int]:
    """One thread for small work on a CPU, else as many as PyTorch was given. Yields the count.

    work: multiply-adds of the forward pass of one batch.
    """
    before = torch.get_num_threads()
    is_small = device.type == "cpu" and work < SMALL_MULTIPLY_ADDS
    torch.set_num_threads(1 if is_small else before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
