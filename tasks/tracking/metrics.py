"""Metrics on their way into a run of MLflow. Through its API each costs 100 us of a core that the
training may need, most of it for an object; where runs are kept in an SQLite file, they go into
its tables in one statement a table, at a ninth of that, made from MLflow's own classes. Classes or
tables of another shape are left to the API. Part of the sending process.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from sqlalchemy import bindparam, literal_column, select, tuple_
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import SQLAlchemyError

from tasks.tracking.journal_lines import Sample

API_BATCH = 1000  # metrics in one request: MLflow's limit
LOCKED_S = 20.0  # to wait while another run writes; MLflow's own
# The columns that are filled. The keys are named, not asked of the classes: tables with another key
# are refused, not half filled.
COLUMNS = ("key", "value", "timestamp", "step", "is_nan", "run_uuid")
KEY = ("key", "timestamp", "step", "run_uuid", "value", "is_nan")
LATEST_KEY = ("key", "run_uuid")
_Row = dict[str, Any]
_order = itemgetter("step", "timestamp", "value")


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
    try:
        is_active, insert, update = _statements()
    except (ImportError, AttributeError, SQLAlchemyError):  # classes of another MLflow
        return False
    rows = [_row(run_id, *sample) for sample in samples]
    try:
        with closing(sqlite3.connect(path, timeout=LOCKED_S)) as opened, opened:
            if opened.execute(is_active, {"run": run_id}).fetchone() is None:
                return False
            opened.executemany(insert, rows)
            opened.executemany(update, _latest(rows))
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR:  # of the statement
            return False
        raise MlflowException(f"{path}: {error}") from error
    return True


@cache
def _statements() -> list[str]:
    """Is the run active; the insert; the update of what is latest. SQLite's own module runs them:
    SQLAlchemy would compile both anew each time."""
    # Here, since the runs of a tracking server need none of it.
    from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlMetric, SqlRun

    filled = dict.fromkeys(COLUMNS)
    is_active = select(SqlRun.run_uuid).where(
        SqlRun.run_uuid == bindparam("run"), SqlRun.lifecycle_stage == literal_column("'active'")
    )
    insert = sqlite.insert(SqlMetric).values(filled).on_conflict_do_nothing(index_elements=KEY)
    update = sqlite.insert(SqlLatestMetric).values(filled)
    new, known = update.excluded, SqlLatestMetric
    update = update.on_conflict_do_update(
        index_elements=LATEST_KEY,
        set_={name: new[name] for name in COLUMNS if name not in LATEST_KEY},
        where=tuple_(new.step, new.timestamp, new.value)
        > tuple_(known.step, known.timestamp, known.value),
    )
    dialect = sqlite.dialect(paramstyle="named")
    return [str(s.compile(dialect=dialect)) for s in (is_active, insert, update)]


def _row(run_id: str, name: str, value: float, unix_ms: int, step: int) -> _Row:
    is_nan = math.isnan(value)  # the tables keep it as 0 and a mark
    return {
        "key": name,
        "value": 0.0 if is_nan else value,
        "timestamp": unix_ms,
        "step": step,
        "is_nan": is_nan,
        "run_uuid": run_id,
    }


def _latest(rows: Sequence[_Row]) -> list[_Row]:
    """Of each name the row that MLflow calls its latest."""
    found: dict[str, _Row] = {}
    for row in rows:
        if _order(row) > _order(found.setdefault(row["key"], row)):
            found[row["key"]] = row
    return list(found.values())
