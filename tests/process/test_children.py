import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from headroom.process import children

STARTS = textwrap.dedent(
    """
    import os, sys, time
    from headroom.process import children
    process = children.start_child("tests.process.test_children")
    print(process.stdout.readline(), end="", flush=True)
    if os.fork() == 0:
        os.write(process.stdin.fileno(), b"a child's")
        time.sleep(30)
    print(os.getpid(), flush=True)
    time.sleep(30)
    """
)


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_what_a_killed_process_forked_does_not_keep_its_helper() -> None:
    """It waited for the end of a pipe that the forked one held: a run said RUNNING for ever."""
    with subprocess.Popen(
        [sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as starter:
        assert starter.stdout is not None
        helper = int(starter.stdout.readline())
        try:
            starter.stdout.readline()
            os.kill(starter.pid, signal.SIGKILL)
            until = time.monotonic() + 10
            while _lives(helper) and time.monotonic() < until:
                time.sleep(0.02)
            assert not _lives(helper)
        finally:
            os.killpg(starter.pid, signal.SIGKILL)


def _lives(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


if __name__ == "__main__":
    print(os.getpid(), flush=True)
    said = sys.stdin.read()  # until its other end is closed everywhere
    assert not said, said


def test_what_a_user_makes_of_warnings_is_for_the_users_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With PYTHONWARNINGS=error no sending process lived: MLflow warns when it is imported."""
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    process = children.start_child("tests.process.warned")
    assert process.communicate()[0] == "[]\n"
