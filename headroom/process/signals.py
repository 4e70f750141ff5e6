"""Makes signals and standard streams harmless to a command. A signal (Ctrl-C, SIGTERM, a
terminal that closes) ends it in order: it is raised as an exception where the program stands, and
again where a library has swallowed that; between two steps of a training it waits for the end of
the step. A standard stream never makes it fail: whoever reads it may be gone (`| head`), the disk
may be full, it may be closed from the start, and not every terminal can show every letter.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any


class ForgivingFile(io.FileIO):
    """A file that drops what cannot be written, instead of raising OSError."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def protect_standard_streams() -> None:
    """Replace stdout and stderr by streams that never fail; open closed ones on /dev/null.

    Call it before any file is opened: the first file would get the number of a closed
    stream, and then what is printed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        kept = io.TextIOWrapper(
            io.BufferedWriter(ForgivingFile(number, "w", closefd=False)),
            encoding=getattr(stream, "encoding", None),
            errors="backslashreplace",
            line_buffering=number == 2 or os.isatty(number),
        )
        setattr(sys, name, kept)


ENDING_SIGNALS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "hung up",
}
PATIENCE_S = 5.0  # after which it is raised again, where a library has swallowed it
AGAIN_S = (
    1.0  # a second Ctrl-C means it; a signal to a process and to its group comes twice at once
)

STEP_S = 10.0  # for a step to end; a second signal does not wait
_begun_in: int | None = None  # the process that has something to leave in order
_final_code: int | None = None  # of the process, whatever signal still comes
_asked: int | None = None
_asked_at = 0.0
_raised: weakref.ref[BaseException] | None = None
_waiting: Callable[[], None] | None = None


class Interrupted(KeyboardInterrupt):
    """Ctrl-C came."""


class Terminated(SystemExit):
    """A signal other than Ctrl-C came; the code is the exit code."""


def install_signal_handlers() -> None:
    """End this process from now on when a signal comes, with its exit code and no traceback.

    Signals that are ignored (nohup, a script's background job) stay ignored.
    """
    is_lead = os.environ.get("RANK", "0") == "0"  # of torchrun's processes: it tells for all
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle_signal if is_lead else signal.SIG_DFL)


@contextmanager
def defer_signals() -> Iterator[Callable[[], int | None]]:
    """Let a signal wait until a step has ended; yield a function that returns its number.

    The function returns None where no signal waits. Whoever calls it between two steps can
    write a checkpoint; `deliver_signal` then does what the signal would have done. A second
    signal, or no call for STEP_S, does it at once. SIGUSR1 only asks for a checkpoint.
    """
    global _waiting
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = _find_handlers(*ENDING_SIGNALS, signal.SIGUSR1)
    came: list[int] = []

    def put_off(number: int, frame: FrameType | None) -> None:
        waits = came and came[0] != signal.SIGUSR1
        if number == signal.SIGUSR1:
            came[:] = came or [number]
        elif waits:
            deliver()
        else:
            came[:] = [number]
            signal.signal(signal.SIGALRM, lambda *_: deliver() if came else None)
            signal.setitimer(signal.ITIMER_REAL, STEP_S)

    def deliver() -> None:
        number = came[0]
        came.clear()
        if number == signal.SIGUSR1:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        give_back()
        _call_handler(before[number], number)

    give_back = _put_handler(put_off, before)
    _waiting = deliver
    try:
        yield lambda: came[0] if came else None
        if came:
            deliver()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        give_back()


@contextmanager
def hold_signals(hurry: Callable[[], None]) -> Iterator[None]:
    """Let a signal wait until the block has come to its end, then do what it would have done.

    Ctrl-C calls `hurry`, which is to shorten what the block waits for.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, came = _find_handlers(*ENDING_SIGNALS), list[int]()

    def hold(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if number == signal.SIGINT:
            hurry()

    give_back = _put_handler(hold, before)
    try:
        yield
    finally:
        give_back()
    if came:
        _call_handler(before[came[0]], came[0])


def _find_handlers(*numbers: int) -> dict[int, Any]:
    """Return what stands for these signals, but for those that are ignored."""
    handlers: dict[int, Any] = {n: signal.getsignal(n) for n in numbers}
    return {n: handler for n, handler in handlers.items() if handler is not signal.SIG_IGN}


def _put_handler(handler: Callable[..., None], before: Mapping[int, Any]) -> Callable[[], None]:
    """Let the handler stand for what stands for signals now; return what undoes it."""
    # Where Prefect's own handler stands, it hears that a run is to be cancelled, and tells it apart
    # from a crash; else it hears nothing.
    engine = sys.modules.get("prefect.utilities.engine")
    theirs = getattr(engine, "_prefect_sigterm_handler", None)
    stands = theirs is not None and before.get(signal.SIGTERM) is theirs

    def put(handlers: Mapping[int, Any]) -> None:
        for number, one in handlers.items():
            signal.signal(number, one)
        if stands:
            setattr(engine, "_prefect_sigterm_handler", handlers[signal.SIGTERM])  # noqa: B010

    put(dict.fromkeys(before, handler))
    return lambda: put(before)


def _call_handler(handler: Any, number: int) -> None:
    if callable(handler):
        handler(number, sys._getframe(1))
    else:
        signal.raise_signal(number)


def deliver_signal() -> None:
    """Do what the signal that waits would have done; nothing where none waits."""
    if _waiting is not None:
        _waiting()


def enable_signal_exceptions() -> None:
    """Raise a signal as an exception from now on.

    Call it once there is something to clean up at the end.
    """
    global _begun_in
    _begun_in = os.getpid()


def disable_signal_exceptions(code: int | None = None) -> None:
    """Let a signal end the process at once again: everything is cleaned up.

    code: with which it ends then, where that is known; else it is that of the signal.
    """
    global _begun_in, _final_code
    _begun_in, _final_code = None, code
    signal.setitimer(signal.ITIMER_REAL, 0)


def find_exit_code() -> int | None:
    """Return the exit code of the signal that came; None where none came."""
    return None if _asked is None else 128 + _asked


def forget_signal() -> None:
    """Let the exit code not be that of the signal that came: it came too late to matter."""
    global _asked
    _asked = None


def describe_signal() -> str:
    """Return what the signal did to the command, such as "interrupted"."""
    return ENDING_SIGNALS.get(signal.Signals(_asked or signal.SIGINT), "ended")


def handle_signal(number: int, frame: FrameType | None) -> None:
    """Handle a signal that ends this process: raise Interrupted or Terminated, where there is
    something to clean up."""
    global _asked, _asked_at
    is_again = _asked is not None and _begun_in is not None
    if is_again and (number != signal.SIGINT or time.monotonic() - _asked_at < AGAIN_S):
        return
    _asked, _asked_at = number, time.monotonic()
    if _begun_in is None:
        try:
            if _final_code is None:
                os.write(2, f"{describe_signal()}\n".encode())
        finally:
            os._exit(128 + number if _final_code is None else _final_code)
    if _begun_in == os.getpid():  # not a worker process of ours
        signal.signal(signal.SIGALRM, _raise_if_swallowed)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_S, PATIENCE_S)
    raise _make_exception()


def _raise_if_swallowed(number: int, frame: FrameType | None) -> None:
    if _raised is None or _raised() is None:
        raise _make_exception()


def _make_exception() -> BaseException:
    global _raised
    number = _asked or signal.SIGINT
    error = Interrupted() if number == signal.SIGINT else Terminated(128 + number)
    _raised = weakref.ref(error)
    return error
