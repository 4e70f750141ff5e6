"""What `flows.verify` answers, with its exit code; of runs that are not as they were, one line."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from flows.cli.verify_command import main
from headroom.watch.step_metrics import Diverged
from tests.comparison.recorded_runs import record_training
from tests.run_folders import make_event, write_end, write_start

RUN_ID = "0123456789abcdef0123456789abcdef"
CSV = "a,b,target\n" + "".join(f"{i % 7},{i % 5},{i % 2}\n" for i in range(120))


def train(place: Path, **more: Any) -> Path:
    """A run of six steps that is called mine."""
    (place / ".headroom" / "runs").mkdir(parents=True)
    sections: dict[str, Any] = {
        "train": {"max_steps": 6, "log_every": 2, "deterministic": True},
        "checkpoint": {"every": "2steps"},
        **more,
    }
    folder = record_training(place / ".headroom" / "runs" / "one", "cpu", **sections)
    write_start(folder, RUN_ID)
    return folder


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the command says to an exit code; what it refuses takes one line."""

    def run(code: int, *words: str) -> str:
        capsys.readouterr()
        assert main(words) == code
        out, err = capsys.readouterr()
        assert code != 2 or (not out and len(err.splitlines()) == 1), out + err
        return out + err

    return run


def test_exit_codes_say_equal_and_different(place: Path, say: Callable[..., str]) -> None:
    train(place)
    assert say(0, "mine").startswith("mine: equal to the bit, trained anew from ")
    told = json.loads(say(1, "mine", "--from", "0", "--flip", "3:weight/1.weight:7:1", "--json"))
    assert not told["equal"] and told["difference"]["step"] == 3
    assert say(1, RUN_ID[:8], "--from", "0", "--flip").startswith("mine: DIFFERS at step 3, ")


def test_a_run_that_is_not_here_is_named(place: Path, say: Callable[..., str]) -> None:
    folder = train(place)
    assert "it is verified on the machine that trained it" in say(2, "another")
    for file in folder.iterdir():
        if file.name != "start.json":
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    assert "or its files are elsewhere" in say(2, "mine")


def test_settings_that_this_version_refuses_are_the_runs_own(
    place: Path, say: Callable[..., str]
) -> None:
    folder = train(place)
    settings = json.loads((folder / "config.yaml").read_text())
    settings["train"]["aeons"] = 3
    (folder / "config.yaml").write_text(json.dumps(settings))
    assert "train.aeons: unknown setting" in (told := say(2, "mine"))
    assert "of another version of Headroom perhaps" in told


def test_rows_that_have_changed_are_refused(place: Path, say: Callable[..., str]) -> None:
    (place / "rows.csv").write_text(CSV)
    data = {"source": "csv", "path": "rows.csv", "target": "target", "cache": "cache"}
    train(place, data=data)
    assert say(0, "mine", "--from", "0")
    (place / "rows.csv").write_text(CSV.replace("0,0,0", "1,0,0", 1))
    assert "data.source: the rows are others than those " in say(2, "mine")
    (place / "rows.csv").unlink()
    assert "rows.csv" in say(2, "mine")


def test_a_run_of_several_processes_is_refused(place: Path, say: Callable[..., str]) -> None:
    train(place, launch={"processes": "2"})
    assert "RUN: several processes trained it, " in say(2, "mine")


def test_with_auto_the_run_says_how_many_processes_there_were(
    place: Path, say: Callable[..., str]
) -> None:
    """On fewer GPUs than it had, it was told to differ."""
    folder = train(place, launch={"processes": "auto"}, train={"max_steps": 6, "log_every": 2})
    assert "equal" in say(0, "mine", "--from", "0")
    write_end(folder, {"status": "FINISHED", "tags": {"ranks": "2"}})
    assert "RUN: several processes trained it, " in say(2, "mine", "--from", "0")


def test_a_run_that_diverged_is_equal_up_to_there(place: Path, say: Callable[..., str]) -> None:
    """It was told to have failed, with a traceback."""
    with pytest.raises(Diverged):
        train(place, optim={"name": "sgd", "lr": 900}, train={"deterministic": True})
    write_start(place / ".headroom" / "runs" / "one", RUN_ID)
    assert "mine: equal to the bit, " in say(0, "mine", "--from", "0")


def test_without_checkpoints_it_is_trained_from_its_start(
    place: Path, say: Callable[..., str]
) -> None:
    folder = train(place)
    shutil.rmtree(folder / "checkpoints")
    assert "trained anew from its start to step 6" in say(0, "mine")
    assert "checkpoints are kept of: none" in say(2, "mine", "--from", "2")
    shutil.rmtree(folder / "digests")
    (folder / "events.jsonl").unlink()
    assert "nothing to compare with" in say(2, "mine")


def test_digests_of_another_version_are_no_difference(place: Path, say: Callable[..., str]) -> None:
    folder = train(place)
    file = folder / "digests" / "first.jsonl"
    lines = file.read_bytes()
    told = json.loads(lines.splitlines()[0])["digests"]
    assert told["version"] > 1
    old = make_event("digests", {**told, "version": 1}, unix_ms=1)
    file.write_bytes(old + lines.split(b"\n", 1)[1])
    assert "those of another version of Headroom can't be compared" in say(0, "mine", "--from", "0")


def test_an_interrupt_leaves_the_run_and_nothing_else(
    place: Path, tmp_path_factory: pytest.TempPathFactory, desk: Callable[..., Any]
) -> None:
    folder = train(place, train={"max_steps": 6, "log_every": 2, "deterministic": True})
    scratch = tmp_path_factory.mktemp("scratch")
    before = {file: sha256(file.read_bytes()).digest() for file in _list_files(folder)}
    process: subprocess.Popen[str] = desk("mine", module="flows.verify", TMPDIR=str(scratch))
    while process.poll() is None and not [*scratch.glob("headroom-verify-*")]:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130 and "Traceback" not in err, err
    assert not [*scratch.glob("headroom-verify-*")]
    assert {file: sha256(file.read_bytes()).digest() for file in _list_files(folder)} == before


def test_what_a_killed_one_left_is_removed_by_the_next(
    place: Path, tmp_path_factory: pytest.TempPathFactory, desk: Callable[..., Any]
) -> None:
    folder = train(place)
    scratch = tmp_path_factory.mktemp("scratch")
    before = {file: sha256(file.read_bytes()).digest() for file in _list_files(folder)}
    process: subprocess.Popen[str] = desk("mine", module="flows.verify", TMPDIR=str(scratch))
    while process.poll() is None and not [*scratch.glob("headroom-verify-*/lock")]:
        time.sleep(0.005)
    process.kill()
    process.communicate(timeout=100)
    assert {file: sha256(file.read_bytes()).digest() for file in _list_files(folder)} == before
    (left,) = scratch.glob("headroom-verify-*")
    os.utime(left / "lock", (0, 0))
    process = desk("mine", module="flows.verify", TMPDIR=str(scratch))
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0 and "equal to the bit" in out
    assert not [*scratch.glob("headroom-verify-*")]


def test_an_error_of_ones_own_model_is_one_line(
    place: Path,
    say: Callable[..., str],
    tmp_path_factory: pytest.TempPathFactory,
    own: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was a traceback, or a ValueError's words alone."""
    source = "from torch import nn\n\ndef make(input_shape, outputs):\n    "
    source += "return nn.Sequential(nn.Flatten(), Layer())\n\nclass Layer(nn.Linear):\n    "
    source += "def __init__(self):\n        super().__init__(64, 10)\n"
    own("failing_nets", source)
    train(place, model={"name": "failing_nets:make"})
    scratch = tmp_path_factory.mktemp("scratch")
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    assert say(0, "mine", "--from", "0")
    for kind in ("ValueError", "RuntimeError"):
        raising = (
            "    def forward(self, x):\n        if len(x) < 3 or not self.training:\n            "
        )
        raising += f"return super().forward(x)\n        raise {kind}('no such layer')\n"
        own("failing_nets", source + raising)
        sys.modules.pop("failing_nets")
        told = say(2, "mine", "--from", "0")
        assert f"RUN: not verified: failing_nets.py:12: {kind}: no such layer" in told
    assert not [*scratch.iterdir()]


def _list_files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]
