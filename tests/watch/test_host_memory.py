"""The memory that the kernel lets a process have, of files that lie as the kernel lays them, and of
a real memory cgroup where this user may make one."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headroom.watch import host_memory
from tests.conftest import PYTHON, ROOT

MIB = 1024**2


def _lay(root: Path, group: str, files: dict[str, str]) -> None:
    folder = root / group.strip("/")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cgroups are; `own` beside it says which are this process's."""
    monkeypatch.setattr(host_memory, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "OWN", tmp_path / "own")
    return tmp_path / "cgroup"


def test_without_a_memory_cgroup_all_of_the_host_is_there(root: Path) -> None:
    assert host_memory.find_limit_bytes() is None and host_memory.describe_limit() == ""
    assert host_memory.read_total_bytes() == psutil.virtual_memory().total
    (root.parent / "own").write_text("0::/user.slice/a\n")
    _lay(root, "user.slice/a", {"memory.max": "max\n", "memory.current": f"{MIB}\n"})
    assert host_memory.find_limit_bytes() is None


def test_the_group_with_the_least_limit_counts_and_cached_files_are_free(root: Path) -> None:
    (root.parent / "own").write_text("0::/pod/training\n")
    stat = f"anon {100 * MIB}\nactive_file {20 * MIB}\ninactive_file {30 * MIB}\nfile {60 * MIB}\n"
    files = {"memory.max": f"{400 * MIB}\n", "memory.current": f"{160 * MIB}\n"}
    _lay(root, "pod", {**files, "memory.stat": stat})
    _lay(root, "pod/training", {**files, "memory.max": "max\n", "memory.stat": stat})
    assert host_memory.read_total_bytes() == host_memory.find_limit_bytes() == 400 * MIB
    assert host_memory.read_free_bytes() == (400 - 160 + 20 + 30) * MIB
    assert host_memory.describe_limit() == " of the 400 MiB of this memory cgroup"


def test_the_first_version_of_cgroups_is_read_too(root: Path) -> None:
    (root.parent / "own").write_text("5:cpu,cpuacct:/x\n4:memory:/docker/0123\n0::/\n")
    # As in a container: its own group is mounted in the place of the whole tree.
    _lay(
        root,
        "memory",
        {
            "memory.limit_in_bytes": f"{300 * MIB}\n",
            "memory.usage_in_bytes": f"{100 * MIB}\n",
            "memory.stat": f"inactive_file 1\ntotal_inactive_file {40 * MIB}\n",
            "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
        },
    )
    assert (
        host_memory.find_limit_bytes() == 300 * MIB and host_memory.read_free_bytes() == 240 * MIB
    )
    (root / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert host_memory.find_limit_bytes() is None


def test_a_kill_for_memory_is_told_only_where_there_was_one(root: Path) -> None:
    (root.parent / "own").write_text("0::/training\n")
    files = {"memory.max": f"{400 * MIB}\n", "memory.current": "0\n"}
    _lay(root, "training", {**files, "memory.events": "high 0\noom 0\noom_kill 0\n"})
    before = host_memory.count_kills()
    assert host_memory.describe_kills_since(before) == ""
    _lay(root, "training", {"memory.events": "high 0\noom 1\noom_kill 1\n"})
    told = "maybe by the kernel: memory ran out in its cgroup of 400 MiB, and it killed a process"
    assert host_memory.describe_kills_since(before) == told


@pytest.fixture
def group() -> Iterator[Path]:
    """A real memory cgroup of 300 MiB."""
    for mount, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        made = Path("/sys/fs/cgroup", mount, f"headroom-tests-{os.getpid()}")
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            (made / limit).write_text(str(300 * MIB))
            yield made
            return
        except OSError:
            continue
        finally:
            made.rmdir()
    pytest.skip("this user may make no memory cgroup")


LIMITED = """
import os
from headroom.watch import host_memory
before, free = host_memory.count_kills(), host_memory.read_free_bytes()
print(host_memory.find_limit_bytes(), free <= host_memory.find_limit_bytes())
kept = bytearray(100 * 2**20)
print(round((free - host_memory.read_free_bytes()) / 2**20, -1))
if not (child := os.fork()):
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    more = bytearray(2**30)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), host_memory.describe_kills_since(before))
"""


def test_a_real_cgroup_is_known_as_the_kernel_keeps_it(group: Path) -> None:
    """Of a host with much memory and a container with little, all of the host's was free."""
    done = subprocess.run(
        ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", PYTHON, "-c", LIMITED],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    limit, took, killed = done.stdout.splitlines()
    assert (limit, took) == (f"{300 * MIB} True", "100.0"), done.stderr
    assert killed.startswith("-9 maybe by the kernel"), killed
