"""Starts, finds and ends the parts of the service, each a process that is detached, in a session of
its own, with a log. They, and the processes that they start in turn, are recognised by marks in
their environment; no other process is ever ended, however much it looks like one of ours, and no
file can be out of date.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path
from uuid import uuid4

import psutil

from headroom.prefect.prefect_http import FLOW_RUN
from headroom.process.redaction import redact

MARK = "HEADROOM_SERVE"  # in the environment of all we start: the value is drawn once for a folder
PART = "HEADROOM_SERVE_PART"  # and of which part it is: its name and address
WORKER = "worker"  # how the names of those parts begin that have runs as their children


class ServeError(RuntimeError):
    """The services can't be brought up or down; the text says why, and what helps."""


class SettingError(ServeError):
    """A variable of the environment has a value that can't be used."""


@dataclass(frozen=True)
class Part:
    """One part of the service that is up."""

    address: str
    process: psutil.Process


@contextmanager
def hold_service_lock(folder: Path) -> Iterator[None]:
    """Let one `up` or `down` run at a time; a second one waits for the first."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        flock(lock, LOCK_EX)
        yield


def start_part(
    name: str,
    command: Sequence[str],
    *,
    address: str,
    folder: Path,
    env: Mapping[str, str],
    cwd: Path,
) -> Part:
    """Start one process in a session of its own; what it prints goes to `folder`/`name`.log, and
    what the last one printed to `name`.1.log."""
    path = make_log_path(folder, name)
    with suppress(FileNotFoundError):
        path.rename(make_log_path(folder, f"{name}.1"))
    with open(path, "w") as log:
        # Not a child of ours once we have gone, and nothing to close.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=cwd,
            env={**env, PART: f"{name} {address}"},
            start_new_session=True,
        )
    try:
        started = psutil.Process(process.pid)
        while not started.environ():  # just begun, it has none: nobody would know it for ours
            time.sleep(0.001)
        return Part(address, started)
    except psutil.NoSuchProcess:
        raise make_start_error(name, folder) from None
    finally:
        # Where this process lives on it collects what dies.
        threading.Thread(target=process.wait, daemon=True).start()


def provide_mark(folder: Path) -> str:
    """Return the mark of this folder's service, made where it is new.

    It stays the same: a training may outlive the service that started it.
    """
    path = folder / "mark"
    if not path.exists():
        path.write_text(uuid4().hex)
    return path.read_text()


def find_own_processes(folder: Path) -> dict[psutil.Process, dict[str, str]]:
    """Return every process with our mark and its environment, even if its parent has died.

    This process, where it is one of them, is left out.
    """
    if not (folder / "mark").exists():
        return {}
    mark = provide_mark(folder)
    processes = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment = process.environ()
            if environment.get(MARK) == mark and process.pid != os.getpid():
                processes[process] = environment
    return processes


def find_parts(folder: Path) -> dict[str, Part]:
    """Return the parts of the service that are up, by name: the outermost process of each.

    A run that goes on without its worker is no part.
    """
    ours = {
        p: env.get(PART, "") for p, env in find_own_processes(folder).items() if FLOW_RUN not in env
    }
    by_pid = {process.pid: part for process, part in ours.items()}
    parts = {}
    for process, part in ours.items():
        with suppress(psutil.Error):
            if part and by_pid.get(process.ppid()) != part:
                name, _, address = part.partition(" ")
                parts[name] = Part(address, process)
    return parts


def find_worker_starts(up: Mapping[str, Part]) -> list[float]:
    """Return when the workers among them began, in Unix time."""
    starts = []
    for name, part in up.items():
        with suppress(psutil.Error):
            if name.startswith(WORKER):
                starts.append(part.process.create_time())
    return starts


def is_running(process: psutil.Process) -> bool:
    """Return whether the process still runs. A zombie that nobody collects does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def end_processes(processes: Iterable[psutil.Process], *, wait_s: float) -> None:
    """Send SIGTERM, wait up to `wait_s` for an orderly end, then SIGKILL what is left."""
    left = [p for p in processes if is_running(p)]
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in await_end(left, wait_s=wait_s):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    await_end(left, wait_s=5)


def await_end(processes: Iterable[psutil.Process], *, wait_s: float) -> list[psutil.Process]:
    """Wait up to `wait_s`, and return the processes that still run."""
    until = time.monotonic() + wait_s
    left = [p for p in processes if is_running(p)]
    while left and time.monotonic() < until:
        time.sleep(0.1)
        left = [p for p in left if is_running(p)]
    return left


def make_log_path(folder: Path, name: str) -> Path:
    """Return the file that a part's output goes to."""
    return folder / f"{name}.log"


def make_start_error(name: str, folder: Path) -> ServeError:
    """Return an error that shows the end of a part's log."""
    path = make_log_path(folder, name)
    tail = path.read_text(errors="replace").splitlines()[-15:] if path.exists() else []
    said = "\n".join([f"{name} ended while starting; its last lines:", *tail, str(path)])
    return ServeError(redact(said))


def read_port(variable: str, default: int) -> int:
    """Return the port that the environment names, else the default.

    Raises SettingError where it names none that is valid.
    """
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise SettingError(f"{variable}: must be a port, 1 to 65535 (got {text!r})")
    return int(text)


def require_free_port(port: int, variable: str) -> None:
    """Raise ServeError where another process listens on that port."""
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers will
        try:
            probe.bind(("127.0.0.1", port))
            return
        except OSError as error:
            reason = _describe_port_holder(port) or error.strerror
    raise ServeError(
        f"{variable}: port {port} on 127.0.0.1 can't be had: {reason}; end that, or choose another "
        f"port: {variable}={port + 1 if port < 65535 else port - 1}"
    )


def require_own_home(folder: Path, home: Path) -> None:
    """Raise ServeError where the service of another folder has that PREFECT_HOME.

    Each one's worker would run what the other one deploys.
    """
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            env = process.environ()
            is_other = env.get(PART, "").startswith("prefect ") and env.get(MARK) != (
                provide_mark(folder)
            )
            if is_other and Path(env.get("PREFECT_HOME", "")) == home and is_running(process):
                raise ServeError(
                    f"PREFECT_HOME: {home} is that of the service in {process.cwd()}; end that "
                    f"(make serve-down there), or choose another folder: PREFECT_HOME={home}-2"
                )


def _describe_port_holder(port: int) -> str | None:
    with suppress(psutil.Error):  # macOS shows others' sockets to root only
        for connection in psutil.net_connections(kind="tcp"):
            if (
                connection.laddr
                and connection.laddr.port == port
                and connection.status == psutil.CONN_LISTEN
            ):
                if connection.pid is None:
                    return "held by another user's process"
                return f"held by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return None
