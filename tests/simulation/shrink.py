"""Finds the shortest history that still fails: parts are left out, one after the other, for as long
as what is left fails too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.simulation.drawing import History

MOST_TRIES = 400


def shrink(history: History, fails: Callable[[History], bool]) -> History:
    """Return a history of fewer parts that fails as well."""
    tries = 0
    while True:
        for shorter in _list_shorter(history):
            tries += 1
            if tries > MOST_TRIES:
                return history
            if fails(shorter):
                history = shorter
                break
        else:
            return history


def _list_shorter(history: History) -> Iterator[History]:
    for name in ("faults", "sweeps", "starts"):
        parts = getattr(history, name)
        for i in range(len(parts)):
            yield replace(history, **{name: parts[:i] + parts[i + 1 :]})
    for name, plain in (
        *(("resumes_at_last", False), ("busy", False), ("lies", False)),
        *(("direct", False), ("switch", 0.0)),
    ):
        if getattr(history, name) != plain:
            yield replace(history, **{name: plain})  # type: ignore[arg-type]
    for i, start in enumerate(history.starts):
        for name, plain in (
            *(("points", 1), ("pause_s", 0.0), ("after_s", 0.0), ("device", False)),
            *(("beside", False), ("by", "key"), ("ends", "done"), ("keeps_every", 1)),
        ):
            if getattr(start, name) != plain:
                simpler = replace(start, **{name: plain})  # type: ignore[arg-type]
                starts = (*history.starts[:i], simpler, *history.starts[i + 1 :])
                yield replace(history, starts=starts)
    for i, fault in enumerate(history.faults):
        if fault.nth > 1:
            for nth in (fault.nth // 2, fault.nth - 1):
                earlier = replace(fault, nth=max(1, nth))
                faults = (*history.faults[:i], earlier, *history.faults[i + 1 :])
                yield replace(history, faults=faults)
