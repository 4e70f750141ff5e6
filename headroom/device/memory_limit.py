"""Limit the memory that a run may take. On a GPU its allocator keeps the limit; on a CPU, which
has none, an allocation log counts the bytes of all tensors and raises the out-of-memory error
that a device would, so that what happens then can be seen on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headroom.base.facts import DeviceFacts
from headroom.device.detection import cap_device_memory
from headroom.watch.allocation_log import MIB, AllocationLog
from headroom.watch.allocators import Allocator, make_allocator
from headroom.watch.kernel_memory import KernelMemory
from headroom.watch.memory_by_owner import CountedAllocator
from headroom.watch.simulated_allocator import make_scratch_counter, read_rules


@contextmanager
def limit_memory(
    facts: DeviceFacts, limit_mib: float | None
) -> Iterator[tuple[AllocationLog, Allocator]]:
    """Limit the memory of a run on this device inside the block; yields its allocation log and
    the statistics of its allocator.

    Inside, more than limit_mib raises torch.OutOfMemoryError.
    """
    device = torch.device(facts.name)
    if device.type != "cpu":
        lift = cap_device_memory(facts, limit_mib)
        try:
            yield (
                AllocationLog(
                    device, block=read_rules().round_up, scratch=make_scratch_counter(device)
                ),
                make_allocator(device),
            )
        finally:
            lift()
        return
    limit_bytes = None if limit_mib is None else int(limit_mib * MIB)
    # A limit is of tensors alone: what a kernel takes for itself is not known before it runs.
    kernels = KernelMemory() if limit_bytes is None else None
    ledger = AllocationLog(device, limit_bytes=limit_bytes, kernels=kernels)
    counted = CountedAllocator(ledger, limit_bytes)
    if limit_bytes is None:
        yield ledger, counted
        return
    with ledger.count_allocations():
        yield ledger, counted


def compute_room_bytes(
    limit_mib: float | None, free_bytes: float | None, *, held_bytes: int = 0
) -> float:
    """Return what a run may take of the bytes that are free; infinite where nobody tells.
    limit_mib: of memory.limit_mib. held_bytes: that this process holds already, and that count
    against its limit."""
    limit_bytes = math.inf if limit_mib is None else limit_mib * MIB - held_bytes
    return min(limit_bytes, math.inf if free_bytes is None else free_bytes)


def compute_rows_room_bytes(
    device: DeviceFacts, *, limit_mib: float | None, rows_mib: float | None
) -> float:
    """Return what the rows of a run and all else may take of its device; 0 where nobody tells.
    limit_mib, rows_mib: of memory.limit_mib and data.memory_mib.

    On a CPU, where rows take the memory that they are prepared in, at most data.memory_mib.
    """
    room = compute_room_bytes(limit_mib, device.free_bytes or 0)
    most_mib = rows_mib if device.kind == "cpu" else None
    return room if most_mib is None else min(room, most_mib * MIB)
