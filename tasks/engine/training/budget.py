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
        self,
        train: TrainConfig,
        asked: Asked,
        *,
        passed_s: Callable[[], float] = time.monotonic,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """asked: what else may want an end; it is heard first. passed_s: seconds, whatever somebody
        does to the clock of the host, which is now_s, Unix time."""
        self._asked = asked
        self._ends: list[tuple[Callable[[], float], float, str]] = []
        if train.max_s is not None:
            why = f"train.max_s: {seconds(train.max_s)} are over"
            self._ends.append((passed_s, passed_s() + train.max_s, why))
        if train.until is not None:
            end_s = ends_at(train.until, now_s())
            self._ends.append((now_s, end_s, f"train.until: it is {train.until}"))

    def __call__(self) -> Stop | None:
        stop = self._asked()
        if stop is None:
            for clock, end_s, why in self._ends:
                if clock() >= end_s:
                    return Stop(why)
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
        clocks = [datetime.strptime(until, "%Y-%m-%d %H:%M")]
    else:
        time_of_day = datetime.strptime(until, "%H:%M").time()
        clocks = [datetime.combine(now + timedelta(days=n), time_of_day) for n in range(3)]
    ends = (end_s for clock in clocks for end_s in _unix_times(clock))
    end_s = min((end_s for end_s in ends if end_s > now_s), default=None)
    if end_s is None:
        raise ConfigError(f"train.until: {until} has passed (it is {now:%Y-%m-%d %H:%M})")
    return end_s


def _unix_times(clock: datetime) -> list[float]:
    """When the clock of the host shows that: twice in the hour that comes twice. One that is left
    out in spring is there when it would have been."""
    found = {clock.replace(fold=fold).timestamp() for fold in (0, 1)}
    shown = [time_s for time_s in found if datetime.fromtimestamp(time_s) == clock]
    return shown or [clock.timestamp()]
