"""A process that ends with the one that has started it, whatever it does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import PYTHON, ROOT

SLEEPER = """
import os, pathlib, signal, sys, time
from headroom.launch.parent_death import end_with_parent
end_with_parent(int(sys.argv[1]))
pathlib.Path("pid").write_text(str(os.getpid()))
os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(100)
"""
PARENT_CODE = """
import os, subprocess, sys
subprocess.run([sys.executable, "-m", "sleeper", str(os.getpid())])
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills what is stopped")
def test_a_stopped_process_ends_with_the_one_that_has_started_it(
    tmp_path: Path, env: dict[str, str]
) -> None:
    """It stayed, with its GPU, until somebody let it go on."""
    parent = subprocess.Popen([PYTHON, "-c", PARENT_CODE], cwd=tmp_path, env=env)
    try:
        until = time.monotonic() + 30
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < until and parent.poll() is None
            time.sleep(0.01)
        child = psutil.Process(int((tmp_path / "pid").read_text()))
        while child.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs([child], timeout=10)
    for one in alive:
        one.kill()
    assert not alive


def test_one_whose_parent_is_gone_already_does_not_begin(
    tmp_path: Path, env: dict[str, str]
) -> None:
    gone = subprocess.Popen([PYTHON, "-c", ""])
    gone.wait()
    command = [PYTHON, "-m", "sleeper", str(gone.pid)]
    process = subprocess.Popen(command, cwd=tmp_path, env=env)
    try:
        assert process.wait(30) == 0 and not (tmp_path / "pid").exists()
    finally:
        process.send_signal(signal.SIGKILL)
