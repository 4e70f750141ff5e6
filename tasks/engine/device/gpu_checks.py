"""What is asked of a single GPU that PyTorch sees: has this PyTorch code for it, is its memory
free, does it compute. Plain functions of what was seen; the questions about the whole machine are
in `checks.py`.
"""

from __future__ import annotations

import re

from tasks.engine.base.facts import Check
from tasks.engine.device.machine_facts import Gpu, Holder

FULL = "its memory is full"
FREE_IT = "end the processes that hold it, or choose another device"
LOW_SHARE = 0.1  # with less than this share free, a run is likely to end in an OOM


def _runs(code: str, arch: str) -> bool:
    """Whether machine code (sm_) or PTX (compute_) for `code` runs on a GPU of `arch`.

    docs.nvidia.com, CUDA programming guide, binary and PTX compatibility: a cubin runs within its
    major version on the same or a later minor one, PTX on all later ones, an `a` only on its own.
    """
    built, gpu = (re.fullmatch(r"(sm|compute)_(\d+)([af]?)", text) for text in (code, arch))
    if not built or not gpu:
        return False
    (major, minor), (gpu_major, gpu_minor) = divmod(int(built[2]), 10), divmod(int(gpu[2]), 10)
    if built[3] == "a":
        return (major, minor) == (gpu_major, gpu_minor)
    if built[1] == "compute" and not built[3]:
        return (major, minor) <= (gpu_major, gpu_minor)
    return major == gpu_major and minor <= gpu_minor


def check_architecture(gpu: Gpu, arch_list: tuple[str, ...]) -> Check:
    """Does this PyTorch hold code for the GPU's architecture; computing is proof that it does."""
    name = f"architecture {gpu.asked_as}"
    if not gpu.arch or not arch_list:
        return Check(name, None, "does not apply, or is not known")
    fits = gpu.arch in arch_list or any(_runs(code, gpu.arch) for code in arch_list)
    if fits or gpu.computes:
        return Check(name, True, f"{gpu.arch} runs code for {' '.join(arch_list)}")
    if any("generic" in code for code in arch_list):  # ROCm's generic targets: no rule known here
        return Check(name, None, f"{gpu.arch} may run code for {' '.join(arch_list)}")
    finding = f"{gpu.asked_as} is {gpu.arch}; this PyTorch has code for {' '.join(arch_list)} only"
    return Check(name, False, finding, f"install a PyTorch build for {gpu.arch}")


def gib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**3:.1f}"


def held_by(holders: tuple[Holder, ...]) -> str:
    """ ", held by pid 123 python" for the largest three; empty where nobody is known."""
    if not holders:
        return ""
    largest = sorted(holders, key=lambda h: -(h.bytes or 0))
    said = ", ".join(f"pid {h.pid} {h.name or ''}".rstrip() for h in largest[:3])
    return f", held by {said}" + (f" and {len(holders) - 3} more" if len(holders) > 3 else "")


def check_memory(gpu: Gpu) -> Check:
    """Is the GPU's memory free, and if not, who holds it."""
    name = f"memory {gpu.asked_as}"
    if gpu.free_bytes is None or not gpu.total_bytes:
        return Check(name, None, f"the free memory of {gpu.asked_as} is not known")
    share = f"{gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} GiB free"
    finding = f"{gpu.asked_as} has {share}{held_by(gpu.holders)}"
    if gpu.free_bytes >= LOW_SHARE * gpu.total_bytes:
        return Check(name, True, finding)
    return Check(name, False, finding, FREE_IT)


def check_compute(gpu: Gpu) -> Check:
    """Did a small product on the GPU equal the CPU's."""
    name = f"compute {gpu.asked_as}"
    if gpu.computes is None:
        return Check(name, None, f"{gpu.asked_as} was not tried: it was not needed")
    if gpu.computes:
        return Check(name, True, f"a product computed on {gpu.asked_as} equals the CPU's")
    remedy = "try again in a new process; if it stays, check the GPU (nvidia-smi, dmesg)"
    if gpu.error == FULL:
        remedy = FREE_IT
    return Check(name, False, f"{gpu.asked_as} failed a small product: {gpu.error}", remedy)
