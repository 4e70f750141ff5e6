"""How many CPU threads a training step deserves. A small step is slower on several threads than on
one, since each of its operations waits for all of them, by a factor of ten where others use the
machine; a large one is faster. In between it is measured, unless the same bits are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tasks.engine.step.optimizer_step import Outcome, Steps
from tasks.engine.step.phases import Watched

# Multiply-adds of a batch's forward pass, on 2 shared cores: at 1 million (mlp 64-128-64-10, batch
# 64) one thread and two take 0.75 ms; at 30 million (784-256-128-10, batch 128) 2.3 and 1.7 ms, but
# 2.8 and up to 26 ms while others work; at 240 million (batch 1024) 13 and 8 ms.
ONE_THREAD_BELOW = 5_000_000
ALL_THREADS_ABOVE = 500_000_000


@contextmanager
def fitting_threads(work: int, device: torch.device, *, fixed: bool) -> Iterator[int]:
    """Sets the threads to begin with, and puts PyTorch's own number back. Yields the number to try.

    One for small work on a CPU, else as many as PyTorch was given. work: multiply-adds of the
    forward pass of one batch. fixed: decide by the work alone, for the same bits every day; the
    number to try is then the one that is set.
    """
    most = torch.get_num_threads()
    is_small = device.type == "cpu" and work < ALL_THREADS_ABOVE
    torch.set_num_threads(1 if is_small else most)
    try:
        yield torch.get_num_threads() if fixed or work < ONE_THREAD_BELOW else most
    finally:
        torch.set_num_threads(most)


class ThreadedStep:
    """A step on so many threads."""

    def __init__(self, step: Steps, threads: int) -> None:
        self._step, self.threads = step, threads

    def __call__(self, x: Any, y: Any, *, norm: bool, watched: Watched) -> Outcome:
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        return self._step(x, y, norm=norm, watched=watched)
