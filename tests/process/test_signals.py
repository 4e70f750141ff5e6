"""Signals are raised until they end the program, and end what has not begun at once."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headroom.process import signals
from tests.conftest import PYTHON

ROOT = Path(__file__).parent.parent.parent
LIBRARY = """
import os, signal, time
def swallows(number):
    try:
        os.kill(os.getpid(), number)
        time.sleep(0.2)
    except:
        print("swallowed")
    time.sleep(60)
def waits(number):
    os.kill(os.getpid(), number)
    time.sleep(60)
def wraps(number):
    try:
        waits(number)
    except BaseException as error:
        raise ValueError("serializer") from error
"""
# `called` stands for the code of this project that calls a library.
CALLS = """
import sys
import library
from headroom.process import signals
from headroom.base.import_paths import call_factory
signals.install_signal_handlers()
signals.PATIENCE_S = 0.5
if {begun}: signals.enable_signal_exceptions()
try:
    call_factory(library.{name}, {{"number": {number}}}, setting="s", path="p", refusal=ValueError)
except BaseException as error:
    print(type(error).__name__)
    signals.disable_signal_exceptions()
    sys.exit(signals.find_exit_code())
"""


@pytest.mark.parametrize(
    ("name", "number", "begun", "code", "out", "err"),
    [
        ("swallows", 15, True, 143, "Terminated\n", "swallowed\n"),
        ("swallows", 2, True, 130, "Interrupted\n", "swallowed\n"),
        ("swallows", 2, False, 130, "", "interrupted\n"),
        ("swallows", 15, False, 143, "", "terminated\n"),
        ("waits", 2, True, 130, "Interrupted\n", ""),
        ("wraps", 1, True, 129, "ValueError\n", ""),
    ],
)
def test_a_signal_is_raised_where_the_program_stands_and_again_where_a_library_swallowed_it(
    tmp_path: Path, name: str, number: int, begun: bool, code: int, out: str, err: str
) -> None:
    """One of 27 was swallowed in start-up by an `except` of a library, and the run ended with 1."""
    (tmp_path / "library.py").write_text(LIBRARY)
    done = subprocess.run(
        [sys.executable, "-c", CALLS.format(name=name, number=number, begun=begun)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


@pytest.fixture
def python_handles() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "it was not given back"
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_handles")
def test_between_steps_a_signal_waits_until_somebody_asks() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), signals.defer_signals() as came:
        assert came() is None
        signal.raise_signal(signal.SIGINT)
        steps.append("the step goes on")
        assert came() == signal.SIGINT
        signals.deliver_signal()
        steps.append("never")
    assert steps == ["the step goes on"]


@pytest.mark.usefixtures("python_handles")
def test_a_signal_that_nobody_asked_about_comes_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), signals.defer_signals():
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("python_handles")
def test_a_second_signal_does_not_wait_and_a_long_step_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(KeyboardInterrupt), signals.defer_signals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it waited")
    monkeypatch.setattr(signals, "STEP_S", 0.05)
    with pytest.raises(KeyboardInterrupt), signals.defer_signals():
        signal.raise_signal(signal.SIGINT)
        time.sleep(20)
        raise AssertionError("it waited")


@pytest.mark.usefixtures("python_handles")
def test_a_signal_for_a_checkpoint_ends_nothing_and_hides_no_other() -> None:
    with pytest.raises(KeyboardInterrupt), signals.defer_signals() as came:
        for _ in range(2):
            signal.raise_signal(signal.SIGUSR1)
            assert came() == signal.SIGUSR1
            signals.deliver_signal()
            assert came() is None
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGUSR1)
        assert came() == signal.SIGINT
        signals.deliver_signal()


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.defer_signals() as came:
            signal.raise_signal(signal.SIGHUP)
            assert came() is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("name", ["train", "compare", "predict", "runs", "stop", "tidy"])
def test_ctrl_c_among_the_first_imports_ends_a_command_in_a_word(name: str, tmp_path: Path) -> None:
    """In the first 0.3 s it printed a traceback of imports."""
    (tmp_path / "psutil.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [PYTHON, "-m", f"flows.{name}", "--help"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
