"""The processes that `serve` starts: detached, each in a session of its own, with a log. They are
known again, and so is what they start in turn, by marks in their environment; nothing else is ever
ended, however much it looks like one of ours, and no file can be out of date.
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

from tasks.process.redaction import redacted
from tasks.serving.prefect_http import FLOW_RUN

MARK = "HEADROOM_SERVE"  # in the environment of all we start: the value is drawn once for a folder
PART = "HEADROOM_SERVE_PART"  # and of which part it is: its name and address
STORES = ("postgres", "s3")  # the parts that the others write to
WORKER = "worker"  # how the names of those parts begin that have runs as their children
KEEPER = "keeper"  # the part that starts the others again


class ServeError(RuntimeError):
    """The services can't be brought up or down; the text says why, and what helps."""


class SettingError(ServeError):
    """A port can't be what the environment says."""


@dataclass(frozen=True)
class Part:
    """One part of the service that is up."""

    address: str
    process: psutil.Process


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One `up` or `down` at a time; a second one waits, then finds it done."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        flock(lock, LOCK_EX)
        yield


def start(
    name: str,
    command: Sequence[str],
    *,
    address: str,
    folder: Path,
    env: Mapping[str, str],
    cwd: Path,
    user: str | None = None,
) -> Part:
    """Start one process in a session of its own; what it prints goes to `folder`/`name`.log, and
    what the last one printed to `name`.1.log. user: whose it becomes, where this process is
    root's."""
    path = log_path(folder, name)
    with suppress(FileNotFoundError):
        path.rename(log_path(folder, f"{name}.1"))
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
            user=user,
            group=user,
            extra_groups=[] if user else None,
        )
    try:
        started = psutil.Process(process.pid)
        while not started.environ():  # just begun, it has none: nobody would know it for ours
            time.sleep(0.001)
        return Part(address, started)
    except psutil.NoSuchProcess:
        raise died(name, folder) from None
    finally:
        # Where this process lives on it collects what dies.
        threading.Thread(target=process.wait, daemon=True).start()


def mark_of(folder: Path) -> str:
    """The mark of this folder's service. It stays: a training may outlive what has started it."""
    path = folder / "mark"
    if not path.exists():
        path.write_text(uuid4().hex)
    return path.read_text()


def marked(folder: Path) -> dict[psutil.Process, dict[str, str]]:
    """Every process of ours and its environment, also one whose parent has died. This one, where
    it is one of them, is left out."""
    if not (folder / "mark").exists():
        return {}
    mark, found = mark_of(folder), {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment = process.environ()
            if environment.get(MARK) == mark and process.pid != os.getpid():
                found[process] = environment
    return found


def parts(folder: Path) -> dict[str, Part]:
    """What is up of the service, by name: the outermost process of each part. A run that goes on
    without its worker is no part."""
    ours = {p: env.get(PART, "") for p, env in marked(folder).items() if FLOW_RUN not in env}
    by_pid = {process.pid: part for process, part in ours.items()}
    found = {}
    for process, part in ours.items():
        with suppress(psutil.Error):
            if part and by_pid.get(process.ppid()) != part:
                name, _, address = part.partition(" ")
                found[name] = Part(address, process)
    return found


def started(up: Mapping[str, Part]) -> list[float]:
    """When the workers among them began, in Unix time."""
    found = []
    for name, part in up.items():
        with suppress(psutil.Error):
            if name.startswith(WORKER):
                found.append(part.process.create_time())
    return found


def is_running(process: psutil.Process) -> bool:
    """Whether it still does anything. A zombie that nobody collects does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


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
    """Where a part's output goes."""
    return folder / f"{name}.log"


def died(name: str, folder: Path, *, lines: int = 15) -> ServeError:
    """An error that shows the end of a part's log."""
    path = log_path(folder, name)
    tail = path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else []
    said = "\n".join([f"{name} ended while starting; its last lines:", *tail, str(path)])
    return ServeError(redacted(said))


def port_from(variable: str, default: int) -> int:
    """The port that the environment names. Raises SettingError where it is none."""
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise SettingError(f"{variable}: must be a port, 1 to 65535 (got {text!r})")
    return int(text)


def require_free(port: int, variable: str, host: str = "127.0.0.1") -> None:
    """Raises ServeError where somebody else listens on that port."""
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers will
        try:
            probe.bind((host, port))
            return
        except OSError as error:
            reason = _holder(port) or error.strerror
    raise ServeError(
        f"{variable}: port {port} on {host} can't be had: {reason}; end that, or choose another "
        f"port: {variable}={port + 1 if port < 65535 else port - 1}"
    )


def require_own_home(folder: Path, home: Path) -> None:
    """Raises ServeError where the service of another folder has that PREFECT_HOME: each one's
    worker would play what the other one deploys."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            env = process.environ()
            if env.get(PART, "").startswith("prefect ") and env.get(MARK) != mark_of(folder):
                if Path(env.get("PREFECT_HOME", "")) == home and is_running(process):
                    raise ServeError(
                        f"PREFECT_HOME: {home} is that of the service in {process.cwd()}; end that "
                        f"(make serve-down there), or choose another folder: PREFECT_HOME={home}-2"
                    )


def _holder(port: int) -> str | None:
    with suppress(psutil.Error):  # macOS shows others' sockets to root only
        for found in psutil.net_connections(kind="tcp"):
            if found.laddr and found.laddr.port == port and found.status == psutil.CONN_LISTEN:
                if found.pid is None:
                    return "held by another user's process"
                return f"held by {psutil.Process(found.pid).name()} (pid {found.pid})"
    return None
