"""Brings the service up, in the order that makes it safe, and waits until each part really answers.
Whatever goes wrong on the way, and whoever interrupts it: what was started is ended again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path

from tasks.serving import local_prefect, prefect_http, service_down
from tasks.serving.processes import (
    MARK,
    Component,
    ServeError,
    died,
    log_path,
    mark_of,
    remember,
    start,
)

START_S = 180.0  # a new database on a busy machine, with room to spare
# Settings of another API, or of a UI that talks to one: this service talks to itself.
OTHERS = ("PREFECT_API_KEY", "PREFECT_UI_API_URL", "PREFECT_SERVER_UI_API_URL", "PREFECT_UI_URL")


@dataclass(frozen=True)
class Plan:
    """What is to be brought up, and where."""

    project: Path
    folder: Path  # of logs and of what is remembered
    tracking_uri: str
    experiment: str
    prefect_url: str
    mlflow_url: str | None  # None: a tracking server has the runs, with a UI of its own
    worker: str


def bring_up(plan: Plan, running: Sequence[Component] = ()) -> list[Component]:
    """Server and MLflow at once, then the deployments, then the worker; but what is `running`.

    A training that goes on, though what has started it died, is left alone, and ended with the
    service. Raises ServeError, with the end of the log of what failed.
    """
    started = list(running)
    there = {component.name: component for component in running}
    env = _environment(plan)
    try:
        _provide_database()
        prefect = there.get("prefect") or _prefect(plan, env, started)
        mlflow = there.get("mlflow")
        if mlflow is None and plan.mlflow_url:
            mlflow = _mlflow(plan, env, started)
        _await(prefect, lambda: prefect_http.answers(f"{plan.prefect_url}/api/health"), plan)
        _deploy(plan, env)
        if "worker" not in there:
            _worker(plan, env, started)
        if mlflow is not None:
            _await(mlflow, lambda: prefect_http.answers(f"{plan.mlflow_url}/health"), plan)
    except OSError as error:
        service_down.take_down(started, plan.folder, but=running)
        raise ServeError(f"Prefect's server stopped answering: {error}") from None
    except BaseException:  # whatever it is, Ctrl-C too: nothing is left half-started
        service_down.take_down(started, plan.folder, but=running)
        raise
    return started


def _prefect(plan: Plan, env: dict[str, str], started: list[Component]) -> Component:
    port = plan.prefect_url.rpartition(":")[2]
    arguments = ["--no-prompt", "server", "start", "--host", "127.0.0.1", "--port", port]
    command = [sys.executable, "-m", "prefect", *arguments]
    return _start("prefect", command, address=plan.prefect_url, plan=plan, env=env, started=started)


def _mlflow(plan: Plan, env: dict[str, str], started: list[Component]) -> Component:
    assert plan.mlflow_url is not None
    env = {**env, "HEADROOM_MLFLOW_PORT": plan.mlflow_url.rpartition(":")[2]}
    command = [sys.executable, "-m", "tasks.serve", "ui"]
    return _start("mlflow", command, address=plan.mlflow_url, plan=plan, env=env, started=started)


def _worker(plan: Plan, env: dict[str, str], started: list[Component]) -> None:
    arguments = ["--pool", prefect_http.POOL, "--type", "process", "--name", plan.worker]
    arguments += ["--limit", "1"]  # one GPU, one run; the next waits
    command = [sys.executable, "-m", "prefect", "--no-prompt", "worker", "start", *arguments]
    since = time.time()
    worker = _start("worker", command, address=plan.worker, plan=plan, env=env, started=started)
    api = f"{plan.prefect_url}/api"
    _await(worker, lambda: prefect_http.worker_is_online(api, plan.worker, since=since), plan)
    if prefect_http.is_paused(api):
        print("The work pool is paused, so nothing will run. In Prefect's UI it can be resumed.")


def _deploy(plan: Plan, env: dict[str, str]) -> None:
    """Put right what the last service left, and deploy, before there is a worker to act on it."""
    api = f"{plan.prefect_url}/api"
    prefect_http.make_pool(api)
    dead, missed = prefect_http.crash_the_dead(api), prefect_http.skip_the_missed(api)
    if dead:
        print(f"Marked {dead} run(s) as crashed: their processes are gone.")
    if missed:
        print(f"Skipped {missed} scheduled run(s) whose time passed while nothing was up.")
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    with open(log_path(plan.folder, "deploy"), "w") as log:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=plan.project, env=env
        )
    if done.returncode:
        raise died("deploy", plan.folder)


def _start(
    name: str,
    command: list[str],
    *,
    address: str,
    plan: Plan,
    env: dict[str, str],
    started: list[Component],
) -> Component:
    started.append(
        start(name, command, address=address, folder=plan.folder, env=env, cwd=plan.project)
    )
    remember(plan.folder, started)  # at once: should this process die, `down` still finds it
    return started[-1]


def _await(component: Component, is_ready: Callable[[], bool], plan: Plan) -> None:
    until = time.monotonic() + START_S
    while not is_ready():
        if component.process() is None:
            raise died(component.name, plan.folder)
        if time.monotonic() > until:
            log = log_path(plan.folder, component.name)
            raise ServeError(f"{component.name}: no answer within {START_S:.0f} s; see {log}")
        time.sleep(0.2)


def _environment(plan: Plan) -> dict[str, str]:
    """What the service runs with: its own API, whatever the caller's environment names, and the
    places of mlflow.yaml, so that runs go to the database that the UI shows."""
    kept = {k: v for k, v in os.environ.items() if k not in OTHERS}
    # Leases in memory would be lost with the server, and their slots taken for ever.
    leases = "prefect.server.concurrency.lease_storage.filesystem"
    not_proxied = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1"]))
    return {
        **kept,
        "PREFECT_API_URL": f"{plan.prefect_url}/api",
        "PREFECT_HOME": str(local_prefect.home().absolute()),
        "PREFECT_LOGGING_EXTRA_LOGGERS": "tasks",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": leases,
        "MLFLOW_TRACKING_URI": plan.tracking_uri,
        "MLFLOW_EXPERIMENT_NAME": plan.experiment,
        "NO_PROXY": not_proxied,
        MARK: mark_of(plan.folder),
    }


def _provide_database() -> None:
    """A new PREFECT_HOME gets a migrated database; a run at a desk may be about to do the same."""
    folder = local_prefect.home().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "headroom-start.lock", "a") as lock:
            flock(lock, LOCK_EX)
            local_prefect.provide_database(folder)
    except OSError as error:
        raise ServeError(f"PREFECT_HOME: {folder} can't be written ({error.strerror})") from None
