"""What a run leaves behind, searched for words that were given to it as secrets: on a real MLflow
server behind a door that asks for a password."""

import base64
import os
import select
import shutil
import socket
import socketserver
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.tracking import mlflow_store
from tests.conftest import desk_environment

SECRETS = {
    "of the URI": "pq7marker-uri",
    "of the header": "pq7marker-token",
    "of the environment": "pq7marker-environment",
}
THEIRS = """
import os

def rows():
    uri, token = os.environ["MLFLOW_TRACKING_URI"], os.environ["STORE_TOKEN"]
    raise ValueError(f"could not load from {uri} with {token}")
"""


class Door(socketserver.BaseRequestHandler):
    """Lets through, byte by byte, whoever says the right password first."""

    inside: int

    def handle(self) -> None:
        told = base64.b64encode(f"ann:{SECRETS['of the URI']}".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += self.request.recv(1 << 16) or b"\r\n\r\n"
        if b"Authorization: Basic " + told not in head:
            self.request.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
            return
        with socket.create_connection(("127.0.0.1", self.inside)) as inner:
            inner.sendall(head)
            other = {inner: self.request, self.request: inner}
            while True:
                for ready in select.select(list(other), [], [])[0]:
                    content = ready.recv(1 << 16)
                    if not content:
                        return
                    other[ready].sendall(content)


@pytest.fixture
def uri(tmp_path: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = tmp_path / "server"
    store.mkdir()
    shutil.copyfile(mlflow_store.template(), store / "mlflow.db")  # migrated
    command = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{store}/mlflow.db"]
    command += ["--artifacts-destination", str(store / "artifacts")]
    with open(store / "log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=store,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=log,
            stderr=log,
            process_group=0,
        )
    Door.inside = port
    door = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Door)
    door.daemon_threads = True
    threading.Thread(target=door.serve_forever, daemon=True).start()
    until = time.monotonic() + 240
    while True:
        assert server.poll() is None and time.monotonic() < until, (store / "log").read_text()
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.2)
    yield f"http://ann:{SECRETS['of the URI']}@127.0.0.1:{door.server_address[1]}"
    os.killpg(server.pid, 9)
    server.wait()
    door.shutdown()
    door.server_close()


@pytest.mark.timeout(600)  # a server and two runs
def test_nothing_that_a_run_leaves_holds_a_secret(place: Path, uri: str) -> None:
    home = place / "prefect"
    environment = {
        **desk_environment(home),
        "MLFLOW_TRACKING_URI": uri,
        "MLFLOW_TRACKING_TOKEN": SECRETS["of the header"],
        "STORE_TOKEN": SECRETS["of the environment"],
    }
    (place / "theirs.py").write_text(THEIRS)
    for rest, code in ((["--train.epochs", "1"], 0), (["--data.source", "theirs:rows"], 2)):
        done = subprocess.run(
            [sys.executable, "-m", "flows.train", *rest],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
        )
        (place / f"terminal-{code}").write_text(done.stdout + done.stderr)
        assert done.returncode == code, done.stderr
    found = [
        f"{file.relative_to(place)} holds the secret {whose}"
        for file in place.rglob("*")
        if file.is_file()
        for whose, secret in SECRETS.items()
        if secret.encode() in file.read_bytes()
    ]
    assert found == []
    readable = {
        str(path): stat.filemode(path.stat().st_mode)
        for path in (place / ".headroom" / "runs").rglob("*")
        if path.stat().st_mode & 0o077
    }
    assert readable == {}
