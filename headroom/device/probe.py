"""Looks at the real machine and writes down what is there: buses, drivers, PyTorch's build, its
GPUs. It judges nothing, computes nothing and leaves unknown what it cannot find out. Only
`probe_machine` touches a device, and only as far as asking for its properties and free memory.
"""

from __future__ import annotations

import os
import platform
import subprocess
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headroom.device.checks import KINDS, VENDORS, VISIBILITY, Adapter, Driver, Gpu, Machine
from headroom.device.nvml import Nvml, query_nvml
from headroom.watch import host_memory

PCI_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
# AMD, ISA guides of CDNA 1 to 4, RDNA 3 and 4: those with matrix instructions for bf16.
BF16_GFX = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")


def take_first_line(error: BaseException | str) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def find_pci_adapters(root: Path) -> tuple[Adapter, ...]:
    """Return the GPUs of the known vendors on the PCI bus: display controllers (class 03), and
    AMD's processing accelerators (class 12), which is what its Instinct cards say they are."""
    adapters = []
    for device in sorted(root.glob("*")):
        try:
            vendor = PCI_VENDORS.get((device / "vendor").read_text().strip())
            kind = (device / "class").read_text().strip()
        except OSError:  # unplugged meanwhile, or not ours to read
            continue
        if vendor and (kind.startswith("0x03") or (vendor == "AMD" and kind.startswith("0x12"))):
            adapters.append(Adapter(vendor, f"PCI {device.name}"))
    return tuple(adapters)


def _find_nodes(root: Path, *patterns: str) -> dict[str, bool]:
    paths = sorted(path for pattern in patterns for path in root.glob(pattern))
    return {str(path): os.access(path, os.R_OK | os.W_OK) for path in paths}


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def find_drivers(root: Path, nvml: Nvml) -> dict[str, Driver]:
    """Return each vendor's kernel driver, read from /proc, /sys and /dev below `root`."""
    nvidia = _read_text(root / "proc/driver/nvidia/version").splitlines()
    words = nvidia[0].split() if nvidia else []
    version = next((w for w in words if w[0].isdigit() and "." in w), None)  # NVRM ... 580.95.05
    amd = root / "sys/module/amdgpu"
    intel = [root / "sys/module" / module for module in ("xe", "i915")]
    return {
        "NVIDIA": Driver(
            loaded=bool(nvidia) or not nvml.error,
            version=nvml.driver_version or version,
            nodes=_find_nodes(root, "dev/nvidia[0-9]*", "dev/nvidiactl", "dev/dxg"),
            answers=not nvml.error,
            error=nvml.error,
        ),
        "AMD": Driver(
            loaded=amd.exists(),
            version=_read_text(amd / "version") or None,  # absent for the kernel's own amdgpu
            nodes=_find_nodes(root, "dev/kfd", "dev/dri/renderD*"),
        ),
        "Intel": Driver(
            loaded=any(module.exists() for module in intel),
            nodes=_find_nodes(root, "dev/dri/renderD*"),
        ),
    }


def _read_free_bytes(query: Any, index: int) -> int | None:
    try:
        return int(query(index)[0])
    except RuntimeError:  # full, lost, or a driver that does not tell
        return None


def make_cuda_gpu(index: int, props: Any, nvml: Nvml, *, hip: bool) -> Gpu:
    """Make the record of a CUDA or ROCm GPU from its properties, joined with NVML's by UUID."""
    uuid = str(props.uuid) if getattr(props, "uuid", None) is not None else None
    same = [g for g in nvml.gpus if uuid and (g.uuid or "").partition("-")[2] == uuid]
    adapter = same[0] if same else None
    arch = f"sm_{props.major}{props.minor}"
    if hip:
        arch = props.gcnArchName.split(":")[0]
    # NVML first: asking CUDA makes a context, which holds memory on a GPU that may not be chosen.
    free = adapter.free_bytes if adapter else _read_free_bytes(torch.cuda.mem_get_info, index)
    return Gpu(
        name=f"cuda:{index}",
        kind="rocm" if hip else "cuda",
        index=index,
        model=props.name,
        uuid=adapter.uuid if adapter else uuid,
        arch=arch,
        total_bytes=int(props.total_memory),
        free_bytes=free,
        holders=adapter.holders if adapter else (),
        bf16=arch.startswith(BF16_GFX) if hip else props.major >= 8,
        tf32=not hip and props.major >= 8,
    )


def _make_xpu_gpu(index: int) -> Gpu:
    props = torch.xpu.get_device_properties(index)
    uuid = getattr(props, "uuid", None)
    return Gpu(
        name=f"xpu:{index}",
        kind="xpu",
        index=index,
        model=props.name,
        uuid=str(uuid) if uuid is not None else None,
        total_bytes=int(props.total_memory),
        free_bytes=_read_free_bytes(torch.xpu.mem_get_info, index),
        driver_version=getattr(props, "driver_version", None),
        bf16=bool(getattr(props, "has_bfloat16_conversions", False)),
    )


def _make_mps_gpu() -> Gpu:
    total = int(torch.mps.recommended_max_memory())
    free = total - int(torch.mps.current_allocated_memory())
    return Gpu("mps", "mps", model=_read_cpu_model(), total_bytes=total, free_bytes=free)


def _list_torch_gpus(nvml: Nvml) -> tuple[tuple[Gpu, ...], str]:
    """Return PyTorch's GPUs, or none and its own words about why."""
    gpus: tuple[Gpu, ...] = ()
    said = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            kind = getattr(torch.accelerator.current_accelerator(), "type", "")
            indices = range(torch.accelerator.device_count())
            if kind == "cuda":
                hip = bool(torch.version.hip)
                properties = torch.cuda.get_device_properties
                gpus = tuple(make_cuda_gpu(i, properties(i), nvml, hip=hip) for i in indices)
            elif kind == "xpu":
                gpus = tuple(_make_xpu_gpu(i) for i in indices)
            elif kind == "mps" and torch.backends.mps.is_available():
                gpus = (_make_mps_gpu(),)
        except (RuntimeError, AssertionError) as error:
            said = take_first_line(error)
    return gpus, said or (take_first_line(str(caught[0].message)) if caught and not gpus else "")


def _read_cpu_model() -> str | None:
    """Return the processor's name as its maker writes it."""
    if platform.system() == "Darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() or None
    for line in _read_text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or None


def _read_builds() -> dict[str, str]:
    xpu = getattr(torch.version, "xpu", None)
    rocm = getattr(torch.version, "rocm", None) or torch.version.hip
    builds = {"cuda": torch.version.cuda, "rocm": rocm, "xpu": xpu}
    built = {kind: str(version) for kind, version in builds.items() if version}
    return built | ({"mps": ""} if torch.backends.mps.is_built() else {})


def _choose_adapters(nvml: Nvml, gpus: tuple[Gpu, ...]) -> tuple[Adapter, ...]:
    """Return the GPUs by the best source for each vendor: its library, PyTorch, the bus, a
    device file."""
    nvidia = [Adapter("NVIDIA", g.model or "") for g in nvml.gpus if g.name.startswith("GPU-")]
    torchs = [Adapter(VENDORS[g.kind], g.model or g.name) for g in gpus]
    files = [Adapter("NVIDIA", str(p)) for p in sorted(Path("/dev").glob("nvidia[0-9]"))]
    files += [Adapter("AMD", str(p)) for p in Path("/dev").glob("kfd")]
    witnesses = [nvidia, torchs, find_pci_adapters(Path("/sys/bus/pci/devices")), files]
    if (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        witnesses.append([Adapter("Apple", _read_cpu_model() or "Apple silicon")])
    adapters: list[Adapter] = []
    for vendor in KINDS:
        of_vendor = ([a for a in witness if a.vendor == vendor] for witness in witnesses)
        adapters += next((some for some in of_vendor if some), [])
    return tuple(adapters)


def probe_machine(env: Mapping[str, str], *, touch: bool = True) -> Machine:
    """Return what was seen of this machine. Without `touch` PyTorch is not asked for GPUs, so
    no driver is initialized."""
    nvml = query_nvml()
    gpus, said = _list_torch_gpus(nvml) if touch else ((), "")
    cuda = bool(gpus) and gpus[0].kind in ("cuda", "rocm")
    variables = {name for names in VISIBILITY.values() for name in names}
    return Machine(
        torch_version=str(torch.__version__),
        system=platform.system(),
        arch=platform.machine(),
        os_version=platform.mac_ver()[0],
        cpu_model=_read_cpu_model(),
        ram_total_bytes=host_memory.read_total_bytes(),
        ram_free_bytes=host_memory.read_free_bytes(),
        adapters=_choose_adapters(nvml, gpus),
        drivers=find_drivers(Path("/"), nvml),
        driver_cuda=nvml.cuda,
        uuids=None if nvml.error else tuple(g.name for g in nvml.gpus),
        built=_read_builds(),
        arch_list=tuple(torch.cuda.get_arch_list()) if cuda else (),
        env={name: env[name] for name in variables if name in env},
        gpus=gpus,
        torch_error=said,
    )
