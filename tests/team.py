"""A team's service as processes of this host, for the tests and a benchmark: PostgreSQL in a
cluster of its own, and what compose.yaml starts beside it, by the commands and variables there,
with other ports, and a folder in the place of the volumes."""

from __future__ import annotations

import os
import pwd
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
from ruamel.yaml import YAML
from sqlalchemy import create_engine, text

from headroom.prefect.prefect_http import call_api, is_healthy

ROOT = Path(__file__).parent.parent
SERVICES = YAML(typ="safe").load(ROOT / "compose.yaml")["services"]
INSTALLED = Path("/usr/lib/postgresql")  # where Debian has a folder for each version
BIN = Path(sys.executable).parent
USER = "headroom"
START_S = 180
WORKERS = ("worker-1", "worker-2")


def find_postgres_programs() -> Path | None:
    """Return the folder of initdb and postgres; None where PostgreSQL is not installed."""
    there = [f.parent for f in INSTALLED.glob("*/bin/initdb")]
    if there:
        return max(there, key=lambda folder: float(folder.parent.name))
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else None


def fill_environment(service: str, **given: str) -> dict[str, str]:
    """Return what a container of compose.yaml is started with, as Compose fills in variables."""

    def filled(found: re.Match[str]) -> str:
        return given.get(found[1], found[2] or "")

    told = SERVICES[service].get("environment", {}).items()
    return {k: re.sub(r"\$\{(\w+)(?::[-?]([^}]*))?\}", filled, str(v)) for k, v in told}


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def open_folder() -> Iterator[Path]:
    """Not below pytest's own folder, which is closed to the user that PostgreSQL runs as."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as named:
        Path(named).chmod(0o711)
        yield Path(named)


@dataclass
class Postgres:
    """A PostgreSQL with the databases `mlflow` and `prefect`, which can be killed and started
    again."""

    folder: Path
    password: str
    port: int

    def __post_init__(self) -> None:
        """It refuses to run as root."""
        programs = find_postgres_programs()
        assert programs is not None, "PostgreSQL is not installed"
        self.programs, self.data = programs, self.folder / "postgres"
        names = {user.pw_name for user in pwd.getpwall()}
        is_root = not os.geteuid()
        self.user = ("postgres" if "postgres" in names else "nobody") if is_root else None
        told = self.folder / "postgres.password"
        self.data.mkdir(mode=0o700)
        told.touch(mode=0o600)
        told.write_text(self.password)
        if self.user:
            for path in (self.data, told):
                shutil.chown(path, self.user)
        make: list[str | Path] = [
            programs / "initdb",
            "-D",
            self.data,
            "-U",
            USER,
            "--pwfile",
            told,
        ]
        self._run([*make, "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C.UTF-8"])
        databases = "CREATE DATABASE mlflow;\nCREATE DATABASE prefect;\n"
        self._run([programs / "postgres", "--single", "-D", self.data, "postgres"], databases)
        told.unlink()

    def _run(self, command: list[str | Path], given: str = "") -> None:
        subprocess.run(
            command, input=given, check=True, capture_output=True, text=True, **self._as_user()
        )

    def _as_user(self) -> dict[str, Any]:
        if self.user is None:
            return {"cwd": "/"}
        return {"cwd": "/", "user": self.user, "group": self.user, "extra_groups": []}

    @property
    def uri(self) -> str:
        login = f"{USER}:{quote(self.password, safe='')}"
        return f"postgresql://{login}@127.0.0.1:{self.port}/mlflow"

    def start(self) -> None:
        """Return once it takes connections."""
        settings = ["listen_addresses=127.0.0.1", "unix_socket_directories=", "max_connections=300"]
        options = [word for setting in settings for word in ("-c", setting)]
        self.process = psutil.Popen(
            [self.programs / "postgres", "-D", self.data, "-p", str(self.port), *options],
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            **self._as_user(),
        )
        until = time.monotonic() + 60
        while True:
            with suppress(Exception):  # whatever it says until it is ready
                self.query("SELECT 1")
                return
            assert self.process.poll() is None and time.monotonic() < until
            time.sleep(0.1)

    def kill(self) -> None:
        """As a power cut: its own processes follow when they see that it is gone."""
        family = [self.process, *self.process.children(recursive=True)]
        for process in family:
            with suppress(psutil.NoSuchProcess):  # one of a connection that was closed meanwhile
                process.kill()
        assert not _await_end(family, wait_s=20)
        # Collected by who started it: else the next one takes a zombie for a server that is up.
        self.process.wait(timeout=20)

    def query(self, asked: str) -> list[tuple[object, ...]]:
        engine = create_engine(self.uri, connect_args={"connect_timeout": 5})
        try:
            with engine.connect() as opened:
                done = opened.execute(text(asked))
                return [tuple(row) for row in done] if done.returns_rows else []
        finally:
            engine.dispose()


@contextmanager
def run_postgres(password: str, folder: Path | None = None) -> Iterator[Postgres]:
    """Yield a new one that is up."""
    with ExitStack() as stack:
        made = Postgres(folder or stack.enter_context(open_folder()), password, find_free_port())
        made.start()
        try:
            yield made
        finally:
            _end([made.process], wait_s=5)
            made.process.wait(timeout=20)


@dataclass
class Team:
    """Servers and workers that are up. folder: their files, logs and clones."""

    folder: Path
    project: Path
    postgres: Postgres
    ports: dict[str, int]
    secret: str  # of the S3 store
    env: dict[str, str]
    parts: dict[str, psutil.Popen] = field(default_factory=dict)

    def address(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def ask(self, method: str, path: str, body: object = None) -> Any:
        return call_api(method, f"{self.address('prefect')}/api/{path}", body)

    def start(self, name: str) -> None:
        """Start a service of compose.yaml as a process of this host."""
        given = {"POSTGRES_PASSWORD": self.postgres.password, "S3_PASSWORD": self.secret}
        own = self.folder / name
        own.mkdir(exist_ok=True)
        told = fill_environment(name, **given)
        told = {k: self._translate(v, own) for k, v in told.items()}
        words = [self._translate(word, own) for word in SERVICES[name]["entrypoint"]]
        if words[0] == "sh":
            words[-1] = words[-1].replace("0.0.0.0", f"127.0.0.1 --port {self.ports[name]}")
        elif "0.0.0.0" in words:
            words[words.index("0.0.0.0")] = "127.0.0.1"
            words += ["--port", str(self.ports[name])]
        if name in WORKERS:
            words += ["--name", name]
        with open(self.folder / f"{name}.log", "w") as log:
            self.parts[name] = psutil.Popen(
                words,
                cwd=self.folder,
                env={**self.env, "PREFECT_HOME": str(own / "home"), **told},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _translate(self, word: str, own: Path) -> str:
        """Return a word of compose.yaml with the addresses and the folders of here."""
        for there, here in {
            "@postgres/": f"@127.0.0.1:{self.postgres.port}/",
            "//s3:9000": f"//127.0.0.1:{self.ports['s3']}",
            "mlflow:5000": f"127.0.0.1:{self.ports['mlflow']}",
            "127.0.0.1:5000": f"127.0.0.1:{self.ports['mlflow']}",
            "prefect:4200": f"127.0.0.1:{self.ports['prefect']}",
            "127.0.0.1:4200": f"127.0.0.1:{self.ports['prefect']}",
            "/headroom/.headroom": str(own),
            "/leases": str(self.folder / "leases"),
        }.items():
            word = word.replace(there, here)
        return re.sub(r"(^|(?<= ))/s3\b", str(self.folder / "s3"), word)

    def await_health(self, name: str, path: str) -> None:
        """Return once its health endpoint says that all is well."""
        until = time.monotonic() + START_S
        while not is_healthy(self.address(name) + path):
            assert self.parts[name].poll() is None and time.monotonic() < until, self.log(name)
            time.sleep(0.2)

    def log(self, name: str) -> str:
        """Return the end of what a part has printed."""
        return (self.folder / f"{name}.log").read_text()[-4000:]

    def stop(self) -> None:
        """End the workers, then the servers."""
        for name in reversed(self.parts):
            process = self.parts[name]
            with suppress(psutil.Error):
                family = process.children(recursive=True)
                _end([process], wait_s=20)
                _end(family, wait_s=5)
            process.wait(timeout=20)


@contextmanager
def run_team(project: Path, env: Mapping[str, str]) -> Iterator[Team]:
    """Yield a team's service for which `train-team` is deployed, with the newest commit of
    `project`."""
    with open_folder() as folder, run_postgres(secrets.token_urlsafe(24), folder) as postgres:
        ports = {name: find_free_port() for name in ("s3", "mlflow", "prefect")}
        (folder / "leases").mkdir()
        path = f"{BIN}:{os.environ['PATH']}"
        team = Team(
            folder, project, postgres, ports, secrets.token_urlsafe(24), {**env, "PATH": path}
        )
        try:
            for name in ("s3", "mlflow", "prefect"):
                team.start(name)
            team.await_health("prefect", "/api/health")
            api = {"PREFECT_API_URL": f"{team.address('prefect')}/api"}
            deploy = {**team.env, **api, "HEADROOM_REPOSITORY": f"file://{project}"}
            line = SERVICES["deploy"]["entrypoint"][-1].replace("train-image", "train-team")
            subprocess.run(
                ["sh", "-ec", line], cwd=project, env=deploy, check=True, capture_output=True
            )
            team.await_health("mlflow", "/health")
            for name in WORKERS:
                team.start(name)
            yield team
        finally:
            team.stop()


def _await_end(processes: Sequence[psutil.Process], *, wait_s: float) -> list[psutil.Process]:
    """Wait, and return those that still run; what nobody has collected yet has ended."""
    until = time.monotonic() + wait_s
    while True:
        left = []
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.1)


def _end(processes: Sequence[psutil.Process], *, wait_s: float) -> None:
    """Ask them to end, and kill what has not done so then."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in _await_end(processes, wait_s=wait_s):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _await_end(processes, wait_s=5)
