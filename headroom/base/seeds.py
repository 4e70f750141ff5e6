"""Set random seeds and deterministic arithmetic for the length of a run, and restore both after it;
read and restore the state of the random numbers of PyTorch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


@contextmanager
def seed_everything(seed: int, *, deterministic: bool) -> Iterator[None]:
    """Seed the random numbers of PyTorch, numpy and Python (the latter two for a user's code)
    with `seed` inside the block, and restore them after it.

    deterministic: the same run gives the same bits; an operation that can't be repeated then
    raises RuntimeError, naming itself.
    """
    repeatable, tries_out = (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
    )
    drawn = random.getstate(), np.random.get_state()
    try:
        seed_libraries(seed)
        _set_deterministic(deterministic)
        # Trying out convolution algorithms pays on a GPU, but may choose another one each time.
        torch.backends.cudnn.benchmark = not deterministic
        yield
    finally:
        _set_deterministic(repeatable)
        torch.backends.cudnn.benchmark = tries_out
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])


def seed_libraries(seed: int) -> None:
    """Seed the random numbers of PyTorch, numpy and Python."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def get_random_state(device: torch.device) -> list[Tensor]:
    """Return the state of PyTorch's random number generators: that of the host, then that of
    the device."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(*_list_devices(device)))
    return states


def set_random_state(device: torch.device, state: list[Tensor]) -> None:
    """Restore what `get_random_state` returned, or only the host's state where it holds no more."""
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.get_device_module(device).set_rng_state(state[1], *_list_devices(device))


def _list_devices(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # of which there is one


def _set_deterministic(wanted: bool) -> None:
    if torch.are_deterministic_algorithms_enabled() != wanted:
        torch.use_deterministic_algorithms(wanted)  # imports the compiler: 2 s
