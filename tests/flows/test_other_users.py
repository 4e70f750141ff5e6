"""What another user of the machine may read, put in the way and hold up; tried as one."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, desk_environment

ANOTHER, THIRD = 54321, 54322  # users
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root becomes other users")
BECOME = "import os, sys; user = int(sys.argv[1]); os.setgroups([]); os.setgid(user)\n"
BECOME += "os.setuid(user)\n"


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user may enter and keep files in; one of pytest's is root's alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


def _start_as(user: int, script: str, *words: str | Path) -> subprocess.Popen[str]:
    """Start Python with this script as another user; it has imported what it needs before."""
    needed, _, rest = script.partition("---\n")
    return subprocess.Popen(
        [sys.executable, "-c", needed + BECOME + rest, str(user), *map(str, words)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


READS = """
import os, sys
---
for folder, folders, files in os.walk(sys.argv[2]):
    for name in files:
        path = os.path.join(folder, name)
        if os.access(path, os.R_OK) or os.access(path, os.W_OK):
            print(path)
    for name in folders:
        if os.access(os.path.join(folder, name), os.W_OK):
            print(os.path.join(folder, name))
"""


def test_no_other_user_reads_what_a_training_keeps_of_its_own(shared: Path) -> None:
    """Journal, prepared data, checkpoints and weights, by the usual umask in an open folder."""
    place = shared / "project"
    place.mkdir(mode=0o755)
    (place / "mlflow.yaml").write_text((ROOT / "mlflow.yaml").read_text())
    train = [sys.executable, "-m", "flows.train", "--train.epochs", "1"]
    done = subprocess.run(train, cwd=place, env=desk_environment(), umask=0o022, check=False)
    assert done.returncode == 0
    kept = {file.name for file in (place / ".headroom").rglob("*")}
    assert kept >= {"events.jsonl", "train_x.npy", "checkpoints", "weights.pt", "tracking.log"}
    reading = _start_as(ANOTHER, READS, place / ".headroom")
    assert reading.communicate()[0] == "" and reading.returncode == 0
    # And the test would see it: MLflow's database and files are as the umask says.
    reading = _start_as(ANOTHER, READS, place)
    assert f"{place}/mlflow.db\n" in reading.communicate()[0]


ANNOUNCES = """
import os, sys, time
from pathlib import Path
from headroom.run.known_runs import Announcement
---
folder = Path(sys.argv[2])
folder.mkdir(mode=0o755)
for name in sys.argv[3:]:
    os.mkfifo(folder / name)
for name in {"start.json", "events.jsonl"} - {*sys.argv[3:]}:
    with open(folder / name, "wb") as file:
        file.truncate(2**36)
with Announcement(folder, "\\x1b]0;mine\\x07\\x9b2J") as announcement:
    announcement.tell(stage="train model", device="cuda:0\\x1b[2J", waits_for="\\x1b[31m")
    print("told", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("pipes", [("start.json", "events.jsonl"), ("events.jsonl",), ()])
def test_a_training_that_another_user_announces_holds_up_nobody_who_lists_them(
    shared: Path, monkeypatch: pytest.MonkeyPatch, pipes: tuple[str, ...]
) -> None:
    """A pipe in its folder was waited for without end; 64 GiB of nothing were read."""
    monkeypatch.setenv("HEADROOM_LEASES", str(shared / "leases"))
    announcing = _start_as(ANOTHER, ANNOUNCES, shared / "theirs", *pipes)
    assert announcing.stdout is not None and announcing.stdout.readline() == "told\n"
    shows = [sys.executable, "-m", "flows.runs"]
    try:
        for words in ([], ["--json"]):
            done = subprocess.run(
                [*shows, *words],
                cwd=shared,
                env=desk_environment() | {"HEADROOM_LEASES": str(shared / "leases")},
                capture_output=True,
                text=True,
                timeout=100,
                check=True,
            )
            assert not any(c in done.stdout for c in "\x1b\x07\x9b")
        (run,) = json.loads(done.stdout)["runs"]
        assert run["folder"] == str(shared / "theirs") and run["user"] == str(ANOTHER)
    finally:
        announcing.kill()
        announcing.communicate()


TAKES = """
import sys, time
from pathlib import Path
from headroom.device.leases import DevicesBusyError, Leases
---
try:
    device = Leases(Path(sys.argv[2]), wait_s=0, holder=f"user {user}").take(["GPU-1"])
except DevicesBusyError as busy:
    print(busy, flush=True)
except OSError as error:
    print(error.strerror, error.filename, flush=True)
else:
    print(device, flush=True)
time.sleep(600)
"""


def test_a_lease_that_another_user_has_planted_is_an_error_and_no_file_of_his_is_written(
    shared: Path,
) -> None:
    """He may hold a device, which this is another way to do; a sentence says whose file it is."""
    place = shared / "leases"
    place.mkdir()
    place.chmod(0o1777)
    planted = place / "GPU-1.lock"
    for plants in ("file", "link", "theirs"):
        with planted.open("w") if plants == "file" else tempfile.TemporaryFile(dir=shared):
            if plants == "link":
                planted.symlink_to(shared / "precious")
            elif plants == "theirs":
                planted.write_text("mine\n")
        os.chown(planted, ANOTHER, ANOTHER, follow_symlinks=False)
        if plants != "link":
            planted.chmod(0o600 if plants == "file" else 0o666)
        taking = _start_as(THIRD, TAKES, place)
        assert taking.stdout is not None
        told = taking.stdout.readline()
        taking.kill()
        taking.communicate()
        expected = {"file": "Permission denied", "link": "symbolic links", "theirs": "GPU-1"}
        assert expected[plants] in told
        assert not (shared / "precious").exists()
        planted.unlink()


REMOVES = """
import os, sys
---
for name in os.listdir(sys.argv[2]):
    try:
        os.unlink(os.path.join(sys.argv[2], name))
    except PermissionError:
        print(name)
"""


def test_no_other_user_removes_a_lease_but_who_has_made_the_folder(shared: Path) -> None:
    """The kernel lets the owner of a folder do so, whatever its mode."""
    place = shared / "leases"
    holding = _start_as(ANOTHER, TAKES, place)
    assert holding.stdout is not None and holding.stdout.readline() == "GPU-1\n"
    removing = _start_as(THIRD, REMOVES, place)
    assert removing.communicate()[0] == "GPU-1.lock\n"
    second = _start_as(THIRD, TAKES, place)
    assert second.stdout is not None
    assert second.stdout.readline() == f"GPU-1 is held by user {ANOTHER}\n"
    for process in (holding, second):
        process.kill()
        process.communicate()
