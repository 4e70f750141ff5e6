"""The decorator of this project's Prefect tasks. A plain call of such a task is timed in the record
of the run around it, which also keeps why it failed; no error of it shows a secret to Prefect; no
argument of it is hashed or kept; and what it forks, such as the workers of a DataLoader, can end.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, ParamSpec, Protocol, TypeVar

from prefect import Task
from prefect._internal.concurrency import services
from prefect.cache_policies import NO_CACHE
from prefect.context import TagsContext

from headroom.prefect.prefect_http import TAG
from headroom.process.redaction import redact_errors

P = ParamSpec("P")
R = TypeVar("R")


class TimesStages(Protocol):
    """What a run does for its tasks; see record.Record."""

    def time_stage(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what the call returns."""


CURRENT_RUN: ContextVar[TimesStages | None] = ContextVar("CURRENT_RUN", default=None)

IS_RECORDED: ContextVar[bool] = ContextVar("IS_RECORDED", default=True)  # by Prefect


class RunTask(Task[P, R]):
    """A Prefect task that the run around it times."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task here, in this thread: signals reach it."""
        # For a slot of the tag that this process is known by, each task would ask Prefect: with its
        # server away, for a minute, to fail then.
        tags = TagsContext.get().current_tags
        with TagsContext(current_tags={tag for tag in tags if not tag.startswith(f"{TAG}:")}):
            run, call = CURRENT_RUN.get(), super().__call__ if IS_RECORDED.get() else self.fn
            if run is None:
                return call(*args, **kwargs)
            return run.time_stage(self.name, call, *args, **kwargs)


def run_task(function: Callable[P, R]) -> RunTask[P, R]:
    """Return the function as a task of a run."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        fix_prefect_after_fork()
        with redact_errors():  # Prefect keeps the text of a failed task
            return function(*args, **kwargs)

    return RunTask(call, cache_policy=NO_CACHE)


@cache
def fix_prefect_after_fork() -> None:
    """Mend, in every process forked from now on, the Prefect services copied from its parent.

    Prefect 3.8 takes away the event that tells that a service is done, and waits for it when the
    process ends: the process then fails with code 1, and PyTorch with it ("DataLoader worker
    exited unexpectedly").
    """
    os.register_at_fork(after_in_child=_mark_services_done)


def _mark_services_done() -> None:
    done = asyncio.Event()
    done.set()
    for service in list(services._active_services):
        service._done_event = done  # its thread did not come along: nothing is left to wait for
