"""Trainings whose Prefect server is away, or dies in mid-run."""

import os
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from fcntl import LOCK_EX, flock
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest

from tests.conftest import is_training, query

Desk = Callable[..., "subprocess.Popen[str]"]
LONG = ("--data.source", "synthetic", "--train.epochs", "100000", "--train.log_every", "10")


def _server(home: Path) -> int:
    """The process id of the one that the desk has started."""
    port = urlsplit((home / "headroom-server.lock").read_text()).port
    found = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid]
    return next(c.pid for c in found if c.laddr and c.laddr.port == port)


def _is_training(process: "subprocess.Popen[str]", place: Path) -> None:
    until = time.monotonic() + 120
    while not is_training(place):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--train.end", "5s"), 0, "trained, but Prefect could not record its end: "),
        ((), 130, "interrupted"),
    ],
)
def test_a_training_whose_prefect_server_dies_comes_to_its_own_end_soon(
    desk: Desk, place: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    """Each task asked for a slot of a tag, a minute long, and FAILED the run without; the end
    took two minutes and a half."""
    home = place / "home"
    process = desk(*LONG, *arguments, home=home, PREFECT_CLIENT_MAX_RETRIES="1")
    _is_training(process, place)
    os.kill(_server(home), signal.SIGKILL)
    if code:
        time.sleep(1)
        process.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, err = process.communicate(timeout=200)
    assert process.returncode == code, err
    assert said in err and "Traceback" not in err and "Error logging" not in err
    assert time.monotonic() - began < 60
    with closing(sqlite3.connect(place / "mlflow.db")) as opened:
        ((status,),) = opened.execute("SELECT status FROM runs").fetchall()
    assert status == ("KILLED" if code else "FINISHED")
    if not code:
        assert "Release  OK" in out and "/runs/" in out


def test_a_prefect_that_is_away_at_the_start_is_one_sentence_and_costs_nothing(
    desk: Desk, place: Path
) -> None:
    api = "http://127.0.0.1:9/api"
    process = desk("--train.epochs", "1", PREFECT_API_URL=api)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2 and out == ""
    assert f"\nPREFECT_API_URL: {api} does not answer; start that server" in err
    assert "Traceback" not in err and len(err.splitlines()) == 2
    assert not list(place.glob(".headroom/runs/*/")) and not (place / "mlflow.db").exists()


class _Unavailable(BaseHTTPRequestHandler):
    """Prefect's server while its database is locked: it is healthy, and answers 503."""

    def do_GET(self) -> None:
        body = b"true" if self.path == "/api/health" else b"{}"
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200 if body == b"true" else 503)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _failing_server(home: Path, *, answers: bool) -> Iterator[str]:
    """A server of the desk that does not answer, or answers 503: the address of its API."""
    home.mkdir(exist_ok=True)
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), _Unavailable) as server,
        open(home / "headroom-server.lock", "w") as lock,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        api = f"http://127.0.0.1:{server.server_port if answers else 9}/api"
        flock(lock, LOCK_EX)
        lock.write(api)
        lock.flush()
        yield api
        server.shutdown()


@pytest.mark.parametrize("answers", [False, True])
def test_a_training_is_no_worse_for_a_server_of_its_desk_that_fails_at_the_start(
    desk: Desk, place: Path, answers: bool
) -> None:
    """23 of 50 trainings that began at once failed with "503 Service Unavailable" or "timed out",
    and were not in MLflow."""
    home = place / "home"
    with _failing_server(home, answers=answers) as api:
        process = desk("--train.epochs", "1", home=home, PREFECT_CLIENT_MAX_RETRIES="0")
        out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    why = "Failed to reach API" if answers else "no answer"
    assert f"\nPrefect's server of this desk, {api}, fails ({why}" in err
    assert "Traceback" not in err and "Warning" not in err
    assert "Release  OK" in out
    assert query(place, "SELECT status FROM runs") == [("FINISHED",)]


def test_a_prediction_and_a_comparison_are_no_worse_for_it_either(desk: Desk, place: Path) -> None:
    """They failed with "503 Service Unavailable", or waited for Prefect and then failed."""
    home = place / "home"
    np.save(place / "x.npy", np.zeros((3, 1, 8, 8), np.float32))
    with _failing_server(home, answers=True) as api:
        words = ("--vary", "optim.lr=0.01,0.1", "--train.epochs", "1")
        once = {"PREFECT_CLIENT_MAX_RETRIES": "0"}
        compared = desk(*words, home=home, module="flows.compare", **once)
        out, err = compared.communicate(timeout=240)
        assert compared.returncode == 0, err
        assert err.count(f"Prefect's server of this desk, {api}, fails (") >= 1
        assert "Traceback" not in err and "Page  " in out
        words = ("--input", "x.npy", "--output", "y.csv")
        predicted = desk(*words, home=home, module="flows.predict", **once)
        out, err = predicted.communicate(timeout=120)
    assert predicted.returncode == 0, err
    assert f"Prefect's server of this desk, {api}, fails (" in err and "Traceback" not in err
    assert out.startswith("3 rows predicted") and (place / "y.csv").is_file()
    told = query(place, "SELECT status FROM runs")
    assert told == [("FINISHED",)] * 3
