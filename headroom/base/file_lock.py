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
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.02  # on average twice as long as until the next try
_open_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """A lock on a file, taken by `take` or `share` and released by `close`. The file stays, and may
    hold a text about its holder."""

    def __init__(self, path: Path, *, mode: int = 0o600) -> None:
        """Open the file, or make it with that mode.

        Raises OSError where that fails, and, in a folder where others may put files, for a file
        that has a second hard link: writing here would overwrite that.
        """
        self.path, self._file = path, -1
        try:
            self._file = os.open(path, os.O_RDWR | _OPEN_FLAGS)  # perhaps another user's
        except FileNotFoundError:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | _OPEN_FLAGS, mode)
            with suppress(OSError):  # another user's, who was faster
                os.fchmod(self._file, mode)
        about = os.fstat(self._file)
        if not stat.S_ISREG(about.st_mode) or (mode & 0o077 and about.st_nlink > 1):
            self.close()
            raise OSError(errno.EPERM, "is no file of its own, as a lock has to be", str(path))

    def take(self, text: str = "") -> bool:
        """Take the lock if it is free and write `text` into the file; return whether this
        object holds it now."""
        pause_s = FIRST_PAUSE_S
        while not self._try_lock(LOCK_EX):
            if not self._try_lock(LOCK_SH):
                return False
            flock(self._file, LOCK_UN)  # nobody has it: somebody shares it for an instant
            time.sleep(pause_s * random.random())
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)  # who shares it may be stopped meanwhile
        _open_locks.add(self)
        self.write(text)
        return True

    def share(self) -> None:
        """Hold the lock beside others who share it; wait while somebody has it alone."""
        flock(self._file, LOCK_SH)
        _open_locks.add(self)

    def try_share(self) -> bool:
        """Return whether the lock is held beside others now; not where somebody has it alone. Who
        takes it meanwhile waits: it is for an instant."""
        is_shared = self._try_lock(LOCK_SH)
        if is_shared:
            _open_locks.add(self)
        return is_shared

    def _try_lock(self, kind: int) -> bool:
        try:
            flock(self._file, kind | LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def write(self, text: str) -> None:
        """Replace the file's text. A process that reads meanwhile finds the whole text, perhaps
        with more behind it. Raises OSError."""
        body = text.encode()
        os.pwrite(self._file, body, 0)
        os.ftruncate(self._file, len(body))

    def read_text(self) -> str:
        """Return what the present holder wrote there, or the last one."""
        return os.pread(self._file, 4096, 0).decode(errors="replace")

    def is_in_place(self) -> bool:
        """Return whether its file is still the one that lies there by that name."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._file), os.lstat(self.path))
        return False

    def close(self) -> None:
        """Release the lock."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        _open_locks.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock of that file. Processes that ask at the same
    moment do not see each other, and `take` ignores them."""
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
        try:
            flock(file, LOCK_SH | LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
    return False


def _close_in_child() -> None:
    for lock in list(_open_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)
