"""Brings the service up, in the order that makes it safe, and waits until each part really answers;
and takes it down so that nothing is lost: first the runs, each of which gives its memory back and
closes its record; then the worker, the server and MLflow. Whatever goes wrong on the way up, what
was started is ended again, and nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fcntl import LOCK_EX, flock
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from headroom.prefect import local_prefect, prefect_http
from headroom.prefect.prefect_http import FLOW_RUN, FlowRunEnd
from headroom.services.parts import (
    MARK,
    PART,
    WORKER,
    Part,
    ServeError,
    await_end,
    end_processes,
    find_own_processes,
    find_parts,
    find_worker_starts,
    is_running,
    make_log_path,
    make_start_error,
    provide_mark,
    require_own_home,
    start_part,
)

RUN_S = 90.0  # for runs to end: give the device back, and send what MLflow has not got yet
MAX_TRIES = {"PREFECT_CLIENT_MAX_RETRIES": "6"}  # for two minutes: nobody sits and waits
START_S = 180.0  # a new database on a busy machine, with room to spare
HEALTH = {"prefect": "/api/health", "mlflow": "/health"}
# Prefect keeps some 300 KiB of a flow run, for ever if not told otherwise; MLflow keeps the run.
KEPT_S = 90 * 24 * 60 * 60
RETENTION_PERIOD = "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD"
RETENTION = {
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    RETENTION_PERIOD: str(KEPT_S),
}
# Settings of another API, or of a UI that talks to one: this service talks to itself.
PREFECT_URL, MLFLOW_URL = "HEADROOM_PREFECT_URL", "HEADROOM_MLFLOW_URL"  # where others reach them
OTHERS = ("PREFECT_API_KEY", "PREFECT_UI_API_URL", "PREFECT_SERVER_UI_API_URL", "PREFECT_UI_URL")


@dataclass(frozen=True)
class Program:
    """How a part is started."""

    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)  # of this part alone


@dataclass(frozen=True)
class ServicePlan:
    """What is to be brought up, and where."""

    project: Path
    folder: Path  # of logs
    tracking_uri: str
    experiment: str
    runs: Sequence[tuple[str, Path]]  # of the runs' journals: hosts, as the runs call them
    addresses: Mapping[str, str]  # by part; no mlflow where a tracking server has the runs
    keep_days: float = 0  # of mlflow.yaml

    @property
    def api(self) -> str:
        return f"{self.addresses['prefect']}/api"


def bring_up(plan: ServicePlan, up: Mapping[str, Part]) -> None:
    """Start the parts of the plan that are not `up`, and wait until each is ready.

    Prefect's server and MLflow come first, at once; then the deployments; the worker. A training
    that goes on, though the process that started it died, is left alone, and ended with the
    service. Raises ServeError, with the end of the log of what failed.
    """
    parts = dict(up)
    try:
        missing = [name for name in plan.addresses if name not in up]
        if "prefect" in missing:
            require_own_home(plan.folder, local_prefect.find_prefect_home().absolute())
        _provide_database()
        parts |= {name: _start_from_plan(name, plan) for name in missing if name in HEALTH}
        _wait_until_ready("prefect", parts["prefect"], plan)
        if any(name == "prefect" or name.startswith(WORKER) for name in missing):
            _deploy(plan, up)
        is_online = partial(prefect_http.is_worker_online, plan.api, since=time.time())
        workers = {
            name: _start_from_plan(name, plan) for name in missing if name.startswith(WORKER)
        }
        for name, worker in workers.items():
            _wait_until_ready(name, worker, plan, partial(is_online, worker.address))
        if "mlflow" in parts:
            _wait_until_ready("mlflow", parts["mlflow"], plan)
    except OSError as error:
        take_down(plan.folder, but=up)
        raise ServeError(f"Prefect's server stopped answering: {error}") from None
    except BaseException:  # whatever it is, Ctrl-C too: nothing is left half-started
        take_down(plan.folder, but=up)
        raise


def put_right(plan: ServicePlan, up: Mapping[str, Part]) -> dict[str, FlowRunEnd]:
    """Give flow runs that do not tell the truth their true state, by their names. Raises
    OSError."""
    ends: dict[str, FlowRunEnd] = {}
    for host, runs in plan.runs:
        ends |= prefect_http.read_flow_run_ends(runs, host)
    dead = prefect_http.end_dead_flow_runs(plan.api, ends, workers=find_worker_starts(up))
    return {**dead, **prefect_http.correct_flow_run_ends(plan.api, ends)}


def take_down(folder: Path, *, but: Collection[str] = ()) -> None:
    """End all parts except those in `but`, and whatever they started that still runs.

    A training that goes on although its worker or the server has died is left alone: nobody
    could end it in good order, and the next `up` takes it over.
    """
    up = find_parts(folder)
    workers = [part.process for name, part in up.items() if name.startswith(WORKER)]
    spares = bool(but) or not workers or "prefect" not in up
    if not spares:
        _end_workers(folder, workers, f"{up['prefect'].address}/api")
    for name, part in up.items():
        if name in but:
            continue
        if spares and name.startswith(WORKER):
            part.process.kill()  # told to end, it would take its run with it
        end_processes([part.process], wait_s=20)
    _end_leftovers(folder, spares=spares, but=but)


def make_program(name: str, address: str) -> Program:
    """Return the program by which `make serve` starts a part."""
    python, url = [sys.executable, "-m"], urlsplit(address)
    prefect = [*python, "prefect", "--no-prompt"]
    if name == "prefect":
        at = ["--host", str(url.hostname), "--port", str(url.port)]
        return Program([*prefect, "server", "start", *at])
    if name == "mlflow":
        return Program(
            [*python, "headroom.services.serve", "ui"], {"HEADROOM_MLFLOW_PORT": str(url.port)}
        )
    worker = [*prefect, "worker", "start", "--pool", prefect_http.POOL, "--type", "process"]
    # One GPU, one run; the next waits.
    return Program([*worker, "--name", address, "--limit", "1"])


def _end_workers(folder: Path, workers: Sequence[psutil.Process], api: str) -> None:
    """Cancel the workers' runs, then end the workers.

    A worker that is told to end while a run goes on kills the run's process with SIGKILL: no
    `finally`, and Prefect shows the run as Running for ever.
    """
    is_paused = False
    try:
        with suppress(OSError):  # no answer: then it hands out no runs either
            if not prefect_http.is_pool_paused(api):
                # Else the worker would start the next one.
                prefect_http.set_pool_paused(api, paused=True)
                is_paused = True
        _end_runs(folder, workers, api)
        end_processes(workers, wait_s=20)
    finally:
        if is_paused:
            with suppress(OSError):
                prefect_http.set_pool_paused(api, paused=False)


def _end_runs(folder: Path, workers: Sequence[psutil.Process], api: str) -> None:
    """Cancel the workers' runs as the UI would; it signals their processes, which give their memory
    back and close their records. Those of a worker that has died none of these knows."""
    runs = {p: env[FLOW_RUN] for p, env in find_own_processes(folder).items() if FLOW_RUN in env}
    if not runs:
        return
    ids = sorted(set(runs.values()))
    print(f"Cancelling {len(ids)} run{'s' * (len(ids) > 1)} ...", flush=True)
    signalled: set[psutil.Process] = set()
    with suppress(OSError, psutil.Error):  # no answer: then the signal that it would have sent
        family = {child for worker in workers for child in worker.children(recursive=True)}
        for run in ids:
            prefect_http.cancel_flow_run(api, run)
        signalled = family
    end_processes([p for p in runs.keys() - signalled if not _is_sending_process(p)], wait_s=RUN_S)
    late = [p for p in await_end(runs, wait_s=RUN_S) if not _is_sending_process(p)]
    for run in sorted({runs[process] for process in late}):
        print(f"run {run} has not ended within {RUN_S:.0f} s; its process is killed")
    end_processes(late, wait_s=0)
    with suppress(OSError):
        for run in ids:
            prefect_http.confirm_cancelled(api, run)


def _end_leftovers(folder: Path, *, spares: bool, but: Collection[str]) -> None:
    """End what is left of our processes.

    `spares` leaves runs alone, e.g. one whose worker has died before.
    """
    ours = {
        p: e
        for p, e in find_own_processes(folder).items()
        if e.get(PART, "").split(" ")[0] not in but
    }
    runs = {p for p, environment in ours.items() if spares and FLOW_RUN in environment}
    if runs:
        print("A run goes on without its service; `make serve` takes it over.", flush=True)
    left = ours.keys() - runs
    end_processes([process for process in left if not _is_sending_process(process)], wait_s=RUN_S)
    end_processes(await_end(left, wait_s=RUN_S), wait_s=5)


def _is_sending_process(process: psutil.Process) -> bool:
    """Return whether it is a run's sending process.

    It ends when the run has, and all is in MLflow.
    """
    with suppress(psutil.Error):
        return "headroom.tracking.mlflow_sender" in process.cmdline()
    return False


def _start_from_plan(name: str, plan: ServicePlan) -> Part:
    address = plan.addresses[name]
    program = make_program(name, address)
    env = {**_make_environment(plan), **program.env}
    return start_part(
        name,
        program.command,
        address=address,
        folder=plan.folder,
        env=env,
        cwd=plan.project,
    )


def _deploy(plan: ServicePlan, up: Mapping[str, Part]) -> None:
    """Put right what the last service left, and deploy, before there is a worker to act on it."""
    prefect_http.make_pool(plan.api)
    righted = put_right(plan, up)  # also what they could not tell a server that was away
    missed = prefect_http.skip_missed_runs(plan.api)
    if righted:
        print(f"Put {len(righted)} flow run(s) right in Prefect: their processes are gone.")
    if missed:
        print(f"Skipped {missed} scheduled run(s) whose time passed; the latest takes their place.")
    if prefect_http.is_pool_paused(plan.api):
        print("The work pool is paused, so nothing will run. In Prefect's UI it can be resumed.")
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    env, nothing = _make_environment(plan), subprocess.DEVNULL
    with open(make_log_path(plan.folder, "deploy"), "w") as log:
        done = subprocess.run(
            command, stdin=nothing, stdout=log, stderr=log, cwd=plan.project, env=env
        )
    if done.returncode:
        raise make_start_error("deploy", plan.folder)


def _wait_until_ready(
    name: str, part: Part, plan: ServicePlan, is_ready: Callable[[], bool] | None = None
) -> None:
    """Return once the part is ready: by default, once its health endpoint says that all is well."""
    until = time.monotonic() + START_S
    while not (is_ready() if is_ready else prefect_http.is_healthy(part.address + HEALTH[name])):
        if not is_running(part.process):
            raise make_start_error(name, plan.folder)
        if time.monotonic() > until:
            log = make_log_path(plan.folder, name)
            raise ServeError(f"{name}: no answer within {START_S:.0f} s; see {log}")
        time.sleep(0.2)


def _make_retention(keep_days: float) -> dict[str, str]:
    """Return how long Prefect keeps a flow run, where mlflow.yaml says so; Prefect takes no time
    up to an hour."""
    kept_s = max(int(keep_days * 86400), 3601)
    return {RETENTION_PERIOD: str(kept_s)} if keep_days else {}


def _make_environment(plan: ServicePlan) -> dict[str, str]:
    """Return the environment that the service runs with.

    It names the service's own API, whatever the caller's environment names, and the places
    of mlflow.yaml, so that runs go to the database that the UI shows.
    """
    kept = {k: v for k, v in os.environ.items() if k not in OTHERS}
    # Leases in memory would be lost with the server, and their slots taken for ever.
    leases = "prefect.server.concurrency.lease_storage.filesystem"
    public = os.environ.get(PREFECT_URL, "").rstrip("/")
    pages = {"PREFECT_UI_URL": public, "PREFECT_SERVER_UI_API_URL": f"{public}/api"}
    not_proxied = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1"]))
    return {
        **RETENTION,
        **_make_retention(plan.keep_days),
        **kept,
        "PREFECT_API_URL": plan.api,
        **(pages if public else {}),
        **local_prefect.TRIES_AGAIN,
        **MAX_TRIES,
        "PREFECT_HOME": str(local_prefect.find_prefect_home().absolute()),
        "PREFECT_LOGGING_EXTRA_LOGGERS": "headroom",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": leases,
        "MLFLOW_TRACKING_URI": plan.tracking_uri,
        "MLFLOW_EXPERIMENT_NAME": plan.experiment,
        "NO_PROXY": not_proxied,
        MARK: provide_mark(plan.folder),
    }


def _provide_database() -> None:
    """Give a new PREFECT_HOME a migrated database.

    A run from a command line may do the same at once.
    """
    folder = local_prefect.find_prefect_home().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "headroom-start.lock", "a") as lock:
            flock(lock, LOCK_EX)
            local_prefect.provide_database(folder)
    except OSError as error:
        raise ServeError(f"PREFECT_HOME: {folder} can't be written ({error.strerror})") from None
