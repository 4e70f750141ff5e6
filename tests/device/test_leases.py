"""A lease: never two at a time, first come first served, and free when its holder is gone."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headroom.device import leases
from headroom.device.leases import DevicesBusyError, Leases

ROOT = Path(__file__).parent.parent.parent
HOLDS = """
import sys, time
from pathlib import Path
from headroom.device.leases import Leases
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
    with pytest.raises(DevicesBusyError, match="^GPU-1 is held by run 0; GPU-2 is held by run 1$"):
        third.take(["GPU-1", "GPU-2"])
    first.close()
    assert third.take(["GPU-1", "GPU-2"]) == "GPU-1"


HOLDS_TWO = HOLDS.replace("take(devices)", "take(devices, beside=devices, more=1)").replace(
    """    inside = place / f"inside-{device}"
    inside.touch(exist_ok=False)  # fails where another is inside
    time.sleep(0.002)
    inside.unlink()
""",
    """    assert leases.devices[0] == device and len({*leases.devices}) == 2
    for one in leases.devices:
        (place / f"inside-{one}").touch(exist_ok=False)
    time.sleep(0.002)
    for one in leases.devices:
        (place / f"inside-{one}").unlink()
""",
)


def test_those_that_need_two_wait_for_no_one_who_waits_for_them(tmp_path: Path) -> None:
    """Two trainings of two processes each held one GPU, and waited for the other's for a day."""
    devices = [f"GPU-{n}" for n in range(3)]
    processes = [_start(tmp_path, HOLDS_TWO, "15", *devices[n:], *devices[:n]) for n in range(3)]
    processes += [_start(tmp_path, HOLDS, "15", *devices) for _ in range(2)]
    for process in processes:
        process.communicate(timeout=200)
    assert [process.returncode for process in processes] == [0] * 5
    assert not list((tmp_path / "leases").glob("*.ticket"))


def test_of_two_none_is_held_while_the_other_is_anothers(tmp_path: Path) -> None:
    first, pair, single = (_leases(tmp_path, holder=f"run {i}") for i in range(3))
    first.take(["GPU-2"])
    with pytest.raises(DevicesBusyError, match="^GPU-2 is held by run 0$"):
        pair.take(["GPU-1", "GPU-2"], beside=["GPU-1", "GPU-2"], more=1)
    assert not pair.is_held and pair.devices == []
    assert single.take(["GPU-1", "GPU-2"]) == "GPU-1"
    single.close()
    first.close()
    assert pair.take(["GPU-2"], beside=["GPU-1", "GPU-2"], more=1) == "GPU-2"
    assert pair.devices == ["GPU-2", "GPU-1"]
    with pytest.raises(DevicesBusyError, match="^GPU-1 is held by run 1$"):
        single.take(["GPU-1"])


KEEPS = """
import os, sys, time
from pathlib import Path
from headroom.device.leases import Leases
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
    with pytest.raises(DevicesBusyError):
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
    with pytest.raises(DevicesBusyError):  # though it may be free for a moment
        late.take(["GPU-1"])
    assert waiting[1].stdout is not None and waiting[1].stdout.readline() == "held\n"
    waiting[1].kill()
    assert waiting[2].stdout is not None and waiting[2].stdout.readline() == "held\n"
    waiting[2].kill()
    for process in waiting:
        process.communicate()


ANOTHER = 54321  # a user
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root has files of other users")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in which every user may keep files, as in the temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


@pytest.mark.parametrize("kind", ["link", "second name", "pipe"])
def test_a_lease_is_never_written_into_a_file_from_elsewhere(tmp_path: Path, kind: str) -> None:
    """A training wrote "pid 1 of ann" over a file of its user, to which another had laid a link."""
    precious, lock = tmp_path / "precious", tmp_path / "leases" / "GPU-1.lock"
    precious.write_text("a thesis")
    lock.parent.mkdir()
    {"link": lock.symlink_to, "second name": lock.hardlink_to, "pipe": lambda _: os.mkfifo(lock)}[
        kind
    ](precious)
    with pytest.raises(OSError, match="symbolic links|no file of its own"):
        _leases(tmp_path).take(["GPU-1"])
    assert precious.read_text() == "a thesis"


@needs_root
@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_that_another_user_has_made_is_refused_in_a_sentence(
    shared: Path, is_link: bool
) -> None:
    """Its owner could have laid there what he liked; of a link, files of ours were removed."""
    place, own = shared / "leases", shared / "own"
    own.mkdir()
    (own / "1.run").touch()
    if is_link:
        place.symlink_to(own)
    else:
        place.mkdir()
        (place / "1.run").touch()
    os.chown(place, ANOTHER, ANOTHER, follow_symlinks=False)
    with pytest.raises(OSError, match="another user's.*chmod 1777.*HEADROOM_LEASES.*/leases"):
        _leases(shared).take(["GPU-1"])
    assert leases.list_trusted_files(place, "*.run") == [] and [*own.iterdir()] == [own / "1.run"]


@needs_root
def test_users_of_a_host_see_each_other_s_leases(shared: Path) -> None:
    """Whoever made the folder: each keeps the other from the GPU, and gets it after him."""
    become = f"os.setgid({ANOTHER}); os.setuid({ANOTHER}); leases = Leases("
    another = _start(shared, KEEPS.replace("leases = Leases(", become))
    assert another.stdout is not None and another.stdout.readline() == "held\n"
    assert (shared / "leases").stat().st_uid == ANOTHER
    with pytest.raises(DevicesBusyError, match="^GPU-1 is held by it$"):
        _leases(shared).take(["GPU-1"])
    another.kill()
    another.communicate()
    assert _leases(shared, wait_s=30).take(["GPU-1"]) == "GPU-1"


def test_leases_lie_where_all_users_find_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who had a temporary folder of his own saw nobody's leases."""
    monkeypatch.delenv("HEADROOM_LEASES")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(leases, "SHARED", (str(tmp_path), "/nowhere", "/tmp"))
    about = os.stat("/tmp")
    is_usual = about.st_uid == 0 and about.st_mode & 0o1777 == 0o1777
    assert leases.find_lease_folder() == Path("/tmp" if is_usual else tmp_path, "headroom-leases")
    monkeypatch.setattr(leases, "SHARED", ())
    assert leases.find_lease_folder() == tmp_path / "headroom-leases"


def test_what_a_holder_wrote_breaks_no_line(tmp_path: Path) -> None:
    first = _leases(tmp_path, holder="\x1b[2Jit\nfailed: all")
    first.take(["GPU-1"])
    with pytest.raises(DevicesBusyError, match=r"^GPU-1 is held by \[2Jit failed: all$"):
        _leases(tmp_path).take(["GPU-1"])


def test_leases_tell_each_reason_once(tmp_path: Path) -> None:
    told: list[str] = []
    first = Leases(tmp_path, wait_s=0, holder="first")
    first.take(["GPU-1"])
    pauses = iter([lambda: None, first.close])
    second = Leases(
        tmp_path,
        wait_s=9,
        holder="second",
        show_waiting=told.append,
        sleep=lambda _: next(pauses)(),
    )
    second.take(["GPU-1"])
    assert told == ["GPU-1 is held by first", ""]
    second.close()


@contextmanager
def hold_gpu(folder: Path, *, wait_s: float) -> Iterator[None]:
    """What a training on a GPU holds as long as it lasts."""
    lease = Leases(folder, wait_s=wait_s, holder="one of a pair")
    lease.take(["GPU-1"])
    yield
    lease.close()
