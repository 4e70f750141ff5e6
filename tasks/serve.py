"""The service on one machine: a Prefect server, a worker that plays the deployments of prefect.yaml
and MLflow's UI. `python -m tasks.serve up`, `down`, `status`; `ui` is MLflow alone, in the
foreground. It listens on 127.0.0.1 only, since neither Prefect's nor MLflow's server asks for a
password.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path
from types import FrameType

from tasks.process.redaction import redacted
from tasks.serving import prefect_http, service_down, service_up
from tasks.serving.processes import (
    Component,
    ServeError,
    SettingError,
    port_from,
    remembered,
    require_free,
)
from tasks.tracking.where import TrackingError, where

PROJECT = Path(__file__).absolute().parent.parent
FOLDER = PROJECT / ".headroom" / "serve"
PREFECT_PORT = ("HEADROOM_PREFECT_PORT", 4200)
MLFLOW_PORT = ("HEADROOM_MLFLOW_PORT", 5000)


def main(argv: Sequence[str]) -> int:
    """Do what the command line says. Returns the exit code: 0, 1 failed, 2 a bad setting."""
    parser = argparse.ArgumentParser(prog="python -m tasks.serve", description=__doc__)
    parser.add_argument("action", choices=["up", "down", "status", "ui"])
    action = parser.parse_args(argv).action
    try:
        return {"up": up, "down": down, "status": status, "ui": ui}[action]()
    except ServeError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, SettingError) else 1
    except TrackingError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what had been started was ended", file=sys.stderr)
        return 130


def up() -> int:
    """Bring everything up, or say that it is, and print the addresses."""
    signal.signal(signal.SIGTERM, _leave)
    # A worker ends itself by SIGINT. Started from a script's background job it would inherit that
    # SIGINT is ignored, and then never end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with _alone():
        components = remembered(FOLDER)
        running = [c for c in components if c.process()]
        if components and len(running) == len(components):
            print("It is up already.")
        else:
            if running:
                gone = ", ".join(c.name for c in components if c not in running)
                print(f"{gone}: had ended (logs: {FOLDER}), and is started again.", flush=True)
            components = service_up.bring_up(_plan(running), running)
    print(_addresses({c.name: c.address for c in components}))
    return 0


def down() -> int:
    """End what `up` started, and nothing else."""
    with _alone():
        components = remembered(FOLDER)
        if not components:
            print("Nothing is up.")
            return 0
        service_down.take_down(components, FOLDER)
    print("Down: " + ", ".join(c.name for c in components) + ".")
    return 0


def status() -> int:
    """Print what is up. Returns 1 where something that was brought up is not."""
    components = remembered(FOLDER)
    if not components:
        print("Nothing is up.")
        return 1
    states = {c.name: _state(c) for c in components}
    for component in components:
        print(f"{component.name:8} {states[component.name]:10} {component.address}")
    return 0 if set(states.values()) == {"up"} else 1


def ui() -> int:
    """Become MLflow's server on the runs; or say where they are, where a server has them."""
    chosen = where()
    if not chosen.keeps_files:
        print(f"The runs are on a tracking server: {redacted(chosen.tracking_uri)}")
        return 0
    found = next((c for c in remembered(FOLDER) if c.name == "mlflow" and c.process()), None)
    if found and found.pid != os.getpid():
        print(f"MLflow is up already, with `make serve`: {found.address}")
        return 0
    port = port_from(*MLFLOW_PORT)
    require_free(port, MLFLOW_PORT[0])
    if chosen.database is not None and not chosen.database.exists():
        from tasks.tracking.mlflow_store import open_experiment

        open_experiment(chosen)  # MLflow's own first use of a new database breaks if a run is first
    print(f"MLflow: http://127.0.0.1:{port}   (this machine only; Ctrl-C ends it)", flush=True)
    os.environ["MLFLOW_BACKEND_STORE_URI"] = chosen.tracking_uri  # unlike a flag, not seen in `ps`
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # with it: 1.7 GB and 30 s
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    arguments += ["--default-artifact-root", Path(chosen.artifacts).as_uri()]
    os.execv(sys.executable, [sys.executable, "-m", "mlflow", "server", *arguments])


def mlflow_address() -> tuple[str, str]:
    """Where MLflow's pages are, or will be once `ui` has been called; and what is to be set before
    that command, where the port is not the usual one."""
    try:
        up = [c for c in remembered(FOLDER) if c.name == "mlflow" and c.process()]
        port = port_from(*MLFLOW_PORT)
    except ServeError:  # it is `up` and `ui` that have to be told
        return f"http://127.0.0.1:{MLFLOW_PORT[1]}", ""
    if up:
        return up[0].address, ""
    variable, usual = MLFLOW_PORT
    return f"http://127.0.0.1:{port}", "" if port == usual else f"{variable}={port} "


def _plan(running: Sequence[Component] = ()) -> service_up.Plan:
    chosen = where()
    prefect, mlflow = port_from(*PREFECT_PORT), port_from(*MLFLOW_PORT)
    is_local = not chosen.tracking_uri.startswith(("http", "databricks"))
    if prefect == mlflow and is_local:
        raise SettingError(
            f"{MLFLOW_PORT[0]}: must differ from {PREFECT_PORT[0]} (both are {mlflow})"
        )
    held = {component.name for component in running}
    if "prefect" not in held:
        require_free(prefect, PREFECT_PORT[0])
    if is_local and "mlflow" not in held:
        require_free(mlflow, MLFLOW_PORT[0])
    return service_up.Plan(
        project=PROJECT,
        folder=FOLDER,
        tracking_uri=chosen.tracking_uri,
        experiment=chosen.experiment,
        prefect_url=f"http://127.0.0.1:{prefect}",
        mlflow_url=f"http://127.0.0.1:{mlflow}" if is_local else None,
        worker=socket.gethostname(),
    )


@contextmanager
def _alone() -> Iterator[None]:
    """One `up` or `down` at a time; a second one waits, then finds it done."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        flock(lock, LOCK_EX)
        yield


def _state(component: Component) -> str:
    if component.process() is None:
        return "down"
    path = {"prefect": "/api/health", "mlflow": "/health"}.get(component.name)
    ready = path is None or prefect_http.answers(component.address + path)
    return "up" if ready else "no answer"


def _addresses(addresses: dict[str, str]) -> str:
    api = f"{addresses['prefect']}/api"
    run = f"PREFECT_API_URL={api} {_command('prefect')} deployment run train/train-on-demand"
    log = FOLDER.relative_to(PROJECT)
    return "\n".join(
        [
            f"Prefect    {addresses['prefect']}",
            f"MLflow     {addresses.get('mlflow') or redacted(where().tracking_uri)}",
            f"worker     {addresses['worker']}, pool {prefect_http.POOL}, one run at a time",
            "           For this machine only (127.0.0.1): there is no password.",
            f"train now  {run}",
            "           with settings: --param 'overrides={\"optim.lr\": 0.01}'",
            f"logs       {log}/",
            "stop       make serve-down",
        ]
    )


def _command(name: str) -> str:
    command = Path(sys.executable).with_name(name)
    inside = command.is_relative_to(PROJECT)
    return shlex.quote(str(command.relative_to(PROJECT) if inside else command))


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
