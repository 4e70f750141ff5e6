"""Machines that train one model together: the same command is given on each of them. They meet
at the first by name, which shows who is missing, and then PyTorch's launcher (torchrun) starts
their processes. How one of them ended is kept for those that come after it, since the launcher
starts them again whatever the reason was. It waits no longer than it was asked to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from tasks.engine.base.facts import DeviceFacts
from tasks.engine.device.detection import DeviceError, detect_best_device
from tasks.engine.device.leases import Leases, find_lease_folder
from tasks.engine.distributed.ranks import Ranks
from tasks.engine.distributed.ranks import read_ranks_from_environment as ranks_asked
from tasks.engine.memory.leaks import take_baseline
from tasks.engine.settings.read_settings import ConfigError
from tasks.engine.settings.run_config import DeviceConfig, LaunchConfig

ATTEMPTS_FOLDER = "HEADROOM_ATTEMPTS"  # of this machine and this training
AGAIN = 3  # exit code of a process that is to begin again, with the others


def is_launched() -> bool:
    """Return whether a launcher such as torchrun has started this process."""
    return "RANK" in os.environ


def rank_here() -> int:
    """Return the rank that a launcher has given this process; 0 where none has.

    Raises ConfigError where what the launcher must set is missing or makes no sense.
    """
    if not is_launched():
        return 0
    found = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")}
    for name, text in found.items():
        if not text.isdecimal():
            told = f"got {text!r:.40}" if text else "it is not set"
            raise ConfigError(f"{name}: must be a whole number where RANK is set ({told})")
    rank, size = int(found["RANK"]), int(found["WORLD_SIZE"])
    if rank >= size:
        raise ConfigError(f"RANK: must be below WORLD_SIZE, {size} (got {rank})")
    local = os.environ.get("LOCAL_RANK", "0")
    if not local.isdecimal():
        raise ConfigError(f"LOCAL_RANK: must be a whole number (got {local!r:.40})")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if size > 1 and missing:
        raise ConfigError(
            f"{missing[0]}: is not set, while RANK and WORLD_SIZE are; give the host of rank 0 as "
            "MASTER_ADDR and a free port of it as MASTER_PORT"
        )
    if size > 1 and not os.environ["MASTER_PORT"].isdecimal():
        raise ConfigError(
            f"MASTER_PORT: must be a whole number (got {os.environ['MASTER_PORT']!r:.40})"
        )
    return rank


@contextmanager
def keep_exit_codes() -> Iterator[None]:
    """Keep, inside, the exit codes of the processes that this one starts."""
    with TemporaryDirectory(prefix="headroom-") as folder:
        os.environ[ATTEMPTS_FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[ATTEMPTS_FOLDER]


def read_final_code() -> int | None:
    """Return the exit code of a process here that would end the same way again; None where
    none was kept."""
    folder = os.environ.get(ATTEMPTS_FOLDER)
    if folder is None or not (Path(folder) / "code").exists():
        return None
    return int((Path(folder) / "code").read_text())


def keep_exit_code(code: int) -> int:
    """Return the exit code, and keep it where it is one of bad input or of a failure."""
    if code in (1, 2) and (folder := os.environ.get(ATTEMPTS_FOLDER)) is not None:
        (Path(folder) / "code").write_text(str(code))
    return code


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


def choose_device_name(asked: DeviceConfig, ranks: Ranks) -> str:
    """Return the name of the device that a process of torchrun asks for: the GPU of its number on
    this host. Raises DeviceError where one device is asked for by its index, and where nobody has
    given it a number and it sees several."""
    if ranks.is_alone or asked.name == "cpu":
        return asked.name
    if ":" in asked.name:
        raise DeviceError(
            f"device.name: is {asked.name}, one device, and {ranks.size} processes train together; "
            "leave the index out"
        )
    if asked.name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        kind = None if found is None else found.type
    else:
        kind = asked.name
    if kind is None:
        return "auto"
    here = torch.accelerator.device_count()
    if "LOCAL_RANK" not in os.environ and here == 1:  # a scheduler has given each its own
        return f"{kind}:0"
    if ranks.local is None:
        raise DeviceError(
            f"LOCAL_RANK: is not set, while RANK is {ranks.rank} and {here} devices are visible; "
            "set it to the number of the process on its host, or let each see one device alone"
        )
    return f"{kind}:{ranks.local}"


def find_rank_device(ranks: Ranks, first: DeviceFacts, asked: DeviceConfig) -> DeviceFacts:
    """Find the device of a rank, where the first one on this host has `first`; the others
    follow by their index, and are leased until this process ends. Raises DeviceError."""
    if first.index is None or not ranks.local:
        return replace(first, baseline_bytes=take_baseline(first.name).bytes)
    others = [i for i in range(torch.accelerator.device_count()) if i != first.index]
    name = f"{first.name.partition(':')[0]}:{others[ranks.local - 1]}"
    leases = None
    if not asked.share:
        leases = Leases(
            find_lease_folder(), wait_s=asked.wait_s, holder=f"rank {ranks.rank} of a training"
        )
        _LEASES.append(leases)
    found = detect_best_device(name, leases=leases)
    return replace(found, baseline_bytes=take_baseline(found.name).bytes)


_LEASES: list[Leases] = []
