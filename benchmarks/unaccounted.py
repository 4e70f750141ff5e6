"""This project's training without its accounting, to see what that costs: what times and counts the
phases of a step, and what measures the memory, does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

from tasks.engine.memory import Meter
from tasks.engine.phases import Phases


def _nothing(*_: object, **__: object) -> None:
    pass


def _uncounted(*_: object, **__: object) -> nullcontext[None]:
    return nullcontext()


def _no_series(_: object) -> dict[str, float]:
    return {}


@contextmanager
def unaccounted() -> Iterator[None]:
    """Trainings inside it account for neither time nor memory."""
    with (
        patch.multiple(Phases, begin=_nothing, mark=_nothing),
        patch.multiple(Phases, counting=_uncounted, counting_once=_uncounted),
        patch.multiple(Meter, phase=_nothing, window=_no_series),
    ):
        yield
