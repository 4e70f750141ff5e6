"""The command `headroom`: its help and errors name what a person can call again."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

HEADROOM = str(Path(sys.executable).with_name("headroom"))


def _run(*words: str, by: tuple[str, ...] = (HEADROOM,)) -> tuple[int, str]:
    done = subprocess.run([*by, *words], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["runs", "stop", "tidy", "new", "forecast", "predict", "train"])
def test_help_names_the_command_that_was_called(name: str) -> None:
    code, told = _run(name, "--help")
    assert code == 0 and f"usage: headroom {name}" in told and "python -m flows" not in told


def test_errors_name_it_too_and_python_its_module() -> None:
    assert "headroom runs: error: " in _run("runs", "--nope")[1]
    by_python = (sys.executable, "-m", "flows.runs")
    assert "python -m flows.runs: error: " in _run("--nope", by=by_python)[1]


def test_what_is_no_command_is_told_with_one_that_is() -> None:
    assert _run("trian") == (2, "headroom: there is no command 'trian'; did you mean train?\n")
    assert _run("--version") == (0, f"headroom {version('headroom')}\n")
