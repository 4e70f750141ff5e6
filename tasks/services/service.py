"""Brings the service up, in the order that makes it safe, and waits until each part really answers;
looks after the parts, and starts again what has died; and takes them down so that nothing is lost:
first the runs, each of which gives its memory back and closes its record; then the worker, the
server and MLflow. Whatever goes wrong on the way up, what was started is ended again, and nothing
else. Where a systemd of the user outlives a log-out, the keeper, which looks after the parts, is a
unit of it, which starts it again when it dies, and with the machine.
"""

from __future__ import annotations

import os
import re
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

from tasks.engine.base.secret_names import is_secret
from tasks.process import prefect_http
from tasks.process.prefect_http import FLOW_RUN, FlowRunEnd
from tasks.process.redaction import redact
from tasks.services import local_prefect
from tasks.services.parts import (
    KEEPER,
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

ENVIRONMENT = "environment"  # a file of the service's folder
# Of one log-in, or of a unit; none of a service that outlives it.
PASSING = re.compile(
    r"_|SHLVL|PWD|OLDPWD|TERM.*|SSH_.*|XDG_SESSION.*|DISPLAY|WAYLAND.*|DBUS.*|INVOCATION_ID"
    r"|JOURNAL_STREAM|NOTIFY_SOCKET|LISTEN_.*|SYSTEMD_.*|MAINPID|MANAGERPID"
)
RUN_S = 90.0  # for runs to end: give the device back, and send what MLflow has not got yet
MAX_TRIES = {"PREFECT_CLIENT_MAX_RETRIES": "6"}  # for two minutes: nobody sits and waits
START_S = 180.0  # a new database on a busy machine, with room to spare
HEALTH = {"prefect": "/api/health", "mlflow": "/health"}
# Settings of another API, or of a UI that talks to one: this service talks to itself.
PREFECT_URL, MLFLOW_URL = "HEADROOM_PREFECT_URL", "HEADROOM_MLFLOW_URL"  # where others reach them
OTHERS = ("PREFECT_API_KEY", "PREFECT_UI_API_URL", "PREFECT_SERVER_UI_API_URL", "PREFECT_UI_URL")
LOOK_S = 5.0  # between two looks at the parts
PASS_S = 60.0  # between two passes
AGAIN_S, LONGEST_S = 10.0, 300.0  # after a start that failed
KEEPER_ADDRESS = "starts the others again"  # what `status` shows of it


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

    @property
    def api(self) -> str:
        return f"{self.addresses['prefect']}/api"


def bring_up(plan: ServicePlan, up: Mapping[str, Part]) -> None:
    """Start the parts of the plan that are not `up`, and wait until each is ready.

    Prefect's server and MLflow come first, at once; then the deployments; the worker. A training
    that goes on, though the process that started it died, is left alone, and ended with the
    service. Raises ServeError, with the end of the log of what failed.
    """
    found = dict(up)
    try:
        missing = [name for name in plan.addresses if name not in up]
        if "prefect" in missing:
            require_own_home(plan.folder, local_prefect.find_prefect_home().absolute())
        _provide_database()
        found |= {name: _start_from_plan(name, plan) for name in missing if name in HEALTH}
        _wait_until_ready("prefect", found["prefect"], plan)
        if any(name == "prefect" or name.startswith(WORKER) for name in missing):
            _deploy(plan, up)
        is_online = partial(prefect_http.is_worker_online, plan.api, since=time.time())
        workers = {
            name: _start_from_plan(name, plan) for name in missing if name.startswith(WORKER)
        }
        for name, worker in workers.items():
            _wait_until_ready(name, worker, plan, partial(is_online, worker.address))
        if "mlflow" in found:
            _wait_until_ready("mlflow", found["mlflow"], plan)
        if KEEPER in missing:
            _start_keeper(plan)
    except OSError as error:
        take_down(plan.folder, but=up)
        raise ServeError(f"Prefect's server stopped answering: {error}") from None
    except BaseException:  # whatever it is, Ctrl-C too: nothing is left half-started
        take_down(plan.folder, but=up)
        raise


def look_after_parts(
    folder: Path,
    start_missing: Callable[[], ServicePlan],
    send: Callable[[], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Look after the parts of the service, for ever.

    start_missing: starts what is missing. send: sees to what was not sent. Raises what `sleep`
    raises.
    """
    plan, pause_s, pass_at = _bring_up_patiently(start_missing, sleep), AGAIN_S, 0.0
    up = add_keeper(find_parts(folder))
    while True:
        if missing := [name for name in plan.addresses if not _is_up(name, up)]:
            up = add_keeper(find_parts(folder))  # somebody else may have started it
            missing = [name for name in plan.addresses if name not in up]
        if missing:
            print(f"{_format_now()} {', '.join(missing)}: had ended", flush=True)
            plan = _bring_up_patiently(start_missing, sleep)
            up, pass_at = add_keeper(find_parts(folder)), 0.0
            sleep(pause_s)  # what ends at once is not started a hundred times
            pause_s = min(LONGEST_S, 2 * pause_s)
        elif time.monotonic() > pass_at:
            if pass_at:
                pause_s = AGAIN_S  # all has lived for a pass
            _run_pass(plan, up, send)
            pass_at = time.monotonic() + PASS_S
        sleep(LOOK_S)


def put_right(plan: ServicePlan, up: Mapping[str, Part]) -> dict[str, FlowRunEnd]:
    """Give flow runs that do not tell the truth their true state, by their names. Raises
    OSError."""
    known: dict[str, FlowRunEnd] = {}
    for host, runs in plan.runs:
        known |= prefect_http.read_flow_run_ends(runs, host)
    dead = prefect_http.end_dead_flow_runs(plan.api, known, workers=find_worker_starts(up))
    return {**dead, **prefect_http.correct_flow_run_ends(plan.api, known)}


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
    # The keeper first, which would start the others again.
    for name, part in sorted(up.items(), key=lambda p: p[0] != KEEPER):
        if name in but:
            continue
        if spares and name.startswith(WORKER):
            part.process.kill()  # told to end, it would take its run with it
        end_processes([part.process], wait_s=20)
    _end_leftovers(folder, spares=spares, but=but)


def end_keeper(folder: Path) -> None:
    """End the keeper, so that nothing is started again that is taken down."""
    remove_unit(folder)
    if KEEPER in (up := find_parts(folder)):
        end_processes([up[KEEPER].process], wait_s=20)


def can_make_unit() -> bool:
    """Return whether there is a systemd of this user that stays when the user logs out."""
    if _ask("systemctl", "--user", "show-environment") is None:
        return False
    return _ask("loginctl", "show-user", str(os.getuid()), "--property=Linger") == "Linger=yes"


def make_unit_name(folder: Path) -> str:
    """Return the name of the unit of this folder's service: a machine may have several."""
    return f"headroom-{provide_mark(folder)[:12]}.service"


def install_unit(
    folder: Path, *, project: Path, command: Sequence[str], env: Mapping[str, str]
) -> None:
    """Write the unit and start it, also with the machine. Raises ServeError."""
    unit = _find_unit_path(folder)
    unit.parent.mkdir(parents=True, exist_ok=True)
    unit.write_text(make_unit_text(folder, project=project, command=command))
    file = folder / ENVIRONMENT
    with open(os.open(file, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as told:
        told.write(make_environment_text(env))
    # In no file: systemd keeps them until it ends.
    if hidden := [name for name, value in env.items() if _is_hidden(name, value)]:
        _do(["systemctl", "--user", "import-environment", *hidden], env=env)
    for words in (["daemon-reload"], ["enable", "--quiet", unit.name], ["restart", unit.name]):
        _do(["systemctl", "--user", *words])


def remove_unit(folder: Path) -> None:
    """End the unit, and what made it; nothing where there is none."""
    if not (folder / "mark").exists() or not (unit := _find_unit_path(folder)).exists():
        return
    for words in (["disable", "--quiet", unit.name], ["stop", unit.name]):
        _ask("systemctl", "--user", *words)
    unit.unlink(missing_ok=True)
    (folder / ENVIRONMENT).unlink(missing_ok=True)
    _ask("systemctl", "--user", "daemon-reload")


def make_unit_text(folder: Path, *, project: Path, command: Sequence[str]) -> str:
    """Return the text of the unit file."""
    words = " ".join(_quote_word(word) for word in command)
    log = _escape_path(folder / "keeper.log")
    return "\n".join(
        [
            "[Unit]",
            f"Description=Headroom: the service of {_escape_path(project)}",
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            f"WorkingDirectory={_escape_path(project)}",
            f"EnvironmentFile={_escape_path(folder / ENVIRONMENT)}",
            f"ExecStart={words}",
            f"StandardOutput=append:{log}",
            f"StandardError=append:{log}",
            "Restart=always",
            "RestartSec=5",
            "# Servers, workers and trainings go on: `make serve-down` ends them in good order.",
            "KillMode=process",
            "",
            "[Install]",
            "WantedBy=default.target",
            "",
        ]
    )


def make_environment_text(env: Mapping[str, str]) -> str:
    """Return what of the environment is no secret, as systemd reads it."""
    lines = []
    for name, value in env.items():
        is_kept = re.fullmatch(r"[A-Za-z_]\w*", name) and not PASSING.fullmatch(name)
        if is_kept and not _is_hidden(name, value):
            escaped = re.sub(r'(["\\$`])', r"\\\1", value)
            lines.append(f'{name}="{escaped}"')
    return "".join(f"{line}\n" for line in lines)


def make_program(name: str, address: str) -> Program:
    """Return the program by which `make serve` starts a part."""
    python, url = [sys.executable, "-m"], urlsplit(address)
    prefect = [*python, "prefect", "--no-prompt"]
    if name == "prefect":
        at = ["--host", str(url.hostname), "--port", str(url.port)]
        return Program([*prefect, "server", "start", *at])
    if name == "mlflow":
        return Program(
            [*python, "tasks.services.serve", "ui"], {"HEADROOM_MLFLOW_PORT": str(url.port)}
        )
    if name == KEEPER:
        return Program([*python, "tasks.services.serve", "keep"])
    worker = [*prefect, "worker", "start", "--pool", prefect_http.POOL, "--type", "process"]
    # One GPU, one run; the next waits.
    return Program([*worker, "--name", address, "--limit", "1"])


def add_keeper(up: Mapping[str, Part]) -> dict[str, Part]:
    """Return what is up, and this process, which does not find itself."""
    return {KEEPER: Part(KEEPER_ADDRESS, psutil.Process()), **up}


def _is_hidden(name: str, value: str) -> bool:
    return name != MARK and (is_secret(name, value) or redact(value) != value)


def _find_unit_path(folder: Path) -> Path:
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "systemd" / "user" / make_unit_name(folder)


def _escape_path(path: Path) -> str:
    return str(path).replace("%", "%%")


def _quote_word(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _do(command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    if done.returncode:
        said = redact(done.stderr.strip() or f"exit code {done.returncode}")
        raise ServeError(f"{' '.join(command[:3])}: {said}")


def _ask(*command: str) -> str | None:
    """Return what the command printed; None where it failed, or is not there."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else None
    return None


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
        return "tasks.tracking.mlflow_sender" in process.cmdline()
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


def _start_keeper(plan: ServicePlan) -> None:
    """Start the keeper as a unit of systemd where that restarts it too, else as the others."""
    address = plan.addresses[KEEPER]
    program = make_program(KEEPER, address)
    if not can_make_unit():
        _start_from_plan(KEEPER, plan)
        return
    install_unit(
        plan.folder,
        project=plan.project,
        command=program.command,
        env={**_make_environment(plan), **program.env, PART: f"{KEEPER} {address}"},
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
        **kept,
        "PREFECT_API_URL": plan.api,
        **(pages if public else {}),
        **local_prefect.TRIES_AGAIN,
        **MAX_TRIES,
        "PREFECT_HOME": str(local_prefect.find_prefect_home().absolute()),
        "PREFECT_LOGGING_EXTRA_LOGGERS": "tasks",
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


def _is_up(name: str, up: Mapping[str, Part]) -> bool:
    return name in up and is_running(up[name].process)


def _bring_up_patiently(
    start_missing: Callable[[], ServicePlan], sleep: Callable[[float], None]
) -> ServicePlan:
    pause_s = AGAIN_S
    while True:
        try:
            return start_missing()
        except ServeError as error:
            print(f"{_format_now()} {error}; again in {pause_s:.0f} s", file=sys.stderr, flush=True)
        sleep(pause_s)
        pause_s = min(LONGEST_S, 2 * pause_s)


def _run_pass(plan: ServicePlan, up: Mapping[str, Part], send: Callable[[], None]) -> None:
    try:
        if done := put_right(plan, up):
            print(f"{_format_now()} put right in Prefect: {', '.join(done)}", flush=True)
        send()
    except (OSError, ValueError, LookupError, TypeError) as error:  # no answer, or none of Prefect
        print(f"{_format_now()} the pass failed: {error}", file=sys.stderr, flush=True)


def _format_now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
