"""The record of one training: which run it is or goes on with, what it is asked for, its plan, and
how far it is. What is the same of every run has recording.py.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from headroom.base.facts import DataFacts, Owner, TrainFacts
from headroom.base.names import Place, list_shown
from headroom.base.units import make_printable
from headroom.run.alerts import find_device_mib
from headroom.run.findings import make_data_inputs, make_device_tags
from headroom.run.gate import compare_with_history, compute_gate_key
from headroom.run.preflight import check_fit
from headroom.run.progress import Progress, log_during_silence
from headroom.run.recording import Recording
from headroom.run.resume import RunClaim, log_resume_command, make_retry_tags
from headroom.settings import read_settings
from headroom.settings.read_settings import dump_yaml, hide_config_secrets
from headroom.settings.run_config import RunConfig
from headroom.tracking.tracking_settings import read_tracking_settings
from headroom.training.admission import PastRuns
from headroom.training.kept_steps import CHECKPOINTS, list_steps
from headroom.training.plan import Plan
from headroom.watch.accounts import find_newest_accounts
from headroom.watch.leaks import LeakError
from headroom.watch.step_metrics import AGE_S

log = logging.getLogger(__name__)
_ended: list[Record] = []


def find_last_ended() -> Record | None:
    """Return the record of the run that ended last here, also where Prefect failed to record it."""
    return _ended[-1] if _ended else None


class Record(Recording):
    """One training, from the claim on its folder to its true end in MLflow. A context manager."""

    _claim: RunClaim

    def __init__(
        self,
        config: RunConfig,
        *,
        flow_run: dict[str, str],
        name: str | None = None,
        waited_s: float = 0.0,
        resume: str | None = None,
        key: str = "",
        show_waiting: Callable[[str], None] = lambda reason: None,
        take_device_slot: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        """name: of the flow run, which is then this run's too. resume: which run to go on with;
        see RunClaim. key: of this training, where its settings give none.
        waited_s: how long a person has been waiting by now, for imports and servers.
        show_waiting, take_device_slot: show elsewhere what the run waits for, and what it has."""
        where = read_tracking_settings()
        super().__init__(
            where,
            RunClaim(Path(where.runs), config, name=name, resume=resume, key=key),
            params=read_settings.collect_params(config),
            experiment=config.run.experiment,
            waited_s=waited_s,
            notify=config.run.notify,
        )
        self.config = config
        self.past = PastRuns()  # what comparable runs have measured; see begin
        self._flow_run, self._take_device_slot = flow_run, take_device_slot
        self._progress: Progress | None = None
        self._screen = ExitStack()
        self._is_over = threading.Event()
        self.leases = self._live.make_leases(config.device.wait_s, show_waiting=show_waiting)

    @property
    def resumes(self) -> bool:
        """True if an earlier run is gone on with."""
        return self._claim.resumes

    @property
    def held_bytes(self) -> int:
        """Bytes that the training held at its end."""
        return self._found.held_bytes

    @property
    def leaks(self) -> tuple[Owner, ...]:
        """What grew from epoch to epoch."""
        return self._found.leaks

    def __enter__(self) -> Self:
        self._held.callback(self._is_over.set)
        self._held.callback(self.leases.close)
        log_during_silence(self._is_over, lambda: self._progress, lambda: self._live.live.stage)
        for line in read_settings.describe_unused_settings(self.config):
            log.warning("%s", line)
        return super().__enter__()

    def _prepare_end(self, error: BaseException | None) -> None:
        self._screen.close()
        self._progress = None
        if isinstance(error, LeakError):
            self.keep_release(error.facts)

    def begin(self, plan: Plan) -> Plan:
        """Open the run in MLflow, for what is planned, and learn what comparable runs measured;
        return the plan, checked.

        Raises ModelError, ConfigError or TrackingError where that can't be done, or trained.
        """
        plan = check_fit(plan)
        self._claim.check(plan)
        self._follow_claim()
        self._found.tags |= self._make_first_tags(plan)
        self._found.warn(*plan.data.warnings)
        self.past = PastRuns(self._clock.time_stage("open_run", self._open, plan))
        if self.leases.waited_s > 1:
            self._clock.stages["time/wait_device_s"] = self.leases.waited_s
        self._write("config.yaml", dump_yaml(hide_config_secrets(self.config).model_dump()))
        self._alerts.steps, self._alerts.epochs = plan.steps, plan.epochs
        self._alerts.device_mib = find_device_mib(plan.device, self.config.memory.limit_mib)
        at = next(iter(list_steps(self.folder / CHECKPOINTS)), 0) if self.resumes else 0
        self._progress = self._screen.enter_context(Progress(plan.steps, plan.epochs, at=at))
        return plan

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
        measured = self._go_on() if self.resumes else None
        if measured is None:
            measured = self._begin_anew(plan.data)
        device, start = plan.device, self._claim.start
        assert start is not None
        start = replace(start, steps=plan.steps, epochs=plan.epochs)
        start = start.mark_as_retry(self._claim.earlier)
        self._announce(start, device, steps=plan.steps, epochs=plan.epochs)
        for leased in self.leases.devices:
            self._held.enter_context(self._take_device_slot(leased))
        return measured

    def _go_on(self) -> dict[str, float] | None:
        """Go on with an earlier run; None where a key begins a new one instead."""
        step = next(iter(list_steps(self.folder / CHECKPOINTS)), 0)
        measured = self._reopen(step, wanted=list_shown(Place.NEXT_RUN))
        if measured is None:
            self._found.tags.pop("retries", None)
        return measured

    def _begin_anew(self, data: DataFacts) -> dict[str, float]:
        """Begin a new run."""
        self._tell_anew(f"run.key: {make_printable(self._claim.key, limit=80)} begins a new run")
        params = read_settings.select_params(self.params, task=data.task)
        start, measured = self._create(
            params,
            data=make_data_inputs(self.config.data, data),
            wanted=list_shown(Place.NEXT_RUN),
        )
        ids = self._journal
        self._claim.start = replace(start, run_id=ids.run_id, experiment_id=ids.experiment_id)
        return measured

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep the metrics of a step, and show how far it is."""
        assert self._progress is not None, "log() before begin()"
        self._progress.update({k: v for k, v in metrics.items() if k != AGE_S}, step)
        super().log(metrics, step)
        verdict = self._judge_so_far(find_newest_accounts())
        if verdict is not None:
            self._progress.show_verdict(verdict)

    def keep_training(self, facts: TrainFacts) -> None:
        """Keep what the training measured."""
        self._found.add_training(facts)
        if self._progress is not None:  # its last line says what the report says
            self._progress.update(facts.metrics, self._step)
        self.keep_stats(facts.stats)
        self.keep_layers(facts.layers)

    def _close(self) -> None:
        _ended[:] = [self]
        if self._found.failure or self._found.stopped:
            log_resume_command(self.folder, self._journal.run_id)
        super()._close()

    def _compare(self) -> dict[str, Any]:
        history, run = self._journal.wait_for_history(), self.config.run
        return compare_with_history(self.run, history, registered_model=run.registered_model)
