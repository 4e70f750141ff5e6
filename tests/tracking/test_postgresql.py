"""Runs on a real PostgreSQL, written to by their own sending processes: whole, once, and not lost
where the database is killed."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from fcntl import LOCK_EX, flock
from pathlib import Path

import pytest
from mlflow import MlflowClient

from headroom.tracking.journal import Journal
from headroom.tracking.tracking_settings import TrackingError, TrackingSettings
from tests.conftest import desk_environment
from tests.run_folders import SENDING_LOCK, read_points
from tests.team import Postgres, find_postgres_programs, run_postgres

pytest.importorskip("psycopg2", reason="headroom[team] is not installed")
if find_postgres_programs() is None:
    pytest.skip("PostgreSQL is not installed", allow_module_level=True)

END = {"status": "FINISHED", "name": "n", "params": {}, "tags": {}, "metrics": {}}
AT_ONCE, STEPS = 64, 20
METRICS = ("train/loss", "train/step_ms", "memory/peak_mib")


@pytest.fixture(scope="module")
def database() -> Iterator[Postgres]:
    with run_postgres(secrets.token_urlsafe(24)) as made:
        yield made


# Each run's folder has a name of its own there: by it MLflow is asked for a run, where its sending
# process may have died.
def _where(tmp_path: Path, uri: str, **more: object) -> TrackingSettings:
    places = {"artifacts": str(tmp_path / "artifacts"), "runs": str(tmp_path / "runs")}
    # Who stays to send would send it in the test's place.
    return TrackingSettings(tracking_uri=uri, flush_s=0.2, send_later_s=0, **places, **more)


def _whole(client: MlflowClient, run_id: str, steps: int) -> bool:
    """Whether each metric is there, each once."""
    return all(
        sorted(m.step for m in client.get_metric_history(run_id, name)) == [*range(1, steps + 1)]
        for name in METRICS
    )


def _let_go(folder: Path) -> None:
    """Wait for the sending process, which lets its folder go."""
    with open(folder / SENDING_LOCK) as lock:
        flock(lock, LOCK_EX)


def _log(journal: Journal, steps: range) -> None:
    for step in steps:
        journal.log(dict.fromkeys(METRICS, 1 / step), step)


def test_what_is_sent_twice_is_there_once(database: Postgres, tmp_path: Path) -> None:
    where = _where(tmp_path, database.uri)
    folder = tmp_path / "runs" / "twice"
    with Journal(where, folder) as journal:
        journal.open("twice")
        journal.create(name="n", params={"optim.lr": 0.1}, tags={})
        _log(journal, range(1, 301))
        journal.close(END)
    _let_go(folder)
    sent = json.loads((folder / "sent.json").read_text())
    (folder / "sent.json").write_text(json.dumps({**sent, "offset": 0, "closed": False}))
    command = [sys.executable, "-m", "headroom.tracking.mlflow_sender", str(folder)]
    again = {**desk_environment(), "MLFLOW_TRACKING_URI": database.uri}
    done = subprocess.run(command, env=again, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    client = MlflowClient(database.uri)
    assert client.get_run(journal.run_id).info.status == "FINISHED"
    assert _whole(client, journal.run_id, 300)


@pytest.mark.timeout(600)
def test_of_64_at_once_none_is_lost_and_every_metric_is_there_once(
    database: Postgres, tmp_path: Path
) -> None:
    """Each has a sending process of its own, and the first of them make the tables."""
    database.query("SELECT 1")
    where = _where(tmp_path, database.uri, experiment="at once", give_up_s=300, required=True)
    began, ids, failed = threading.Barrier(AT_ONCE), [], []

    def train(number: int) -> None:
        began.wait()
        try:
            with Journal(where, tmp_path / "runs" / str(number)) as journal:
                journal.open(None)
                journal.create(name=str(number), params={"number": number}, tags={})
                _log(journal, range(1, STEPS + 1))
                journal.close(END)
                ids.append(journal.run_id)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=train, args=(n,)) for n in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    rows = database.query(
        "SELECT p.value, r.status, m.key, count(*), count(DISTINCT m.step), max(m.step)"
        " FROM experiments e JOIN runs r USING (experiment_id) JOIN params p USING (run_uuid)"
        " JOIN metrics m ON m.run_uuid = r.run_uuid"
        " WHERE e.name = 'at once' AND p.key = 'number'"
        f" AND m.key IN {METRICS} GROUP BY p.value, r.run_uuid, r.status, m.key"
    )
    expected = {
        (str(n), "FINISHED", name, STEPS, STEPS, STEPS) for n in range(AT_ONCE) for name in METRICS
    }
    assert len(set(ids)) == AT_ONCE
    assert len(rows) == len(expected) and set(rows) == expected


def test_a_database_that_is_killed_in_mid_run_costs_nothing(
    database: Postgres, tmp_path: Path
) -> None:
    where = _where(tmp_path, database.uri, experiment="killed", give_up_s=1)
    folder = tmp_path / "runs" / "killed"
    with Journal(where, folder) as journal:
        journal.open(None)
        journal.create(name="n", params={}, tags={})
        _log(journal, range(1, 101))
        until = time.monotonic() + 60
        while json.loads((folder / "sent.json").read_text())["offset"] == 0:
            assert time.monotonic() < until
            time.sleep(0.1)
        database.kill()
        try:
            _log(journal, range(101, 201))
            with pytest.raises(TrackingError):
                journal.close(END)
        finally:
            database.start()
    command = [sys.executable, "-m", "headroom.tracking.mlflow_sender", str(folder)]
    later = {**desk_environment(), "MLFLOW_TRACKING_URI": database.uri}
    _let_go(folder)
    done = subprocess.run(command, env=later, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    client = MlflowClient(database.uri)
    assert client.get_run(journal.run_id).info.status == "FINISHED"
    for name in METRICS:
        steps = sorted(m.step for m in client.get_metric_history(journal.run_id, name))
        assert steps == [*range(1, 201)], f"{name}: {done.stderr}"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [("/nowhere", 'database "nowhere" does not exist'), (":pw@", "password authentication failed")],
)
def test_a_database_that_is_not_there_is_one_sentence_before_anything_is_spent(
    database: Postgres, place: Path, wrong: str, said: str
) -> None:
    uri = database.uri.replace(f":{database.password}@" if wrong == ":pw@" else "/mlflow", wrong)
    done = subprocess.run(
        [sys.executable, "-m", "flows.train", "--train.epochs", "1"],
        cwd=place,
        env={**desk_environment(), "MLFLOW_TRACKING_URI": uri},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("tracking_uri: ")]
    assert said in told and "postgresql://headroom:***@127.0.0.1" in told
    assert "Traceback" not in done.stderr


def test_a_training_is_whole_there_and_holds_no_password(database: Postgres, place: Path) -> None:
    """In none of its files, tags, params or metrics, nor in what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "flows.train", "--train.epochs", "2", "--run.name", "whole"],
        cwd=place,
        env={**desk_environment(), "MLFLOW_TRACKING_URI": database.uri},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "MLFLOW_TRACKING_URI" not in done.stdout and database.password not in done.stdout
    assert database.password not in done.stderr
    files = [file for file in place.rglob("*") if file.is_file()]
    assert [f for f in files if database.password.encode() in f.read_bytes()] == []
    for table, column in (("tags", "value"), ("params", "value"), ("experiment_tags", "value")):
        held = f"SELECT count(*) FROM {table} WHERE {column} LIKE '%{database.password}%'"
        assert database.query(held) == [(0,)]
    (journal,) = place.glob(".headroom/runs/*/events.jsonl")
    kept = read_points(journal.parent)
    rows = database.query(
        "SELECT key, step, count(*) FROM metrics JOIN runs USING (run_uuid)"
        " WHERE runs.name = 'whole' AND runs.status = 'FINISHED' GROUP BY key, step"
    )
    counts = {(key, step): count for key, step, count in rows}
    assert [counts.get(point) for point in kept] == [kept.count(point) for point in kept]
