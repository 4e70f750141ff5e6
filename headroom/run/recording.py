"""What is the same in the life of every run, whoever trains: folder, journal, clock, what it
has found, what `flows.runs` shows of it, and its true end in MLflow with report and gate. It
knows no settings, and neither Prefect nor MLflow.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from time import monotonic
from typing import Any, Self

from headroom.base.event_log import ONCE
from headroom.base.facts import DeviceFacts, ReleaseFacts
from headroom.process import signals
from headroom.process.redaction import redact, redact_nested
from headroom.report.verdict import SHARE, Verdict, judge_run
from headroom.run.alerts import Alerts, read_told
from headroom.run.failures import Failure, classify_failure
from headroom.run.findings import Findings, RunClock, make_device_json
from headroom.run.gate import compare_with_history
from headroom.run.known_runs import (
    PEAK,
    Announcement,
    RunStart,
    choose_start_time,
    make_curve_name,
)
from headroom.run.messages import Messenger, describe_end
from headroom.run.resume import FolderClaim
from headroom.services import serve
from headroom.settings.read_settings import ConfigError
from headroom.tracking.journal import Journal, JournalError
from headroom.tracking.tracking_settings import TrackingError, TrackingSettings
from headroom.watch.accounts import Accounts
from headroom.watch.step_metrics import AGE_S

log = logging.getLogger(__name__)
ALERTS = "alerts.json"  # of a run's folder: what it was alerted of
JUDGE_AFTER_S, JUDGE_EVERY_S = 60.0, 120.0  # what holds a run back is told while it trains


class Recording:
    """A run from the claim on its folder to its true end in MLflow. A context manager."""

    def __init__(
        self,
        where: TrackingSettings,
        claim: FolderClaim,
        *,
        params: Mapping[str, Any],
        experiment: str | None = None,
        waited_s: float = 0.0,
        notify: str = "",
    ) -> None:
        """params: what was asked for. waited_s: how long a person has been waiting by now, for
        imports and servers. notify: where messages go; see messages.py."""
        self.params = params
        self.run: dict[str, Any] = {}  # what the report is made from, once the run has ended
        self._where, self._claim, self._experiment = where, claim, experiment
        self._clock = RunClock(waited_s)
        self._found = Findings()
        self._files: dict[str, str] = {}  # of the folder, by name
        self._step = 0
        self._journal = Journal(where, claim.folder)
        self._journal.put_back = self._put_back
        self._held = ExitStack()
        self._live = Announcement(claim.folder, claim.name)
        self._alerts, self._messenger = Alerts(self._alert), Messenger(notify)
        self._judges_at_s = monotonic() + JUDGE_AFTER_S

    @property
    def folder(self) -> Any:
        """The folder of this run's journal, checkpoints and files."""
        return self._claim.folder

    @property
    def failure(self) -> Failure | None:
        """Why it failed; the first failure is the reason."""
        return self._found.failure

    def __enter__(self) -> Self:
        self._held.enter_context(self._claim)
        self._journal.__enter__()
        self._journal.open(self._experiment)
        self._held.enter_context(self._live)
        self._alerts.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        with signals.hold_signals(self._journal.hurry):  # an end that is told by half is another
            try:
                self._prepare_end(error)
                self._alerts.stop()
                self._live.tell(stage="sending it to MLflow")
                if self._journal.is_begun:
                    self._end(error)
            finally:
                self._alerts.stop()
                self._journal.__exit__()
                self._held.close()
                self._send_end(error)

    def _alert(self, cause: str, text: str) -> None:
        """Tell a person of what is wrong, once in the life of the run."""
        told = read_told(self.folder / ALERTS)
        if cause in told:
            return
        told[cause] = text
        log.warning("%s", text)
        self._found.warn(text)
        self._found.tags["alerts"] = alerts = redact("\n".join(told.values()))
        self._journal.tag({"alerts": alerts})  # MLflow has it at once, whatever becomes of this
        with suppress(OSError):  # a full disk: whoever goes on with the run would tell it again
            self._write(ALERTS, json.dumps(redact_nested(told), indent=1))
        self._messenger.send(f"{self._claim.name} on {socket.gethostname()}: {text}")

    def _send_end(self, error: BaseException | None) -> None:
        """Send a message of how the run ended."""
        failure = self.failure or (classify_failure(error) if error is not None else None)
        if failure is None and not self._journal.is_begun:
            return
        with suppress(Exception):  # how it ended is not lost with the message
            said = describe_end(self.run, failure, self._found.stopped)
            self._messenger.send(f"{self._claim.name} on {socket.gethostname()} {said}")
            self._messenger.close()

    def time_stage(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what the call returns; keep how long it took under its name, and why it failed."""
        self._live.tell(stage=name.replace("_", " "))
        try:
            return self._clock.time_stage(name, call, *args, **kwargs)
        except BaseException as error:
            self._found.fail(error)
            raise

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep the metrics of a step: a loop's one seam."""
        curves, age_s = self._make_curves(metrics, step)
        self._journal.log(curves, step, age_s=age_s)

    def _judge_so_far(self, accounts: Accounts | None) -> Verdict | None:
        """Return what holds the run back so far, where it is time to say it, and announce it."""
        now_s = monotonic()
        if accounts is None or now_s < self._judges_at_s:
            return None
        self._judges_at_s = now_s + JUDGE_EVERY_S
        try:
            so_far = {"metrics": accounts.summarize_so_far(), "profile": accounts.describe()}
            verdict = judge_run({**so_far, "params": self.params, "tags": self._found.tags})
        except Exception:  # the training is worth more than a sentence about it
            log.warning("what holds this run back could not be told", exc_info=True)
            self._judges_at_s = math.inf
            return None
        if verdict is not None:
            self._live.tell(bound=redact(verdict.why))
        return verdict

    def _judge(self) -> None:
        """Keep what held the run back, as tags, and its share of the time, as a metric."""
        try:
            verdict = judge_run(self.run)
        except Exception:
            log.warning("what held this run back could not be told", exc_info=True)
            return
        if verdict is not None:
            metrics = verdict.make_metrics()
            self.run["tags"] |= verdict.make_tags()
            self.run["metrics"] |= metrics
            if not metrics and SHARE in self._journal.told.values:
                metrics = {SHARE: math.nan}  # of the run before it went on; MLflow forgets nothing
            with suppress(JournalError):  # a full disk
                self._journal.log(metrics, ONCE)

    def _make_curves(
        self, metrics: Mapping[str, float], step: int
    ) -> tuple[dict[str, float], float]:
        """Return the metrics of a step under the names of their curves, and their age; note them as
        the newest."""
        curves = {make_curve_name(k): v for k, v in metrics.items() if k != AGE_S}
        if self._found.tags["device.kind"] == "cpu":  # two of whose windows have a peak: no curve
            peak_mib = curves.pop(PEAK, 0.0)
            if peak_mib > self._live.live.peak_mib:
                self._live.tell(peak_mib=peak_mib)
        self._step = step
        self._found.series |= curves
        self._alerts.add(metrics, step)
        return curves, metrics.get(AGE_S, 0.0)

    def keep_stats(self, stats: Mapping[str, Any]) -> None:
        """Keep the allocator's own statistics, where it has some."""
        if stats:
            self._write("memory/stats.json", json.dumps(stats, indent=1))

    def keep_layers(self, layers: Mapping[str, Any]) -> None:
        """Keep which layers of the model held which bytes at the peak, where a step was counted."""
        if layers:
            self._found.layers = dict(layers)
            self._write("memory/layers.json", json.dumps(layers, indent=1))

    def keep_release(self, facts: ReleaseFacts) -> None:
        """Keep the proof that the memory was given back."""
        self._found.add_release(facts)

    def _create(
        self,
        params: Mapping[str, Any],
        *,
        data: Sequence[Mapping[str, str]] = (),
        wanted: Sequence[str] = (),
        waits: bool = True,
    ) -> tuple[RunStart, dict[str, float]]:
        """Begin a new run; return how it began, and what `Journal.create` returns."""
        start = RunStart(
            "",
            "",
            self._claim.name,
            self._claim.key,
            pid=os.getpid(),
            began_at=self._clock.began_at,
            made_at=choose_start_time(self.folder.parent),
        )
        words = {
            "data": data,
            "tags": self._found.tags,
            "params": params,
            "start": asdict(start),
        }
        measured = self._journal.create(
            self._claim.name, **redact_nested(words), wanted=wanted, waits=waits
        )
        self._claim.hold_folder()
        return start, measured

    def _announce(self, start: RunStart, device: DeviceFacts, **known: int) -> None:
        """Tell, in the folder and to `flows.runs`, how the run has begun, and where. known: more,
        by the fields of LiveRun."""
        self._claim.write_start(replace(start, device=device.kind))
        self._live.tell(run_id=start.run_id, device=device.name, **known)
        self._write("device.json", make_device_json(device))

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

    def _prepare_end(self, error: BaseException | None) -> None:
        """Do what comes before the end is told."""

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
        if self._journal.notes:
            self._found.tags["journal.notes"] = "; ".join(self._journal.notes)
        before_s = self._claim.start.spent_s if self._claim.start is not None else 0.0
        self.run = {
            **self._make_page(),
            "name": self._claim.name,
            "params": self.params,
            **self._found.make_report(),
        }
        self.run["metrics"]["time/total_s"] = before_s + self._clock.total_s()
        self._judge()
        if not self._found.failure and not self._found.stopped:
            self.run |= self._compare()
        self.run = redact_nested(self.run)
        try:
            self.run["metrics"] |= self._journal.close(self.run, beside=self._prepare_report)
        except TrackingError as unsent:
            command = f"python -m headroom.tracking.mlflow_sender {shlex.quote(str(self.folder))}"
            log.error(
                "%s. Nothing is lost: it is sent when MLflow takes it, or now by `%s`",
                unsent,
                command,
            )
            self.run["unsent"] = f"MLflow has not got all of it yet: {unsent}"
        self.run |= self._make_page()  # it may have been told of the run at last

    def _prepare_report(self) -> None:
        """Do what comes before the report, while the end is sent to MLflow."""

    def _compare(self) -> dict[str, Any]:
        """Return what runs alike say of this one."""
        return compare_with_history(self.run, self._journal.wait_for_history())

    def _make_page(self) -> dict[str, str]:
        """Return where MLflow has the run; no ids while it is away."""
        ids = self._journal.ids
        return {**ids, "open_command": serve.make_open_command(self._where.tracking_uri, **ids)}
