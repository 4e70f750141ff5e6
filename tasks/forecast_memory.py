"""Forecasts the memory of a training, for a person who asks before training: on this
machine's device, with what is free and what a comparable run has taken; or on GPUs that are
not here, with the largest batches that would fit, from the same forecast and a table of how
much memory each has. It trains nothing and opens no run; the prepared data stays in its
cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
from headroom.training.forecast import Forecast, find_largest_micro_batch, forecast_training
from headroom.training.loop_forecast import TAKEN_MIB, make_absent_gpu
from headroom.training.plan import make_plan

MIB = 1024**2
MOST_DOUBLINGS = 20
PEAK = "memory/run_peak_allocated_mib"


@dataclass(frozen=True)
class GpuForecast:
    """The forecast of a training on a GPU that is not here."""

    name: str
    room_mib: float
    needed_mib: float  # of the batch that was asked for, in one piece
    micro_batch: int | None  # the largest that fits; None: not even one row
    batch: int | None  # the largest of the asked one and its doubles that fits in one piece

    @property
    def fits(self) -> bool:
        return self.needed_mib <= self.room_mib


def forecast_on_gpus(config: RunConfig, asked: dict[str, float]) -> list[GpuForecast]:
    """Return the forecast for each of these GPUs.

    Raises what a training with these settings is refused by.
    """
    check_imports(config)
    check_data(config.data)
    here = detect_best_device("cpu")
    data = prepare_dataset(config.data, batch_size=config.train.batch_size, seed=config.train.seed)
    check_plan(make_plan(config, here, data))
    return [_forecast_on_gpu(config, data, here, name, size) for name, size in asked.items()]


def _forecast_on_gpu(
    config: RunConfig, data: DataFacts, here: DeviceFacts, name: str, size_mib: float
) -> GpuForecast:
    room = max(0, int((size_mib - TAKEN_MIB) * MIB))
    device = make_absent_gpu(here, room)
    whole = override_config(config, {"train.accumulate": 1})

    def needed(rows: int) -> int:
        larger = override_config(whole, {"train.batch_size": rows})
        return forecast_training(make_plan(larger, device, data)).needed_bytes

    requested_rows, largest = config.train.batch_size, None
    first = takes = needed(requested_rows)
    for rows in (requested_rows << n for n in range(MOST_DOUBLINGS)):
        takes = takes if rows == requested_rows else needed(rows)
        if takes > room:
            break
        largest = rows
        if 2 * rows > data.train_rows:
            break
    micro = largest
    if micro is None:
        micro = find_largest_micro_batch(make_plan(whole, device, data), room)
    return GpuForecast(name, room / MIB, first / MIB, micro, largest)


def make_gpu_table(found: list[GpuForecast], config: RunConfig) -> Table:
    """Return a table with a line for each GPU."""
    rows = config.train.batch_size
    table = Table("", title=f"a batch of {rows} rows on GPUs that are not here")
    table.title_justify = "left"
    for name in ("room", "takes", "left", "largest batch", "largest micro-batch"):
        table.add_column(name, justify="right")
    table.add_column("fits")
    for one in found:
        table.add_row(
            one.name,
            format_mebibytes(one.room_mib),
            format_mebibytes(one.needed_mib),
            format_mebibytes(one.room_mib - one.needed_mib) if one.fits else "",
            f"{one.batch:,}" if one.batch else "none in one piece",
            f"{one.micro_batch:,}" if one.micro_batch else "none",
            "yes" if one.fits else "NO",
        )
    return table


@dataclass(frozen=True)
class MemoryForecast:
    """A forecast beside the memory that is free."""

    device: DeviceFacts
    told: Forecast
    room_bytes: float  # infinite where nobody tells
    largest: int | None  # rows of the largest micro-batch that fits; None: not even one
    past_mib: float | None  # the peak of the newest finished run that is alike

    @property
    def fits(self) -> bool:
        return self.told.needed_bytes <= self.room_bytes

    def table(self) -> Table:
        """Return the forecast as a table for the terminal."""
        table = Table("", "MiB", "", title=f"memory of {self.device.name}", title_justify="left")
        table.columns[1].justify = "right"
        forecast = self.told
        table.add_row(
            "predicted peak", _format_mib(forecast.peak_bytes), f"in {forecast.phase}", style="bold"
        )
        for owner, size in sorted(forecast.owners.items(), key=lambda item: -item[1]):
            table.add_row(f"  {owner}", _format_mib(size), "")
        table.add_section()
        for phase, most in forecast.phases.items():
            table.add_row(f"  peak of {phase}", _format_mib(most), "")
        table.add_section()
        is_known = math.isfinite(self.room_bytes)
        table.add_row(
            "free", _format_mib(self.room_bytes) if is_known else "", "" if is_known else "not told"
        )
        if forecast.note:
            table.caption = forecast.note
        table.add_row("fits", "", "yes" if self.fits else "NO")
        largest = "none" if self.largest is None else f"{self.largest} rows"
        table.add_row("largest micro-batch that fits", "", largest)
        if self.past_mib is not None:
            table.add_row("a run alike took", f"{self.past_mib:,.2f}", "")
        return table


def forecast_memory(config: RunConfig) -> MemoryForecast:
    """Return the memory forecast of this training.

    Raises what a training with these settings is refused by.
    """
    device = detect_best_device(config.device.name, require=config.device.require)
    plan = prepare_and_check(config, device)
    free = device.free_bytes if device.kind == "cpu" else read_free_bytes(device)
    room = compute_room_bytes(config.memory.limit_mib, free)
    place = read_tracking_settings()
    place = place.model_copy(update={"experiment": config.run.experiment or place.experiment})
    past = read_past_metrics(place, plan.comparable, [PEAK])
    return MemoryForecast(
        device=device,
        told=forecast_training(plan),
        room_bytes=room,
        largest=find_largest_micro_batch(plan, room),
        past_mib=past.get(PEAK),
    )


def _format_mib(size_bytes: float) -> str:
    return f"{size_bytes / MIB:,.2f}"
