"""How long a training may go on for now: seconds, a time of the clock, or until somebody asks. It
never cuts a step; it refuses a time that has passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import count

from tasks.engine.base.units import seconds
from tasks.engine.distributed.ranks import Ranks
from tasks.engine.settings.read_settings import ConfigError
from tasks.engine.settings.run_config import TrainConfig
from tasks.engine.training.loop import Stop

Asked = Callable[[], Stop | None]


class Budget:
    """Asked after each step: whether this is the last one for now."""

    def __init__(
        self, train: TrainConfig, asked: Asked, *, now_s: Callable[[], float] = time.time
    ) -> None:
        """asked: what else may want an end; it is heard first. now_s: Unix time."""
        self._asked, self._now_s = asked, now_s
        began = now_s()
        ends: list[tuple[float, str]] = []
        if train.max_s is not None:
            ends.append((began + train.max_s, f"train.max_s: {seconds(train.max_s)} are over"))
        if train.until is not None:
            ends.append((ends_at(train.until, began), f"train.until: it is {train.until}"))
        self._end_s, self._why = min(ends, default=(float("inf"), ""))

    def __call__(self) -> Stop | None:
        stop = self._asked()
        if stop is None and self._now_s() >= self._end_s:
            return Stop(self._why)
        return stop


def agreed(stop: Asked, ranks: Ranks, *, every: int) -> Asked:
    """The same where one process trains; else what the lead is told, every so many steps, since
    all have to end at the same one."""
    if ranks.is_alone:
        return stop
    calls = count(1)

    def agree() -> Stop | None:
        if next(calls) % every:
            return None
        found = stop() if ranks.is_lead else None
        if not ranks.lead_says(found is not None):
            return None
        reason, ends = ranks.of_lead((found.reason, found.ends) if found else ("", True))
        return found or Stop(reason, ends=ends, act=leave if ends and not reason else lambda: None)

    return agree


class Left(Exception):
    """The training ended for now, since its lead was asked to; there is a checkpoint."""


def leave() -> None:
    """Raises Left."""
    raise Left


def ends_at(until: str, now_s: float) -> float:
    """Unix time of `until`: a time of day, the next there is, or a date and a time.

    Raises ConfigError for one that has passed.
    """
    now = datetime.fromtimestamp(now_s)
    if len(until) > len("HH:MM"):
        end = datetime.fromisoformat(until)
        if end <= now:
            raise ConfigError(f"train.until: {until} has passed (it is {now:%Y-%m-%d %H:%M})")
        return end.timestamp()
    end = datetime.combine(now.date(), datetime.strptime(until, "%H:%M").time())
    return (end if end > now else end + timedelta(days=1)).timestamp()
