"""Starts and shares a Prefect server for runs from a command line where no Prefect API is set.
The first run starts one, runs at the same time share it, and it ends itself once the last
run has been gone for a while, so that everything they did is recorded. Its socket listens
before its process has imported anything: the flow's first request simply waits in the
queue, while the run imports PyTorch. The run's part of this file imports no prefect.

Three files in PREFECT_HOME say who is there, by locks that the kernel drops with their
process: `headroom-start.lock` is held while a server is looked for or started,
`headroom-server.lock` by the server (it holds its address), and `headroom-runs.lock` is
shared by the runs.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock
from functools import partial
from pathlib import Path
from typing import IO, Any

from headroom.base.file_lock import FileLock, is_held
from headroom.prefect import prefect_http
from headroom.process.command import pause_collection
from headroom.settings.read_settings import ConfigError

LOG = "headroom-server.log"
LINGER_S = 20.0  # after the last run: events are written within seconds; a next run finds it ready
# Of a request: for 30 s, in which a server that starts again is back. Prefect's own 5 are a minute.
# It answers 500 while its database is away.
TRIES_AGAIN = {
    "PREFECT_CLIENT_MAX_RETRIES": "4",
    "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500,504",
}
SERVER_ENV = {
    "PREFECT_UI_ENABLED": "0",
    "PREFECT__SERVER_EPHEMERAL": "1",  # no scheduler, no late runs: those are for a real server
    "PREFECT__SERVER_FINAL": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
}


def find_prefect_home() -> Path:
    """Return PREFECT_HOME, as Prefect itself would find it."""
    return Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()


def is_needed() -> bool:
    """Return whether no Prefect API is named here, where Prefect would start its own server."""
    if os.environ.get("PREFECT_API_URL"):
        return False
    allowed = os.environ.get("PREFECT_SERVER_EPHEMERAL_ENABLED", "true")
    allowed = os.environ.get("PREFECT_SERVER_ALLOW_EPHEMERAL_MODE", allowed)
    if allowed.lower() not in ("1", "true", "yes", "on"):
        return False
    return not any(map(_read_api_url, _read_settings_files()))


def find_api_url() -> str:
    """Return the API that is named here, else that of the shared local server while it is up.

    Else an empty text.
    """
    named = (os.environ.get("PREFECT_API_URL"), *map(_read_api_url, _read_settings_files()))
    lock = find_prefect_home() / "headroom-server.lock"
    return next(filter(None, named), "") or (lock.read_text().strip() if is_held(lock) else "")


def is_temporary_api(api_url: str) -> bool:
    """Return whether that API is a server that ends after its runs.

    A link to it would soon be dead.
    """
    lock = find_prefect_home() / "headroom-server.lock"
    return lock.is_file() and lock.read_text().strip() == api_url


def find_server_log() -> Path:
    """Return where the shared server says what befell it."""
    return find_prefect_home() / LOG


@contextmanager
def share_server(folder: Path) -> Iterator[str]:
    """Start or join the shared server, and yield the address of its API.

    It stays for the block, which a process that is forked there does not prolong. Raises OSError
    where `folder` can't be written, and ConfigError where this machine does not reach itself.
    """
    _require_loopback()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "headroom-runs.lock") as runs:
        runs.share()  # waits while a server that saw no run left ends itself
        with open(folder / "headroom-start.lock", "a") as start:
            flock(start, LOCK_EX)
            url = _join_or_start(folder)
        yield url


def _require_loopback() -> None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("127.0.0.1", 9))  # of a datagram: it looks for a way, and sends nothing
    except OSError as error:
        # The server, which this file is too, reads no settings: 0.2 s.
        from headroom.settings.read_settings import ConfigError

        raise ConfigError(
            f"PREFECT_API_URL: names no server, and one here would not be reached at 127.0.0.1 "
            f"({error.strerror}); turn on the loopback device (`ip link set lo up`)"
        ) from None


def _join_or_start(folder: Path) -> str:
    with open(folder / "headroom-server.lock", "a+") as lock:
        if (url := _find_server(lock)) is not None:
            return url
        provide_database(folder)
        with closing(socket.create_server(("127.0.0.1", 0), backlog=512)) as listening:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
            lock.truncate(0)
            lock.write(url)
            lock.flush()
            _start_server(folder, lock, listening)
        return url


def _find_server(lock: IO[str]) -> str | None:
    """Return the address of the server that is up; None where none is, and the lock is held.

    Raises ConfigError.
    """
    until = time.monotonic() + prefect_http.ANSWER_S
    while True:
        try:
            flock(lock, LOCK_EX | LOCK_NB)
            return None
        except BlockingIOError:
            lock.seek(0)
            if url := lock.read().strip():
                return url
        if time.monotonic() > until:
            raise ConfigError(
                f"PREFECT_HOME: a process that has no address holds {lock.name}; end it, or name "
                "another PREFECT_HOME"
            )
        time.sleep(0.05)  # the last one is about to be gone


def _start_server(folder: Path, lock: IO[str], listening: socket.socket) -> None:
    fds = (lock.fileno(), listening.fileno())
    with open(folder / LOG, "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "headroom.prefect.local_prefect", str(folder), *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=Path(__file__).parent.parent.parent,
            env={**{k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}, **SERVER_ENV},
            start_new_session=True,  # Ctrl-C is for the run; the server still has to record it
        )
    threading.Thread(target=server.wait, daemon=True).start()  # it may end before this process


def find_database_template() -> Path:
    """Return where set-up keeps a migrated, empty database for this version of Prefect."""
    from importlib.metadata import version

    return Path(sys.prefix) / "share" / "headroom" / f"prefect-{version('prefect')}.db"


def provide_database(folder: Path) -> None:
    """Copy the migrated, empty database into a new PREFECT_HOME: that saves 6 to 14 s."""
    database = folder / "prefect.db"
    if any(name.endswith("DATABASE_CONNECTION_URL") for name in os.environ):
        return
    if database.exists() or not find_database_template().exists():
        return
    with suppress(OSError):  # a full disk: the server says so itself, better than we could
        half = folder / f"prefect.db.{os.getpid()}"
        shutil.copyfile(find_database_template(), half)
        os.rename(half, database)


def _read_settings_files() -> Iterator[dict[str, Any]]:
    for file in (
        find_prefect_home() / "profiles.toml",
        Path("prefect.toml"),
        Path("pyproject.toml"),
    ):
        if file.is_file():
            with suppress(tomllib.TOMLDecodeError), open(file, "rb") as opened:
                yield tomllib.load(opened)
    if Path(".env").is_file():
        lines = Path(".env").read_text(errors="replace").splitlines()
        yield dict(line.split("=", 1) for line in lines if "=" in line)


def _read_api_url(settings: dict[str, Any]) -> str:
    if "profiles" in settings:
        active = os.environ.get("PREFECT_PROFILE") or settings.get("active")
        settings = settings["profiles"].get(active, {})
    settings = settings.get("tool", {}).get("prefect", settings)
    api = settings.get("api")
    return str(settings.get("PREFECT_API_URL") or (isinstance(api, dict) and api.get("url")) or "")


def _serve(folder: Path, lock_fd: int, socket_fd: int) -> None:
    with pause_collection():
        import uvicorn
        from prefect.server.api.server import create_app

        _use_one_connection()
        server = uvicorn.Server(uvicorn.Config(create_app(), log_level="error", lifespan="on"))
    threading.Thread(target=_end_when_unused, args=(folder, server), daemon=True).start()
    server.run(sockets=[socket.socket(fileno=socket_fd)])
    os.ftruncate(lock_fd, 0)


def _use_one_connection() -> None:
    """Let Prefect have one connection to its SQLite database, as it has to one in memory.

    Of several one waits for the lock of another, for up to a minute, and holds its own mutex
    meanwhile. Where garbage collection in the thread of Prefect's event loop frees a statement of
    that connection, the loop waits for the mutex, the other for the loop, and nothing moves.
    """
    from prefect.server.database import configurations
    from sqlalchemy.ext.asyncio import create_async_engine

    one = partial(create_async_engine, pool_size=1, max_overflow=0)
    setattr(configurations, "create_async_engine", one)  # noqa: B010 (it is not exported)


def _end_when_unused(folder: Path, server: Any) -> None:
    runs = open(folder / "headroom-runs.lock", "a")  # noqa: SIM115 (held until the process ends)
    unused_since: float | None = None
    while True:
        time.sleep(0.5)
        try:
            flock(runs, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            unused_since = None
            continue
        now = time.monotonic()
        unused_since = unused_since or now
        if now - unused_since >= LINGER_S:
            break  # with the lock: a run that comes now waits, and starts a server of its own
        flock(runs, LOCK_UN)
    server.should_exit = True
    time.sleep(10)
    os._exit(1)  # a connection that does not end must not keep the next run waiting


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
