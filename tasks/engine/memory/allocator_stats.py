"""What a device's allocator tells, kind by kind, and how its caches are given back: the only room
that calls torch.*.memory functions. What a device does not tell is absent, never zero, and no
question here wakes a device that nobody has used yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from tasks.engine.memory import glibc_heap

# Of the allocator's history: some steps of a large model; each entry holds its Python frames.
HISTORY_ENTRIES = 20_000


@dataclass(frozen=True)
class Space:
    """A device's memory as its driver sees it, all processes together."""

    total_bytes: int
    free_bytes: int | None


class Allocator(Protocol):
    """What a device's allocator tells. Keys of read(), each absent where unknown: allocated,
    reserved, peak_allocated, peak_reserved, inactive_split (bytes) and retries (a count)."""

    def read(self) -> dict[str, int]: ...

    def reset_peaks(self) -> None: ...

    def space(self) -> Space | None: ...

    def stats(self) -> dict[str, Any]: ...


class NoAllocator:
    """The CPU's: PyTorch keeps no statistics of host memory."""

    def read(self) -> dict[str, int]:
        return {}

    def reset_peaks(self) -> None:
        pass

    def space(self) -> Space | None:
        return None

    def stats(self) -> dict[str, Any]:
        return {}


class PoolAllocator:
    """The caching allocator of CUDA, ROCm and XPU; empty until the device was first used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend: Any = torch.get_device_module(device)

    def read(self) -> dict[str, int]:
        # One call, made by the host alone: some tens of microseconds, no wait for the device.
        nested = self._backend.memory.memory_stats_as_nested_dict(self._device)
        found = {
            "allocated": _pick(nested, "allocated_bytes", "current"),
            "reserved": _pick(nested, "reserved_bytes", "current"),
            "peak_allocated": _pick(nested, "allocated_bytes", "peak"),
            "peak_reserved": _pick(nested, "reserved_bytes", "peak"),
            "inactive_split": _pick(nested, "inactive_split_bytes", "current"),
            "retries": nested.get("num_alloc_retries"),
        }
        return {key: value for key, value in found.items() if value is not None}

    def reset_peaks(self) -> None:
        if self._backend.is_initialized():
            self._backend.memory.reset_peak_memory_stats(self._device)

    def space(self) -> Space | None:
        if not self._backend.is_initialized():
            return None
        try:
            free, total = self._backend.memory.mem_get_info(self._device)
        except RuntimeError as error:
            if "free memory" not in str(error):  # some Intel GPUs refuse the query in these words
                raise
            return None
        return Space(total_bytes=total, free_bytes=free)

    def stats(self) -> dict[str, Any]:
        return dict(self._backend.memory.memory_stats(self._device))


class MpsAllocator:
    """Apple's: no peaks and no free memory, since the host shares it; total is the size that Metal
    recommends to stay below."""

    def read(self) -> dict[str, int]:
        return {
            "allocated": torch.mps.current_allocated_memory(),
            "reserved": torch.mps.driver_allocated_memory(),
        }

    def reset_peaks(self) -> None:
        pass

    def space(self) -> Space | None:
        return Space(total_bytes=torch.mps.recommended_max_memory(), free_bytes=None)

    def stats(self) -> dict[str, Any]:
        return {**self.read(), "recommended_max": torch.mps.recommended_max_memory()}


def allocator(device: torch.device) -> Allocator:
    """The statistics of this device; of a kind that has none, the empty ones."""
    if device.type in ("cuda", "xpu"):
        return PoolAllocator(device)
    return MpsAllocator() if device.type == "mps" else NoAllocator()


class History(Protocol):
    """What an allocator has done since start(), and the Python lines that asked for it."""

    can_record: bool

    def start(self) -> None: ...

    def write(self, file: Path) -> None:
        """As a pickle that https://pytorch.org/memory_viz opens; what was never recorded lacks
        its lines there."""

    def stop(self) -> None:
        """Forget what was recorded; nothing where nothing was."""


class NoHistory:
    """Of devices whose allocators keep none."""

    can_record = False

    def start(self) -> None:
        pass

    def write(self, file: Path) -> None:
        pass

    def stop(self) -> None:
        pass


class CudaHistory:
    """Of CUDA and ROCm. Recording costs some microseconds an allocation."""

    can_record = True

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=HISTORY_ENTRIES
        )

    def write(self, file: Path) -> None:
        torch.cuda.memory._dump_snapshot(str(file))

    def stop(self) -> None:
        torch.cuda.memory._record_memory_history(None)


def history(device: torch.device) -> History:
    """The history of this device's allocator."""
    return CudaHistory() if device.type == "cuda" else NoHistory()


def pools_bytes(device: torch.device) -> int:
    """What is reserved in private pools, which recorded graphs have; 0 where there are none."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != (0, 0)
    )


def pinned_bytes(device: torch.device) -> int | None:
    """Host memory that is pinned for this kind of device, cached included; None where not told."""
    if device.type != "cuda" or not hasattr(torch.cuda, "host_memory_stats"):
        return None
    told = torch.cuda.host_memory_stats()
    return None if "allocated_bytes.current" not in told else int(told["allocated_bytes.current"])


def give_back(device: torch.device) -> None:
    """Return to the driver, on a CPU to the system, what allocators and libraries keep for later.

    Waits for the device. Raises what the device raises once an error has poisoned the process.
    """
    backend: Any = torch.get_device_module(device)
    if device.type == "cpu":
        glibc_heap.give_back()
        return
    if device.type != "mps" and not backend.is_initialized():
        return
    # 8 MiB (32 on Hopper) of cuBLAS workspace a handle and stream: pytorch#95668. A private name.
    if device.type == "cuda" and hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        torch._C._cuda_clearCublasWorkspaces()
    torch.accelerator.synchronize(device)
    backend.empty_cache()
    if device.type == "cuda":
        torch.cuda.ipc_collect()
    if device.type != "mps":
        _empty_pinned()


def drop_cache(device: torch.device) -> None:
    """Return unused blocks to the driver, after memory ran out; nothing on a CPU."""
    if device.type != "cpu":
        backend: Any = torch.get_device_module(device)
        backend.empty_cache()


def _empty_pinned() -> None:
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
    elif hasattr(torch._C, "_host_emptyCache"):  # PyTorch before 2.12
        torch._C._host_emptyCache()


def _pick(nested: dict[str, Any], stat: str, metric: str) -> int | None:
    return nested.get(stat, {}).get("all", {}).get(metric)
