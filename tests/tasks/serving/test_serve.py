"""What `serve` promises before anything is up: it ends its own processes and no others, it says who
holds a port, and a start that fails leaves nothing behind.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tasks import serve
from tasks.serving import local_prefect, processes, service_down, service_up
from tasks.serving.processes import MARK, Part, ServeError, SettingError
from tasks.tracking.mlflow_store import open_experiment
from tasks.tracking.where import where
from tests.conftest import free_port

SLEEP = ["sleep", "60"]  # a program that becomes another has no environment for a moment
ADDRESSES = {"prefect": "http://127.0.0.1:1", "mlflow": "http://127.0.0.1:2", "worker": "test"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The service's folder, of a service that is not there."""
    monkeypatch.setattr(serve, "FOLDER", tmp_path / "serve")
    (tmp_path / "serve").mkdir()
    return tmp_path / "serve"


@pytest.fixture
def sleeper(folder: Path) -> Iterator[psutil.Process]:
    """A server that sleeps."""
    process = start(folder, SLEEP).process
    yield process
    if processes.is_running(process):
        process.kill()


def start(folder: Path, command: list[str], *, name: str = "prefect") -> Part:
    env = {**os.environ, MARK: processes.mark_of(folder)}
    return processes.start(
        name, command, address=ADDRESSES[name], folder=folder, env=env, cwd=folder
    )


def test_down_ends_what_was_started_and_what_that_started(folder: Path) -> None:
    code = f"import subprocess; subprocess.Popen({SLEEP!r}, start_new_session=True).wait()"
    process = start(folder, [sys.executable, "-c", code]).process
    until = time.monotonic() + 20
    while not process.children() and time.monotonic() < until:
        time.sleep(0.02)
    [child] = process.children()
    assert {name: part.process for name, part in processes.parts(folder).items()} == {
        "prefect": process
    }
    assert serve.down() == 0
    assert not processes.is_running(process)
    assert not processes.is_running(child)
    assert processes.parts(folder) == {}


def test_what_another_service_has_started_is_not_ours_and_survives(
    folder: Path, sleeper: psutil.Process, tmp_path: Path
) -> None:
    """It looks the same and has our port, but not our mark."""
    other = tmp_path / "other"
    other.mkdir()
    processes.mark_of(other)
    assert processes.parts(other) == {}
    service_down.take_down(other)
    assert processes.is_running(sleeper)


def test_a_process_deaf_to_sigterm_is_ended_all_the_same(folder: Path) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)"
    code += "; time.sleep(60)"
    process = start(folder, [sys.executable, "-c", code]).process
    log, until = processes.log_path(folder, "prefect"), time.monotonic() + 20
    while not log.read_text() and time.monotonic() < until:
        time.sleep(0.02)
    processes.end([process], wait_s=0.2)
    assert not processes.is_running(process)


def test_nothing_up_is_said_and_is_no_error(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(["down"]) == 0
    assert "Nothing is up." in capsys.readouterr().out
    assert serve.main(["status"]) == 1


def test_a_port_taken_by_somebody_is_named_with_its_holder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("HEADROOM_PREFECT_PORT", str(port))
        restore = signal.getsignal(signal.SIGTERM)
        try:
            assert serve.main(["up"]) == 1
        finally:
            signal.signal(signal.SIGTERM, restore)
    error = capsys.readouterr().err
    assert f"HEADROOM_PREFECT_PORT: port {port} on 127.0.0.1 can't be had" in error
    if sys.platform == "linux":
        assert f"{psutil.Process().name()} (pid {os.getpid()})" in error
    assert processes.parts(folder) == {}


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http", "4200.0", "1e3"])
def test_a_port_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv("HEADROOM_MLFLOW_PORT", port)
    with pytest.raises(SettingError, match=r"^HEADROOM_MLFLOW_PORT: must be a port, 1 to 65535"):
        processes.port_from(*serve.MLFLOW_PORT)


def test_the_link_to_a_run_has_the_port_that_is_served(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was 5000 whatever HEADROOM_MLFLOW_PORT and `make serve` said."""
    assert serve.mlflow_address() == ("http://127.0.0.1:5000", "")
    monkeypatch.setenv("HEADROOM_MLFLOW_PORT", "5055")
    assert serve.mlflow_address() == ("http://127.0.0.1:5055", "HEADROOM_MLFLOW_PORT=5055 ")
    page = start(folder, SLEEP, name="mlflow")
    assert serve.mlflow_address() == (page.address, "")
    page.process.kill()


def test_up_starts_again_what_has_died_and_leaves_the_rest_alone(
    folder: Path,
    sleeper: psutil.Process,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It asked for `make serve-down`, which ended a training that was going on well."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("PREFECT_HOME", str(folder))
    monkeypatch.setattr(service_up, "_await", lambda *_: None)
    monkeypatch.setattr(service_up, "_deploy", lambda plan: None)
    begun = []

    def begin(name: str, plan: service_up.Plan) -> Part:
        begun.append((name, service_up._environment(plan)[MARK]))
        return start(folder, SLEEP, name=name)

    monkeypatch.setattr(service_up, "_start", begin)
    monkeypatch.setattr(serve, "_addresses", lambda addresses: "")
    page = start(folder, SLEEP, name="mlflow").process
    assert serve.main(["status"]) == 1
    assert re.search(r"^worker +down", capsys.readouterr().out, re.MULTILINE)
    assert serve.main(["up"]) == 0
    assert "worker: had ended" in capsys.readouterr().out
    assert begun == [("worker", processes.mark_of(folder))]
    up = processes.parts(folder)
    assert up.keys() == {"prefect", "mlflow", "worker"}
    assert (up["prefect"].process, up["mlflow"].process) == (sleeper, page)
    assert serve.main(["up"]) == 0
    assert "It is up already." in capsys.readouterr().out and len(begun) == 1
    for part in up.values():
        part.process.kill()


def test_a_run_whose_worker_has_died_outlives_down_and_is_ended_with_the_next_worker(
    folder: Path,
    sleeper: psutil.Process,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as of_a_worker:
        of_a_worker.setenv("PREFECT__FLOW_RUN_ID", "of-a-worker")
        run = start(folder, SLEEP, name="worker").process
    assert serve.down() == 0
    assert not processes.is_running(sleeper) and processes.is_running(run)
    assert "A run goes on without its service" in capsys.readouterr().out

    again = [start(folder, SLEEP).process, start(folder, SLEEP, name="worker").process]
    monkeypatch.setattr("tasks.serving.prefect_http.is_paused", lambda api: False)
    monkeypatch.setattr("tasks.serving.prefect_http.pause", lambda api, paused: None)
    assert serve.down() == 0
    assert not processes.is_running(run)
    assert not any(processes.is_running(process) for process in again)


def test_a_run_goes_on_where_nobody_reads_what_it_prints(tmp_path: Path) -> None:
    """Prefect's log goes through rich, which ended the training when its worker had died."""
    code = (
        "import os, sys\nfrom rich.console import Console\nold = Console(file=sys.stderr)\n"
        "from tasks.flow_run import outlive_the_worker\noutlive_the_worker()\n"
        "read, write = os.pipe()\nos.dup2(write, 1)\nos.dup2(write, 2)\n"
        "os.close(read)\nos.close(write)\n"
        "old.print('a line of the log')\nprint('one of the user', flush=True)\nos._exit(7)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=serve.PROJECT, check=False)
    assert done.returncode == 7


def test_a_part_that_dies_while_starting_shows_its_log_and_ends_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """MLflow's database can't be made: the server that was started beside it must go."""
    monkeypatch.setattr(service_up, "_deploy", lambda plan: None)
    begun, begin, wait = {}, service_up._start, service_up._await

    def real_mlflow(name: str, plan: service_up.Plan) -> Part:
        begun[name] = begin(name, plan) if name == "mlflow" else start(folder, SLEEP, name=name)
        return begun[name]

    monkeypatch.setattr(service_up, "_start", real_mlflow)
    monkeypatch.setattr(service_up, "_await", lambda *a: a[0] == "mlflow" and wait(*a))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    plan = service_up.Plan(
        project=serve.PROJECT,
        folder=folder,
        tracking_uri="sqlite:////proc/none/mlflow.db",
        experiment="headroom",
        runs=tmp_path,
        addresses=ADDRESSES,
    )
    with pytest.raises(
        ServeError, match="mlflow ended while starting(.|\n)*tracking_uri: /proc/none"
    ):
        service_up.bring_up(plan, {})
    assert begun.keys() == ADDRESSES.keys()
    assert not any(processes.is_running(part.process) for part in begun.values())
    assert processes.parts(folder) == {}


def test_the_service_talks_to_its_own_server_whatever_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "https://api.example.com/api")
    monkeypatch.setenv("PREFECT_API_KEY", "secret")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/here.db")
    monkeypatch.setenv("PREFECT_HOME", "relative")
    plan = service_up.Plan(
        project=serve.PROJECT,
        folder=tmp_path,
        tracking_uri=where().tracking_uri,
        experiment=where().experiment,
        runs=tmp_path,
        addresses={"prefect": "http://127.0.0.1:4242", "worker": "test"},
    )
    env = service_up._environment(plan)
    assert env["PREFECT_API_URL"] == "http://127.0.0.1:4242/api"
    assert "PREFECT_API_KEY" not in env
    assert (
        env["PREFECT_HOME"]
        == str(Path("relative").absolute())
        == str(local_prefect.home().absolute())
    )
    assert env["MLFLOW_TRACKING_URI"] == f"sqlite:///{tmp_path}/here.db"


def test_ui_says_where_to_go_where_a_tracking_server_has_the_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@mlflow.example.com")
    assert serve.main(["ui"]) == 0
    page = "https://me:***@mlflow.example.com/#/experiments?workflowType=machine_learning"
    assert page in capsys.readouterr().out


def test_ui_opens_on_our_runs_among_the_pages_for_training(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was MLflow's front page, and from there the pages for traces and prompts."""
    monkeypatch.setenv("HEADROOM_MLFLOW_PORT", str(free_port()))
    monkeypatch.setattr(serve, "os", SimpleNamespace(environ={}, execv=lambda *_: None))
    serve.ui()
    assert "/#/experiments/1/runs?workflowType=machine_learning" in capsys.readouterr().out


def test_ui_starts_where_the_experiment_was_deleted(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client, found = open_experiment(where())
    client.delete_experiment(found)
    assert serve._first_page(where()) == "/#/experiments?workflowType=machine_learning"
    assert "mlflow experiments restore" in capsys.readouterr().err


def test_a_tracking_uri_that_cant_be_used_is_bad_input() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tasks.serve", "ui"],
        env={**os.environ, "MLFLOW_TRACKING_URI": "nonsense"},
        cwd=serve.PROJECT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("tracking_uri: must be one of")
