"""Read what NVIDIA's management library (NVML) tells of the driver and its GPUs, without a CUDA
context: free memory, and the processes that hold memory. Where NVML fails, its error is kept.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from headroom.device.checks import Gpu, Holder

HOST_PIDS = Path("pid:[4026531836]")  # PROC_PID_INIT_INO of Linux's include/linux/proc_ns.h


@dataclass(frozen=True)
class Nvml:
    """The answers of NVIDIA's management library; GPUs in its own order, which is not PyTorch's."""

    error: str = ""
    driver_version: str | None = None
    cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()  # MIG slices after their GPU; name holds the uuid


def _decode(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _is_host_pid_namespace() -> bool:
    """Return whether process ids here are the host's, as the driver's are; in a container they
    are not."""
    try:
        return Path("/proc/self/ns/pid").readlink() == HOST_PIDS
    except OSError:
        return True  # no Linux, or one without such namespaces


def _read_holders(nvml: Any, handle: Any) -> tuple[Holder, ...]:
    """Return the other processes that compute on a GPU; with names where psutil can see them.
    In a container the numbers mean none of the processes here, and this one cannot be told from
    others."""
    holders = []
    is_host = _is_host_pid_namespace()
    foreign = "of the host" + ("; perhaps this run" if torch.cuda.is_initialized() else "")
    for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
        if is_host and process.pid == os.getpid():
            continue
        try:
            name = psutil.Process(process.pid).name() if is_host else foreign
        except psutil.Error:
            name = None
        holders.append(Holder(process.pid, name, process.usedGpuMemory))
    return tuple(holders)


def _read_gpu(nvml: Any, handle: Any) -> Gpu:
    uuid = _decode(nvml.nvmlDeviceGetUUID(handle))
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        holders = _read_holders(nvml, handle)
    except nvml.NVMLError:  # not supported, or no permission: holders stay unknown
        holders = ()
    return Gpu(
        name=uuid,
        kind="cuda",
        model=_decode(nvml.nvmlDeviceGetName(handle)),
        uuid=uuid,
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        holders=holders,
    )


def read_nvml(nvml: Any) -> Nvml:
    """Read NVML through its Python binding; what it raises is kept as the error."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Nvml(error=str(error))
    try:
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion())  # 13000 is CUDA 13.0
        gpus = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append(_read_gpu(nvml, handle))
            gpus += _read_mig_slices(nvml, handle)
        version = _decode(nvml.nvmlSystemGetDriverVersion())
        return Nvml("", version, (cuda // 1000, cuda % 1000 // 10), tuple(gpus))
    except nvml.NVMLError as error:
        return Nvml(error=str(error))
    finally:
        nvml.nvmlShutdown()


def _read_mig_slices(nvml: Any, handle: Any) -> list[Gpu]:
    slices = []
    try:
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            slices.append(_read_gpu(nvml, part))
    except nvml.NVMLError:  # no MIG on this GPU, or no slice after this one
        return slices
    return slices


def query_nvml() -> Nvml:
    """Read NVML; the error says so where its Python binding is not installed."""
    try:
        import pynvml  # only when asked: macOS has none
    except ImportError:
        return Nvml(error="the package nvidia-ml-py is not installed")
    return read_nvml(pynvml)


def find_holders(uuid: str | None, nvml: Nvml) -> tuple[Holder, ...]:
    """Return the other processes on the GPU of this UUID; none where the driver does not tell."""
    return next((gpu.holders for gpu in nvml.gpus if gpu.uuid == uuid), ())
