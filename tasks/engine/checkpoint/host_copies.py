"""Copies of tensors on the host, in memory that is kept for the next ones. From CUDA they are made
into pinned memory on a stream of their own: the host waits for nothing, and the stream that trains
waits, on the device, only before it changes what is being copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tasks.engine.batches.pinned_staging import PINNING, pin_or_not


class HostCopies:
    """The copies of one training, one set at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None

    @torch.inference_mode()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies under the same names; whole once `wait` has returned, until the next are taken."""
        if self._stream is None:
            with _disable_current_modes():  # memory of the host, and none that a limit counts
                copies = {name: self._copied_from(name, t) for name, t in tensors.items()}
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                copies = {name: self._copied_from(name, tensor) for name, tensor in tensors.items()}
                self._copied = torch.cuda.Event()
                self._copied.record(self._stream)
        self._kept = copies
        return copies

    def let_go_on(self) -> None:
        """What was copied may be changed from here on: the device waits for the copies, where they
        are still being made."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def wait(self) -> None:
        """Return when the copies are whole. For the thread that writes them."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copied_from(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            pins = self._device.type in PINNING and tensor.device.type != "cpu"
            # Of the same strides: other ones would take memory of the device on the way.
            make = partial(torch.empty_like, tensor, device="cpu")
            kept = pin_or_not(make) if pins else make()
        kept.copy_(tensor, non_blocking=kept.is_pinned() if tensor.device.type != "cpu" else False)
        return kept
