"""Decides whether a training gets the memory that it will need, before it takes any: by what
comparable runs have taken, else by a forecast, against what is free now. It starts with a
smaller micro-batch where only that fits, waits where that was asked for, and refuses by naming
who holds the memory.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from headroom.base.facts import DeviceFacts
from headroom.base.import_paths import is_import_path
from headroom.base.units import format_mebibytes, format_seconds
from headroom.device.checks import Holder
from headroom.device.detection import DeviceError, TemporaryDeviceError
from headroom.device.memory_limit import compute_room_bytes
from headroom.device.nvml import Nvml, find_holders, query_nvml
from headroom.settings.run_config import FUSED
from headroom.training.choose_step import EarlierTimings
from headroom.training.forecast import Forecast, UnforeseeableMemory, find_largest_rows
from headroom.training.plan import Plan
from headroom.training.plan_forecast import forecast_training
from headroom.watch import host_memory
from headroom.watch.allocators import make_allocator

MIB = 1024**2
ASK_AGAIN_S = 1.0
CHECKPOINTED = ("parameters", "buffers", "best_weights", "optimizer_state")  # by owner
SHOWN = 4  # processes that a refusal names

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Admission:
    """What a training may start with, and why."""

    predicted_bytes: float | None  # None: nobody had to know
    source: str  # history or dry step; empty where nobody had to know
    micro_batch: int  # rows to start with
    reason: str  # one sentence
    forecast: Forecast | None = None  # of a dry step
    fits_graph: bool = True  # whether a recorded step finds room too, as far as is known


def admit_training(
    plan: Plan,
    *,
    past_peak_bytes: float | None,
    past_micro_batch: int | None,
    past_reserved_bytes: float | None = None,
    is_shared_out: bool = False,
    free: Callable[[], int | None] | None = None,
    nvml: Callable[[], Nvml] = query_nvml,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Admission:
    """Decide what the training may start with, at the latest after memory.wait_s.

    past_*: of comparable finished runs, what tensors held and the allocator reserved at most,
    and the micro-batch that fitted; None where there are none. is_shared_out: whether the
    model is sharded among several processes. Raises DeviceError where not even one row at a
    time fits.
    """
    config, device = plan.settings, plan.device
    rows = min(plan.micro_batch, past_micro_batch or config.train.batch_size)
    learnt = ""
    if rows < plan.micro_batch:
        learnt = f"begins with micro-batches of {rows} rows, with which a run alike ended; "
    is_bounded = device.kind != "cpu" or host_memory.find_limit_bytes() is not None
    if not is_bounded and config.memory.limit_mib is None:
        why = "a cpu without memory.limit_mib gives what it has"
        return Admission(None, "", rows, learnt + why)
    if is_shared_out or config.memory.recompute:  # a forecast would ask for too much
        how = "shared out" if is_shared_out else "computed again"
        return Admission(None, "", rows, f"{learnt}what is {how} is not forecast")
    # A limit is the whole process's: what it holds from before is not for this training.
    held_bytes = make_allocator(torch.device(device.name)).read().get("reserved", 0)
    request = _MemoryRequest(plan, rows, past_peak_bytes, past_reserved_bytes, held_bytes)
    untold = request.describe_unforeseeable()
    if untold is not None:
        return Admission(None, "", rows, learnt + untold)
    request.refuse_hopeless_limit()
    until = now() + config.memory.wait_s
    is_told = False
    while True:
        now_free = free() if free else read_free_bytes(device)
        room = compute_room_bytes(config.memory.limit_mib, now_free, held_bytes=held_bytes)
        admission = request.find_fitting(room)
        if admission is not None:
            return replace(admission, reason=learnt + admission.reason)
        # Where all of the device is too little, or a limit is, nothing is gained by waiting.
        is_hopeless = request.forecast(1).needed_bytes > request.most_bytes
        if now() >= until or is_hopeless:
            text = request.describe_refusal(room, find_holders(device.uuid, nvml()))
            raise (
                DeviceError(text)
                if is_hopeless
                else TemporaryDeviceError(text, kind="out_of_memory")
            )
        if not is_told:
            is_told = True
            shortage = request.describe_shortage(room, find_holders(device.uuid, nvml()))
            log.warning("waiting up to %s: %s", format_seconds(config.memory.wait_s), shortage)
        sleep(min(ASK_AGAIN_S, max(0.0, until - now())))


def read_free_bytes(device: DeviceFacts) -> int | None:
    """Return what the device has free now, all processes together; None where it does not tell. A
    CPU's memory is bounded where its process would be killed for more."""
    if device.kind == "cpu":
        return host_memory.read_free_bytes() if host_memory.find_limit_bytes() is not None else None
    space = make_allocator(torch.device(device.name)).read_space()
    return None if space is None else space.free_bytes


class _MemoryRequest:
    """What a training asks for. Forecasts are made once, and only those that are needed."""

    def __init__(
        self,
        plan: Plan,
        rows: int,
        past_peak_bytes: float | None,
        past_reserved_bytes: float | None,
        held_bytes: int,
    ) -> None:
        self._plan, self._config, self._device = plan, plan.settings, plan.device
        self._held_bytes = held_bytes
        self._rows, self._past_peak_bytes = rows, past_peak_bytes
        self._past_needed_bytes = past_reserved_bytes or past_peak_bytes
        self._forecasts: dict[int, Forecast] = {}
        limit_mib, total = plan.settings.memory.limit_mib, plan.device.total_bytes
        self._limit_bytes = compute_room_bytes(limit_mib, None)
        self.most_bytes = compute_room_bytes(limit_mib, total, held_bytes=held_bytes)

    def forecast(self, rows: int) -> Forecast:
        if rows not in self._forecasts:
            forecast = forecast_training(self._plan, micro_batch=rows)
            # A checkpoint is copied before it is written: on a CPU, beside all the rest.
            if self._device.kind == "cpu" and self._is_killed_for_more():
                copied_bytes = sum(forecast.owners.get(owner, 0) for owner in CHECKPOINTED)
                forecast = replace(forecast, needed_bytes=forecast.needed_bytes + copied_bytes)
            self._forecasts[rows] = forecast
        return self._forecasts[rows]

    def count_needed(self, rows: int) -> int:
        return self.forecast(rows).needed_bytes

    def describe_unforeseeable(self) -> str | None:
        """Return why nothing can be foretold of an optimizer that is not ours, or of a model or a
        loss of the user's own."""
        own = (self._config.model.name, self._config.train.loss)
        if self._config.optim.name in FUSED and not any(map(is_import_path, own)):
            return None
        try:
            self.forecast(self._rows)
        except UnforeseeableMemory as error:
            return str(error)
        return None

    def refuse_hopeless_limit(self) -> None:
        """Raises DeviceError for a limit that not even the parameters fit in."""
        known_bytes = self._past_needed_bytes or math.inf
        if known_bytes <= self._limit_bytes:
            return
        least_bytes = self.forecast(self._rows).parameter_bytes
        if least_bytes > self._limit_bytes:
            raise DeviceError(
                f"memory.limit_mib: must be more than the {format_mebibytes(least_bytes / MIB)} "
                "of the "
                f"parameters alone (got {self._config.memory.limit_mib:g}); raise it, or make the "
                "model smaller"
            )

    def find_fitting(self, room: float) -> Admission | None:
        """Return what fits in the room; None where nothing does."""
        past_bytes = self._past_peak_bytes
        if past_bytes is not None and (self._past_needed_bytes or 0) <= room:
            taken = f"{_format_size(past_bytes)} by what runs alike have taken"
            reason = f"{taken}{self._describe_room(room)}"
            return Admission(past_bytes, "history", self._rows, reason)
        whole = self.forecast(self._rows)
        rows = find_largest_rows(self.count_needed, room, rows=self._rows, most=self._rows)
        if rows is None:
            return None
        forecast = self.forecast(rows)
        reason = f"{_format_size(forecast.peak_bytes)} by a dry step{self._describe_room(room)}"
        if rows < self._rows:
            reason = (
                f"starts with micro-batches of {rows} rows, {reason}, where {self._rows} would "
                f"need {_format_size(whole.needed_bytes)}"
            )
        if "ALLOC_CONF" in forecast.note:
            reason += f" ({forecast.note})"
        fits_graph = forecast.graphed is None or forecast.graphed.needed_bytes <= room
        return Admission(forecast.peak_bytes, "dry step", rows, reason, forecast, fits_graph)

    def describe_refusal(self, room: float, holders: tuple[Holder, ...]) -> str:
        """Return why the training can't be had; starts with the setting at fault."""
        least_bytes = self.forecast(1).needed_bytes
        if least_bytes + self._held_bytes > self._limit_bytes:
            held = f" beside {_format_size(self._held_bytes)} that this process holds already"
            return (
                f"memory.limit_mib: must be at least "
                f"{math.ceil((least_bytes + self._held_bytes) / MIB)}, for one row at a time"
                f"{held if self._held_bytes else ''} (got {self._config.memory.limit_mib:g}); "
                "raise it, or make the model smaller"
            )
        raised = ", raise that limit" if self._describe_limit() else ""
        remedy = f"make the model smaller{raised}, or choose another device"
        if least_bytes <= self.most_bytes:
            remedy += ", or let memory.wait_s wait for it"
        return f"device.name: {self.describe_shortage(room, holders)}; {remedy}"

    def describe_shortage(self, room: float, holders: tuple[Holder, ...]) -> str:
        """Return what is asked, what is there, and who holds the rest."""
        least_bytes = self.forecast(1).needed_bytes
        return (
            f"training one row at a time needs {_format_size(least_bytes)} of "
            f"{self._device.name}, and "
            f"{_format_size(room)} are free{self._describe_limit()}{_describe_holders(holders)}"
        )

    def _describe_limit(self) -> str:
        return host_memory.describe_limit() if self._device.kind == "cpu" else ""

    def _is_killed_for_more(self) -> bool:
        return self._config.memory.limit_mib is None and host_memory.find_limit_bytes() is not None

    def _describe_room(self, room: float) -> str:
        if math.isinf(room):
            return f"; {self._device.name} does not tell what is free"
        if room == self._limit_bytes:
            return f", of {_format_size(room)} that memory.limit_mib leaves it"
        beside = "" if self._device.kind in ("cpu", "mps") else " beside the driver's context"
        return f", of {_format_size(room)} that {self._device.name} has free{beside}"


def _format_size(size_bytes: float) -> str:
    return format_mebibytes(size_bytes / MIB)


def _describe_holders(processes: tuple[Holder, ...]) -> str:
    if not processes:
        return ""
    largest = sorted(processes, key=lambda holder: -(holder.bytes or 0))
    holders = [
        f"pid {h.pid}"
        + (f" ({h.name})" if h.name else "")
        + ("" if h.bytes is None else f" {_format_size(h.bytes)}")
        for h in largest[:SHOWN]
    ]
    more = f" and {len(processes) - SHOWN} more" if len(processes) > SHOWN else ""
    return f"; held by {', '.join(holders)}{more}"


@dataclass(frozen=True)
class PastRuns:
    """The newest values of comparable finished runs, under the names of the run record."""

    metrics: dict[str, float] = field(default_factory=dict)

    def find_compile_timings(self) -> EarlierTimings | None:
        """Return what compiling cost and gained; None where no run has tried."""
        plain_ms, compiled_ms, cost_s = (
            self.metrics.get(f"time/{name}")
            for name in ("plain_step_ms", "compiled_step_ms", "compile_s")
        )
        if plain_ms is None or compiled_ms is None or cost_s is None:
            return None
        return EarlierTimings(plain_ms / 1000, compiled_ms / 1000, cost_s)

    def find_peak_bytes(self) -> float | None:
        """Return the most that tensors held, of the last run that counted it."""
        peak_mib = self.metrics.get("memory/run_peak_allocated_mib")
        return None if peak_mib is None else peak_mib * MIB

    def find_reserved_bytes(self) -> float | None:
        """Return the most that the allocator held for them; None where it is not known to have
        one."""
        reserved_mib = self.metrics.get("memory/run_peak_reserved_mib")
        return None if reserved_mib is None else reserved_mib * MIB

    def find_micro_batch(self) -> int | None:
        """Return the rows of the micro-batch that fitted at the end of the last run."""
        rows = self.metrics.get("memory/micro_batch")
        return None if rows is None else max(1, round(rows))


def make_forecast_figures(
    admission: Admission, past: PastRuns, limit_mib: float | None, has_recorded: bool
) -> dict[str, float]:
    """Return the forecast with a recorded step where one was recorded, else without."""
    peak_bytes, reserved_bytes = past.find_peak_bytes(), past.find_reserved_bytes()
    forecast = admission.forecast
    if forecast is not None:
        forecast = forecast.graphed if has_recorded and forecast.graphed is not None else forecast
        peak_bytes, reserved_bytes = forecast.peak_bytes, forecast.reserved_bytes
    # A forecast judges whole batches; where they don't fit a training judges parts of them.
    most_bytes = math.inf if limit_mib is None else limit_mib * MIB
    figures = {
        "memory/predicted_peak_mib": peak_bytes,
        "memory/predicted_reserved_mib": reserved_bytes,
    }
    return {k: min(v, most_bytes) / MIB for k, v in figures.items() if v is not None}
