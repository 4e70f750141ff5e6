"""Starts the stores of a team's servers on this machine: PostgreSQL, in a cluster of our
own, and an S3 store that keeps files. Passwords are generated here, and kept in one file
that only its owner can read; processes get them in their environment, never as arguments.
"""

from __future__ import annotations

import json
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from tasks.process.redaction import redact
from tasks.services.processes import STORES, ServeError, SettingError
from tasks.services.service import Program

INSTALLED = Path("/usr/lib/postgresql")  # where Debian has a folder for each version
BUCKET, USER = "mlflow", "headroom"
CONNECTIONS = 300  # a server's pools, and trainings that write to the database themselves
PREFECT_DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
MLFLOW_DATABASE = "MLFLOW_BACKEND_STORE_URI"
ARTIFACTS = "MLFLOW_ARTIFACTS_DESTINATION"
# What only the servers may know. A team that has stores of its own sets these.
STORE_VARIABLES = (
    *(PREFECT_DATABASE, MLFLOW_DATABASE, ARTIFACTS),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
)
EXTRA = "headroom[team] is not installed: pip install --constraint constraints.txt -e '.[team]'"


@dataclass(frozen=True)
class Stores:
    """The stores of a team's servers: where they are and what opens them."""

    folder: Path
    postgres: str  # their addresses
    s3: str
    given: Mapping[str, str]  # what the environment names instead

    @property
    def names(self) -> list[str]:
        """Return the names of the stores that have to be started."""
        needed = {
            "postgres": not {PREFECT_DATABASE, MLFLOW_DATABASE} <= self.given.keys(),
            "s3": ARTIFACTS not in self.given,
        }
        return [name for name in STORES if needed[name]]

    @property
    def passwords(self) -> dict[str, str]:
        """Return the passwords of the stores by their names, generated once."""
        file = self.folder / "passwords.json"
        with suppress(FileExistsError):
            opened = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with open(opened, "w") as new:
                json.dump({name: secrets.token_urlsafe(24) for name in STORES}, new)
        found: dict[str, str] = json.loads(file.read_text())
        return found

    def programs(self) -> dict[str, Program]:
        """Return how the stores are started, by their names; new ones are initialized."""
        own = {"postgres": self._make_postgres_program, "s3": self._make_s3_program}
        return {name: own[name](self.passwords[name]) for name in self.names}

    def require(self) -> None:
        """Raise SettingError where something is missing that a team's service needs."""
        if not find_spec("psycopg2") or not find_spec("boto3") or not find_spec("nanio"):
            raise SettingError(EXTRA)
        if "postgres" in self.names:
            _find_postgres_programs(self.folder / "postgres")
        for variable in (PREFECT_DATABASE, MLFLOW_DATABASE):
            if variable in self.given and (why := describe_refusal(self.given[variable])):
                raise SettingError(f"{variable}: {redact(self.given[variable])} {why}")

    def make_server_env(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the variables of Prefect's server, and those of MLflow's."""
        known = self.passwords
        login = f"{USER}:{known['postgres']}@{urlsplit(self.postgres).netloc}"
        prefect = {PREFECT_DATABASE: f"postgresql+asyncpg://{login}/prefect"}
        mlflow = {MLFLOW_DATABASE: f"postgresql://{login}/mlflow"}
        own_s3 = {
            ARTIFACTS: f"s3://{BUCKET}",
            "MLFLOW_S3_ENDPOINT_URL": self.s3,
            "AWS_ACCESS_KEY_ID": USER,
            "AWS_SECRET_ACCESS_KEY": known["s3"],
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        prefect |= {k: v for k, v in self.given.items() if k in prefect}
        mlflow |= {k: v for k, v in self.given.items() if k not in prefect}
        if ARTIFACTS not in self.given:
            mlflow |= own_s3
        # With jobs it would take 1.7 GB and half a minute.
        return prefect, {**mlflow, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}

    def _make_postgres_program(self, password: str) -> Program:
        data = self.folder / "postgres"
        programs = _find_postgres_programs(data)
        user = _find_unprivileged_user()
        if not (data / "PG_VERSION").is_file():
            _make_cluster(data, programs, password, user)
        at = urlsplit(self.postgres)
        settings = [f"listen_addresses={at.hostname}", "unix_socket_directories="]
        settings.append(f"max_connections={CONNECTIONS}")
        options = [word for setting in settings for word in ("-c", setting)]
        command = [str(programs / "postgres"), "-D", str(data), "-p", str(at.port), *options]
        uri = f"postgresql://{USER}:{password}@{at.netloc}/prefect"
        return Program(command, user=user, is_ready=lambda: not describe_refusal(uri))

    def _make_s3_program(self, password: str) -> Program:
        data = self.folder / "s3"
        (data / BUCKET).mkdir(mode=0o700, parents=True, exist_ok=True)  # buckets are folders
        at = urlsplit(self.s3)
        command = [sys.executable, "-m", "nanio", "serve", "--data-dir", str(data)]
        command += ["--host", str(at.hostname), "--port", str(at.port), "--no-access-log"]
        env = {"NANIO_ACCESS_KEY": USER, "NANIO_SECRET_KEY": password}
        return Program(
            command, env, is_ready=lambda: _is_listening(str(at.hostname), int(at.port or 0))
        )


def describe_refusal(uri: str) -> str:
    """Return why a database can't be used, in one line; an empty text where it can."""
    from sqlalchemy import create_engine, make_url  # which takes half a second
    from sqlalchemy.exc import SQLAlchemyError

    try:
        url = make_url(uri)
        url = url.set(drivername=url.get_backend_name())  # asyncpg only answers to a loop
        engine = create_engine(url, connect_args={"connect_timeout": 5})
        try:
            engine.connect().close()
        finally:
            engine.dispose()
    except (SQLAlchemyError, TypeError) as error:
        said = str(getattr(error, "orig", None) or error).strip() or type(error).__name__
        return f"can't be used: {redact(said.splitlines()[0])}"
    return ""


def _find_postgres_programs(data: Path) -> Path:
    """Return the folder of initdb and postgres.

    It is of the version that made `data`, else of the newest.
    """
    version = data / "PG_VERSION"
    made_by = version.read_text().strip() if version.is_file() else "*"
    there = [f.parent for f in INSTALLED.glob(f"{made_by}/bin/initdb")]
    there.sort(key=lambda folder: float(folder.parent.name))
    if there:
        return there[-1]
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    raise SettingError(
        "postgres: PostgreSQL is not here; install it (Debian: apt-get install postgresql), or "
        f"name databases of your own: {MLFLOW_DATABASE} and {PREFECT_DATABASE}"
    )


def _find_unprivileged_user() -> str | None:
    """Return a user to run PostgreSQL as, which refuses to run as root.

    None where this process is no root's.
    """
    if os.geteuid():
        return None
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise SettingError("postgres: it refuses to run as root, and there is no user named postgres")


def _make_cluster(data: Path, programs: Path, password: str, user: str | None) -> None:
    """Make the cluster under another name and rename it when whole.

    A killed attempt is begun anew.
    """
    half, told = data.with_name("postgres.new"), data.with_name("postgres.password")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(mode=0o700)
    try:
        opened = os.open(told, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        with open(opened, "w") as file:
            file.write(password)
        if user:
            for path in (half, told):
                shutil.chown(path, user)
        initdb: list[str | Path] = [programs / "initdb", "-D", half, "-U", USER, "--pwfile", told]
        initdb += ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C.UTF-8"]
        _run_command(initdb, user)
        databases = "CREATE DATABASE mlflow;\nCREATE DATABASE prefect;\n"
        _run_command([programs / "postgres", "--single", "-D", half, "postgres"], user, databases)
        half.rename(data)
    finally:
        told.unlink(missing_ok=True)


def _run_command(command: list[str | Path], user: str | None, given: str = "") -> None:
    done = subprocess.run(
        command,
        input=given,
        capture_output=True,
        text=True,
        cwd="/",
        user=user,
        group=user,
        extra_groups=[] if user else None,
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise ServeError(f"postgres: {Path(command[0]).name} failed: {said[-1] if said else ''}")


def _is_listening(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1).close()
        return True
    except OSError:
        return False
