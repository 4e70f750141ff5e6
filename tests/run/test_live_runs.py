"""A training is told of as long as its process lives; what others write there is not believed."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from headroom.base.file_lock import FileLock
from headroom.run.known_runs import Announcement, LiveRun, find_live_runs
from tests.conftest import PYTHON, ROOT

LIVES = """
import time
from pathlib import Path
from headroom.run.known_runs import Announcement
with Announcement(Path("/runs/a"), "another") as mine:
    mine.tell(stage="train model", steps=10)
    print("told", flush=True)
    time.sleep(100)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADROOM_LEASES", str(tmp_path / "leases"))
    return tmp_path / "leases"


def test_of_a_process_that_is_killed_nothing_is_told_and_nothing_stays(place: Path) -> None:
    process = subprocess.Popen([PYTHON, "-c", LIVES], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "told\n"
    (live,) = find_live_runs()
    assert (live.name, live.folder, live.stage, live.steps) == (
        *("another", "/runs/a"),
        *("train model", 10),
    )
    assert (live.pid, live.uid) == (process.pid, os.getuid())
    assert len(list(place.iterdir())) == 1
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert find_live_runs() == [] and list(place.iterdir()) == []


def test_what_a_training_waits_for_is_told_while_it_waits(place: Path) -> None:
    with Announcement(Path("a"), "first") as first, Announcement(Path("b"), "second") as second:
        held = first.make_leases(0.0)
        held.take(["GPU-1"])
        seen: list[list[str]] = []
        told: list[str] = []
        waiting = second.make_leases(0.05, told.append)
        waiting._sleep = lambda _: seen.append([live.waits_for for live in find_live_runs()])
        with pytest.raises(TimeoutError, match="GPU-1 is held by"):
            waiting.take(["GPU-1"])
        assert seen and seen[0] == ["", f"GPU-1 is held by process {os.getpid()}, first"]
        held.close()
        waiting.take(["GPU-1"])
        assert (
            [live.waits_for for live in find_live_runs()] == ["", ""] and told[0] and not told[-1]
        )
        waiting.close()
    assert find_live_runs() == []


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADROOM_LEASES", str(tmp_path / "file" / "leases"))
    with Announcement(Path("a"), "mine") as mine:
        mine.tell(stage="train model")
        assert mine.live.stage == "train model" and find_live_runs() == []


@pytest.mark.parametrize(
    "text", ["", "no JSON", "[]", '{"steps": "many"}', '{"steps": 1e999}', '{"pid": [1]}', "null"]
)
def test_what_is_no_announcement_is_passed_over(place: Path, text: str) -> None:
    place.mkdir()
    os.mkfifo(place / "1.run")
    (place / "2.run").symlink_to("/dev/zero")
    with FileLock(place / "3.run") as lock, Announcement(Path("a"), "mine"):
        lock.take(text)
        assert [live.name for live in find_live_runs()] == ["mine"]


def test_whose_it_is_the_file_s_owner_says(place: Path) -> None:
    place.mkdir()
    with FileLock(place / "1.run") as lock:
        lock.take(json.dumps({"name": "forged", "uid": 12345, "more": {}}) + "a longer one's tail")
        assert find_live_runs() == [LiveRun(name="forged", uid=os.getuid())]
