"""A team's service on one machine: MLflow's and Prefect's servers on PostgreSQL, artifacts in an S3
store, two workers as two hosts. `python -m tasks.services.team up`, `down`, `status`. It is the
service of serve.py with other stores: nothing listens to another machine, and all that it keeps
lies outside the project.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tasks.process.redaction import redact
from tasks.services import keeper, serve, service, team_hosts
from tasks.services.processes import KEEPER, STORES, Part, SettingError, find_parts
from tasks.services.service import Program
from tasks.services.team_stores import STORE_VARIABLES, Stores
from tasks.tracking import send_later
from tasks.tracking.mlflow_pages import EXPERIMENTS_PAGE
from tasks.tracking.where import read_tracking_settings

HOSTS = {"worker-1": "host-1", "worker-2": "host-2"}
POSTGRES_PORT = ("HEADROOM_POSTGRES_PORT", 5433)
S3_PORT = ("HEADROOM_S3_PORT", 9000)
DEPLOYMENTS = ("--prefect-file", "prefect-team.yaml", "--name", "train-team")
REPOSITORY = "HEADROOM_REPOSITORY"
# By default what does not answer for 5 s is killed, with all that it is told: 64 runs are enough.
UVICORN = "--timeout-worker-healthcheck 120"


def main(argv: Sequence[str]) -> int:
    """Do what the command line says. Returns the exit code: 0, 1 failed, 2 a bad setting."""
    actions = {"up": start_team, "down": stop_team, "status": print_status, "keep": keep}
    return serve.run_action(argv, actions, "tasks.services.team", __doc__)


def find_team_folder() -> Path:
    """Return where a team's data, passwords, checkouts and logs lie."""
    if named := os.environ.get("HEADROOM_TEAM_FOLDER"):
        return Path(named).absolute()
    if not os.geteuid():  # root's home is closed to the user that PostgreSQL runs as
        return Path("/var/lib/headroom/team")
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "headroom" / "team"


def start_team() -> int:
    """Bring everything up, or print that it is up, and print the addresses."""
    place = find_team_folder()
    place.mkdir(mode=0o711, parents=True, exist_ok=True)
    # Only the servers get them: not the workers, and not what these start.
    given = {name: os.environ.pop(name) for name in STORE_VARIABLES if os.environ.get(name)}
    try:
        plan = serve.start_missing_parts(place, lambda alive: _make_plan(place, alive, given))
    except BaseException:  # whatever it is, Ctrl-C too: no host is left without a worker
        if not find_parts(place):
            team_hosts.plan_hosts(list(HOSTS.values())).remove()
        raise
    print(_describe_addresses(plan))
    return 0


def keep() -> int:
    """Look after what `up` has started, for ever: `up` starts this too."""
    place = find_team_folder()
    given = {name: os.environ.pop(name) for name in STORE_VARIABLES if os.environ.get(name)}
    begun = partial(
        serve.start_missing_parts, place, lambda up: _make_plan(place, up, given), is_keeper=True
    )
    keeper.keep(place, begun, lambda: _send(place))
    return 0


def _send(place: Path) -> None:
    """What runs of the hosts could not, each on its host."""
    up, chosen = find_parts(place), read_tracking_settings()
    hosts = team_hosts.plan_hosts(list(HOSTS.values()))
    uri, api = up["mlflow"].address, f"{up['prefect'].address}/api"
    chosen = chosen.model_copy(update={"tracking_uri": uri})
    for name, runs in _runs(place).items():
        if chosen.send_later_s and send_later.is_needed(runs):
            there = chosen.model_copy(update={"runs": str(runs)})
            inside = hosts.inside(name, []) if hosts.are_there() else []
            send_later.start(there, api, inside=inside)


def _runs(place: Path) -> dict[str, Path]:
    """The folders of journals, by the hosts."""
    return {name: place / "hosts" / name / "code/.headroom/runs" for name in HOSTS.values()}


def stop_team() -> int:
    """End what `up` started, and nothing else; what it kept stays."""
    serve.stop_parts(find_team_folder())
    team_hosts.plan_hosts(list(HOSTS.values())).remove()
    return 0


def print_status() -> int:
    """Print what is up. Returns 1 where something that was brought up is not."""
    given = {name: os.environ[name] for name in STORE_VARIABLES if os.environ.get(name)}
    stores = Stores(find_team_folder(), "", "", given).names
    return serve.print_parts(find_team_folder(), [*stores, *serve.PORTS, *HOSTS, KEEPER])


def _make_plan(
    place: Path, up: Mapping[str, Part], given: Mapping[str, str]
) -> service.ServicePlan:
    hosts, stores = team_hosts.plan_hosts(list(HOSTS.values())), Stores(place, "", "", given)
    stores.require()
    repository = _provide_repository(place)
    why_not = hosts.make()
    if why_not and not up:
        print(f"Both workers are on this host: {why_not}.", flush=True)
    host = "127.0.0.1" if why_not else hosts.servers
    ports = {"postgres": POSTGRES_PORT} if "postgres" in stores.names else {}
    addresses = serve.choose_addresses(ports, up)  # of this host alone: only the servers ask it
    addresses = {n: a.replace("http:", "postgresql:") for n, a in addresses.items()}
    # The S3 store is asked by all: MLflow sends who downloads a model there.
    ports = {"s3": S3_PORT, **serve.PORTS} if "s3" in stores.names else serve.PORTS
    addresses |= {**serve.choose_addresses(ports, up, host=host), **HOSTS, KEEPER: keeper.ADDRESS}
    stores = Stores(place, addresses.get("postgres", ""), addresses.get("s3", ""), given)
    of_prefect, of_mlflow = stores.make_server_env()
    programs = stores.programs()
    prefect = service.make_program("prefect", addresses["prefect"])
    programs["prefect"] = Program(prefect.command, of_prefect)
    port = addresses["mlflow"].rpartition(":")[2]
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", port]
    pages = {"MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": addresses["mlflow"]}  # else they show no run
    command += ["--workers", "2", "--uvicorn-opts", UVICORN]
    programs["mlflow"] = Program(command, {**of_mlflow, **pages})
    programs |= {part: _make_worker(part, place, None if why_not else hosts) for part in HOSTS}
    # The stores' passwords too: it starts the servers again.
    programs[KEEPER] = Program([sys.executable, "-m", "tasks.services.team", "keep"], dict(given))
    here = socket.gethostname()
    return service.ServicePlan(
        project=serve.PROJECT,
        folder=place,
        tracking_uri=addresses["mlflow"],
        experiment=read_tracking_settings().experiment,
        runs=[(here if why_not else name, runs) for name, runs in _runs(place).items()],
        addresses=addresses,
        programs=programs,
        deployments=DEPLOYMENTS,
        env={"PREFECT_HOME": str(place / "prefect"), REPOSITORY: repository},
    )


def _make_worker(part: str, place: Path, hosts: team_hosts.Hosts | None) -> Program:
    name = HOSTS[part]
    own = place / "hosts" / name
    own.mkdir(parents=True, exist_ok=True)
    words = service.make_program(part, name).command
    env = {"PREFECT_HOME": str(own / "prefect"), "HEADROOM_HOST_FOLDER": str(own)}
    return Program(hosts.inside(name, words) if hosts else words, env)


def _provide_repository(place: Path) -> str:
    """Return the repository that the workers clone.

    It is what the environment names, or a new one with the newest commit here.
    """
    if named := os.environ.get(REPOSITORY):
        if redact(named) != named:  # Prefect would keep it, and show it
            raise SettingError(
                f"{REPOSITORY}: must hold no login (got {redact(named)}); a token stands in a "
                "Secret block that prefect-team.yaml names"
            )
        return named
    code = place / "code.git"
    commands = [["init", "--quiet", "--bare", "--initial-branch=main", str(code)]]
    source = f"file://{serve.PROJECT}"
    commands += [["--git-dir", str(code), "fetch", "--quiet", "--depth=1", source, "+HEAD:main"]]
    for command in commands:
        try:
            done = subprocess.run(["git", *command], capture_output=True, text=True)
        except FileNotFoundError:
            raise SettingError("git: is not here; workers bring the code with it") from None
        if done.returncode:
            why = next((line for line in done.stderr.splitlines() if "fatal:" in line), "refused")
            raise SettingError(
                f"{REPOSITORY}: must name what the workers clone; {serve.PROJECT} can't be ({why})"
            )
    return f"file://{code}"


def _describe_addresses(plan: service.ServicePlan) -> str:
    at, place = plan.addresses, plan.folder
    stores = [f"{name:10} {at[name]}" for name in STORES if name in at]
    return "\n".join(
        [
            f"Prefect    {at['prefect']}",
            f"MLflow     {at['mlflow']}{EXPERIMENTS_PAGE}",
            *stores,
            f"workers    {', '.join(HOSTS.values())}; one run at a time each, of the newest commit",
            "           For this machine only. The servers ask for no password; the stores do.",
            f"train now  {serve.make_train_command(at, 'train-team')}",
            f"at a desk  MLFLOW_TRACKING_URI={at['mlflow']} make train",
            f"data, logs {place}/",
            "stop       make team-down",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
