"""What a run leaves behind, searched for words that were given to it as secrets: on a real MLflow
server behind a door that asks for a password."""

import base64
import json
import os
import select
import shutil
import socket
import socketserver
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from tasks.engine.settings.read_settings import dump_yaml
from tasks.tracking import mlflow_store
from tests.conftest import desk_environment
from tests.tasks.process.test_redaction import TEXTS, VARIABLES

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
SETTINGS = {
    "data.args.password": "correct horse battery",
    "data.args.store": {"api_key": "pq7marker-nested-key"},
    "data.args.dsn": "host=db-of-ann password=x",
    "data.args.pin_secret": 987654321,
    "model.args.hub_token": "pq7marker-hub-token",
    "model.args.accountKey": "pq7marker-account-key",
}
AGAIN = [  # but for the first
    f"--{name}={value if isinstance(value, str) else json.dumps(value)}"
    for name, value in list(SETTINGS.items())[1:]
]
# Settings that are none: a run keeps them as they are.
PLAIN_SETTINGS = {"data.args.sort_key": "customer_name", "model.args.pad_token": "<pad>"}
LEAKY = """
import json, logging, sys, warnings
import numpy as np
from torch import nn

SAYS = open("said.txt", newline="").read()
KNOWN = json.load(open("known.json"))

def tell(what):
    print(what, SAYS)
    print(what, SAYS, file=sys.stderr)
    logging.getLogger("tasks.theirs").warning("%s %s", what, SAYS)

def rows(password, store, dsn, pin_secret, sort_key, fails=False):
    given = {"password": password, "store": store, "dsn": dsn, "pin_secret": pin_secret}
    assert all(KNOWN[f"data.args.{name}"] == value for name, value in given.items())
    tell(f"{password} {store} {dsn} {pin_secret}")
    if fails:
        raise ValueError(f"no {password} {dsn} {pin_secret} \\x1b]0;title\\x07 \\x00 {SAYS}")
    x = np.random.default_rng(0).standard_normal((80, 3)).astype("float32")
    return x, (x.sum(1) > 0).astype("int64")

class Net(nn.Module):
    def __init__(self, input_shape, outputs, hub_token, accountKey, pad_token):
        super().__init__()
        known = KNOWN["model.args.hub_token"], KNOWN["model.args.accountKey"]
        assert (hub_token, accountKey) == known
        tell(f"{hub_token} {accountKey}")
        self.layer = nn.Linear(*input_shape, outputs)
    def forward(self, x): return self.layer(x)
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
    shutil.copyfile(mlflow_store.find_database_template(), store / "mlflow.db")  # migrated
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


@pytest.mark.timeout(600)  # four runs
def test_what_is_left_of_runs_holds_no_secret_of_a_well_known_service(place: Path) -> None:
    """Of the environment, of settings, and of what a user's own code prints, logs and raises. The
    run itself gets them, and so does who goes on with it, once they are given again."""
    said = "\n".join([*VARIABLES.values(), *(text for text, _ in TEXTS)])
    secrets = {**VARIABLES, **SETTINGS, "data.args.store": "pq7marker-nested-key"}
    secrets |= {text[:30]: secret for text, secret in TEXTS}
    settings = {"data.source": "leaky:rows", "model.name": "leaky:Net", "train.epochs": 2}
    settings |= {"checkpoint.every_steps": 1, **SETTINGS, **PLAIN_SETTINGS}
    with tempfile.TemporaryDirectory() as theirs:
        Path(theirs, "leaky.py").write_text(LEAKY.replace('open("', f'open("{theirs}/'))
        Path(theirs, "said.txt").write_bytes(said.encode())
        Path(theirs, "known.json").write_text(json.dumps(SETTINGS))
        Path(theirs, "config.yaml").write_text(dump_yaml(settings))
        environment = {**desk_environment(place / "prefect"), **VARIABLES}
        environment["PYTHONPATH"] += f":{theirs}"

        def train(*words: str, **more: str) -> subprocess.CompletedProcess[bytes]:
            command = [sys.executable, "-m", "flows.train", *words]
            done = subprocess.run(
                command, cwd=place, env={**environment, **more}, capture_output=True
            )
            told = len(list(place.glob("terminal-*")))
            (place / f"terminal-{told}").write_bytes(done.stdout + done.stderr)
            return done

        config = f"--config={theirs}/config.yaml"
        done = train(config)
        assert done.returncode == 0, done.stderr
        done = train(config, "--data.args.fails=true")
        assert done.returncode == 2 and rb"\x1b]0;title\x07 \x00" in done.stderr, done.stderr
        done = train("--resume=latest", "--train.epochs=3", *AGAIN)
        last = b"data.args.password: was hidden when it was kept; give it again: "
        last += b"--data.args.password, or HEADROOM_SECRET_DATA_ARGS_PASSWORD in the environment\n"
        assert (done.returncode, done.stderr) == (2, last)
        given = {"HEADROOM_SECRET_DATA_ARGS_PASSWORD": str(SETTINGS["data.args.password"])}
        done = train("--resume=latest", "--train.epochs=3", *AGAIN, **given)
        assert done.returncode == 0, done.stderr
    everything = {
        file.relative_to(place): file.read_bytes() for file in place.rglob("*") if file.is_file()
    }
    found = [
        f"{file} holds the secret {whose}"
        for file, content in everything.items()
        for whose, secret in secrets.items()
        for written in {str(secret).strip(), unquote(str(secret)).strip()}
        if written.encode() in content
    ]
    assert found == []
    held = b"".join(everything.values())
    assert b"\x1b]0;" not in b"".join(c for f, c in everything.items() if "terminal" in f.name)
    for value in PLAIN_SETTINGS.values():
        assert value.encode() in held
    (config_file,) = (f for f in place.glob(".headroom/runs/*/config.yaml") if f.is_file())
    assert config_file.read_text().count("***") == len(SETTINGS)
