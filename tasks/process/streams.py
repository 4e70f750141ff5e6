"""Standard streams that are no reason to fail: whoever reads them may go (`| head`), the disk may
be full, they may be closed from the start, and not every terminal can show every letter.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class Deaf(io.FileIO):
    """A file that takes what it can't write, and forgets it."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def keep() -> None:
    """Make stdin, stdout and stderr such streams; a closed one leads nowhere.

    Before any file is opened: the first would get a closed stream's number, and what is printed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        kept = io.TextIOWrapper(
            io.BufferedWriter(Deaf(number, "w", closefd=False)),
            encoding=getattr(stream, "encoding", None),
            errors="backslashreplace",
            line_buffering=number == 2 or os.isatty(number),
        )
        setattr(sys, name, kept)
