"""How much a process beside a training may work: as it likes while a core is idle, else so little
that the training does not notice.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

SHARE = 0.005  # of a core, where none is idle
SPARE_CORES = 0.5  # so much of one idle is a core to work on
WINDOW_S = 0.5  # to count idle cores over, at least


def _idle_s() -> float:
    """Seconds that all cores together have been idle, or waiting for a disk."""
    times = psutil.cpu_times()
    return float(times.idle + getattr(times, "iowait", 0.0))


class Pace:
    """Ask before each piece of work, and tell after it what it took."""

    def __init__(
        self,
        *,
        now_s: Callable[[], float] = time.monotonic,
        idle_s: Callable[[], float] = _idle_s,
    ) -> None:
        self._now_s, self._idle_s = now_s, idle_s
        self._seen = now_s(), idle_s()
        self._rest_until = 0.0
        self.has_spare = True  # a core was idle when it was last looked

    def may_work(self) -> bool:
        """Whether a core is idle, or the last piece of work long enough ago."""
        now = self._now_s()
        since, idle_before = self._seen
        if now - since >= WINDOW_S:
            idle = self._idle_s()
            self.has_spare = idle - idle_before >= SPARE_CORES * (now - since)
            self._seen = now, idle
        return self.has_spare or now >= self._rest_until

    def worked(self, cpu_s: float) -> None:
        """A piece of work took so many seconds of processor time."""
        self._rest_until = self._now_s() + cpu_s / SHARE
