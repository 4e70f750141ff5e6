"""Trainings as a person at another shell sees them: listed, stopped, and put right when dead."""

import json
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows import stop
from headroom.base.file_lock import FileLock
from headroom.run.known_runs import (
    KnownRun,
    list_known_runs,
)
from tests.conftest import PYTHON, ROOT, desk_environment
from tests.run_folders import TRAINING_LOCK, is_held, write_end, write_start

Desk = Callable[..., subprocess.Popen[str]]
LONG = ("--train.epochs", "100000", "--train.compile", "off", "--train.log_every", "1")


def _command(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYTHON, "-m", *words],
        cwd=place,
        env=desk_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


def _runs(place: Path) -> list[dict[str, Any]]:
    done = _command(place, "flows.runs", "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
    return found


def _until(place: Path, is_so: Callable[[KnownRun], object]) -> dict[str, Any]:
    """What the command says once it is so."""
    until = time.monotonic() + 120
    while not any(map(is_so, found := list_known_runs(place / ".headroom" / "runs"))):
        assert time.monotonic() < until, found
        time.sleep(0.1)
    (run,) = _runs(place)
    return run


def test_a_training_is_listed_as_it_trains_and_stopped_with_a_checkpoint(
    desk: Desk, place: Path
) -> None:
    assert "holds none" in _command(place, "flows.runs").stdout
    process = desk(*LONG, "--run.name", "night")
    run = _until(place, lambda run: run.eta_s)
    assert (run["name"], run["state"], run["device"], run["live"]) == (
        *("night", "training"),
        *("cpu", True),
    )
    assert 0 < run["step"] < run["steps"] and run["loss"] and run["peak_mib"]
    done = _command(place, "flows.stop", run["run_id"][:6])
    assert done.returncode == 0 and "ends after its step, with a checkpoint" in done.stderr
    assert process.wait(30) == 143
    resume = f"python -m flows.train --resume {run['run_id']}"
    assert done.stdout == f"night: KILLED, terminated. Go on with: {resume}\n"
    (run,) = _runs(place)
    assert (run["state"], run["live"], run["resume"]) == ("KILLED", False, resume)
    done = _command(place, "flows.stop", "night")
    refusal = f"RUN: night ({run['run_id'][:8]}) does not train: KILLED, terminated. Go on with: "
    assert (done.returncode, done.stderr) == (2, f"{refusal}{resume}\n")


IGNORES = """
import signal, sys, time
from pathlib import Path
from headroom.run.known_runs import Announcement
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for name in sys.argv[1:-1]:
    Announcement(Path(name), name).__enter__()
with Announcement(Path(sys.argv[-1]), sys.argv[-1]) as mine:
    mine.tell(stage="train model", run_id="abcdef0123")
    print("told", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def ignores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A process with trainings a, b, and c, that does not hear signals."""
    monkeypatch.setenv("HEADROOM_LEASES", str(tmp_path / "leases"))
    words = [PYTHON, "-c", IGNORES, "a", "b", "b", "c"]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "told\n"
    yield process
    process.kill()
    process.communicate()


def test_what_does_not_end_by_itself_is_killed_with_now(
    ignores: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "TWICE_S", 0.01)
    monkeypatch.setattr(stop, "KILL_S", 0.1)
    assert stop.main(["c", "--now"]) == 0
    assert ignores.wait(10) == -signal.SIGKILL and list_known_runs(Path("none")) == []


def test_one_word_means_one_training(
    ignores: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pid = ignores.pid
    for word, refusal in (
        ("b", f"b is 2 trainings: b (process {pid}), b (process {pid}); name one"),
        ("abcde", "no training here is called abcde; `python -m flows.runs` shows them"),
        ("", "no training here is called ; `python -m flows.runs` shows them"),
    ):
        assert stop.main([word]) == 2
        assert capsys.readouterr().err == f"RUN: {refusal}\n"
    assert ignores.poll() is None


def test_only_a_process_that_is_what_it_says_is_signalled(
    ignores: subprocess.Popen[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Anybody may write a file that names somebody's process."""
    monkeypatch.setattr(stop, "LEAVE_S", 0.2)
    for name, known in (
        ("another time", {"pid": ignores.pid, "started_at": 1.0}),
        ("nobody", {"pid": 2**22 + 1, "started_at": 1.0}),
    ):
        with FileLock(tmp_path / "leases" / "0.run") as lock:
            lock.take(json.dumps({"name": name, "folder": name, **known}))
            assert stop.main([name]) == 1
            assert "its process can't be seen from here" in capsys.readouterr().err
    assert ignores.poll() is None


def test_one_that_ends_by_itself_meanwhile_was_not_unseen(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that had taken back its announcement, and held its folder yet, was said to be of
    another container; flows.stop returned 1."""
    monkeypatch.setenv("HEADROOM_LEASES", str(tmp_path / "leases"))
    folder = place / ".headroom" / "runs" / "20261124-120000-abcdef01"
    folder.mkdir(parents=True)
    write_start(folder, "abcdef0123", name="late")
    write_end(folder, {"status": "FINISHED"})
    lock = FileLock(folder / TRAINING_LOCK)
    lock.take("")
    letting_go = threading.Timer(0.3, lock.close)
    letting_go.start()
    assert stop.main(["late"]) == 2
    letting_go.join()
    assert "late (abcdef01) does not train: FINISHED" in capsys.readouterr().err


def test_a_run_of_which_all_processes_were_killed_is_put_right_once(
    desk: Desk, place: Path
) -> None:
    process = desk(*LONG, "--run.name", "lost", cold=True)
    _until(place, lambda run: run.step)
    children = psutil.Process(process.pid).children()  # among them the server of all tests
    (sender,) = (
        child for child in children if "headroom.tracking.mlflow_sender" in child.cmdline()
    )
    (lock,) = (place / ".headroom" / "runs").glob("*/sending.lock")
    process.send_signal(signal.SIGSTOP)
    sender.kill()
    while is_held(lock):
        time.sleep(0.05)
    process.kill()
    process.communicate()
    (run,) = _runs(place)
    assert run["state"] == "gone" and "flows.tidy --yes" in run["reason"]
    done = _command(place, "flows.tidy")
    line = f"would end lost ({run['run_id'][:8]}): its process is gone"
    assert (done.returncode, line in done.stdout.splitlines()) == (0, True)
    assert _runs(place)[0]["state"] == "gone"
    with ThreadPoolExecutor() as both:
        asked = [both.submit(_command, place, "flows.tidy", "--yes") for _ in range(2)]
    told = "".join(done.result().stdout for done in asked)
    assert "ended lost" in told
    assert [(done.result().returncode, done.result().stderr) for done in asked] == [(0, "")] * 2
    (run,) = _runs(place)
    assert (run["state"], run["reason"]) == ("KILLED", "its process was gone")
    with closing(sqlite3.connect(place / "mlflow.db")) as database:
        assert database.execute("select status from runs").fetchall() == [("KILLED",)]


def test_watching_ends_quietly_at_ctrl_c(place: Path) -> None:
    command = [PYTHON, "-m", "flows.runs", "--watch"]
    watch = subprocess.Popen(
        command, cwd=place, env=desk_environment(), stdout=-1, stderr=-1, text=True
    )
    time.sleep(3)
    watch.send_signal(signal.SIGINT)
    out, err = watch.communicate(timeout=30)
    assert (watch.returncode, err) == (130, "") and "holds none" in out


def test_what_cannot_be_listed_is_said_in_a_sentence(place: Path) -> None:
    for words in (("--last", "-1"), ("--watch", "--json"), ("--lst", "3")):
        done = _command(place, "flows.runs", *words)
        assert done.returncode == 2 and "Traceback" not in done.stderr
    (place / "mlflow.yaml").write_text("runs: [1]\n")
    done = _command(place, "flows.runs")
    assert (done.returncode, done.stderr.startswith("mlflow.yaml runs:")) == (2, True)


def test_what_cannot_be_accepted_is_said_in_a_sentence(place: Path) -> None:
    done = _command(place, "flows.runs", "--accept", "nightly")
    assert (done.returncode, done.stdout) == (2, "")
    assert "mlflow.db is not there; nothing has run yet" in done.stderr
    with closing(sqlite3.connect(place / "mlflow.db")):
        done = _command(place, "flows.runs", "--accept", "nightly")
    assert done.returncode == 2 and "Traceback" not in done.stderr
