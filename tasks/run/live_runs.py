"""Announces and finds trainings that live on this host, whoever's they are: each writes a
small file beside the leases, which it holds locked. The lock goes with its process, so that
a file that nobody holds is of a training that is gone. A training that can't write one
trains all the same.
"""

from __future__ import annotations

import json
import logging
import os
import pwd
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from tasks.engine.base.file_lock import FileLock, is_held
from tasks.engine.device import leases
from tasks.engine.device.leases import Leases
from tasks.process.prefect_http import compute_uptime
from tasks.process.redaction import redact

NEW_S = 60.0
MOST_BYTES = 2**16  # of a file that anybody may have written
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LiveRun:
    """What a training announces of itself; what it does not know yet is empty."""

    name: str = ""
    folder: str = ""
    run_id: str = ""
    stage: str = "starting"
    waits_for: str = ""
    device: str = ""
    steps: int = 0
    epochs: int = 0
    pid: int = 0
    started_at: float = 0.0  # the process, Unix time
    uptime_s: str = ""  # of the host then; see prefect_http.compute_uptime
    uid: int = 0  # of the file's owner, whatever the file says


class Announcement:
    """The announcement of this process.

    A context manager around a run: on exit it is removed.
    """

    def __init__(self, folder: Path, name: str) -> None:
        me = psutil.Process()
        told = {"name": redact(name), "folder": str(folder), "pid": me.pid}
        self.live = LiveRun(**told, started_at=me.create_time(), uptime_s=compute_uptime(me))  # type: ignore[arg-type]
        self._place = leases.find_lease_folder()
        self._path = self._place / f"{time.time_ns():020d}-{me.pid}.run"
        self._lock: FileLock | None = None

    def make_leases(self, wait_s: float, told: Callable[[str], None] = lambda _: None) -> Leases:
        """Return leases that announce here what they wait for, and call `told` with it."""
        holder = f"process {self.live.pid}, {self.live.name}"

        def waits(reason: str) -> None:
            self.tell(waits_for=reason)
            told(reason)

        return Leases(self._place, wait_s=wait_s, holder=holder, told=waits)

    def tell(self, **known: str | int) -> None:
        """Announce what is known from now on, by the fields of LiveRun."""
        self.live = replace(self.live, **known)  # type: ignore[arg-type]
        with suppress(OSError):
            if self._lock is not None:
                self._lock.write(json.dumps(asdict(self.live)))

    def __enter__(self) -> Announcement:
        half = self._path.with_suffix(".new")
        try:
            leases.make_shared_folder(self._place)
            self._lock = FileLock(half, mode=0o644)
            self._lock.take(json.dumps(asdict(self.live)))
            half.rename(self._path)  # only now: others see it locked, or not at all
        except OSError as error:
            log.info("flows.runs does not show this: %s %s", self._place, error.strerror)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._path.unlink()
        if self._lock is not None:
            self._lock.close()


def find_live_runs() -> list[LiveRun]:
    """Return the trainings that live, in the order in which they began.

    Files of trainings that are gone are removed.
    """
    found = []
    for path in leases.list_trusted_files(leases.find_lease_folder(), "*.run"):
        if not is_held(path):
            with suppress(OSError):
                path.unlink()
        elif (live := _read_live_run(path)) is not None:
            found.append(live)
    return found


def find_left_files() -> list[Path]:
    """Return this user's announcements and queue tickets whose processes are gone."""
    found = []
    for path in leases.list_trusted_files(leases.find_lease_folder(), "*.*"):
        with suppress(OSError):
            about = path.lstat()
            # Between its making and its locking a new one is nobody's.
            is_left = path.suffix in (".run", ".ticket") or (
                path.suffix == ".new" and time.time() - about.st_mtime > NEW_S
            )
            if is_left and about.st_uid == os.getuid() and not is_held(path):
                found.append(path)
    return found


def is_live(live: LiveRun) -> bool:
    """Return whether that training still lives, whatever else its process does."""
    of = (live.folder, live.pid, live.started_at)
    return any((one.folder, one.pid, one.started_at) == of for one in find_live_runs())


def find_process(live: LiveRun) -> psutil.Process | None:
    """Return that very process; None where it can't be seen, or is not its file's owner's."""
    with suppress(psutil.Error):
        process = psutil.Process(live.pid)
        is_same = abs(process.create_time() - live.started_at) < 1
        is_same |= compute_uptime(process) == live.uptime_s  # the clock was set since
        if is_same and process.uids().effective == live.uid:
            return process
    return None


def find_owner(live: LiveRun) -> str:
    """Return the name of its user."""
    return find_user_name(live.uid)


def find_user_name(uid: int) -> str:
    """Return the user's name; the number of one without, as in a container."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _read_live_run(path: Path) -> LiveRun | None:
    """Return what the file says; None where it is not what a training writes."""
    with suppress(OSError, ValueError, TypeError, AttributeError, OverflowError):
        with open(path, "rb", opener=_open_without_blocking) as file:
            text, uid = (
                file.read(MOST_BYTES).decode(errors="replace"),
                os.fstat(file.fileno()).st_uid,
            )
        told = json.JSONDecoder().raw_decode(text)[0]
        known = {k: type(v)(told.get(k, v)) for k, v in asdict(LiveRun()).items()}
        return LiveRun(**{**known, "uid": uid})
    return None


def _open_without_blocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
