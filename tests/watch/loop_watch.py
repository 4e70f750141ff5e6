"""What measures a loop, for tests that look at something else of it."""

from collections.abc import Callable
from typing import Any

import torch

from headroom.watch.accounts import Accounts
from headroom.watch.allocation_log import AllocationLog
from headroom.watch.memory_by_owner import MemoryByOwner
from headroom.watch.memory_meter import MemoryMeter
from headroom.watch.phases import HostClock, Phases

CPU = torch.device("cpu")


def make_owners(
    owned: Callable[[], Any] = dict,
    *,
    device: torch.device = CPU,
    limit_bytes: int | None = None,
) -> MemoryByOwner:
    """The memory of a loop by owner. limit_bytes: more runs out of memory, as on a device."""
    return MemoryByOwner(AllocationLog(device, limit_bytes=limit_bytes), owned)


def make_phases() -> Phases:
    """The phases of a loop on the CPU, in which nothing has an owner."""
    return Phases(HostClock(), MemoryMeter(CPU), make_owners(), count_every=None)


def make_accounts(owned: Callable[[], Any], *, log: Callable[..., None]) -> Accounts:
    """The accounts of a loop on the CPU."""
    return Accounts(CPU, MemoryMeter(CPU), AllocationLog(CPU), owned, log=log)
