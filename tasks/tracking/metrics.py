"""Metrics on their way into a run of MLflow. Through its API each costs 90 us of a core that the
training may need, most of it for an object; where runs are kept in an SQLite file, they go into its
tables in one statement, at 5 us. Part of the sending process.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from tasks.tracking.journal_lines import Sample

API_BATCH = 1000  # metrics in one request: MLflow's limit
LOCKED_S = 20.0  # to wait while another run writes; MLflow's own
ACTIVE = "SELECT 1 FROM runs WHERE run_uuid = ? AND lifecycle_stage = 'active'"
# The conflict is named in full: tables of another shape are refused, not half filled.
INSERT = """
INSERT INTO metrics (key, value, timestamp, step, is_nan, run_uuid) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (key, timestamp, step, run_uuid, value, is_nan) DO NOTHING
"""
UPDATE = """
INSERT INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (key, run_uuid) DO UPDATE
SET value = excluded.value, timestamp = excluded.timestamp, step = excluded.step,
    is_nan = excluded.is_nan
WHERE (excluded.step, excluded.timestamp, excluded.value)
    > (latest_metrics.step, latest_metrics.timestamp, latest_metrics.value)
"""
_Row = tuple[str, float, int, int, bool, str]


def send(
    client: MlflowClient, database: Path | None, run_id: str, samples: Sequence[Sample]
) -> None:
    """Keep the samples in the run, each once, however often they are sent.

    Raises MlflowException. What was not kept then can be sent again.
    """
    if database is not None and _is_inserted(database, run_id, samples):
        return
    for first in range(0, len(samples), API_BATCH):
        metrics = [Metric(*sample) for sample in samples[first : first + API_BATCH]]
        client.log_batch(run_id, metrics=metrics)


def _is_inserted(path: Path, run_id: str, samples: Sequence[Sample]) -> bool:
    """False where MLflow's API has to say why not: a run that was deleted, unknown tables."""
    rows = [_row(run_id, *sample) for sample in samples]
    try:
        with closing(sqlite3.connect(path, timeout=LOCKED_S)) as opened, opened:
            if opened.execute(ACTIVE, (run_id,)).fetchone() is None:
                return False
            opened.executemany(INSERT, rows)
            opened.executemany(UPDATE, _latest(rows))
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR:  # of the statement
            return False
        raise MlflowException(f"{path}: {error}") from error
    return True


def _row(run_id: str, name: str, value: float, unix_ms: int, step: int) -> _Row:
    is_nan = math.isnan(value)  # the tables keep it as 0 and a mark
    return name, 0.0 if is_nan else value, unix_ms, step, is_nan, run_id


def _latest(rows: Sequence[_Row]) -> list[_Row]:
    """Of each name the row that MLflow calls its latest."""
    found: dict[str, _Row] = {}
    for row in rows:
        name, value, unix_ms, step, *_ = row
        known = found.get(name)
        if known is None or (step, unix_ms, value) > (known[3], known[2], known[1]):
            found[name] = row
    return list(found.values())
