"""Under which conditions a figure was measured, and where it is kept: a number without them is a
rumour.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

import psutil
import torch

PACKAGES = ("torch", "prefect", "mlflow", "lightning", "accelerate", "numpy", "scikit-learn")
RESULTS = Path(__file__).parent / "results"


def conditions() -> dict[str, str]:
    """Machine, versions, threads and load, as they are now."""
    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "gpu": _gpu() or "none",
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "torch threads": str(torch.get_num_threads()),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def publish(kind: str, title: str, lines: Iterable[str], folder: Path = RESULTS) -> None:
    """Print title, conditions and lines as they come, and keep them by kind, date and device."""
    shown: list[str] = []
    heading = [f"# {title}, {date.today()}", ""]
    heading += [f"- {name}: {value}" for name, value in conditions().items()]
    for line in chain(heading, lines):
        print(line, flush=True)
        shown.append(line)
    device = re.sub(r"[^a-z0-9]+", "-", (_gpu() or "cpu").lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{kind}-{date.today()}-{device}.md"
    file.write_text("\n".join(shown) + "\n")
    print(f"\nkept in {file}")


def publish_whole(kind: str, title: str, lines: Iterable[str], *, is_whole: bool) -> None:
    """Print the lines; those of a measurement that is whole are kept as well."""
    if is_whole:
        publish(kind, title, lines)
        return
    for line in lines:
        print(line, flush=True)


def _gpu() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
