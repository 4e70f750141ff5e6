"""Prefect's database away for a moment at a run's end: its server answers 500."""

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from httpx import HTTPStatusError, Request, Response

from headroom.prefect import this_flow_run
from headroom.prefect.local_prefect import TRIES_AGAIN

ASKS = """
from prefect.client.orchestration import get_client
with get_client(sync_client=True) as client:
    print(client.read_flow_runs())
"""


def test_an_answer_of_500_is_asked_again() -> None:
    """PostgreSQL was away for 25 s at a training's end, and a finished training CRASHED."""
    asked: list[str] = []

    class Recovers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(self.path)
            self.send_response(500 if len(asked) == 1 else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"[]")

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Recovers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        api = f"http://127.0.0.1:{server.server_port}/api"
        env = {**os.environ, **TRIES_AGAIN, "PREFECT_API_URL": api}
        env |= {"PREFECT_CLIENT_CSRF_SUPPORT_ENABLED": "false"}
        env |= {"PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED": "false"}
        command = [sys.executable, "-c", ASKS]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
        server.shutdown()
    assert done.stdout == "[]\n", done.stderr
    assert asked == ["/api/flow_runs/filter"] * 2


def test_a_report_that_prefect_does_not_take_fails_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        request = Request("POST", "http://127.0.0.1:9/api")
        raise HTTPStatusError("500", request=request, response=Response(500, request=request))

    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "a")
    monkeypatch.setattr(this_flow_run, "create_markdown_artifact", refuses)
    this_flow_run.show_markdown("text", "key", "title")
