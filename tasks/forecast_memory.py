"""Forecasts the memory of a training, for a person who asks before training: on this
machine's device, with what is free and what a comparable run has taken; or on GPUs that are
not here, with the largest batches that would fit, from the same forecast and a table of how
much memory each has. It trains nothing and opens no run; the prepared data stays in its
cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from rich.table import Table

from headroom.base.facts import DataFacts, DeviceFacts
from headroom.base.units import format_mebibytes
from headroom.data.preparation import check_data, prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.device.memory_limit import compute_room_bytes
from headroom.run.preflight import prepare_and_check
from headroom.settings.read_settings import check_imports, override_config
from headroom.settings.run_config import RunConfig
from headroom.tracking.ask_mlflow import read_past_metrics
from headroom.tracking.tracking_settings import read_tracking_settings
from headroom.training.admission import read_free_bytes
from headroom.training.check_training import check_plan
from headroom.training.forecast import Forecast, find_largest_rows
from headroom.training.gpu_fit import (
    GpuFit,
    describe_memory,
    make_absent_gpu,
    make_memory_table,
)
from headroom.training.plan import make_plan
from headroom.training.plan_forecast import find_largest_micro_batch, forecast_training
from headroom.watch.allocation_log import MIB

MOST_DOUBLINGS = 20
PEAK = "memory/run_peak_allocated_mib"


def forecast_on_gpus(config: RunConfig, sizes_mib: Mapping[str, float]) -> dict[str, GpuFit]:
    """Return whether the training fits each of these GPUs, which need not be here.

    Raises what a training with these settings is refused by.
    """
    check_imports(config)
    check_data(config.data)
    here = detect_best_device("cpu")
    data = prepare_dataset(config.data, batch_size=config.train.batch_size, seed=config.train.seed)
    check_plan(make_plan(config, here, data))
    whole = override_config(config, {"train.accumulate": 1})
    return {name: _fit_gpu(whole, data, make_absent_gpu(size)) for name, size in sizes_mib.items()}


def _fit_gpu(config: RunConfig, data: DataFacts, gpu: DeviceFacts) -> GpuFit:
    rows, room_bytes = config.train.batch_size, gpu.free_bytes or 0

    @cache
    def count_needed(rows: int) -> int:
        larger = override_config(config, {"train.batch_size": rows})
        return forecast_training(make_plan(larger, gpu, data)).needed_bytes

    batch = micro_batch = None
    if count_needed(rows) <= room_bytes:
        most = min(data.train_rows, rows << (MOST_DOUBLINGS - 1))
        batch = micro_batch = find_largest_rows(count_needed, room_bytes, rows=rows, most=most)
    else:
        micro_batch = find_largest_micro_batch(make_plan(config, gpu, data), room_bytes)
    return GpuFit(room_bytes / MIB, count_needed(rows) / MIB, batch, micro_batch)


@dataclass(frozen=True)
class MemoryForecast:
    """A forecast beside the memory that is free."""

    device: DeviceFacts
    memory: Forecast
    room_bytes: float  # infinite where nobody tells
    largest: int | None  # rows of the largest micro-batch that fits; None: not even one
    past_mib: float | None  # the peak of the newest finished run that is alike

    @property
    def fits(self) -> bool:
        return self.memory.needed_bytes <= self.room_bytes

    def describe(self) -> dict[str, Any]:
        """Return the forecast for a program; what nobody tells is null."""
        is_known = math.isfinite(self.room_bytes)
        return {
            "fits": self.fits,
            "device": self.device.name,
            "room_mib": self.room_bytes / MIB if is_known else None,
            "largest_micro_batch": self.largest,
            "alike_mib": self.past_mib,
            "memory": describe_memory(self.memory),
        }

    def make_table(self) -> Table:
        """Return the forecast as a table for the terminal."""
        table = make_memory_table(self.memory, f"memory of {self.device.name}")
        table.add_section()
        is_known = math.isfinite(self.room_bytes)
        table.add_row("free", format_mebibytes(self.room_bytes / MIB) if is_known else "not told")
        if self.memory.note:
            table.caption = self.memory.note
        table.add_row("fits", "yes" if self.fits else "NO")
        largest = "none" if self.largest is None else f"{self.largest:,} rows"
        table.add_row("largest micro-batch that fits", largest)
        if self.past_mib is not None:
            table.add_row("a run alike took", format_mebibytes(self.past_mib))
        return table


def forecast_memory(config: RunConfig) -> MemoryForecast:
    """Return the memory forecast of this training.

    Raises what a training with these settings is refused by.
    """
    device = detect_best_device(config.device.name)
    plan = prepare_and_check(config, device)
    free = device.free_bytes if device.kind == "cpu" else read_free_bytes(device)
    room = compute_room_bytes(config.memory.limit_mib, free)
    place = read_tracking_settings()
    place = place.model_copy(update={"experiment": config.run.experiment or place.experiment})
    past = read_past_metrics(place, plan.comparable, [PEAK])
    return MemoryForecast(
        device=device,
        memory=forecast_training(plan),
        room_bytes=room,
        largest=find_largest_micro_batch(plan, room),
        past_mib=past.get(PEAK),
    )
