"""Faults of ours, put where a test wants one, and runs that nobody sends."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import pytest

from headroom.run import account

# Answers as the sending process does, to the order, to the begin of the run and then to its end;
# sends nothing.
SENDER = r"""1s/^.*$/{"to": "open"}\n{"to": "open"}/
2s/^.*$/{"history": []}\n{"to": "begin", "run_id": "1", "experiment_id": "0"}/
3,99s/^.*$/{"to": "close", "closed": true, "times": {}}/"""


def fail(*_: Any, **__: Any) -> Any:
    """Raise an error of ours."""
    raise LookupError("a fault of ours")  # wherever we stand


def break_function(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    """Let the function, wherever it is held, raise an error of ours as soon as it is called."""
    inner = inspect.unwrap(getattr(function, "__func__", function))
    code = fail.__code__.replace(co_freevars=inner.__code__.co_freevars)
    monkeypatch.setattr(inner, "__code__", code)


def list_points(cls: type, but: tuple[str, ...] = (), *, is_within: bool = False) -> list[str]:
    """Return the methods of a class that are ours: what its users may call, or is_within: what
    those call."""
    names = [
        name
        for base in cls.__mro__
        if base.__module__.startswith("headroom.") and base.__name__ not in ("Recording", "Guarded")
        for name, found in vars(base).items()
        if isinstance(found, FunctionType)
        and name.startswith("_") == is_within
        and not name.startswith("__")
    ]
    return sorted({*names} - {*but, "take_error"})


def find_method(cls: type, name: str) -> Any:
    """Return the method as its class has it."""
    return next(vars(base)[name] for base in cls.__mro__ if name in vars(base))


def end_prefect_threads() -> None:
    """End the threads that Prefect keeps of flows of earlier tests: with each ping of a websocket
    they draw from Python's random numbers, which are not the loop's own then."""
    if all(thread.name != "GlobalEventLoopThread" for thread in threading.enumerate()):
        return
    from prefect._internal.concurrency.threads import wait_for_global_loop_exit
    from prefect.events.worker import EventsWorker

    EventsWorker.drain_all(timeout=10)
    wait_for_global_loop_exit(timeout=10)


def end_open_accounts() -> None:
    """End what a fault has kept open: else it follows the program's end through later tests."""
    for run in [*account._open]:
        run.abandon("its test is over")
    assert not account._open


@contextmanager
def send_nothing(
    monkeypatch: pytest.MonkeyPatch, *, counts_all: bool = True, has_compiled: bool = False
) -> Iterator[None]:
    """Keep runs that nobody sends, whose only step is counted, and leave what frameworks keep of a
    process as it was: of accelerate its own state, of Lightning handlers.

    counts_all: also where that takes a large part of the time; has_compiled: a part of the loop may
    have been compiled."""

    end_prefect_threads()

    def start_sender(where: Any) -> subprocess.Popen[str]:
        pipe: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(["sed", "-u", SENDER], **pipe)

    monkeypatch.setattr("headroom.tracking.journal.start_sender", start_sender)
    monkeypatch.setattr("headroom.tracking.journal.SILENT_S", 0.2)
    monkeypatch.setattr("headroom.tracking.journal.OPEN_S", 0.2)
    if not has_compiled:
        monkeypatch.setattr("headroom.watch.own_loop.has_compiled", lambda: False)
    if counts_all:
        monkeypatch.setattr("headroom.watch.own_loop.COUNT_SHARE", float("inf"))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if "accelerate" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(True)
