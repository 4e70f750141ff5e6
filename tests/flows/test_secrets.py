"""What a run leaves behind, searched for words that were given to it as secrets: on a real MLflow
server behind a door that asks for a password."""

import base64
import json
import os
import select
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

from tests.conftest import desk_environment
from tests.process.test_redaction import TEXTS, VARIABLES

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
    logging.getLogger("headroom.theirs").warning("%s %s", what, SAYS)

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
    settings |= {"checkpoint.every": "1steps", **SETTINGS, **PLAIN_SETTINGS}
    with tempfile.TemporaryDirectory() as theirs:
        Path(theirs, "leaky.py").write_text(LEAKY.replace('open("', f'open("{theirs}/'))
        Path(theirs, "said.txt").write_bytes(said.encode())
        Path(theirs, "known.json").write_text(json.dumps(SETTINGS))
        Path(theirs, "config.yaml").write_text(json.dumps(settings))
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


NIGHTLY = """
import os
import numpy as np
from torch import nn

def rows(url, keys, header, fails=False):
    open("called", "a").write(url + "\\n")
    assert "***" not in f"{url} {keys} {header}"
    if fails:
        told = "password: {0} <password>{0}</password> ('password', '{0}') curl -u ann:{0} h"
        told = told.format("p" + "q7sectold")
        raise ValueError(f"no {url} {header} {told} " + os.environ["DBPW"])
    x = np.random.default_rng(0).standard_normal((80, 3)).astype("float32")
    return x, (x.sum(1) > 0).astype("int64")

class Net(nn.Module):
    def __init__(self, input_shape, outputs, TOKEN_FOR_X, hub):
        super().__init__()
        assert "***" not in TOKEN_FOR_X + hub
        self.layer = nn.Linear(*input_shape, outputs)
    def forward(self, x): return self.layer(x)
"""
GITHUB = "ghp_pq7seclist" + "A1b2C3d4E5f6G7h8I9j0K1l2"
ARGUMENTS = {
    "data.args.url": "postgresql://ann:pq7securl@db.example.com/x",
    "data.args.keys": json.dumps([GITHUB, "visible-name"]),
    "data.args.header": "Bearer pq7secbearer",
    "model.args.TOKEN_FOR_X": "pq7secfor",
    "model.args.hub": "https://pq7sechub@hub.example.com",
}


@pytest.mark.timeout(600)  # five runs
def test_a_run_with_secrets_inside_its_values_leaves_none_and_is_gone_on_with(place: Path) -> None:
    """A list with a token made config.yaml no YAML; a URL was compared with its own stars, after
    the user's loader had been called with them."""
    with tempfile.TemporaryDirectory() as theirs:
        Path(theirs, "nightly.py").write_text(NIGHTLY)
        environment = {**desk_environment(place / "prefect"), "DBPW": "pq7secen"}
        environment["PYTHONPATH"] += f":{theirs}"

        def train(*words: str, **more: str) -> subprocess.CompletedProcess[bytes]:
            (place / "called").unlink(missing_ok=True)
            command = [sys.executable, "-m", "flows.train", *words]
            done = subprocess.run(
                command, cwd=place, env={**environment, **more}, capture_output=True
            )
            told = len(list(place.glob("terminal-*")))
            (place / f"terminal-{told}").write_bytes(done.stdout + done.stderr)
            return done

        again = [f"--{name}={value}" for name, value in ARGUMENTS.items()]
        first = ["--data.source=nightly:rows", "--model.name=nightly:Net", "--train.epochs=2"]
        first += [*again, "--checkpoint.every=1steps"]
        done = train(*first)
        assert done.returncode == 0, done.stderr
        bare = train("--resume=latest", "--train.epochs=3")
        assert bare.returncode == 2 and not (place / "called").exists()
        told = b"data.args.url: was hidden when it was kept; give it again: --data.args.url, or "
        assert told + b"HEADROOM_SECRET_DATA_ARGS_URL in the environment\n" in bare.stderr
        done = train("--resume=latest", "--train.epochs=3", *again)
        assert done.returncode == 0, done.stderr
        given = {
            f"HEADROOM_SECRET_{name.upper().replace('.', '_')}": value
            for name, value in ARGUMENTS.items()
            if name != "data.args.keys"
        } | {"HEADROOM_SECRET_DATA_ARGS_KEYS_0": GITHUB}
        done = train("--resume=latest", "--train.epochs=4", **given)
        assert done.returncode == 0, done.stderr
        (place / "called").unlink()
        assert train(*first, "--data.args.fails=true").returncode == 2
        (place / "called").unlink()
    left = {f.relative_to(place): f.read_bytes() for f in place.rglob("*") if f.is_file()}
    assert [str(file) for file, content in left.items() if b"pq7sec" in content] == []
    config = (place / next(f for f in left if f.match("runs/*/config.yaml"))).read_text()
    assert "postgresql://ann:***@db.example.com/x" in config and "visible-name" in config
    kept = [path for name in ("runs", "data") for path in place.glob(f".headroom/{name}/**/*")]
    assert [str(path) for path in kept if path.stat().st_mode & 0o077] == []


OWN_LOOP = """
import torch
from headroom import account

net = torch.nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
params = {"lr": 0.1, "db_password": "pq7secparam", "tokens": 7}
params["deep"] = {"url": "https://u:pq7securl@h"}
with account(run_name="token=pq7secname", params=params, model=net, optimizer=opt) as run:
    for _ in range(3):
        net(torch.randn(4, 3)).sum().backward()
        opt.step()
raise SystemExit(run.run["params"] != {"lr": 0.1, "db_password": "***", "tokens": 7,
                                       "deep.url": "https://u:***@h"})
"""


def test_params_of_an_own_loop_are_kept_without_secrets(place: Path) -> None:
    """They were hidden by their look only, though their names said what they are."""
    with tempfile.TemporaryDirectory() as theirs:
        Path(theirs, "loop.py").write_text(OWN_LOOP)
        command = [sys.executable, str(Path(theirs, "loop.py"))]
        done = subprocess.run(
            command, cwd=place, env=desk_environment(place / "prefect"), capture_output=True
        )
    assert done.returncode == 0, done.stderr
    assert b"pq7sec" not in done.stdout + done.stderr
    left = {f.relative_to(place): f.read_bytes() for f in place.rglob("*") if f.is_file()}
    assert [str(file) for file, content in left.items() if b"pq7sec" in content] == []


@pytest.mark.parametrize("name", ["key", "name", "experiment"])
def test_a_name_of_a_run_that_holds_a_secret_is_refused(place: Path, name: str) -> None:
    """Every page shows it, and by a key without its secret no run is found again."""
    command = [sys.executable, "-m", "flows.train", f"--run.{name}=https://u:pq7secname@h"]
    done = subprocess.run(
        command, cwd=place, env=desk_environment(place / "prefect"), capture_output=True, text=True
    )
    says = f"run.{name}: holds a secret, which every page of the run would show; choose another\n"
    assert (done.returncode, done.stderr) == (2, says)
