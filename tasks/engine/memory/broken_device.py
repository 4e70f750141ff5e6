"""A device that an error has broken for this process, such as an index out of range in a kernel of
CUDA: it answers every later call with that error, and what the process has there is taken back when
it ends. It is asked nothing here but whether it is so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tasks.engine.base.timing import wait
from tasks.engine.memory.live_tensors import live_tensors

# Until the process ends.
_kept: list[Tensor] = []


def is_broken(device: torch.device) -> bool:
    """Whether the device answers nothing but errors any more; waits for it."""
    try:
        wait(device)
    except RuntimeError:
        return True
    return False


@contextmanager
def outlived(device: torch.device) -> Iterator[None]:
    """The process outlives an error inside that breaks the device, to tell of it.

    PyTorch frees pinned memory with an event of the device's; where the device gives none, that
    fails in a destructor and ends the process on the spot. So the host's tensors stay.
    """
    try:
        yield
    except Exception:
        if is_broken(device):
            # All of them: which are pinned, the device would have to tell.
            _kept.extend(live.tensor for live in live_tensors(torch.device("cpu")))
        raise
