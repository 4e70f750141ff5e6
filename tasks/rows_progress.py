"""The line a person watches while rows are predicted: how many, how fast, and how long still. It
lives in the terminal as that of a training does, and refuses as little.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from tasks.engine.base.units import clock, number, seconds
from tasks.progress import Progress

PERCENT = 100


class RowsProgress(Progress):
    """Shows how far a prediction is. Use as a context manager."""

    def __init__(
        self,
        amount: int,
        stream: TextIO | None = None,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """amount: what there is to do, in bytes or rows; see row_files.amount."""
        super().__init__(amount, PERCENT, stream, now_s=now_s)
        self._rows = 0

    def told(self, rows: int, done: int) -> None:
        """So many rows are predicted, and so much of the amount is done."""
        self._rows = rows
        self.update({}, done)

    def _line(self, now_s: float, *, columns: int = 10**6) -> str:
        """ "41,200 rows  12,300 rows/s  0:12 left", less of it where there is less room."""
        passed_s = now_s - self._began_s
        rows = f"{self._rows:,} rows"
        speed = [f"{number(self._rows / passed_s)} rows/s"] if passed_s > 0 else []
        share = self._step / self._total_steps
        is_over = self._ended or share >= 1
        left = [] if share <= 0 else [f"{clock(passed_s * (1 - share) / share)} left"]
        last = [seconds(passed_s)] if is_over else left
        lines = ("  ".join([rows, *kept]) for kept in ([*speed, *last], speed))
        return next((line for line in lines if len(line) <= columns), rows)
