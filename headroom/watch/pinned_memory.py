"""Memory of the host that a device reads and writes without a wait: pinned where there is some."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from headroom.watch.out_of_memory import clear_frames, is_oom

log = logging.getLogger(__name__)
PINNING = ("cuda", "xpu")  # whose copies run beside the host, from pinned memory only


def allocate_pinned(make: Callable[..., Tensor]) -> Tensor:
    """Return make(pin_memory=True), or make(pin_memory=False) where the host has no memory to
    pin, from and to which copies only take longer."""
    try:
        return make(pin_memory=True)
    except (RuntimeError, MemoryError) as error:
        if not is_oom(error):
            raise
        clear_frames(error)
    _warn_once()
    return make(pin_memory=False)


@cache
def _warn_once() -> None:
    log.warning("the host has no memory left to pin: copies go through pageable memory, slower")


def copy_to_host(tensor: Tensor) -> Tensor:
    """Return the tensor on the host, whose copy may still be on its way; pinned where possible."""
    if tensor.device.type not in PINNING:
        return tensor.to("cpu", non_blocking=True)
    copy = allocate_pinned(partial(torch.empty_like, tensor, device="cpu"))
    return copy.copy_(tensor, non_blocking=copy.is_pinned())
