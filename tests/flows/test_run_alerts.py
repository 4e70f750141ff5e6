"""A run alerts a person while it trains, by a line, a tag, a warning and a message, and where the
messages go is shown nowhere."""

from __future__ import annotations

import json
import logging
import os
import signal
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from flows.train import train
from headroom import account
from headroom.settings.run_config import RunConfig
from tests.conftest import PYTHON, desk_environment, query
from tests.run.test_messages import Webhook

SECRET = "pq7marker-of-the-webhook"
THEIRS = """
import time
import torch

calls = 0

def loss(outputs, targets):
    global calls
    calls += torch.is_grad_enabled()
    time.sleep(0.001)
    right = torch.nn.functional.cross_entropy(outputs, targets)
    return right * 20 if 120 < calls < 150 and torch.is_grad_enabled() else right

def fails(outputs, targets):
    raise ValueError("no such loss")
"""


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    server = Webhook()
    yield server
    server.shutdown()
    server.server_close()


def _tags(place: Path) -> dict[str, str]:
    return dict(query(place, "select key, value from tags"))


def _find_secret(place: Path) -> list[str]:
    """Return the files that hold the address of the webhook."""
    files = (file for file in place.rglob("*") if file.is_file())
    return [str(file) for file in files if SECRET.encode() in file.read_bytes()]


def _settings(webhook: Webhook, **more: Any) -> RunConfig:
    sections = {
        "train": {"epochs": 20, "log_every": 2, "loss": "their_loss:loss", "max_steps": 200},
        "run": {"notify": f"{webhook.address}/{SECRET}", "name": "jumps"},
        "optim": {"name": "sgd", "lr": 1e-5},
    }
    return RunConfig.model_validate({k: {**v, **more.get(k, {})} for k, v in sections.items()})


@pytest.fixture
def theirs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADROOM_SECRET_RUN_NOTIFY", raising=False)
    (place / "their_loss.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(str(place))


@pytest.mark.usefixtures("prefect_api", "theirs")
def test_a_training_whose_loss_jumps_tells_so_by_line_tag_warning_and_message(
    place: Path, webhook: Webhook, caplog: pytest.LogCaptureFixture
) -> None:
    made = train(_settings(webhook))
    said, end = webhook.list_texts()
    assert said.startswith("jumps on ") and ": loss spike: train/loss is " in said
    assert "jumps on " in end and " has finished: " in end
    (line,) = [r for r in caplog.records if r.getMessage().startswith("loss spike: ")]
    assert line.levelno == logging.WARNING
    assert made["tags"]["alerts"] == line.getMessage()
    assert line.getMessage() in made["warnings"]
    assert _tags(place)["alerts"] == line.getMessage()
    assert json.loads(next(place.rglob("alerts.json")).read_text()) == {
        "loss spike": line.getMessage()
    }
    assert _find_secret(place) == [] and SECRET not in caplog.text + json.dumps(made)
    assert "notify: '***'" in next(place.rglob("config.yaml")).read_text()
    assert query(place, "select key from params where key = 'run.notify'") == []


@pytest.mark.usefixtures("prefect_api", "theirs")
def test_a_training_that_fails_says_so(place: Path, webhook: Webhook) -> None:
    with pytest.raises(ValueError, match="no such loss"):
        train(_settings(webhook, train={"loss": "their_loss:fails"}))
    (end,) = webhook.list_texts()
    assert "jumps on " in end and "has failed (bad_input): " in end and "no such loss" in end
    assert _find_secret(place) == []


def _log_losses(run: Any, *, jumps_at: int = 60, count: int = 150) -> None:
    for at in range(count):
        run.log({"train/loss": (90.0 if at >= jumps_at else 1.0) + at % 7 / 20}, step=at)


def test_an_account_whose_loss_jumps_tells_so(
    place: Path, webhook: Webhook, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    address = f"{webhook.address}/{SECRET}"
    with account(run_name="own", model=net, optimizer=optimizer, quiet=True, notify=address) as run:
        _log_losses(run)
    said, end = webhook.list_texts()
    assert said.startswith("own on ") and ": loss spike: train/loss is 90" in said
    assert " has finished: " in end
    assert run.run["tags"]["alerts"] == _tags(place)["alerts"]
    assert run.run["warnings"][0] == run.run["tags"]["alerts"]
    assert len([r for r in caplog.records if "loss spike" in r.getMessage()]) == 1
    assert _find_secret(place) == [] and SECRET not in caplog.text


def _find_runs(place: Path, status: str) -> list[tuple[Any, ...]]:
    with suppress(sqlite3.OperationalError):  # its tables are being made
        return query(place, f"select run_uuid from runs where status = '{status}'")
    return []


def _wait_until(is_so: Callable[[], object]) -> None:
    until_s = monotonic() + 90
    while not is_so():
        assert monotonic() < until_s, "it did not happen"
        sleep(0.1)


def test_an_alert_is_a_tag_while_the_loop_goes_on(place: Path) -> None:
    """It was one at the end of the run alone, when nobody could do anything any more."""
    with account(run_name="own", quiet=True) as run:
        _log_losses(run)
        _wait_until(lambda: _find_runs(place, "RUNNING") and "alerts" in _tags(place))
        assert _tags(place)["alerts"].startswith("loss spike: train/loss is 90")
        assert _find_runs(place, "RUNNING")


KILLED = """
import os, time
import torch
from headroom import account
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
with account(run_name="own", model=net, optimizer=optimizer, quiet=True) as run:
    for step in range(100_000):
        loss = net(torch.ones(8, 4)).square().mean() + (90 if os.path.exists("jump") else 1)
        loss.backward()
        optimizer.step()
        run.log({"train/loss": loss + step % 7 / 20})
        time.sleep(0.02)
"""


@pytest.mark.parametrize("kills_sender", [False, True])
def test_a_loop_that_is_killed_leaves_its_alerts_in_mlflow(place: Path, kills_sender: bool) -> None:
    """They were in its memory, and went with it."""
    (place / "loop.py").write_text(KILLED)
    process = subprocess.Popen([PYTHON, "loop.py"], cwd=place, env=desk_environment())
    _wait_until(lambda: _find_runs(place, "RUNNING"))
    sleep(2)  # log points that a loss may jump from
    (place / "jump").touch()
    logs = ".headroom/runs/*/events.jsonl"
    _wait_until(lambda: any(b'{"tags":' in log.read_bytes() for log in place.glob(logs)))
    senders = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGSTOP)  # or it starts another
    for sender in senders if kills_sender else ():
        sender.kill()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    if kills_sender:
        psutil.wait_procs(senders, timeout=30)
        command = [PYTHON, "-m", "flows.tidy", "--yes"]
        subprocess.run(command, cwd=place, env=desk_environment(), check=True, capture_output=True)
    _wait_until(lambda: _find_runs(place, "KILLED"))
    assert _tags(place)["alerts"].startswith("loss spike: train/loss is 9")
    assert _tags(place)["end.reason"].startswith("its process was gone")


def test_a_healthy_account_is_not_alerted_and_its_failure_is_told(
    place: Path, webhook: Webhook
) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        account(run_name="own", quiet=True, notify=webhook.address) as run,
    ):
        _log_losses(run, jumps_at=1000)
        raise ZeroDivisionError("of mine")
    (end,) = webhook.list_texts()
    assert end.endswith("has failed (user_code): of mine") and "alerts" not in _tags(place)
    assert list(place.rglob("alerts.json")) == []


def test_an_account_whose_step_does_not_come_says_where_it_stands(
    place: Path, webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LOOK_EVERY_S", 0.05), ("SILENT_S", 1.0), ("SILENT_TIMES", 1.0)):
        monkeypatch.setattr(f"headroom.run.alerts.{name}", value)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with account(model=net, optimizer=optimizer, quiet=True, notify=webhook.address) as run:
        for at in range(30):
            with run.step():
                net(torch.randn(8, 4)).sum().backward()
                optimizer.step()
                sleep(0.05)
                until_s = monotonic() + 20
                while at == 29 and not webhook.posts and monotonic() < until_s:
                    sleep(0.1)  # it hangs here
            run.log({"train/loss": 1.0})
    said, _ = webhook.list_texts()
    assert "no step: nothing for 0:0" in said
    assert "it stands at test_run_alerts.py:" in said and "sleep(0.1)  # it hangs here" in said


def test_a_place_that_never_answers_holds_no_loop_up(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headroom.run.messages.TIMEOUT_S", 0.5)
    asked = threading.Event()

    def deliver(where: str, text: str) -> None:
        asked.set()
        sleep(3)

    monkeypatch.setattr("headroom.run.messages.deliver", deliver)
    with account(run_name="own", quiet=True, notify="http://127.0.0.1:1/") as run:
        _log_losses(run)
        assert asked.wait(5)
        began_s = monotonic()
        _log_losses(run)
        assert monotonic() - began_s < 1.0
    assert run.run["status"] == "FINISHED" and "alerts" in run.run["tags"]


@pytest.mark.parametrize("where", ["ftp://x/y", "https://", "'", "http://[x"])
def test_where_no_message_could_go_is_refused_without_being_shown(where: str) -> None:
    with pytest.raises(ValueError, match="notify: must be an http.s. address or a command") as bad:
        account(notify=where)
    assert where not in str(bad.value) or len(where) < 3
