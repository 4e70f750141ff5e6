"""The Prefect server that the runs of a desk share."""

import asyncio
import os
import signal
import threading
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

import pytest
from prefect.server.database import configurations
from sqlalchemy import text

from headroom.prefect import local_prefect, prefect_http
from headroom.settings.read_settings import ConfigError

URL = "http://127.0.0.1:9/api"


def test_who_writes_to_prefects_database_waits_for_no_other_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 50 trainings begun at once 23 failed: one connection waited a minute for the lock of
    another, with a mutex that the server's loop wanted, which the other waited for."""
    monkeypatch.setattr(configurations, "create_async_engine", configurations.create_async_engine)
    local_prefect._use_one_connection()

    async def write_at_once() -> tuple[int, int]:
        database = configurations.AioSqliteConfiguration(f"sqlite+aiosqlite:///{tmp_path}/a.db")
        engine = await database.engine()
        async with engine.begin() as opened:
            await opened.execute(text("CREATE TABLE t (n INTEGER)"))
        has_lock, may_end = asyncio.Event(), asyncio.Event()

        async def write(number: int) -> None:
            session = await database.session(engine)
            async with session, database.begin_transaction(session, with_for_update=True):
                await session.execute(text(f"INSERT INTO t VALUES ({number})"))
                has_lock.set()
                await may_end.wait()

        writers = [asyncio.create_task(write(number)) for number in range(20)]
        await has_lock.wait()
        await asyncio.sleep(0.1)  # for those that would connect too
        used = engine.pool.checkedout()  # type: ignore[attr-defined]
        may_end.set()
        await asyncio.gather(*writers)
        async with engine.begin() as opened:
            rows = (await opened.execute(text("SELECT COUNT(*) FROM t"))).scalar_one()
        await engine.dispose()
        return used, rows

    assert asyncio.run(write_at_once()) == (1, 20)


def test_a_forked_process_does_not_keep_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of a DataLoader outlived its killed training, and the server stayed up for it."""
    monkeypatch.setattr(local_prefect, "_join_or_start", lambda folder: URL)
    is_there, tells = os.pipe()
    with local_prefect.share_server(tmp_path):
        child = os.fork()
        if not child:
            os.write(tells, b".")
            signal.pause()
            os._exit(0)
        os.read(is_there, 1)
    try:
        with open(tmp_path / "headroom-runs.lock", "a") as runs:
            flock(runs, LOCK_EX | LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(is_there)
        os.close(tells)


def test_runs_share_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_prefect, "_join_or_start", lambda folder: URL)
    with (
        local_prefect.share_server(tmp_path) as one,
        local_prefect.share_server(tmp_path) as two,
        open(tmp_path / "headroom-runs.lock", "a") as runs,
        pytest.raises(BlockingIOError),
    ):
        assert one == two == URL
        flock(runs, LOCK_EX | LOCK_NB)


def test_the_address_of_a_server_that_ends_is_waited_for(tmp_path: Path) -> None:
    """A run that came while the last server ended read no address, and Prefect started another."""
    lock = open(tmp_path / "headroom-server.lock", "w")  # noqa: SIM115 (closed by the thread)
    flock(lock, LOCK_EX)

    def name_it() -> None:
        with lock:
            lock.write(URL)
            lock.flush()
            flock_is_read.wait(30)

    flock_is_read = threading.Event()
    late = threading.Timer(0.3, name_it)
    late.start()
    try:
        with local_prefect.share_server(tmp_path) as url:
            assert url == URL
    finally:
        flock_is_read.set()
        late.join()


def test_a_lock_without_an_address_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefect_http, "ANSWER_S", 0.2)
    with open(tmp_path / "headroom-server.lock", "w") as lock:
        flock(lock, LOCK_EX)
        with (
            pytest.raises(ConfigError, match="^PREFECT_HOME: .* holds .*server.lock; end it"),
            local_prefect.share_server(tmp_path),
        ):
            pass
