"""The record of one run, from the claim on its folder to its true end in MLflow: its journal, its
clock, what it has found, and its end. Prefect is shown which run has a device, and which waits for
one, by a concurrency limit of one slot a device: it decides nothing, that does the lease of the
host, so that a Prefect that is away is no reason to wait or to fail.
"""

from __future__ import annotations

import logging
import os
import shlex
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from json import dumps
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import ConcurrencyLeaseHolder, State
from prefect.runtime import flow_run
from prefect.states import Running

from tasks.engine.accounts.step_metrics import AGE_S
from tasks.engine.base.facts import DataFacts, Owner, ReleaseFacts, TrainFacts
from tasks.engine.base.units import make_printable
from tasks.engine.checkpoint.kept_steps import CHECKPOINTS, list_steps
from tasks.engine.memory.leaks import LeakError
from tasks.engine.settings import read_settings
from tasks.engine.settings.read_settings import ConfigError, dump_yaml, hide_config_secrets
from tasks.engine.settings.run_config import RunConfig
from tasks.engine.step.plan import Plan
from tasks.engine.training.admission import WANTED, PastRuns
from tasks.process.redaction import redact, redact_nested
from tasks.process.run_task import CURRENT_RUN
from tasks.run.failures import Failure
from tasks.run.findings import (
    Findings,
    RunClock,
    make_data_inputs,
    make_device_json,
    make_device_tags,
)
from tasks.run.gate import compare_with_history, compute_gate_key
from tasks.run.known_runs import (
    PEAK,
    Announcement,
    RunStart,
    choose_made_at,
    make_curve_name,
)
from tasks.run.preflight import check_fit
from tasks.run.progress import Progress, log_during_silence
from tasks.run.resume import RunClaim, log_resume_command, make_retry_tags
from tasks.services import serve
from tasks.tracking.journal import ONCE, Journal, JournalError, RunGone
from tasks.tracking.tracking_settings import TrackingError, read_tracking_settings

FREE_AFTER_S = 60.0  # of a slot whose holder is gone, as Prefect shows it; the least it takes
PATIENCE_S = 1.0  # for the slot of a holder that is gone
log = logging.getLogger(__name__)


def show_waiting(reason: str) -> None:
    """Give this flow run a state that says what it waits for.

    An empty reason: it waits no more.
    """
    if not flow_run.id:
        return
    state: State = Running(name="AwaitingDevice", message=reason) if reason else Running()
    with suppress(Exception), get_client(sync_client=True) as client:
        client.set_flow_run_state(UUID(flow_run.id), state, force=True)


@contextmanager
def take_device_slot(device: str) -> Iterator[None]:
    """Take the slot of the concurrency limit named after the device, for the block."""
    from prefect.concurrency.sync import concurrency  # some ms that a start-up can do without

    stack = ExitStack()
    try:
        if flow_run.id:
            with get_client(sync_client=True) as client:
                client.upsert_global_concurrency_limit_by_name(device, limit=1)
            holder = ConcurrencyLeaseHolder(type="flow_run", id=UUID(flow_run.id))
            slot = concurrency(
                device,
                timeout_seconds=PATIENCE_S,
                lease_duration=FREE_AFTER_S,
                holder=holder,
                raise_on_lease_renewal_failure=False,
            )
            stack.enter_context(slot)
    except Exception as error:  # of any kind: it is only shown
        log.debug("%s: not shown in Prefect: %s", device, error)
    try:
        yield
    finally:
        with suppress(Exception):  # the server may have gone since
            stack.close()


_ended: list[Record] = []


def find_last_ended() -> Record | None:
    """Return the record of the run that ended last here, also where Prefect failed to record it."""
    return _ended[-1] if _ended else None


class Record:
    """One run, from the claim on its folder to its true end in MLflow. A context manager."""

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
        see RunClaim. key: of this training, where its settings give none.
        waited_s: how long a person has been waiting by now, for imports and servers."""
        self.config = config
        self.run: dict[str, Any] = {}  # what the report is made from, once the run has ended
        self.past = PastRuns()  # what comparable runs have measured; see begin
        self._flow_run = flow_run
        self._where = read_tracking_settings()
        self._claim = RunClaim(Path(self._where.runs), config, name=name, resume=resume, key=key)
        self._clock = RunClock(waited_s)
        self._found = Findings()
        self._files: dict[str, str] = {}  # of the folder, by name
        self._step = 0
        self._journal = Journal(self._where, self.folder)
        self._journal.put_back = self._put_back
        self._progress: Progress | None = None
        self._screen, self._held = ExitStack(), ExitStack()
        self._is_over = threading.Event()
        self._live = Announcement(self.folder, self._claim.name)
        self.leases = self._live.make_leases(config.device.wait_s, told=show_waiting)

    @property
    def folder(self) -> Path:
        """The folder of this run's journal, checkpoints and files."""
        return self._claim.folder

    @property
    def resumes(self) -> bool:
        """Whether an earlier run is gone on with."""
        return self._claim.resumes

    @property
    def failure(self) -> Failure | None:
        """Why it failed; the first failure is the reason."""
        return self._found.failure

    @property
    def held_bytes(self) -> int:
        """Bytes that the training held at its end."""
        return self._found.held_bytes

    @property
    def leaks(self) -> tuple[Owner, ...]:
        """What grew from epoch to epoch."""
        return self._found.leaks

    def __enter__(self) -> Record:
        self._held.enter_context(self._claim)
        self._held.callback(self.leases.close)
        log_during_silence(self._is_over, lambda: self._progress, lambda: self._live.live.stage)
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
                self.keep_release(error.facts)
            if self._journal.is_begun:
                self._end(error)
        finally:
            self._is_over.set()
            self._journal.__exit__()
            self._held.close()

    def time_stage(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what the call returns; keep how long it took under its name, and why it failed."""
        self._live.tell(stage=name.replace("_", " "))
        try:
            return self._clock.time_stage(name, call, *args, **kwargs)
        except BaseException as error:
            self._found.fail(error)
            raise

    def begin(self, plan: Plan) -> Plan:
        """Open the run in MLflow, for what is planned, and learn what comparable runs measured.

        Raises ModelError, ConfigError or TrackingError where that can't be done, or trained.
        """
        check_fit(plan)
        self._claim.check(plan)
        self._follow_claim()
        self._found.tags |= self._make_first_tags(plan)
        self._found.warn(*plan.data.warnings)
        self.past = PastRuns(self._clock.time_stage("open_run", self._open, plan))
        if self.leases.waited_s > 1:
            self._clock.stages["time/wait_device_s"] = self.leases.waited_s
        self._write("config.yaml", redact(dump_yaml(hide_config_secrets(self.config).model_dump())))
        self._write("device.json", make_device_json(plan.device))
        at = next(iter(list_steps(self.folder / CHECKPOINTS)), 0) if self.resumes else 0
        self._progress = self._screen.enter_context(Progress(plan.steps, plan.epochs, at=at))
        return plan

    def _follow_claim(self) -> None:
        """Take over the claim's folder: the run may have become a new one, in its own folder."""
        if self._journal.folder != self.folder:
            self._journal.folder = self.folder
            self._live.tell(folder=str(self.folder), name=redact(self._claim.name))

    def _make_first_tags(self, plan: Plan) -> dict[str, str]:
        device, data = plan.device, plan.data
        return {
            **make_device_tags(device),
            **self._flow_run,
            **({"data.fingerprint": data.fingerprint} if data.fingerprint else {}),
            **({"data.notes": "; ".join(data.notes)} if data.notes else {}),
            **({"run.name": self.config.run.name} if self.config.run.name else {}),
            **({"run.key": self._claim.key} if self._claim.key else {}),
            "alike": plan.comparable,
            "gate.of": compute_gate_key(self.config, device, data),
            **make_retry_tags(
                self._claim.earlier, device, self.config.run, is_new=not self.resumes
            ),
        }

    def _open(self, plan: Plan) -> dict[str, float]:
        """Return what comparable runs have measured, with the run open in MLflow."""
        measured = self._reopen() if self.resumes else None
        if measured is None:
            measured = self._create(plan.data)
        device, start = plan.device, self._claim.start
        assert start is not None
        start = replace(start, steps=plan.steps, epochs=plan.epochs)
        start = start.mark_as_retry(self._claim.earlier, on=device.kind)
        self._claim.write_start(start)
        self._live.tell(
            run_id=start.run_id, device=device.name, steps=plan.steps, epochs=plan.epochs
        )
        if self.leases.is_held:
            self._held.enter_context(take_device_slot(device.uuid or device.name))
        return measured

    def _reopen(self) -> dict[str, float] | None:
        """Go on with an earlier run; None where a key begins a new one instead."""
        assert self._claim.start is not None
        start = self._claim.start = self._claim.start.make_next(self.folder)
        tags = {**self._found.tags, "resumed": str(start.resumed)}
        run = {"run_id": start.run_id, "experiment_id": start.experiment_id}
        try:
            measured = self._journal.reopen(run, tags=redact_nested(tags), wanted=WANTED)
        except RunGone as gone:
            self._claim.begin_anew(gone)
            self._follow_claim()
            self._found.tags.pop("retries", None)
            return None
        self._found.tags = tags
        told = self._journal.told
        self._found.series, self._step = told.select_series(), told.find_newest_step()
        return measured

    def _create(self, data: DataFacts) -> dict[str, float]:
        """Begin a new run."""
        if anew := self._claim.anew:
            told = f"run.key: {make_printable(self._claim.key, limit=80)} begins a new run: {anew}"
            log.warning("%s", told)
            self._found.warn(told)
            self._found.tags["anew"] = anew
        start = RunStart(
            "",
            "",
            self._claim.name,
            self._claim.key,
            pid=os.getpid(),
            began_at=self._clock.began_at,
            made_at=choose_made_at(self.folder.parent),
        )
        words = {
            "data": make_data_inputs(self.config.data, data),
            "tags": self._found.tags,
            "params": read_settings.select_params(
                read_settings.collect_params(self.config), task=data.task
            ),
            "start": asdict(start),
        }
        measured = self._journal.create(self._claim.name, **redact_nested(words), wanted=WANTED)
        self._claim.hold_folder()
        ids = self._journal
        self._claim.start = replace(start, run_id=ids.run_id, experiment_id=ids.experiment_id)
        return measured

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Keep the metrics of a step: the loop's one seam."""
        assert self._progress is not None, "log() before begin()"
        self._step = step
        age_s = metrics.pop(AGE_S, 0.0)
        self._progress.update(metrics, step)
        metrics = {make_curve_name(name): value for name, value in metrics.items()}
        if self._found.tags["device.kind"] == "cpu":  # two of whose windows have a peak: no curve
            peak_mib = metrics.pop(PEAK, 0.0)
            if peak_mib > self._live.live.peak_mib:
                self._live.tell(peak_mib=peak_mib)
        self._found.series |= metrics
        self._journal.log(metrics, step, age_s=age_s)

    def keep_training(self, facts: TrainFacts) -> None:
        """Keep what the training measured."""
        self._found.add_training(facts)
        if self._progress is not None:  # its last line says what the report says
            self._progress.update(facts.metrics, self._step)
        if facts.stats:
            self._write("memory/stats.json", dumps(facts.stats, indent=1))

    def keep_release(self, facts: ReleaseFacts) -> None:
        """Keep the proof that the memory was given back."""
        self._found.add_release(facts)

    def _write(self, name: str, text: str) -> None:
        self._files[name] = text
        (self.folder / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def _put_back(self) -> None:
        """Write the files of the folder anew, which was removed in mid-run.

        Else nobody would find the run there, nor see that it is being trained, nor go on with it.
        """
        with suppress(ConfigError):  # somebody else has the lock already
            self._claim.hold_folder()
        if self._claim.start is not None:
            self._claim.start.write(self.folder)
        self._put_back_files()

    def _put_back_files(self) -> None:
        for name in [n for n in self._files if not (self.folder / n).is_file()]:
            self._write(name, self._files[name])

    def _end(self, error: BaseException | None) -> None:
        found = self._found
        found.summary |= self._clock.stages
        known = {**self._journal.told.values, **found.series}
        new = {k: v for k, v in found.summary.items() if known.get(k) != v}
        if found.stopped:  # what an epoch was judged by has no place at a step of another
            new = {k: v for k, v in new.items() if not k.startswith(("train/", "val/"))}
        if error is not None:
            found.fail(error)
        self._journal.make_room()
        try:
            curves = {k: new.pop(k) for k in [*new] if k in found.series}
            self._journal.log(new, ONCE)
            # Again, where the process before this one ended before it had told by what its weights
            # were chosen. What has a curve never gets a point at the step of what has none.
            self._journal.log(curves, self._step, again=True)
            self._put_back_files()
        except (JournalError, OSError) as lost:
            found.fail(lost)
            self._close()
            if error is None:
                raise
            return
        self._close()

    def _close(self) -> None:
        self._found.add_end()
        if self._found.failure or self._found.stopped:
            log_resume_command(self.folder, self._journal.run_id)
        if self._journal.notes:
            self._found.tags["journal.notes"] = "; ".join(self._journal.notes)
        before_s = self._claim.start.spent_s if self._claim.start is not None else 0.0
        self.run = {
            **self._make_page(),
            "name": self._claim.name,
            "params": read_settings.collect_params(self.config),
            **self._found.make_report(),
        }
        self.run["metrics"]["time/total_s"] = before_s + self._clock.total_s()
        if not self._found.failure and not self._found.stopped:
            self.run |= compare_with_history(
                self.run, self._journal.wait_for_history(), self.config
            )
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
        self.run |= self._make_page()  # it may have been told of the run at last

    def _make_page(self) -> dict[str, str]:
        """Return where MLflow has the run; no ids while it is away."""
        ids = self._journal.ids
        return {**ids, "open_command": serve.make_open_command(self._where.tracking_uri, **ids)}
