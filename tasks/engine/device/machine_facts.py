"""What was seen of a machine and its GPUs before any of it is judged: frozen records that a test
can write down for a machine that is not at hand. It looks at nothing itself and refuses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
        """The name under which a user asks for it: rocm:0 for what torch calls cuda:0."""
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
