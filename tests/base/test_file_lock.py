"""A lock that is had by one process at a time, and by nobody who only asks."""

import subprocess
import sys
import time
from pathlib import Path

from headroom.base.file_lock import FileLock, is_held

ASKS = """
import sys
from pathlib import Path
from headroom.base.file_lock import is_held
print("asks", flush=True)
while True:
    is_held(Path(sys.argv[1]))
"""


def test_it_is_held_by_one_and_told_to_those_who_ask(tmp_path: Path) -> None:
    with FileLock(tmp_path / "lock") as mine, FileLock(tmp_path / "lock") as other:
        assert not is_held(tmp_path / "lock")
        assert mine.take("me") and is_held(tmp_path / "lock")
        assert not other.take("you") and other.read_text() == "me"
        mine.close()
        assert not is_held(tmp_path / "lock") and other.take("you")
    assert not is_held(tmp_path / "lock") and not is_held(tmp_path / "none")


def test_who_only_asks_is_in_nobody_s_way(tmp_path: Path) -> None:
    """A training that went on was refused while somebody looked at the list of runs."""
    lock = tmp_path / "lock"
    FileLock(lock).close()
    with subprocess.Popen(
        [sys.executable, "-c", ASKS, str(lock)], stdout=subprocess.PIPE, text=True
    ) as asking:
        assert asking.stdout is not None and asking.stdout.readline() == "asks\n"
        until = time.monotonic() + 1
        while time.monotonic() < until:
            with FileLock(lock) as mine:
                assert mine.take("me")
        asking.kill()
