"""The choice among the GPUs that were seen and tried, and its reason in one sentence: a plain
function of a `Machine`, so that machines which are not at hand are decided in tests. It looks at
nothing itself; what cannot be had as asked is a `Refusal`, which `detection.py` raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tasks.engine.base.facts import Check, DeviceFacts
from tasks.engine.device.checks import VENDORS, all_checks
from tasks.engine.device.gpu_checks import gib, held_by
from tasks.engine.device.machine_facts import Gpu, Machine

RUNTIMES = {"cuda": "CUDA", "rocm": "ROCm", "xpu": "oneAPI", "mps": "Metal"}
INDEXED = ("cuda", "rocm", "xpu")


@dataclass(frozen=True)
class Refusal:
    """Why the device cannot be what was asked; the text starts with the setting at fault."""

    text: str
    checks: tuple[Check, ...] = ()


def name_problem(name: str) -> str:
    """What is wrong with the form of a device's name; empty where nothing is."""
    kind, colon, index = name.partition(":")
    plain = kind in ("auto", "cpu", "mps") and not colon
    if plain or (kind in INDEXED and (not colon or (index.isascii() and index.isdecimal()))):
        return ""
    return (
        "device.name: must be auto, cuda, cuda:INDEX, rocm, rocm:INDEX, xpu, xpu:INDEX, mps or cpu "
        f"(got {name!r})"
    )


def wanted(machine: Machine, name: str) -> list[Gpu]:
    """The GPUs that a name allows, the one with the most free memory first."""
    kind, _, index = name.partition(":")
    # Torch calls a ROCm device cuda:0 too, so that name finds it as well.
    gpus = (g for g in machine.gpus if kind in ("auto", g.kind, g.name.partition(":")[0]))
    allowed = [g for g in gpus if not index or g.index == int(index)]
    return sorted(allowed, key=lambda g: (-(g.free_bytes or 0), g.index or 0))


def try_gpus(machine: Machine, name: str, *, try_gpu: Callable[[Gpu], Gpu]) -> Machine:
    """The machine with its GPUs tried in order until one computes: each try makes a context, which
    holds memory, so that the others are left alone."""
    tried: dict[str, Gpu] = {}
    for gpu in wanted(machine, name):
        tried[gpu.name] = try_gpu(gpu)
        if tried[gpu.name].computes:
            break
    return replace(machine, gpus=tuple(tried.get(g.name, g) for g in machine.gpus))


def decide(machine: Machine, name: str, *, require: str = "any") -> DeviceFacts | Refusal:
    """The choice among what was seen and tried, without looking again."""
    kind = name.partition(":")[0]
    checks = all_checks(machine, None if kind in ("auto", "cpu") else kind)
    if require == "gpu" and kind == "cpu":
        return Refusal("device.require: gpu refuses device.name cpu; drop one of them", checks)
    able = wanted(machine, name)
    best = next((g for g in able if g.computes), None)
    if best:
        return _gpu_facts(machine, best, reason=_why(best, able, name), checks=checks)
    if kind == "cpu":
        return _cpu_facts(machine, reason="cpu, as device.name asks", checks=checks)
    failed = _failed(able, checks)
    if kind != "auto":
        return Refusal(f"device.name: {_absent(machine, name, able, failed)}", checks)
    if require == "gpu":
        text = "must be a GPU, and this machine has only the cpu"
        return Refusal(f"device.require: {text}: {_told(failed)}", checks)
    if not (machine.adapters or machine.gpus):
        return _cpu_facts(machine, reason=f"cpu, since {failed[0].finding}", checks=checks)
    remedy = f"; {failed[0].remedy}" if failed[0].remedy else ""
    reason = f"cpu, because {failed[0].finding}{remedy}"
    return _cpu_facts(machine, reason=reason, checks=checks, fell_back=True)


def _failed(wanted: list[Gpu], checks: tuple[Check, ...]) -> list[Check]:
    """What stood in the way: of GPUs that PyTorch sees their own checks, else the machine's."""
    names = tuple(g.asked_as for g in wanted)
    bad = [c for c in checks if c.ok is False and c.name.endswith(names or ("",))]
    unknown = [c for c in checks if c.ok is None and not c.finding.startswith("does not apply")]
    return bad or unknown[:1] or list(checks[:1])


def _told(failed: list[Check]) -> str:
    """Findings as one sentence, then what to do about each."""
    remedies = [c.remedy[0].upper() + c.remedy[1:] for c in failed if c.remedy]
    return ". ".join(["; ".join(c.finding for c in failed), *dict.fromkeys(remedies)])


def _absent(machine: Machine, name: str, wanted: list[Gpu], failed: list[Check]) -> str:
    """Why a device asked for by name cannot be had, and what can."""
    if wanted:
        return f"{name} is here but does not compute: {_told(failed)}"
    if not machine.gpus:
        return f"{name} is not here; this machine has only the cpu: {_told(failed)}"
    here = f"{name} is not here; this machine has {', '.join(g.asked_as for g in machine.gpus)}"
    said = ", ".join(f"{k}={v}" for k, v in sorted(machine.env.items()))
    return f"{here} (with {said}, which renumbers them)" if said else here


def _why(best: Gpu, wanted: list[Gpu], name: str) -> str:
    """One sentence: why this GPU, and why not the others that the name allows."""
    free = "free memory not known"
    if best.free_bytes is not None and best.total_bytes:
        free = f"{gib(best.free_bytes)} of {gib(best.total_bytes)} GiB"
    if ":" in name or name == "mps":
        return f"{best.asked_as}, as device.name asks ({free} free)"
    others = [_other(gpu) for gpu in wanted if gpu is not best]
    if not others:
        only = "the only GPU here" if name == "auto" else f"the only {name} device here"
        return f"{best.asked_as}, {only} ({free} free)"
    which = "the GPU with the most free memory"
    if any(g.computes is False for g in wanted):
        which += " of those that compute"
    return f"{best.asked_as}, {which} ({'; '.join([free, *others])})"


def _other(gpu: Gpu) -> str:
    if gpu.computes is False:
        return f"{gpu.asked_as} failed to compute: {gpu.error}"
    if gpu.free_bytes is None:
        return f"{gpu.asked_as} does not tell"
    return f"{gpu.asked_as} has {gib(gpu.free_bytes)} GiB free{held_by(gpu.holders)}"


def _gpu_facts(
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


def _cpu_facts(
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
