"""A training that fails of what a new process cures, as its user sees it at a desk: it goes on by
itself, in the same run and under the same process id, and not for ever."""

import json
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.cli.flags import make_resume_words
from headroom.settings.read_settings import ConfigError, resolve_config
from tests.run_folders import LOG, read_end

Desk = Callable[..., subprocess.Popen[str]]
SICK = """
import json
import os
from contextlib import suppress
from pathlib import Path
import torch

from headroom.run import resume

resume.FIRST_RETRY_S = SECONDS

class Net(torch.nn.Sequential):
    def __init__(self, input_shape, outputs, times=1, at=100):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, outputs))
        self.times, self.at, self.calls = times, at, 0

    def forward(self, x):
        self.calls += self.training
        if self.training and self.calls == self.at:
            with open("attempts", "a") as attempts:
                open_now = []
                for number in os.listdir("/proc/self/fd"):
                    with suppress(OSError):
                        open_now.append(os.readlink(f"/proc/self/fd/{number}"))
                told = {"pid": os.getpid(), "open": open_now}
                told["retry_of"] = os.environ.get("HEADROOM_RETRY_OF")
                attempts.write(json.dumps(told) + "\\n")
            if len(Path("attempts").read_text().splitlines()) <= self.times:
                raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        return super().forward(x)
"""


def _query(place: Path, text: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(place / "mlflow.db") as database:
        return database.execute(text).fetchall()


@pytest.fixture
def sick(desk: Desk, place: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a training whose model raises a sticky error."""

    def start(
        *words: str,
        times: int = 1,
        at: int = 100,
        wait_s: float = 0.1,
        text: str = SICK,
        **how: Any,
    ) -> subprocess.Popen[str]:
        (place / "sick.py").write_text(text.replace("SECONDS", str(wait_s)))
        args = f"{{times: {times}, at: {at}}}"
        return desk("--model.name", "sick:Net", "--model.args", args, *words, **how)

    return start


def test_a_lost_device_is_cured_by_a_new_process_and_nobody_can_tell_from_the_series(
    sick: Desk, place: Path
) -> None:
    (place / "mine.yaml").write_text("train: {epochs: 20}\noptim: {lr: 0.01}\n")
    words = ("--config", "mine.yaml", "--checkpoint.every", "20steps")
    process = sick(*words, "--train.log_every", "5", wait_s=2.0, cold=True)
    while not (place / "attempts").exists():
        assert process.poll() is None
        time.sleep(0.1)
    (place / "mine.yaml").write_text("optim: {lr: 0.5}\n")  # for the next one, by its user
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    failed, retried = err.split("going on from the checkpoint of step ")
    told = "device_lost, which a new process may cure: retry 1 of 2 begins in 2.00 s, from step "
    assert "failed: CUDA error: unspecified launch failure" in failed and told in failed
    step = failed.partition(told)[2].split("\n")[0]
    assert retried.startswith(f"{step}\n") and int(step) > 0
    assert "FINISHED" in out and "Traceback" not in err

    first, second = map(json.loads, (place / "attempts").read_text().splitlines())
    assert first["pid"] == second["pid"] == process.pid
    files = [name for name in second["open"] if name.startswith(str(place))]
    assert len(files) == len(set(files)), "files that stayed open"
    both = {n for n in first["open"] if n.startswith(("pipe:", "socket:"))} & {*second["open"]}
    assert len(both) == 2, "pipes and sockets that stayed open, beside those of its output"
    assert second["retry_of"] is None, "a variable that stayed"
    ((run_id, status),) = _query(place, "select run_uuid, status from runs")
    assert status == "FINISHED"
    tags = dict(_query(place, "select key, value from tags"))
    assert tags["retries"] == "1 of 2 after device_lost" and tags["resumed"] == "1"
    assert not {"failure", "end.reason", "retry_of"} & set(tags)
    at = [step for (step,) in _query(place, "select step from metrics where key = 'train/loss'")]
    assert sorted(set(at)) == list(range(5, 461, 5)), "23 steps an epoch"
    assert len([step for step in at if step < 460]) == len(set(at)) - 1, "told twice"


def test_a_program_hears_of_the_end_and_not_of_what_is_tried_again(sick: Desk) -> None:
    out, err = sick("--checkpoint.every", "20steps", "--json").communicate(timeout=300)
    (line,) = out.splitlines()
    assert json.loads(line)["status"] == "FINISHED" and "going on from the checkpoint" in err, err


def test_what_fails_always_ends_after_its_retries_and_says_what_it_is(
    sick: Desk, place: Path
) -> None:
    """Without a checkpoint it begins anew, as a run of its own that names the one before."""
    process = sick("--checkpoint.every", "none", times=9, at=30)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 1, err
    assert "retry 1 of 2 begins" in err and "retry 2 of 2 begins" in err
    assert err.count("from the start\n") == 2 and err.rstrip().endswith("launch failure")
    assert len((place / "attempts").read_text().splitlines()) == 3
    rows = "select run_uuid, status from runs order by start_time"
    runs = [run for run, status in _query(place, rows) if status == "FAILED"]
    assert len(runs) == 3
    for number, run in enumerate(runs):
        tags = dict(_query(place, f"select key, value from tags where run_uuid = '{run}'"))
        assert tags["failure"] == "device_lost"
        assert tags.get("retry_of") == (runs[number - 1] if number else None)
        assert tags.get("retries") == (f"{number} of 2 after device_lost" if number else None)
    left = [read_end(log.parent) for log in (place / ".headroom/runs").glob(f"*/{LOG}")]
    assert {run["tags"]["failure"] for run in left} == {"device_lost"}


def test_ctrl_c_ends_the_wait(sick: Desk, place: Path) -> None:
    process = sick(wait_s=600.0, cold=True, at=5)
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any("retry 1 of 2 begins in 10 min" in line for line in lines)
    waits, until = psutil.Process(process.pid), time.monotonic() + 60
    while "HEADROOM_RETRY_AT" not in waits.environ() or any(
        child.status() == psutil.STATUS_ZOMBIE for child in waits.children()
    ):
        assert time.monotonic() < until
        time.sleep(0.2)
    time.sleep(2)  # for its handlers to stand
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert process.stderr.read() == "interrupted\n"
    ((status,),) = _query(place, "select status from runs")
    assert status == "FAILED"


def test_a_mistake_of_the_users_is_not_tried_again(sick: Desk, place: Path) -> None:
    process = sick(text=SICK.replace("unspecified launch failure", "no kernel image"))
    _, err = process.communicate(timeout=200)
    assert process.returncode == 1 and "retry" not in err, err
    assert _query(place, "select value from tags where key = 'failure'") == [("user_code",)]
    assert len((place / "attempts").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("run.retries", "-1", "run.retries: must be greater than or equal to 0 (got -1)"),
        ("run.retries", "often", "run.retries: must be a valid integer (got 'often')"),
        (
            "run.retry_wait_s",
            "60",
            "run.retry_wait_s: is no setting any more; give run.retries alone: the wait is half a "
            "minute, then twice as long",
        ),
    ],
)
def test_bad_settings_of_retries_are_refused(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_config(None, {name: value})
    assert str(refused.value) == said


def test_the_words_of_a_retry_name_its_run_and_keep_the_flags(tmp_path: Path) -> None:
    words = ["--config", "a.yaml", "--resume=latest", "--optim.lr", "-0.1", "--debug"]
    assert make_resume_words(words, tmp_path) == [
        "--optim.lr=-0.1",
        "--debug",
        f"--resume={tmp_path}",
    ]
