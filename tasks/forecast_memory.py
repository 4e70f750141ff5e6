"""What a training will take of its device, for a person who asks before training: the forecast,
what is free, and what a run alike has taken, as a table. It trains nothing and opens no run; the
prepared data stays in its cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.engine.base.facts import DeviceFacts
from tasks.engine.device.detection import detect
from tasks.engine.device.memory_limit import room_bytes
from tasks.engine.forecast.admission import free_bytes
from tasks.engine.forecast.forecast import Forecast, forecast, largest_micro_batch
from tasks.engine.settings.run_config import RunConfig
from tasks.preflight import looked_at
from tasks.tracking.past_runs import measured
from tasks.tracking.where import where

if TYPE_CHECKING:
    from rich.table import Table

MIB = 1024**2
PEAK = "memory/run_peak_allocated_mib"


@dataclass(frozen=True)
class Foreseen:
    """A forecast beside what there is."""

    device: DeviceFacts
    told: Forecast
    room_bytes: float  # infinite where nobody tells
    largest: int | None  # rows of the largest micro-batch that fits; None: not even one
    past_mib: float | None  # the peak of the newest finished run that is alike

    @property
    def fits(self) -> bool:
        return self.told.needed_bytes <= self.room_bytes

    def table(self) -> Table:
        from rich.table import Table

        table = Table("", "MiB", "", title=f"memory of {self.device.name}", title_justify="left")
        table.columns[1].justify = "right"
        told = self.told
        table.add_row("predicted peak", _mib(told.peak_bytes), f"in {told.phase}", style="bold")
        for owner, size in sorted(told.owners.items(), key=lambda item: -item[1]):
            table.add_row(f"  {owner}", _mib(size), "")
        table.add_section()
        for phase, most in told.phases.items():
            table.add_row(f"  peak of {phase}", _mib(most), "")
        table.add_section()
        known = math.isfinite(self.room_bytes)
        table.add_row("free", _mib(self.room_bytes) if known else "", "" if known else "not told")
        if told.note:
            table.caption = told.note
        table.add_row("fits", "", "yes" if self.fits else "NO")
        largest = "none" if self.largest is None else f"{self.largest} rows"
        table.add_row("largest micro-batch that fits", "", largest)
        if self.past_mib is not None:
            table.add_row("a run alike took", f"{self.past_mib:,.2f}", "")
        return table


def forecast_memory(config: RunConfig) -> Foreseen:
    """The memory of this training. Raises what a training with these settings is refused by."""
    device = detect(config.device.name, require=config.device.require)
    plan = looked_at(config, device)
    free = device.free_bytes if device.kind == "cpu" else free_bytes(device)
    room = room_bytes(config.memory.limit_mib, free)
    place = where()
    place = place.model_copy(update={"experiment": config.run.experiment or place.experiment})
    past = measured(place, plan.comparable, [PEAK])
    return Foreseen(
        device=device,
        told=forecast(plan),
        room_bytes=room,
        largest=largest_micro_batch(plan, room),
        past_mib=past.get(PEAK),
    )


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / MIB:,.2f}"
