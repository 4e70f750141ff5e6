"""Tests run apart from their user's Prefect and MLflow; no Prefect server starts by accident."""

import gc
import importlib
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.prefect.shared_server import prefect_api as prefect_api
from tests.run_folders import LOG

ROOT = Path(__file__).parent.parent
WARM = Path(__file__).parent / "warm"
APART = tempfile.mkdtemp(prefix="headroom-tests-")
PYTHON = sys.executable  # itself: what it is given imports everything anew
# What the tests import, but for this project.
LIBRARIES = (
    *("torch", "torch._dynamo", "prefect.main", "prefect.flow_engine", "pandas", "hypothesis"),
    *("mlflow.pyfunc", "mlflow.store.tracking.sqlalchemy_store", "mlflow.system_metrics"),
    *("sklearn.datasets", "sklearn.linear_model", "sklearn.metrics"),
)
# Whole programs, with servers and several processes, and fuzzing: what `make test` leaves out. The
# longest first; those that load both cores (team, postgresql) stand apart from each other, and from
# scheduled, whose server has to answer in time.
SLOW = (
    "services/test_scheduled",
    "test_readme",
    "flows/cli/test_train_command",
    "data/test_fuzz_readers",
    "launch/test_rank",
    "flows/test_team",
    "launch/test_processes",
    "test_chaos",
    "simulation/test_histories",
    "simulation/test_more_histories",
    "flows/test_compare",
    "flows/test_judge",
    "flows/test_memory_as_a_test",
    "flows/test_json_answers",
    "flows/test_runs",
    "flows/test_retry",
    "flows/test_many_processes",
    "tracking/test_mlflow_away",
    "tracking/test_send_later",
    "flows/test_search",
    "flows/test_own",
    "flows/test_framework_loops",
    "flows/test_notebooks",
    "flows/test_families",
    "base/test_names_of_runs",
    "flows/test_predict",
    "test_install",
    "training/test_gpu_fit",
    "flows/cli/test_prefect_away",
    "flows/test_resume",
    "training/test_sharded_training",
    "flows/test_secrets",
    "tracking/test_mlflow_sender",
    "tracking/test_orphaned_runs",
    "tracking/test_postgresql",
)
LONGEST = ("flows/test_train", "data/test_read_tables", "training/test_trainer")


def warm_python(folder: Path, python: str) -> str:
    """A `python` in `folder`, beside the other programs of the environment: what it starts forks
    from a process that has imported PyTorch, Prefect or MLflow (tests/warm)."""
    folder.mkdir()
    for program in Path(PYTHON).parent.iterdir():
        (folder / program.name).symlink_to(program)
    given = {"PYTHON": python, "FOLDER": os.environ["TESTS_SHARED"], "SERVER": WARM / "forks.py"}
    text = (WARM / "launcher.py").read_text()
    for name, value in {**given, "SESSION": os.environ["TESTS_PID"]}.items():
        text = text.replace(f"@{name}@", str(value))
    launcher = folder / "python"
    launcher.unlink()
    launcher.write_text(f"#!{os.path.realpath(PYTHON)} -IS\n{text}")
    launcher.chmod(0o755)
    return str(launcher)


def pytest_configure(config: pytest.Config) -> None:
    # Before anything imports prefect, which reads them once.
    for name in [n for n in os.environ if n.startswith(("PREFECT_", "MLFLOW_", "HEADROOM_"))]:
        del os.environ[name]
    # One that was started in the background of a shell ignores Ctrl-C, and so does what it starts.
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    # Else each process compiles all of this project, and pytest its tests.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.environ["HEADROOM_LEASES"] = f"{APART}/leases"
    os.environ["PREFECT_SERVER_EPHEMERAL_ENABLED"] = "false"
    os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
    os.environ["PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW"] = "ignore"
    # Two workers with a thread each fit two cores; the engine sets its own count where it matters.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["MPLCONFIGDIR"] = os.environ.get("MPLCONFIGDIR", f"{APART}/matplotlib")
    if not hasattr(config, "workerinput"):  # the workers of pytest-xdist share it all
        os.environ |= {"TESTS_SHARED": APART, "TESTS_PID": str(os.getpid())}
    os.environ["PREFECT_HOME"] = f"{os.environ['TESTS_SHARED']}/prefect"
    sys.executable = warm_python(Path(APART) / "bin", PYTHON)
    if hasattr(config, "workerinput"):  # it runs some of everything
        for name in LIBRARIES:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # else each search for leaks goes through two million objects of libraries


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, so that none is left over for one worker at the end."""
    ranks = {name: rank for rank, name in enumerate((*SLOW, *LONGEST))}
    files = {item: item.nodeid.partition(".py")[0].removeprefix("tests/") for item in items}
    items.sort(key=lambda item: ranks.get(files[item], len(ranks)))
    for item in items:
        if files[item] in SLOW:
            item.add_marker("slow")


def pytest_unconfigure(config: pytest.Config) -> None:
    sys.executable = PYTHON
    shutil.rmtree(APART, ignore_errors=True)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Writes modules of a user's own into the working directory, an empty folder; call it with a
    name and the source. They are forgotten again afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write(name: str, source: str) -> None:
        file = tmp_path / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)

    yield write
    for name in set(sys.modules) - before:
        found = getattr(sys.modules[name], "__file__", None) or ""
        if found.startswith(str(tmp_path)):
            del sys.modules[name]


def free_port() -> int:
    """Of 127.0.0.1, that nobody has now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with this project's mlflow.yaml, as the working directory. What a test could
    not send, nobody stays to send."""
    text = (ROOT / "mlflow.yaml").read_text()
    assert "send_later_s: 86400 " in text
    (tmp_path / "mlflow.yaml").write_text(text.replace("send_later_s: 86400 ", "send_later_s: 0 "))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def desk_environment(home: Path | None = None) -> dict[str, str]:
    """What a person's shell holds: nothing of Prefect but its home, by default that of the server
    of all tests. What a process of its own starts is forked too (tests/warm/site)."""
    home = home or Path(os.environ["PREFECT_HOME"])
    # A sitecustomize that is there already, as a stand-in for a GPU brings, must not be hidden.
    site = [] if os.environ.get("TESTS_COLD") == "1" else [str(WARM / "site")]
    known = [str(ROOT), *site, *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
    given = {"PREFECT_HOME": str(home), "PYTHONPATH": os.pathsep.join(known)}
    return {**kept, **given, "TESTS_PYTHON": sys.executable}


@pytest.fixture
def desk(place: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `python -m flows.train`, or another module, with the given arguments in `place`; none
    outlives its test, which would slow all that follow. cold: a process of its own, which imports
    everything; what it starts itself is forked all the same. more: of its environment."""
    started: list[subprocess.Popen[str]] = []

    def start(
        *arguments: str,
        module: str = "flows.train",
        home: Path | None = None,
        cold: bool = False,
        **more: str,
    ) -> subprocess.Popen[str]:
        as_asked = {"TESTS_COLD": module} if cold else {}
        process = subprocess.Popen(
            [PYTHON if cold else sys.executable, "-m", module, *arguments],
            cwd=place,
            env={**desk_environment(home), **as_asked, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()  # of a test that failed: the next one would be told of it


@pytest.fixture
def compare(desk: Callable[..., subprocess.Popen[str]]) -> Callable[..., subprocess.Popen[str]]:
    """Starts `python -m flows.compare` in `place`."""
    return partial(desk, module="flows.compare", cold=True)


def is_training(place: Path) -> bool:
    """Whether a training of this place has logged something."""
    logs = place.glob(f".headroom/runs/*/{LOG}")
    return any(b'"metrics":' in log.read_bytes() for log in logs)


def query(place: Path, text: str) -> list[tuple[Any, ...]]:
    """The rows that MLflow's database in `place` has for this."""
    with closing(sqlite3.connect(place / "mlflow.db")) as database:
        return database.execute(text).fetchall()
