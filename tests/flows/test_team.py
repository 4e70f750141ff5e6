"""A team's service for real: PostgreSQL, an S3 store, both servers and two workers, which bring the
code by git. Where network namespaces can be made, the workers are two hosts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient, pyfunc, set_tracking_uri

from tasks.process.prefect_http import call_api
from tasks.services.processes import find_own_processes, find_parts, is_running
from tests.conftest import free_port

pytest.importorskip("nanio", reason="headroom[team] is not installed")
boto3 = pytest.importorskip("boto3", reason="headroom[team] is not installed")
if not (shutil.which("initdb") or list(Path("/usr/lib/postgresql").glob("*/bin/initdb"))):
    pytest.skip("PostgreSQL is not installed", allow_module_level=True)

ROOT = Path(__file__).parent.parent.parent
PARTS = {"postgres", "s3", "prefect", "mlflow", "worker-1", "worker-2", "keeper"}
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")
PORTS = ("HEADROOM_PREFECT_PORT", "HEADROOM_MLFLOW_PORT", "HEADROOM_S3_PORT")


@dataclass(frozen=True)
class Team:
    """A service that is up."""

    project: Path
    folder: Path
    env: dict[str, str]

    def does(self, action: str, *, code: int = 0, **more: str) -> str:
        """What `python -m tasks.services.team` printed."""
        command = [sys.executable, "-m", "tasks.services.team", action]
        env = {**self.env, **more}
        done = subprocess.run(command, cwd=self.project, env=env, capture_output=True, text=True)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def address(self, name: str) -> str:
        return find_parts(self.folder)[name].address

    def ask(self, method: str, path: str, body: object = None) -> Any:
        return call_api(method, f"{self.address('prefect')}/api/{path}", body)

    @property
    def secrets(self) -> dict[str, str]:
        found: dict[str, str] = json.loads((self.folder / "passwords.json").read_text())
        return found


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    # Not below pytest's own folder, which is closed to the user that PostgreSQL runs as.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as named:
        Path(named).chmod(0o711)
        project = Path(named) / "clone"
        project.mkdir()
        for name in ("flows", "tasks"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, project / name, ignore=ignored)
        for name in ("prefect-team.yaml", "mlflow.yaml", "pyproject.toml"):
            shutil.copy(ROOT / name, project)
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com"]
        for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
            subprocess.run([*git, *words], cwd=project, check=True)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
        env |= {name: str(free_port()) for name in (*PORTS, "HEADROOM_POSTGRES_PORT")}
        env |= {
            "HEADROOM_TEAM_FOLDER": f"{named}/team",
            "HEADROOM_TEAM_NETWORK": "10.83.201",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_WORKER_PREFETCH_SECONDS": "1",
        }
        up = Team(project, Path(named) / "team", env)
        try:
            up.does("up")
            yield up
        finally:
            up.does("down")


@pytest.mark.timeout(600)
def test_it_is_up_for_this_machine_only(team: Team) -> None:
    assert find_parts(team.folder).keys() == PARTS
    assert team.does("status").count(" up ") == len(PARTS)
    here = {"127.0.0.1", "10.83.201.1"}
    for part in find_parts(team.folder).values():
        for process in (part.process, *part.process.children(recursive=True)):
            listening = [s for s in process.net_connections("inet") if s.status == "LISTEN"]
            assert {s.laddr.ip for s in listening} <= here
    assert "It is up already." in team.does("up")


def test_the_pages_may_ask_the_servers_that_they_came_from(team: Team) -> None:
    """MLflow takes any address but that of localhost for somebody else's page."""
    asked = urllib.request.Request(
        f"{team.address('mlflow')}/ajax-api/2.0/mlflow/experiments/search",
        data=b'{"max_results": 1}',
        headers={"Origin": team.address("mlflow"), "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=30) as answer:
        assert answer.status == 200
    told = call_api("GET", f"{team.address('prefect')}/ui-settings")
    assert told["api_url"] == f"{team.address('prefect')}/api"


@pytest.mark.timeout(600)
def test_two_trainings_at_once_are_two_hosts_with_the_code_of_the_commit(team: Team) -> None:
    """Each in a clone of its own; their model comes back out of the S3 store."""
    page = (ROOT / "docs" / "team.md").read_text()
    (command,) = re.findall(r"^PREFECT_API_URL=.*train-team$", page, re.MULTILINE)
    command = command.replace("http://127.0.0.1:4200", team.address("prefect"))
    command = command.replace(".venv/bin/prefect", f"{sys.executable} -m prefect")
    command += """ --param 'overrides={"train.epochs": 1}'"""
    for _ in range(2):
        subprocess.run(["sh", "-ec", command], env=team.env, check=True, capture_output=True)
    flow_runs = [run["id"] for run in team.ask("POST", "flow_runs/filter", {})]
    assert len(flow_runs) == 2
    until = time.monotonic() + 400
    while True:
        states = [team.ask("GET", f"flow_runs/{id}")["state"] for id in flow_runs]
        if all(state["type"] in ENDED for state in states):
            break
        assert time.monotonic() < until, (team.folder / "worker-1.log").read_text()[-4000:]
        time.sleep(0.5)
    assert [state["type"] for state in states] == ["COMPLETED"] * 2, states

    client = MlflowClient(team.address("mlflow"))
    experiment = client.get_experiment_by_name("headroom")
    assert experiment is not None
    while True:  # where all cores are busy a run's end is sent after the flow's
        runs = client.search_runs([experiment.experiment_id])
        if all(run.info.status == "FINISHED" for run in runs) or time.monotonic() > until:
            break
        time.sleep(0.5)
    assert {run.data.tags["prefect.flow_run_id"] for run in runs} == set(flow_runs)
    assert all(run.info.status == "FINISHED" for run in runs)
    head = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(head, cwd=team.project, capture_output=True, text=True).stdout.strip()
    assert {run.data.tags["git.commit"] for run in runs} == {commit}
    if Path("/run/netns/headroom201-host-1").exists():
        assert {run.data.tags["host"] for run in runs} == {"host-1", "host-2"}
    for host in ("host-1", "host-2"):
        assert list((team.folder / "hosts" / host / "code" / ".headroom/runs").glob("*/run.json"))

    (model, *_) = client.search_logged_models([experiment.experiment_id])
    assert model.artifact_location.startswith("mlflow-artifacts:/")
    set_tracking_uri(team.address("mlflow"))
    try:
        loaded = pyfunc.load_model(f"models:/{model.model_id}")
    finally:
        set_tracking_uri(None)
    assert loaded.metadata.run_id in {run.info.run_id for run in runs}
    keys = {
        found["Key"]
        for found in _s3(team, team.secrets["s3"]).list_objects(Bucket="mlflow")["Contents"]
    }
    assert any(key.endswith("/report.html") for key in keys)
    assert any(key.endswith("/data/weights.pt") for key in keys)


def _s3(team: Team, secret: str) -> Any:
    login = {"aws_access_key_id": "headroom", "aws_secret_access_key": secret}
    there = {"endpoint_url": team.address("s3"), "region_name": "us-east-1"}
    return boto3.client("s3", **there, **login)


def test_the_s3_store_asks_for_its_password(team: Team) -> None:
    with pytest.raises(boto3.exceptions.botocore.exceptions.ClientError, match="Signature"):
        _s3(team, "not-the-password").list_objects(Bucket="mlflow")


def test_no_password_is_in_a_file_an_argument_or_a_worker(team: Team) -> None:
    """But in the one file, and in the environment of those that need it."""
    kept = team.folder / "passwords.json"
    assert kept.stat().st_mode & 0o777 == 0o600
    words = [secret.encode() for secret in team.secrets.values()]
    files = [f for f in team.folder.parent.rglob("*") if f.is_file() and f != kept]
    assert [f for f in files if any(word in f.read_bytes() for word in words)] == []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            said = " ".join(process.cmdline())
            assert not any(secret in said for secret in team.secrets.values())
    for process, environment in find_own_processes(team.folder).items():
        if environment.get("HEADROOM_SERVE_PART", "").startswith("worker"):
            told = " ".join(environment.values())
            assert not any(secret in told for secret in team.secrets.values()), process


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        (
            "MLFLOW_BACKEND_STORE_URI",
            "postgresql://ann:s3cretword@127.0.0.1:9/runs",
            r"postgresql://ann:\*\*\*@127.0.0.1:9/runs can't be used: connection .* refused",
        ),
        (
            "PREFECT_SERVER_DATABASE_CONNECTION_URL",
            "postgresql+asyncpg://ann:s3cretword@nowhere.invalid/prefect",
            r"\*\*\*@nowhere.invalid/prefect can't be used: could not translate host name",
        ),
        ("HEADROOM_TEAM_NETWORK", "8.8.8", "must be three numbers of a private network"),
    ],
)
def test_what_is_not_there_is_one_sentence(
    team: Team, tmp_path: Path, variable: str, value: str, said: str
) -> None:
    """Before anything is started."""
    more = {variable: value, "HEADROOM_TEAM_FOLDER": str(tmp_path / "team")}
    more |= {name: str(free_port()) for name in (*PORTS, "HEADROOM_POSTGRES_PORT")}
    if variable != "HEADROOM_TEAM_NETWORK":
        more["HEADROOM_TEAM_NETWORK"] = "10.83.202"
    told = team.does("up", code=2, **more).splitlines()
    assert re.search(rf"^{variable}: .*{said}", told[-1], re.IGNORECASE), told
    assert "s3cretword" not in "".join(told) and "Traceback" not in told
    assert not find_parts(tmp_path / "team")
    assert not Path("/run/netns/headroom202-host-1").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces take root")
def test_a_start_that_fails_leaves_no_host_behind(team: Team, tmp_path: Path) -> None:
    held = {"HEADROOM_POSTGRES_PORT": team.address("postgres").rpartition(":")[2]}
    held |= {"HEADROOM_TEAM_FOLDER": str(tmp_path), "HEADROOM_TEAM_NETWORK": "10.83.202"}
    assert "HEADROOM_POSTGRES_PORT: port " in team.does("up", code=1, **held)
    assert not Path("/run/netns/headroom202-host-1").exists()


@pytest.mark.timeout(600)
def test_down_ends_all_of_it_and_keeps_what_was_kept(team: Team) -> None:
    family = list(find_own_processes(team.folder))
    assert "Down: " in team.does("down")
    assert not any(is_running(process) for process in family)
    assert not Path("/run/netns/headroom201-host-1").exists()
    assert (team.folder / "postgres" / "PG_VERSION").is_file()
    assert list((team.folder / "s3" / "mlflow").rglob("report.html"))
    assert "Nothing is up." in team.does("down")
