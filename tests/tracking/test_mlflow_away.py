"""Trainings that begin without MLflow, against a real server that is away, comes and goes."""

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from fcntl import LOCK_EX, flock
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from sqlalchemy.exc import InvalidatePoolError, OperationalError

from headroom.base.file_lock import FileLock
from headroom.tracking import journal, mlflow_sender, mlflow_store, orphaned_runs
from headroom.tracking.journal import Journal
from headroom.tracking.run_sender import Sender, SendingState
from headroom.tracking.tracking_settings import TrackingError, TrackingSettings
from headroom.training.kept_steps import list_steps
from tests.conftest import desk_environment
from tests.run_folders import (
    LOG,
    SENDING_LOCK,
    append_lines,
    is_sent,
    make_event,
    make_line,
    read_begins,
    read_end,
    write_end,
)
from tests.tracking.conftest import send_left

DATA = {
    "context": "training",
    "name": "houses",
    "digest": "84f8",
    "source_type": "code",
    "source": "{}",
}
END = {"status": "FINISHED", "name": "n", "params": {}, "tags": {}, "metrics": {}, "run_id": ""}
GONE = {"host": socket.gethostname(), "pid": "4194304", "process.started_at": "1.0"}


class Server:
    """`mlflow server` on one port for all tests of this file; it is away until `up` is called."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.folder, self.process = folder, None
        shutil.copyfile(mlflow_store.find_database_template(), folder / "mlflow.db")  # migrated

    def up(self) -> MlflowClient:
        command = ["mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        with open(self.folder / "log", "a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=self.folder,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                stdout=log,
                stderr=log,
                process_group=0,
            )
        _until(self._answers, timeout_s=240)
        return MlflowClient(self.uri)

    def _answers(self) -> bool:
        with socket.socket() as line:
            return line.connect_ex(("127.0.0.1", self.port)) == 0

    def down(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, 9)
            self.process.wait()
            self.process = None
            _until(lambda: not self._answers())  # its workers die a moment later


@pytest.fixture(scope="module")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    return Server(tmp_path_factory.mktemp("server"))


@pytest.fixture
def server(_server: Server) -> Iterator[Server]:
    yield _server
    _server.down()


def _until(what: Callable[[], object], *, timeout_s: float = 90) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def _where(tmp_path: Path, uri: str, **more: object) -> TrackingSettings:
    where = TrackingSettings(
        tracking_uri=uri, artifacts=str(tmp_path / "a"), runs=str(tmp_path / "runs")
    )
    return where.model_copy(update={"flush_s": 0.2, "give_up_s": 0.5, "send_later_s": 0, **more})


def _all(client: MlflowClient) -> list[Run]:
    return client.search_runs([e.experiment_id for e in client.search_experiments()])


def _steps(client: MlflowClient, run: Run) -> list[int]:
    return sorted(m.step for m in client.get_metric_history(run.info.run_id, "train/loss"))


@pytest.mark.timeout(600)  # two starts of a server
def test_mlflow_that_comes_and_goes_and_comes_has_the_whole_run_with_its_true_start(
    tmp_path: Path, server: Server
) -> None:
    where, began_ms = _where(tmp_path, server.uri, give_up_s=30), time.time() * 1000
    with Journal(where, tmp_path / "runs" / "one") as kept:
        kept.open("late")
        assert kept.create(name="first", params={"a": 1}, tags={"b": "2"}, data=[DATA]) == {}
        created_ms = time.time() * 1000
        assert kept.run_id == "" and "is away (Connection refused); the run is" in kept.notes[0]
        for step in (1, 2, 3):
            kept.log({"train/loss": 1 / step}, step)
        client = server.up()
        _until(lambda: kept.run_id)
        _until(lambda: "train/loss" in client.get_run(kept.run_id).data.metrics)
        server.down()
        kept.log({"train/loss": 0.25}, 4)
        client = server.up()
        kept.close(END)
    (run,) = [r for r in _all(client) if r.data.tags.get("journal") == "one"]
    assert run.info.run_id == kept.run_id and run.info.status == "FINISHED"
    assert client.get_experiment(run.info.experiment_id).name == "late"
    assert began_ms <= run.info.start_time + 1 and run.info.start_time <= created_ms
    assert run.data.params == {"a": "1"} and run.data.tags["b"] == "2"
    assert _steps(client, run) == [1, 2, 3, 4]
    (seen,) = run.inputs.dataset_inputs
    assert (seen.dataset.name, seen.dataset.digest) == ("houses", "84f8")
    assert [(tag.key, tag.value) for tag in seen.tags] == [("mlflow.data.context", "training")]
    assert is_sent(tmp_path / "runs" / "one")


@pytest.mark.timeout(600)  # three trainings, and a start of a server
def test_a_run_that_mlflow_never_knew_goes_on_and_is_made_once_by_hand_or_by_the_next(
    place: Path, server: Server
) -> None:
    environment = {**desk_environment(), "MLFLOW_TRACKING_URI": server.uri}

    def started(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)

    def trained(*words: str) -> tuple[str, str]:
        process = started("flows.train", *words)
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        return out, err

    out, err = trained("--train.end", "0.001s", "--run.key", "night", "--train.epochs", "2")
    (folder,) = [f.parent for f in (place / ".headroom" / "runs").glob("*/start.json")]
    assert f"{server.uri} is away (Connection refused); the run is kept in {folder}" in err
    assert f"python -m headroom.tracking.mlflow_sender {folder}" in err
    assert "Open" not in out and "Release" in out and "Traceback" not in err
    assert f"go on with `python -m flows.train --resume {folder.name}`" in err
    trained("--resume", folder.name, "--train.end", "none")
    trained("--run.key", "night", "--train.epochs", "2")  # that is done: another one
    other = max(f.parent for f in (place / ".headroom" / "runs").glob("*/start.json"))
    assert other != folder

    client = server.up()
    sending = [started("headroom.tracking.mlflow_sender", str(folder)) for _ in range(2)]
    ends = [(p.communicate(timeout=200), p.returncode)[1] for p in sending]
    assert 0 in ends  # the other one was told, or came when it was done
    trained("--train.epochs", "1")
    _until(lambda: is_sent(other))

    def mine() -> dict[str, Run]:
        runs = {r.data.tags["journal"]: r for r in _all(client)}
        return {name: run for name, run in runs.items() if name != "one"}

    _until(lambda: all(r.info.status == "FINISHED" for r in mine().values()))
    runs = mine()
    assert len(runs) == 3 and {folder.name, other.name} < runs.keys()
    run = runs[folder.name]
    assert run.data.tags["resumed"] == "1" and run.data.params["optim.lr"] and run.data.metrics
    assert f"/runs/{run.info.run_id}" in run.data.tags["mlflow.note.content"]
    assert run.info.start_time < runs[other.name].info.start_time


class Wrong(BaseHTTPRequestHandler):
    """Answers all it is asked with one code."""

    def do_GET(self) -> None:
        self.send_response(self.server.code)  # type: ignore[attr-defined]
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("code", "is_away"), [(401, False), (403, False), (404, False), (503, True)]
)
def test_a_server_that_refuses_is_wrong_and_one_that_can_not_now_is_away(
    tmp_path: Path, code: int, is_away: bool
) -> None:
    with HTTPServer(("127.0.0.1", 0), Wrong) as answering:
        answering.code = code  # type: ignore[attr-defined]
        threading.Thread(target=answering.serve_forever, daemon=True).start()
        where = _where(tmp_path, f"http://127.0.0.1:{answering.server_port}")
        with pytest.raises(Exception) as caught:  # noqa: PT011
            mlflow_store.open_experiment(where)
        answering.shutdown()
    assert mlflow_store.may_answer_later(caught.value, where) is is_away
    told = mlflow_store.explain_error(caught.value, where)
    assert (f"{code}" in told) and ("is away (" in told) is is_away
    required = where.model_copy(update={"required": True})
    assert not mlflow_store.may_answer_later(caught.value, required)
    assert "can't be used: MlflowException" in mlflow_store.explain_error(caught.value, required)


def test_a_folder_that_takes_no_file_is_told_by_its_own_setting(tmp_path: Path) -> None:
    """Of a full disk of artifacts the database was told, which was well."""
    (tmp_path / "weights").write_bytes(b"1")
    (tmp_path / "full").touch()  # no folder: nothing can be put in it, whoever tries
    where = _where(tmp_path, "sqlite:///mlflow.db")
    with pytest.raises(OSError) as caught:  # noqa: PT011
        os.rename(tmp_path / "weights", tmp_path / "full" / "weights")
    for name in ("artifacts", "runs"):
        full = where.model_copy(update={name: str(tmp_path / "full")})
        told = mlflow_store.explain_error(caught.value, full)
        said = f"{name}: {tmp_path}/full can't be written (Not a directory)"
        assert told == f"{said}; see to it, or make room"
    assert mlflow_store.explain_error(caught.value, where).startswith("tracking_uri: ")


def test_a_server_that_goes_while_it_answers_is_away(tmp_path: Path) -> None:
    """One of 64 runs that began at once was refused for that."""

    class Goes(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "99")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Goes) as going:
        threading.Thread(target=going.serve_forever, daemon=True).start()
        where = _where(tmp_path, f"http://127.0.0.1:{going.server_port}")
        with pytest.raises(Exception) as caught:  # noqa: PT011
            mlflow_store.open_experiment(where)
        going.shutdown()
    assert mlflow_store.may_answer_later(caught.value, where)
    assert "is away (" in mlflow_store.explain_error(caught.value, where)


def test_a_server_that_is_silent_is_not_waited_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(journal, "SILENT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Journal(_where(tmp_path, uri), tmp_path / "runs" / "one") as kept:
            kept.open(None)
            kept.create(name="first", params={}, tags={})
            kept.log({"train/loss": 0.5}, 1)
            with pytest.raises(TrackingError, match=f"{uri} gave no answer within 1 s"):
                kept.close(END)
    assert kept.notes[0].startswith(f"tracking_uri: {uri} gave no answer within 0 s; the run is ")
    (begin,) = read_begins(kept.folder)
    assert begin["name"] == "first" and read_end(kept.folder) == END and not is_sent(kept.folder)


DIES_IN_A_WRITE = """
import os, sqlite3, sys
database = sqlite3.connect(sys.argv[1])
database.execute("PRAGMA cache_size = 1")  # so that it writes before its end
database.execute("BEGIN")
rows = [(f"tag {i}", "x" * 500) for i in range(500)]
database.executemany("INSERT INTO experiment_tags VALUES (?, ?, 0)", rows)
os._exit(9)
"""


def test_what_a_killed_writer_has_left_half_written_is_rolled_back(tmp_path: Path) -> None:
    """ "attempt to write a readonly database", and the run could not be sent."""
    where, path = _where(tmp_path, f"sqlite:///{tmp_path}/mlflow.db"), tmp_path / "mlflow.db"
    mlflow_store.open_experiment(where)
    subprocess.run([sys.executable, "-c", DIES_IN_A_WRITE, path])
    assert path.with_name("mlflow.db-journal").stat().st_size
    mlflow_store.open_experiment(where)
    with sqlite3.connect(path) as opened:
        left = opened.execute("SELECT count(*) FROM experiment_tags WHERE key LIKE 'tag %'")
        assert left.fetchone() == (0,)


def test_of_a_database_that_went_its_own_words_are_told(tmp_path: Path) -> None:
    """It was `is away (())`."""
    where = _where(tmp_path, "postgresql://127.0.0.1:1/mlflow")
    gone = OperationalError("SELECT 1", {}, sqlite3.OperationalError("it is shutting down"))
    gone.__cause__, gone.__context__ = None, InvalidatePoolError()
    said = mlflow_store.explain_error(gone, where)
    assert said.endswith("is away ((sqlite3.OperationalError) it is shutting down)")


def test_a_database_that_is_locked_is_away_and_one_without_its_folder_is_wrong(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(mlflow_store, "LOCKED_S", 0.1)
    where = _where(tmp_path, f"sqlite:///{tmp_path}/mlflow.db")
    mlflow_store.open_experiment(where)
    with sqlite3.connect(tmp_path / "mlflow.db") as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(TrackingError) as caught:
            mlflow_store.open_experiment(where)
        other.rollback()
    assert mlflow_store.may_answer_later(caught.value, where)
    assert mlflow_store.explain_error(caught.value, where).endswith("is away (database is locked)")
    nowhere = _where(tmp_path, "sqlite:////proc/nowhere/mlflow.db")
    with pytest.raises(TrackingError) as caught:
        mlflow_store.open_experiment(nowhere)
    assert not mlflow_store.may_answer_later(caught.value, nowhere)


@pytest.mark.parametrize("by", ["the same training", "the next run"])
def test_a_sender_that_dies_when_the_run_is_made_makes_no_second_one(
    tmp_path: Path, monkeypatch, by: str
) -> None:
    """Between create_run and the first note of it the folder says that MLflow knows nothing."""
    where = _where(tmp_path, f"sqlite:///{tmp_path}/mlflow.db", experiment="twice")
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    begin = {"name": "n", "params": {"a": "1"}, "tags": {**GONE, "alike": ""}, "start_ms": 7}
    begin |= {"experiment": "twice"}
    first = make_event("begin", begin, unix_ms=5)
    (folder / LOG).write_bytes(first + make_line({"train/loss": 0.5}, 1, unix_ms=5))
    session = mlflow_sender.Session(lambda answer: None)
    session.hear({"where": where.model_dump()})
    assert session.client is not None
    with monkeypatch.context() as dying:
        dying.setattr(Sender, "tell_params", lambda *_: 1 / 0)
        session.hear({"folder": str(folder)})
        session.begin_patiently()
    assert json.loads((folder / "sent.json").read_text())["run_id"] == "" and session.sender is None
    assert session.held is not None
    session.held.close()
    if by == "the next run":
        send_left(session.client, where)
        status = "KILLED"
    else:
        session.held, session.retry_at, status = None, 0.0, "FINISHED"
        append_lines(folder, make_event("end", END, unix_ms=9))
        session.hear({"folder": str(folder)})
        session.held.close()
    (run,) = _all(session.client)
    assert (run.info.status, run.info.start_time, run.data.params) == (status, 7, {"a": "1"})
    assert _steps(session.client, run) == [1] and is_sent(folder)
    # Whoever comes then makes none either, nor where nobody knows how far it was sent.
    orphaned_runs.begin_run(session.client, where, folder)
    (folder / "sent.json").write_text("{")
    assert orphaned_runs.send_rest(Sender(session.client, where, folder, SendingState("", "")))
    assert len(_all(session.client)) == 1


def test_a_resumed_run_that_mlflow_has_is_told_of_its_end_later(tmp_path: Path) -> None:
    """What MLflow was told of is the part before."""
    where = _where(tmp_path, f"sqlite:///{tmp_path}/mlflow.db")
    folder = tmp_path / "runs" / "one"
    with Journal(where, folder) as first:
        first.open(None)
        first.create(name="n", params={}, tags=GONE)
        first.log({"train/loss": 0.5}, 1)
        first.close(END)
    away = where.model_copy(update={"tracking_uri": "http://127.0.0.1:9"})
    with Journal(away, folder) as second:
        second.open(None)
        second.reopen(first.ids, tags={**GONE, "resumed": "1"})
        second.log({"train/loss": 0.25}, 2)
        with pytest.raises(TrackingError, match="is away"):
            second.close(END)
    mlflow_store.remove_old_journals(Path(where.runs), keep=0)
    client = MlflowClient(where.tracking_uri)
    with open(folder / SENDING_LOCK) as lock:  # its sending process lets it go
        flock(lock, LOCK_EX)
    send_left(client, where)
    (run,) = _all(client)
    assert _steps(client, run) == [1, 2] and run.data.tags["resumed"] == "1"
    assert (
        run.info.status == "FINISHED" and json.loads((folder / "sent.json").read_text())["closed"]
    )


@pytest.mark.parametrize(
    ("said", "is_listening", "is_away"),
    [
        ("connection refused", False, True),
        ("password authentication failed", True, False),
        ('database "runs" does not exist', True, False),
        ("the database system is starting up", True, True),
    ],
)
def test_a_database_that_takes_connections_and_refuses_is_wrong(
    tmp_path: Path, said: str, is_listening: bool, is_away: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1] if is_listening else 9
        where = _where(tmp_path, f"postgresql://ann:s3cret@127.0.0.1:{port}/runs")
        error = OperationalError("SELECT 1", {}, Exception(said))
        assert mlflow_store.may_answer_later(error, where) is is_away


def test_journals_that_somebody_needs_are_not_swept(tmp_path: Path) -> None:
    """A run that was being resumed lost its folder, and one that was not done its checkpoints."""
    names = (
        "1 done",
        "2 goes on",
        "3 trains",
        "4 sends",
        "5 stopped",
        "6 unsent",
        "7 failed early",
    )
    for name in names:
        folder = tmp_path / name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / "step-000000000010.json").write_text("{}")
        is_done = name in ("1 done", "3 trains", "4 sends", "5 stopped")
        run = {"status": "FINISHED" if is_done else "KILLED"}
        if name == "5 stopped":
            run["stopped"] = "a signal"
        write_end(folder, run, is_sent=True)
        if name == "6 unsent":
            (folder / "sent.json").write_text(json.dumps({"closed": False}))
        if name == "7 failed early":
            shutil.rmtree(folder / "checkpoints")
        assert bool(list_steps(folder / "checkpoints")) is (name != "7 failed early")
    with (
        FileLock(tmp_path / "3 trains" / "training.lock") as one,
        FileLock(tmp_path / "4 sends" / "sending.lock") as two,
    ):
        # What another process would hold: of this one, each opening of a file is by itself.
        assert one.take() and two.take()
        mlflow_store.remove_old_journals(tmp_path, keep=0)
    assert sorted(f.name for f in tmp_path.iterdir()) == list(names[1:-1])
