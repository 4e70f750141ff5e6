"""A lock on a file that the kernel gives back when the process that holds it dies, however it dies.
Forked children, such as the workers of a DataLoader, do not hold it.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import time
import weakref
from contextlib import suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, flock
from pathlib import Path
from typing import Self

# No link, and no waiting for the other end of a pipe.
_ITSELF = os.O_NOFOLLOW | os.O_NONBLOCK
_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """Held from `take` to `close`. The file stays, and may hold a text about who has it."""

    def __init__(self, path: Path, *, mode: int = 0o600) -> None:
        """Raises OSError where the file can be neither opened nor made with that mode, and, where
        others may lay it there, for one that is also found elsewhere: what is written here would
        overwrite that."""
        self.path, self._file = path, -1
        try:
            self._file = os.open(path, os.O_RDWR | _ITSELF)  # perhaps another user's
        except FileNotFoundError:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | _ITSELF, mode)
            with suppress(OSError):  # another user's, who was faster
                os.fchmod(self._file, mode)
        about = os.fstat(self._file)
        if not stat.S_ISREG(about.st_mode) or (mode & 0o077 and about.st_nlink > 1):
            self.close()
            raise OSError(errno.EPERM, "is no file of its own, as a lock has to be", str(path))

    def take(self, text: str = "") -> bool:
        """Whether it is held now, by this; then the file holds the text."""
        while not self._took(LOCK_EX):
            if not self._took(LOCK_SH):
                return False
            flock(self._file, LOCK_UN)  # nobody has it: somebody asked `is_held`, for an instant
            time.sleep(0.001 * random.random())
        _held.add(self)
        self.write(text)
        return True

    def _took(self, kind: int) -> bool:
        try:
            flock(self._file, kind | LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def write(self, text: str) -> None:
        """The text from now on; who reads meanwhile finds it whole, perhaps with more behind it.
        Raises OSError."""
        body = text.encode()
        os.pwrite(self._file, body, 0)
        os.ftruncate(self._file, len(body))

    def text(self) -> str:
        """What its holder wrote there, or the last one."""
        return os.pread(self._file, 4096, 0).decode(errors="replace")

    def is_in_place(self) -> bool:
        """Whether its file is still the one that lies there by that name."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._file), os.lstat(self.path))
        return False

    def close(self) -> None:
        """Give it back."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        _held.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_held(path: Path) -> bool:
    """Whether a process holds the lock of that file. Those who ask at once do not see each other,
    and `take` passes them over."""
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | _ITSELF)
        try:
            flock(file, LOCK_SH | LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
    return False


def _let_go() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_let_go)
