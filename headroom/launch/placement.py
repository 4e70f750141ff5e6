"""How many processes train, and which device each of them gets. It refuses more than there are
GPUs.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist

from headroom.base.facts import DeviceFacts
from headroom.device.detection import WHICHEVER, DeviceError, detect_best_device
from headroom.launch.launcher import is_launched
from headroom.ranks.ranks import Ranks
from headroom.ranks.ranks import read_ranks_from_environment as ranks_asked
from headroom.settings.run_config import DeviceConfig, LaunchConfig
from headroom.watch.leaks import take_baseline


def count_processes(launch: LaunchConfig, facts: DeviceFacts) -> int:
    """Return how many processes train where the first has this device: those that are there
    already, or are to be started. Raises DeviceError."""
    if is_launched():
        return ranks_asked().size
    if launch.machines:
        raise DeviceError(
            "launch.nodes: several machines train by `python -m flows.train` on each of them; a "
            "flow that Prefect starts trains on one"
        )
    if launch.count == 1:
        return 1
    if facts.kind == "cpu":
        count = launch.count or 1
    else:
        here = torch.accelerator.device_count()
        count = launch.count or here
        if count > here:
            raise DeviceError(
                f"launch.processes: must be at most {here}, one for each {facts.kind} device of "
                f"this machine (got {count})"
            )
    if count > 1 and not (dist.is_available() and facts.kind in ("cpu", "cuda", "rocm", "xpu")):
        raise DeviceError(
            f"launch.processes: several processes cannot train together on {facts.kind} with this "
            f"PyTorch (got {count}); use 1"
        )
    return count


def count_threads(processes: int) -> int:
    """Return the CPU threads of each of so many processes that share the cores of this
    machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // processes)


def choose_device_name(settings: DeviceConfig, ranks: Ranks) -> str:
    """Return the name of the device that a process of torchrun asks for: the GPU of its number on
    this host. Raises DeviceError where one device is asked for by its index, and where nobody has
    given it a number and it sees several."""
    if ranks.is_alone or settings.name == "cpu":
        return settings.name
    if ":" in settings.name:
        raise DeviceError(
            f"device.name: is {settings.name}, one device, and {ranks.size} processes train "
            "together; leave the index out"
        )
    if settings.name in WHICHEVER:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind = None if accelerator is None else accelerator.type
    else:
        kind = settings.name
    if kind is None:
        return settings.name
    here = torch.accelerator.device_count()
    if "LOCAL_RANK" not in os.environ and here == 1:  # a scheduler has given each its own
        return f"{kind}:0"
    if ranks.local is None:
        raise DeviceError(
            f"LOCAL_RANK: is not set, while RANK is {ranks.rank} and {here} devices are visible; "
            "set it to the number of the process on its host, or let each see one device alone"
        )
    return f"{kind}:{ranks.local}"


def find_rank_device(ranks: Ranks, first: DeviceFacts) -> DeviceFacts:
    """Find the device of a rank, where the first one on this host has `first`: one of those that
    were leased beside it; where there are no more, the others by their index. Raises
    DeviceError."""
    chosen = first
    if first.index is not None and ranks.local:
        kind, here = first.name.partition(":")[0], range(torch.accelerator.device_count())
        others = [*first.beside, *(f"{kind}:{i}" for i in here if i != first.index)]
        chosen = detect_best_device(list(dict.fromkeys(others))[ranks.local - 1])
    return replace(chosen, baseline_bytes=take_baseline(chosen.name).bytes)


def count_leases(launch: LaunchConfig) -> int | None:
    """Return how many GPUs of this host the first process of a training holds for all of them;
    None: all that are here."""
    return 1 if is_launched() or launch.machines else launch.count
