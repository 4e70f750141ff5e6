"""Describes where a run is, as tags and as a file of it: the device, the host, the process
and its user.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import shlex
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from tasks.engine.base.facts import Column, DataFacts, DeviceFacts, Owner, ReleaseFacts, TrainFacts
from tasks.engine.base.file_lock import FileLock
from tasks.engine.base.timing import Stopwatch
from tasks.engine.base.units import make_printable
from tasks.engine.checkpoint.kept_steps import CHECKPOINTS
from tasks.engine.checkpoint.kept_steps import list_steps as kept_steps
from tasks.engine.memory.leaks import LeakError, release_metrics
from tasks.engine.memory.memory_meter import MIB
from tasks.engine.settings import read_settings
from tasks.engine.settings.read_settings import ConfigError, dump_yaml, hide_config_secrets
from tasks.engine.settings.run_config import DataConfig, RunConfig
from tasks.engine.step.plan import Plan
from tasks.engine.training.admission import WANTED, PastRuns
from tasks.engine.training.oom_files import OutOfMemory
from tasks.process.prefect_http import uptime
from tasks.process.redaction import redact, redact_nested
from tasks.run import device_slots
from tasks.run import resume as earlier
from tasks.run.failures import Failure, classify_failure
from tasks.run.gate import compare_with_history, compute_gate_key
from tasks.run.live_runs import Announcement
from tasks.run.preflight import check_fit
from tasks.run.progress import Progress, log_during_silence
from tasks.run.run_folders import RunStart, next_made_at, read_start
from tasks.run.run_task import CURRENT_RUN
from tasks.services import serve
from tasks.tracking.journal import ONCE, Journal, JournalError, RunGone
from tasks.tracking.where import TrackingError, read_tracking_settings


def make_device_tags(device: DeviceFacts) -> dict[str, str]:
    """Return the tags of the device and of this process; what is not known has none."""
    found = {
        "device": device.name,
        "device.kind": device.kind,
        "device.model": device.model,
        "device.uuid": device.uuid,
        "device.reason": device.reason,
        "device.total_mib": None
        if device.total_bytes is None
        else f"{device.total_bytes / MIB:.0f}",
        "torch.version": device.torch_version,
        "accelerator.runtime": device.runtime,
        "driver.version": device.driver_version,
    }
    return {k: v for k, v in found.items() if v is not None} | make_process_tags("flows/train.py")


def make_process_tags(source: str) -> dict[str, str]:
    """Return the tags of this process and of its source file.

    By these a run is found whose process died.
    """
    me = psutil.Process()
    found = {
        "host": socket.gethostname(),
        "pid": str(me.pid),
        "process.started_at": f"{me.create_time():.2f}",
        "process.uptime_s": uptime(me),
        "mlflow.source.name": source,
        "mlflow.source.type": "LOCAL",
        "mlflow.user": _find_user(),
    }
    return {k: v for k, v in found.items() if v is not None}


def make_device_json(device: DeviceFacts) -> str:
    """Return all that is known of the device, and every check on the way to it, as JSON."""
    facts = asdict(device)
    checks = facts.pop("checks")
    return json.dumps({**facts, "checks": checks}, indent=1)


def _find_user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return None


SCHEMA_LIMIT = 2**20 - 1  # characters that MLflow takes; of what is larger nothing is told


def make_data_inputs(data: DataConfig, facts: DataFacts) -> list[dict[str, str]]:
    """Return the inputs by the names of MLflow's entity Dataset, each with its context."""
    if not facts.fingerprint:
        return []
    kind, source = "code", json.dumps({"tags": {"mlflow.source.name": data.source}})
    if data.path is not None:
        kind, source = "local", json.dumps({"uri": str(Path(data.path).absolute())})
    name, schema = Path(data.path or data.source).name, json.dumps(_make_schema(facts))
    told = {"source_type": kind, "source": source, "digest": facts.fingerprint[:36]}
    if len(schema) <= SCHEMA_LIMIT:
        told["schema"] = schema
    parts: tuple[tuple[str, str, int], ...] = (
        ("training", name, facts.train_rows),
        ("validation", f"{name} (val)", facts.val_rows),
    )
    if facts.test_rows:
        parts += (("test", f"{name} (test)", facts.test_rows),)
    return [
        {**told, "context": part, "name": called, "profile": json.dumps({"num_rows": rows})}
        for part, called, rows in parts
    ]


def _make_schema(facts: DataFacts) -> dict[str, object]:
    """Return a table's columns as its user has them.

    For other data the shapes that the model gets.
    """
    if facts.columns is not None:
        return {"mlflow_colspec": [_make_column(column) for column in facts.columns]}
    rows = [-1, *facts.input_shape]
    if facts.task == "tokens":
        x, y = ("int64", rows), ("int64", rows)
    elif facts.task == "classification":
        x, y = ("float32", rows), ("int64", [-1])
    else:
        x, y = ("float32", rows), ("float32", [-1, facts.outputs])
    return {"mlflow_tensorspec": {"features": _make_tensor(*x), "targets": _make_tensor(*y)}}


def _make_column(column: Column) -> dict[str, object]:
    number = "long" if column.whole else "double"
    kind = {"category": "string", "date": "datetime"}.get(column.kind, number)
    return {"name": column.name, "type": kind, "required": column.fill is None}


def _make_tensor(dtype: str, shape: list[int]) -> str:
    return json.dumps([{"type": "tensor", "tensor-spec": {"dtype": dtype, "shape": shape}}])


log = logging.getLogger(__name__)
_ended: list[Record] = []


def last_ended() -> Record | None:
    """That of the run that ended last here, also where Prefect then failed to record it."""
    return _ended[-1] if _ended else None


def _new_folder(runs: Path) -> Path:
    return runs / f"{earlier.make_timestamp()}-{uuid4().hex[:8]}"


class Record:
    """One run: its journal, its progress line, and the report at its end."""

    def __init__(
        self,
        config: RunConfig,
        *,
        flow_run: dict[str, str],
        name: str | None = None,
        waited_s: float = 0.0,
        resume: str | None = None,
        key: str = "",
    ) -> None:
        """name: of the flow run, which is then this run's too. resume: which run to go on with;
        see resume.asked_for. key: of this training, where its settings give none.
        waited_s: how long a person has been waiting by now, for imports and servers."""
        self.config = config
        self.run: dict[str, Any] = {}  # what the report is made from, once the run has ended
        self._flow_run = flow_run
        self._where = read_tracking_settings()
        runs = Path(self._where.runs)
        self._key = config.run.key or key
        self._own_name = name or earlier.make_default_name(config)
        self._by_key = bool(self._key and not resume)
        self._anew = ""  # why the key does not go on with its last run
        with ExitStack() as held:  # first of the key: of two who look for its run one finds it
            if self._key:
                held.enter_context(earlier.held_key(runs, self._key))
            left, lock = self._found(runs, resume)
            if lock is not None:
                held.enter_context(lock)
            self._held = held.pop_all()  # the key, the folder's lock, and the lease of the device
        self._folder_lock = lock
        self.resumes = left is not None
        self.past = PastRuns()  # what comparable runs have measured; see begin
        self.folder = left or _new_folder(runs)
        self._start = read_start(self.folder) if left else None
        self._follows = self._start or earlier.find_failed_start(runs, self._key)
        self._name = self._start.name if self._start else self._own_name
        self._watch = Stopwatch()
        self._stages = {"time/start_s": waited_s}
        self._series: dict[str, float] = {}  # last values
        self._summary: dict[str, float] = {}
        self._tags: dict[str, str] = {}
        self._warnings: list[str] = []
        self._owners: list[dict[str, Any]] = []
        self._kept: list[dict[str, Any]] = []  # memory that no tensor holds, by name
        self.failure: Failure | None = None  # the first one
        self._oom: dict[str, Any] | None = None  # how memory ran out
        self._stopped = ""  # why it ended before it was done
        self.held_bytes, self.leaks = 0, tuple[Owner, ...]()  # at the end of the training
        self._files: dict[str, str] = {}  # of the folder, by name
        self._step = 0
        self._screen = ExitStack()
        self._journal = Journal(self._where, self.folder)
        self._journal.put_back = self._put_back
        self._progress: Progress | None = None
        self._over = threading.Event()
        self._live = Announcement(self.folder, self._name)
        self.leases = self._live.leases(config.device.wait_s, told=device_slots.show_waiting)

    def __enter__(self) -> Record:
        self._held.callback(self.leases.close)
        log_during_silence(self._over, lambda: self._progress, lambda: self._live.live.stage)
        for line in read_settings.describe_unused_settings(self.config):
            log.warning("%s", line)
        self._journal.__enter__()
        self._journal.open(self.config.run.experiment)
        self._held.enter_context(self._live)
        self._held.callback(CURRENT_RUN.reset, CURRENT_RUN.set(self))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        try:
            self._screen.close()
            self._progress = None
            self._live.tell(stage="sending it to MLflow")
            if isinstance(error, LeakError):
                self.released(error.facts)
            if self._journal.is_begun:
                self._end(error)
        finally:
            self._over.set()
            self._journal.__exit__()
            self._held.close()

    def _found(self, runs: Path, resume: str | None) -> tuple[Path | None, FileLock | None]:
        """The folder of the run to go on with, held; none where a key begins a new one."""
        left = (
            earlier.find_resumed_folder(runs, resume)
            if resume
            else earlier.find_unfinished_folder(runs, self._key)
        )
        try:
            return left, earlier.taken(left) if left is not None else None
        except earlier.NothingKept as nothing:
            if not self._by_key:
                raise
            self._anew = str(nothing)
            return None, None

    def _check_resume(self, plan: Plan) -> None:
        """Refuse to go on as another training. Where nothing is left to go on from, a key begins
        a new run. Raises ConfigError."""
        if self.resumes:
            try:
                earlier.check_resume(self.folder, plan)
            except earlier.NothingKept as nothing:
                self._begin_anew(nothing)

    def _begin_anew(self, why: earlier.NothingKept | RunGone) -> None:
        """The run of before can't be gone on with: what names it is refused, a key leaves it."""
        if not self._by_key:
            raise earlier.NothingKept(
                f"--resume {self.folder}: {why}; remove that folder, or train without --resume"
            ) from None
        assert self._folder_lock is not None
        self._folder_lock.close()
        self._anew = f"{why}; its folder {self.folder} is left, remove it where nobody needs it"
        self.resumes, self.folder = False, _new_folder(self.folder.parent)
        self._start = self._follows = None
        self._name = self._own_name
        self._journal.folder = self.folder
        self._live.tell(folder=str(self.folder), name=redact(self._name))

    def time_stage(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what the call returns; keep how long it took under its name, and why it failed."""
        self._live.tell(stage=name.replace("_", " "))
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._stages[f"time/{name}_s"] = time.perf_counter() - began

    def begin(self, plan: Plan) -> Plan:
        """Open the run in MLflow, for what is planned, and learn what comparable runs measured.

        Raises ModelError, ConfigError or TrackingError where that can't be done, or trained.
        """
        check_fit(plan)
        self._check_resume(plan)
        device, data = plan.device, plan.data
        self._tags = {
            **make_device_tags(device),
            **self._flow_run,
            **({"data.fingerprint": data.fingerprint} if data.fingerprint else {}),
            **({"data.notes": "; ".join(data.notes)} if data.notes else {}),
            "alike": plan.comparable,
            "gate.of": compute_gate_key(self.config, device, data),
            **earlier.make_retry_tags(
                self._follows, device, self.config.run, is_new=not self.resumes
            ),
        }
        self._warn(data.warnings)
        began = time.perf_counter()
        measured = self._reopened() if self.resumes else None
        if measured is None:
            measured = self._created(data)
        assert self._start is not None
        self._start = replace(self._start, steps=plan.steps, epochs=plan.epochs)
        self._start = self._start.mark_as_retry(self._follows, on=device.kind)
        self._start.write(self.folder)
        self._live.tell(
            run_id=self._start.run_id, device=device.name, steps=plan.steps, epochs=plan.epochs
        )
        if self.leases.is_held:
            self._held.enter_context(device_slots.take_device_slot(device.uuid or device.name))
        if self.leases.waited_s > 1:
            self._stages["time/wait_device_s"] = self.leases.waited_s
        self._stages["time/open_run_s"] = time.perf_counter() - began
        self._write("config.yaml", redact(dump_yaml(hide_config_secrets(self.config).model_dump())))
        self._write("device.json", make_device_json(device))
        at = next(iter(kept_steps(self.folder / CHECKPOINTS)), 0) if self.resumes else 0
        self._progress = self._screen.enter_context(Progress(plan.steps, plan.epochs, at=at))
        self.past = PastRuns(measured)
        return plan

    def _reopened(self) -> dict[str, float] | None:
        """What runs alike have measured; None where a key begins a new run instead."""
        assert self._start is not None
        self._start = self._start.again(self.folder)
        self._tags["resumed"] = str(self._start.resumed)
        run = {"run_id": self._start.run_id, "experiment_id": self._start.experiment_id}
        try:
            found = self._journal.reopen(run, tags=redact_nested(self._tags), wanted=WANTED)
        except RunGone as gone:
            self._begin_anew(gone)
            for name in ("resumed", "retries"):
                self._tags.pop(name, None)
            return None
        self._series, self._step = self._journal.told.series(), self._journal.told.step()
        return found

    def _created(self, data: DataFacts) -> dict[str, float]:
        """The same of a new run."""
        if self._anew:
            told = f"run.key: {make_printable(self._key, limit=80)} begins a new run: {self._anew}"
            log.warning("%s", told)
            self._warn((told,))
            self._tags["anew"] = self._anew
        words = {"data": make_data_inputs(self.config.data, data), "tags": self._tags}
        words |= {"params": read_settings.collect_params(self.config)}
        start = RunStart("", "", self._name, self._key, pid=os.getpid())
        start = replace(
            start,
            began_at=time.time() - self._watch.total_s(),
            made_at=next_made_at(self.folder.parent),
        )
        words |= {"start": asdict(start)}
        found = self._journal.create(self._name, **redact_nested(words), wanted=WANTED)
        self._held.enter_context(earlier.lock_for_training(self.folder))
        ids = self._journal
        self._start = replace(start, run_id=ids.run_id, experiment_id=ids.experiment_id)
        return found

    def log(self, metrics: dict[str, float], step: int) -> None:
        """The loop's one seam: metrics of a step."""
        assert self._progress is not None, "log() before begin()"
        self._step = step
        self._series |= metrics
        self._journal.log(metrics, step)
        self._progress.update(metrics, step)

    def trained(self, facts: TrainFacts) -> None:
        """Keep what the training measured."""
        self.held_bytes, self.leaks = facts.held_bytes, facts.leaks
        self._summary |= facts.metrics
        self.run["classes"] = facts.classes
        if self._progress is not None:  # its last line says what the report says
            self._progress.update(facts.metrics, self._step)
        self._tags |= facts.tags
        self._stopped = facts.stopped
        self._warn(facts.warnings)
        if facts.stats:
            self._write("memory/stats.json", json.dumps(facts.stats, indent=1))

    def _write(self, name: str, text: str) -> None:
        self._files[name] = text
        (self.folder / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def _put_back(self) -> None:
        """The folder was removed in mid-run: else nobody would find the run there, nor see that it
        is being trained, nor go on with it."""
        with suppress(ConfigError):  # somebody else has the lock already
            self._held.enter_context(earlier.lock_for_training(self.folder))
        if self._start is not None:
            self._start.write(self.folder)
        self._put_back_files()

    def _put_back_files(self) -> None:
        for name in [n for n in self._files if not (self.folder / n).is_file()]:
            self._write(name, self._files[name])

    def _warn(self, warnings: tuple[str, ...]) -> None:
        """Keep what a person should doubt, in the report and as a tag."""
        self._warnings += warnings
        if self._warnings:
            self._tags["warnings"] = "\n".join(self._warnings)

    def released(self, facts: ReleaseFacts) -> None:
        """Keep the proof that the memory was given back."""
        self._summary |= release_metrics(facts)
        if facts.broken:  # whose memory it is, nobody can tell any more
            self._tags["memory.release"] = facts.broken
            self.failure = self.failure and self.failure.broken()
            return
        self._kept = [asdict(kept) for kept in facts.kept]
        self._owners = [asdict(owner) for owner in facts.owners]

    def _end(self, error: BaseException | None) -> None:
        self._summary |= self._stages
        known = {**self._journal.told.values, **self._series}
        new = {k: v for k, v in self._summary.items() if known.get(k) != v}
        if self._stopped:  # what an epoch was judged by has no place at a step of another
            new = {k: v for k, v in new.items() if not k.startswith(("train/", "val/"))}
        if error is not None:
            self._fail(error)
        self._journal.make_room()
        try:
            curves = {k: new.pop(k) for k in [*new] if k in self._series}
            self._journal.log(new, ONCE)
            # Again, where the process before this one ended before it had told by what its weights
            # were chosen. What has a curve never gets a point at the step of what has none.
            self._journal.log(curves, self._step, again=True)
            self._put_back_files()
        except (JournalError, OSError) as lost:
            self._fail(lost)
            self._close()
            if error is None:
                raise
            return
        self._close()

    def _close(self) -> None:
        failure = self.failure
        if failure is not None:
            self._tags |= {"end.reason": failure.said, "failure": failure.kind}
        elif self._stopped:
            self._tags["end.reason"] = self._stopped
            self._warn((f"{self._stopped}: the training is not done",))
        if failure or self._stopped:
            earlier.log_resume_command(self.folder, self._journal.run_id)
        if self._journal.notes:
            self._tags["journal.notes"] = "; ".join(self._journal.notes)
        before_s = self._start.spent_s if self._start is not None else 0.0
        self.run |= {
            **self._page(),
            "name": self._name,
            "status": failure.status if failure else "FINISHED",
            "stopped": self._stopped,
            "params": read_settings.collect_params(self.config),
            "tags": self._tags,
            "metrics": {
                **self._series,
                **self._summary,
                "time/total_s": before_s + self._stages["time/start_s"] + self._watch.total_s(),
            },
            "warnings": self._warnings,
            "owners": self._owners,
            "kept": self._kept,
            "error": failure.said if failure else None,
            "oom": self._oom,
        }
        if not failure and not self._stopped:
            self.run |= compare_with_history(self.run, self._journal.history(), self.config)
        self.run = redact_nested(self.run)
        _ended[:] = [self]
        try:
            self.run["metrics"] |= self._journal.close(self.run)
        except TrackingError as unsent:
            told = f"python -m tasks.tracking.mlflow_sender {shlex.quote(str(self.folder))}"
            log.error(
                "%s. Nothing is lost: it is sent when MLflow takes it, or now by `%s`", unsent, told
            )
            self.run["unsent"] = f"MLflow has not got all of it yet: {unsent}"
        self.run |= self._page()  # it may have been told of the run at last

    def _page(self) -> dict[str, str]:
        """Where MLflow has the run; no ids while it is away."""
        ids = self._journal.ids
        return {**ids, "open_command": serve.make_open_command(self._where.tracking_uri, **ids)}

    def _fail(self, error: BaseException) -> None:
        """The first failure is the reason; what the release says after it must not hide it."""
        if self.failure is None:
            self.failure = classify_failure(error)
            if isinstance(error, OutOfMemory):
                self._oom = asdict(error.explanation)
