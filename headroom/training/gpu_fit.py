"""Which GPUs a step would fit, that need not be here: their names and sizes, the room that they
leave to a process, and the tables that tell it. It refuses names that it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from typing import Any

from rich.table import Table
from rich.text import Text

from headroom.base.facts import DeviceFacts
from headroom.base.units import format_mebibytes, make_printable
from headroom.device.detection import detect_best_device
from headroom.settings.read_settings import ConfigError
from headroom.training.forecast import Forecast
from headroom.watch.allocation_log import MIB
from headroom.watch.layer_groups import COLUMNS, group_layers
from headroom.watch.layers import describe_layers

# MiB in all as nvidia-smi tells them: https://github.com/modal-labs/modal-client/pull/2797
SIZES_MIB = {
    "t4": 15360,
    "a10": 23028,
    "a10g": 23028,
    "l4": 23034,
    "l40s": 46068,
    "a100-40": 40960,
    "a100-80": 81920,
    "h100": 81559,
}
# What the driver keeps (some 430 to 570 MiB: PyTorch told 14.58 GiB of a T4 and 79.10 of an H100)
# and the context of a process takes.
TAKEN_MIB = 1024
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|mib)", re.IGNORECASE)
USUAL_GPUS = ("t4", "l4", "a100-40", "a100-80", "h100")


@dataclass(frozen=True)
class GpuFit:
    """The answer whether a step fits a GPU, and how many rows do."""

    room_mib: float
    needed_mib: float  # of the batch that was asked for, in one piece
    batch: int | None  # rows of the largest that fits in one piece; None: not even one
    micro_batch: int | None = None  # rows of the largest, where a batch may come in several

    @property
    def fits(self) -> bool:
        return self.needed_mib <= self.room_mib


def parse_gpu_sizes(text: str) -> dict[str, float]:
    """Return the MiB of each GPU that was named: names of SIZES_MIB, or sizes such as 24GiB.

    Raises ConfigError.
    """
    sizes, problems = {}, []
    for name in (word.strip().lower() for word in text.split(",")):
        size = _SIZE.fullmatch(name)
        if name in SIZES_MIB:
            sizes[name] = float(SIZES_MIB[name])
        elif size is not None and float(size[1]) > 0:
            sizes[name] = float(size[1]) * (1024 if size[2] == "gib" else 1)
        else:
            near = get_close_matches(name, SIZES_MIB, 1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(SIZES_MIB)}"
            shown = make_printable(name, limit=60)
            problems.append(f"--for {shown}: is neither a GPU that is known nor 24GiB; {hint}")
    if problems:
        raise ConfigError(*problems)
    return sizes


def make_absent_gpu(size_mib: float) -> DeviceFacts:
    """Return the facts of a CUDA GPU of this size that need not be here, with all of its room
    free."""
    room_bytes = max(0, int((size_mib - TAKEN_MIB) * MIB))
    return replace(
        detect_best_device("cpu"),
        name="cuda:0",
        kind="cuda",
        index=0,
        total_bytes=room_bytes,
        free_bytes=room_bytes,
        bf16=True,
    )


def describe_fits(gpus: Mapping[str, GpuFit]) -> dict[str, Any]:
    """Return the answer for a program: if it fits any of them, and each by its name."""
    by_name = {name: {"fits": gpu.fits, **asdict(gpu)} for name, gpu in gpus.items()}
    return {"fits": any(gpu.fits for gpu in gpus.values()), "gpus": by_name}


def make_gpu_table(gpus: Mapping[str, GpuFit], rows: int) -> Table:
    """Return a table with a line for each GPU."""
    table = Table("", title=f"a batch of {rows:,} rows", title_justify="left")
    has_parts = any(gpu.micro_batch is not None for gpu in gpus.values())
    for name in ("room", "takes", "left", "largest batch"):
        table.add_column(name, justify="right")
    if has_parts:
        table.add_column("largest micro-batch", justify="right")
    table.add_column("fits")
    for name, gpu in gpus.items():
        table.add_row(
            name,
            format_mebibytes(gpu.room_mib),
            format_mebibytes(gpu.needed_mib),
            format_mebibytes(gpu.room_mib - gpu.needed_mib) if gpu.fits else "",
            _format_rows(gpu.batch),
            *([_format_rows(gpu.micro_batch)] if has_parts else []),
            "yes" if gpu.fits else "NO",
        )
    return table


def describe_memory(forecast: Forecast) -> dict[str, Any]:
    """Return what is forecast for a program, in MiB: the peak and its phase, and what it is of."""
    return {
        "peak_mib": forecast.peak_bytes / MIB,
        "needed_mib": forecast.needed_bytes / MIB,
        "phase": forecast.phase,
        "owners_mib": {owner: size / MIB for owner, size in forecast.owners.items()},
        "phases_mib": {phase: size / MIB for phase, size in forecast.phases.items()},
        "layers_mib": {
            path: {owner: size / MIB for owner, size in held.items()}
            for path, held in forecast.layers.items()
        },
        "micro_batch": forecast.micro_batch,
        "note": forecast.note,
    }


def make_memory_table(forecast: Forecast, title: str) -> Table:
    """Return a table of what is forecast, by owner and by phase."""
    table = Table("", "", title=title, title_justify="left", show_header=False)
    table.columns[1].justify = "right"
    table.add_row(
        f"predicted peak, in {forecast.phase}", _format_size(forecast.peak_bytes), style="bold"
    )
    for owner, size in sorted(forecast.owners.items(), key=lambda item: -item[1]):
        table.add_row(f"  {owner}", _format_size(size))
    table.add_section()
    for phase, most in forecast.phases.items():
        table.add_row(f"peak of {phase}", _format_size(most))
    return table


def make_layer_table(forecast: Forecast) -> Table:
    """Return a table of the layers that take the most at the peak."""
    told = describe_layers(forecast.owners, forecast.layers)
    table = Table("", title=f"layers at the peak, in {forecast.phase}", title_justify="left")
    for column in (*COLUMNS, "in all"):
        table.add_column(column, justify="right", no_wrap=True)
    for group in group_layers(told):
        sizes = [_format_size(size) if size else "" for size in group.split().values()]
        label = Text(make_printable(group.label, limit=80))  # a path is no markup
        table.add_row(label, *sizes, _format_size(group.bytes))
    return table


def _format_rows(rows: int | None) -> str:
    return "none" if rows is None else f"{rows:,}"


def _format_size(size_bytes: float) -> str:
    return format_mebibytes(size_bytes / MIB)
