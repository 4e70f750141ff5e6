"""Detect which accelerator a run gets, and why, its arithmetic and its limit. The choice is a
plain function of a `Machine`, so that it can be tested for machines that are not at hand, and
its reason is one sentence. A GPU counts only after it has computed. A device that was asked for
by name and is not here is refused, and so are a CPU where a GPU is required, and a precision or
limit that the device cannot keep.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from headroom.base.facts import Check, DeviceFacts
from headroom.device.checks import (
    FULL,
    VENDORS,
    Gpu,
    Machine,
    describe_holders,
    format_gib,
    run_checks,
)
from headroom.device.leases import DevicesBusyError, Leases
from headroom.device.probe import probe_machine, take_first_line
from headroom.watch.allocators import release_cached_memory
from headroom.watch.out_of_memory import is_oom

RUNTIMES = {"cuda": "CUDA", "rocm": "ROCm", "xpu": "oneAPI", "mps": "Metal"}
INDEXED = ("cuda", "rocm", "xpu")
WHICHEVER = ("auto", "gpu")  # the GPU with the most free memory


@dataclass(frozen=True)
class Refusal:
    """The reason why the device cannot be the requested one; the text starts with the setting
    at fault."""

    text: str
    checks: tuple[Check, ...] = ()


def find_name_problem(name: str) -> str:
    """Return what is wrong with the form of a device's name; empty where nothing is."""
    kind, colon, index = name.partition(":")
    plain = kind in (*WHICHEVER, "cpu", "mps") and not colon
    if plain or (kind in INDEXED and (not colon or (index.isascii() and index.isdecimal()))):
        return ""
    return (
        "device.name: must be auto, gpu, cuda, cuda:INDEX, rocm, rocm:INDEX, xpu, xpu:INDEX, mps "
        f"or cpu (got {name!r})"
    )


def find_allowed_gpus(machine: Machine, name: str) -> list[Gpu]:
    """Return the GPUs that a name allows, the one with the most free memory first."""
    kind, _, index = name.partition(":")
    # Torch calls a ROCm device cuda:0 too, so that name finds it as well.
    gpus = (g for g in machine.gpus if kind in (*WHICHEVER, g.kind, g.name.partition(":")[0]))
    allowed = [g for g in gpus if not index or g.index == int(index)]
    return sorted(allowed, key=lambda g: (-(g.free_bytes or 0), g.index or 0))


def try_gpus(machine: Machine, name: str, *, try_gpu: Callable[[Gpu], Gpu]) -> Machine:
    """Try the machine's GPUs in order until one computes, and return the machine with the
    results: each try makes a context, which holds memory, so that the others are left alone."""
    tried: dict[str, Gpu] = {}
    for gpu in find_allowed_gpus(machine, name):
        tried[gpu.name] = try_gpu(gpu)
        if tried[gpu.name].computes:
            break
    return replace(machine, gpus=tuple(tried.get(g.name, g) for g in machine.gpus))


def choose_device(machine: Machine, name: str) -> DeviceFacts | Refusal:
    """Choose the device among the GPUs that were seen and tried, without looking again."""
    kind = name.partition(":")[0]
    checks = run_checks(machine, None if kind in (*WHICHEVER, "cpu") else kind)
    able = find_allowed_gpus(machine, name)
    best = next((g for g in able if g.computes), None)
    if best:
        return _make_gpu_facts(
            machine, best, reason=_describe_choice(best, able, name), checks=checks
        )
    if kind == "cpu":
        return _make_cpu_facts(machine, reason="cpu, as device.name asks", checks=checks)
    failed = _find_failed_checks(able, checks)
    if kind != "auto":
        return Refusal(f"device.name: {_describe_absence(machine, name, able, failed)}", checks)
    if not (machine.adapters or machine.gpus):
        return _make_cpu_facts(machine, reason=f"cpu, since {failed[0].finding}", checks=checks)
    remedy = f"; {failed[0].remedy}" if failed[0].remedy else ""
    reason = f"cpu, because {failed[0].finding}{remedy}"
    return _make_cpu_facts(machine, reason=reason, checks=checks, fell_back=True)


def _find_failed_checks(wanted: list[Gpu], checks: tuple[Check, ...]) -> list[Check]:
    """Return the failed checks: of GPUs that PyTorch sees their own, else the machine's."""
    names = tuple(g.asked_as for g in wanted)
    bad = [c for c in checks if c.ok is False and c.name.endswith(names or ("",))]
    unknown = [c for c in checks if c.ok is None and not c.finding.startswith("does not apply")]
    return bad or unknown[:1] or list(checks[:1])


def _describe_failed_checks(failed: list[Check]) -> str:
    """Describe the findings in one sentence, then what to do about each."""
    remedies = [c.remedy[0].upper() + c.remedy[1:] for c in failed if c.remedy]
    return ". ".join(["; ".join(c.finding for c in failed), *dict.fromkeys(remedies)])


def _describe_absence(machine: Machine, name: str, wanted: list[Gpu], failed: list[Check]) -> str:
    """Describe why a device that was asked for by name is not available, and which are."""
    if wanted:
        return f"{name} is here but does not compute: {_describe_failed_checks(failed)}"
    if not machine.gpus:
        return (
            f"{name} is not here; this machine has only the cpu: {_describe_failed_checks(failed)}"
        )
    here = f"{name} is not here; this machine has {', '.join(g.asked_as for g in machine.gpus)}"
    said = ", ".join(f"{k}={v}" for k, v in sorted(machine.env.items()))
    return f"{here} (with {said}, which renumbers them)" if said else here


def _describe_choice(best: Gpu, wanted: list[Gpu], name: str) -> str:
    """Describe in one sentence why this GPU was chosen, and not the others that the name allows."""
    free = "free memory not known"
    if best.free_bytes is not None and best.total_bytes:
        free = f"{format_gib(best.free_bytes)} of {format_gib(best.total_bytes)} GiB"
    if ":" in name or name == "mps":
        return f"{best.asked_as}, as device.name asks ({free} free)"
    others = [_describe_other_gpu(gpu) for gpu in wanted if gpu is not best]
    if not others:
        only = "the only GPU here" if name in WHICHEVER else f"the only {name} device here"
        return f"{best.asked_as}, {only} ({free} free)"
    which = "the GPU with the most free memory"
    if any(g.computes is False for g in wanted):
        which += " of those that compute"
    return f"{best.asked_as}, {which} ({'; '.join([free, *others])})"


def _describe_other_gpu(gpu: Gpu) -> str:
    if gpu.computes is False:
        return f"{gpu.asked_as} failed to compute: {gpu.error}"
    if gpu.free_bytes is None:
        return f"{gpu.asked_as} does not tell"
    return (
        f"{gpu.asked_as} has {format_gib(gpu.free_bytes)} GiB free{describe_holders(gpu.holders)}"
    )


def _make_gpu_facts(
    machine: Machine, gpu: Gpu, *, reason: str, checks: tuple[Check, ...]
) -> DeviceFacts:
    version = ".".join(machine.built.get(gpu.kind, "").split(".")[:2])
    driver = machine.drivers.get(VENDORS[gpu.kind])
    return DeviceFacts(
        name=gpu.name,
        kind=gpu.kind,
        index=gpu.index,
        model=gpu.model,
        uuid=gpu.uuid,
        reason=reason,
        total_bytes=gpu.total_bytes,
        free_bytes=gpu.free_bytes,
        torch_version=machine.torch_version,
        runtime=f"{RUNTIMES[gpu.kind]} {version}".rstrip(),
        driver_version=gpu.driver_version or (driver.version if driver else None),
        bf16=gpu.bf16,
        tf32=gpu.tf32,
        checks=checks,
    )


def _make_cpu_facts(
    machine: Machine, *, reason: str, checks: tuple[Check, ...], fell_back: bool = False
) -> DeviceFacts:
    return DeviceFacts(
        name="cpu",
        kind="cpu",
        index=None,
        model=machine.cpu_model,
        uuid=None,
        reason=reason,
        total_bytes=machine.ram_total_bytes,
        free_bytes=machine.ram_free_bytes,
        torch_version=machine.torch_version,
        runtime=None,
        driver_version=None,
        bf16=False,
        tf32=False,
        checks=checks,
        fell_back=fell_back,
    )


MIB = 1024**2
# torch/mps: the allocator's own high watermark, as a share of the recommended maximum.
MPS_DEFAULT_FRACTION = 1.7


class DeviceError(ValueError):
    """The device cannot be the requested one; the text starts with the setting at fault."""


class TemporaryDeviceError(DeviceError):
    """The device cannot be the requested one now, but may be at another time."""

    def __init__(self, text: str, *, kind: str = "") -> None:
        """kind: of the failure, as the run's record classifies it."""
        super().__init__(text)
        self.kind = kind


def detect_best_device(
    name: str = "auto", *, leases: Leases | None = None, count: int | None = 1
) -> DeviceFacts:
    """Return the device to run on, after it has computed, with the result of every check.

    auto is the working GPU with the most free memory, else the CPU; gpu is never the CPU. leases:
    to wait until no other training uses the GPU, and to hold it from then on. count: so many GPUs
    of its kind are held together, where there are as many; None: all. Raises DeviceError.
    """
    machine = _try_machine(name, leases, count)
    chosen = choose_device(machine, name)
    if isinstance(chosen, Refusal):
        raise DeviceError(chosen.text)
    if leases is not None:
        names = {_make_key(gpu): gpu.name for gpu in machine.gpus}
        chosen = replace(chosen, beside=tuple(names[key] for key in leases.devices[1:]))
    if chosen.kind not in ("cuda", "rocm"):
        return chosen
    free, total = torch.cuda.mem_get_info(chosen.index)
    return replace(chosen, free_bytes=free, total_bytes=total)


def list_devices() -> list[str]:
    """Return the devices of this machine: every GPU, working or not, then the CPU."""
    return [*(gpu.name for gpu in probe_machine(os.environ, touch=True).gpus), "cpu"]


def explain_choice(name: str = "auto") -> tuple[Check, ...]:
    """Return every check of the device and, last, the choice; a choice that is refused is a
    failed check.

    Raises DeviceError only for a name that no machine could have.
    """
    chosen = choose_device(_try_machine(name), name)
    if isinstance(chosen, Refusal):
        return (*chosen.checks, Check("choice", False, chosen.text))
    return (*chosen.checks, Check("choice", True, chosen.reason))


def _try_machine(name: str, leases: Leases | None = None, count: int | None = 1) -> Machine:
    problem = find_name_problem(name)
    if problem:
        raise DeviceError(problem)
    # A run on the CPU has no business on the GPU: it stays asleep.
    machine = probe_machine(os.environ, touch=name != "cpu")
    if leases is None:
        return try_gpus(machine, name, try_gpu=try_gpu)
    return _lease_gpus(machine, name, leases, count)


def _make_key(gpu: Gpu) -> str:
    """Return by what name all trainings of the host lease it, whatever each of them sees."""
    return gpu.uuid or gpu.name


def _lease_gpus(machine: Machine, name: str, leases: Leases, count: int | None) -> Machine:
    """Return the machine with the GPU that is leased now tried, and those before it that did
    not compute. Those that are leased beside it are for other processes to try."""
    left = {_make_key(gpu): gpu for gpu in find_allowed_gpus(machine, name)}
    kinds = {gpu.kind for gpu in left.values()}
    others = [_make_key(gpu) for gpu in machine.gpus if gpu.kind in kinds]
    while left:
        count_here = count or len(others)
        # Where there are not as many the run is refused, for which it need not wait.
        more = count_here - 1 if count_here <= len(others) else 0
        try:
            key = leases.take(list(left), beside=others, more=more)
        except DevicesBusyError as busy:
            raise DeviceError(f"device.wait_s: {busy}") from None
        except OSError as error:
            raise DeviceError(
                f"device.share: no lease can be kept ({error.filename}: {error.strerror}); "
                "make it true to train without"
            ) from None
        tried = try_gpu(left.pop(key))
        others.remove(key)
        gpus = tuple(tried if gpu.name == tried.name else gpu for gpu in machine.gpus)
        machine = replace(machine, gpus=gpus)
        if tried.computes:
            return machine
    leases.close()
    return machine


def try_gpu(gpu: Gpu) -> Gpu:
    """Return the GPU, with whether it computes and, on MPS, whether in bf16 too."""
    error = find_compute_problem(gpu.name, torch.float32)
    if error:
        return replace(gpu, computes=False, error=error)
    bf16 = not find_compute_problem(gpu.name, torch.bfloat16) if gpu.kind == "mps" else gpu.bf16
    return replace(gpu, computes=True, bf16=bf16)


def find_compute_problem(device: str, dtype: torch.dtype) -> str:
    """Compute a small product on the device and return what was wrong; empty where it equals
    the CPU's."""
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
        return FULL if is_oom(error) else take_first_line(error)
    return "" if off == 0 else f"its product of two 64x64 matrices is off by {off:.3g}"


def resolve_precision(requested: str, facts: DeviceFacts) -> str:
    """Return the arithmetic to train in: fp32, tf32, bf16 or fp16. Raises DeviceError."""
    on_cpu = facts.kind == "cpu"
    if requested == "auto":
        return "fp32" if on_cpu else "bf16" if facts.bf16 else "tf32" if facts.tf32 else "fp32"
    can = {
        "fp32": True,
        "tf32": facts.tf32,
        "bf16": facts.bf16 or on_cpu,  # slow on most CPUs, but right
        "fp16": not on_cpu,  # its small range needs a scaler, and a CPU gains no speed by it
    }
    if requested not in can:
        raise DeviceError(f"train.precision: must be auto or {', '.join(can)} (got {requested!r})")
    if can[requested]:
        return requested
    others = ", ".join(name for name, works in can.items() if works)
    model = f" ({facts.model})" if facts.model else ""
    raise DeviceError(
        f"train.precision: {requested} is not for {facts.name}{model}; use auto or one of {others}"
    )


def check_memory_limit(facts: DeviceFacts, limit_mib: float | None) -> None:
    """Raise DeviceError for a memory limit that cannot be kept on the device; None is no limit."""
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


def cap_device_memory(facts: DeviceFacts, limit_mib: float | None) -> Callable[[], None]:
    """Cap what this process may allocate on the device, and return a function that restores the
    earlier cap, which is never raised.

    The cap belongs to the process, not to the run: call the returned function when the run
    ends. A CPU has no allocator that could keep one: see memory_limit.py.
    """
    check_memory_limit(facts, limit_mib)
    if limit_mib is None or not facts.total_bytes or facts.kind == "cpu":
        return lambda: None
    # Half a byte more: the allocator cuts off what its product is short of a whole one.
    fraction = min(1.0, (limit_mib * MIB + 0.5) / facts.total_bytes)
    if facts.kind == "mps":
        torch.mps.set_per_process_memory_fraction(fraction)
        return lambda: torch.mps.set_per_process_memory_fraction(MPS_DEFAULT_FRACTION)
    backend = torch.xpu if facts.kind == "xpu" else torch.cuda
    # What is cached, from the detection's product on, is given out again whatever the limit.
    release_cached_memory(torch.device(facts.name))
    tells = getattr(backend, "get_per_process_memory_fraction", None)  # not before PyTorch 2.8
    before = tells(facts.index) if tells is not None else 1.0
    backend.set_per_process_memory_fraction(min(fraction, before), facts.index)
    return lambda: backend.set_per_process_memory_fraction(before, facts.index)


AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make_autocast(
    precision: str, device: torch.device
) -> Callable[[], AbstractContextManager[object]]:
    """Return the context manager factory to open around a forward pass; for fp32 and tf32 one
    that does nothing."""
    if precision not in AMP_DTYPES:
        return nullcontext
    return partial(torch.autocast, device.type, dtype=AMP_DTYPES[precision])


@contextmanager
def set_matmul_precision(precision: str) -> Iterator[None]:
    """Compute matrix products and convolutions of float32 in TF32 for tf32, in full precision
    otherwise, inside the block.

    cuDNN's own default is TF32, so that fp32 has to be asked for.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
