"""Lets Ctrl-C end a command that is still being imported in a word and with its exit code, where
Python would print the imports that it interrupted. It imports nothing slow itself.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def answer_first_interrupt() -> None:
    """End this process at a Ctrl-C until signals.install_signal_handlers takes it over.

    A Ctrl-C that is ignored (a script's background job) stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_process)


def _end_process(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(128 + number)
