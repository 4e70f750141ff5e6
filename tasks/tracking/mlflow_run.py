"""One run in MLflow: its journal sent in batches by the run's id, and its end with its true status,
also when its process has died. Part of the sending process.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag
from mlflow.exceptions import MlflowException

from tasks.engine.base.file_lock import FileLock
from tasks.engine.device.telemetry import Telemetry
from tasks.engine.report import run_report
from tasks.process.redaction import redacted
from tasks.tracking import logged_model, metrics
from tasks.tracking.environment import environment
from tasks.tracking.journal import BEGIN, RESERVE
from tasks.tracking.journal_lines import (
    LOCK,
    ONCE,
    START,
    TRAINING_LOCK,
    Sample,
    batches,
    ends,
    series,
)
from tasks.tracking.mlflow_pages import run_page
from tasks.tracking.throttle import Pace
from tasks.tracking.where import Where

PIECE_BYTES = 2**15  # of the journal, where the training needs all cores: some 5 ms of one
PARAMS = 100
TAG_LIMIT = 7900  # characters; over 8,000 MLflow cuts, or refuses
REOPEN_S = 60.0  # for another process to send the end that the run has come to
REPORT = "report.html"
REGISTERED = "registered"  # a tag
UNSENT = "unsent"  # a tag of a run of which MLflow has not got all: why, and where the rest is
EARLIER = "prefect.earlier_flow_runs"  # a tag: those that this run goes on with
OURS = (
    *("sent.json", "run.json", BEGIN, LOCK, RESERVE, "model"),
    *(START, TRAINING_LOCK, "checkpoints"),
)  # of a run's folder, what is no artifact


@dataclass
class State:
    """How far a run's journal was sent; kept beside it as sent.json."""

    run_id: str
    experiment_id: str
    offset: int = 0  # bytes of metrics.jsonl
    closed: bool = False
    model_id: str = ""  # of the model logged, once it exists
    has_model: bool = False  # whether all of it is there
    damaged: int = 0  # lines that had to be skipped
    unsent: str = ""  # why it has ended and not all of it could be sent
    earlier: str = ""  # flow runs that the run began in, and does not end in: separated by commas


@dataclass
class Sender:
    """One run in MLflow."""

    client: MlflowClient
    where: Where
    folder: Path
    state: State
    tags: dict[str, str] = field(default_factory=dict)
    telemetry: Telemetry = field(default_factory=lambda: Telemetry(None))
    step: int = 0  # of the newest metric sent
    retry_at: float = 0.0
    wait_s: float = 1.0
    pace: Pace = field(default_factory=Pace)
    told_progress: Callable[[], None] = lambda: None  # who waits for the end hears of each batch
    registered: str = ""  # what became of the model in MLflow's registry
    held: FileLock | None = None  # the lock of the folder, while this process sends it

    def tell_params(self, params: Mapping[str, str]) -> None:
        """As often as one likes, while they are the same."""
        entries = [Param(k, v[:5900]) for k, v in params.items()]
        for i in range(0, len(entries), PARAMS):
            self.client.log_batch(self.state.run_id, params=entries[i : i + PARAMS])

    def tell_data(self, inputs: Sequence[Mapping[str, str]]) -> None:
        """MLflow keeps one of each name and digest, however often it is told. It looks first and
        writes then: where another run was told between, it has been written, and is found."""
        found = []
        for told in inputs:
            tag = InputTag("mlflow.data.context", told["context"])
            words = {k: v for k, v in told.items() if k != "context"}
            found.append(DatasetInput(Dataset(**words), [tag]))
        for last in (False, False, True) if found else ():
            try:
                self.client.log_inputs(self.state.run_id, found)
                break
            except MlflowException as error:
                if last or "IntegrityError" not in str(error):
                    raise

    def flush(self, *, most_bytes: float = math.inf) -> None:
        """Send the metrics that are new, of so many bytes of the journal. Raises what MLflow
        raises; nothing is lost then."""
        bad: list[int] = []
        with suppress(FileNotFoundError), open(self.folder / "metrics.jsonl", "rb") as journal:
            found = batches(journal, self.state.offset, most_bytes=most_bytes, damaged=bad)
            for batch, offset in found:
                if batch:
                    self.step = max(self.step, max(sample[-1] for sample in batch))
                    self._send(batch)
                self.state.offset = offset
                self.state.damaged += len(bad)
                bad.clear()
                self._keep()
                self.told_progress()
        now_ms = self._now_ms()
        sample = self.telemetry.sample().items()
        if sample:
            self._send([(k, v, now_ms, self.step) for k, v in sample])
        if self.tags:
            tags = [RunTag(k, v[:TAG_LIMIT]) for k, v in self.tags.items()]
            self.client.log_batch(self.state.run_id, tags=tags)
            self.tags.clear()

    def _send(self, samples: list[Sample]) -> None:
        metrics.send(self.client, self.where.database, self.state.run_id, samples)

    def flush_patiently(self) -> None:
        """Send, or try again later: the training must not notice that MLflow is away, nor that it
        takes time."""
        if time.monotonic() < self.retry_at or not self.pace.may_work():
            return
        began = time.process_time()
        try:
            self.flush(most_bytes=math.inf if self.pace.has_spare else PIECE_BYTES)
            self.wait_s = 1.0
        except Exception as error:  # of any store: sqlite's, the network's, the server's
            print(
                f"{self.state.run_id}: kept, not yet sent: {redacted(str(error))}", file=sys.stderr
            )
            self.retry_at = time.monotonic() + self.wait_s
            self.wait_s = min(30.0, 2 * self.wait_s)
        self.pace.worked(time.process_time() - began)

    def close(self, run: dict[str, Any], *, end_ms: int | None = None) -> dict[str, float]:
        """Send all that is left and end the run; the times that only its end could tell. Raises
        what MLflow raises. end_ms: when it ended, if not now."""
        (self.folder / RESERVE).unlink(missing_ok=True)  # where its process has died
        try:
            times = self._send_the_rest(run)
            if self.state.unsent:
                self.state.unsent = ""
                if UNSENT in self.client.get_run(self.state.run_id).data.tags:
                    self.client.delete_tag(self.state.run_id, UNSENT)
        except Exception as error:
            self._tell_unsent(run, error)
            raise
        finally:
            self.telemetry.close()
            # Whatever else went wrong, the run is over, and says how it ended.
            end_ms = max(end_ms, self._newest_ms()) if end_ms else self._now_ms()
            self.client.set_terminated(self.state.run_id, run["status"], end_ms)
        self.state.closed = True
        self._keep()
        (self.folder / BEGIN).unlink(missing_ok=True)
        # Only now: what was sent is a copy with the same rights, and is for all who may see MLflow.
        for path in self.folder.rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)
        return times

    def _now_ms(self) -> int:
        """Unix time in ms, but later than all that the journal tells: its clock may have been set
        back since, and MLflow shows of one step what has the later time."""
        return max(int(time.time() * 1000), self._newest_ms())

    def _newest_ms(self) -> int:
        newest = ends(self.folder / "metrics.jsonl")[1]
        return max((unix_ms for unix_ms, _, _ in newest), default=-1) + 1

    def _send_the_rest(self, run: dict[str, Any]) -> dict[str, float]:
        began = time.perf_counter()
        run_id = self.state.run_id
        self.tags |= {k: str(v) for k, v in run.get("tags", {}).items()}
        self.flush()
        self._tell_damage()
        path = run_page(self.state.experiment_id, run_id)
        is_late = run.get("run_id") == ""  # its command names no run
        run = {**run, "run_id": run_id, "experiment_id": self.state.experiment_id}
        run["series"] = series(self.folder / "metrics.jsonl")
        command = run.get("open_command", "make ui") + (path if is_late else "")
        plots = run_report.plots(run, self._made("plots"))
        (self.folder / "environment.txt").write_text(environment())
        has_model = (self.folder / "model" / "spec.json").is_file()
        if run["status"] == "FINISHED" and has_model and not self.state.has_model:
            self._send_model()
        if self.state.has_model and (asked := run.get("register")):
            self._register(asked)
            run["tags"] = {**run["tags"], REGISTERED: self.registered}
        for name in sorted(os.listdir(self.folder)):
            if name not in (*OURS, REPORT):
                self._artifact(self.folder / name)
        # What is left takes next to no time, and shows what all of it took.
        times = {"time/close_s": time.perf_counter() - began}
        if "time/total_s" in run["metrics"]:
            times["time/total_s"] = run["metrics"]["time/total_s"] + times["time/close_s"]
        run["metrics"] = {**run["metrics"], **times}
        now_ms = self._now_ms()
        self._send([(k, v, now_ms, ONCE) for k, v in times.items()])
        page = run_report.html(run, plots, open_command=command)
        (self.folder / REPORT).write_text(page, encoding="utf-8")
        self._artifact(self.folder / REPORT)
        note = run_report.markdown(run, open_command=command)
        self.client.set_tag(run_id, "mlflow.note.content", note)
        return times

    def _tell_unsent(self, run: Mapping[str, Any], error: Exception) -> None:
        """Else a run would look whole that has no model, and only a log would know."""
        has_one = run["status"] == "FINISHED" and (self.folder / "model" / "spec.json").is_file()
        lacks = "its model" if has_one and not self.state.has_model else "part of it"
        said = " ".join(redacted(str(error)).split())[:300] or type(error).__name__
        self.state.unsent = f"{lacks} is not in MLflow yet, but in {self.folder}: {said}"
        with suppress(OSError):  # a full disk
            self._keep()
        with suppress(Exception):  # of any store: it may be all away
            self.client.set_tag(self.state.run_id, UNSENT, self.state.unsent)

    def _tell_damage(self) -> None:
        """Nothing comes any more: what is no whole line by now will never be one."""
        journal = self.folder / "metrics.jsonl"
        whole_bytes = journal.stat().st_size if journal.is_file() else 0
        bad = self.state.damaged + (whole_bytes > self.state.offset)
        if bad:
            print(f"{journal}: {bad} damaged lines were skipped", file=sys.stderr)
            self.client.set_tag(self.state.run_id, "journal.damaged_lines", str(bad))

    def _send_model(self) -> None:
        """Once, however often the rest is sent."""
        if not self.state.model_id:
            self.state.model_id = logged_model.create(self.client, self.state, self.folder)
            self._keep()
        logged_model.fill(self.client, self.state, self.folder)
        self.state.has_model = True
        self._keep()

    def _register(self, asked: dict[str, Any]) -> None:
        """The run is not lost where the registry is."""
        try:
            turn = Path(self.where.runs) / "registry.lock"
            self.registered = logged_model.register(self.client, self.state, asked, turn)
        except Exception as error:  # of any store
            told = redacted(str(error)).strip() or type(error).__name__
            self.registered = f"not registered as {asked['name']}: {told.splitlines()[0]}"
        self.client.set_tag(self.state.run_id, REGISTERED, self.registered[:TAG_LIMIT])

    def _artifact(self, path: Path) -> None:
        if path.is_dir():
            self.client.log_artifacts(self.state.run_id, str(path), path.name)
        else:
            self.client.log_artifact(self.state.run_id, str(path))

    def _made(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return folder

    def _keep(self) -> None:
        half = self.folder / "sent.json.new"
        half.write_text(json.dumps(vars(self.state)))
        half.rename(self.folder / "sent.json")


def create(
    client: MlflowClient,
    chosen: Where,
    *,
    experiment_id: str,
    folder: Path,
    name: str,
    params: dict[str, str],
    tags: dict[str, str],
    data: Sequence[Mapping[str, str]] = (),
    start_ms: int | None = None,
) -> Sender:
    """A new run with its params, tags and data. start_ms: when it began, if not now."""
    tags = {k: v[:TAG_LIMIT] for k, v in tags.items()} | {"journal": folder.name}
    run = client.create_run(experiment_id, start_ms, tags, name)
    sender = Sender(client, chosen, folder, State(run.info.run_id, experiment_id))
    sender.tell_params(params)
    sender.tell_data(data)
    sender._keep()
    return sender


def reopen(
    client: MlflowClient, chosen: Where, *, state: State, folder: Path, tags: dict[str, str]
) -> Sender:
    """A run that ended, or was ended, and goes on. state: how far it was sent."""
    state.closed, state.model_id, state.has_model = False, "", False
    sender = Sender(client, chosen, folder, state)
    # First who trains it: one that says RUNNING and whose process is gone is ended by anybody.
    before = client.get_run(state.run_id).data.tags
    for name in before.keys() & {"end.reason", "failure", "warnings", UNSENT}:
        client.delete_tag(state.run_id, name)
    # They crashed, or were stopped, and would be counted among the failed ones for ever.
    flow_runs = [*before.get(EARLIER, "").split(","), before.get("prefect.flow_run_id", "")]
    others = dict.fromkeys(f for f in flow_runs if f not in ("", tags.get("prefect.flow_run_id")))
    state.earlier, state.unsent = ",".join(others), ""
    known = [RunTag(k, v[:TAG_LIMIT]) for k, v in {**tags, EARLIER: state.earlier}.items() if v]
    client.log_batch(state.run_id, tags=known)
    client.update_run(state.run_id, status="RUNNING")
    sender._keep()
    return sender


def telemetry(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> Telemetry:
    """Of the device that the run's tags name, where it is one that tells; its energy adds to what
    the run has used before."""
    if tags.get("device.kind") != "cuda":
        return Telemetry(None)
    used_j = client.get_run(run_id).data.metrics.get("gpu/energy_j", 0.0)
    return Telemetry(tags.get("device.uuid"), energy_j=used_j)


def lock_patiently(folder: Path) -> FileLock:
    """The folder's lock. Raises TimeoutError where the process that sends the run's end does not
    come to one."""
    until = time.monotonic() + REOPEN_S
    while (mine := lock(folder)) is None:
        if time.monotonic() > until:
            raise TimeoutError(f"runs: {folder} is still being sent by another process")
        time.sleep(0.1)
    return mine


def lock(folder: Path) -> FileLock | None:
    """The folder's lock, until it is closed or the process ends; None where another has it."""
    mine = FileLock(folder / LOCK)
    if mine.take():
        return mine
    mine.close()
    return None
