"""Brings the service up, in the order that makes it safe, and waits until each part really answers.
Whatever goes wrong on the way, and whoever interrupts it: what was started is ended again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fcntl import LOCK_EX, flock
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from tasks.serving import (
    crashed_flow_runs,
    local_prefect,
    prefect_http,
    service_down,
    systemd_unit,
)
from tasks.serving.crashed_flow_runs import End
from tasks.serving.processes import (
    KEEPER,
    MARK,
    PART,
    STORES,
    WORKER,
    Part,
    ServeError,
    died,
    is_running,
    log_path,
    mark_of,
    require_own_home,
    start,
    started,
)

MAX_TRIES = {"PREFECT_CLIENT_MAX_RETRIES": "6"}  # for two minutes: nobody sits and waits
START_S = 180.0  # a new database on a busy machine, with room to spare
HEALTH = {"prefect": "/api/health", "mlflow": "/health"}
# Settings of another API, or of a UI that talks to one: this service talks to itself.
OTHERS = ("PREFECT_API_KEY", "PREFECT_UI_API_URL", "PREFECT_SERVER_UI_API_URL", "PREFECT_UI_URL")


@dataclass(frozen=True)
class Program:
    """How a part is started, where that is not as `make serve` does it."""

    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)  # of this part alone: its passwords
    user: str | None = None  # whose it becomes, where this process is root's
    is_ready: Callable[[], bool] | None = None  # where no health endpoint tells


@dataclass(frozen=True)
class Plan:
    """What is to be brought up, and where."""

    project: Path
    folder: Path  # of logs
    tracking_uri: str
    experiment: str
    runs: Sequence[tuple[str, Path]]  # of the runs' journals: hosts, as the runs call them
    addresses: Mapping[str, str]  # by part; no mlflow where a tracking server has the runs
    programs: Mapping[str, Program] = field(default_factory=dict)  # by part
    deployments: Sequence[str] = ("--all",)  # as `prefect deploy` is told
    env: Mapping[str, str] = field(default_factory=dict)  # of all parts

    @property
    def host(self) -> str:
        return urlsplit(self.addresses["prefect"]).hostname or "127.0.0.1"

    @property
    def api(self) -> str:
        return f"{self.addresses['prefect']}/api"


def bring_up(plan: Plan, up: Mapping[str, Part]) -> None:
    """What the servers need; server and MLflow at once; the deployments; the workers; but what is
    `up`.

    A training that goes on, though what has started it died, is left alone, and ended with the
    service. Raises ServeError, with the end of the log of what failed.
    """
    found = dict(up)
    try:
        missing = [name for name in plan.addresses if name not in up]
        if "prefect" not in plan.programs:
            if "prefect" in missing:
                require_own_home(plan.folder, local_prefect.home().absolute())
            _provide_database()
        stores = [name for name in missing if name in STORES]
        found |= {name: _start(name, plan) for name in stores}
        for name in stores:
            _await(name, found[name], plan, plan.programs[name].is_ready)
        found |= {name: _start(name, plan) for name in missing if name in HEALTH}
        _await("prefect", found["prefect"], plan)
        if any(name == "prefect" or name.startswith(WORKER) for name in missing):
            _deploy(plan, up)
        is_online = partial(prefect_http.worker_is_online, plan.api, since=time.time())
        workers = {name: _start(name, plan) for name in missing if name.startswith(WORKER)}
        for name, worker in workers.items():
            _await(name, worker, plan, partial(is_online, worker.address))
        if "mlflow" in found:
            _await("mlflow", found["mlflow"], plan)
        if KEEPER in missing:
            _start_keeper(plan)
    except OSError as error:
        service_down.take_down(plan.folder, but=up)
        raise ServeError(f"Prefect's server stopped answering: {error}") from None
    except BaseException:  # whatever it is, Ctrl-C too: nothing is left half-started
        service_down.take_down(plan.folder, but=up)
        raise


def _start(name: str, plan: Plan) -> Part:
    address = plan.addresses[name]
    program = plan.programs.get(name) or program_of(name, address)
    env = {**_environment(plan), **program.env}
    return start(
        name,
        program.command,
        address=address,
        folder=plan.folder,
        env=env,
        cwd=plan.project,
        user=program.user,
    )


def _start_keeper(plan: Plan) -> None:
    """As a unit of systemd where that starts it again too, else as the others."""
    program, address = plan.programs[KEEPER], plan.addresses[KEEPER]
    if not systemd_unit.is_possible():
        _start(KEEPER, plan)
        return
    systemd_unit.put(
        plan.folder,
        project=plan.project,
        command=program.command,
        env={**_environment(plan), **program.env, PART: f"{KEEPER} {address}"},
    )


def program_of(name: str, address: str) -> Program:
    """How `make serve` starts a part."""
    python, url = [sys.executable, "-m"], urlsplit(address)
    prefect = [*python, "prefect", "--no-prompt"]
    if name == "prefect":
        at = ["--host", str(url.hostname), "--port", str(url.port)]
        return Program([*prefect, "server", "start", *at])
    if name == "mlflow":
        return Program([*python, "tasks.serve", "ui"], {"HEADROOM_MLFLOW_PORT": str(url.port)})
    worker = [*prefect, "worker", "start", "--pool", prefect_http.POOL, "--type", "process"]
    # One GPU, one run; the next waits.
    return Program([*worker, "--name", address, "--limit", "1"])


def put_right(plan: Plan, up: Mapping[str, Part]) -> dict[str, End]:
    """Give flow runs that do not tell the truth their true state, by their names. Raises
    OSError."""
    known: dict[str, End] = {}
    for host, runs in plan.runs:
        known |= crashed_flow_runs.ends(runs, host)
    dead = crashed_flow_runs.crash_the_dead(plan.api, known, workers=started(up))
    return {**dead, **crashed_flow_runs.correct(plan.api, known)}


def _deploy(plan: Plan, up: Mapping[str, Part]) -> None:
    """Put right what the last service left, and deploy, before there is a worker to act on it."""
    prefect_http.make_pool(plan.api)
    righted = put_right(plan, up)  # also what they could not tell a server that was away
    missed = prefect_http.skip_the_missed(plan.api)
    if righted:
        print(f"Put {len(righted)} flow run(s) right in Prefect: their processes are gone.")
    if missed:
        print(f"Skipped {missed} scheduled run(s) whose time passed; the latest takes their place.")
    if prefect_http.is_paused(plan.api):
        print("The work pool is paused, so nothing will run. In Prefect's UI it can be resumed.")
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", *plan.deployments]
    env, nothing = _environment(plan), subprocess.DEVNULL
    with open(log_path(plan.folder, "deploy"), "w") as log:
        done = subprocess.run(
            command, stdin=nothing, stdout=log, stderr=log, cwd=plan.project, env=env
        )
    if done.returncode:
        raise died("deploy", plan.folder)


def _await(name: str, part: Part, plan: Plan, is_ready: Callable[[], bool] | None = None) -> None:
    """Return once the part is ready: by default, once its health endpoint says that all is well."""
    until = time.monotonic() + START_S
    while not (is_ready() if is_ready else prefect_http.answers(part.address + HEALTH[name])):
        if not is_running(part.process):
            raise died(name, plan.folder)
        if time.monotonic() > until:
            log = log_path(plan.folder, name)
            raise ServeError(f"{name}: no answer within {START_S:.0f} s; see {log}")
        time.sleep(0.2)


def _environment(plan: Plan) -> dict[str, str]:
    """What the service runs with: its own API, whatever the caller's environment names, and the
    places of mlflow.yaml, so that runs go to the database that the UI shows."""
    kept = {k: v for k, v in os.environ.items() if k not in OTHERS}
    # Leases in memory would be lost with the server, and their slots taken for ever.
    leases = "prefect.server.concurrency.lease_storage.filesystem"
    not_proxied = ",".join(filter(None, [os.environ.get("NO_PROXY"), plan.host]))
    return {
        **kept,
        "PREFECT_API_URL": plan.api,
        **local_prefect.TRIES_AGAIN,
        **MAX_TRIES,
        "PREFECT_HOME": str(local_prefect.home().absolute()),
        "PREFECT_LOGGING_EXTRA_LOGGERS": "tasks",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": leases,
        "MLFLOW_TRACKING_URI": plan.tracking_uri,
        "MLFLOW_EXPERIMENT_NAME": plan.experiment,
        "NO_PROXY": not_proxied,
        **plan.env,
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
