"""The starter: written whole or not at all, and it trains, predicts and passes its own test."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from flows import new
from flows.new import main
from headroom.settings.read_settings import ConfigError
from tests.conftest import ROOT, desk_environment


def _start(folder: Path, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=desk_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _ended_well(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    return out


def test_the_commands_that_it_prints_do_what_they_say(tmp_path: Path) -> None:
    said = _ended_well(_start(tmp_path, "-m", "flows.new", "mine"))
    commands = [line.split() for line in said.splitlines() if line.startswith("  ")]
    assert commands[0] == ["cd", "mine"]
    train, predict, test = (words[1:] for words in commands[1:])
    tested = _start(tmp_path / "mine", *test, "-q")
    trained = _ended_well(_start(tmp_path / "mine", *train))
    assert "FINISHED" in trained
    _ended_well(_start(tmp_path / "mine", *predict))
    assert "2 passed" in _ended_well(tested)
    found = pd.read_csv(tmp_path / "mine" / "predictions.csv")
    assert len(found) == 3 and found["probability"].min() > 0.8


def test_it_is_written_in_the_style_of_the_house(tmp_path: Path) -> None:
    folder = new.write_example(str(tmp_path / "new"))
    assert {f.name for f in folder.iterdir()} == set(new.FILES)
    for file in folder.glob("*.py"):
        assert ast.get_docstring(ast.parse(file.read_text()))
    ruff = [sys.executable, "-m", "ruff"]
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(folder)]
    for order in (["format", "--check"], ["check"]):
        done = subprocess.run([*ruff, *order, *config], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_an_empty_folder_may_be_there_and_folders_above_are_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert (new.write_example(str(tmp_path / "empty")) / "model.py").is_file()
    assert (new.write_example(str(tmp_path / "a" / "b c")) / "model.py").is_file()


def test_a_folder_that_holds_anything_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.py").write_text("mine")
    assert main([str(tmp_path)]) == 2
    assert "is not empty; name a new folder" in capsys.readouterr().err
    assert [f.name for f in tmp_path.iterdir()] == ["data.py"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("file", "DIR: 'file' is a file; name a new folder"),
        ("file/new", "cannot be written (Not a directory); name a folder elsewhere"),
        ("/proc/new", "cannot be written (No such file or directory); name a folder elsewhere"),
        ("", "DIR: must name a folder (got ''); name a new one"),
        ("a\0b", "DIR: must name a folder (got 'a b'); name a new one"),
        ("x" * 300, "cannot be written (File name too long); name a folder elsewhere"),
    ],
)
def test_a_place_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        new.write_example(name)
    (problem,) = caught.value.problems
    assert problem.startswith("DIR: ") and said in problem
    assert [f.name for f in tmp_path.iterdir()] == ["file"]


def test_what_cannot_be_written_whole_is_not_written_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(new.FILES, "no/where.py", "x = 1\n")
    with pytest.raises(ConfigError, match=r"cannot be written \(No such file or directory\)"):
        new.write_example(str(tmp_path / "a" / "b"))
    assert not list(tmp_path.iterdir())


def test_the_commands_quote_what_a_shell_would_take_apart() -> None:
    assert new.list_commands("a b")[0] == "cd 'a b'"
    assert new.list_commands("-x")[0] == "cd ./-x"


def test_it_imports_nothing_slow() -> None:
    code = (
        "import sys, flows.new\n"
        "print([m for m in ('torch', 'prefect', 'mlflow', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
