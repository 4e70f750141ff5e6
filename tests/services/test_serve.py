"""What `serve` promises before anything is up: it ends its own processes and no others, it says who
holds a port, and a start that fails leaves nothing behind.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient

from headroom.services import parts, serve, service
from headroom.services.parts import MARK, Part, ServeError, SettingError
from headroom.tracking.tracking_settings import read_tracking_settings
from tests.conftest import free_port
from tests.team import fill_environment

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
    if parts.is_running(process):
        process.kill()


def start(folder: Path, command: list[str], *, name: str = "prefect") -> Part:
    env = {**os.environ, MARK: parts.provide_mark(folder)}
    return parts.start_part(
        name, command, address=ADDRESSES[name], folder=folder, env=env, cwd=folder
    )


def test_down_ends_what_was_started_and_what_that_started(folder: Path) -> None:
    code = f"import subprocess; subprocess.Popen({SLEEP!r}, start_new_session=True).wait()"
    process = start(folder, [sys.executable, "-c", code]).process
    until = time.monotonic() + 20
    while not process.children() and time.monotonic() < until:
        time.sleep(0.02)
    [child] = process.children()
    assert {name: part.process for name, part in parts.find_parts(folder).items()} == {
        "prefect": process
    }
    assert serve.stop_service() == 0
    assert not parts.is_running(process)
    assert not parts.is_running(child)
    assert parts.find_parts(folder) == {}


def test_what_another_service_has_started_is_not_ours_and_survives(
    folder: Path, sleeper: psutil.Process, tmp_path: Path
) -> None:
    """It looks the same and has our port, but not our mark."""
    other = tmp_path / "other"
    other.mkdir()
    parts.provide_mark(other)
    assert parts.find_parts(other) == {}
    service.take_down(other)
    assert parts.is_running(sleeper)


def test_a_process_deaf_to_sigterm_is_ended_all_the_same(folder: Path) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)"
    code += "; time.sleep(60)"
    process = start(folder, [sys.executable, "-c", code]).process
    log, until = parts.make_log_path(folder, "prefect"), time.monotonic() + 20
    while not log.read_text() and time.monotonic() < until:
        time.sleep(0.02)
    parts.end_processes([process], wait_s=0.2)
    assert not parts.is_running(process)


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
    assert parts.find_parts(folder) == {}


def test_a_home_that_another_service_has_is_refused_and_that_one_survives(
    folder: Path, tmp_path: Path
) -> None:
    """Two clones with one PREFECT_HOME came up, and each one's worker played the other's runs."""
    home, other = tmp_path / "home", tmp_path / "other"
    other.mkdir()
    env = {**os.environ, MARK: parts.provide_mark(folder), "PREFECT_HOME": str(home)}
    up = parts.start_part(
        "prefect", SLEEP, address=ADDRESSES["prefect"], folder=folder, env=env, cwd=folder
    )
    try:
        with pytest.raises(ServeError) as caught:
            parts.require_own_home(other, home)
        assert str(caught.value).startswith(
            f"PREFECT_HOME: {home} is that of the service in {folder}; "
        )
        parts.require_own_home(other, tmp_path / "another")
        parts.require_own_home(folder, home)  # its own
        assert parts.is_running(up.process)
    finally:
        parts.end_processes([up.process], wait_s=5)
    parts.require_own_home(other, home)


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http", "4200.0", "1e3"])
def test_a_port_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv("HEADROOM_MLFLOW_PORT", port)
    with pytest.raises(SettingError, match=r"^HEADROOM_MLFLOW_PORT: must be a port, 1 to 65535"):
        parts.read_port(*serve.MLFLOW_PORT)


def test_the_link_to_a_run_has_the_port_that_is_served(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was 5000 whatever HEADROOM_MLFLOW_PORT and `make serve` said."""
    assert serve.find_mlflow_address() == ("http://127.0.0.1:5000", "")
    monkeypatch.setenv("HEADROOM_MLFLOW_PORT", "5055")
    assert serve.find_mlflow_address() == ("http://127.0.0.1:5055", "HEADROOM_MLFLOW_PORT=5055 ")
    page = start(folder, SLEEP, name="mlflow")
    assert serve.find_mlflow_address() == (page.address, "")
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
    monkeypatch.setattr(service, "_wait_until_ready", lambda *_: None)
    monkeypatch.setattr(service, "_deploy", lambda plan, up: None)
    begun = []

    def begin(name: str, plan: service.ServicePlan) -> Part:
        begun.append((name, service._make_environment(plan)[MARK]))
        return start(folder, SLEEP, name=name)

    monkeypatch.setattr(service, "_start_from_plan", begin)
    monkeypatch.setattr(serve, "_describe_addresses", lambda addresses: "")
    page = start(folder, SLEEP, name="mlflow").process
    assert serve.main(["status"]) == 1
    assert re.search(r"^worker +down", capsys.readouterr().out, re.MULTILINE)
    assert serve.main(["up"]) == 0
    assert "worker: had ended" in capsys.readouterr().out
    assert begun == [("worker", parts.provide_mark(folder))]
    up = parts.find_parts(folder)
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
    assert serve.stop_service() == 0
    assert not parts.is_running(sleeper) and parts.is_running(run)
    assert "A run goes on without its service" in capsys.readouterr().out

    again = [start(folder, SLEEP).process, start(folder, SLEEP, name="worker").process]
    monkeypatch.setattr("headroom.prefect.prefect_http.is_pool_paused", lambda api: False)
    monkeypatch.setattr("headroom.prefect.prefect_http.set_pool_paused", lambda api, paused: None)
    assert serve.stop_service() == 0
    assert not parts.is_running(run)
    assert not any(parts.is_running(process) for process in again)


def test_a_run_goes_on_where_nobody_reads_what_it_prints(tmp_path: Path) -> None:
    """Prefect's log goes through rich, which ended the training when its worker had died."""
    code = (
        "import os, sys\nfrom rich.console import Console\nold = Console(file=sys.stderr)\n"
        "from headroom.prefect_flows.flow_run import outlive_the_worker\noutlive_the_worker()\n"
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
    monkeypatch.setattr(service, "_deploy", lambda plan, up: None)
    begun, begin, wait = {}, service._start_from_plan, service._wait_until_ready

    def real_mlflow(name: str, plan: service.ServicePlan) -> Part:
        begun[name] = begin(name, plan) if name == "mlflow" else start(folder, SLEEP, name=name)
        return begun[name]

    monkeypatch.setattr(service, "_start_from_plan", real_mlflow)
    monkeypatch.setattr(service, "_wait_until_ready", lambda *a: a[0] == "mlflow" and wait(*a))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    plan = service.ServicePlan(
        project=serve.PROJECT,
        folder=folder,
        tracking_uri="sqlite:////proc/none/mlflow.db",
        experiment="headroom",
        runs=[],
        addresses=ADDRESSES,
    )
    with pytest.raises(
        ServeError, match="mlflow ended while starting(.|\n)*tracking_uri: /proc/none"
    ):
        service.bring_up(plan, {})
    assert begun.keys() == ADDRESSES.keys()
    assert not any(parts.is_running(part.process) for part in begun.values())
    assert parts.find_parts(folder) == {}


def test_the_service_talks_to_its_own_server_whatever_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "https://api.example.com/api")
    monkeypatch.setenv("PREFECT_API_KEY", "secret")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/here.db")
    monkeypatch.setenv("PREFECT_HOME", "relative")
    plan = service.ServicePlan(
        project=serve.PROJECT,
        folder=tmp_path,
        tracking_uri=read_tracking_settings().tracking_uri,
        experiment=read_tracking_settings().experiment,
        runs=[],
        addresses={"prefect": "http://127.0.0.1:4242", "worker": "test"},
    )
    env = service._make_environment(plan)
    assert env["PREFECT_API_URL"] == "http://127.0.0.1:4242/api"
    assert "PREFECT_API_KEY" not in env
    assert env["PREFECT_HOME"] == str(Path("relative").absolute())
    assert env["MLFLOW_TRACKING_URI"] == f"sqlite:///{tmp_path}/here.db"


def make_plan(folder: Path, **more: Any) -> service.ServicePlan:
    return service.ServicePlan(
        project=serve.PROJECT,
        folder=folder,
        tracking_uri="sqlite:///here.db",
        experiment="headroom",
        runs=[],
        addresses={"prefect": "http://127.0.0.1:4242", "worker": "test"},
        **more,
    )


def test_flow_runs_are_removed_after_90_days_where_nobody_names_another_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Prefect's database grew by 293 KiB a run, for ever."""
    plan = make_plan(tmp_path)
    env = service._make_environment(plan)
    assert service.RETENTION.items() <= env.items() and service.KEPT_S == 90 * 86400
    named = "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD"
    monkeypatch.setenv(named, "86400")
    assert service._make_environment(plan) == {**env, named: "86400"}


def test_keep_days_of_mlflow_yaml_is_prefects_time_too(tmp_path: Path) -> None:
    named = "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD"
    plan = make_plan(tmp_path, keep_days=30)
    assert service._make_environment(plan)[named] == str(30 * 86400)
    brief = service._make_environment(replace(plan, keep_days=0.001))
    assert int(brief[named]) > 3600  # Prefect takes no less


def test_prefect_forgets_old_flow_runs_in_compose_as_with_serve() -> None:
    assert service.RETENTION.items() <= fill_environment("prefect").items()
    for name in service.RETENTION:
        assert fill_environment("prefect", **{name: "other"})[name] == "other"


def test_links_lead_to_the_public_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They led to 127.0.0.1, or to a name inside of a container, on everybody's computer; there
    Prefect's pages, too, asked 127.0.0.1 for the runs."""
    monkeypatch.setenv("HEADROOM_PREFECT_URL", "https://prefect.example.com/")
    monkeypatch.setenv("HEADROOM_MLFLOW_URL", "https://me:secret@mlflow.example.com/")
    plan = make_plan(tmp_path)
    env = service._make_environment(plan)
    assert env["PREFECT_API_URL"] == "http://127.0.0.1:4242/api"
    assert env["PREFECT_UI_URL"] == "https://prefect.example.com"
    assert env["PREFECT_SERVER_UI_API_URL"] == "https://prefect.example.com/api"
    for uri in ("http://mlflow:5000", "sqlite:///here.db"):
        opens = serve.make_open_command(uri, "1", "abc")
        assert opens.startswith("https://mlflow.example.com/#/experiments/1/runs/abc")


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
    told = place / "told"
    monkeypatch.setattr(serve, "_print_page_when_up", lambda address: told.open("w"))
    serve.run_mlflow_ui()
    assert "/#/experiments/1/runs?workflowType=machine_learning" in told.read_text()
    assert "http" not in capsys.readouterr().out


TELLS = """
import sys, time
from headroom.services import serve
with serve._print_page_when_up(sys.argv[1]) as telling:
    telling.write("the page")
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("comes", [True, False])
def test_the_address_of_the_pages_is_printed_when_they_answer_and_not_before(comes: bool) -> None:
    """A click at once was refused."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-c", TELLS, address, "30" if comes else "1"]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=serve.PROJECT, env=env, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        os.set_blocking(server.stdout.fileno(), False)
        if not comes:  # it has died, and whoever would have told of it goes too
            server.wait(timeout=30)
            os.set_blocking(server.stdout.fileno(), True)
            assert server.stdout.read() == b""
            return
        time.sleep(1)
        assert server.stdout.read() is None
        with HTTPServer(("127.0.0.1", port), Healthy) as healthy:
            threading.Thread(target=healthy.serve_forever, daemon=True).start()
            os.set_blocking(server.stdout.fileno(), True)
            assert server.stdout.readline() == b"MLflow: the page\n"
            healthy.shutdown()
        server.kill()


class Healthy(BaseHTTPRequestHandler):
    """A server's health endpoint."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"OK")

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd here")
def test_systemd_takes_the_unit_of_the_page(tmp_path: Path) -> None:
    page = (serve.PROJECT / "docs" / "schedule.md").read_text()
    unit = tmp_path / "headroom.service"
    unit.write_text(page.partition("```ini\n")[2].partition("```")[0].replace("%h", "/"))
    verify = ["systemd-analyze", "verify", "--user", str(unit)]
    here = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(verify, env=here, capture_output=True, text=True)
    assert "Unknown" not in done.stderr and "Failed to parse" not in done.stderr, done.stderr


def test_ui_starts_where_the_experiment_was_deleted(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = read_tracking_settings()
    client = MlflowClient(where.tracking_uri)
    client.delete_experiment(client.create_experiment(where.experiment))
    assert (
        serve._find_first_page(read_tracking_settings())
        == "/#/experiments?workflowType=machine_learning"
    )
    assert "mlflow experiments restore" in capsys.readouterr().err


def test_a_tracking_uri_that_cant_be_used_is_bad_input() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headroom.services.serve", "ui"],
        env={**os.environ, "MLFLOW_TRACKING_URI": "nonsense"},
        cwd=serve.PROJECT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("tracking_uri: must be one of")
