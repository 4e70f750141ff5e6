"""The keys under which processes train: each has one at a time, from before its run has a folder,
so that of two first starts one trains. It imports no PyTorch.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from headroom.base.file_lock import FileLock, is_held
from headroom.base.units import make_printable
from headroom.settings.read_settings import ConfigError

KEYS = "keys"  # the folder, beside those of runs


class KeyHeld(ConfigError):
    """Another process, or another run of this one, has the key."""


def lock_key(runs: Path, key: str, *, setting: str = "run.key") -> KeyLock:
    """Return the key, held until it is closed: from before its run has a folder, so that of two
    first starts one trains. Raises KeyHeld where another process has it, and ConfigError where
    nothing can be written."""
    try:
        lock = KeyLock.take(runs, key)
    except OSError as error:
        raise ConfigError(f"runs: {runs} can't be written ({error.strerror})") from None
    if isinstance(lock, KeyLock):
        return lock
    raise KeyHeld(
        f"{setting}: {make_printable(key, limit=80)} is being trained by {lock}; wait for it, end "
        "it with "
        "`python -m flows.stop`, or choose another key"
    )


def is_key_held(runs: Path, key: str) -> bool:
    """Return whether a process trains under this key, or is about to."""
    return is_held(_make_key_path(runs, key))


def _make_key_path(runs: Path, key: str) -> Path:
    return runs / KEYS / f"{sha256(key.encode()).hexdigest()[:24]}.lock"


@dataclass(frozen=True)
class KeyLock:
    """A key that this process has. Its file goes with it."""

    lock: FileLock

    @classmethod
    def take(cls, runs: Path, key: str) -> KeyLock | str:
        """Return the lock of the key, or who else has it. Raises OSError."""
        path = _make_key_path(runs, key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            lock = FileLock(path)
            if not lock.take(f"process {os.getpid()}"):
                with lock:
                    return lock.read_text()
            if lock.is_in_place():
                return cls(lock)
            lock.close()  # whoever had it has removed the file since it was opened here

    def __enter__(self) -> KeyLock:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.lock.path.unlink()
        self.lock.close()
