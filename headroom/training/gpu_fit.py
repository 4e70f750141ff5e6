"""Which GPUs a step would fit, that need not be here: their names and sizes, the room that they
leave to a process, and the tables that tell it. It refuses names that it does not know.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from typing import Any

from rich.table import Table

from headroom.base.facts import DeviceFacts
from headroom.base.units import format_mebibytes, make_printable, parse_mebibytes
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


def parse_gpu_sizes(text: str, *, setting: str = "--for") -> dict[str, float]:
    """Return the MiB of each GPU that was named: names of SIZES_MIB, or sizes such as 24GiB.

    setting: that named them. Raises ConfigError.
    """
    sizes, problems = {}, []
    for name in (word.strip().lower() for word in text.split(",")):
        if name in SIZES_MIB:
            sizes[name] = float(SIZES_MIB[name])
        elif size_mib := parse_mebibytes(name):
            sizes[name] = size_mib
        else:
            near = get_close_matches(name, SIZES_MIB, 1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(SIZES_MIB)}"
            shown = make_printable(name, limit=60)
            problems.append(f"{setting} {shown}: is neither a GPU that is known nor 24GiB; {hint}")
    if problems:
        raise ConfigError(*problems)
    return sizes


def parse_asked_sizes(
    listed: str | None, required: Sequence[str]
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return the MiB of each GPU of --for and --require, and the names that are required. Where
    neither names one, those that are usual. Raises ConfigError."""
    needed = parse_gpu_sizes(",".join(required), setting="--require") if required else {}
    if listed is None and not needed:
        listed = ",".join(USUAL_GPUS)
    others = {} if listed is None else parse_gpu_sizes(listed)
    return {**others, **needed}, tuple(needed)


def find_misfits(needed_bytes: int, sizes_mib: Mapping[str, float]) -> list[str]:
    """Return a sentence for each of these GPUs that a step does not fit."""
    rooms = {name: _count_room_bytes(size) for name, size in sizes_mib.items()}
    return [
        describe_misfit(name, needed_bytes / MIB, room_bytes / MIB)
        for name, room_bytes in rooms.items()
        if needed_bytes > room_bytes
    ]


def describe_misfit(name: str, needed_mib: float, room_mib: float) -> str:
    """Return the sentence that a step does not fit this GPU."""
    return (
        f"a step does not fit {name}: it needs {format_mebibytes(needed_mib)}, "
        f"and a process has {format_mebibytes(room_mib)} there"
    )


def _count_room_bytes(size_mib: float) -> int:
    return max(0, int((size_mib - TAKEN_MIB) * MIB))


def make_absent_gpu(size_mib: float) -> DeviceFacts:
    """Return the facts of a CUDA GPU of this size that need not be here, with all of its room
    free."""
    room_bytes = _count_room_bytes(size_mib)
    return replace(
        detect_best_device("cpu"),
        name="cuda:0",
        kind="cuda",
        index=0,
        total_bytes=room_bytes,
        free_bytes=room_bytes,
        bf16=True,
    )


def describe_fits(gpus: Mapping[str, GpuFit], required: Sequence[str]) -> dict[str, Any]:
    """Return the answer for a program: if it fits all that are required, or any where none is; and
    each by its name."""
    by_name = {name: {"fits": gpu.fits, **asdict(gpu)} for name, gpu in gpus.items()}
    return {"fits": _is_well(gpus, required), "required": list(required), "gpus": by_name}


def conclude_fits(gpus: Mapping[str, GpuFit], required: Sequence[str]) -> int:
    """Return the exit code: 0 where it fits all that are required, or any where none is; else 1,
    with a sentence on stderr, or 2."""
    for name in required:
        if not gpus[name].fits:
            sentence = describe_misfit(name, gpus[name].needed_mib, gpus[name].room_mib)
            print(f"--require: {sentence}", file=sys.stderr)
    if _is_well(gpus, required):
        return 0
    return 1 if required else 2


def _is_well(gpus: Mapping[str, GpuFit], required: Sequence[str]) -> bool:
    if required:
        return all(gpus[name].fits for name in required)
    return any(gpu.fits for gpu in gpus.values())


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
        table.add_row(group.label, *sizes, _format_size(group.bytes))
    return table


def _format_rows(rows: int | None) -> str:
    return "none" if rows is None else f"{rows:,}"


def _format_size(size_bytes: float) -> str:
    return format_mebibytes(size_bytes / MIB)
