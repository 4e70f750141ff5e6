"""Sends one run to MLflow: its journal in batches by the run's id, and its end with its
true status, also when its process has died. It works as it likes while a core is idle, else
so little that the training does not notice. Through MLflow's API each metric costs 100 us
of a core, most of it for an object; where runs are kept in an SQLite file, metrics go into
its tables in one statement a table, at a ninth of that, made from MLflow's own classes.
Classes or tables of another shape are left to the API. Part of the sending process.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from sqlalchemy import bindparam, literal_column, select, tuple_
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import SQLAlchemyError

from headroom.base.event_log import (
    LOG,
    ONCE,
    RESERVE,
    SENDING_LOCK,
    SENT,
    START,
    TRAINING_LOCK,
    Sample,
    read_log_ends,
    read_metric_batches,
    read_series,
    refuse_links,
    write_to_disk,
)
from headroom.base.file_lock import FileLock
from headroom.device.telemetry import Telemetry
from headroom.process.redaction import redact
from headroom.report import run_report
from headroom.tracking import model_sender
from headroom.tracking.journal import RunGone
from headroom.tracking.mlflow_pages import make_run_path
from headroom.tracking.tracking_settings import TrackingError, TrackingSettings

SHARE = 0.005  # of a core, where none is idle
SPARE_CORES = 0.5  # so much of one idle is a core to work on
WINDOW_S = 0.5  # to count idle cores over, at least


def _read_idle_s() -> float:
    """Return the seconds that all cores together have been idle, or waiting for a disk."""
    times = psutil.cpu_times()
    return float(times.idle + getattr(times, "iowait", 0.0))


class Throttle:
    """Limits the work of a process beside a training.

    Ask `may_work` before each piece, and report afterwards what it took.
    """

    def __init__(
        self,
        *,
        now_s: Callable[[], float] = time.monotonic,
        idle_s: Callable[[], float] = _read_idle_s,
    ) -> None:
        self._now_s, self._idle_s = now_s, idle_s
        self._seen = now_s(), idle_s()
        self._rest_until = 0.0
        self.has_spare = True  # a core was idle when it was last looked

    def may_work(self) -> bool:
        """Return whether a core is idle, or the last piece of work is long enough ago."""
        now = self._now_s()
        since, idle_before = self._seen
        if now - since >= WINDOW_S:
            idle = self._idle_s()
            self.has_spare = idle - idle_before >= SPARE_CORES * (now - since)
            self._seen = now, idle
        return self.has_spare or now >= self._rest_until

    def record_work(self, cpu_s: float) -> None:
        """Record that a piece of work took so many seconds of processor time."""
        self._rest_until = self._now_s() + cpu_s / SHARE


API_BATCH = 1000  # metrics in one request: MLflow's limit
LOCKED_S = 20.0  # to wait while another run writes; MLflow's own
# The columns that are filled: in this order the latest of a metric's rows is the greatest. The keys
# are named, not asked of the classes: tables with another key are refused, not half filled.
COLUMNS = ("key", "step", "timestamp", "value", "is_nan", "run_uuid")
KEY = ("key", "timestamp", "step", "run_uuid", "value", "is_nan")
LATEST_KEY = ("key", "run_uuid")
_Row = tuple[str, int, int, float, bool, str]  # of COLUMNS


def send_metrics(
    client: MlflowClient, database: Path | None, run_id: str, samples: Sequence[Sample]
) -> None:
    """Send the samples to the run; each is kept once, however often it is sent.

    Raises MlflowException. What was not kept then can be sent again.
    """
    if database is not None and _try_insert(database, run_id, samples):
        return
    for first in range(0, len(samples), API_BATCH):
        metrics = [Metric(*sample) for sample in samples[first : first + API_BATCH]]
        client.log_batch(run_id, metrics=metrics)


def _try_insert(path: Path, run_id: str, samples: Sequence[Sample]) -> bool:
    """Insert the samples into the tables.

    Return False where MLflow's API has to be used instead. The API says why: the run was
    deleted, or the tables are unknown.
    """
    try:
        is_active, insert, update = _compile_statements()
    except (ImportError, AttributeError, SQLAlchemyError):  # classes of another MLflow
        return False
    # By name: the tables' indexes are, and what belongs together in them costs half of the time.
    rows = sorted(_make_row(run_id, *sample) for sample in samples)
    latest = {row[0]: row for row in rows}
    try:
        with closing(sqlite3.connect(path, timeout=LOCKED_S)) as opened, opened:
            if opened.execute(is_active, {"run": run_id}).fetchone() is None:
                return False
            opened.executemany(insert, rows)
            opened.executemany(update, latest.values())
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR:  # of the statement
            return False
        raise MlflowException(f"{path}: {error}") from error
    return True


@cache
def _compile_statements() -> list[str]:
    """Return three statements: is the run active, the insert, the update of latest values.

    SQLite's own module runs them: SQLAlchemy would compile both anew each time.
    """
    # Here, since the runs of a tracking server need none of it.
    from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlMetric, SqlRun

    # By position: to bind values by name takes a tenth of the time.
    filled: dict[str, Any] = {name: literal_column(f"?{n}") for n, name in enumerate(COLUMNS, 1)}
    is_active = select(SqlRun.run_uuid).where(
        SqlRun.run_uuid == bindparam("run"), SqlRun.lifecycle_stage == literal_column("'active'")
    )
    # inline(): else each row would be returned, too.
    insert = sqlite.insert(SqlMetric).inline().values(filled)
    insert = insert.on_conflict_do_nothing(index_elements=KEY)
    update = sqlite.insert(SqlLatestMetric).inline().values(filled)
    new, latest = update.excluded, SqlLatestMetric
    update = update.on_conflict_do_update(
        index_elements=LATEST_KEY,
        set_={name: new[name] for name in COLUMNS if name not in LATEST_KEY},
        where=tuple_(new.step, new.timestamp, new.value)
        > tuple_(latest.step, latest.timestamp, latest.value),
    )
    dialect = sqlite.dialect(paramstyle="named")
    return [str(s.compile(dialect=dialect)) for s in (is_active, insert, update)]


def _make_row(run_id: str, name: str, value: float, unix_ms: int, step: int) -> _Row:
    is_nan = math.isnan(value)  # the tables keep it as 0 and a mark
    return name, step, unix_ms, 0.0 if is_nan else value, is_nan, run_id


PIECE_BYTES = 2**15  # of the journal, where the training needs all cores: some 5 ms of one
PARAMS = 100
TAG_LIMIT = 7900  # characters; over 8,000 MLflow cuts, or refuses
REOPEN_S = 60.0  # for another process to send the end that the run has come to
REPORT = "report.html"
REGISTERED = "registered"  # a tag
END_REASON = "end.reason"  # a tag
END_STATUS = "end.status"  # a tag: how the run ended, told before MLflow has the rest of it
ENDS = ("FINISHED", "FAILED", "KILLED")
UNSENT = "unsent"  # a tag of a run of which MLflow has not got all: why, and where the rest is
RESUMED_BY = "resumed.by."  # a tag: who went on with the run, by a mark that its folder keeps
EARLIER = "prefect.earlier_flow_runs"  # a tag: those that this run goes on with
NOT_ARTIFACTS = (
    *(SENT, SENDING_LOCK, RESERVE, "model", START, TRAINING_LOCK, "checkpoints"),
)  # of a run's folder, what is no artifact


@dataclass
class SendingState:
    """How far a run's log was sent; kept beside it as sent.json."""

    run_id: str  # empty: the run is about to be made
    experiment_id: str
    offset: int = 0  # bytes of the log
    begun: int = 0  # the offset behind the newest begin of which MLflow was told
    closed: bool = False  # with the end that is before the offset
    model_id: str = ""  # of the model logged, once it exists
    has_model: bool = False  # whether all of it is there
    damaged: int = 0  # lines that had to be skipped
    unsent: str = ""  # why it has ended and not all of it could be sent
    earlier: str = ""  # flow runs that the run began in, and does not end in: separated by commas
    # The newest step of each metric of which MLflow has more than this log, and up to which it is
    # asked for each: of one that was lost with its machine, or a copy of the folder made before.
    beyond: dict[str, int] = field(default_factory=dict)


@dataclass
class Sender:
    """Sends one run to MLflow."""

    client: MlflowClient
    where: TrackingSettings
    folder: Path
    state: SendingState
    tags: dict[str, str] = field(default_factory=dict)
    telemetry: Telemetry = field(default_factory=lambda: Telemetry(None))
    step: int = 0  # of the newest metric sent
    retry_at: float = 0.0
    wait_s: float = 1.0
    pace: Throttle = field(default_factory=Throttle)
    told_progress: Callable[[], None] = lambda: None  # who waits for the end hears of each batch
    registered: str = ""  # what became of the model in MLflow's registry
    held: FileLock | None = None  # the lock of the folder, while this process sends it
    there: dict[str, set[int]] = field(default_factory=dict)  # steps up to state.beyond, by metric

    @property
    def has_folder(self) -> bool:
        """Return whether the run has a folder here; Path() stands for none."""
        return self.folder != Path() and self.folder.is_dir()

    def tell_params(self, params: Mapping[str, str]) -> None:
        """Log the params; they may be logged again, while they are the same."""
        entries = [Param(k, v[:5900]) for k, v in params.items()]
        for i in range(0, len(entries), PARAMS):
            self.client.log_batch(self.state.run_id, params=entries[i : i + PARAMS])

    def tell_data(self, inputs: Sequence[Mapping[str, str]]) -> None:
        """Log the data as inputs of the run; MLflow keeps one of each name and digest.

        It looks first and writes then: where another run logged the same in between, the
        first try fails and the next finds it.
        """
        inputs_of_run = []
        for description in inputs:
            tag = InputTag("mlflow.data.context", description["context"])
            words = {k: v for k, v in description.items() if k != "context"}
            inputs_of_run.append(DatasetInput(Dataset(**words), [tag]))
        for last in (False, False, True) if inputs_of_run else ():
            try:
                self.client.log_inputs(self.state.run_id, inputs_of_run)
                break
            except MlflowException as error:
                if last or "IntegrityError" not in str(error):
                    raise

    def flush(self, *, most_bytes: float = math.inf) -> None:
        """Send the metrics and tags that are new, of at most so many bytes of the journal.

        Raises what MLflow raises; nothing is lost then.
        """
        bad: list[int] = []
        tags: dict[str, str] = {}
        with suppress(FileNotFoundError), open(self.folder / LOG, "rb") as log:
            how = {"most_bytes": most_bytes, "begun": self.state.begun}
            batches = read_metric_batches(log, self.state.offset, **how, damaged=bad, tags=tags)
            for batch, offset in batches:
                batch = self._select_new(batch)
                if batch:
                    self.step = max(self.step, max(sample[-1] for sample in batch))
                    self._send(batch)
                self._send_tags(tags)
                self.state.offset = offset
                self.state.damaged += len(bad)
                bad.clear()
                tags.clear()
                self._keep()
                self.told_progress()
        now_ms = self._compute_now_ms()
        sample = self.telemetry.sample().items()
        if sample:
            self._send([(k, v, now_ms, self.step) for k, v in sample])
        self._send_tags(self.tags)
        self.tags.clear()

    def _select_new(self, batch: list[Sample]) -> list[Sample]:
        """Return what MLflow has not: of a step that was trained a second time, at another time, it
        would show both. What it lacks below its newest step, a power cut took before."""
        beyond = self.state.beyond
        again = {s[0] for s in batch if ONCE != s[-1] <= beyond.get(s[0], -1)} if beyond else set()
        for name in again - self.there.keys():
            points = self.client.get_metric_history(self.state.run_id, name)
            self.there[name] = {p.step for p in points if ONCE != p.step <= beyond[name]}
        return [s for s in batch if s[0] not in again or s[-1] not in self.there[s[0]]]

    def _send_tags(self, tags: Mapping[str, str]) -> None:
        if tags:
            run_tags = [RunTag(name, text[:TAG_LIMIT]) for name, text in tags.items()]
            self.client.log_batch(self.state.run_id, tags=run_tags)

    def _send(self, samples: list[Sample]) -> None:
        send_metrics(self.client, self.where.database, self.state.run_id, samples)

    def flush_patiently(self) -> None:
        """Send what is new, or try again later.

        The training must notice neither that MLflow is away nor that it takes time.
        """
        if time.monotonic() < self.retry_at or not self.pace.may_work():
            return
        began = time.process_time()
        try:
            self.flush(most_bytes=math.inf if self.pace.has_spare else PIECE_BYTES)
            self.wait_s = 1.0
        except Exception as error:  # of any store: sqlite's, the network's, the server's
            print(f"{self.state.run_id}: kept, not yet sent: {redact(str(error))}", file=sys.stderr)
            self.retry_at = time.monotonic() + self.wait_s
            self.wait_s = min(30.0, 2 * self.wait_s)
        self.pace.record_work(time.process_time() - began)

    def close(self, run: dict[str, Any], *, end_ms: int | None = None) -> dict[str, float]:
        """Send all that is left and end the run.

        Return the times that are only known at its end. Raises what MLflow raises. end_ms:
        when it ended, if not now.
        """
        try:
            times = self._send_the_rest(run)
            self.state.unsent = ""
            # Whoever found that its process was gone may have guessed why.
            stale = {UNSENT, END_REASON} - run.get("tags", {}).keys()
            for name in stale & self.client.get_run(self.state.run_id).data.tags.keys():
                self.client.delete_tag(self.state.run_id, name)
        except Exception as error:
            self._tell_unsent(run, error)
            raise
        finally:
            self.telemetry.close()
            # Whatever else went wrong, the run is over, and says how it ended.
            end_ms = max(end_ms, self._find_newest_ms()) if end_ms else self._compute_now_ms()
            self.client.set_terminated(self.state.run_id, run["status"], end_ms)
        self.state.closed = True
        self._keep()
        # Only now: what was sent is a copy with the same rights, and is for all who may see MLflow.
        for path in self.folder.rglob("*"):
            if not path.is_symlink():  # as its user may have laid one since
                path.chmod(0o700 if path.is_dir() else 0o600)
        return times

    def close_copy(self) -> None:
        """Keep that nothing of this folder is to be sent: another copy of it has gone on."""
        log = self.folder / LOG
        self.state.closed, self.state.offset = True, log.stat().st_size if log.is_file() else 0
        self._keep()

    def _compute_now_ms(self) -> int:
        """Return the Unix time in ms, but one later than all in the journal.

        The clock may have been set back since, and MLflow shows of one step what has the later
        time.
        """
        return max(int(time.time() * 1000), self._find_newest_ms())

    def _find_newest_ms(self) -> int:
        newest = read_log_ends(self.folder / LOG)[1]
        return max((unix_ms for unix_ms, _, _ in newest), default=-1) + 1

    def _send_the_rest(self, run: dict[str, Any]) -> dict[str, float]:
        began = time.perf_counter()
        run_id = self.state.run_id
        self.tags |= {k: str(v) for k, v in run.get("tags", {}).items()}
        self.tags[END_STATUS] = run["status"]
        self.flush()
        self._tell_damage()
        path = make_run_path(self.state.experiment_id, run_id)
        is_late = run.get("run_id") == ""  # its command names no run
        run = {**run, "run_id": run_id, "experiment_id": self.state.experiment_id}
        run["series"] = read_series(self.folder / LOG)
        command = run.get("open_command", "make ui") + (path if is_late else "")
        plots = run_report.draw_plots(run, self._make_folder("plots"))
        (self.folder / "environment.txt").write_text(_describe_environment())
        has_model = (self.folder / "model" / "spec.json").is_file()
        if run["status"] == "FINISHED" and has_model and not self.state.has_model:
            self._send_model()
        if self.state.has_model and (registered_name := run.get("register")):
            self._register(registered_name)
            run["tags"] = {**run["tags"], REGISTERED: self.registered}
        for name in sorted(os.listdir(self.folder)):
            if name not in (*NOT_ARTIFACTS, REPORT):
                self._send_artifact(self.folder / name)
        # What is left takes next to no time, and shows what all of it took.
        times = {"time/close_s": time.perf_counter() - began}
        if "time/total_s" in run["metrics"]:
            times["time/total_s"] = run["metrics"]["time/total_s"] + times["time/close_s"]
        run["metrics"] = {**run["metrics"], **times}
        now_ms = self._compute_now_ms()
        self._send([(k, v, now_ms, ONCE) for k, v in times.items()])
        page = run_report.make_html(run, plots, open_command=command)
        (self.folder / REPORT).write_text(page, encoding="utf-8")
        self._send_artifact(self.folder / REPORT)
        note = run_report.make_markdown(run, open_command=command)
        self.client.set_tag(run_id, "mlflow.note.content", note)
        return times

    def _tell_unsent(self, run: Mapping[str, Any], error: Exception) -> None:
        """Tag the run with what it lacks: else it would look whole, and only a log would know."""
        has_one = run["status"] == "FINISHED" and (self.folder / "model" / "spec.json").is_file()
        lacks = "its model" if has_one and not self.state.has_model else "part of it"
        said = " ".join(redact(str(error)).split())[:300] or type(error).__name__
        self.state.unsent = f"{lacks} is not in MLflow yet, but in {self.folder}: {said}"
        with suppress(OSError):  # a full disk
            self._keep()
        with suppress(Exception):  # of any store: it may be all away
            self.client.set_tag(self.state.run_id, UNSENT, self.state.unsent)

    def _tell_damage(self) -> None:
        """Tag the run with the number of damaged lines.

        Half a line at the end counts, since no more comes.
        """
        log, rest = self.folder / LOG, b""
        if log.is_file():
            with open(log, "rb") as file:
                file.seek(self.state.offset)
                rest = file.read()
        if rest and b"\n" not in rest:
            self.state.damaged += 1
            self.state.offset += len(rest)
        bad = self.state.damaged
        if bad:
            print(f"{log}: {bad} damaged lines were skipped", file=sys.stderr)
            self.client.set_tag(self.state.run_id, "journal.damaged_lines", str(bad))

    def _send_model(self) -> None:
        """Send the model, once, however often the rest is sent."""
        if not self.state.model_id:
            self.state.model_id = model_sender.create_model(self.client, self.state, self.folder)
            self._keep()
        model_sender.send_model_files(self.client, self.state, self.folder)
        self.state.has_model = True
        self._keep()

    def _register(self, request: dict[str, Any]) -> None:
        """Register the model; where that fails, the run is kept and says why."""
        try:
            turn = Path(self.where.runs) / "registry.lock"
            self.registered = model_sender.register_model(self.client, self.state, request, turn)
        except Exception as error:  # of any store
            message = redact(str(error)).strip() or type(error).__name__
            self.registered = f"not registered as {request['name']}: {message.splitlines()[0]}"
        self.client.set_tag(self.state.run_id, REGISTERED, self.registered[:TAG_LIMIT])

    def _send_artifact(self, path: Path) -> None:
        if path.is_dir():
            self.client.log_artifacts(self.state.run_id, str(path), path.name)
        else:
            self.client.log_artifact(self.state.run_id, str(path))

    def _make_folder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return folder

    def _keep(self) -> None:
        half = self.folder / f"{SENT}.new"
        half.write_text(json.dumps(vars(self.state)))
        if self.state.beyond:  # a power cut that takes this would let steps be there twice
            write_to_disk(half)
        half.rename(self.folder / SENT)
        if self.state.beyond:
            write_to_disk(self.folder)


def _describe_environment() -> str:
    """Return Python, the platform, and every package with its version, as text.

    Read off the names of the packages' metadata folders: parsing what is in them costs
    0.4 s.
    """
    folders = {f.stem for place in sys.path for f in Path(place).glob("*.dist-info")}
    packages = sorted({"==".join(name.rsplit("-", 1)) for name in folders}, key=str.lower)
    head = f"# Python {platform.python_version()} on {platform.platform()}"
    return "\n".join([head, *packages]) + "\n"


def create_run(
    client: MlflowClient,
    chosen: TrackingSettings,
    *,
    experiment_id: str,
    folder: Path,
    name: str,
    params: dict[str, str],
    tags: dict[str, str],
    data: Sequence[Mapping[str, str]] = (),
    start_ms: int | None = None,
    begun: int = 0,
) -> Sender:
    """Create a run in MLflow with its params, tags and data; return its sender.

    start_ms: when it began, if not now. begun: the offset in its log behind what is told with it.
    The folder says before that somebody is about to create it: whoever goes on looks for it then.
    """
    sender = Sender(client, chosen, folder, SendingState("", experiment_id))
    sender._keep()
    tags = {k: v[:TAG_LIMIT] for k, v in tags.items()} | {"journal": folder.name}
    sender.state.run_id = client.create_run(experiment_id, start_ms, tags, name).info.run_id
    sender.tell_params(params)
    sender.tell_data(data)
    sender.state.begun = begun
    sender._keep()
    with suppress(OSError):  # a request that was asked again may have made another one
        write_to_disk(folder / SENT, folder)
    return sender


def claim_run(client: MlflowClient, run: Run, *, marks: Sequence[str], by: str) -> None:
    """Tag the run with the newest mark of the folder that goes on with it, and by whom.

    Raises RunGone where another copy of the folder has done so: its steps would be there twice.
    """
    run_id, mine = run.info.run_id, RESUMED_BY + marks[-1]
    _refuse_other_copy(run, marks)
    client.set_tag(run_id, mine, by)
    try:
        newest_run = client.get_run(run_id)
        _refuse_other_copy(newest_run, marks)  # one that did the same meanwhile
    except RunGone:
        client.delete_tag(run_id, mine)
        raise
    for name in newest_run.data.tags:
        if name.startswith(RESUMED_BY) and name != mine:
            client.delete_tag(run_id, name)


def find_other_copy(run: Run, marks: Sequence[str]) -> str:
    """Return the tag of another copy of the folder with these marks; empty where none went on."""
    own = {RESUMED_BY + mark for mark in marks}
    others = (name for name in run.data.tags if name.startswith(RESUMED_BY) and name not in own)
    return next(others, "")


def _refuse_other_copy(run: Run, marks: Sequence[str]) -> None:
    if name := find_other_copy(run, marks):
        raise RunGone(
            f"its run {run.info.run_id} was gone on with since by {run.data.tags[name]}, in "
            f"another copy of this folder (where that is lost, delete the run's tag {name} in "
            "MLflow)"
        )


def reopen_run(
    client: MlflowClient,
    chosen: TrackingSettings,
    *,
    state: SendingState,
    folder: Path,
    tags: dict[str, str],
    begun: int = 0,
) -> Sender:
    """Set a run that ended to RUNNING again; return its sender. state: how far it was sent. begun:
    the offset in its log behind what is told with it."""
    state.closed, state.model_id, state.has_model = False, "", False
    sender = Sender(client, chosen, folder, state)
    sender._keep()  # its end is told again, should nothing come of this one
    # First who trains it: one that says RUNNING and whose process is gone is ended by anybody.
    before = client.get_run(state.run_id).data.tags
    for name in before.keys() & {END_REASON, END_STATUS, "failure", "warnings", UNSENT}:
        client.delete_tag(state.run_id, name)
    # They crashed, or were stopped, and would be counted among the failed ones for ever.
    flow_runs = [*before.get(EARLIER, "").split(","), before.get("prefect.flow_run_id", "")]
    others = dict.fromkeys(f for f in flow_runs if f not in ("", tags.get("prefect.flow_run_id")))
    state.earlier, state.unsent = ",".join(others), ""
    run_tags = [RunTag(k, v[:TAG_LIMIT]) for k, v in {**tags, EARLIER: state.earlier}.items() if v]
    client.log_batch(state.run_id, tags=run_tags)
    client.update_run(state.run_id, status="RUNNING")
    state.begun = begun
    sender._keep()
    return sender


def make_telemetry(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> Telemetry:
    """Return the telemetry of the device that the run's tags name, if it has any.

    Its energy adds to what the run has used before.
    """
    if tags.get("device.kind") != "cuda":
        return Telemetry(None)
    used_j = client.get_run(run_id).data.metrics.get("gpu/energy_j", 0.0)
    return Telemetry(tags.get("device.uuid"), energy_j=used_j)


def wait_for_sending_lock(folder: Path) -> FileLock:
    """Return the folder's lock, once another process has let go of it.

    Raises TimeoutError where that process does not finish sending.
    """
    until = time.monotonic() + REOPEN_S
    while (mine := try_sending_lock(folder)) is None:
        if time.monotonic() > until:
            raise TimeoutError(f"runs: {folder} is still being sent by another process")
        time.sleep(0.1)
    return mine


def try_sending_lock(folder: Path) -> FileLock | None:
    """Return the folder's lock, held until it is closed or the process ends.

    None where another has it. Raises TrackingError where the folder holds what leads out of it.
    """
    try:
        refuse_links(folder)
    except OSError as error:
        raise TrackingError(f"runs: {error.filename} {error.strerror}") from None
    mine = FileLock(folder / SENDING_LOCK)
    if mine.take():
        return mine
    mine.close()
    return None
