"""How the processes of a training on several machines ended, for those that come after them: the
launcher starts them again whatever the reason was, and what is wrong for good is told once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = "HEADROOM_ATTEMPTS"  # of this machine and this training
AGAIN = 3  # exit code of a process that is to begin again, with the others


def is_launched() -> bool:
    """Whether a launcher such as torchrun has started this process."""
    return "RANK" in os.environ


@contextmanager
def kept_here() -> Iterator[None]:
    """Inside, what this process starts keeps how it ended."""
    with TemporaryDirectory(prefix="headroom-") as folder:
        os.environ[FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[FOLDER]


def final() -> int | None:
    """The exit code of a process here that will not end otherwise; None where none was kept."""
    folder = os.environ.get(FOLDER)
    if folder is None or not (Path(folder) / "code").exists():
        return None
    return int((Path(folder) / "code").read_text())


def kept(code: int) -> int:
    """The exit code, kept where it is one of bad input or of a failure."""
    if code in (1, 2) and (folder := os.environ.get(FOLDER)) is not None:
        (Path(folder) / "code").write_text(str(code))
    return code
