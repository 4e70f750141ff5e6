"""What feeds the loop. A data set that fits lives on the device whole and its batches are gathered
there; one that does not is read from memory-mapped arrays through pinned memory. The order of the
rows depends on the seed and the epoch alone, so that it is the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Mark = Callable[[str], None]
RESIDENT_SHARE = 0.5  # of the room; the rest is for the model, its gradients and activations


@dataclass(frozen=True)
class Resident:
    """Rows on the device. x: (rows, *input_shape); y: (rows,) or (rows, values)."""

    x: Tensor
    y: Tensor
    residency: str

    def __len__(self) -> int:
        return len(self.x)

    def shuffled(
        self, batch_size: int, order: Tensor, mark: Mark
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches in the given order of rows (int64, on the host)."""
        order = order.to(self.x.device, non_blocking=True)
        for chosen in order.split(batch_size):
            batch = self.x.index_select(0, chosen), self.y.index_select(0, chosen)
            mark("data_wait")
            yield batch

    def in_order(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.x.split(batch_size), self.y.split(batch_size), strict=True)


@dataclass(frozen=True)
class Streamed:
    """Rows on disk, memory-mapped; each batch is gathered on the host, then sent."""

    x: np.ndarray
    y: np.ndarray
    device: torch.device
    residency: str

    def __len__(self) -> int:
        return len(self.x)

    def shuffled(
        self, batch_size: int, order: Tensor, mark: Mark
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in order.split(batch_size):
            # Sorted, since a disk reads forwards; the rows of a batch have no order of their own.
            rows = np.sort(chosen.numpy())
            host = self._stage(self.x[rows]), self._stage(self.y[rows])
            mark("data_wait")
            batch = self._send(host)
            mark("h2d")
            yield batch

    def in_order(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self.x), batch_size):
            part = slice(start, start + batch_size)
            yield self._send((self._stage(self.x[part].copy()), self._stage(self.y[part].copy())))

    def _stage(self, rows: np.ndarray) -> Tensor:
        host = torch.from_numpy(rows)
        return host.pin_memory() if self.residency == "pinned" else host

    def _send(self, host: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = (part.to(self.device, non_blocking=True) for part in host)
        return x, y


Batches = Resident | Streamed


def feed(x: np.ndarray, y: np.ndarray, *, device: torch.device, room_bytes: float) -> Batches:
    """Rows of x with their targets y, where they are fastest to reach.

    They move to the device whole if they take at most half of `room_bytes`.
    """
    if x.nbytes + y.nbytes <= RESIDENT_SHARE * room_bytes:
        return Resident(_to(x, device), _to(y, device), "device")
    residency = "pinned" if device.type in ("cuda", "xpu") else "host"
    return Streamed(x, y, device, residency)


def row_order(rows: int, *, seed: int, epoch: int) -> Tensor:
    """A permutation of the rows, int64 (rows,), the same for the same seed and epoch."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(rows, generator=generator)


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    # A copy even on the CPU: a memory map would bring its page faults into the step.
    return torch.from_numpy(np.array(array)).to(device)
