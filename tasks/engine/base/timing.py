"""Clocks for the phases of a training step. A clock never makes the host wait for the device: on an
asynchronous device it leaves events in the stream, on the steps it samples, and reads them at log
points, where the host has waited anyway. Seconds inside, milliseconds in the record.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from contextlib import suppress
from math import exp, log
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import psutil
import torch
from torch.utils._python_dispatch import _disable_current_modes

REPLAY = "replay"  # all of a step that is replayed from a graph, but for its data
FAST_QUANTILE = (
    0.05  # of the steps: what a step takes on a busy machine, where nothing else is in its way
)
LEAST_TIMES = 20  # steps: of fewer nobody knows
GRAIN = 500  # of the logarithm of a step: one fifth of a per cent
SIDE, REFERENCE_EVERY_S = 192, 0.05  # of a square matrix whose product takes some 0.1 ms
PHASES = ("data_wait", "h2d", "forward", "backward", "communication", "optimizer")


class PhaseClock(Protocol):
    """Measures the time between two marks of a step and adds it to the phase that the second
    one ends."""

    def begin(self, *, sample: bool) -> None:
        """Start a step. sample: time it, where timing each one would be too expensive."""

    def mark(self, phase: str) -> None:
        """End `phase` here."""

    def reset(self) -> None:
        """Forget what was timed so far: the first step holds warm-up and compilation."""

    def collect(self) -> None:
        """Read the times that are ready, without waiting for any."""

    def compute_step_seconds(self, *, replayed: bool = False) -> dict[str, float]:
        """Return the seconds of each phase, of steps run eagerly or of those replayed from a
        graph: the mean over all steps, or the median over those sampled; empty where none was
        timed."""

    def count_sampled_steps(self) -> int | None:
        """Return how many steps were sampled; None where all are timed."""

    def compute_fast_step_s(self) -> float | None:
        """Return the seconds of a fast step: one timed step in twenty is faster."""

    def compute_reference_s(self) -> float | None:
        """Return the seconds of a fixed piece of work that is timed between steps, in the same
        way: how fast the machine itself was. None where none or too few were timed."""


class HostClock:
    """The clock of a CPU, where work is done when the call returns. It times every step."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = defaultdict(float)
        self._fast, self._reference = _FastTimes(), _FastTimes()
        with _disable_current_modes():  # nobody's memory
            self._matrix, self._product = torch.ones(2, SIDE, SIDE, dtype=torch.float32)
        self._next_reference = 0.0
        self._steps = 0
        self._first = self._last = 0.0
        self._begun = False

    def begin(self, *, sample: bool) -> None:
        self._fast.add(self._last - self._first)  # of the step before
        now = perf_counter()
        if now >= self._next_reference:
            self._next_reference = now + REFERENCE_EVERY_S
            with _disable_current_modes():
                began = perf_counter()
                torch.mm(self._matrix, self._matrix, out=self._product)
                now = perf_counter()
            self._reference.add(now - began)
        self._begun = True
        self._first = self._last = now

    def mark(self, phase: str) -> None:
        now = perf_counter()
        if self._begun:  # a step begun after the last batch never comes to a mark
            self._steps += 1
            self._begun = False
        self._totals[phase] += now - self._last
        self._last = now

    def reset(self) -> None:
        self._totals.clear()
        self._fast, self._reference = _FastTimes(), _FastTimes()
        self._first = self._last
        self._steps = 0

    def collect(self) -> None:
        self._fast.count()

    def compute_step_seconds(self, *, replayed: bool = False) -> dict[str, float]:
        if replayed:
            return {}
        return {phase: total / self._steps for phase, total in self._totals.items()}

    def count_sampled_steps(self) -> int | None:
        return None

    def compute_fast_step_s(self) -> float | None:
        return self._fast.compute_seconds()

    def compute_reference_s(self) -> float | None:
        return self._reference.compute_seconds()


class _FastTimes:
    """The 5 % quantile of many times, which are kept as counts by their logarithms."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._new: list[float] = []
        self.add = self._new.append  # at each step, where counting takes 1 % of a small one

    def count(self) -> None:
        """Add the collected times to the counts. Times of 0 are of steps that were begun and
        not taken."""
        self._counts.update(round(GRAIN * log(seconds)) for seconds in self._new if seconds > 0)
        self._new.clear()

    def compute_seconds(self) -> float | None:
        self.count()
        if self._counts.total() < LEAST_TIMES:
            return None
        left = FAST_QUANTILE * self._counts.total()
        for grain in sorted(self._counts):
            left -= self._counts[grain]
            if left <= 0:
                break
        return exp(grain / GRAIN)


class EventClock:
    """The clock of CUDA, ROCm, XPU and MPS: it times the device by events in its stream, on
    sampled steps.

    elapsed_time() of torch.Event is in milliseconds on every backend.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._timed: dict[bool, list[dict[str, float]]] = {False: [], True: []}  # by replayed
        self._open: list[tuple[str, Any]] = []
        self._pending: list[list[tuple[str, Any]]] = []

    def begin(self, *, sample: bool) -> None:
        self._open = [("begin", self._record_event())] if sample else []
        if sample:
            self._pending.append(self._open)

    def mark(self, phase: str) -> None:
        if self._open:
            self._open.append((phase, self._record_event()))

    def reset(self) -> None:
        for timed in self._timed.values():
            timed.clear()
        self._pending.clear()
        self._open = []

    def collect(self) -> None:
        while self._pending and self._pending[0][-1][1].query():
            marks = self._pending.pop(0)
            found: dict[str, float] = defaultdict(float)
            for (_, start), (phase, end) in zip(marks, marks[1:], strict=False):
                found[phase] += start.elapsed_time(end) / 1000
            if found:
                self._timed[REPLAY in found].append(found)

    def compute_step_seconds(self, *, replayed: bool = False) -> dict[str, float]:
        timed = self._timed[replayed]
        phases = dict.fromkeys(phase for step in timed for phase in step)
        return {p: median(step.get(p, 0.0) for step in timed) for p in phases}

    def count_sampled_steps(self) -> int | None:
        return sum(map(len, self._timed.values()))

    def compute_fast_step_s(self) -> float | None:
        timed = sorted(sum(step.values()) for step in self._timed[True] or self._timed[False])
        return timed[int(FAST_QUANTILE * len(timed))] if len(timed) >= LEAST_TIMES else None

    def compute_reference_s(self) -> float | None:
        return None

    def _record_event(self) -> Any:
        event = make_event(self._device, timed=True)
        event.record()
        return event


def make_event(device: torch.device, *, timed: bool = False) -> Any:
    """Return an event of the device, to be recorded in its current stream."""
    if device.type == "mps":
        return torch.mps.Event(enable_timing=timed)
    return torch.Event(device=device, enable_timing=timed)


def make_phase_clock(device: torch.device) -> PhaseClock:
    """Return the clock that measures correctly on this device."""
    return HostClock() if device.type == "cpu" else EventClock(device)


def wait_for_device(device: torch.device) -> None:
    """Wait until the device has finished all its work; return at once on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Stopwatch:
    """Measures the wall seconds of named parts of a run on the host; parts may not nest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._began = perf_counter()
        self._last = self._began

    def lap(self, part: str) -> float:
        """Add the time since the last lap to `part`, and return it."""
        now = perf_counter()
        lap_s = now - self._last
        self.seconds[part] += lap_s
        self._last = now
        return lap_s

    def compute_total_s(self) -> float:
        return perf_counter() - self._began

    def state(self) -> dict[str, float]:
        """Return all seconds so far."""
        return {**self.seconds, "total": self.compute_total_s()}

    def restore(self, state: dict[str, float]) -> None:
        """Add seconds that were counted before."""
        for part, spent_s in state.items():
            if part == "total":
                self._began -= spent_s
            else:
                self.seconds[part] += spent_s


LOCAL_HOSTS = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


class CoreWait(NamedTuple):
    """The share of time that threads waited for a core: per cent of the time, or of what all
    threads wanted to run where that is more."""

    others_pct: float
    own_pct: float


class CoreWatch:
    """Measures the waiting for cores from the moment it is made, from Linux's counters
    (Documentation/scheduler/sched-stats.rst)."""

    def __init__(self) -> None:
        self._began = perf_counter()
        self._before_s = {} if _read_threads_s() is None else _read_processes_s()
        self._counts_s = _read_counts_s()

    def read_core_wait(self) -> CoreWait | None:
        """Return the waiting since this object was made; None where the system does not
        tell."""
        before_s, now_s = self._counts_s, _read_counts_s()
        if before_s is None or now_s is None:
            return None
        waited_s, ran_s, own_s, busy_s = (
            max(0.0, now - before) for now, before in zip(now_s, before_s, strict=True)
        )
        if busy_s + 0.1 < own_s / 2:  # a sandbox that does not tell what its machine does
            return None
        helpers_s = sum(
            used_s - self._before_s.get(process, 0.0)
            for process, used_s in _read_processes_s(_find_helper_processes()).items()
        )
        # What others ran is the most that they can have kept waiting.
        others_s = min(waited_s, max(0.0, busy_s - own_s - helpers_s))
        share = 100 / max(perf_counter() - self._began, waited_s + ran_s)
        return CoreWait(others_s * share, (waited_s - others_s) * share)


def _read_counts_s() -> tuple[float, float, float, float] | None:
    """Return four counts in seconds: how long the present threads of this process waited and
    ran, how long it ran with all threads that ended, and how long the cores it may use were
    busy."""
    threads_s, busy_s = _read_threads_s(), _read_busy_s()
    if threads_s is None or busy_s is None:
        return None
    ended = os.times()
    return *threads_s, time.process_time() + ended.children_user + ended.children_system, busy_s


def _read_threads_s() -> tuple[float, float] | None:
    found = []
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # of a thread that has just ended
            ran, waited = file.read_text().split()[:2]
            found.append((int(waited), int(ran)))
    if not found:
        return None
    return sum(waited for waited, _ in found) / 1e9, sum(ran for _, ran in found) / 1e9


def _read_busy_s() -> float | None:
    with suppress(psutil.Error, OSError, AttributeError, IndexError):
        cores = psutil.cpu_times(percpu=True)
        mine = [cores[core] for core in os.sched_getaffinity(0)]
        return sum(c.user + c.nice + c.system + c.irq + c.softirq for c in mine)
    return None


def _find_helper_processes() -> set[psutil.Process]:
    """Return the processes that this one started, and those on this machine that one of them is
    connected to."""
    me = psutil.Process()
    found: set[psutil.Process] = set()
    with suppress(psutil.Error, OSError):
        found |= set(me.children(recursive=True))
        calls = psutil.net_connections("tcp")
        listening = {
            call.laddr.port: call.pid
            for call in calls
            if call.status == psutil.CONN_LISTEN and call.pid and call.laddr
        }
        callers = {me.pid, *(child.pid for child in found)}
        known: set[int] = set()
        while callers:  # a server may call one itself: a store's, a database's
            known |= callers
            callers = {
                listening[call.raddr.port]
                for call in calls
                if call.pid in callers and call.raddr and call.raddr.ip in LOCAL_HOSTS
                if call.raddr.port in listening
            } - known
            for pid in callers:
                with suppress(psutil.Error):
                    server = psutil.Process(pid)
                    found |= {server, *server.children(recursive=True)}
    return found - {me}


def _read_processes_s(processes: set[psutil.Process] | None = None) -> dict[psutil.Process, float]:
    """Return the processor seconds of each process (of all where none are given), those of its
    ended children included."""
    found = {}
    for process in psutil.process_iter() if processes is None else processes:
        with suppress(psutil.Error, OSError):
            used = process.cpu_times()
            ended_s = getattr(used, "children_user", 0.0) + getattr(used, "children_system", 0.0)
            found[process] = used.user + used.system + ended_s
    return found
