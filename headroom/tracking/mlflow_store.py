"""Opens the store that runs are kept in: makes a new MLflow database in a way that two
first users, or a kill in the middle, can't break, and finds or makes the experiment. Part
of the sending process.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sqlite3
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, nullcontext, suppress
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import IO

from mlflow import MlflowClient
from mlflow import __file__ as mlflow_file
from mlflow import __version__ as mlflow_version
from mlflow.entities import Experiment
from mlflow.exceptions import MlflowException
from requests import exceptions as http
from sqlalchemy import create_engine, make_url
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from headroom.base.event_log import (
    SENDING_LOCK,
    SENT,
    START,
    TRAINING_LOCK,
    is_sent,
    read_end,
    read_json,
    remove_folder,
)
from headroom.base.file_lock import FileLock
from headroom.process.redaction import redact
from headroom.tracking.answer_limits import AnswerLimit, make_client
from headroom.tracking.mlflow_pages import VIEW_TAG, make_view_tag
from headroom.tracking.tracking_settings import (
    TrackingError,
    TrackingSettings,
    make_sqlite_uri,
)
from headroom.training.kept_steps import CHECKPOINTS, list_steps

notes: list[str] = []  # what a person has to know of the store, not told yet
AWAY_S = 60.0  # so long MLflow itself tries to reach a database that is away
# MLflow's pages for training rather than those for language models' traces.
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
AGAIN_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # another host may be making the tables of a new database
LOCKED_S = 15.0  # that another process may hold a database file
PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
# The last: it went while it answered.
AWAY = (http.ConnectionError, http.RetryError, http.Timeout, http.ChunkedEncodingError)
# What a database says that is there, and will take nobody for a moment.
BUSY = re.compile("starting up|shutting down|recovery mode|too many|database is locked", re.I)


def open_experiment(where: TrackingSettings) -> tuple[MlflowClient, str]:
    """Return a client, and the id of the experiment, which is made where it is new.

    Raises TrackingError where the database, the server or the experiment can't be used.
    """
    if where.database is not None or where.is_sql:
        refuse_folder(str(mlflow_file))
    if where.database is not None:
        _provide_database(where.database, where)
    if where.is_sql:
        _connect_once(where.tracking_uri)
    client, experiment = _find_experiment_patiently(where)
    if experiment is None:
        location = Path(where.artifacts).as_uri() if where.keeps_files else None
        try:
            made = client.create_experiment(where.experiment, location, tags=EXPERIMENT_TAGS)
            _keep_view(client, made, {})
            return client, made
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        experiment = client.get_experiment_by_name(where.experiment)  # another run was first
    assert experiment is not None
    if experiment.lifecycle_stage == "deleted":
        raise TrackingError(
            f"run.experiment: {where.experiment!r} was deleted in MLflow; restore it with "
            f"`mlflow experiments restore -x {experiment.experiment_id}`, or choose another name"
        )
    _keep_view(client, experiment.experiment_id, experiment.tags)
    return client, experiment.experiment_id


def refuse_folder(path: str) -> None:
    """Raise TrackingError where MLflow lies in a folder out of which it can't open a database: it
    takes the name of its tables' folder for a pattern."""
    if "%" in path:
        raise TrackingError(
            f"tracking_uri: MLflow opens no database where its own folder has a % in its name "
            f"({Path(path).parent}); make this Python environment in a folder without one"
        )


def _keep_view(client: MlflowClient, experiment_id: str, tags: Mapping[str, str]) -> None:
    """Save the view that our addresses name, where it is not there yet.

    Who may not write tags of an experiment may train all the same.
    """
    if tags.get(VIEW_TAG) != make_view_tag():
        try:
            client.set_experiment_tag(experiment_id, VIEW_TAG, make_view_tag())
        except (MlflowException, SQLAlchemyError) as error:
            print(f"no view of the experiment: {redact(str(error))[:600]}", file=sys.stderr)


def _find_experiment_patiently(where: TrackingSettings) -> tuple[MlflowClient, Experiment | None]:
    """Return a client and the experiment, if it is there.

    MLflow makes a new store at this first question. That breaks where another process does
    the same. On this host they take turns; where another host's was first, the tables are
    there a moment later.
    """
    with _take_turn(Path(where.runs)):
        for pause_s in AGAIN_S:
            began = time.monotonic()
            try:
                return _find_experiment(where)
            except (MlflowException, SQLAlchemyError) as error:
                took_s = time.monotonic() - began
                if not where.is_sql or (isinstance(error, OperationalError) and took_s > AWAY_S):
                    raise
                print(f"asked again in {pause_s} s: {redact(str(error))[:600]}", file=sys.stderr)
            time.sleep(pause_s)
        return _find_experiment(where)


def _take_turn(runs: Path) -> IO[str]:
    """Return a file of this folder that is locked until it is closed. Raises OSError, which names
    the file, also where the folder is a mounted bucket that only takes new files."""
    turn = runs / "store.lock"
    try:
        with ExitStack() as stack:
            runs.mkdir(mode=0o700, parents=True, exist_ok=True)
            turn.touch(mode=0o600)
            lock = stack.enter_context(turn.open("r+"))
            flock(lock, LOCK_EX)
            stack.pop_all()
            return lock
    except OSError as error:
        error.filename = error.filename or str(turn)
        raise


def _connect_once(uri: str) -> None:
    """Connect to the database once: MLflow itself tries for a minute before it reports."""
    engine = create_engine(uri)
    try:
        engine.connect().close()
    finally:
        engine.dispose()


def _find_experiment(where: TrackingSettings) -> tuple[MlflowClient, Experiment | None]:
    client = make_client(where.tracking_uri)
    return client, client.get_experiment_by_name(where.experiment)


def find_database_template() -> Path:
    """Return where set-up keeps an empty database for this MLflow, inside the environment."""
    return Path(sys.prefix) / "share" / "headroom" / f"mlflow-{mlflow_version}.db"


def _provide_database(path: Path, where: TrackingSettings) -> None:
    """Make a new database under another name and rename it when whole.

    MLflow itself loses one of two first users, and a kill while it writes leaves a file that
    stays unusable.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{path}.lock", "w") as lock:
            flock(lock, LOCK_EX)
            if not path.exists():
                _make_database_file(path, where)
            elif path.stat().st_size:
                _keep_older(path)
        if path.stat().st_size:
            file = f"{path.absolute().as_uri()}?mode=rw"
            with closing(sqlite3.connect(file, uri=True, timeout=LOCKED_S)) as opened:
                opened.execute("PRAGMA schema_version")
                opened.execute("BEGIN IMMEDIATE")  # can it be written?
    except (OSError, sqlite3.Error) as error:
        raise TrackingError(f"tracking_uri: {path} can't be used as a database: {error}") from error


def _keep_older(path: Path) -> None:
    """Copy a database that MLflow is about to bring up to date: it does so in place where a table
    is missing, and there is no way back."""
    import mlflow.store.db.utils  # noqa: F401 (it makes all tables known)
    from mlflow.store.db.base_sql_model import Base

    # Not mode=ro: what a killed writer has left half written is rolled back first.
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as old:
        have = {name for (name,) in old.execute("SELECT name FROM sqlite_master")}
        if "alembic_version" not in have or {t.name for t in Base.metadata.sorted_tables} <= have:
            return
        version = old.execute("SELECT version_num FROM alembic_version").fetchone()
        copy = path.with_name(f"{path.name}.{version[0] if version else 'older'}")
        if not copy.exists():
            half = path.with_name(f"{copy.name}.{os.getpid()}")
            with closing(sqlite3.connect(half)) as new:
                old.backup(new)
            os.rename(half, copy)
    notes.append(
        f"tracking_uri: {path} is of an older MLflow and is brought up to {mlflow_version}, which "
        f"older ones can't read; as it was, it is kept as {copy}"
    )


def _make_database_file(path: Path, where: TrackingSettings) -> None:
    half = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        if find_database_template().exists():
            shutil.copyfile(find_database_template(), half)
        else:
            make_database(half)
        with closing(sqlite3.connect(half)) as opened, opened:
            default = Path(where.artifacts).as_uri()
            opened.execute(
                "UPDATE experiments SET artifact_location = ? WHERE experiment_id = 0", (default,)
            )
        os.rename(half, path)
    finally:
        half.unlink(missing_ok=True)


def make_database(path: Path) -> None:
    """Make an empty MLflow database at `path`."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    SqlAlchemyStore(make_sqlite_uri("sqlite", path.absolute(), ""), "mlartifacts").engine.dispose()


def may_answer_later(error: BaseException, where: TrackingSettings | None) -> bool:
    """Return whether the store is only away, so that a run may begin without it.

    What is wrong with the store itself stays wrong.
    """
    if where is None or where.required:
        return False
    chain = _list_causes(error)
    if any(isinstance(e, AWAY) for e in chain):
        return not any(isinstance(e, http.SSLError | AnswerLimit) for e in chain)
    errors = [e for e in chain if isinstance(e, OperationalError | sqlite3.OperationalError)]
    if not errors:
        return False
    return bool(BUSY.search(str(errors[0]))) or (
        where.is_sql and not _is_listening(where.tracking_uri)
    )


def _list_causes(error: BaseException) -> list[BaseException]:
    """Return the error and those that caused it."""
    before = error.__cause__ or error.__context__
    return [error, *(_list_causes(before) if before is not None else ())]


def _is_listening(uri: str) -> bool:
    """Return whether anything takes connections where the database should be.

    True where it isn't known.
    """
    url = make_url(uri)
    port = url.port or PORTS[url.get_backend_name()]
    try:
        with socket.create_connection((url.host, port), 5) if url.host else nullcontext():
            return True
    except OSError:
        return False


def explain_error(error: Exception, where: TrackingSettings | None) -> str:
    """Return one sentence about what went wrong, starting with the setting at fault."""
    uri = redact(where.tracking_uri) if where is not None else "unknown"
    if may_answer_later(error, where):
        causes = reversed(_list_causes(error))
        texts = [redact(str(getattr(e, "strerror", None) or e)).strip() for e in causes]
        # SQLAlchemy's sign that its connections are gone says "()".
        said = next((text for text in texts if text.strip("()")), type(error).__name__)
        return f"tracking_uri: {uri} is away ({said.splitlines()[0]})"
    if isinstance(error, TrackingError):
        return str(error)
    for cause in _list_causes(error):
        if isinstance(cause, AnswerLimit):
            return f"tracking_uri: {uri} can't be used: {cause}"
    first = _list_causes(error)[-1]
    if isinstance(first, sqlite3.Error):  # without the statement that met it
        error = first
    if (
        isinstance(first, OSError)
        and where is not None
        and (name := _find_faulty_setting(first, where))
    ):
        folder = getattr(where, name)
        return f"{name}: {folder} can't be written ({first.strerror}); see to it, or make room"
    text = " ".join(redact(str(error)).split())
    return f"tracking_uri: {uri} can't be used: {type(error).__name__}: {text[:600]}"


def _find_faulty_setting(error: OSError, where: TrackingSettings) -> str:
    """Return the setting whose folder could not be written to; "" where it is none."""
    files = [Path(f) for f in (error.filename2, error.filename) if isinstance(f, str)]
    folders = [*(["artifacts"] if where.keeps_files else []), "runs"]
    settings = (n for f in files for n in folders if f.is_relative_to(getattr(where, n)))
    return next(settings, "")


def remove_old_journals(runs: Path, *, keep: int) -> None:
    """Remove the oldest journals whose runs were sent whole, all but `keep`.

    None of a training that may go on from a checkpoint, and none that another process uses.
    """
    old = [f.parent for f in runs.glob(f"*/{SENT}") if _may_remove(f.parent)]
    old.sort(key=lambda folder: (_read_start_time(folder), folder.name))
    for folder in old[: max(0, len(old) - keep)]:
        with (
            suppress(OSError),
            FileLock(folder / TRAINING_LOCK) as one,
            FileLock(folder / SENDING_LOCK) as two,
        ):
            mine = all(lock.take(f"process {os.getpid()}, which removes it") for lock in (one, two))
            if mine and _may_remove(folder):  # still
                remove_folder(folder)


def _read_start_time(folder: Path) -> float:
    """Return when its run was begun or, later, gone on with, by its start.json: its name has
    another clock's time."""
    start = read_json(folder / START)
    with suppress(ValueError, TypeError):
        return max(float(start.get(name, 0.0)) for name in ("made_at", "resumed_at"))
    return 0.0


def _may_remove(folder: Path) -> bool:
    if not is_sent(folder):
        return False
    run = read_end(folder)
    is_done = run.get("status") == "FINISHED" and not run.get("stopped")
    return is_done or not list_steps(folder / CHECKPOINTS)
