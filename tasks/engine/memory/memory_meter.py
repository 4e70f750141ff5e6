"""Measure how much memory a run uses: peaks per window, phase and run, and the host's share;
recognize out-of-memory errors, and release what an error keeps in its frames. The meter alone
resets the allocator's peaks, which are process-wide: any other reset would falsify a run's
numbers.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from tasks.engine.base import host_memory
from tasks.engine.base.import_paths import get_error_message
from tasks.engine.base.units import format_mebibytes
from tasks.engine.memory.allocator_stats import (
    Allocator,
    History,
    Space,
    make_allocator,
    make_history,
)
from tasks.engine.memory.holders import LiveTensor, find_live_tensors

if sys.platform != "win32":
    import resource

MIB = 1024**2
NEAR = 0.05  # of a limit on the host's memory: so little left is told
REPORTED_PHASES = ("forward", "backward", "optimizer", "eval")

log = logging.getLogger(__name__)

# What allocators and libraries say when memory ran out and no torch.OutOfMemoryError came of it.
_OOM = re.compile(
    r"(CUDA|HIP|XPU|MPS backend) out of memory"
    r"|(CUDA|HIP)( driver)? error: out of memory"
    r"|Cuda failure (\d+ )?'out of memory'"  # NCCL
    r"|(CUBLAS|HIPBLAS|CUSOLVER|CUSPARSE|CUDNN)_STATUS_ALLOC_FAILED"
    r"|CUDNN_STATUS_INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED"
    r"|miopenStatusAllocFailed|rocblas_status_memory_error"
    r"|UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY"
    r"|Invalid buffer size: [\d.]+ [KMGT]i?B"  # MPS: more than one Metal buffer can be
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|std::bad_alloc"
)


def count_allocated_bytes(device: torch.device, lives: list[LiveTensor] | None = None) -> int:
    """Return the bytes in use by tensors: the allocator's count, which includes what libraries
    allocated through it; on a CPU those of the live tensors that Python can reach. lives: what
    find_live_tensors has found there, where somebody has looked already."""
    if device.type == "cpu":
        found = find_live_tensors(device) if lives is None else lives
        return sum({live.key: live.bytes for live in found}.values())
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
        found: dict[str, float] = {
            f"memory/run_{name}_mib": value / MIB for name, value in self._run.items()
        }
        for name in REPORTED_PHASES:
            if name in self._phases:
                found[f"memory/peak_{name}_mib"] = self._phases[name] / MIB
        if self._headroom is not None:
            found["memory/headroom_mib"] = self._headroom / MIB
        if self._fragmentation_pct is not None:
            found["memory/fragmentation_pct"] = self._fragmentation_pct
        retries = self._allocator.read().get("retries")
        if retries is not None:
            found["memory/alloc_retries"] = float(retries - self._retries_before)
        return {**found, "memory/host_rss_peak_mib": self._host.read_peak_bytes() / MIB}

    def read_allocator(self) -> dict[str, int]:
        """Return the allocator's statistics of now; see Allocator for the keys."""
        return self._allocator.read()

    def read_stats(self) -> dict[str, Any]:
        """Return the allocator's raw statistics; empty where it has none. Of peaks those that
        are known of the whole run; the allocator's own are of the last phase. Ends the phase."""
        self._fold()
        found = {k: v for k, v in self._allocator.read_stats().items() if not k.endswith(".peak")}
        kept = {f"{name.removeprefix('peak_')}_bytes.all.peak": v for name, v in self._run.items()}
        return {**found, **kept} if found else found

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


class HostMemory:
    """Measures this process's resident memory."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._record_before = _read_peak_rss_bytes()
        self._highest = 0
        self._limit = host_memory.find_limit_bytes()
        self._looked_at = 0  # bytes in use when its cgroup was asked
        self.read_rss_bytes()

    def read_rss_bytes(self) -> int:
        """Return what is in use now, which is remembered for the peak. Warns once where a limit
        is near."""
        now = int(self._process.memory_info().rss)
        if self._limit is not None and now - self._looked_at > self._limit * NEAR:
            self._looked_at = now
            free = host_memory.read_free_bytes()
            if free < self._limit * NEAR:
                self._limit = None
                log.warning(
                    "memory: %s are free of the %s of this memory cgroup; a process that takes "
                    "more is killed. Take smaller batches or fewer workers, or raise the limit",
                    format_mebibytes(free / MIB),
                    format_mebibytes(host_memory.read_total_bytes() / MIB),
                )
        self._highest = max(now, self._highest)
        return now

    def read_peak_bytes(self) -> int:
        """Return the most since this object was made. Exact where that is the process's record;
        where the process was larger before, the largest value seen at log points, a lower
        bound.

        Linux could reset its record (/proc/self/clear_refs), but the whole process shares it.
        """
        record = _read_peak_rss_bytes()
        return max(self._highest, record if record > self._record_before else 0)


def _read_peak_rss_bytes() -> int:
    """Return the most that the process ever had in memory; 0 where the system does not tell."""
    if sys.platform == "win32":
        return 0
    record = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return record if sys.platform == "darwin" else 1024 * record


def is_oom(error: BaseException) -> bool:
    """Return whether memory ran out: in the error itself, or in one that caused it."""
    return any(_is_oom_itself(one) for one in list_error_chain(error))


def _is_oom_itself(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _OOM.search(get_error_message(error)) is not None


def list_error_chain(error: BaseException) -> list[BaseException]:
    """Return the error, its causes and contexts, and the members of groups; each once."""
    found: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in found:
            continue
        found[id(one)] = one
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
    return list(found.values())


def clear_frames(error: BaseException) -> None:
    """Clear every local variable that the error and its whole chain keep.

    Functions that still run keep theirs. Code that keeps the error afterwards (Prefect does)
    keeps no tensor by it; the traceback still prints.
    """
    for one in list_error_chain(error):
        if isinstance(one, AttributeError):
            one.obj = None  # the very object that lacks the attribute: perhaps the model
        for frame, _ in traceback.walk_tb(one.__traceback__):
            try:
                frame.clear()
            except RuntimeError:  # it still runs
                continue
            if sys.version_info < (3, 13):
                # Whoever looked at f_locals left a copy in the frame, which clear() forgets.
                # Looking again brings the copy up to date, which is empty now.
                _ = frame.f_locals


def forget_frames(error: BaseException) -> None:
    """Remove the frames themselves from an error that ends a run from outside.

    In Python 3.11 a cleared frame keeps its function, and so what this encloses. Where in the
    libraries an interrupt arrived is of no use to anybody, and the compiler's closures hold
    models.
    """
    for one in list_error_chain(error):
        one.__traceback__ = None


SNAPSHOT_FILE = Path("memory", "snapshot.pickle")


class Recorder:
    """Records from start() on, and writes what the memory looks like at write()."""

    def __init__(self, source: History, file: Path) -> None:
        self._source, self._file = source, file
        self.is_recording = False
        self.is_written = False

    def start(self) -> None:
        """Record from here on; nothing changes where it records already."""
        if not self.is_recording and self._source.can_record:
            self.is_recording = True
            self._source.start()

    def write(self) -> None:
        """Write the file, in place of one that was written before."""
        if not self._source.can_record:
            return
        partial = self._file.with_suffix(".partial")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._source.write(partial)
            partial.replace(self._file)
            self.is_written = True
        except (OSError, RuntimeError) as error:  # no room; or the device answers nothing any more
            log.warning("memory.snapshot: %s could not be written: %s", self._file, error)
            _remove(partial)

    def stop(self) -> None:
        if self.is_recording:
            self.is_recording = False
            self._source.stop()


@contextmanager
def record_history(
    device: torch.device, *, folder: Path, on: bool, source: History | None = None
) -> Iterator[Recorder]:
    """Record the memory history of a training inside the block.

    on: record from the start, and write the file at the end, however the block ends. Otherwise
    the file is written where an out-of-memory error leaves the block, unless write() was called
    before; it contains more if start() was called. source: the history; that of the device if
    None.
    """
    found = source or make_history(device)
    recorder = Recorder(found, folder / SNAPSHOT_FILE)
    if on:
        if not found.can_record:
            log.info(
                "memory.snapshot: %s keeps no history of its memory: no %s", device, SNAPSHOT_FILE
            )
        recorder.start()
    try:
        yield recorder
    except BaseException as error:
        if not recorder.is_written and (on or is_oom(error)):
            recorder.write()
        raise
    else:
        if on:
            recorder.write()
    finally:
        recorder.stop()


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        log.warning("memory.snapshot: %s could not be removed: %s", file, error)
