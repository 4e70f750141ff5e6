"""A team's service for real, by the commands and variables of compose.yaml but without containers:
PostgreSQL, an S3 store, both servers and two workers, which bring the code by git."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient, pyfunc, set_tracking_uri

from headroom.prefect.prefect_http import call_api
from tests.run_folders import LOG
from tests.team import WORKERS, Team, find_postgres_programs, run_team

pytest.importorskip("nanio", reason="headroom[team] is not installed")
boto3 = pytest.importorskip("boto3", reason="headroom[team] is not installed")
if find_postgres_programs() is None:
    pytest.skip("PostgreSQL is not installed", allow_module_level=True)

ROOT = Path(__file__).parent.parent.parent
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    project = tmp_path_factory.mktemp("project")
    for name in ("headroom", "flows", "tasks"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, project / name, ignore=ignored)
    for name in ("prefect-team.yaml", "mlflow.yaml", "pyproject.toml"):
        shutil.copy(ROOT / name, project)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], cwd=project, check=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
    env |= {"PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_WORKER_PREFETCH_SECONDS": "1"}
    with run_team(project, env) as up:
        yield up


@pytest.mark.timeout(600)
def test_the_pages_may_ask_the_servers_that_they_came_from(team: Team) -> None:
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
def test_two_trainings_at_once_are_of_two_workers_with_the_code_of_the_commit(team: Team) -> None:
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
        assert time.monotonic() < until, team.log("worker-1")
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
    for name in WORKERS:
        assert list((team.folder / name / "code" / ".headroom/runs").glob(f"*/{LOG}"))

    (model, *_) = client.search_logged_models([experiment.experiment_id])
    assert model.artifact_location.startswith("mlflow-artifacts:/")
    set_tracking_uri(team.address("mlflow"))
    try:
        loaded = pyfunc.load_model(f"models:/{model.model_id}")
    finally:
        set_tracking_uri(None)
    assert loaded.metadata.run_id in {run.info.run_id for run in runs}
    keys = {
        found["Key"] for found in _s3(team, team.secret).list_objects(Bucket="mlflow")["Contents"]
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


def test_no_password_is_in_a_file_or_an_argument(team: Team) -> None:
    """But in the environment of those that need it."""
    secrets = (team.secret, team.postgres.password)
    files = [f for f in team.folder.rglob("*") if f.is_file()]
    words = [secret.encode() for secret in secrets]
    assert [f for f in files if any(word in f.read_bytes() for word in words)] == []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            said = " ".join(process.cmdline())
            assert not any(secret in said for secret in secrets)
