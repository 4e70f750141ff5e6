"""Two hosts train one model, each in a network of its own; one of them is lost."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import PYTHON, desk_environment, query

IP = shutil.which("ip") or "/usr/sbin/ip"
NET = "10.77.31"


def _ip(*words: str) -> int:
    return subprocess.run([IP, *words], capture_output=True).returncode


def _can_make_networks() -> bool:
    if os.name != "posix" or os.geteuid() != 0 or not os.path.exists(IP):
        return False
    made = _ip("netns", "add", "hr-try") == 0
    return made and _ip("netns", "del", "hr-try") == 0


pytestmark = pytest.mark.skipif(
    not _can_make_networks(), reason="network namespaces need root and the command ip"
)


@pytest.fixture
def hosts() -> Iterator[Callable[[int], list[str]]]:
    """Two hosts, 1 and 2, that reach each other; gives the words before a command that runs there.
    What still runs there is killed at the end."""
    assert _ip("link", "add", "hr-br", "type", "bridge") == 0
    _ip("link", "set", "hr-br", "up")
    for n in (1, 2):
        _ip("netns", "add", f"hr-{n}")
        _ip("link", "add", f"hr-v{n}", "type", "veth", "peer", "name", "eth0", "netns", f"hr-{n}")
        _ip("link", "set", f"hr-v{n}", "master", "hr-br", "up")
        _ip("-n", f"hr-{n}", "addr", "add", f"{NET}.{n}/24", "dev", "eth0")
        _ip("-n", f"hr-{n}", "link", "set", "eth0", "up")
        _ip("-n", f"hr-{n}", "link", "set", "lo", "up")
    try:
        yield lambda n: [IP, "netns", "exec", f"hr-{n}"]
    finally:
        for n in (1, 2):
            _kill(n)
            _ip("netns", "del", f"hr-{n}")
        _ip("link", "del", "hr-br")


def _kill(host: int) -> None:
    found = subprocess.run([IP, "netns", "pids", f"hr-{host}"], capture_output=True, text=True)
    for pid in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), 9)


def test_a_host_is_lost_and_the_other_goes_on_in_the_same_run(
    hosts: Callable[[int], list[str]], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTS_COLD", "1")  # what is forked ahead lives on neither host
    started = []
    for n in (1, 2):
        environment = desk_environment(place / f"prefect-{n}") | {"GLOO_SOCKET_IFNAME": "eth0"}
        command = [
            *(*hosts(n), PYTHON, "-m", "flows.train", "--launch.nodes", f"{NET}.1,{NET}.2"),
            *("--model.name", "cnn", "--train.epochs", "40", "--train.keep", "last"),
            *("--checkpoint.every", "40steps"),
        ]
        with (place / f"host-{n}.log").open("w") as log:
            started.append(
                subprocess.Popen(command, cwd=place, env=environment, stdout=log, stderr=log)
            )
    until = time.monotonic() + 200
    while not list((place / ".headroom" / "runs").glob("*/checkpoints/*")):
        said = (place / "host-1.log").read_text()
        assert time.monotonic() < until and started[0].poll() is None, said
        time.sleep(0.1)
    _kill(2)
    said = f"{started[0].wait(timeout=250)}\n{(place / 'host-1.log').read_text()}"
    started[1].wait(timeout=10)
    assert said.startswith("0\n") and "resumed from step" in said, said
    ((status,),) = query(place, "select status from runs")
    assert status == "FINISHED"
    ((last,),) = query(place, "select max(step) from metrics where key = 'train/loss'")
    assert last == 40 * 23
