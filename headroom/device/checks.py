"""Check what can keep a run off the GPU, one question at a time. What was seen of a machine and
its GPUs is kept in frozen records, and each check is a plain function of them, so that a
machine which is not at hand can be judged too. No device is touched and no environment is read:
`probe.py` looks at the machine, `detection.py` decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from headroom.base.facts import Check


@dataclass(frozen=True)
class Holder:
    """A process that holds memory of a GPU."""

    pid: int
    name: str | None = None  # None: not visible from here, as from within a container
    bytes: int | None = None


@dataclass(frozen=True)
class Adapter:
    """A GPU as the operating system or the driver shows it, whether PyTorch can use it or not."""

    vendor: str
    where: str  # "PCI 0000:01:00.0", "/dev/nvidia0", or its model


@dataclass(frozen=True)
class Driver:
    """What is known of one vendor's kernel driver."""

    loaded: bool = False
    version: str | None = None
    nodes: Mapping[str, bool] = field(default_factory=dict)  # device file -> may be opened
    answers: bool = False  # its own library (NVML) could be asked
    error: str = ""  # what that library said instead


@dataclass(frozen=True)
class Gpu:
    """A GPU as this PyTorch sees it. Sizes in bytes."""

    name: str  # what torch.device() takes
    kind: str
    index: int | None = None
    model: str | None = None
    uuid: str | None = None
    arch: str | None = None  # sm_90, gfx942
    total_bytes: int | None = None
    free_bytes: int | None = None
    holders: tuple[Holder, ...] = ()
    driver_version: str | None = None
    bf16: bool = False
    tf32: bool = False
    computes: bool | None = None  # None: not tried
    error: str = ""  # what it raised, or how its result was wrong

    @property
    def asked_as(self) -> str:
        """Return the name under which a user asks for it: rocm:0 for what torch calls cuda:0."""
        return self.name if self.index is None else f"{self.kind}:{self.index}"


@dataclass(frozen=True)
class Machine:
    """All that was seen of a machine before any of it is judged."""

    torch_version: str
    system: str = "Linux"
    arch: str = "x86_64"
    os_version: str = ""
    cpu_model: str | None = None
    ram_total_bytes: int | None = None
    ram_free_bytes: int | None = None
    adapters: tuple[Adapter, ...] = ()
    drivers: Mapping[str, Driver] = field(default_factory=dict)  # by vendor
    driver_cuda: tuple[int, int] | None = None  # the newest CUDA that the driver speaks
    uuids: tuple[str, ...] | None = None  # GPU- and MIG-, in NVML's order; None: not known
    built: Mapping[str, str] = field(default_factory=dict)  # kind -> version; empty: CPU build
    arch_list: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)  # those in VISIBILITY that are set
    gpus: tuple[Gpu, ...] = ()
    torch_error: str = ""  # what PyTorch said while it looked for GPUs


FULL = "its memory is full"
FREE_IT = "end the processes that hold it, or choose another device"
# In a container those of the host are not seen.
TOO_SMALL = "no process is seen to hold it, so it may be too small: choose another device"
LOW_SHARE = 0.1  # with less than this share free, a run is likely to end in an OOM


def _is_runnable(code: str, arch: str) -> bool:
    """Return whether machine code (sm_) or PTX (compute_) for `code` runs on a GPU of `arch`.

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
    """Check whether this PyTorch has code for the GPU's architecture; computing is proof that
    it does."""
    name = f"architecture {gpu.asked_as}"
    if not gpu.arch or not arch_list:
        return Check(name, None, "does not apply, or is not known")
    fits = gpu.arch in arch_list or any(_is_runnable(code, gpu.arch) for code in arch_list)
    if fits or gpu.computes:
        return Check(name, True, f"{gpu.arch} runs code for {' '.join(arch_list)}")
    if any("generic" in code for code in arch_list):  # ROCm's generic targets: no rule known here
        return Check(name, None, f"{gpu.arch} may run code for {' '.join(arch_list)}")
    finding = f"{gpu.asked_as} is {gpu.arch}; this PyTorch has code for {' '.join(arch_list)} only"
    return Check(name, False, finding, f"install a PyTorch build for {gpu.arch}")


def format_gib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**3:.1f}"


def describe_holders(holders: tuple[Holder, ...]) -> str:
    """Describe the three largest holders, as in ", held by pid 123 python"; empty where nobody
    is known."""
    if not holders:
        return ""
    largest = sorted(holders, key=lambda h: -(h.bytes or 0))
    said = ", ".join(f"pid {h.pid} {h.name or ''}".rstrip() for h in largest[:3])
    return f", held by {said}" + (f" and {len(holders) - 3} more" if len(holders) > 3 else "")


def check_memory(gpu: Gpu) -> Check:
    """Check whether the GPU's memory is free, and if not, who holds it."""
    name = f"memory {gpu.asked_as}"
    if gpu.free_bytes is None or not gpu.total_bytes:
        return Check(name, None, f"the free memory of {gpu.asked_as} is not known")
    share = f"{format_gib(gpu.free_bytes)} of {format_gib(gpu.total_bytes)} GiB free"
    finding = f"{gpu.asked_as} has {share}{describe_holders(gpu.holders)}"
    if gpu.free_bytes >= LOW_SHARE * gpu.total_bytes:
        return Check(name, True, finding)
    return Check(name, False, finding, FREE_IT if gpu.holders else TOO_SMALL)


def check_compute(gpu: Gpu) -> Check:
    """Check whether a small product on the GPU equals the CPU's."""
    name = f"compute {gpu.asked_as}"
    if gpu.computes is None:
        return Check(name, None, f"{gpu.asked_as} was not tried: it was not needed")
    if gpu.computes:
        return Check(name, True, f"a product computed on {gpu.asked_as} equals the CPU's")
    remedy = "try again in a new process; if it stays, check the GPU (nvidia-smi, dmesg)"
    if gpu.error == FULL:
        remedy = FREE_IT if gpu.holders else TOO_SMALL
    return Check(name, False, f"{gpu.asked_as} failed a small product: {gpu.error}", remedy)


VENDORS = {"cuda": "NVIDIA", "rocm": "AMD", "xpu": "Intel", "mps": "Apple"}
KINDS = {vendor: kind for kind, vendor in VENDORS.items()}
BUILDS = {"cuda": "CUDA", "rocm": "ROCm", "xpu": "XPU (oneAPI)", "mps": "MPS (Metal)"}
VISIBILITY = {
    "NVIDIA": ("CUDA_VISIBLE_DEVICES",),
    "AMD": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "Intel": ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
}
PASS_IN = {  # what docker needs to show a GPU to a container
    "NVIDIA": "--gpus all",
    "AMD": "--device /dev/kfd --device /dev/dri",
    "Intel": "--device /dev/dri",
}
NO_GPU = "does not apply: there is no GPU"


def check_gpu(
    vendor: str | None, adapters: tuple[Adapter, ...], *, system: str, arch: str
) -> Check:
    """Check whether there is a GPU; of this vendor, if one is given."""
    fitting = [a for a in adapters if vendor in (None, a.vendor)]
    if fitting:
        return Check("gpu", True, ", ".join(f"{a.vendor} GPU ({a.where})" for a in fitting))
    who = vendor or "NVIDIA, AMD, Intel or Apple"
    missing = f"no {who} GPU was found"
    if system == "Darwin" and arch != "arm64" and vendor in (None, "Apple"):
        why = f"{missing}: this is an Intel Mac, or a Python translated by Rosetta"
        return Check("gpu", False, why, "on an Apple silicon Mac, install an arm64 Python")
    if vendor == "Apple" and system != "Darwin":
        return Check("gpu", False, missing, "use auto or cpu; mps needs a Mac with Apple silicon")
    if system not in ("Linux", "Darwin"):  # only the driver and PyTorch could be asked
        return Check("gpu", None, missing, "install the driver of the GPU, if there is one")
    return Check(
        "gpu", False, missing, "in a container, pass it in (docker run --gpus all); else attach one"
    )


def check_driver(vendor: str | None, driver: Driver, *, seen: bool, macos: str = "") -> Check:
    """Check whether a driver answers, and which; `seen` by PyTorch is proof enough."""
    if vendor is None:
        return Check("driver", None, NO_GPU)
    if vendor == "Apple":
        return Check("driver", None, f"does not apply: Metal is part of macOS {macos}".rstrip())
    which = f"{vendor} driver {driver.version or '(version not known)'}"
    if seen or driver.answers:
        return Check("driver", True, which)
    if not driver.loaded:
        remedy = f"install the {vendor} driver, then restart"
        return Check("driver", False, f"no {vendor} driver is loaded", remedy)
    if not driver.nodes or (vendor == "AMD" and not any("kfd" in node for node in driver.nodes)):
        finding = f"{which} is loaded, but its device files are not here"
        remedy = f"a container must be given them: docker run {PASS_IN[vendor]}"
        return Check("driver", False, finding, remedy)
    closed = [node for node, opens in driver.nodes.items() if not opens]
    if closed:
        remedy = "add this user to the groups render and video, then log in again"
        if vendor == "NVIDIA":
            remedy = "let this user read and write it; a container needs --gpus all"
        return Check("driver", False, f"{which}: {closed[0]} may not be opened", remedy)
    if "mismatch" in driver.error.lower():
        remedy = "restart the machine: the driver was updated while it ran"
        return Check("driver", False, f"{which}: {driver.error}", remedy)
    return Check("driver", None if driver.error else True, f"{which} {driver.error}".rstrip())


def check_build(vendor: str | None, torch_version: str, built: Mapping[str, str]) -> Check:
    """Check whether this PyTorch was built for the vendor's GPUs."""
    has = " and ".join(f"{BUILDS[kind]} {version}".rstrip() for kind, version in built.items())
    if vendor is None:
        text = f"this PyTorch ({torch_version}) was built for {has or 'the CPU only'}"
        return Check("build", None, f"{text}; there is no GPU to need more")
    kind = KINDS[vendor]
    if kind in built:
        return Check("build", True, f"this PyTorch ({torch_version}) was built for {has}")
    instead = f", for {has}" if has else ""
    finding = f"this PyTorch ({torch_version}) was built without {BUILDS[kind]}{instead}"
    if kind == "mps":
        return Check("build", False, finding, "install PyTorch for macOS on arm64")
    article = "an" if kind == "xpu" else "a"
    remedy = f"install {article} {BUILDS[kind]} build (https://pytorch.org/get-started/locally)"
    return Check("build", False, finding, remedy)


def check_cuda_version(
    cuda: str | None, driver_cuda: tuple[int, int] | None, *, computes: bool
) -> Check:
    """Check whether the driver supports the CUDA version of this PyTorch; a GPU that computes
    is proof that it does."""
    name = "cuda version"
    if not cuda:
        return Check(name, None, "does not apply: this PyTorch was built without CUDA")
    if driver_cuda is None:
        return Check(name, True if computes else None, f"PyTorch CUDA {cuda}, driver's not known")
    major, minor = (int(part) for part in cuda.split(".")[:2])
    knows = f"{driver_cuda[0]}.{driver_cuda[1]}"
    if major > driver_cuda[0] and not computes:
        finding = f"this PyTorch's CUDA {cuda} is newer than the driver's CUDA {knows}"
        remedy = f"update the NVIDIA driver, or install a build for CUDA {driver_cuda[0]}"
        return Check(name, False, finding, remedy)
    finding = f"PyTorch CUDA {cuda}, driver CUDA {knows}"
    if (major, minor) > driver_cuda:  # docs.nvidia.com: CUDA minor version compatibility
        finding += "; within one major version a newer minor one runs too"
    return Check(name, True, finding)


def _match_entry(text: str, uuids: tuple[str, ...] | None) -> str:
    """Return the GPU that an entry of CUDA_VISIBLE_DEVICES names; empty where there is no such
    one."""
    number = re.match(r"\+?(\d+)", text)  # CUDA reads like strtoul: 1gpu is 1
    if number:
        index, gpus = int(number[1]), [u for u in uuids or () if u.startswith("GPU-")]
        return str(index) if uuids is None or index < len(gpus) else ""
    if not text.startswith(("GPU-", "MIG-")):
        return ""
    if uuids is None:
        return text
    start = text.removeprefix("MIG-").split("/")[0] if text.startswith("MIG-GPU-") else text
    matches = [uuid for uuid in uuids if uuid.startswith(start)]
    if len(matches) != 1:  # none, or a beginning shared by two
        return ""
    return text if text.startswith("MIG-") else matches[0]


def _describe_hiding(value: str, uuids: tuple[str, ...] | None) -> str:
    """Describe how a list of visible devices hides GPUs by mistake or altogether; empty where
    it does not."""
    left: list[str] = []
    for text in (part.strip() for part in value.split(",")):
        uuid = _match_entry(text, uuids)
        if uuid and uuid in left:
            return f"names {text} twice, which hides every GPU"
        if uuid:
            left.append(uuid)
            continue
        if not left and text in ("", "-1"):
            return "hides every GPU"
        if text == "-1":  # a way to end the list
            return ""
        kept = f"only {', '.join(left)} is left" if left else "no GPU is left"
        return f"names {text!r}, which is not here; the list ends there without a word, and {kept}"
    return ""


def check_visible(
    vendor: str | None, env: Mapping[str, str], *, uuids: tuple[str, ...] | None, seen: bool
) -> Check:
    """Check whether an environment variable hides the GPU, or names one that is not there."""
    variables = VISIBILITY.get(vendor or "", ())
    if not variables:
        return Check("visibility", None, f"does not apply: {vendor or 'no'} GPU")
    values = {name: env[name] for name in variables if name in env}
    if not values:
        return Check("visibility", True, f"{variables[0]} is not set: no GPU is hidden")
    said = ", ".join(f"{name}={value!r}" for name, value in values.items())
    if vendor == "Intel":
        return Check("visibility", True if seen else None, f"{said} is set")
    for name, value in values.items():
        problem = _describe_hiding(value, uuids if vendor == "NVIDIA" else None)
        if problem:
            remedy = f"unset {name}, or set it to GPUs that are here, such as 0"
            return Check("visibility", False, f"{name}={value!r} {problem}", remedy)
    is_known = seen or (vendor == "NVIDIA" and uuids is not None)
    return Check("visibility", True if is_known else None, f"{said} is set")


def check_pytorch(vendor: str | None, gpus: tuple[Gpu, ...], *, built: bool, error: str) -> Check:
    """Check whether PyTorch sees a GPU; where it does not, report its own words."""
    if gpus:
        return Check("pytorch", True, "PyTorch sees " + ", ".join(g.asked_as for g in gpus))
    if vendor is None or not built:
        return Check("pytorch", None, NO_GPU if vendor is None else "does not apply: see build")
    finding = "PyTorch sees no GPU" + (f": {error}" if error else "")
    remedy = "see the checks above, then run the vendor's own tool (nvidia-smi, rocm-smi, xpu-smi)"
    if vendor == "Apple":
        remedy = "update macOS; a virtual machine may have no Metal"
    return Check("pytorch", False, finding, remedy)


def find_vendor(machine: Machine, kind: str | None) -> str | None:
    """Return the vendor that the checks are about: that of the requested kind, else of a GPU
    here that PyTorch is built for, else of the first GPU here."""
    if kind:
        return "AMD" if kind == "cuda" and "rocm" in machine.built else VENDORS[kind]
    vendors = {a.vendor for a in machine.adapters} | {VENDORS[g.kind] for g in machine.gpus}
    here = [v for v in VENDORS.values() if v in vendors]
    return next((v for v in here if KINDS[v] in machine.built), here[0] if here else None)


def run_checks(machine: Machine, kind: str | None = None) -> tuple[Check, ...]:
    """Return the results of all checks, in the order in which they would stop a run."""
    vendor = find_vendor(machine, kind)
    gpus = tuple(g for g in machine.gpus if VENDORS[g.kind] == vendor)
    seen = bool(gpus)
    here = seen or any(a.vendor == vendor for a in machine.adapters)
    owner = vendor if here else None  # a GPU that is not here has no driver to miss
    driver = machine.drivers.get(vendor or "", Driver())
    requested = vendor if kind else None
    checks = [
        check_gpu(requested, machine.adapters, system=machine.system, arch=machine.arch),
        check_driver(owner, driver, seen=seen, macos=machine.os_version),
        check_build(vendor, machine.torch_version, machine.built),
        check_visible(owner, machine.env, uuids=machine.uuids, seen=seen),
        check_pytorch(
            owner, gpus, built=KINDS.get(vendor or "") in machine.built, error=machine.torch_error
        ),
    ]
    if vendor == "NVIDIA":
        computes = any(g.computes for g in gpus)
        cuda = machine.built.get("cuda")
        checks.insert(3, check_cuda_version(cuda, machine.driver_cuda, computes=computes))
    for gpu in gpus:
        checks += [check_architecture(gpu, machine.arch_list), check_memory(gpu)]
        checks.append(check_compute(gpu))
    return tuple(checks)
