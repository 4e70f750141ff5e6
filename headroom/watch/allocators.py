"""Read what a device's allocator tells, kind by kind, and release its caches; keep the C library's
heap, from which a CPU's tensors come, between steps. What a device does not tell is absent, never
zero, and no function here initializes a device that was not used yet.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

# Of mallopt(3): https://man7.org/linux/man-pages/man3/mallopt.3.html
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
USUAL_BYTES = 32 * 1024**2  # what glibc's own thresholds grow to; a trim happens at twice that
MOST_BYTES = 2**30  # a larger block is not worth keeping: the work on it outweighs its faults
NEVER = 2**31 - 1


@contextmanager
def keep_heap(device: torch.device) -> Iterator[None]:
    """Keep what a step on a CPU frees for the next step, inside the block; `trim_heap` returns it.

    A step of a cnn (3x32x32, batch 512, 2 cores) took 0.23 s inside and 0.32 to 0.44 s outside.
    """
    libc = _load_glibc()
    if device.type != "cpu" or libc is None:
        yield
        return
    # Older versions allow no more than the usual.
    if not libc.mallopt(M_MMAP_THRESHOLD, MOST_BYTES):
        libc.mallopt(M_MMAP_THRESHOLD, USUAL_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, NEVER)
    try:
        yield
    finally:
        libc.mallopt(M_MMAP_THRESHOLD, USUAL_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * USUAL_BYTES)


def trim_heap() -> None:
    """Return the heap's free memory to the system."""
    libc = _load_glibc()
    if libc is not None:
        libc.malloc_trim(0)


@cache
def _load_glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


@dataclass(frozen=True)
class Space:
    """A device's memory as its driver sees it, all processes together."""

    total_bytes: int
    free_bytes: int | None


class Allocator(Protocol):
    """Reads the statistics of a device's allocator. Keys of read(), each absent where unknown:
    allocated, reserved, peak_allocated, peak_reserved, inactive_split (bytes) and retries (a
    count)."""

    def read(self) -> dict[str, int]: ...

    def reset_peaks(self) -> None: ...

    def read_space(self) -> Space | None: ...

    def read_stats(self) -> dict[str, Any]: ...


class NoAllocator:
    """The empty statistics of a CPU: PyTorch keeps none of host memory."""

    def read(self) -> dict[str, int]:
        return {}

    def reset_peaks(self) -> None:
        pass

    def read_space(self) -> Space | None:
        return None

    def read_stats(self) -> dict[str, Any]:
        return {}


class PoolAllocator:
    """The caching allocator of CUDA, ROCm and XPU; empty until the device was first used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend: Any = torch.get_device_module(device)

    def read(self) -> dict[str, int]:
        # One call, made by the host alone: some tens of microseconds, no wait for the device.
        nested = self._backend.memory.memory_stats_as_nested_dict(self._device)
        figures = {
            "allocated": _pick(nested, "allocated_bytes", "current"),
            "reserved": _pick(nested, "reserved_bytes", "current"),
            "peak_allocated": _pick(nested, "allocated_bytes", "peak"),
            "peak_reserved": _pick(nested, "reserved_bytes", "peak"),
            "inactive_split": _pick(nested, "inactive_split_bytes", "current"),
            "retries": nested.get("num_alloc_retries"),
        }
        return {key: value for key, value in figures.items() if value is not None}

    def reset_peaks(self) -> None:
        if self._backend.is_initialized():
            self._backend.memory.reset_peak_memory_stats(self._device)

    def read_space(self) -> Space | None:
        if not self._backend.is_initialized():
            return None
        try:
            free, total = self._backend.memory.mem_get_info(self._device)
        except RuntimeError as error:
            if "free memory" not in str(error):  # some Intel GPUs refuse the query in these words
                raise
            return None
        return Space(total_bytes=total, free_bytes=free)

    def read_stats(self) -> dict[str, Any]:
        return dict(self._backend.memory.memory_stats(self._device))


class MpsAllocator:
    """The allocator of Apple's MPS: no peaks and no free memory, since the host shares it;
    total is the size that Metal recommends to stay below."""

    def read(self) -> dict[str, int]:
        return {
            "allocated": torch.mps.current_allocated_memory(),
            "reserved": torch.mps.driver_allocated_memory(),
        }

    def reset_peaks(self) -> None:
        pass

    def read_space(self) -> Space | None:
        return Space(total_bytes=torch.mps.recommended_max_memory(), free_bytes=None)

    def read_stats(self) -> dict[str, Any]:
        return {**self.read(), "recommended_max": torch.mps.recommended_max_memory()}


def make_allocator(device: torch.device) -> Allocator:
    """Return the statistics of this device's allocator; empty ones for a kind of device that
    has none."""
    if device.type in ("cuda", "xpu"):
        return PoolAllocator(device)
    return MpsAllocator() if device.type == "mps" else NoAllocator()


def count_pool_bytes(device: torch.device) -> int:
    """Return the bytes reserved in private pools, which recorded graphs have; 0 where there are
    none."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != (0, 0)
    )


def count_pinned_bytes(device: torch.device) -> int | None:
    """Return the bytes of host memory that is pinned for this kind of device, cached ones
    included; None where unknown."""
    if device.type != "cuda" or not hasattr(torch.cuda, "host_memory_stats"):
        return None
    stats = torch.cuda.host_memory_stats()
    return None if "allocated_bytes.current" not in stats else int(stats["allocated_bytes.current"])


def release_cached_memory(device: torch.device) -> None:
    """Return to the driver, on a CPU to the system, what allocators and libraries cache.

    Waits for the device. Raises what the device raises once an error has broken it for this
    process.
    """
    backend: Any = torch.get_device_module(device)
    if device.type == "cpu":
        trim_heap()
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


def wait_for_device(device: torch.device) -> None:
    """Wait until the device has finished all its work; return at once on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
