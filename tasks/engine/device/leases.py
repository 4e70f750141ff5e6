"""One GPU, one training: a lease for each device of this host, which ends with the process that
holds it. Who comes first is served first. It needs no server, and holds across the users of a host.
It refuses to wait for longer than it was asked to.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tasks.engine.base.file_lock import FileLock
from tasks.engine.base.units import seconds

ASK_EVERY_S = 0.1
TELL_EVERY_S = 60.0
ALL = 0o666  # others may hold it after us
log = logging.getLogger(__name__)


def folder() -> Path:
    """Where the leases of this host lie; all that share its devices must share it."""
    return Path(os.environ.get("HEADROOM_LEASES") or Path(tempfile.gettempdir(), "headroom-leases"))


class Busy(TimeoutError):
    """All devices that would do are held; the text says by whom."""


class Leases:
    """The lease of one training: none at first, one after `take`, none after `close`."""

    def __init__(
        self,
        place: Path,
        *,
        wait_s: float,
        holder: str,
        told: Callable[[str], None] = lambda _: None,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """holder: what others are told of who has it. told: hears what is waited for, whenever that
        is another, and an empty text once nothing is."""
        self._place, self._wait_s, self._holder, self._told = place, wait_s, holder, told
        self._now_s, self._sleep = now_s, sleep
        self._lease: FileLock | None = None
        self.waited_s = 0.0

    @property
    def is_held(self) -> bool:
        """Whether this has one."""
        return self._lease is not None

    def take(self, devices: Sequence[str]) -> str:
        """The one of these devices, by their UUIDs in order of preference, that is held from now
        on. Raises Busy where none was free for so long, and OSError where no lease can be kept."""
        self.close()
        make(self._place)
        began_s, logged_s, waits_for = self._now_s(), -TELL_EVERY_S, ""
        with _Ticket(self._place, devices) as ticket:
            while True:
                found = next(
                    (d for d in devices if not ticket.is_behind(d) and self._took(d)), None
                )
                self.waited_s = self._now_s() - began_s
                reason = "" if found is not None else self._reason(devices)
                if reason != waits_for:
                    waits_for = reason
                    self._told(reason)
                if found is not None:
                    return found
                if self.waited_s >= self._wait_s:
                    self._told("")
                    raise Busy(reason)
                if self.waited_s - logged_s >= TELL_EVERY_S:
                    logged_s, up_to = self.waited_s, seconds(self._wait_s)
                    log.warning("waiting up to %s for a device: %s", up_to, reason)
                self._sleep(ASK_EVERY_S)

    def close(self) -> None:
        """Give it back."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def _took(self, device: str) -> bool:
        lease = FileLock(_lock(self._place, device), mode=ALL)
        if lease.take(self._holder):
            self._lease = lease
            return True
        lease.close()
        return False

    def _reason(self, devices: Sequence[str]) -> str:
        told = []
        for device in devices:
            with suppress(OSError), FileLock(_lock(self._place, device), mode=ALL) as lease:
                told.append(f"{device} is held by {lease.text() or 'another process'}")
        return "; ".join(told)


class _Ticket:
    """A place in the queue: a file, locked for as long as its process waits."""

    def __init__(self, place: Path, devices: Sequence[str]) -> None:
        self._place, self._devices = place, devices

    def __enter__(self) -> _Ticket:
        name = f"{time.time_ns():020d}-{os.getpid()}"
        half = self._place / f"{name}.new"
        self._lock = FileLock(half, mode=ALL)
        self._lock.take("\n".join(self._devices))
        self.path = self._place / f"{name}.ticket"
        os.rename(half, self.path)  # only now: others see it locked, or not at all
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.path.unlink()
        self._lock.close()

    def is_behind(self, device: str) -> bool:
        """Whether somebody who came before waits for that device too."""
        for path in sorted(self._place.glob("*.ticket")):
            if path >= self.path:
                return False
            with suppress(OSError), FileLock(path, mode=ALL) as other:
                wanted = other.text().split("\n")
                if other.take("\n".join(wanted)):
                    path.unlink()  # of a process that is gone
                elif device in wanted:
                    return True
        return False


def _lock(place: Path, device: str) -> Path:
    return place / f"{re.sub(r'[^A-Za-z0-9-]', '_', device)}.lock"


def make(place: Path) -> None:
    """The folder, in which every user of the host may keep files of their own. Raises OSError."""
    if not place.is_dir():
        place.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # another user's by now
            place.chmod(0o1777)
