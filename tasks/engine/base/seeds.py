"""Random numbers and repeatable arithmetic for the length of a run, put back after it."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def chosen_cublas_workspace_bytes() -> int | None:
    """What the environment says a workspace of cuBLAS takes, such as :4096:8, eight times 4096 KiB;
    None where it says nothing."""
    said = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    pairs = re.findall(r":(\d+):(\d+)", said)
    return 1024 * sum(int(size) * int(count) for size, count in pairs) if pairs else None


@contextmanager
def seeded(seed: int, *, deterministic: bool) -> Iterator[None]:
    """PyTorch's, numpy's and Python's random numbers start from `seed`, the latter two for code of
    the user's, and go on after it as before; `deterministic`: the same run gives the same bits.

    An operation that can't be repeated then raises RuntimeError, naming itself.
    """
    repeatable, tries_out = (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
    )
    drawn = random.getstate(), np.random.get_state()
    try:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        _only_repeatable(deterministic)
        # Trying out convolution algorithms pays on a GPU, but may choose another one each time.
        torch.backends.cudnn.benchmark = not deterministic
        yield
    finally:
        _only_repeatable(repeatable)
        torch.backends.cudnn.benchmark = tries_out
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])


def random_state(device: torch.device) -> list[Tensor]:
    """Of PyTorch's random numbers: those of the host, then those of the device."""
    found = [torch.get_rng_state()]
    if device.type != "cpu":
        found.append(torch.get_device_module(device).get_rng_state(*_which(device)))
    return found


def set_random_state(device: torch.device, state: list[Tensor]) -> None:
    """Go on with what `random_state` told; with the host's numbers alone where it told no more."""
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.get_device_module(device).set_rng_state(state[1], *_which(device))


def _which(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # of which there is one


def _only_repeatable(wanted: bool) -> None:
    if torch.are_deterministic_algorithms_enabled() != wanted:
        torch.use_deterministic_algorithms(wanted)  # imports the compiler: 2 s
