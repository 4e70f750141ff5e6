"""A lease: never two at a time, first come first served, and free when its holder is gone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.engine.device.leases import Busy, Leases

ROOT = Path(__file__).parent.parent.parent.parent
HOLDS = """
import sys, time
from pathlib import Path
from tasks.engine.device.leases import Leases
def sleep(s): time.sleep(s / 10)
place, turns, devices = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
for turn in range(turns):
    leases = Leases(place / "leases", wait_s=100, holder="a test", sleep=sleep)
    device = leases.take(devices)
    inside = place / f"inside-{device}"
    inside.touch(exist_ok=False)  # fails where another is inside
    time.sleep(0.002)
    inside.unlink()
    leases.close()
"""


def _start(place: Path, script: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, str(place), *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def _leases(place: Path, wait_s: float = 0.0, holder: str = "me") -> Leases:
    return Leases(place / "leases", wait_s=wait_s, holder=holder)


@pytest.mark.parametrize("devices", [("GPU-1",), ("GPU-1", "GPU-2")])
def test_two_are_never_on_one_device_and_none_starves(
    tmp_path: Path, devices: tuple[str, ...]
) -> None:
    processes = [_start(tmp_path, HOLDS, "20", *devices) for _ in range(6)]
    for process in processes:
        process.communicate(timeout=200)
    assert [process.returncode for process in processes] == [0] * 6
    assert not list((tmp_path / "leases").glob("*.ticket"))


def test_whoever_has_it_is_named_and_another_device_is_taken(tmp_path: Path) -> None:
    first, second, third = (_leases(tmp_path, holder=f"run {i}") for i in range(3))
    assert first.take(["GPU-1", "GPU-2"]) == "GPU-1"
    assert second.take(["GPU-1", "GPU-2"]) == "GPU-2"
    with pytest.raises(Busy, match="^GPU-1 is held by run 0; GPU-2 is held by run 1$"):
        third.take(["GPU-1", "GPU-2"])
    first.close()
    assert third.take(["GPU-1", "GPU-2"]) == "GPU-1"


KEEPS = """
import os, sys, time
from pathlib import Path
from tasks.engine.device.leases import Leases
leases = Leases(Path(sys.argv[1]) / "leases", wait_s=100, holder="it")
leases.take(["GPU-1"])
if os.fork() == 0:  # such as the worker of a DataLoader: it outlives its parent a while
    os.close(1)  # whoever reads it need not wait
    time.sleep(5)
    os._exit(0)
print("held", flush=True)
time.sleep(100)
"""


def test_of_a_holder_that_is_killed_it_is_free_within_a_second(tmp_path: Path) -> None:
    process = _start(tmp_path, KEEPS)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    with pytest.raises(Busy):
        _leases(tmp_path).take(["GPU-1"])
    os.kill(process.pid, signal.SIGKILL)
    began = time.monotonic()
    assert _leases(tmp_path, wait_s=30).take(["GPU-1"]) == "GPU-1"
    assert time.monotonic() - began < 1
    process.communicate()


WAITS = KEEPS.replace("leases.take", "print('waits', flush=True); leases.take")


def test_who_comes_first_is_served_first_and_the_dead_are_passed_over(tmp_path: Path) -> None:
    mine = _leases(tmp_path)
    mine.take(["GPU-1"])
    waiting = []
    for _ in range(3):
        waiting.append(_start(tmp_path, WAITS))
        assert waiting[-1].stdout is not None and waiting[-1].stdout.readline() == "waits\n"
        count = len(waiting)
        while len(list((tmp_path / "leases").glob("*.ticket"))) < count:
            time.sleep(0.01)
    waiting[0].kill()
    mine.close()
    late = _leases(tmp_path, wait_s=0.0)
    with pytest.raises(Busy):  # though it may be free for a moment
        late.take(["GPU-1"])
    assert waiting[1].stdout is not None and waiting[1].stdout.readline() == "held\n"
    waiting[1].kill()
    assert waiting[2].stdout is not None and waiting[2].stdout.readline() == "held\n"
    waiting[2].kill()
    for process in waiting:
        process.communicate()
