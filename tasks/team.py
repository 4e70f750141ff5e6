"""A team's service on one machine: MLflow's and Prefect's servers on PostgreSQL, artifacts in an S3
store, two workers as two hosts. `python -m tasks.team up`, `down`, `status`. It is the service of
serve.py with other stores: nothing listens to another machine, and all that it keeps lies outside
the project.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tasks import serve
from tasks.process.redaction import redacted
from tasks.serving import keeper, service_up, team_hosts
from tasks.serving.processes import KEEPER, STORES, Part, SettingError, parts
from tasks.serving.service_up import Program
from tasks.serving.team_stores import GIVEN, Stores
from tasks.tracking import send_later
from tasks.tracking.mlflow_pages import EXPERIMENTS_PAGE
from tasks.tracking.where import where

HOSTS = {"worker-1": "host-1", "worker-2": "host-2"}
POSTGRES_PORT = ("HEADROOM_POSTGRES_PORT", 5433)
S3_PORT = ("HEADROOM_S3_PORT", 9000)
DEPLOYMENTS = ("--prefect-file", "prefect-team.yaml", "--name", "train-team")
REPOSITORY = "HEADROOM_REPOSITORY"
# By default what does not answer for 5 s is killed, with all that it is told: 64 runs are enough.
UVICORN = "--timeout-worker-healthcheck 120"


def main(argv: Sequence[str]) -> int:
    """Do what the command line says. Returns the exit code: 0, 1 failed, 2 a bad setting."""
    actions = {"up": up, "down": down, "status": status, "keep": keep}
    return serve.obey(argv, actions, "tasks.team", __doc__)


def folder() -> Path:
    """Where a team's data, passwords, checkouts and logs lie."""
    if named := os.environ.get("HEADROOM_TEAM_FOLDER"):
        return Path(named).absolute()
    if not os.geteuid():  # root's home is closed to the user that PostgreSQL runs as
        return Path("/var/lib/headroom/team")
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "headroom" / "team"


def up() -> int:
    """Bring everything up, or say that it is, and print the addresses."""
    place = folder()
    place.mkdir(mode=0o711, parents=True, exist_ok=True)
    # Only the servers get them: not the workers, and not what these start.
    given = {name: os.environ.pop(name) for name in GIVEN if os.environ.get(name)}
    try:
        plan = serve.begun(place, lambda alive: _plan(place, alive, given))
    except BaseException:  # whatever it is, Ctrl-C too: no host is left without a worker
        if not parts(place):
            team_hosts.hosts(list(HOSTS.values())).remove()
        raise
    print(_told(plan))
    return 0


def keep() -> int:
    """Look after what `up` has started, for ever: `up` starts this too."""
    place = folder()
    given = {name: os.environ.pop(name) for name in GIVEN if os.environ.get(name)}
    begun = partial(serve.begun, place, lambda up: _plan(place, up, given), is_keeper=True)
    keeper.keep(place, begun, lambda: _send(place))
    return 0


def _send(place: Path) -> None:
    """What runs of the hosts could not, each on its host."""
    up, chosen = parts(place), where()
    hosts = team_hosts.hosts(list(HOSTS.values()))
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


def down() -> int:
    """End what `up` started, and nothing else; what it kept stays."""
    serve.ended(folder())
    team_hosts.hosts(list(HOSTS.values())).remove()
    return 0


def status() -> int:
    """Print what is up. Returns 1 where something that was brought up is not."""
    given = {name: os.environ[name] for name in GIVEN if os.environ.get(name)}
    stores = Stores(folder(), "", "", given).names
    return serve.told(folder(), [*stores, *serve.PORTS, *HOSTS, KEEPER])


def _plan(place: Path, up: Mapping[str, Part], given: Mapping[str, str]) -> service_up.Plan:
    hosts, stores = team_hosts.hosts(list(HOSTS.values())), Stores(place, "", "", given)
    stores.require()
    repository = _repository(place)
    why_not = hosts.make()
    if why_not and not up:
        print(f"Both workers are on this host: {why_not}.", flush=True)
    host = "127.0.0.1" if why_not else hosts.servers
    ports = {"postgres": POSTGRES_PORT} if "postgres" in stores.names else {}
    addresses = serve.placed(ports, up)  # of this host alone: only the servers ask it
    addresses = {n: a.replace("http:", "postgresql:") for n, a in addresses.items()}
    # The S3 store is asked by all: MLflow sends who downloads a model there.
    ports = {"s3": S3_PORT, **serve.PORTS} if "s3" in stores.names else serve.PORTS
    addresses |= {**serve.placed(ports, up, host=host), **HOSTS, KEEPER: keeper.ADDRESS}
    stores = Stores(place, addresses.get("postgres", ""), addresses.get("s3", ""), given)
    of_prefect, of_mlflow = stores.server_env()
    programs = stores.programs()
    prefect = service_up.program_of("prefect", addresses["prefect"])
    programs["prefect"] = Program(prefect.command, of_prefect)
    port = addresses["mlflow"].rpartition(":")[2]
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", port]
    pages = {"MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": addresses["mlflow"]}  # else they show no run
    command += ["--workers", "2", "--uvicorn-opts", UVICORN]
    programs["mlflow"] = Program(command, {**of_mlflow, **pages})
    programs |= {part: _worker(part, place, None if why_not else hosts) for part in HOSTS}
    # The stores' passwords too: it starts the servers again.
    programs[KEEPER] = Program([sys.executable, "-m", "tasks.team", "keep"], dict(given))
    here = socket.gethostname()
    return service_up.Plan(
        project=serve.PROJECT,
        folder=place,
        tracking_uri=addresses["mlflow"],
        experiment=where().experiment,
        runs=[(here if why_not else name, runs) for name, runs in _runs(place).items()],
        addresses=addresses,
        programs=programs,
        deployments=DEPLOYMENTS,
        env={"PREFECT_HOME": str(place / "prefect"), REPOSITORY: repository},
    )


def _worker(part: str, place: Path, hosts: team_hosts.Hosts | None) -> Program:
    name = HOSTS[part]
    own = place / "hosts" / name
    own.mkdir(parents=True, exist_ok=True)
    words = service_up.program_of(part, name).command
    env = {"PREFECT_HOME": str(own / "prefect"), "HEADROOM_HOST_FOLDER": str(own)}
    return Program(hosts.inside(name, words) if hosts else words, env)


def _repository(place: Path) -> str:
    """What the workers clone: what the environment names, or one with the newest commit here."""
    if named := os.environ.get(REPOSITORY):
        if redacted(named) != named:  # Prefect would keep it, and show it
            raise SettingError(
                f"{REPOSITORY}: must hold no login (got {redacted(named)}); a token stands in a "
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


def _told(plan: service_up.Plan) -> str:
    at, place = plan.addresses, plan.folder
    stores = [f"{name:10} {at[name]}" for name in STORES if name in at]
    return "\n".join(
        [
            f"Prefect    {at['prefect']}",
            f"MLflow     {at['mlflow']}{EXPERIMENTS_PAGE}",
            *stores,
            f"workers    {', '.join(HOSTS.values())}; one run at a time each, of the newest commit",
            "           For this machine only. The servers ask for no password; the stores do.",
            f"train now  {serve.train_command(at, 'train-team')}",
            f"at a desk  MLFLOW_TRACKING_URI={at['mlflow']} make train",
            f"data, logs {place}/",
            "stop       make team-down",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
