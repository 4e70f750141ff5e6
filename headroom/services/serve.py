"""The service on one machine: a Prefect server, a worker for the deployments of prefect.yaml, and
MLflow's UI. `python -m headroom.services.serve up`, `down`, `status`; `up` starts what is not up.
`ui` is MLflow alone, in the foreground. It listens on 127.0.0.1 only, since neither Prefect's nor
MLflow's server asks for a password.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import FrameType
from typing import IO
from urllib.parse import urlsplit

import psutil

from headroom.base.program import Parser, use_name
from headroom.prefect import prefect_http
from headroom.process import command
from headroom.process.redaction import redact, remove_login
from headroom.services import service
from headroom.services.parts import (
    Part,
    ServeError,
    SettingError,
    find_parts,
    hold_service_lock,
    is_running,
    make_log_path,
    read_port,
    require_free_port,
)
from headroom.tracking.mlflow_pages import EXPERIMENTS_PAGE, make_experiment_path, make_run_path
from headroom.tracking.tracking_settings import (
    TrackingError,
    TrackingSettings,
    read_tracking_settings,
)

PROJECT = Path(__file__).absolute().parent.parent.parent
FOLDER = PROJECT / ".headroom" / "serve"
PREFECT_PORT = ("HEADROOM_PREFECT_PORT", 4200)
MLFLOW_PORT = ("HEADROOM_MLFLOW_PORT", 5000)
PORTS = {"prefect": PREFECT_PORT, "mlflow": MLFLOW_PORT}


def main(argv: Sequence[str]) -> int:
    """Do what the command line says. Returns the exit code: 0, 1 failed, 2 a bad setting."""
    actions = {
        "up": start_service,
        "down": stop_service,
        "status": print_status,
        "ui": run_mlflow_ui,
    }
    parser = Parser(prog="python -m headroom.services.serve", description=__doc__)
    parser.add_argument("action", choices=list(actions))
    action = parser.parse_args(argv).action
    command.provide_home()
    try:
        return actions[action]()
    except ServeError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, SettingError) else 1
    except TrackingError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what had been started was ended", file=sys.stderr)
        return 130


def start_service() -> int:
    """Bring everything up, or print that it is up, and print the addresses."""
    print(_describe_addresses(start_missing_parts().addresses))
    return 0


def start_missing_parts() -> service.ServicePlan:
    """Start what of the service is not up; return the plan, of which then everything is."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    # A worker ends itself by SIGINT. Started from a script's background job it would inherit that
    # SIGINT is ignored, and then never end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with hold_service_lock(FOLDER):
        alive = find_parts(FOLDER)
        plan = _make_plan(alive)
        gone = ", ".join(name for name in plan.addresses if name not in alive)
        if not gone:
            print("It is up already.")
        else:
            if alive:
                print(f"{gone}: had ended (logs: {FOLDER}), and is started again.", flush=True)
            service.bring_up(plan, alive)
    return plan


def stop_service() -> int:
    """End what `up` started, and nothing else."""
    with hold_service_lock(FOLDER):
        names = find_parts(FOLDER)
        service.take_down(FOLDER)
    print("Down: " + ", ".join(names) + "." if names else "Nothing is up.")
    return 0


def print_status() -> int:
    """Print what is up. Returns 1 where something that was brought up is not."""
    alive = find_parts(FOLDER)
    if not alive:
        print("Nothing is up.")
        return 1
    states = {name: _describe_state(name, alive.get(name)) for name in _list_parts()}
    for name, state in states.items():
        place = alive[name].address if name in alive else f"log: {make_log_path(FOLDER, name)}"
        print(f"{name:8} {state:10} {place}")
    return 0 if set(states.values()) == {"up"} else 1


def run_mlflow_ui() -> int:
    """Become MLflow's server on the runs; where a server has them, print where it is."""
    chosen = read_tracking_settings()
    if not chosen.keeps_files:
        print(f"The runs are on a tracking server: {_find_server_page(chosen)}")
        return 0
    if page := find_parts(FOLDER).get("mlflow"):
        print(f"MLflow is up already, with `make serve`: {page.address}{_find_first_page(chosen)}")
        return 0
    port = read_port(*MLFLOW_PORT)
    require_free_port(port, MLFLOW_PORT[0])
    address = f"http://127.0.0.1:{port}"
    print("MLflow is starting ...", flush=True)
    with _print_page_when_up(address) as telling:
        telling.write(address + _find_first_page(chosen))
    os.environ["MLFLOW_BACKEND_STORE_URI"] = chosen.tracking_uri  # unlike a flag, not seen in `ps`
    if public := os.environ.get(service.MLFLOW_URL):  # else it refuses who comes by that address
        hosts = f"127.0.0.1:{port},localhost:{port},{urlsplit(public).netloc}"
        os.environ.setdefault("MLFLOW_SERVER_ALLOWED_HOSTS", hosts)
        origin = "{0.scheme}://{0.netloc}".format(urlsplit(public))
        os.environ.setdefault("MLFLOW_SERVER_CORS_ALLOWED_ORIGINS", origin)
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # with it: 1.7 GB and 30 s
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    arguments += ["--default-artifact-root", Path(chosen.artifacts).as_uri()]
    if entry_points(group="mlflow.app", name="headroom"):  # else it has not been installed since
        arguments += ["--app-name", "headroom"]
    os.execv(sys.executable, [sys.executable, "-m", "mlflow", "server", *arguments])


def _print_page_when_up(address: str) -> IO[str]:
    """Return a pipe for the page to print once the server answers that this process becomes.

    Before that, a click on it would be refused. A process of its own prints it, which nobody has
    to wait for; it is forked before a library has threads.
    """
    server = os.getpid()
    read, write = os.pipe()
    if child := os.fork():
        os.close(read)
        os.waitpid(child, 0)
        return os.fdopen(write, "w")
    try:
        os.close(write)
        if not os.fork() and (page := os.fdopen(read).read()):
            while is_running(psutil.Process(server)):
                if prefect_http.is_healthy(address + service.HEALTH["mlflow"]):
                    print(
                        f"MLflow: {page}\n        (this machine only; Ctrl-C ends it)", flush=True
                    )
                    break
                time.sleep(0.2)
    except (KeyboardInterrupt, psutil.Error):
        pass
    finally:
        os._exit(0)


def _find_first_page(chosen: TrackingSettings) -> str:
    """Return the path of the page that shows the runs best.

    A new database is made: MLflow's own first use of one breaks if a run is first. Raises
    TrackingError or ServeError where it can't be used.
    """
    from headroom.tracking import mlflow_store  # which takes seconds

    try:
        return make_experiment_path(mlflow_store.open_experiment(chosen)[1])
    except Exception as error:  # of any store
        said = mlflow_store.explain_error(error, chosen)
        if said.startswith("run.experiment:"):  # a deleted one; the pages can show the others
            print(said, file=sys.stderr)
            return EXPERIMENTS_PAGE
        refused = TrackingError if isinstance(error, TrackingError) else ServeError
        raise refused(said) from None


def _find_server_page(chosen: TrackingSettings) -> str:
    """Return the address of a tracking server's pages.

    The server is not asked whether it is there.
    """
    is_http = chosen.tracking_uri.startswith("http")
    uri = redact(chosen.tracking_uri)
    return uri.rstrip("/") + EXPERIMENTS_PAGE if is_http else uri


def find_mlflow_address() -> tuple[str, str]:
    """Return where MLflow's pages are or will be, and what to set before `ui` for that.

    The second is empty where the port is the default one.
    """
    if page := find_parts(FOLDER).get("mlflow"):
        return page.address, ""
    variable, usual = MLFLOW_PORT
    try:
        port = read_port(*MLFLOW_PORT)
    except ServeError:  # it is `up` and `ui` that have to be told
        port = usual
    return f"http://127.0.0.1:{port}", "" if port == usual else f"{variable}={port} "


def make_open_command(
    tracking_uri: str, experiment_id: str, run_id: str, *, path: str | None = None
) -> str:
    """Return the command or address that opens a run in MLflow, or another page by its path.

    It opens MLflow alone, where that does not know the run yet.
    """
    if path is None:
        path = make_run_path(experiment_id, run_id) if run_id else ""
    if public := os.environ.get(service.MLFLOW_URL):
        return remove_login(public).rstrip("/") + path
    if tracking_uri.startswith("http"):
        return remove_login(tracking_uri).rstrip("/") + path
    here = Path("Makefile").is_file() and Path("headroom/services/serve.py").is_file()
    command = "make ui" if here else use_name("python -m headroom.services.serve ui")
    address, variable = find_mlflow_address()
    return f"{variable}{command}   # then {address}{path}"


def _list_parts() -> list[str]:
    """Return the parts of the service.

    Where a tracking server has the runs, it has a UI of its own.
    """
    is_local = not read_tracking_settings().tracking_uri.startswith(("http", "databricks"))
    return ["prefect", *(["mlflow"] if is_local else []), "worker"]


def _make_plan(up: Mapping[str, Part]) -> service.ServicePlan:
    """Return where each part is, or will be, on a port that no other process holds."""
    chosen = read_tracking_settings()
    ports = {name: PORTS[name] for name in _list_parts() if name in PORTS}
    addresses = {
        **choose_addresses(ports, up),
        "worker": socket.gethostname(),
    }
    addresses |= {name: part.address for name, part in up.items()}
    return service.ServicePlan(
        project=PROJECT,
        folder=FOLDER,
        tracking_uri=chosen.tracking_uri,
        experiment=chosen.experiment,
        runs=[(socket.gethostname(), Path(chosen.runs))],
        addresses=addresses,
        keep_days=chosen.keep_days,
    )


def choose_addresses(
    ports: Mapping[str, tuple[str, int]], up: Mapping[str, Part]
) -> dict[str, str]:
    """Return the addresses of parts whose ports the environment may name.

    Those that are not up get a port that no other process holds. Raises ServeError where
    there is none.
    """
    addresses = {name: up[name].address for name in ports if name in up}
    for name, (variable, usual) in ports.items():
        if name not in up:
            address = f"http://127.0.0.1:{read_port(variable, usual)}"
            if other := next((n for n, a in addresses.items() if a == address), None):
                both = address.rpartition(":")[2]
                raise SettingError(
                    f"{variable}: must differ from {ports[other][0]} (both are {both})"
                )
            require_free_port(read_port(variable, usual), variable)
            addresses[name] = address
    return addresses


def _describe_state(name: str, part: Part | None) -> str:
    if part is None:
        return "down"
    path = service.HEALTH.get(name)
    return "up" if path is None or prefect_http.is_healthy(part.address + path) else "no answer"


def _describe_addresses(addresses: Mapping[str, str]) -> str:
    api = f"PREFECT_API_URL={addresses['prefect']}/api"
    run = f"{api} {_quote_command('prefect')} deployment run train/train-on-demand"
    log = FOLDER.relative_to(PROJECT)
    return "\n".join(
        [
            f"Prefect    {addresses['prefect']}",
            f"MLflow     {_find_mlflow_page(addresses)}",
            f"worker     {addresses['worker']}, pool {prefect_http.POOL}, one run at a time",
            "           For this machine only (127.0.0.1): there is no password.",
            f"train now  {run}",
            "           with settings: --param 'overrides={\"optim.lr\": 0.01}'",
            f"logs       {log}/",
            "stop       make serve-down",
        ]
    )


def _find_mlflow_page(addresses: Mapping[str, str]) -> str:
    chosen = read_tracking_settings()
    if "mlflow" in addresses:
        return addresses["mlflow"] + _find_first_page(chosen)
    return _find_server_page(chosen)


def _quote_command(name: str) -> str:
    command = Path(sys.executable).with_name(name)
    inside = command.is_relative_to(PROJECT)
    return shlex.quote(str(command.relative_to(PROJECT) if inside else command))


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
