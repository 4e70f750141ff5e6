"""Metrics that go straight into MLflow's tables, against the same ones sent through its API."""

import math
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.dbmodels import models
from sqlalchemy import Column, Float, MetaData, String, Table

from headroom.tracking import run_sender
from headroom.tracking.mlflow_store import open_experiment
from headroom.tracking.tracking_settings import TrackingSettings

SAMPLES = [
    ("train/loss", 0.5, 1_000, 1),
    ("train/loss", 0.25, 2_000, 2),
    ("train/loss", 0.25, 2_000, 2),  # the same once more
    ("train/loss", 0.75, 1_500, 2),  # earlier, yet larger
    ("val/loss", math.nan, 2_000, 2),
    ("val/accuracy", 0.9, 3_000, 5),
    ("val/accuracy", 0.1, 9_000, 4),  # late news of an earlier step
    ("gpu/energy_j", 7, 2_000, 2),
    ("tied", 1.0, 1_000, 1),
    ("tied", -1.0, 1_000, 1),
    ("all gone", 1e308, 0, 0),
]


@pytest.fixture
def kept(tmp_path: Path) -> tuple[MlflowClient, Path, str]:
    where = TrackingSettings(
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db", artifacts=str(tmp_path / "artifacts")
    )
    client, experiment_id = open_experiment(where)
    return client, tmp_path / "mlflow.db", experiment_id


def _stored(database: Path, run_id: str, table: str) -> list[tuple]:
    columns = "key, value, timestamp, step, is_nan"
    query = f"SELECT {columns} FROM {table} WHERE run_uuid = ? ORDER BY {columns}"
    with closing(sqlite3.connect(database)) as opened:
        return opened.execute(query, (run_id,)).fetchall()


def test_the_tables_hold_what_the_api_would_have_left_there(kept) -> None:
    client, database, experiment_id = kept
    runs = []
    for place in (None, database):
        run_id = client.create_run(experiment_id).info.run_id
        for first, last in ((0, 4), (2, 9), (9, 11), (0, 11)):  # overlapping, and all again
            run_sender.send_metrics(client, place, run_id, SAMPLES[first:last])
        runs.append(run_id)
    by_api, straight = runs
    for table in ("metrics", "latest_metrics"):
        stored = _stored(database, straight, table)
        assert stored == _stored(database, by_api, table)
    assert len(_stored(database, straight, "metrics")) == 10
    latest = client.get_run(straight).data.metrics
    assert math.isnan(latest.pop("val/loss"))
    assert latest == {
        "train/loss": 0.25,
        "val/accuracy": 0.9,
        "gpu/energy_j": 7.0,
        "tied": 1.0,
        "all gone": 1e308,
    }


def test_a_deleted_run_is_refused_in_the_words_of_mlflow(kept) -> None:
    client, database, experiment_id = kept
    run_id = client.create_run(experiment_id).info.run_id
    client.delete_run(run_id)
    with pytest.raises(MlflowException, match="must be in the 'active' state"):
        run_sender.send_metrics(client, database, run_id, SAMPLES)
    assert _stored(database, run_id, "metrics") == []


@pytest.fixture
def unmade() -> Iterator[None]:
    """The statements are made once a process: here anew, and again afterwards."""
    run_sender._compile_statements.cache_clear()
    yield
    run_sender._compile_statements.cache_clear()


def test_tables_of_another_shape_are_left_to_mlflow(kept, monkeypatch, unmade) -> None:
    client, database, experiment_id = kept
    run_id = client.create_run(experiment_id).info.run_id
    monkeypatch.setattr(run_sender, "KEY", ("key", "step"))  # no index of the table's
    run_sender.send_metrics(client, database, run_id, SAMPLES)
    assert len(_stored(database, run_id, "metrics")) == 10


@pytest.mark.parametrize("gone", ["SqlLatestMetric", "SqlMetric.is_nan"])
def test_classes_of_another_mlflow_are_left_to_mlflow(kept, monkeypatch, unmade, gone) -> None:
    """A class that has another name, or not the columns: it is noticed before anything is sent."""
    client, database, experiment_id = kept
    run_id = client.create_run(experiment_id).info.run_id
    with monkeypatch.context() as other:
        if gone == "SqlLatestMetric":
            other.delattr(models, gone)
        else:
            table = Table("metrics", MetaData(), Column("key", String), Column("value", Float))
            other.setattr(models, "SqlMetric", table)
        assert not run_sender._try_insert(database, run_id, SAMPLES)
        assert _stored(database, run_id, "metrics") == []
    run_sender.send_metrics(client, database, run_id, SAMPLES)
    assert len(_stored(database, run_id, "metrics")) == 10


def test_a_database_that_another_writes_to_is_to_be_tried_again(kept, monkeypatch) -> None:
    client, database, experiment_id = kept
    run_id = client.create_run(experiment_id).info.run_id
    monkeypatch.setattr(run_sender, "LOCKED_S", 0.05)
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(MlflowException, match="database is locked"):
            run_sender.send_metrics(client, database, run_id, SAMPLES)
        other.execute("ROLLBACK")
    assert _stored(database, run_id, "metrics") == []
    run_sender.send_metrics(client, database, run_id, SAMPLES)
    assert len(_stored(database, run_id, "metrics")) == 10
