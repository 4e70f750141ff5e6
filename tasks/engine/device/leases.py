"""One GPU, one training: a lease for each device of this host, which ends with the process that
holds it. Who comes first is served first. It needs no server, and holds across the users of a host.
It refuses to wait for longer than it was asked to.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tasks.engine.base.file_lock import FileLock
from tasks.engine.base.units import printable, seconds

ASK_EVERY_S = 0.1
TELL_EVERY_S = 60.0
ALL = 0o666  # others may hold it after us
SHARED = ("/run/lock", "/tmp")
HOLDER_LETTERS = 200  # of what others wrote
log = logging.getLogger(__name__)


def folder() -> Path:
    """Where the leases of this host lie; all that share its devices must share it.

    So it is no user's own, such as XDG_RUNTIME_DIR or TMPDIR, where there is one for all. The first
    is Linux's place for locks: nothing clears files from there because they are old.
    """
    if given := os.environ.get("HEADROOM_LEASES"):
        return Path(given)
    usual = (place for place in SHARED if _is_for_all(place) and os.access(place, os.W_OK))
    return Path(next(usual, tempfile.gettempdir()), "headroom-leases")


def _is_for_all(place: str) -> bool:
    """Whether every user may keep files there, which no other may replace."""
    with suppress(OSError):
        about = os.stat(place)
        return about.st_uid == 0 and about.st_mode & 0o1777 == 0o1777
    return False


def make(place: Path) -> None:
    """The folder, in which every user of the host may keep files of their own. Raises OSError, also
    where it is another user's who could put what he likes in the place of those."""
    if not os.path.lexists(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        # Nobody finds it before it has its mode, and no link is followed.
        half = Path(tempfile.mkdtemp(prefix=f"{place.name}.", dir=place.parent))
        half.chmod(0o1777)
        try:
            half.rename(place)
        except OSError:  # another was faster
            half.rmdir()
    _check(place)


def files(place: Path, pattern: str) -> list[Path]:
    """The files there by such a name, in order; none where it is no folder to be trusted."""
    with suppress(OSError):
        _check(place)
        return sorted(place.glob(pattern))
    return []


def _check(place: Path) -> None:
    """Raise OSError where the folder, or a link that leads to it, is another user's; but one is
    good, whoever made it, where all may keep files and none may touch another's."""
    for about in (place.lstat(), place.stat()):
        is_sticky = stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_ISVTX
        if not is_sticky and about.st_uid not in (0, os.getuid()):
            told = "is another user's, who could replace what is in it; `chmod 1777` it or name "
            told += "another folder in HEADROOM_LEASES"
            raise OSError(errno.EPERM, told, str(place))


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
                holder = printable(lease.text(), limit=HOLDER_LETTERS) or "another process"
                told.append(f"{device} is held by {holder}")
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
        for path in files(self._place, "*.ticket"):
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
