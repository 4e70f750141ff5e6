"""Measure how much memory a run uses: peaks per window, phase and run, and the host's share. The
meter alone resets the allocator's peaks, which are process-wide: any other reset would falsify a
run's numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from headroom.base.names import PHASES
from headroom.watch.allocators import Allocator, Space, make_allocator
from headroom.watch.holders import LiveTensor, find_live_tensors
from headroom.watch.host_memory import HostMemory

MIB = 1024**2


def count_allocated_bytes(device: torch.device, lives: list[LiveTensor] | None = None) -> int:
    """Return the bytes in use by tensors: the allocator's count, which includes what libraries
    allocated through it; on a CPU those of the live tensors that Python can reach. lives: what
    find_live_tensors has found there, where somebody has looked already."""
    if device.type == "cpu":
        tensors = find_live_tensors(device) if lives is None else lives
        return sum({live.key: live.bytes for live in tensors}.values())
    return make_allocator(device).read().get("allocated", 0)


class MemoryMeter:
    """Measures a run's memory in the names of the run record. Creating one resets the device's
    peaks.

    The allocator keeps one peak; the meter reads and resets it at the end of each phase and
    window, and keeps the highest of the window, the phase and the run.
    """

    def __init__(self, device: torch.device, source: Allocator | None = None) -> None:
        self._allocator = source or make_allocator(device)
        self._host = HostMemory()
        self._run: dict[str, int] = {}
        self._window: dict[str, int] = {}
        self._phases: dict[str, int] = {}
        self._headroom: int | None = None
        self._fragmentation_pct: float | None = None
        self._allocator.reset_peaks()
        self._retries_before = self._retries = self._allocator.read().get("retries", 0)
        self._growing = 0  # windows running in which the allocator had to retry

    def end_phase(self, name: str) -> None:
        """End the phase `name`: keep the highest use since the last phase or window ended."""
        reading = self._fold()
        if "peak_allocated" in reading:
            self._phases[name] = max(self._phases.get(name, 0), reading["peak_allocated"])

    def end_window(self) -> dict[str, float]:
        """Return the series of a log point; peaks are those since the last call. Ends the phase
        too."""
        reading = {**self._fold(), **self._window}
        self._window = {}
        retries = reading.get("retries", 0)
        self._growing = self._growing + 1 if retries > self._retries else 0
        self._retries = retries
        space = self._allocator.read_space()
        if space is not None:
            self._note_space(space, reading)
            if space.free_bytes is not None:
                reading["free"] = space.free_bytes
        names = ("allocated", "reserved", "peak_allocated", "peak_reserved", "free")
        series = {f"memory/{name}_mib": reading[name] / MIB for name in names if name in reading}
        return {**series, "memory/host_rss_mib": self._host.read_rss_bytes() / MIB}

    def is_thrashing(self) -> bool:
        """Return whether the allocator had to free its cache in two windows in succession; True
        once only.

        Such a training goes on, slowly, and is about to run out of memory.
        """
        is_so = self._growing >= 2
        if is_so:
            self._growing = 0
        return is_so

    def summarize(self) -> dict[str, float]:
        """Return the run's memory so far; call it before the model is freed. Ends the window.

        headroom: the total less the most that all processes had in use, as far as log points
        tell (on MPS this process alone, at log points). fragmentation: of what was reserved in
        the phase in which most was in use, the share that was idle all the same: cut to sizes
        that nothing asked for, or the rest of a segment.
        """
        self.end_window()
        metrics: dict[str, float] = {
            f"memory/run_{name}_mib": value / MIB for name, value in self._run.items()
        }
        for name in (phase.name for phase in PHASES if phase.has_peak):
            if name in self._phases:
                metrics[f"memory/peak_{name}_mib"] = self._phases[name] / MIB
        if self._headroom is not None:
            metrics["memory/headroom_mib"] = self._headroom / MIB
        if self._fragmentation_pct is not None:
            metrics["memory/fragmentation_pct"] = self._fragmentation_pct
        retries = self._allocator.read().get("retries")
        if retries is not None:
            metrics["memory/alloc_retries"] = float(retries - self._retries_before)
        return {**metrics, "memory/host_rss_peak_mib": self._host.read_peak_bytes() / MIB}

    def read_allocator(self) -> dict[str, int]:
        """Return the allocator's statistics of now; see Allocator for the keys."""
        return self._allocator.read()

    def read_stats(self) -> dict[str, Any]:
        """Return the allocator's raw statistics; empty where it has none. Of peaks those that
        are known of the whole run; the allocator's own are of the last phase. Ends the phase."""
        self._fold()
        stats = {k: v for k, v in self._allocator.read_stats().items() if not k.endswith(".peak")}
        kept = {f"{name.removeprefix('peak_')}_bytes.all.peak": v for name, v in self._run.items()}
        return {**stats, **kept} if stats else stats

    def _fold(self) -> dict[str, int]:
        reading = self._allocator.read()
        peak, reserved = reading.get("peak_allocated", 0), reading.get("peak_reserved", 0)
        if reserved and peak >= self._run.get("peak_allocated", 0):
            self._fragmentation_pct = 100 * (1 - peak / reserved)
        for name in ("peak_allocated", "peak_reserved"):
            if name in reading:
                self._window[name] = max(self._window.get(name, 0), reading[name])
                self._run[name] = max(self._run.get(name, 0), reading[name])
        self._allocator.reset_peaks()
        return reading

    def _note_space(self, space: Space, reading: dict[str, int]) -> None:
        # Where there is no pool, what tensors hold is all that is taken.
        reserved = reading.get("reserved", reading.get("allocated", 0))
        peak = reading.get("peak_reserved", reading.get("peak_allocated", 0))
        others = 0
        if space.free_bytes is not None:
            others = max(0, space.total_bytes - space.free_bytes - reserved)
        left = space.total_bytes - others - max(reserved, peak)
        self._headroom = left if self._headroom is None else min(left, self._headroom)
