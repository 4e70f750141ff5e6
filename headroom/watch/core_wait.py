"""Measure how long the threads of a run waited for a processor core, and because of whom: of other
processes, or of its own threads, where it runs more than there are cores; and how long for pages of
memory that were taken from it. The numbers are Linux's counters; where a system does not tell,
nothing is said.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import psutil

if sys.platform != "win32":
    import resource

WORKER = "pt_data_worker"  # as PyTorch names the workers of its loaders
PRESSURE = ("/sys/fs/cgroup/memory.pressure", "/proc/pressure/memory")  # of a container, or of all
FAULTS_PER_S = 5  # pages that are read back in a second, from which on the process lacks memory
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
        self._children_s = _read_children_s()
        self._limited_s = _read_limited_s()
        self._stalled_s, self._faults = _read_stalled_s(), _count_faults()

    def read_core_wait(self) -> CoreWait | None:
        """Return the waiting since this object was made; None where the system does not tell."""
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

    def read_workers_s(self) -> float:
        """Return the processor seconds of the workers of PyTorch's loaders, and of other processes
        that this one started and that have ended, since this object was made."""
        seconds = _read_children_s() - self._children_s
        with suppress(psutil.Error, OSError):
            for child in psutil.Process().children():
                with suppress(psutil.Error, OSError):
                    if child.name() == WORKER:
                        used = child.cpu_times()
                        seconds += used.user + used.system
        return seconds

    def read_limited_pct(self) -> float | None:
        """Return the share of the time in which the limit of a container on its processor time
        kept it from its cores; None where there is no limit."""
        before_s, now_s = self._limited_s, _read_limited_s()
        if before_s is None or now_s is None:
            return None
        return 100 * (now_s - before_s) / max(perf_counter() - self._began, 1e-9)

    def read_memory_wait_pct(self) -> float | None:
        """Return the share of the time in which a process of the container, or of the machine,
        stood still for pages that had been taken from memory (Linux, psi.rst, `some`): 0 where this
        one read hardly any back. None where the system does not tell."""
        before_s, now_s = self._stalled_s, _read_stalled_s()
        if before_s is None or now_s is None:
            return None
        gone_s = max(perf_counter() - self._began, 1e-9)
        if _count_faults() - self._faults < FAULTS_PER_S * gone_s:
            return 0.0
        return 100 * (now_s - before_s) / gone_s


def count_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read_children_s() -> float:
    ended = os.times()
    return ended.children_user + ended.children_system


def _read_limited_s() -> float | None:
    """Return the seconds in which the cgroup of this process was throttled (cgroup-v2.rst)."""
    with suppress(OSError, ValueError):
        for line in Path("/sys/fs/cgroup/cpu.stat").read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "throttled_usec":
                return int(number) / 1e6
    return None


def _read_stalled_s() -> float | None:
    for path in PRESSURE:
        with suppress(OSError, ValueError, IndexError):
            some = Path(path).read_text().splitlines()[0]
            return int(some.rpartition("total=")[2]) / 1e6
    return None


def _count_faults() -> int:
    """Return how many pages this process has read back from a disk."""
    if sys.platform == "win32":
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _read_counts_s() -> tuple[float, float, float, float] | None:
    """Return four counts in seconds: how long the present threads of this process waited and ran,
    how long it ran with all threads that ended, and how long the cores it may use were busy."""
    threads_s, busy_s = _read_threads_s(), _read_busy_s()
    if threads_s is None or busy_s is None:
        return None
    ended = os.times()
    return *threads_s, time.process_time() + ended.children_user + ended.children_system, busy_s


def _read_threads_s() -> tuple[float, float] | None:
    threads = []
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # of a thread that has just ended
            ran, waited = file.read_text().split()[:2]
            threads.append((int(waited), int(ran)))
    if not threads:
        return None
    return sum(waited for waited, _ in threads) / 1e9, sum(ran for _, ran in threads) / 1e9


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
    helpers: set[psutil.Process] = set()
    with suppress(psutil.Error, OSError):
        helpers |= set(me.children(recursive=True))
        calls = psutil.net_connections("tcp")
        listening = {
            call.laddr.port: call.pid
            for call in calls
            if call.status == psutil.CONN_LISTEN and call.pid and call.laddr
        }
        callers = {me.pid, *(child.pid for child in helpers)}
        pids: set[int] = set()
        while callers:  # a server may call one itself: a store's, a database's
            pids |= callers
            callers = {
                listening[call.raddr.port]
                for call in calls
                if call.pid in callers and call.raddr and call.raddr.ip in LOCAL_HOSTS
                if call.raddr.port in listening
            } - pids
            for pid in callers:
                with suppress(psutil.Error):
                    server = psutil.Process(pid)
                    helpers |= {server, *server.children(recursive=True)}
    return helpers - {me}


def _read_processes_s(processes: set[psutil.Process] | None = None) -> dict[psutil.Process, float]:
    """Return the processor seconds of each process (of all where none are given), those of its
    ended children included."""
    times = {}
    for process in psutil.process_iter() if processes is None else processes:
        with suppress(psutil.Error, OSError):
            used = process.cpu_times()
            ended_s = getattr(used, "children_user", 0.0) + getattr(used, "children_system", 0.0)
            times[process] = used.user + used.system + ended_s
    return times
