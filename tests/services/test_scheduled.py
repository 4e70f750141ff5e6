"""The service for real: a Prefect server, a worker and MLflow's UI from a copy of this project in
another folder, a schedule that comes due, and the end of it all.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from ruamel.yaml import YAML

from headroom.prefect.prefect_http import call_api, is_healthy
from headroom.services.parts import find_own_processes, find_parts, provide_mark

ROOT = Path(__file__).parent.parent.parent
DEPLOYMENTS = [
    deployment
    for name in ("prefect.yaml", "prefect-team.yaml")
    for deployment in YAML(typ="safe").load(ROOT / name)["deployments"]
]
JOURNAL = "*/events.jsonl"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: d["name"])
def test_the_parameters_of_every_deployment_are_valid(deployment: dict[str, Any]) -> None:
    """Prefect itself takes invalid ones, and fails at 02:00."""
    from flows.predict import predict
    from flows.tidy import tidy
    from flows.train import train
    from headroom.settings.read_settings import override_config

    if deployment["entrypoint"] == "flows/tidy.py:tidy":
        tidy.validate_parameters(deployment["parameters"])
        return
    if deployment["entrypoint"] == "flows/predict.py:predict":
        given = {"input": "rows.csv", "output": "predictions.csv"}  # with each run
        predict.validate_parameters({**given, **deployment["parameters"]})
        return
    assert deployment["entrypoint"] == "flows/train.py:train"
    found = train.validate_parameters(deployment["parameters"])
    override_config(found["config"], found["overrides"])


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: d["name"])
def test_every_schedule_is_in_utc_and_comes_due(deployment: dict[str, Any]) -> None:
    """`0 0 31 2 *` is accepted when created and never fires."""
    from prefect.server.schemas.schedules import CronSchedule

    for schedule in deployment["schedules"]:
        assert schedule["timezone"] == "UTC"
        cron = CronSchedule(cron=schedule["cron"], timezone="UTC")
        assert asyncio.run(cron.get_dates(n=1))


@dataclass(frozen=True)
class Service:
    """A service that is up."""

    project: Path
    env: dict[str, str]
    url: str

    @property
    def folder(self) -> Path:
        return self.project / ".headroom" / "serve"

    def serve(self, action: str) -> str:
        """What `python -m headroom.services.serve` printed."""
        command = [sys.executable, "-m", "headroom.services.serve", action]
        done = subprocess.run(
            command, cwd=self.project, env=self.env, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Prefect's answer."""
        return call_api(method, f"{self.url}/api/{path}", body)

    def flow_run(self, deployment: str, overrides: dict[str, Any], *, warm: bool = False) -> str:
        """The id of one that was asked for. warm: the worker's process for it is forked from one
        that has imported the libraries."""
        given = self.ask("GET", f"deployments/name/train/{deployment}")["id"]
        asked: dict[str, Any] = {"parameters": {"config": {}, "overrides": overrides}}
        if warm:
            asked["job_variables"] = {"command": f"{sys.executable} -m prefect.engine"}
        return str(self.ask("POST", f"deployments/{given}/create_flow_run", asked)["id"])

    def mlflow_run(self, flow_run: str) -> Run | None:
        """The MLflow run that belongs to a flow run, if it has been opened."""
        database = self.project / "mlflow.db"
        if not database.exists():
            return None
        client = MlflowClient(f"sqlite:///{database}")
        found = client.get_experiment_by_name("headroom")
        query = f"tags.`prefect.flow_run_id` = '{flow_run}'"
        runs = client.search_runs([found.experiment_id], query) if found else []
        return runs[0] if runs else None

    def plant_better_runs(self) -> None:
        """Five like the newest one, of an accuracy that no run can have."""
        client = MlflowClient(f"sqlite:///{self.project}/mlflow.db")
        found = client.get_experiment_by_name("headroom")
        assert found is not None
        (newest,) = client.search_runs([found.experiment_id], max_results=1)
        client.set_tag(newest.info.run_id, "gate", "slower")  # no measure for what comes
        tags = {"gate.of": newest.data.tags["gate.of"], "gate": "new"}
        for _ in range(5):
            run_id = client.create_run(found.experiment_id, tags=tags).info.run_id
            client.log_metric(run_id, "val/accuracy", 2.0)
            client.set_terminated(run_id)

    def logs(self) -> str:
        """What a failing test has to show."""
        return (self.folder / "worker.log").read_text()[-6000:]


def free_ports() -> tuple[int, int]:
    one, two = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    with closing(one), closing(two):
        return one.getsockname()[1], two.getsockname()[1]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service of a clone in another place, with a Prefect home of its own."""
    project = tmp_path_factory.mktemp("clone")
    for name in ("headroom", "flows", "tasks"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("prefect.yaml", "mlflow.yaml", "pyproject.toml"):
        shutil.copy(ROOT / name, project)
    prefect, mlflow = free_ports()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
    env |= {
        "PREFECT_HOME": str(project / "prefect-home"),
        "PREFECT_API_URL": "http://127.0.0.1:9/api",  # somebody else's: not the one to deploy to
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_WORKER_PREFETCH_SECONDS": "1",
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "1",  # else it looks once a minute
        # Else it misses a worker after a minute and a half.
        "PREFECT_SERVER_SERVICES_FOREMAN_LOOP_SECONDS": "1",
        "PREFECT_WORKER_HEARTBEAT_SECONDS": "2",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_LOOP_SECONDS": "1",  # else it removes once an hour
        "HEADROOM_PREFECT_PORT": str(prefect),
        "HEADROOM_MLFLOW_PORT": str(mlflow),
    }
    up = Service(project, env, f"http://127.0.0.1:{prefect}")
    try:
        printed = up.serve("up")
        assert up.url in printed and f"http://127.0.0.1:{mlflow}" in printed
        yield up
    finally:
        up.serve("down")


def wait_for(found: Callable[[], Any], service: Service, *, timeout_s: float = 100) -> Any:
    until = time.monotonic() + timeout_s
    while not (value := found()):
        assert time.monotonic() < until, service.logs()
        time.sleep(0.2)
    return value


def ended(service: Service, flow_run: str) -> str | None:
    with suppress(TimeoutError):  # Prefect's server waits up to a minute for a lock of its SQLite
        state = service.ask("GET", f"flow_runs/{flow_run}")["state"]["type"]
        return state if state in ENDED else None
    return None


def test_up_is_up_and_a_second_up_starts_nothing(service: Service) -> None:
    before = find_parts(service.folder)
    assert before.keys() == {"prefect", "mlflow", "worker"}
    assert "It is up already." in service.serve("up")
    assert find_parts(service.folder) == before
    assert service.serve("status").count(" up ") == 3
    assert is_healthy(f"http://127.0.0.1:{service.env['HEADROOM_MLFLOW_PORT']}/health")


def test_the_prefect_commands_of_the_pages_work_in_a_fresh_shell(service: Service) -> None:
    """As they were written they asked a server that Prefect started for itself, and hung."""
    pages = "".join(page.read_text() for page in sorted((ROOT / "docs").glob("[!t]*.md")))
    blocks = re.findall(r"```sh\n(.*?)```", pages, re.DOTALL)
    commands = [block for block in blocks if "prefect " in block]
    assert len(commands) == 2
    api = f"{service.url}/api"
    call_api("PATCH", f"{api}/work_pools/headroom", {"is_paused": True})  # they are only asked for
    try:
        for block in commands:
            script = block.replace("http://127.0.0.1:4200/api", api)
            script = script.replace(".venv/bin/activate", "./activate")
            (service.project / "activate").write_text(f"PATH={Path(sys.executable).parent}:$PATH\n")
            home = {"HOME": str(service.project), "PATH": os.environ["PATH"]}
            done = subprocess.run(
                ["sh", "-ec", script], cwd=service.project, env=home, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert "Created flow run" in done.stdout
        shown = done.stdout.rpartition("Created flow run")[2]
        # The head of the table where another training lives on this host, else that none does.
        assert "samples/s" in shown or "No training lives on this host" in shown
        assert "When" in shown or "No flow runs found" in shown, "what flow-run ls shows"
        asked = call_api("POST", f"{api}/flow_runs/filter", {"sort": "START_TIME_DESC"})
        runs = [run for run in asked if not run["auto_scheduled"]]
        assert len(runs) == 2
        for run in runs:
            call_api("DELETE", f"{api}/flow_runs/{run['id']}")
    finally:
        call_api("PATCH", f"{api}/work_pools/headroom", {"is_paused": False})


def test_a_misspelt_override_is_refused_when_it_is_asked_for(service: Service) -> None:
    """It failed 70 s later, behind seven lines of Prefect's."""
    for name in ("train.epoch", "modelargs.hidden", "train"):
        try:
            asked = service.flow_run("train-on-demand", {name: {} if name == "train" else 5})
        except HTTPError as error:
            told = json.loads(error.read())["detail"]
            assert "'overrides'" in told and name in told
        else:
            assert name == "train"
            service.ask("DELETE", f"flow_runs/{asked}")


def test_it_listens_on_this_machine_only(service: Service) -> None:
    family = find_own_processes(service.folder)
    assert {part.process for part in find_parts(service.folder).values()} <= family.keys()
    listening = [s for p in family for s in p.net_connections("inet") if s.status == "LISTEN"]
    assert {s.laddr.ip for s in listening} == {"127.0.0.1"}


def test_a_schedule_starts_a_run_that_completes_in_prefect_and_finishes_in_mlflow(
    service: Service,
) -> None:
    """With a SQLAlchemy that Prefect allows, its scheduler once died while all looked healthy."""
    deployment = service.ask("GET", "deployments/name/train/train-nightly")
    due = datetime.now(UTC) + timedelta(seconds=4)
    soon = {"interval": 10**8, "anchor_date": due.isoformat(), "timezone": "UTC"}
    only_once = {"schedule": soon, "parameters": {"config": {"train": {"epochs": 1}}}}
    service.ask("POST", f"deployments/{deployment['id']}/schedules", [only_once])

    one_s = timedelta(seconds=1)  # the night's own run may be due within the hour
    then = {"after_": (due - one_s).isoformat(), "before_": (due + one_s).isoformat()}
    asked = {"flow_runs": {"expected_start_time": then}}
    asked["deployments"] = {"name": {"any_": ["train-nightly"]}}
    [flow_run] = wait_for(lambda: service.ask("POST", "flow_runs/filter", asked), service)
    assert flow_run["auto_scheduled"]
    assert wait_for(lambda: ended(service, flow_run["id"]), service) == "COMPLETED", service.logs()

    run = service.mlflow_run(flow_run["id"])
    assert run is not None
    assert run.info.status == "FINISHED"
    assert run.data.params["train.epochs"] == "1"
    assert run.data.tags["prefect.deployment"] == "train-nightly"
    link = run.data.tags["prefect.flow_run_url"]
    assert link.startswith(service.url) and link.endswith(f"/flow-run/{flow_run['id']}")
    asked = {"flow_runs": {"id": {"any_": [flow_run["id"]]}}}
    reports = [a for a in service.ask("POST", "artifacts/filter", asked) if a["type"] == "markdown"]
    assert [report["key"] for report in reports] == ["report-mlp-digits-epochs-1"]
    assert run.info.run_id in reports[0]["data"]  # it links to its run


@dataclass
class Hook:
    """A webhook of somebody's chat."""

    url: str
    told: list[str]


@pytest.fixture
def hook() -> Iterator[Hook]:
    told: list[str] = []

    class Takes(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Takes) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Hook(f"http://127.0.0.1:{server.server_port}/", told)
        server.shutdown()


def test_flow_runs_that_ended_90_days_ago_are_removed_and_their_logs(service: Service) -> None:
    """Others stay, and what MLflow has of them all does."""
    flow = service.ask("POST", "flows/", {"name": "old"})["id"]
    days = {}
    for age in (1, 89, 91, 400):
        made = {"flow_id": flow, "state": {"type": "COMPLETED"}}
        flow_run = service.ask("POST", "flow_runs/", made)["id"]
        line = {"name": "old", "level": 20, "message": "m", "flow_run_id": flow_run}
        service.ask("POST", "logs/", [{**line, "timestamp": datetime.now(UTC).isoformat()}])
        with closing(sqlite3.connect(service.project / "prefect-home" / "prefect.db")) as opened:
            opened.execute("PRAGMA busy_timeout = 60000")
            ended_at = (datetime.now(UTC) - timedelta(days=age)).strftime("%Y-%m-%d %H:%M:%S.%f")
            asked = "UPDATE flow_run SET end_time = ? WHERE replace(id, '-', '') = ?"
            opened.execute(asked, [ended_at, flow_run.replace("-", "")])
            opened.commit()
        days[flow_run] = age

    def find_left() -> set[int]:
        found = service.ask("POST", "flow_runs/filter", {"flows": {"id": {"any_": [flow]}}})
        return {days[run["id"]] for run in found}

    wait_for(lambda: not {91, 400} & find_left(), service)
    asked = {"logs": {"flow_run_id": {"any_": list(days)}}}
    wait_for(lambda: len(service.ask("POST", "logs/filter", asked)) == 2, service)
    assert find_left() == {1, 89}


def test_a_webhook_hears_of_a_failure_of_a_worse_run_and_of_a_lost_worker(
    service: Service, hook: Hook
) -> None:
    """The file of the page, as it stands there."""
    page = (ROOT / "docs" / "schedule.md").read_text()
    block = re.search(r"```python\n(# notify.py.*?)```", page, re.DOTALL)
    assert block is not None
    (service.project / "notify.py").write_text(block[1])
    env = {**service.env, "PREFECT_API_URL": f"{service.url}/api"}
    subprocess.run(
        [sys.executable, "notify.py", hook.url], cwd=service.project, env=env, check=True
    )

    def played(overrides: dict[str, Any]) -> str:
        asked = {"train.epochs": 1, **overrides}
        run = service.flow_run("train-on-demand", asked, warm=True)
        wait_for(lambda: ended(service, run), service)
        return str(service.ask("GET", f"flow_runs/{run}")["state"]["name"])

    assert played({}) == "Completed"
    service.plant_better_runs()
    assert played({}) == "Worse"
    assert played({"gate.fail": True}) == "Failed"
    assert played({"optim.lr": "much"}) == "Failed"
    for name in ("Unsent", "Resumed"):  # as who puts states right sets them
        asked = {"flow_runs": {"state": {"name": {"any_": ["Worse"]}}}}
        (one, *_) = service.ask("POST", "flow_runs/filter", asked)
        for called, message in ((name, "why"), ("Worse", "")):
            state = {"type": "COMPLETED", "message": message, "name": called}
            service.ask("POST", f"flow_runs/{one['id']}/set_state", {"state": state, "force": True})
    worker = find_parts(service.folder)["worker"].process
    worker.kill()
    for what in ("got worse", "failed", "no worker is left", "not all sent", "was gone on with"):
        beginning = f"headroom {what}: "
        wait_for(lambda b=beginning: any(t.startswith(b) for t in hook.told), service)
    worse = next(t for t in hook.told if t.startswith("headroom got worse: "))
    assert re.search(r"val/accuracy 0.*% below the median of the last 5 \(2, limit 1.995", worse)
    service.serve("up")


SICK = """
from pathlib import Path
import torch

def checkpoints():
    return set(Path(".headroom/runs").glob("*/checkpoints/*.json"))

BEFORE = checkpoints()  # of other runs

class Net(torch.nn.Sequential):
    def __init__(self, input_shape, outputs):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, outputs))

    def forward(self, x):
        if self.training and checkpoints() - BEFORE and not Path("failed").exists():
            Path("failed").touch()
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        return super().forward(x)
"""


@pytest.mark.timeout(480)
def test_a_worker_starts_again_what_a_new_process_cures_and_it_goes_on_by_itself(
    service: Service,
) -> None:
    """The flow run has no key. A worker with a limit dies of one that is scheduled too soon."""
    (service.project / "sick.py").write_text(SICK)
    overrides = {"model.name": "sick:Net", "checkpoint.every": "20steps"}
    asked = {**overrides, "train.epochs": 60}
    flow_run = service.flow_run("train-on-demand", asked, warm=True)
    wait_for(lambda: ended(service, flow_run), service, timeout_s=400)

    states = service.ask("GET", f"flow_run_states/?flow_run_id={flow_run}")
    names = [state["name"] for state in states]
    assert names[-1] == "Completed" and names.count("AwaitingRetry") == 1, names
    waited = states[names.index("AwaitingRetry")]
    assert "device_lost, which a new process may cure: retry 1 of 2" in waited["message"]
    run = service.mlflow_run(flow_run)
    assert run is not None and run.info.status == "FINISHED"
    tags = run.data.tags
    assert tags["resumed"] == "1" and int(tags["resumed_from_step"]) > 0 and "failure" not in tags
    assert tags["retries"] == "1 of 2 after device_lost"


def test_down_cancels_what_runs_closes_its_record_and_leaves_no_process(service: Service) -> None:
    """Ended by a signal to the worker alone, a run would say Running for ever in Prefect."""
    runs = service.project / ".headroom" / "runs"
    before = set(runs.glob(JOURNAL))
    flow_run = service.flow_run("train-on-demand", {"train.epochs": 10**6})
    # What the run itself keeps: MLflow hears of it slowly where every core is busy.
    wait_for(
        lambda: any('"train/loss"' in f.read_text() for f in {*runs.glob(JOURNAL)} - before),
        service,
    )
    assert (
        len(
            [
                e
                for e in find_own_processes(service.folder).values()
                if e.get("PREFECT__FLOW_RUN_ID") == flow_run
            ]
        )
        >= 2
    )

    assert "Cancelling 1 run" in service.serve("down")

    run = service.mlflow_run(flow_run)
    assert run is not None
    assert run.info.status == "KILLED" and run.info.end_time
    assert run.data.metrics["memory/release_ok"] == 1 and "train/loss" in run.data.metrics
    mark = provide_mark(service.folder)
    left = [p for p in psutil.process_iter() if environment_of(p).get("HEADROOM_SERVE") == mark]
    assert left == []
    # In Prefect's own words, not those of the worker's log: it may be told to end before it writes.
    with closing(sqlite3.connect(service.project / "prefect-home" / "prefect.db")) as opened:
        asked = "SELECT state_type FROM flow_run WHERE replace(id, '-', '') = ?"
        assert opened.execute(asked, [flow_run.replace("-", "")]).fetchall() == [("CANCELLED",)]


def environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}
