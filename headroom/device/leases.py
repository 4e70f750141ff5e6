"""Give each GPU to one training at a time: a lease for each device of this host, which ends
with the process that holds it. Trainings get it in the order in which they asked, and one that
needs several gets them all at once. It needs no server, and holds across the users of a host.
Waiting ends after the time that the run allows.
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

from headroom.base.file_lock import FileLock, is_held
from headroom.base.units import format_seconds, make_printable

ASK_EVERY_S = 0.1
TELL_EVERY_S = 60.0
ALL = 0o666  # others may hold it after us
SHARED = ("/run/lock", "/tmp")
HOLDER_LETTERS = 200  # of what others wrote
log = logging.getLogger(__name__)


def find_lease_folder() -> Path:
    """Return the folder of this host's leases; all users that share its devices must share it.

    So it is no user's own, such as XDG_RUNTIME_DIR or TMPDIR, where there is one for all. The
    first is Linux's place for locks: nothing clears files from there because they are old.
    """
    if folder := os.environ.get("HEADROOM_LEASES"):
        return Path(folder)
    usual = (place for place in SHARED if _is_open_to_all(place) and os.access(place, os.W_OK))
    return Path(next(usual, tempfile.gettempdir()), "headroom-leases")


def _is_open_to_all(place: str) -> bool:
    """Return whether every user may keep files there, which no other may replace."""
    with suppress(OSError):
        about = os.stat(place)
        return about.st_uid == 0 and about.st_mode & 0o1777 == 0o1777
    return False


def make_shared_folder(place: Path) -> None:
    """Make a folder in which every user of the host may keep files of their own. Raises
    OSError, also where it belongs to another user, who could replace those files."""
    if not os.path.lexists(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        # Nobody finds it before it has its mode, and no link is followed.
        half = Path(tempfile.mkdtemp(prefix=f"{place.name}.", dir=place.parent))
        half.chmod(0o1777)
        try:
            half.rename(place)
        except OSError:  # another was faster
            half.rmdir()
    _check_owner(place)


def list_trusted_files(place: Path, pattern: str) -> list[Path]:
    """Return the files there by such a name, in order; none where the folder cannot be trusted."""
    with suppress(OSError):
        _check_owner(place)
        return sorted(place.glob(pattern))
    return []


def _check_owner(place: Path) -> None:
    """Raise OSError where the folder, or a link that leads to it, belongs to another user; but
    a folder is good, whoever made it, where all may keep files and none may touch another's."""
    for about in (place.lstat(), place.stat()):
        is_sticky = stat.S_ISDIR(about.st_mode) and about.st_mode & stat.S_ISVTX
        if not is_sticky and about.st_uid not in (0, os.getuid()):
            problem = "is another user's, who could replace what is in it; `chmod 1777` it or name "
            problem += "another folder in HEADROOM_LEASES"
            raise OSError(errno.EPERM, problem, str(place))


class DevicesBusyError(TimeoutError):
    """All devices that would do are leased; the text says by whom."""


class Leases:
    """The leases of one training: none at first, those of its devices after `take`, none after
    `close`."""

    def __init__(
        self,
        place: Path,
        *,
        wait_s: float,
        holder: str,
        show_waiting: Callable[[str], None] = lambda _: None,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """holder: how others see the holder of the lease. show_waiting: called with what is waited
        for, whenever that changes, and with an empty text once nothing is."""
        self._place, self._wait_s, self._holder = place, wait_s, holder
        self._show_waiting = show_waiting
        self._now_s, self._sleep = now_s, sleep
        self._leases: dict[str, FileLock] = {}  # by device
        self.waited_s = 0.0

    @property
    def is_held(self) -> bool:
        """Return whether this object has a lease."""
        return bool(self._leases)

    @property
    def devices(self) -> list[str]:
        """Return what is leased, the device that `take` has returned first."""
        return list(self._leases)

    def take(self, devices: Sequence[str], *, beside: Sequence[str] = (), more: int = 0) -> str:
        """Lease one of these devices, given by their UUIDs in order of preference, and return
        it. more: so many others of `beside` are leased with it, all or none: of two trainings that
        held one device each, and waited for the other's, neither would ever begin.

        Raises DevicesBusyError where they were not free for so long, and OSError where no lease
        can be kept."""
        self.close()
        make_shared_folder(self._place)
        began_s, logged_s, waits_for = self._now_s(), -TELL_EVERY_S, ""
        wanted = list(dict.fromkeys([*devices, *(beside if more else ())]))
        with _Ticket(self._place, wanted) as ticket:
            while True:
                is_free = self._try_take_first(devices, ticket)
                is_free = is_free and self._try_take_beside(beside, more, ticket)
                self.waited_s = self._now_s() - began_s
                reason = "" if is_free else self._describe_holders(wanted)
                if reason != waits_for:
                    waits_for = reason
                    self._show_waiting(reason)
                if is_free:
                    return self.devices[0]
                if self.waited_s >= self._wait_s:
                    self._show_waiting("")
                    raise DevicesBusyError(reason)
                if self.waited_s - logged_s >= TELL_EVERY_S:
                    logged_s, up_to = self.waited_s, format_seconds(self._wait_s)
                    log.warning("waiting up to %s for a device: %s", up_to, reason)
                self._sleep(ASK_EVERY_S)

    def close(self) -> None:
        """Release the leases."""
        while self._leases:
            self._leases.popitem()[1].close()

    def _try_take_first(self, devices: Sequence[str], ticket: _Ticket) -> bool:
        return any(not ticket.is_behind(d) and self._try_take(d) for d in devices)

    def _try_take_beside(self, beside: Sequence[str], more: int, ticket: _Ticket) -> bool:
        """Lease so many more; where they are not there, give the first one back too."""
        for device in beside:
            if len(self._leases) > more:
                break
            if device not in self._leases and not ticket.is_behind(device):
                self._try_take(device)
        if len(self._leases) > more:
            return True
        self.close()
        return False

    def _try_take(self, device: str) -> bool:
        lease = FileLock(_make_lock_path(self._place, device), mode=ALL)
        if lease.take(self._holder):
            self._leases[device] = lease
            return True
        lease.close()
        return False

    def _describe_holders(self, devices: Sequence[str]) -> str:
        """Describe who holds them; where nobody does at the moment, who did last."""
        descriptions = []
        held = [device for device in devices if is_held(_make_lock_path(self._place, device))]
        for device in held or devices:
            with (
                suppress(OSError),
                FileLock(_make_lock_path(self._place, device), mode=ALL) as lease,
            ):
                holder = (
                    make_printable(lease.read_text(), limit=HOLDER_LETTERS) or "another process"
                )
                descriptions.append(f"{device} is held by {holder}")
        return "; ".join(descriptions)


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
        """Return whether somebody who came before waits for that device too."""
        for path in list_trusted_files(self._place, "*.ticket"):
            if path >= self.path:
                return False
            with suppress(OSError), FileLock(path, mode=ALL) as other:
                wanted = other.read_text().split("\n")
                if other.take("\n".join(wanted)):
                    path.unlink()  # of a process that is gone
                elif device in wanted:
                    return True
        return False


def _make_lock_path(place: Path, device: str) -> Path:
    return place / f"{re.sub(r'[^A-Za-z0-9-]', '_', device)}.lock"
