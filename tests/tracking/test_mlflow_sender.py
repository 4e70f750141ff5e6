"""The journal and the sending process together, on a real SQLite MLflow."""

import errno
import json
import math
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from alembic import command
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.store.db.utils import InitialBase, _get_alembic_config
from sqlalchemy import create_engine
from sqlalchemy.exc import IntegrityError, OperationalError

from headroom.tracking import mlflow_sender, mlflow_store, orphaned_runs
from headroom.tracking.journal import Journal, RunGone, SenderEnded, start_sender
from headroom.tracking.query_runs import BEGINNING, HISTORY, accept_level, read_history
from headroom.tracking.tracking_settings import TrackingError, TrackingSettings
from tests.conftest import PYTHON, ROOT
from tests.run_folders import LOG, is_held, make_event, make_line, write_end, write_start


def _where(tmp_path: Path, **more) -> TrackingSettings:
    return TrackingSettings(
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db",
        artifacts=str(tmp_path / "artifacts"),
        runs=str(tmp_path / "runs"),
        flush_s=0.2,
        send_later_s=0,
        **more,
    )


def _run(status: str = "FINISHED", **more) -> dict:
    return {"status": status, "name": "n", "params": {}, "tags": {}, "metrics": {}, **more}


def _until(what, *, timeout_s: float = 60):
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        found = what()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError("it did not happen")


FORKS = """
import ctypes, os, sys, time
from pathlib import Path
from headroom.tracking.journal import Journal
from headroom.tracking.tracking_settings import TrackingSettings
where = TrackingSettings.model_validate_json(sys.argv[1])
with Journal(where, Path(where.runs) / "one") as journal:
    journal.open(None)
    journal.create("one", params={}, tags={})
    if ctypes.CDLL(None).fork() == 0:  # Python's own hooks do not hear of it
        os.execv("/bin/sleep", ["sleep", "60"]) if len(sys.argv) > 2 else time.sleep(60)
        os._exit(0)
    print(journal.run_id, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="fork of the C library")
def test_a_run_whose_pipe_a_forked_process_holds_ends_with_its_own(tmp_path: Path) -> None:
    """It said RUNNING until that one ended."""
    where = _where(tmp_path)
    with subprocess.Popen(
        [PYTHON, "-c", FORKS, where.model_dump_json()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as training:
        assert training.stdout is not None
        run_id = training.stdout.readline().strip()
        try:
            training.kill()
            client = MlflowClient(where.tracking_uri)
            _until(lambda: client.get_run(run_id).info.status == "KILLED", timeout_s=30)
        finally:
            os.killpg(training.pid, signal.SIGKILL)


def test_the_times_of_a_journal_never_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that went on by a clock that had been set back, MLflow showed the old end: of the
    same step it takes the point of the later time."""
    where, real, wrong_s = _where(tmp_path), time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + wrong_s[0])
    with Journal(where, tmp_path / "runs" / "one") as journal:
        journal.open(None)
        journal.create("one", params={}, tags={})
        journal.log({"time/total_s": 1.0}, 0)
        wrong_s[0] = -3600
        journal.log({"time/total_s": 2.0}, 0)
        journal.close(_run())
    with Journal(where, tmp_path / "runs" / "one") as again:
        again.open(None)
        again.reopen(journal.ids, tags={})
        again.log({"time/total_s": 3.0}, 0)
        again.close(_run())
    metrics = MlflowClient(where.tracking_uri).get_run(journal.run_id).data.metrics
    assert metrics["time/total_s"] == 3.0


def test_two_copies_of_a_folder_never_both_go_on_with_their_run(tmp_path: Path) -> None:
    """At once, the second ended with exit code 2 by luck, and blamed the tracking_uri."""
    where, gone = _where(tmp_path), []
    with Journal(where, tmp_path / "runs" / "one") as journal:
        journal.open(None)
        journal.create("one", params={}, tags={})
        write_start(journal.folder, journal.run_id, experiment_id=journal.experiment_id)
        journal.close(_run("KILLED"))
    _until(lambda: not is_held(journal.folder / "sending.lock"))
    shutil.copytree(tmp_path / "runs", tmp_path / "copy")
    copies = [where, where.model_copy(update={"runs": str(tmp_path / "copy")})]
    together = threading.Barrier(2)

    def go_on(where: TrackingSettings) -> None:
        folder = Path(where.runs) / "one"
        claim = {"marks": [folder.parent.name], "by": f"{where.runs} from step 7"}
        with Journal(where, folder) as again:
            again.open(None)
            together.wait(60)
            try:
                again.reopen(journal.ids, tags={}, claim=claim)
            except RunGone as error:
                gone.append(str(error))
            else:
                again.log({"train/loss": 1.0}, 8)
                again.close(_run())

    both = [threading.Thread(target=go_on, args=(copy,)) for copy in copies]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert gone and all("in another copy of this folder" in text for text in gone)
    history = MlflowClient(where.tracking_uri).get_metric_history(journal.run_id, "train/loss")
    assert len(history) == 2 - len(gone)


@pytest.mark.parametrize("lost", ["all", "newest"])
def test_what_mlflow_has_of_a_step_is_not_sent_anew_where_the_log_was_lost(
    tmp_path: Path, lost: str
) -> None:
    """A bucket has the log of a run when that is closed, and a copy what it had: gone on with from
    there, each step since the checkpoint stood twice in MLflow."""
    where = _where(tmp_path)
    folder, copy = tmp_path / "runs" / "one", tmp_path / "copy"
    client = MlflowClient(where.tracking_uri)

    def read_steps() -> list[int]:
        return sorted(m.step for m in client.get_metric_history(ids["run_id"], "train/loss"))

    with Journal(where, folder) as journal:
        journal.open(None)
        journal.create("one", params={}, tags={})
        ids = journal.ids
        for step in range(1, 11):
            journal.log({"train/loss": 1 / step}, step)
            if step == 3 and lost == "newest":
                _until(lambda: len(read_steps()) == 3)
                shutil.copytree(folder, copy)
        _until(lambda: len(read_steps()) == 10)
        if lost == "all":
            shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(LOG))
    _until(lambda: not is_held(folder / "sending.lock"))
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    with Journal(where, folder) as again:
        again.open(None)
        again.reopen(ids, tags={"resumed": "1"})
        _until(lambda: client.get_run(ids["run_id"]).data.tags.get("resumed") == "1")
        for step in range(6, 13):
            again.log({"train/loss": 1 / step}, step)
        again.close(_run())
    assert read_steps() == list(range(1, 13))


def test_a_copy_of_a_folder_whose_run_is_being_trained_here_is_refused(tmp_path: Path) -> None:
    """It went on beside the other, and each ended the other's run."""
    where = _where(tmp_path)
    me = psutil.Process()
    tags = {"host": socket.gethostname(), "pid": str(me.pid)}
    tags |= {"process.started_at": str(me.create_time())}
    with Journal(where, tmp_path / "runs" / "one") as journal:
        journal.open(None)
        journal.create("one", params={}, tags=tags)
        shutil.copytree(tmp_path / "runs" / "one", tmp_path / "copy" / "one")
        before = (tmp_path / "copy" / "one" / LOG).read_bytes()
        elsewhere = where.model_copy(update={"runs": str(tmp_path / "copy")})
        with Journal(elsewhere, tmp_path / "copy" / "one") as again:
            again.open(None)
            claim = {"marks": ["a"], "by": "somebody"}
            with pytest.raises(RunGone, match=f"is being trained by process {me.pid}, in another"):
                again.reopen(journal.ids, tags={**tags, "pid": "1"}, claim=claim)
        assert (tmp_path / "copy" / "one" / LOG).read_bytes() == before  # it says nothing of that
        journal.close(_run())


def test_a_step_that_is_logged_late_has_the_time_when_it_was_taken(tmp_path: Path) -> None:
    with Journal(_where(tmp_path), tmp_path / "runs" / "one") as journal:
        journal.open(None)
        journal.create("one", params={}, tags={})
        for step, age_s in ((1, 60.0), (2, 40.0), (3, 50.0), (4, 0.0)):
            journal.log({"train/loss": 0.5}, step, age_s=age_s)
        journal.close(_run())
    lines = (tmp_path / "runs" / "one" / "events.jsonl").read_text().splitlines()
    times = [json.loads(line)["t"] for line in lines if '"metrics"' in line][:4]
    assert times[1] - times[0] == pytest.approx(20_000, abs=2_000)
    assert times[2] == times[1], "it never goes back"
    assert times[3] - times[1] == pytest.approx(40_000, abs=2_000)


def test_a_run_ends_after_it_began_by_a_clock_that_was_set_back(tmp_path: Path) -> None:
    """Set back by an hour in mid-run it ended 59 minutes before it began, and how long it took in
    all stayed that of the part before."""
    where, folder = _where(tmp_path), tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    start_ms, run_id = int(time.time() * 1000) + 3_600_000, ""
    begin = {"name": "n", "params": {}, "tags": {"alike": ""}, "start_ms": start_ms}
    for times, total_s in enumerate((5.0, 9.0), start=1):
        session = mlflow_sender.Session(lambda answer: None)
        session.hear({"where": where.model_dump()})
        with open(folder / LOG, "ab", buffering=0) as log:
            log.write(make_event("begin", begin, unix_ms=start_ms))
            session.hear({"folder": str(folder), "run_id": run_id, "wanted": []})
            assert session.sender is not None and session.client is not None
            run_id = session.sender.state.run_id
            at_ms = start_ms + 1000 * times
            log.write(make_line({"train/loss": 0.5}, times, unix_ms=at_ms))
            end = _run(metrics={"time/total_s": total_s})
            log.write(make_event("end", end, unix_ms=at_ms))
        session.hear({"folder": str(folder)})
        run = session.client.get_run(run_id)
        assert run.info.end_time > at_ms
        assert run.data.metrics["time/total_s"] >= total_s
        session.end()


def test_a_run_is_kept_whole(tmp_path: Path) -> None:
    where = _where(tmp_path, experiment="default one")
    folder = tmp_path / "runs" / "one"
    with Journal(where, folder) as journal:
        journal.open("chosen")
        params = {"optim.lr": 0.1, "run.name": None, "model.args": {"hidden": [3]}}
        journal.create(name="first", params=params, tags={"device": "cpu", "long": "x" * 9000})
        for step in range(1, 2501):
            journal.log({"train/loss": 1 / step}, step)
        journal.log({"train/grad_norm": math.inf, "val/loss": math.nan}, 2500)
        (folder / "config.yaml").write_text("optim: {lr: 0.1}\n")
        journal.close(_run(tags={"precision": "fp32", "end.reason": "none"}))
    client = MlflowClient(where.tracking_uri)
    run = client.get_run(journal.run_id)
    assert client.get_experiment(run.info.experiment_id).name == "chosen"
    assert run.info.status == "FINISHED" and run.info.end_time
    assert run.data.params == {
        "optim.lr": "0.1",
        "run.name": "",
        "model.args": "{'hidden': [3]}",
    }
    assert {k: run.data.tags[k] for k in ("device", "precision", "end.reason")} == {
        "device": "cpu",
        "precision": "fp32",
        "end.reason": "none",
    }
    assert "mlflow.note.content" in run.data.tags
    losses = client.get_metric_history(journal.run_id, "train/loss")
    assert [(m.step, m.value) for m in losses] == [(s, 1 / s) for s in range(1, 2501)]
    assert "train/grad_norm" not in run.data.metrics  # MLflow would make 1.797e308 of it
    assert math.isnan(run.data.metrics["val/loss"])
    files = {f.path for f in client.list_artifacts(journal.run_id)}
    assert {"events.jsonl", "config.yaml", "environment.txt", "report.html"} <= files


DIES = """
import os, signal, sys, time
from pathlib import Path
from headroom.tracking.journal import Journal
from headroom.tracking.tracking_settings import TrackingSettings
where = TrackingSettings.model_validate_json(sys.argv[1])
journal = Journal(where, Path(where.runs) / "dying").__enter__()
journal.open(None)
journal.create(name="dying", params={}, tags={})
for step in range(1, 1001):
    journal.log({"train/loss": 1 / step}, step)
print(journal.run_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_loses_no_metric_and_its_run_is_ended(tmp_path: Path) -> None:
    where = _where(tmp_path)
    command = [sys.executable, "-c", DIES, where.model_dump_json()]
    warm = {**os.environ, "TESTS_WARM_KIND": "mlflow"}
    died = subprocess.run(command, env=warm, capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    client, run_id = MlflowClient(where.tracking_uri), died.stdout.strip()
    _until(lambda: client.get_run(run_id).info.status != "RUNNING")
    run = client.get_run(run_id)
    assert run.info.status == "KILLED" and run.info.end_time
    assert run.data.tags["end.reason"] == "its process was gone"
    assert len(client.get_metric_history(run_id, "train/loss")) == 1000


def test_the_next_run_ends_those_whose_process_is_gone_and_no_others(tmp_path: Path) -> None:
    where = _where(tmp_path)
    with Journal(where, tmp_path / "runs" / "one") as journal:
        journal.open(None)
        journal.create(name="first", params={}, tags={})
        journal.close(_run())
    client = MlflowClient(where.tracking_uri)
    here, me = socket.gethostname(), {"pid": str(os.getpid())}
    began = {"process.started_at": str(psutil.Process().create_time())}
    cases = {
        "gone": {"host": here, "pid": "4194304", "process.started_at": "1.0"},
        "pid of another by now": {"host": here, **me, "process.started_at": "1.0"},
        "alive": {"host": here, **me, **began},
        "elsewhere": {"host": "another-host", "pid": "4194304", "process.started_at": "1.0"},
        "not ours": {},
        "gone, with a tag that leads astray": {
            "host": here,
            "pid": "4194304",
            "process.started_at": "1.0",
            "journal": "../../..",
        },
    }
    ids = {
        name: client.create_run(journal.experiment_id, tags=tags).info.run_id
        for name, tags in cases.items()
    }
    with Journal(where, tmp_path / "runs" / "two") as second:
        second.open(None)
        second.create(name="second", params={}, tags={})
        for name in ("gone", "pid of another by now", "gone, with a tag that leads astray"):
            _until(lambda name=name: client.get_run(ids[name]).info.status != "RUNNING")
        second.close(_run())
    status = {name: client.get_run(run_id).info.status for name, run_id in ids.items()}
    assert status == {
        "gone": "KILLED",
        "gone, with a tag that leads astray": "KILLED",
        "pid of another by now": "KILLED",
        "alive": "RUNNING",
        "elsewhere": "RUNNING",
        "not ours": "RUNNING",
    }


def test_a_run_waits_for_no_more_than_one_of_those_that_were_left(tmp_path: Path) -> None:
    """After 300 dead runs the end of the next one came when 100 of them had been ended."""
    where = _where(tmp_path)
    folder = tmp_path / "runs" / "one"
    session = mlflow_sender.Session(lambda answer: None)
    session.hear({"where": where.model_dump()})
    client, experiment_id = session.client, session.experiment_id
    assert client is not None
    gone = {"host": socket.gethostname(), "pid": "4194304", "process.started_at": "1.0"}
    ids = [client.create_run(experiment_id, tags=gone).info.run_id for _ in range(4)]
    begin = {"name": "n", "params": {}, "tags": {"alike": ""}, "start_ms": 7}
    folder.mkdir(parents=True)
    (folder / LOG).write_bytes(make_event("begin", begin, unix_ms=7))
    session.hear({"folder": str(folder), "wanted": []})

    def ended() -> int:
        return [client.get_run(run_id).info.status for run_id in ids].count("KILLED")

    at_each = []
    for _ in range(3):
        session.idle()
        at_each.append(ended())
    assert at_each == [0, 1, 2]
    write_end(folder, _run())
    session.hear({"folder": str(folder)})
    assert ended() == 2
    session.end()
    assert ended() == 4


@pytest.mark.parametrize("is_again", [False, True], ids=["ended since", "gone on with since"])
def test_a_run_that_was_left_is_looked_at_anew_when_it_is_its_turn(
    tmp_path: Path, is_again: bool
) -> None:
    """Minutes may pass until then, in which somebody else ends it, or goes on with it."""
    where = _where(tmp_path)
    client, experiment_id = mlflow_store.open_experiment(where)
    gone = {"host": socket.gethostname(), "pid": "4194304", "process.started_at": "1.0"}
    ids = {client.create_run(experiment_id, tags=gone).info.run_id for _ in range(2)}
    left = orphaned_runs.send_left_runs(client, where, [experiment_id])
    (other,) = ids - {next(left).run_id}
    if is_again:
        began_at = str(psutil.Process().create_time())
        for name, value in {"pid": str(os.getpid()), "process.started_at": began_at}.items():
            client.set_tag(other, name, value)
    else:
        client.set_terminated(other, "FAILED")
    assert list(left) == []


def test_what_could_not_be_sent_is_kept_and_sent_later(tmp_path: Path) -> None:
    where = _where(tmp_path, give_up_s=0.5)
    folder = tmp_path / "runs" / "one"
    with Journal(where, folder) as journal:
        journal.open(None)
        journal.create(name="first", params={"a": 1}, tags={})
        # A store that fails at once; MLflow itself waits 20 s for a lock.
        with closing(sqlite3.connect(tmp_path / "mlflow.db")) as broken:
            broken.execute("ALTER TABLE metrics RENAME TO gone")
            journal.log({"train/loss": 0.5}, 1)
            with pytest.raises(TrackingError, match="tracking_uri: .*no such table: metrics"):
                journal.close(_run())
            broken.execute("ALTER TABLE gone RENAME TO metrics")
    environment = {**os.environ, "MLFLOW_TRACKING_URI": where.tracking_uri}
    client = MlflowClient(where.tracking_uri)
    _until(lambda: client.get_run(journal.run_id).info.status == "FINISHED")
    _until(lambda: not is_held(folder / "sending.lock"))
    # It was sent when the training process let go; sending it once more does no harm.
    command = [sys.executable, "-m", "headroom.tracking.mlflow_sender", str(folder)]
    sent = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert sent.returncode == 0, sent.stderr
    assert client.get_run(journal.run_id).info.status == "FINISHED"
    losses = client.get_metric_history(journal.run_id, "train/loss")
    assert [m.value for m in losses] == [0.5]
    assert json.loads((folder / "sent.json").read_text())["closed"]


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("http://127.0.0.1:9", "tracking_uri: http://127.0.0.1:9 can't be used"),
        ("postgresql://ann:s3cret@127.0.0.1:9/x", r"tracking_uri: postgresql://ann:\*\*\*@"),
        ("sqlite:////proc/nowhere/mlflow.db", "tracking_uri: .* can't be used as a database"),
    ],
)
def test_a_place_that_is_required_and_cannot_be_reached_is_told_before_the_run(
    tmp_path: Path, uri: str, message: str
) -> None:
    where = _where(tmp_path, required=True).model_copy(update={"tracking_uri": uri})
    with Journal(where, tmp_path / "runs" / "one") as journal:
        journal.open(None)
        with pytest.raises(TrackingError, match=message) as caught:
            journal.create(name="first", params={}, tags={})
    assert "s3cret" not in str(caught.value)
    assert not (tmp_path / "runs" / "one").exists()


def test_runs_on_a_mounted_bucket_that_takes_no_lock_are_the_setting_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a mount refuses when a file is closed or locked, and names none: the refusal blamed the
    tracking_uri."""

    def refuse(file, kind: int) -> None:
        if Path(file.name).name == "store.lock":
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(mlflow_store, "flock", refuse)
    where = _where(tmp_path)
    with pytest.raises(OSError) as caught:
        mlflow_store.open_experiment(where)
    told = mlflow_store.explain_error(caught.value, where)
    assert told.startswith(f"runs: {tmp_path}/runs can't be written (Operation not supported)")


def test_the_telemetry_of_mlflow_is_left_out() -> None:
    """Without a network its thread takes a variable out of the environment that a request reads:
    one of 64 runs that began at once was refused for that."""
    code = (
        "import os, headroom.tracking.mlflow_sender as _; from mlflow.telemetry import client as c"
    )
    code += "; print(os.environ['MLFLOW_DISABLE_TELEMETRY'], c.get_telemetry_client())"
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["true", "None"]


def test_no_password_reaches_the_log_of_the_sending_process(tmp_path: Path) -> None:
    uri = "mysql+pymysql://ann:s3cret@127.0.0.1:9/x"
    where = _where(tmp_path).model_copy(update={"tracking_uri": uri})
    with Journal(where, tmp_path / "runs" / "one") as journal:
        journal.open(None)
        with pytest.raises(TrackingError) as caught:
            journal.create(name="first", params={}, tags={})
    assert "s3cret" not in str(caught.value)
    assert "s3cret" not in (tmp_path / "runs" / "tracking.log").read_text()


def test_a_file_that_is_no_database_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("my notes, not a database\n" * 99)
    with Journal(_where(tmp_path), tmp_path / "runs" / "one") as journal:
        journal.open(None)
        with pytest.raises(TrackingError, match="can't be used as a database: file is not"):
            journal.create(name="first", params={}, tags={})
    assert (tmp_path / "mlflow.db").read_text().startswith("my notes")


def test_a_database_of_an_older_mlflow_is_kept_beside_the_one_it_becomes(tmp_path: Path) -> None:
    """It was brought up to date in place, without a word, and the older MLflow refused it."""
    where, path = _where(tmp_path), tmp_path / "mlflow.db"
    engine = create_engine(f"sqlite:///{path}")
    config = _get_alembic_config(str(engine.url))
    with engine.begin() as connection:
        InitialBase.metadata.create_all(connection)
        config.attributes["connection"] = connection
        command.upgrade(config, "0584bdc529eb")
    engine.dispose()
    with Journal(where, tmp_path / "runs" / "one") as journal:
        journal.open(None)
        journal.create(name="first", params={}, tags={})
        journal.close(_run())
    (told,) = journal.notes
    kept = tmp_path / "mlflow.db.0584bdc529eb"
    assert "is of an older MLflow" in told and told.endswith(f"it is kept as {kept}")
    with closing(sqlite3.connect(kept)) as old:
        assert old.execute("SELECT * FROM alembic_version").fetchall() == [("0584bdc529eb",)]
    assert MlflowClient(where.tracking_uri).get_run(journal.run_id).info.status == "FINISHED"


def test_a_deleted_experiment_is_refused_with_its_remedy(tmp_path: Path) -> None:
    where = _where(tmp_path)
    for attempt in range(2):
        with Journal(where, tmp_path / "runs" / str(attempt)) as journal:
            journal.open("gone")
            if attempt:
                with pytest.raises(TrackingError, match="run.experiment: 'gone' was deleted"):
                    journal.create(name="first", params={}, tags={})
            else:
                journal.create(name="first", params={}, tags={})
                journal.close(_run())
                MlflowClient(where.tracking_uri).delete_experiment(journal.experiment_id)


def test_a_run_hears_what_the_newest_finished_runs_alike_measured(tmp_path: Path) -> None:
    where = _where(tmp_path, experiment="past")

    def run(alike: str, measured: dict[str, float], status: str = "FINISHED") -> dict[str, float]:
        with Journal(where, tmp_path / "runs" / f"{alike}-{len(measured)}-{status}") as journal:
            journal.open(None)
            past = journal.create(name="n", params={}, tags={"alike": alike}, wanted=("a", "b"))
            journal.log(measured, 1)
            journal.close(_run(status))
        return past

    assert run("x", {"a": 1.0, "b": 2.0}) == {}
    assert run("y", {"a": 9.0}) == {}
    assert run("x", {"a": 3.0}) == {"a": 1.0, "b": 2.0}
    assert run("x", {"a": 7.0}, "FAILED") == {"a": 3.0, "b": 2.0}
    assert run("x", {}) == {"a": 3.0, "b": 2.0}


@pytest.mark.parametrize("when", ["in mid-run", "at the end"])
def test_a_sending_process_that_is_killed_is_replaced_and_nothing_is_lost(
    tmp_path: Path, when: str
) -> None:
    """The run stayed RUNNING without a metric, and the command said nothing."""
    where = _where(tmp_path)
    with Journal(where, tmp_path / "runs" / "one") as journal:
        journal.open(None)
        journal.create(name="first", params={}, tags={})
        for step in range(1, 51):
            journal.log({"train/loss": 1 / step}, step)
        assert journal._sender is not None
        os.kill(journal._sender.pid, signal.SIGKILL)
        if when == "in mid-run":
            _until(lambda: journal.notes)
        for step in range(51, 101):
            journal.log({"train/loss": 1 / step}, step)
        journal.close(_run())
    told = "the sending process ended in mid-run (exit code -9); it is started again"
    assert journal.notes == [told]
    client = MlflowClient(where.tracking_uri)
    assert client.get_run(journal.run_id).info.status == "FINISHED"
    losses = client.get_metric_history(journal.run_id, "train/loss")
    assert [m.step for m in losses] == list(range(1, 101))


# A sending process that is killed as soon as MLflow has the run, before it can say so.
KILLED_AT_CREATION = """
import os, signal
from headroom.tracking import run_sender, mlflow_sender
made = run_sender.MlflowClient.create_run
def create_run(*args):
    made(*args)
    os.kill(os.getpid(), signal.SIGKILL)
run_sender.MlflowClient.create_run = create_run
mlflow_sender.main()
"""


@pytest.mark.parametrize("when", ["before the creation", "at the creation"])
def test_a_sending_process_that_is_killed_as_the_run_begins_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The command ended with exit code 2, as if its user had asked for what can't be."""
    spawned = [start_sender]
    if when == "at the creation":
        spawned.append(lambda where: _sender("-c", KILLED_AT_CREATION))
    monkeypatch.setattr(
        "headroom.tracking.journal.start_sender",
        lambda where: (spawned.pop() if len(spawned) > 1 else spawned[0])(where),
    )
    where = _where(tmp_path)
    with Journal(where, tmp_path / "runs" / "one") as journal:
        if when == "before the creation":
            assert journal._sender is not None
            os.kill(journal._sender.pid, signal.SIGKILL)
        journal.open(None)
        journal.create(name="first", params={"a": 1}, tags={"device": "cpu"})
        journal.log({"train/loss": 0.5}, 1)
        journal.close(_run())
    assert journal.notes == [
        "the sending process ended before the run began (exit code -9); it is started again"
    ]
    client = MlflowClient(where.tracking_uri)
    (run,) = client.search_runs([journal.experiment_id])
    assert (run.info.run_id, run.info.status) == (journal.run_id, "FINISHED")
    assert run.data.params == {"a": "1"} and run.data.metrics["train/loss"] == 0.5


def _sender(*words: str) -> "subprocess.Popen[str]":
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([PYTHON, *words], text=True, env=env, **pipes)


def test_a_sending_process_that_never_lives_is_no_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headroom.tracking.journal.RESTARTS_AT_START", 1)
    monkeypatch.setattr(
        "headroom.tracking.journal.start_sender", lambda where: _sender("-c", "raise SystemExit(3)")
    )
    with Journal(_where(tmp_path), tmp_path / "runs" / "one") as journal:
        journal.open(None)
        words = (
            r"the sending process ended before the run began \(exit code 3\); see .*tracking.log"
        )
        with pytest.raises(SenderEnded, match=words) as caught:
            journal.create(name="first", params={}, tags={})
    assert not isinstance(caught.value, ValueError)  # which would be bad input
    assert not (tmp_path / "runs" / "one").exists()


def test_a_sending_process_that_ends_again_and_again_is_told(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("headroom.tracking.journal.RESTARTS", 1)
    monkeypatch.setattr("headroom.tracking.journal.CLOSE_S", 30)
    where = _where(tmp_path, give_up_s=0.1)
    with Journal(where, tmp_path / "runs" / "one") as journal:
        journal.open(None)
        journal.create(name="first", params={}, tags={})
        first = journal._sender
        assert first is not None
        first.kill()
        _until(lambda: journal._sender is not first)
        assert journal._sender is not None
        journal._sender.kill()
        with pytest.raises(TrackingError, match="the sending process ended in mid-run .*; see"):
            journal.close(_run())
    assert len(journal.notes) == 2


def test_of_sending_processes_that_lived_any_number_may_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a training of weeks the sixth was the last."""
    monkeypatch.setattr("headroom.tracking.journal.RESTARTS", 1)
    monkeypatch.setattr("headroom.tracking.journal.LIVED_S", 0.0)
    with Journal(_where(tmp_path), tmp_path / "runs" / "one") as journal:
        journal.open(None)
        journal.create(name="first", params={}, tags={})
        for _ in range(3):
            old = journal._sender
            assert old is not None
            old.kill()
            _until(lambda old=old: journal._sender is not old)
        journal.close(_run())
    assert len(journal.notes) == 3


@pytest.mark.parametrize("is_killed", [False, True], ids=["", "with its sending process"])
def test_a_folder_that_is_removed_in_mid_run_is_written_anew(
    tmp_path: Path, is_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was FINISHED without a metric."""
    monkeypatch.setattr("headroom.tracking.journal.LOOK_S", 0.0)
    where = _where(tmp_path)
    with Journal(where, tmp_path / "runs" / "one") as journal:
        journal.open(None)
        journal.create(name="first", params={}, tags={})
        for step in range(1, 11):
            journal.log({"train/loss": 1 / step}, step)
        shutil.rmtree(tmp_path / "runs")
        for step in range(11, 21):
            journal.log({"train/loss": 1 / step}, step)
        if is_killed:
            assert journal._sender is not None
            journal._sender.kill()
        shutil.rmtree(tmp_path / "runs")
        journal.close(_run())
    removed = [note for note in journal.notes if "was removed in mid-run" in note]
    assert len(removed) == 2 and len(journal.notes) == 2 + is_killed
    client = MlflowClient(where.tracking_uri)
    assert len(client.search_runs([journal.experiment_id])) == 1
    assert client.get_run(journal.run_id).info.status == "FINISHED"
    losses = client.get_metric_history(journal.run_id, "train/loss")
    assert [m.step for m in losses] == list(range(1, 21))
    assert "events.jsonl" in {f.path for f in client.list_artifacts(journal.run_id)}


# As in a database that is no file here: MLflow makes its tables itself.
FIRST = """
import sys
from headroom.tracking import mlflow_store as tracking_store
from headroom.tracking.tracking_settings import TrackingSettings
tracking_store._provide_database = lambda *_: None
where = TrackingSettings.model_validate_json(sys.argv[1])
print(tracking_store.open_experiment(where)[1])
"""


def test_the_first_users_of_a_new_store_at_once_all_get_it(tmp_path: Path) -> None:
    """Of eight on a new PostgreSQL database MLflow's own first use refused seven."""
    command = [sys.executable, "-c", FIRST, _where(tmp_path).model_dump_json()]
    warm = {**os.environ, "TESTS_WARM_KIND": "mlflow"}
    started = [subprocess.Popen(command, env=warm, stdout=subprocess.PIPE) for _ in range(4)]
    told = {process.communicate(timeout=300)[0] for process in started}
    assert told == {b"1\n"}


def test_a_store_that_another_host_is_making_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = IntegrityError("CREATE TABLE experiments", {}, Exception("pg_type_typname_nsp_index"))
    answers: list[object] = [error, MlflowException("Detected out-of-date database schema"), 7]

    def asked(where: TrackingSettings) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(mlflow_store, "AGAIN_S", (0.0, 0.0))
    monkeypatch.setattr(mlflow_store, "_find_experiment", asked)
    there = _where(tmp_path).model_copy(update={"tracking_uri": "postgresql://me@host/runs"})
    assert mlflow_store._find_experiment_patiently(there) == 7
    monkeypatch.setattr(mlflow_store, "AWAY_S", -1.0)  # it took so long to say that it is away
    answers[:] = [OperationalError("SELECT", {}, Exception("no route to host"))]
    with pytest.raises(OperationalError, match="no route"):
        mlflow_store._find_experiment_patiently(there)


def test_a_run_hears_of_the_runs_that_it_is_compared_with(tmp_path: Path) -> None:
    """Those that a gate has judged, whatever it said, the newest first."""
    where = _where(tmp_path, experiment="history")

    def run(of: str, gate: str, value: float, status: str = "FINISHED") -> Any:
        with Journal(where, tmp_path / "runs" / f"{of}-{value}") as journal:
            journal.open(None)
            journal.create(name="n", params={}, tags={"gate.of": of})
            found = journal.wait_for_history()
            journal.log({"a": value}, 1)
            tags = {"gate": gate} if gate else {}
            journal.close({**_run(status), "tags": tags})
        return found

    assert run("x", "new", 1.0) == []
    run("y", "ok", 2.0)
    run("x", "", 3.0)
    run("x", "ok", 4.0, "FAILED")
    run("x", "slower", 5.0)
    found = run("x", "ok", 6.0)
    assert [(one["gate"], one["metrics"]["a"]) for one in found] == [("slower", 5.0), ("new", 1.0)]


def _make_judged(client: MlflowClient, gates: str) -> list[str]:
    """Newer runs of one kind, the oldest first: n is new, s is slower, o is ok."""
    words, found = {"n": "new", "s": "slower", "o": "ok"}, []
    for at, gate in enumerate(gates, len(client.search_runs(["0"]))):
        given = {"gate.of": "x", "gate": words[gate], "gate.why": f"because {at}"}
        run = client.create_run("0", start_time=1000 + at, tags=given, run_name=f"r{at}")
        client.set_terminated(run.info.run_id)
        found.append(run.info.run_id)
    return found


def test_a_history_ends_with_the_runs_with_which_it_began(tmp_path: Path) -> None:
    """Of a decay over 100 runs the last 40 tell nothing."""
    client, _ = mlflow_store.open_experiment(_where(tmp_path))
    _make_judged(client, "nnnnno" + "s" * 9 + "n" * 6 + "o" * 39)
    found = read_history(client, "0", "x")
    assert found is not None and len(found) == HISTORY and found[-1]["gate"] == "new"
    _make_judged(client, "o")
    found = read_history(client, "0", "x")
    assert found is not None
    gates = [one["gate"] for one in found]
    assert gates == ["ok"] * HISTORY + ["new"] * BEGINNING


def test_a_level_that_is_accepted_is_where_history_begins(tmp_path: Path) -> None:
    """Accepted after some nights, it is that of all of them."""
    where = _where(tmp_path)
    client, _ = mlflow_store.open_experiment(where)
    ids = _make_judged(client, "nnnnnooosss")
    unjudged = client.create_run("0", start_time=2000, tags={"gate.of": "x"}).info.run_id
    client.set_terminated(unjudged)
    assert accept_level(where, ids[8]) == ["r10", "r9", "r8"]
    found = read_history(client, "0", "x")
    assert found is not None
    assert [one["gate"] for one in found] == ["new"] * 3 + ["ok"] * 3 + ["new"] * 5
    why = client.get_run(ids[9]).data.tags["gate.why"]
    assert why == "accepted as the level from now on; it was slower: because 9"
    with pytest.raises(TrackingError, match="was judged by no gate; it is FINISHED"):
        accept_level(where, unjudged)
    with pytest.raises(TrackingError, match="--accept nowhere: no such run in sqlite"):
        accept_level(where, "nowhere")
