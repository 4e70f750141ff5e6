"""Read the host's memory as the kernel lets this process have it: what is free of the whole, or of
the least that a memory cgroup leaves it, such as a container's; what this process uses of it, and
whether the kernel has killed one that took more. It imports no PyTorch.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from headroom.base.units import format_mebibytes

if sys.platform != "win32":
    import resource

ROOT = Path("/sys/fs/cgroup")  # where cgroups of both versions are mounted
OWN = Path("/proc/self/cgroup")
LEAST_UNLIMITED = 2**60  # bytes: version 1 writes nearly 2**63 where there is no limit
# Of a group's use: files that are cached, which the kernel drops before it kills.
CACHED = {"active_file", "inactive_file"}
OLD_CACHED = {"total_active_file", "total_inactive_file"}
MIB = 1024**2
NEAR = 0.05  # of a limit on the host's memory: so little left is told

log = logging.getLogger(__name__)


def read_total_bytes() -> int:
    """Return all that this process could ever have."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _read_limits())])


def read_free_bytes() -> int:
    """Return what it can have now."""
    free = [max(0, limit - used) for limit, used in _read_limits()]
    return min([psutil.virtual_memory().available, *free])


def find_limit_bytes() -> int | None:
    """Return the least limit of its memory cgroups; None where there is none."""
    return min((limit for limit, _ in _read_limits()), default=None)


def describe_limit() -> str:
    """Return the words behind what is free, where that is of a limit."""
    limit = find_limit_bytes()
    return "" if limit is None else f" of the {format_mebibytes(limit / MIB)} of this memory cgroup"


def count_kills() -> int | None:
    """Return how often the kernel has killed a process for memory, here or where this process
    is limited; None where it does not tell. It only grows."""
    kills = 0
    for group in _find_groups():
        if _read_limit(group) is not None:
            kills += _read_counts(group / "memory.events").get("oom_kill", 0)
            kills += _read_counts(group / "memory.oom_control").get("oom_kill", 0)
    everywhere = _read_counts(Path("/proc/vmstat")).get("oom_kill")
    return kills + everywhere if everywhere is not None else kills or None


def describe_kills_since(before: int | None) -> str:
    """Return words for a process that was killed, of what a kernel does for memory; empty where
    it has killed none. before: count_kills() of then."""
    now = count_kills()
    if now is None or now <= (before or 0):
        return ""
    limit = find_limit_bytes()
    where = "on this host" if limit is None else f"in its cgroup of {format_mebibytes(limit / MIB)}"
    return f"maybe by the kernel: memory ran out {where}, and it killed a process"


def _read_limits() -> list[tuple[int, int]]:
    """Return limit and bytes in use of each group that has a limit."""
    limits = []
    for group in _find_groups():
        limit = _read_limit(group)
        used = _read_number(group / "memory.current")
        cached = CACHED
        if used is None:
            used, cached = _read_number(group / "memory.usage_in_bytes"), OLD_CACHED
        if limit is not None and used is not None:
            counts = _read_counts(group / "memory.stat")
            limits.append((limit, used - sum(counts.get(name, 0) for name in cached)))
    return limits


def _find_groups() -> list[Path]:
    """Return the memory cgroups of this process and those above it, of either version."""
    lines: list[str] = []
    with suppress(OSError):
        lines = OWN.read_text().splitlines()
    groups: list[Path] = []
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and "memory" not in names.split(","):
            continue
        for mount in [ROOT / "memory"] if names else [ROOT, ROOT / "unified"]:
            group = mount / path.strip("/")
            # A container's own may be mounted in the place of the whole tree.
            while group != mount.parent:
                groups.append(group)
                group = group.parent
    return list(dict.fromkeys(groups))


def _read_limit(group: Path) -> int | None:
    limit = _read_number(group / "memory.max")
    limit = _read_number(group / "memory.limit_in_bytes") if limit is None else limit
    return None if limit is None or limit >= LEAST_UNLIMITED else limit


def _read_number(file: Path) -> int | None:
    with suppress(OSError, ValueError):  # no such file; "max"
        return int(file.read_text())
    return None


def _read_counts(file: Path) -> dict[str, int]:
    """Return the numbers of a file of lines `name number`."""
    counts = {}
    with suppress(OSError):
        for line in file.read_text().splitlines():
            name, _, number = line.partition(" ")
            if number.isdecimal():
                counts[name] = int(number)
    return counts


class HostMemory:
    """Measures this process's resident memory."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._record_before = _read_peak_rss_bytes()
        self._highest = 0
        self._limit = find_limit_bytes()
        self._looked_at = 0  # bytes in use when its cgroup was asked
        self.read_rss_bytes()

    def read_rss_bytes(self) -> int:
        """Return what is in use now, which is remembered for the peak. Warns once where a limit
        is near."""
        now = int(self._process.memory_info().rss)
        if self._limit is not None and now - self._looked_at > self._limit * NEAR:
            self._looked_at = now
            free = read_free_bytes()
            if free < self._limit * NEAR:
                self._limit = None
                log.warning(
                    "memory: %s are free of the %s of this memory cgroup; a process that takes "
                    "more is killed. Take smaller batches or fewer workers, or raise the limit",
                    format_mebibytes(free / MIB),
                    format_mebibytes(read_total_bytes() / MIB),
                )
        self._highest = max(now, self._highest)
        return now

    def read_peak_bytes(self) -> int:
        """Return the most since this object was made. Exact where that is the process's record;
        where the process was larger before, the largest value seen at log points, a lower bound.

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
