"""What an MLflow server answers ends in bounded time and memory, and drives no terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from mlflow import MlflowClient
from mlflow.utils import request_utils

from headroom.tracking import answer_limits
from headroom.tracking.answer_limits import TCPKeepAliveHTTPAdapter, make_client
from headroom.tracking.query_runs import ExperimentRuns
from headroom.tracking.tracking_settings import TrackingError, TrackingSettings
from tests.conftest import ROOT, desk_environment

# Clears the screen, sets its title, asks it what it is, hides what follows, goes up, turns the
# direction of the text: what no command of this project draws with.
DRIVES = "\x1b[2J\x1b]0;mine\x07\x9bc\x1b[c\x1b[38;5;97m\x1b[7A\r\x08\u202e"
FOUND = re.compile(
    "\x1b\\[2J|\x1b\\]|\x07|\x9b|\x1b\\[c|\x1b\\[38;5;97m|\x1b\\[7A|\x08|\u202e|\r(?!\n)"
)
Answers = Callable[["_Asked", str], Any]  # of a path; None: it has answered itself


class _Asked(BaseHTTPRequestHandler):
    answers: Answers
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = type(self).answers(self, unquote(urlsplit(self.path).path))
        if content is not None:
            self.send(json.dumps(content).encode())

    do_POST = do_PATCH = do_GET

    def send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def trickle(self, first: bytes, again: bytes = b" ") -> None:
        """A byte from time to time, for ever."""
        with suppress(OSError):
            self.wfile.write(first)
            while True:
                self.wfile.write(again)
                time.sleep(0.05)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _serve(answers: Answers) -> Iterator[str]:
    handler = type("Handler", (_Asked,), {"answers": staticmethod(answers)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _make_run(number: int, text: str = "") -> dict[str, Any]:
    run_id = f"{number:032x}"
    info = {"run_id": run_id, "run_uuid": run_id, "run_name": f"n{number}{text}"}
    info |= {"experiment_id": "1", "status": "FINISHED", "lifecycle_stage": "active"}
    info |= {"start_time": number, "end_time": number + 1, "artifact_uri": "mlflow-artifacts:/x"}
    tags = ("device", "end.reason", "failure", "bound.why", "gate.why", f"t{text}", "run.key")
    named = {"tags": {name: name + text for name in tags} | {"gate": "new", "gate.of": "abc"}}
    named["params"] = {"optim.lr": f"0.{number}{text}", f"p{text}": f"{number}{text}"}
    metrics = {"speed/samples_per_s": 9.0, "val/loss": 1.0 + number, f"m{text}": 1.0}
    data: dict[str, Any] = {
        kind: [{"key": key, "value": value} for key, value in pairs.items()]
        for kind, pairs in named.items()
    }
    of_metrics = [
        {"key": key, "value": value, "timestamp": 1, "step": 0} for key, value in metrics.items()
    ]
    return {"info": info, "data": {**data, "metrics": of_metrics}}


def _answer(path: str, text: str = "", **of_pages: Any) -> Any:
    if "experiments" in path:
        experiment = {"experiment_id": "1", "name": "mine", "lifecycle_stage": "active"}
        return {"experiment": experiment, "experiments": [experiment]}
    if path.endswith("/runs/search"):
        return {"runs": [_make_run(i, text) for i in range(2)], **of_pages}
    if path.endswith("/runs/get"):
        return {"run": _make_run(0, text)}
    return {}


def _read(uri: str, last: int) -> list[dict[str, Any]]:
    where = TrackingSettings(tracking_uri=uri, experiment="mine")
    return ExperimentRuns(where).read_newest(last=last)


def test_runs_of_a_server_that_behaves_are_read() -> None:
    with _serve(lambda _, path: _answer(path)) as uri:
        assert [run["name"] for run in _read(uri, 2)] == ["n1", "n0"]


@pytest.mark.parametrize("of_pages", [{}, {"runs": []}])
def test_the_same_page_again_and_again_is_an_error(of_pages: dict[str, Any]) -> None:
    """It was asked for as long as nobody pressed Ctrl-C, or until the memory was full."""
    with (
        _serve(lambda _, path: _answer(path, next_page_token="more", **of_pages)) as uri,
        pytest.raises(TrackingError, match="can't be used: it names the same page as the next"),
    ):
        _read(uri, 100)


def test_a_process_that_has_asked_mlflow_before_has_limits_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its session stayed in use: a page without an end was asked for for ever."""
    name = TCPKeepAliveHTTPAdapter.__name__
    monkeypatch.setattr(request_utils, name, TCPKeepAliveHTTPAdapter)
    request_utils._cached_get_request_session.cache_clear()
    with _serve(lambda _, path: _answer(path, next_page_token="more")) as uri:
        assert MlflowClient(uri).get_experiment("1").name == "mine"
        with pytest.raises(TrackingError, match="it names the same page as the next"):
            _read(uri, 100)


def test_the_same_page_of_a_curve_again_and_again_is_an_error() -> None:
    """MLflow's client itself asks for these pages."""
    point = {"key": "a", "value": 1.0, "timestamp": 1, "step": 0}
    with (
        _serve(lambda *_: {"metrics": [point], "next_page_token": "more"}) as uri,
        pytest.raises(Exception, match="it names the same page as the next"),
    ):
        make_client(uri).get_metric_history("a" * 32, "a")


def test_pages_without_end_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_limits, "PAGES_BYTES", 2**16)
    tokens = iter(range(10**6))
    with (
        _serve(lambda _, path: _answer(path, next_page_token=str(next(tokens)), runs=[])) as uri,
        pytest.raises(TrackingError, match="its pages have no end within 60 min and 0 MiB"),
    ):
        monkeypatch.setattr(answer_limits, "PAGES_BYTES", 2**10)
        _read(uri, 100)


def _send_bomb(asked: _Asked) -> None:
    packing = zlib.compressobj(9, wbits=31)
    body = b"".join(packing.compress(bytes(2**20)) for _ in range(64)) + packing.flush()
    assert len(body) < 2**17
    with suppress(OSError):
        asked.send(body, Content_Encoding="gzip")


def _send_large(asked: _Asked) -> None:
    with suppress(OSError):
        asked.send(bytes(2**26))


@pytest.mark.parametrize("sends", [_send_large, _send_bomb])
def test_an_answer_that_is_too_large_is_refused_before_its_end(
    monkeypatch: pytest.MonkeyPatch, sends: Callable[[_Asked], None]
) -> None:
    monkeypatch.setattr(answer_limits, "MOST_BYTES", 2**22)

    def answer(asked: _Asked, path: str) -> Any:
        return sends(asked) if path.endswith("/runs/search") else _answer(path)

    with (
        _serve(answer) as uri,
        pytest.raises(TrackingError, match="can't be used: its answer is larger than 4 MiB"),
    ):
        _read(uri, 2)


HEAD = b"HTTP/1.1 200 OK\r\n"
TRICKLES = {
    "head": (HEAD, b"A: b\r\n"),
    "body": (HEAD + b"Content-Length: 1000000\r\n\r\n{", b" "),
    "chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "without a length": (HEAD + b"\r\n{", b" "),
}


@pytest.mark.parametrize("kind", TRICKLES)
def test_an_answer_that_trickles_has_an_end(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A timeout of a socket counts from each byte to the next."""
    monkeypatch.setattr(answer_limits, "ANSWER_S", 0.5)

    def answer(asked: _Asked, path: str) -> Any:
        return asked.trickle(*TRICKLES[kind]) if path.endswith("/search") else _answer(path)

    with (
        _serve(answer) as uri,
        pytest.raises(TrackingError, match="can't be used: its answer was not whole after 0 s"),
    ):
        _read(uri, 2)


def test_a_download_lasts_while_it_comes_and_ends_where_it_trickles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(answer_limits, "FILE_S", 0.5)
    pieces, size = 30, 2**19

    def answer(asked: _Asked, path: str) -> Any:
        if path.endswith("/slow.bin"):
            return asked.trickle(HEAD + b"Content-Length: 1000000\r\n\r\n")
        if path.endswith(".bin"):
            asked.send_response(200)
            asked.send_header("Content-Length", str(pieces * size))
            asked.end_headers()
            for _ in range(pieces):
                asked.wfile.write(bytes(size))
                time.sleep(0.05)
            return None
        if path.endswith("/mlflow-artifacts/artifacts"):
            return {"files": []}  # so that what is asked for is a file
        return _answer(path)

    with _serve(answer) as uri:
        client = make_client(uri)
        whole = client.download_artifacts("a" * 32, "whole.bin", str(tmp_path))
        assert Path(whole).stat().st_size == pieces * size
        with pytest.raises(Exception, match=r"slow.bin|Connection broken|Failed to download"):
            client.download_artifacts("a" * 32, "slow.bin", str(tmp_path))


def test_a_login_goes_to_no_other_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may send a request on, as HTTP lets it; what is asked there has no password."""
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "a-secret-token")
    came: list[tuple[str, str | None]] = []

    def elsewhere(asked: _Asked, path: str) -> Any:
        came.append(("elsewhere", asked.headers.get("Authorization")))
        return _answer(path)

    with _serve(elsewhere) as other:

        def answer(asked: _Asked, path: str) -> None:
            came.append(("here", asked.headers.get("Authorization")))
            asked.send(b"", 307, Location=other.replace("127.0.0.1", "localhost") + asked.path)

        with _serve(answer) as uri:
            make_client(uri).get_experiment_by_name("mine")
    assert came == [("here", "Bearer a-secret-token"), ("elsewhere", None)]


def _run_in_terminal(place: Path, uri: str, module: str, *words: str) -> tuple[int, str]:
    """Run a command as in a terminal; return its exit code and what it wrote there."""
    ours, theirs = pty.openpty()
    env = desk_environment() | {"MLFLOW_TRACKING_URI": uri, "TERM": "xterm-256color"}
    command = [sys.executable, "-m", module, *words]
    env |= {"MLFLOW_EXPERIMENT_NAME": "mine", "TESTS_COLD": module}
    process = subprocess.Popen(command, cwd=place, env=env, stdout=theirs, stderr=theirs)
    os.close(theirs)
    came = b""
    with suppress(OSError):  # EIO: it has ended
        while piece := os.read(ours, 2**16):
            came += piece
    os.close(ours)
    return process.wait(), came.decode(errors="replace")


@pytest.mark.parametrize(
    ("module", "words", "code"),
    [
        ("flows.compare", ("--last", "2"), 0),
        ("flows.verdict", ("0" * 32,), 0),
        ("flows.runs", ("--accept", "0" * 32), 0),
        ("flows.tidy", ("--yes",), 0),
    ],
)
def test_nothing_that_a_server_names_drives_the_terminal(
    place: Path, module: str, words: tuple[str, ...], code: int
) -> None:
    """Names of params cleared the screen, and those of runs set its title."""
    with _serve(lambda _, path: _answer(path, DRIVES)) as uri:
        ended, shown = _run_in_terminal(place, uri, module, *words)
    assert ended == code and not FOUND.findall(shown.replace("\r\n", "\n")), repr(shown)
    assert re.search("n0|n1|lr", shown) or module == "flows.tidy"


def test_nothing_that_a_server_says_of_an_error_drives_the_terminal(place: Path) -> None:
    said = {"error_code": f"INVALID_PARAMETER_VALUE{DRIVES}", "message": f"no {DRIVES}"}
    with _serve(lambda asked, _: asked.send(json.dumps(said).encode(), 400)) as uri:
        ended, shown = _run_in_terminal(place, uri, "flows.compare", "--last", "2")
    assert ended == 2 and "tracking_uri: " in shown
    assert not FOUND.findall(shown.replace("\r\n", "\n")), repr(shown)
    assert str(ROOT) not in shown  # no traceback
