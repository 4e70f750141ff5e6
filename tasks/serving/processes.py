"""The processes that `serve` starts: detached, each in a session of its own, with a log. They are
known again by pid and start time, and what they start in turn by a mark in its environment; nothing
else is ever ended, however much it looks like one of ours.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

import psutil

MARK = "HEADROOM_SERVE"  # in the environment of all we start: the value is drawn once for a folder
SAME_START_S = 2.0  # a start time is counted from boot, and the clock may have been set since


class ServeError(RuntimeError):
    """The services can't be brought up or down; the text says why, and what helps."""


class SettingError(ServeError):
    """A port can't be what the environment says."""


@dataclass(frozen=True)
class Component:
    """One process of the service, as it is remembered."""

    name: str
    pid: int
    started_at: float  # unix time, as the kernel tells it
    address: str
    mark: str

    def process(self) -> psutil.Process | None:
        """That very process if it still runs; not another one that has got its pid since."""
        with suppress(psutil.Error):
            found = psutil.Process(self.pid)
            if is_running(found) and abs(found.create_time() - self.started_at) < SAME_START_S:
                return found
        return None


def start(
    name: str,
    command: Sequence[str],
    *,
    address: str,
    folder: Path,
    env: Mapping[str, str],
    cwd: Path,
) -> Component:
    """Start one process in a session of its own; what it prints goes to `folder`/`name`.log."""
    with open(log_path(folder, name), "w") as log:
        # Not a child of ours once we have gone, and nothing to close: init collects it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=cwd,
            env=dict(env),
            start_new_session=True,
        )
    try:
        started_at = psutil.Process(process.pid).create_time()
    except psutil.NoSuchProcess:
        raise died(name, folder) from None
    process.returncode = 0  # ends itself later; silences "subprocess is still running"
    return Component(name, process.pid, started_at, address, env[MARK])


def is_running(process: psutil.Process) -> bool:
    """Whether it still does anything. A zombie that nobody collects does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def mark_of(folder: Path) -> str:
    """The mark of this folder's service. It stays: a training may outlive what has started it."""
    path = folder / "mark"
    if not path.exists():
        path.write_text(uuid4().hex)
    return path.read_text()


def marked(mark: str) -> Iterator[psutil.Process]:
    """Every process of ours, also one whose parent has died."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.pid != os.getpid():
                yield process


def end(processes: Iterable[psutil.Process], *, wait_s: float) -> None:
    """SIGTERM, up to `wait_s` for a proper end, then SIGKILL for what is left."""
    left = [p for p in processes if is_running(p)]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in await_end(left, wait_s=wait_s):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    await_end(left, wait_s=5)


def await_end(processes: Iterable[psutil.Process], *, wait_s: float) -> list[psutil.Process]:
    """Those that still run after `wait_s`."""
    until = time.monotonic() + wait_s
    left = [p for p in processes if is_running(p)]
    while left and time.monotonic() < until:
        time.sleep(0.1)
        left = [p for p in left if is_running(p)]
    return left


def log_path(folder: Path, name: str) -> Path:
    """Where a component's output goes."""
    return folder / f"{name}.log"


def died(name: str, folder: Path, *, lines: int = 15) -> ServeError:
    """An error that shows the end of a component's log."""
    path = log_path(folder, name)
    with suppress(OSError):
        tail = path.read_text(errors="replace").splitlines()[-lines:]
        return ServeError(
            "\n".join([f"{name} ended while starting; its last lines:", *tail, str(path)])
        )
    return ServeError(f"{name} ended while starting, and left no log at {path}")


def remember(folder: Path, components: Sequence[Component]) -> None:
    """Keep what was started, so that another process can end it. Nothing started: no file."""
    path = folder / "state.json"
    if not components:
        path.unlink(missing_ok=True)
        return
    half = path.with_suffix(".new")
    half.write_text(json.dumps([asdict(c) for c in components], indent=1))
    half.rename(path)


def remembered(folder: Path) -> list[Component]:
    """What was started and not yet ended, running or not."""
    try:
        return [Component(**entry) for entry in json.loads((folder / "state.json").read_text())]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError) as error:
        raise ServeError(f"{folder / 'state.json'}: can't be read ({error}); remove it") from None


def port_from(variable: str, default: int) -> int:
    """The port that the environment names. Raises SettingError where it is none."""
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise SettingError(f"{variable}: must be a port, 1 to 65535 (got {text!r})")
    return int(text)


def require_free(port: int, variable: str) -> None:
    """Raises ServeError where somebody else listens on that port."""
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers will
        try:
            probe.bind(("127.0.0.1", port))
            return
        except OSError as error:
            reason = _holder(port) or error.strerror
    raise ServeError(
        f"{variable}: port {port} on 127.0.0.1 can't be had: {reason}; end that, or choose another "
        f"port: {variable}={port + 1 if port < 65535 else port - 1}"
    )


def _holder(port: int) -> str | None:
    try:
        for found in psutil.net_connections(kind="tcp"):
            if found.laddr and found.laddr.port == port and found.status == psutil.CONN_LISTEN:
                name = psutil.Process(found.pid).name() if found.pid else None
                return (
                    f"held by {name} (pid {found.pid})"
                    if name
                    else "held by another user's process"
                )
    except psutil.Error:  # macOS shows others' sockets to root only
        pass
    return None
