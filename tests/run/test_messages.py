"""Messages leave in a thread, in their place's form, and what fails there is told once and without
the place, which is a secret."""

from __future__ import annotations

import json
import logging
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic

import pytest

from headroom.run import messages
from headroom.run.failures import Failure
from headroom.run.messages import Messenger, describe_end, make_post


class _Taker(BaseHTTPRequestHandler):
    """Keeps what is posted to it, and answers with its server's code."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.posts.append((self.path, dict(self.headers), body))  # type: ignore[attr-defined]
        self.send_response(self.server.code)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class Webhook(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Taker)
        self.code = 200
        self.posts: list[tuple[str, dict[str, str], str]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def list_texts(self) -> list[str]:
        return [json.loads(body)["text"] for _, _, body in self.posts]


class _Refusing(threading.Thread):
    """Of an interpreter that is about to end; the server's own threads begin all the same."""

    def start(self) -> None:
        if self.name == "headroom-messages":
            raise RuntimeError("can't create new thread at interpreter shutdown")
        super().start()


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    server = Webhook()
    yield server
    server.shutdown()
    server.server_close()


def test_a_webhook_gets_the_text_as_slack_takes_it_and_ntfy_as_it_is(webhook: Webhook) -> None:
    for path, expected in (
        ("/services/pq7marker", '{"text": "one \\u00e4"}'),
        ("/ntfy/pq7marker", "one \u00e4"),
    ):
        messenger = Messenger(webhook.address + path)
        messenger.send("one \u00e4")
        messenger.close()
        where, headers, body = webhook.posts.pop()
        assert (where, body) == (path, expected)
        kind = "text/plain; charset=utf-8" if "ntfy" in path else "application/json"
        assert headers["Content-Type"] == kind


def test_a_login_in_the_address_goes_in_a_header() -> None:
    address, _, headers = make_post("https://ann:p%40ss@ntfy.example.org/runs", "text")
    assert address == "https://ntfy.example.org/runs"
    assert headers["Authorization"] == "Basic YW5uOnBAc3M="


def test_a_command_gets_the_text_on_its_stdin(tmp_path: Path) -> None:
    code = f"import sys; open({str(tmp_path / 'said')!r}, 'a').write(sys.stdin.read() + '|')"
    messenger = Messenger(shlex.join([sys.executable, "-c", code]))
    messenger.send("one")
    messenger.send("two")
    messenger.close()
    assert (tmp_path / "said").read_text() == "one|two|"


def test_messages_come_in_order_and_without_secrets(webhook: Webhook) -> None:
    messenger = Messenger(webhook.address + "/pq7marker")
    for number in range(20):
        messenger.send(f"{number} password=pq7marker")
    messenger.close()
    assert webhook.list_texts() == [f"{number} password=***" for number in range(20)]


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("http://127.0.0.1:1/pq7marker", "Connection refused"),
        ("http://ann:pq7marker@127.0.0.1:x/", "InvalidURL"),
        ("https://pq7marker.invalid/", ""),
        ("/no/such/pq7marker", "No such file or directory"),
        ("false pq7marker", "the command ended with exit code 1"),
    ],
)
def test_what_cannot_be_sent_is_told_once_without_where(
    place: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    messenger = Messenger(place)
    for _ in range(3):
        messenger.send("text")
        messenger.close()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("run.notify: a message could not be sent (")
    assert why in record.getMessage() and "pq7marker" not in caplog.text


def test_an_answer_that_refuses_is_told(webhook: Webhook, caplog: pytest.LogCaptureFixture) -> None:
    webhook.code = 404
    messenger = Messenger(webhook.address)
    messenger.send("text")
    messenger.close()
    assert "(its answer was HTTP 404)" in caplog.text


def test_a_place_that_never_answers_delays_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(messages, "TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        messenger, began_s = Messenger(f"http://127.0.0.1:{deaf.getsockname()[1]}"), monotonic()
        for number in range(100):
            messenger.send(str(number))
        assert monotonic() - began_s < 0.25
        messenger.close()
        assert monotonic() - began_s < 2.0
    assert len(caplog.records) <= 1


def test_without_a_place_nothing_is_sent_and_no_thread_begins() -> None:
    before = threading.active_count()
    messenger = Messenger("")
    messenger.send("text")
    messenger.close()
    assert threading.active_count() == before


def test_a_message_is_sent_where_no_thread_can_begin_any_more(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    messenger = Messenger(webhook.address)
    monkeypatch.setattr(messages.threading, "Thread", _Refusing)
    messenger.send("text")
    messenger.close()
    monkeypatch.undo()
    assert webhook.list_texts() == ["text"]


def test_how_a_run_ended_is_one_sentence() -> None:
    assert (
        describe_end({}, Failure("user_code", "no rows"), "") == "has failed (user_code): no rows"
    )
    killed = Failure("signal", "interrupted", "KILLED")
    assert describe_end({}, killed, "") == "was ended: interrupted"
    assert describe_end({}, None, "train.end: 2s are over").startswith("has ended: train.end")
    assert describe_end({}, None, "") == "has finished"
    run = {
        "name": "one",
        "status": "FINISHED",
        "params": {},
        "metrics": {"val/loss": 0.25, "time/total_s": 12.0},
        "tags": {"device": "cpu", "gate": "worse", "gate.why": "val/loss is higher"},
    }
    assert describe_end(run, None, "") == (
        "has finished: val/loss 0.25, 12.0 s in all, on cpu; val/loss is higher"
    )
