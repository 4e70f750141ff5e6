import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest

from tasks.engine.accounts import core_wait

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
BURN = "import time; until = time.time() + 20\nwhile time.time() < until: pass"
LISTEN = (
    "import socket; s = socket.create_server(('127.0.0.1', 0)); "
    "print(s.getsockname()[1], flush=True)"
)


@pytest.fixture
def one_core() -> Iterator[None]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


def _burn(wall_s: float = 0.6) -> None:
    until = time.perf_counter() + wall_s
    while time.perf_counter() < until:
        pass


def _stranger(code: str) -> tuple[psutil.Process, str]:
    """A process that is nobody's child here, and the first line that it prints."""
    start = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-uc', {code!r}], "
    start += "stdout=subprocess.PIPE if len(sys.argv) > 1 else subprocess.DEVNULL); print(p.pid)\n"
    start += "if len(sys.argv) > 1: print(p.stdout.readline().decode())"
    asked = [sys.executable, "-c", start, *(["line"] if "print" in code else [])]
    done = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True)
    pid, *lines = done.stdout.split()
    return psutil.Process(int(pid)), "".join(lines)


def test_others_take_cores_and_own_helpers_do_not_count_as_others(one_core: None) -> None:
    """Each has the one core for a half of the time, or less of it."""
    helper = subprocess.Popen([sys.executable, "-c", BURN])
    try:
        time.sleep(0.3)
        watch = core_wait.CoreWatch()
        _burn()
        own = watch.read_core_wait()
    finally:
        helper.kill()
        helper.wait()
    assert own is not None and own.own_pct > 20
    stranger, _ = _stranger(BURN)
    try:
        time.sleep(0.3)
        watch = core_wait.CoreWatch()
        _burn()
        foreign = watch.read_core_wait()
    finally:
        stranger.kill()
    assert foreign is not None and foreign.others_pct > 20
    assert own.own_pct > foreign.own_pct + 10


def test_a_server_here_that_the_run_talks_to_works_for_it(one_core: None) -> None:
    server, port = _stranger(f"{LISTEN}\n{BURN}")
    try:
        with closing(socket.create_connection(("127.0.0.1", int(port)))):
            watch = core_wait.CoreWatch()
            _burn()
            found = watch.read_core_wait()
    finally:
        server.kill()
    assert found is not None and found.own_pct > 20


def test_many_threads_that_wait_for_each_other_come_to_no_more_than_all(one_core: None) -> None:
    """8 threads of one process on one core: 700 % of the time were told, as other work."""
    code = (
        "import torch, time; from tasks.engine.accounts.core_wait import CoreWatch\n"
        "torch.set_num_threads(8); a = torch.randn(600, 600); a @ a; watch = CoreWatch()\n"
        "until = time.time() + 1\nwhile time.time() < until: a @ a\nprint(*watch.read_core_wait())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    others, own = map(float, done.stdout.split())
    assert others < 20 and 50 < own <= 100


def test_a_system_that_does_not_tell_of_waiting_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core_wait, "_read_threads_s", lambda: None)
    assert core_wait.CoreWatch().read_core_wait() is None
