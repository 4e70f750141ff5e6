"""Which accelerator a run gets, and why; its arithmetic and its limit. A GPU is believed only after
it has computed. It refuses a device that was asked for by name and is not here, a CPU where a GPU
is required, and a precision or limit that the device cannot keep.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import torch

from tasks.engine.base.facts import Check, DeviceFacts
from tasks.engine.device.choice import Refusal, decide, name_problem, try_gpus, wanted
from tasks.engine.device.gpu_checks import FULL
from tasks.engine.device.leases import Busy, Leases
from tasks.engine.device.machine_facts import Gpu, Machine
from tasks.engine.device.probe import first_line, look
from tasks.engine.memory.allocator_stats import give_back
from tasks.engine.memory.memory_meter import is_oom

MIB = 1024**2
# torch/mps: the allocator's own high watermark, as a share of the recommended maximum.
MPS_DEFAULT_FRACTION = 1.7


class DeviceError(ValueError):
    """The device cannot be what was asked; the text starts with the setting at fault."""


class NotNow(DeviceError):
    """The same, where it may be so at another time."""

    def __init__(self, text: str, *, kind: str = "") -> None:
        """kind: of the failure; see tasks/failures.py."""
        super().__init__(text)
        self.kind = kind


def detect(
    name: str = "auto", *, require: str = "any", leases: Leases | None = None
) -> DeviceFacts:
    """The device to run on, after it has computed, and every check on the way to it.

    auto is the working GPU with the most free memory, else the CPU. leases: to wait until nobody
    else trains on it, and to hold it from then on. Raises DeviceError.
    """
    found = decide(_tried(name, leases), name, require=require)
    if isinstance(found, Refusal):
        raise DeviceError(found.text)
    if found.kind not in ("cuda", "rocm"):
        return found
    free, total = torch.cuda.mem_get_info(found.index)
    return replace(found, free_bytes=free, total_bytes=total)


def names() -> list[str]:
    """The devices of this machine: every GPU, working or not, then the CPU."""
    return [*(gpu.name for gpu in look(os.environ, touch=True).gpus), "cpu"]


def explain(name: str = "auto") -> tuple[Check, ...]:
    """Every check of `detect` and, last, the choice; a choice that is refused is a failed check.

    Raises DeviceError only for a name that no machine could have.
    """
    found = decide(_tried(name), name)
    if isinstance(found, Refusal):
        return (*found.checks, Check("choice", False, found.text))
    return (*found.checks, Check("choice", True, found.reason))


def _tried(name: str, leases: Leases | None = None) -> Machine:
    problem = name_problem(name)
    if problem:
        raise DeviceError(problem)
    # A run on the CPU has no business on the GPU: it stays asleep.
    machine = look(os.environ, touch=name != "cpu")
    if leases is None:
        return try_gpus(machine, name, try_gpu=try_gpu)
    return _leased(machine, name, leases)


def _leased(machine: Machine, name: str, leases: Leases) -> Machine:
    """The machine with the GPU that is held now tried, and those before it that did not compute."""
    left = {gpu.uuid or gpu.name: gpu for gpu in wanted(machine, name)}
    while left:
        try:
            key = leases.take(list(left))
        except Busy as busy:
            raise DeviceError(f"device.wait_s: {busy}") from None
        except OSError as error:
            raise DeviceError(
                f"device.share: no lease can be kept ({error.filename}: {error.strerror}); "
                "make it true to train without"
            ) from None
        tried = try_gpu(left.pop(key))
        gpus = tuple(tried if gpu.name == tried.name else gpu for gpu in machine.gpus)
        machine = replace(machine, gpus=gpus)
        if tried.computes:
            return machine
    leases.close()
    return machine


def try_gpu(gpu: Gpu) -> Gpu:
    """The GPU, with whether it computes and, on MPS, whether in bf16 too."""
    error = compute(gpu.name, torch.float32)
    if error:
        return replace(gpu, computes=False, error=error)
    bf16 = not compute(gpu.name, torch.bfloat16) if gpu.kind == "mps" else gpu.bf16
    return replace(gpu, computes=True, bf16=bf16)


def compute(device: str, dtype: torch.dtype) -> str:
    """What was wrong with a small product on the device; empty where it equals the CPU's."""
    steps = torch.arange(64 * 64)
    # Whole numbers whose sums stay below 256 are exact in every dtype, TF32 and bf16 included.
    left = ((steps * 7) % 3 - 1).reshape(64, 64).float()
    right = ((steps * 11) % 5 - 2).reshape(64, 64).float()
    try:
        product = left.to(device, dtype) @ right.to(device, dtype)
        if device != "cpu":
            torch.accelerator.synchronize(torch.device(device))
        off = (product.cpu().float() - left @ right).abs().max().item()
    except (RuntimeError, AssertionError, TypeError) as error:  # TypeError: no such dtype on MPS
        return FULL if is_oom(error) else first_line(error)
    return "" if off == 0 else f"its product of two 64x64 matrices is off by {off:.3g}"


def resolve_precision(asked: str, facts: DeviceFacts) -> str:
    """The arithmetic to train in: fp32, tf32, bf16 or fp16. Raises DeviceError."""
    on_cpu = facts.kind == "cpu"
    if asked == "auto":
        return "fp32" if on_cpu else "bf16" if facts.bf16 else "tf32" if facts.tf32 else "fp32"
    can = {
        "fp32": True,
        "tf32": facts.tf32,
        "bf16": facts.bf16 or on_cpu,  # slow on most CPUs, but right
        "fp16": not on_cpu,  # its small range needs a scaler, and a CPU gains no speed by it
    }
    if asked not in can:
        raise DeviceError(f"train.precision: must be auto or {', '.join(can)} (got {asked!r})")
    if can[asked]:
        return asked
    others = ", ".join(name for name, works in can.items() if works)
    model = f" ({facts.model})" if facts.model else ""
    raise DeviceError(
        f"train.precision: {asked} is not for {facts.name}{model}; use auto or one of {others}"
    )


def check_limit(facts: DeviceFacts, limit_mib: float | None) -> None:
    """Refuses with DeviceError a limit that cannot be kept on the device; None is none."""
    if limit_mib is None:
        return
    if facts.kind == "xpu" and not hasattr(torch.xpu, "set_per_process_memory_fraction"):
        raise DeviceError(
            f"memory.limit_mib: PyTorch {facts.torch_version} cannot limit {facts.name} "
            f"(got {limit_mib:g}); drop it, or update PyTorch"
        )
    if not facts.total_bytes:
        raise DeviceError(
            f"memory.limit_mib: the total memory of {facts.name} is not known, so no share of it "
            f"can be set (got {limit_mib:g}); drop it"
        )
    most_mib = facts.total_bytes / MIB
    if not 0 < limit_mib <= most_mib:
        raise DeviceError(
            f"memory.limit_mib: must be above 0 and at most {most_mib:.0f}, all of {facts.name} "
            f"(got {limit_mib:g})"
        )


def limit(facts: DeviceFacts, limit_mib: float | None) -> Callable[[], None]:
    """Caps what this process may allocate on the device; what it returns puts back the cap that
    there was, which is never raised.

    The cap belongs to the process, not to the run: call the returned function when the run ends.
    A CPU has no allocator that could keep one: see memory_limit.py.
    """
    check_limit(facts, limit_mib)
    if limit_mib is None or not facts.total_bytes or facts.kind == "cpu":
        return lambda: None
    # Half a byte more: the allocator cuts off what its product is short of a whole one.
    fraction = min(1.0, (limit_mib * MIB + 0.5) / facts.total_bytes)
    if facts.kind == "mps":
        torch.mps.set_per_process_memory_fraction(fraction)
        return lambda: torch.mps.set_per_process_memory_fraction(MPS_DEFAULT_FRACTION)
    backend = torch.xpu if facts.kind == "xpu" else torch.cuda
    # What is cached, from the detection's product on, is given out again whatever the limit.
    give_back(torch.device(facts.name))
    tells = getattr(backend, "get_per_process_memory_fraction", None)  # not before PyTorch 2.8
    before = tells(facts.index) if tells is not None else 1.0
    backend.set_per_process_memory_fraction(min(fraction, before), facts.index)
    return lambda: backend.set_per_process_memory_fraction(before, facts.index)
