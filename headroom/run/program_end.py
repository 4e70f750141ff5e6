"""How the program around a run comes to its end, for a run that nobody has ended: by an error, by
an exit and its code, or at its last line. Of a notebook, whose errors end no program, an error
counts for a run that was begun in the cell that it left, and is heard of when that cell ends.
"""

from __future__ import annotations

import dis
import sys
import threading
import traceback
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from headroom.base import notebook

UNKNOWN = "unknown"
_followers = 0
_before: Any = None  # sys.exit, as it was
_code: list[Any] = []  # that it was called with last


class ProgramEnd:
    """What ends the program that calls here. `close` it."""

    def __init__(self, end: Callable[[BaseException], None]) -> None:
        """end: of the run, by the error that has left the cell of a notebook that calls here."""
        global _followers, _before
        self._cell = notebook.find_cell()
        self._leave_cell = notebook.follow_cell(end)
        self._error_before = getattr(sys, "last_value", None)
        self._root: FrameType | None = None
        self._cells: set[CodeType] = set()
        self._is_main = threading.current_thread() is threading.main_thread()
        if not self._is_main:
            return
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            self._root = frame
            if frame.f_code.co_name.startswith(("<module>", "<cell line")):
                self._cells.add(frame.f_code)
            frame = frame.f_back
        _followers += 1
        if sys.exit is not _exit:
            _before, sys.exit = sys.exit, _exit

    def close(self) -> None:
        """Let go of the program."""
        global _followers
        self._leave_cell()
        self._root = None
        if self._is_main:
            self._is_main = False
            _followers -= 1
            if not _followers and sys.exit is _exit:
                sys.exit = _before

    def is_run_again(self) -> bool:
        """Return whether the cell of a notebook that has called here is run once more, now."""
        before, now = self._cell, notebook.find_cell()
        return (
            before is not None
            and now is not None
            and now.key == before.key
            and now.turn != before.turn
        )

    def find_error(self, *, is_over: bool) -> BaseException | None:
        """Return what the run has been left by; None where it was not by an error. is_over: the
        program is at its end."""
        error: BaseException | None = getattr(sys, "last_value", None)
        if error is not None and error is not self._error_before and self._is_of_run(error):
            return error
        if is_over and self._root is not None and _was_left(self._root):
            return SystemExit(*(_code or [UNKNOWN]))
        return None

    def _is_of_run(self, error: BaseException) -> bool:
        frames = traceback.walk_tb(error.__traceback__)
        return not self._cells or any(frame.f_code in self._cells for frame, _ in frames)


def _exit(code: Any = None) -> Any:
    """Exit, as sys.exit does; keep the code, which nobody tells at the end."""
    if threading.current_thread() is threading.main_thread():
        _code[:] = [code]
    return _before(code)


def _was_left(frame: FrameType) -> bool:
    """Return whether a frame that is done was left by an exception: it stands where that came."""
    at = frame.f_code.co_code[frame.f_lasti]
    return not dis.opname[at].startswith("RETURN")
