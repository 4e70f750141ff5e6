import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from headroom.watch import core_wait

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
BURN = "import time; until = time.time() + 120\nwhile time.time() < until: pass"
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


def _compare(other: psutil.Process) -> tuple[core_wait.CoreWait, float]:
    """Compute until the other process has had 0.3 s of the core, however many want it; return what
    was measured meanwhile, and the per cent of the time that the other had."""
    watch, began_s = core_wait.CoreWatch(), time.perf_counter()
    before_s = sum(other.cpu_times()[:2])
    while sum(other.cpu_times()[:2]) < before_s + 0.3:
        until = time.perf_counter() + 0.02
        while time.perf_counter() < until:
            pass
    had_s = sum(other.cpu_times()[:2]) - before_s
    found = watch.read_core_wait()
    assert found is not None
    return found, 100 * had_s / (time.perf_counter() - began_s)


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
    """Whoever has the one core keeps this process waiting for as long."""
    helper = subprocess.Popen([sys.executable, "-c", BURN])
    try:
        own, had_pct = _compare(psutil.Process(helper.pid))
    finally:
        helper.kill()
        helper.wait()
    assert own.own_pct > 0.8 * had_pct - 2  # of which little is left on a busy machine
    assert own.others_pct < 105 - had_pct
    stranger, _ = _stranger(BURN)
    try:
        foreign, had_pct = _compare(stranger)
    finally:
        stranger.kill()
    assert foreign.others_pct > 0.8 * had_pct - 2
    assert foreign.own_pct < 0.5 * had_pct


def test_a_server_here_that_the_run_talks_to_works_for_it(one_core: None) -> None:
    server, port = _stranger(f"{LISTEN}\n{BURN}")
    try:
        with closing(socket.create_connection(("127.0.0.1", int(port)))):
            found, had_pct = _compare(server)
    finally:
        server.kill()
    assert found.own_pct > 0.8 * had_pct - 2


def test_many_threads_that_wait_for_each_other_come_to_no_more_than_all(one_core: None) -> None:
    """8 threads of one process on one core: 700 % of the time were told, as other work."""
    code = (
        "import torch, time; from headroom.watch.core_wait import CoreWatch\n"
        "torch.set_num_threads(8); a = torch.randn(600, 600); a @ a\n"
        "watch = CoreWatch(); began, used = time.perf_counter(), time.process_time()\n"
        "while time.process_time() < used + 0.5: a @ a\n"
        "found, used = watch.read_core_wait(), time.process_time() - used\n"
        "print(*found, used / (time.perf_counter() - began))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    others, own, share = map(float, done.stdout.split())
    assert others < 105 - 100 * share  # what this process itself did not have of the core
    assert own > 0 and 50 < others + own <= 100


def test_a_system_that_does_not_tell_of_waiting_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core_wait, "_read_threads_s", lambda: None)
    assert core_wait.CoreWatch().read_core_wait() is None


def test_pages_that_are_read_back_are_told_by_the_pressure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only of a process that reads some back itself: the others' pressure is not its own."""
    pressure = tmp_path / "memory"
    monkeypatch.setattr(core_wait, "PRESSURE", ("/nowhere", str(pressure)))
    assert core_wait.CoreWatch().read_memory_wait_pct() is None
    faults, now = [100], [50.0]
    monkeypatch.setattr(core_wait, "_count_faults", lambda: faults[0])
    monkeypatch.setattr(core_wait, "perf_counter", lambda: now[0])
    pressure.write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=1000000\nfull total=1\n")
    watch = core_wait.CoreWatch()
    now[0] += 10
    pressure.write_text("some avg10=9.00 avg60=0.00 avg300=0.00 total=5000000\nfull total=1\n")
    assert watch.read_memory_wait_pct() == 0.0
    faults[0] += 1000
    assert watch.read_memory_wait_pct() == pytest.approx(40.0)
