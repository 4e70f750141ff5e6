"""Machines that meet: here all are this one, by its addresses on the loopback device."""

import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headroom.launch import machines
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig
from tests.conftest import free_port

ONE, TWO = "127.0.0.1", "127.0.0.2"
needs_loopback = pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is not set up")


@pytest.fixture(autouse=True)
def _no_least_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headroom.settings.run_config.LEAST_WAIT_S", 0.0)


def _launch(nodes: str = f"{ONE},{TWO}", *, wait_s: float = 1, port: int | None = None) -> Any:
    launch = {"nodes": nodes, "port": port or free_port()}
    return RunConfig.model_validate({"launch": launch}).launch.model_copy(
        update={"timeout_s": wait_s}
    )


def _meet(launch: Any, stay: threading.Event) -> tuple[str, str]:
    with machines._meet_machines(launch) as found:
        stay.wait(10)
        return found


@needs_loopback
def test_machines_that_meet_know_their_names_and_the_one_training() -> None:
    launch, stay = _launch(wait_s=20), threading.Event()
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(_meet, launch, stay) for _ in range(2)]
        time.sleep(1)
        with pytest.raises(ConfigError, match="launch.port: .* is in use by something else"):
            _meet(launch, stay)  # a third: another training by the same address
        stay.set()
        (one, first), (two, second) = (found.result() for found in both)
    assert {one, two} == {ONE, TWO} and first == second and len(first) == 32


@needs_loopback
def test_who_does_not_come_is_named_in_time() -> None:
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=f"launch.nodes: {TWO} did not come to {ONE}:"):
        _meet(_launch(), threading.Event())
    assert 1 <= time.monotonic() - begun < 10


def test_where_the_first_does_not_come_the_others_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "_is_here", lambda name: name == "127.0.0.9")
    with pytest.raises(ConfigError, match=rf"launch.nodes: {ONE} did not come .*refused"):
        _meet(_launch(f"{ONE},127.0.0.9"), threading.Event())


@pytest.mark.parametrize("is_first", [True, False])
def test_a_port_that_others_use_is_refused(monkeypatch: pytest.MonkeyPatch, is_first: bool) -> None:
    monkeypatch.setattr(machines, "ANSWER_S", 1.0)
    ours = ONE if is_first else "127.0.0.9"
    monkeypatch.setattr(machines, "_is_here", lambda name: name == ours)
    code = "import socket, sys; s = socket.create_server(('', 0)); print(s.getsockname()[1]);"
    code += "sys.stdout.flush(); [s.accept()[0].sendall(b'HTTP/1.1 400') for _ in range(9)]"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        launch = _launch(f"{ONE},127.0.0.9", port=int(other.stdout.readline()))
        try:
            with pytest.raises(ConfigError, match=rf"launch.port: {ONE}:{launch.port} is in use"):
                _meet(launch, threading.Event())
        finally:
            other.kill()


def test_names_that_are_not_known_or_not_of_this_machine_are_refused() -> None:
    with pytest.raises(ConfigError, match="launch.nodes: none of 203.0.113.1, .* is an address"):
        _meet(_launch("203.0.113.2,203.0.113.1"), threading.Event())
    with pytest.raises(ConfigError, match=r"launch.nodes: no-such-host.invalid is not known here"):
        _meet(_launch("127.0.0.1,no-such-host.invalid"), threading.Event())


@needs_loopback
def test_other_machines_must_be_named_alike() -> None:
    launch = _launch(wait_s=3)
    other = launch.model_copy(update={"nodes": f"{ONE},{TWO},127.0.0.3"})
    with ThreadPoolExecutor() as pool:
        first = pool.submit(_meet, launch, threading.Event())
        _until_open(launch.port)
        with pytest.raises(ConfigError, match=f"is {other.nodes} here and {launch.nodes} on {ONE}"):
            _meet(other, threading.Event())
        with pytest.raises(ConfigError, match=f"{TWO} did not come"):
            first.result()


def _until_open(port: int) -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex((ONE, port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("nobody serves it")


@pytest.mark.parametrize("nodes", ["one", "one,one", "one,", "a b,c", ",", "one,-two"])
def test_what_is_no_list_of_names_is_refused(nodes: str) -> None:
    with pytest.raises(ValueError, match="must be names of two or more machines"):
        RunConfig.model_validate({"launch": {"nodes": nodes}})
    launch = RunConfig.model_validate({"launch": {"nodes": "b, a"}}).launch
    assert launch.machines == ["a", "b"]
