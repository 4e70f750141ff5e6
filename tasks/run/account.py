"""The record of a loop that somebody else wrote, in a script or a notebook: what Headroom tells of
a training of its own, told of theirs. It needs no Prefect and no settings, opens the run without
waiting for MLflow, and lets every error of the loop through as it came.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date, datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from tasks.engine.accounts.own_loop import OwnLoop, check_name, check_watched, find_device
from tasks.engine.base.facts import DeviceFacts
from tasks.engine.base.secret_texts import hide_secrets
from tasks.engine.device.detection import detect_best_device
from tasks.engine.memory import leaks
from tasks.engine.memory.out_of_memory import is_oom
from tasks.engine.training.oom_report import OutOfMemory, explain_own_failure
from tasks.process import signals
from tasks.run.failures import Failure
from tasks.run.findings import make_device_json, make_device_tags
from tasks.run.recording import Recording
from tasks.run.resume import FolderClaim
from tasks.tracking.journal import JournalError
from tasks.tracking.tracking_settings import read_tracking_settings

if TYPE_CHECKING:
    from tasks.engine.training.loop_forecast import LoopForecast

log = logging.getLogger(__name__)
_measuring: dict[str, int] = {}  # accounts that are open, by the device whose peaks they measure
_PLAIN = (str, int, float, bool, type(None), date, datetime, Path)


class Account(Recording):
    """The account of one loop: a context manager, or `begin` and `end` for callbacks."""

    def __init__(
        self,
        *,
        run_name: str | None = None,
        params: Mapping[str, Any] | None = None,
        model: Any = None,
        optimizer: Any = None,
        device: Any = None,
        experiment: str | None = None,
        quiet: bool = False,
    ) -> None:
        """Raises ValueError, TypeError and TrackingError.

        Args:
            run_name: Of the run in MLflow; by default that of the program's file.
            params: What the loop was asked to do; logged as params.
            model: The model whose passes are told apart, or several in a list; more by `watch`.
            optimizer: The same of optimizers. Where the loop marks no steps, that of the last one
                given ends one.
            device: Where the loop computes; by default where the model is.
            experiment: In MLflow; by default that of mlflow.yaml.
            quiet: Print no report at the end.
        """
        check_watched(model, optimizer)
        where, source = read_tracking_settings(), _find_source()
        name = run_name or Path(source).stem
        if os.environ.get("RANK", "0") != "0":  # as torchrun says: each process has its own run
            name += f"-rank-{os.environ['RANK']}"
        super().__init__(
            where,
            FolderClaim(Path(where.runs), name),
            params=hide_secrets(dict(_flatten_params(params or {})), "params"),
            experiment=experiment,
        )
        self._asked, self._source, self._is_quiet = (device, (model, optimizer)), source, quiet
        self._loop: OwnLoop | None = None
        self._device: DeviceFacts | None = None
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._handler: Any = None  # of SIGTERM, as it was
        self._error_before: BaseException | None = None
        self._is_over = self._is_full = self._is_owed = False

    def __enter__(self) -> Self:
        """Begin the run, if nobody has."""
        if self._is_over:
            raise RuntimeError("account: it has ended, and is of one run; make another")
        if self._loop is not None:
            return self
        device, things = self._asked
        found = self._clock.time_stage("detect_device", self._detect, device, things)
        self._device = found
        self._found.tags |= {
            **make_device_tags(found, self._source),
            **_find_flow_run_tags(),
            "gate.of": self._make_gate_key(found),
        }
        super().__enter__()
        try:
            self._clock.time_stage("open_run", self._open, found)
            is_alone = found.kind == "cpu" or not _measuring.get(found.name)
            if not is_alone:
                self._found.warn(
                    f"device: another account of this process measures {found.name}; the peaks "
                    "of this one are not known"
                )
            _measuring[found.name] = _measuring.get(found.name, 0) + 1
            self._held.callback(_stop_measuring, found.name)
            self._loop = OwnLoop(found.name, log=self._keep, measures_peaks=is_alone)
            self._loop.watch(*things)
        except BaseException as error:
            super().__exit__(type(error), error, None)
            raise
        self._live.tell(stage="train model")
        self._follow_process()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """End the run as the loop has ended. The error, if any, goes on as it came."""
        if self._is_over or os.getpid() != self._pid:  # a process that was forked has no end here
            return
        self._is_over = True
        self._leave_process()
        told = self._classify(error)
        try:
            super().__exit__(type(told), told, trace)
        except JournalError as lost:  # the loop itself came to its end
            log.error("%s", lost)
        if not self._is_quiet:
            self._print_report()

    def begin(self, *, is_owed: bool = False) -> Self:
        """Begin the run, as entering the context does. is_owed: who begins it ends it as well: one
        that is not ended came to nothing."""
        self._is_owed = is_owed
        return self.__enter__()

    def end(self, error: BaseException | None = None) -> None:
        """End the run, as leaving the context does."""
        self.__exit__(type(error), error, None)

    def abandon(self) -> None:
        """End a run that nobody has ended: as its program did, or else for want of an end."""
        if self._is_over:
            return
        error, found = getattr(sys, "last_value", None), self._found
        if error is self._error_before:
            error = None
            if self._is_owed:
                found.failure = found.failure or Failure("user_code", "its training was left")
            else:
                found.stopped = "its program ended without ending it"
        self.end(error)

    @property
    def loop(self) -> OwnLoop:
        """What measures the loop, with every method that a callback may call."""
        if self._loop is None:
            raise RuntimeError("account: it has not begun; use `with account(...) as run:`")
        return self._loop

    def watch(self, *things: Any) -> None:
        """Watch these models and optimizers from now on."""
        self.loop.watch(*things)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield what the loader gives; time the wait for it and count its rows."""
        return self.loop.iterate_batches(loader)

    def step(self) -> _Block:
        """Return the context of one step of the loop."""
        loop = self.loop
        return _Block(loop.begin_step, loop.end_step, loop.drop_step)

    def phase(self, name: str) -> _Block:
        """Return the context of a phase of a step, or of a part of the run beside its steps."""
        loop = self.loop
        return _Block(partial(loop.begin_phase, name), loop.end_phase, loop.drop_phase)

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log metrics; tensors on a device are read later, without waiting for it."""
        self.loop.log(dict(metrics), step)

    def forecast(self, *gpus: str) -> LoopForecast:
        """Return what a step takes at its peak, and whether it would fit these GPUs, by default
        those of `loop_forecast.USUAL_GPUS`: of a loop with one model and one optimizer, after its
        first step. Raises RuntimeError, KeyError and UnforeseeableMemory."""
        from tasks.engine.training import loop_forecast

        loop = self.loop
        if len(loop.models) != 1 or len(loop.optimizers) != 1:
            raise RuntimeError(
                "forecast: is of a loop with one model and one optimizer "
                f"(got {len(loop.models)} and {len(loop.optimizers)})"
            )
        if loop.given is None:
            raise RuntimeError("forecast: comes after the first step; no model was called yet")
        sizes = {gpu: loop_forecast.SIZES_MIB[gpu] for gpu in gpus or loop_forecast.USUAL_GPUS}
        step = loop_forecast.make_step_of(
            loop.models[0], loop.optimizers[0], loop.given, loop.autocast
        )
        return loop_forecast.forecast_loop(step, sizes)

    def _keep(self, found: Sequence[tuple[dict[str, float], int]]) -> None:
        """Keep metrics of steps, while that can be done: for a full disk no loop has to end."""
        if not self._is_full:
            lines = []
            for metrics, step in found:
                curves, age_s = self._make_curves(metrics, step)
                lines.append((curves, step, age_s))
            try:
                self._journal.log_steps(lines)
            except JournalError as full:
                self._is_full = True
                self._found.warn(f"not all metrics were kept: {full}")
                log.warning("%s", full)

    def _detect(self, asked: Any, things: Any) -> DeviceFacts:
        name, how = find_device(asked, things)
        found = detect_best_device(name)
        _, bracket, rest = found.reason.partition(" (")
        return replace(
            found,
            reason=f"{name}, {how}{bracket}{rest}",
            baseline_bytes=leaks.read_in_use_bytes(name),
        )

    def _make_gate_key(self, device: DeviceFacts) -> str:
        """Return a hash of what has to be the same for runs to be compared."""
        said = [self._source, dict(self.params), device.kind, device.model]
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[
            :16
        ]

    def _open(self, device: DeviceFacts) -> None:
        start, _ = self._create(self.params, waits=False)
        self._claim.write_start(replace(start, device=device.kind))
        self._live.tell(device=device.name)
        self._write("device.json", make_device_json(device))

    def _follow_process(self) -> None:
        """Let the run end with its process, by whatever way that ends."""
        self._error_before = getattr(sys, "last_value", None)
        atexit.register(self.abandon)
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        ):
            self._handler = self._raise_terminated
            signal.signal(signal.SIGTERM, self._handler)

    def _leave_process(self) -> None:
        atexit.unregister(self.abandon)
        if self._handler is not None and signal.getsignal(signal.SIGTERM) == self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _raise_terminated(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one means it
        if os.getpid() != self._pid:  # a worker of a loader
            signal.raise_signal(number)
        self._found.failure = self._found.failure or Failure("signal", "terminated", "KILLED")
        raise signals.Terminated(128 + number)

    def _classify(self, error: BaseException | None) -> BaseException | None:
        """Return the error that the run failed by, if that was one; keep how it ended."""
        found = self._found
        if error is None or found.failure is not None:
            return error
        if isinstance(error, GeneratorExit) or (
            isinstance(error, SystemExit) and error.code in (None, 0)
        ):
            how = "sys.exit(0)" if isinstance(error, SystemExit) else "closing its generator"
            found.stopped = f"the program ended it by {how}"
            return None
        if isinstance(error, signals.Terminated):
            found.failure = Failure("signal", "terminated", "KILLED")
        elif isinstance(error, SystemExit):
            found.failure = Failure("user_code", f"sys.exit({error.code!r})")
        elif isinstance(error, KeyboardInterrupt):
            found.failure = Failure("signal", "interrupted", "KILLED")
        elif is_oom(error) and self._loop is not None and self._device is not None:
            explanation = explain_own_failure(
                error, self._loop, device=self._device.name, folder=self.folder
            )
            found.fail(OutOfMemory(explanation))
        return error

    def _prepare_end(self, error: BaseException | None) -> None:
        loop, device = self._loop, self._device
        if loop is None or device is None:
            return
        try:
            loop.close()
            self._found.summary |= loop.summarize()
            stats = loop.accounts.phases.meter.read_stats()
            if stats:
                self._write("memory/stats.json", json.dumps(stats, indent=1))
            self._clock.stages["time/train_model_s"] = loop.accounts.watch.compute_total_s()
            held = self.time_stage(
                "release_memory", loop.measure_held, baseline_bytes=device.baseline_bytes
            )
            self.keep_release(held)
        except RuntimeError as broken:  # the device answers nothing but errors
            if error is None:
                self._found.fail(broken)
            log.warning("what the loop measured last is lost: %s", broken)
        if self._journal.is_begun:  # what the loop was too short for
            opened = self._clock.stages.get("time/open_run_s", 0.0)
            self._clock.time_stage("open_run", self._journal.wait_until_begun)
            self._clock.stages["time/open_run_s"] += opened

    def _print_report(self) -> None:
        from rich.console import Console

        from tasks.engine.report import run_report

        if self.run:
            command = self.run["open_command"] if self.run["run_id"] else ""
            report = run_report.make_terminal_report(self.run, open_command=command)
            Console(file=sys.stderr).print(report, crop=False)


class _Block:
    """A context of two calls, and a third where an error leaves it; made at each step, so cheap."""

    __slots__ = ("_begin", "_drop", "_end")

    def __init__(
        self, begin: Callable[[], None], end: Callable[[], None], drop: Callable[[], None]
    ) -> None:
        self._begin, self._end, self._drop = begin, end, drop

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, kind: Any, *_: object) -> None:
        (self._end if kind is None else self._drop)()


def _stop_measuring(device: str) -> None:
    _measuring[device] -= 1


def _find_source() -> str:
    """Return the file of the program; empty in a notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.abspath(file) if file else "notebook"


def _flatten_params(params: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values of the params, those of a mapping under its name with a dot."""
    for key, value in params.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _flatten_params(value, f"{name}.")
            continue
        check_name(name, "params")
        yield name, value if isinstance(value, _PLAIN) else str(value)


def _find_flow_run_tags() -> dict[str, str]:
    """Return the tags that lead to the flow run around this loop, where Prefect is in use here."""
    if "prefect" not in sys.modules:
        return {}
    from tasks.run.flow_run import make_flow_run_tags

    return make_flow_run_tags()
