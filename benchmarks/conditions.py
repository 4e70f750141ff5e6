"""Under which conditions a figure was measured: a number without them is a rumour."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

import psutil
import torch

PACKAGES = ("torch", "prefect", "mlflow", "numpy")


def conditions() -> dict[str, str]:
    """Machine, versions, threads and load, as they are now."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "gpu": gpu,
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "torch threads": str(torch.get_num_threads()),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
