"""The record of a loop that somebody else wrote, in a script or a notebook: what Headroom tells of
a training of its own, told of theirs. It needs no Prefect and no settings, opens the run without
waiting for MLflow, and lets every error of the loop through as it came. An error of its own never
leaves it: it is told, and the loop goes on.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import random
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import date, datetime
from functools import partial
from html import escape
from itertools import count
from operator import getitem
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from headroom.base import notebook
from headroom.base.facts import DeviceFacts
from headroom.base.names import make_parent_tags
from headroom.base.secret_texts import hide_secrets
from headroom.device.detection import DeviceError, detect_best_device
from headroom.process import signals
from headroom.ranks.slow_rank import exchange_phases, find_slow_rank, select_phases
from headroom.run.alerts import find_device_mib
from headroom.run.failures import Failure
from headroom.run.findings import make_device_tags
from headroom.run.program_end import UNKNOWN, ProgramEnd
from headroom.run.recording import Recording
from headroom.run.resume import LoopClaim, NamedRun
from headroom.run.run_keys import KeyHeld
from headroom.settings.run_config import find_notify_problem
from headroom.tracking.journal import JournalError
from headroom.tracking.tracking_settings import TrackingError, find_tracking_settings
from headroom.watch import leaks
from headroom.watch.guard import Guarded, guard, mark_guarded, take_own_error
from headroom.watch.logged_values import check_name, take_step
from headroom.watch.oom_report import OutOfMemory, explain_out_of_memory, find_part
from headroom.watch.out_of_memory import is_oom
from headroom.watch.own_loop import (
    OwnLoop,
    check_watched,
    find_device,
    list_optimizers,
)

if TYPE_CHECKING:
    from headroom.training.loop_forecast import LoopForecast
    from headroom.training.protected_step import ProtectedStep
    from headroom.training.step_passes import TakePass

log = logging.getLogger(__name__)
_open: list[Account] = []  # in the order in which they began
_turns = count(1)  # accounts of this process: the same on all ranks of a program
_measuring: dict[str, int] = {}  # accounts that are open, by the device whose peaks they measure
BLOCKS = 32  # contexts of phases that are kept: a loop that makes up names makes no end of them
ANEW = "account: a new run begins"
_PLAIN = (str, int, float, bool, type(None), date, datetime, Path)


class Account(Recording, Guarded, raising=("begin", "forecast", "protect_passes")):
    """The account of one loop: a context manager, or `begin` and `end` for callbacks."""

    _claim: LoopClaim

    def __init__(
        self,
        *,
        run_name: str | None = None,
        key: str = "",
        params: Mapping[str, Any] | None = None,
        model: Any = None,
        optimizer: Any = None,
        device: Any = None,
        experiment: str | None = None,
        quiet: bool = False,
        notify: str = "",
    ) -> None:
        """Raises ValueError and TypeError.

        Args:
            run_name: Of the run in MLflow; by default that of the file of program or notebook.
            key: Of a loop that may take several programs: it goes on in the newest run of this key
                that did not come to its end. Of several processes that torchrun starts, each has
                its own.
            params: What the loop was asked to do; logged as params.
            model: The model whose passes are told apart, or several in a list; more by `watch`.
            optimizer: The same of optimizers. Where the loop marks no steps, that of the last one
                given ends one. Without, it is the one that steps over the model's parameters.
            device: Where the loop computes; by default where the model is.
            experiment: In MLflow; by default that of mlflow.yaml.
            quiet: Print no report at the end.
            notify: Where messages go of alerts and of the end: the http(s) address of a webhook,
                or a command, which gets the text on its stdin. Of several processes that torchrun
                starts, the first one sends them.
        """
        check_watched(model, optimizer)
        if problem := find_notify_problem(notify):
            raise ValueError(f"notify: {problem}")
        is_lead = os.environ.get("RANK", "0") == "0"  # as torchrun says: each process has its own
        found, source = find_tracking_settings(), _find_source()
        of_rank = "" if is_lead else f"-rank-{os.environ['RANK']}"
        super().__init__(
            found.settings,
            LoopClaim(Path(found.settings.runs), run_name or Path(source).stem, key, of_rank),
            params=hide_secrets(dict(flatten_params({} if params is None else params)), "params"),
            experiment=experiment,
            notify=notify if is_lead else "",
        )
        if found.doubt:
            self.warn(found.doubt)
            log.warning("%s", found.doubt)
        self._asked, self._source, self._is_quiet = (device, (model, optimizer)), source, quiet
        self._turn = next(_turns)
        self._loop: OwnLoop | None = None
        self._blocks: dict[str | None, AbstractContextManager[None]] = {}  # contexts, by phase
        self._device: DeviceFacts | None = None
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._handler: Any = None  # of SIGTERM, as it was
        self._program: ProgramEnd | None = None
        self._owner: Any = None  # weakly, what may still log when the run has ended
        self._is_over = self._is_full = self._is_owed = self._is_within = self._is_lost = False
        self._is_lacking = False  # MLflow lacks what was logged since the end
        self._protected: list[ProtectedStep] = []  # whose batches may be taken in parts

    def __enter__(self) -> Self:
        """Begin the run, if nobody has."""
        self._is_within = True
        return self._begin_once()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """End the run as the loop has ended. The error, if any, goes on as it came."""
        if self._is_over or os.getpid() != self._pid:  # a process that was forked has no end here
            return
        self._is_over = True
        if self in _open:
            _open.remove(self)
        try:
            with keep_random_state():
                self._end_run(error)
        except Exception as own:
            take_own_error(self, own)
            with suppress(Exception):  # its sending process ends it
                self._journal.__exit__()
                self._held.close()

    def begin(self, *, is_owed: bool = False, owner: Any = None) -> Self:
        """Begin the run, as entering the context does. is_owed: who begins it ends it as well: one
        that is not ended came to nothing. owner: while it is there, more may be logged after the
        end."""
        self._is_owed = is_owed
        self._owner = None if owner is None else weakref.ref(owner)
        return self._begin_once()

    def end(self, error: BaseException | None = None) -> None:
        """End the run, as leaving the context does."""
        self.__exit__(type(error), error, None)

    def abandon(self, why: str = "its training was left", *, is_over: bool = False) -> None:
        """End a run that nobody has ended: by the error that left it, or else for want of an end.
        is_over: the program is."""
        if self._is_over or self._program is None:
            return
        error, found = self._program.find_error(is_over=is_over), self._found
        if isinstance(error, SystemExit) and error.code == UNKNOWN:
            why, error = "its program was left by a SystemExit, whose code nobody knows", None
            found.failure = found.failure or Failure("user_code", why)
        elif error is None and self._is_owed:
            found.failure = found.failure or Failure("user_code", why)
        elif error is None:
            found.stopped = "its program ended without ending it" if is_over else why
        self.end(error)

    @partial(guard, otherwise=lambda *_: {})
    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, so that whoever loads it goes on in this run, after this
        step: plain values."""
        if self._program is None:
            return {} if self._claim.named is None else self._claim.named.make_state()
        self.loop.settle()
        name = self.folder.name
        return NamedRun(self._journal.run_id, name, self.loop.done).make_state()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on in the run that a checkpoint names, after its step: before the first step here.
        state: of a checkpoint that names none, {} or None; a new run then says so."""
        named = NamedRun.read(state or {})
        if named is None:
            self._claim.anew = "its checkpoint names no run"
        if self._program is None:
            self._claim.named = named
            return
        is_this = named is not None and self._claim.find_named(named) == self.folder
        if self.loop.done != self.loop.earlier:
            if not is_this:
                self.warn("load_state_dict: comes before the first step; this run goes on")
        elif named is not None and is_this:
            self._go_on_after(named.step)
        elif self._claim.resumes:
            self.warn(f"load_state_dict: another run is gone on with, by its key: {self.folder}")
        elif named is None:
            self._tell_anew(ANEW)
        else:
            with keep_random_state():
                self._go_on_with(named)

    def _go_on_with(self, named: NamedRun) -> None:
        """Take back the run that has just begun, and go on with another one. The wait for MLflow is
        no part of the training."""
        opened_s = self._clock.stages["time/open_run_s"]
        self.loop.accounts.lap("setup")
        self._clock.time_stage("open_run", self._open_named, named)
        self._clock.stages["time/open_run_s"] += opened_s
        self.loop.accounts.watch.leave_out_lap()
        self._live.tell(stage="train model")

    def _open_named(self, named: NamedRun) -> None:
        assert self._device is not None
        try:
            is_found = self._claim.take_named(named, self._journal.take_back)
        except (TrackingError, OSError) as unusable:
            is_found, self._claim.anew = False, str(unusable)
        if not is_found:
            return self._tell_anew(ANEW)
        self._files.clear()
        self._follow_claim()
        self._open(self._device)
        return self._go_on_after(self._claim.step)

    @property
    def loop(self) -> OwnLoop:
        """What measures the loop, with every method that a callback may call."""
        if self._loop is None:
            if not self._is_lost:
                log.warning("account: it has not begun; use `with account(...) as run:`")
            self._loop = OwnLoop.__new__(OwnLoop)
        return self._loop

    def warn(self, text: str) -> None:
        """Keep what a person should doubt of this run."""
        self._found.warn(text)

    def _tag(self, name: str, text: str) -> None:
        self._found.tags[name] = text

    def take_error(self, error: BaseException) -> None:
        """Measure no more, and tell why, once; the loop goes on."""
        if self._loop is not None and not self._loop.is_deaf:
            self._loop.take_error(error)
        else:
            log.warning("account: an error of its own; the loop goes on", exc_info=error)

    def watch(self, *things: Any) -> None:
        """Watch these models and optimizers from now on."""
        self.loop.watch(*things)

    @partial(guard, otherwise=lambda _, loader: loader)
    def batches(self, loader: Iterable[Any]) -> Batches:
        """Return what yields the batches of the loader, once an epoch or in each; the wait for them
        is timed and their rows are counted."""
        return Batches(loader, lambda: self.loop.iterate_batches(loader))

    @partial(
        guard,
        otherwise=lambda _, compute, backward=Tensor.backward: _Unprotected(compute, backward),
    )
    def protect(
        self,
        compute: Callable[..., Any],
        backward: Callable[[Tensor], object] = Tensor.backward,
    ) -> Callable[..., Any]:
        """Return a function that goes forward and backward for a batch, and returns the loss,
        detached. Where memory runs out the batch is gone on with in parts, if it is proven that
        their gradients add up to the batch's; else the error goes on as it came.

        Args:
            compute: Takes what that function is given; returns the loss, the mean over the rows of
                the batch, or (loss, weight), where the loss is the mean over `weight`, as tokens
                that are not skipped. It may be called several times for a batch.
            backward: Goes back from a loss: accelerator.backward, or one with a GradScaler.
        """
        from headroom.training.step_passes import make_pass

        of_loss = {"compute": compute} if isinstance(compute, nn.Module) else {}
        return self.protect_passes(make_pass(compute, backward), beside=of_loss).call

    def protect_passes(self, take: TakePass, **arguments: Any) -> ProtectedStep:
        """Return what takes these passes, as `protect` does. arguments: of ProtectedStep."""
        from headroom.training.protected_step import ProtectedStep

        step = ProtectedStep(take, self.loop, tell=self._doubt, **arguments)
        self._protected.append(step)
        return step

    def _doubt(self, text: str) -> None:
        """Keep what a person should doubt, and say it now."""
        self.warn(text)
        log.warning("%s", text)

    @mark_guarded
    def step(self) -> AbstractContextManager[None]:
        """Return the context of one step of the loop."""
        block = self._blocks.get(None)
        return self._make_block(None) if block is None else block

    @mark_guarded
    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return the context of a phase of a step, or of a part of the run beside its steps."""
        block = self._blocks.get(name) if type(name) is str else None
        return self._make_block(name) if block is None else block

    @partial(guard, otherwise=lambda *_: nullcontext())
    def _make_block(self, name: str | None) -> AbstractContextManager[None]:
        """Return the context of a phase, or of a step, which has no name, and keep it."""
        loop = self.loop
        block = loop.make_step_block() if name is None else loop.make_phase_block(name)
        if (name is None or type(name) is str) and len(self._blocks) < BLOCKS and not loop.is_deaf:
            self._blocks[name] = block
        return block

    @mark_guarded
    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log metrics; tensors on a device are read later, without waiting for it. What is logged
        after the end belongs to the record, too."""
        loop = self._loop
        if loop is not None and not loop.is_deaf:
            loop.log(metrics, step)
        else:
            self._log_late(metrics, step)

    @guard
    def _log_late(self, metrics: Mapping[str, Any], step: int | None) -> None:
        """Log what comes after the end, or where nothing is measured."""
        loop = self.loop
        if self._program is not None:
            taken = {name: float(value) for name, value in loop.values.take(metrics).items()}
            at = take_step(loop.done if step is None else step, loop.done)
            if not self._is_over:
                self._keep([(taken, at)])
            elif taken:
                self._add(taken, at)

    def send_added(self) -> None:
        """Let MLflow have what was logged after the end; nobody waits for it."""
        if self._is_lacking:
            self._is_lacking = False
            self._journal.send_added()

    def forecast(self, *gpus: str) -> LoopForecast:
        """Return what a step takes at its peak, and whether it would fit these GPUs, by default
        those of `gpu_fit.USUAL_GPUS`: of a loop with one model and one optimizer, after its
        first step. It is asked for its answer, and so it raises what is wrong with the question:
        RuntimeError, KeyError and UnforeseeableMemory. What is measured goes on."""
        from headroom.training import gpu_fit, loop_forecast

        if self._loop is None or self._is_lost:
            raise RuntimeError("forecast: this run measures nothing that could be foretold")
        loop = self.loop
        if len(loop.models) != 1 or len(loop.optimizers) != 1:
            raise RuntimeError(
                "forecast: is of a loop with one model and one optimizer "
                f"(got {len(loop.models)} and {len(loop.optimizers)})"
            )
        if loop.given is None:
            raise RuntimeError("forecast: comes after the first step; no model was called yet")
        sizes = {gpu: gpu_fit.SIZES_MIB[gpu] for gpu in gpus or gpu_fit.USUAL_GPUS}
        step = loop_forecast.make_step_of(
            loop.models[0], loop.optimizers[0], loop.given, loop.autocast
        )
        return loop_forecast.forecast_loop(step, sizes)

    def _begin_once(self) -> Self:
        if self._is_over:
            raise RuntimeError("account: it has ended, and is of one run; make another")
        if self._program is None and not self._is_lost:
            try:
                with keep_random_state():
                    self._begin()
            except Exception as error:
                self._loop, self._is_lost, self._is_over = None, True, True
                self._held.close()
                if self._is_refusal(error):
                    raise
                log.warning(
                    "account: it could not begin, and the loop goes on without (%s: %s)",
                    type(error).__name__,
                    error,
                    exc_info=error,
                )
        return self

    def _is_refusal(self, error: Exception) -> bool:
        """Return whether this is for what the user has asked: a key, a device, or MLflow at any
        price."""
        return (
            isinstance(error, KeyHeld)
            or (isinstance(error, DeviceError) and self._asked[0] is not None)
            or (isinstance(error, TrackingError) and self._where.required)
        )

    def _begin(self) -> None:
        device, things = self._asked
        mine = list_optimizers(things)
        for other in [*_open]:
            if not other._is_within and any(o is p for o in other.loop.optimizers for p in mine):
                other.abandon("another account was opened on its optimizer")
            elif not other._is_within and other._program and other._program.is_run_again():
                other.abandon("its cell was run again")
            elif not other._is_within and self._claim.key and self._claim.key == other._claim.key:
                other.abandon("another account was opened with its key")
        device_facts = self._clock.time_stage("detect_device", self._detect, device, things)
        self._device = device_facts
        self._found.tags |= {
            **make_device_tags(device_facts, self._source),
            **_find_flow_run_tags(),
            "gate.of": self._make_gate_key(device_facts),
            **({"run.key": self._claim.key} if self._claim.key else {}),
        }
        super().__enter__()
        try:
            self._follow_claim()
            self._clock.time_stage("open_run", self._open, device_facts)
            is_alone = device_facts.kind == "cpu" or not _measuring.get(device_facts.name)
            if not is_alone:
                self.warn(
                    f"device: another account of this process measures {device_facts.name}; the "
                    "peaks of this one are not known"
                )
            _measuring[device_facts.name] = _measuring.get(device_facts.name, 0) + 1
            self._held.callback(_stop_measuring, device_facts.name)
            self._loop = OwnLoop(
                device_facts.name,
                log=self._keep,
                measures_peaks=is_alone,
                tell=self.warn,
                tag=self._tag,
            )
            self._go_on_after(self._claim.step)
            self._loop.watch(*things)
            self._alerts.device_mib = find_device_mib(device_facts)
            self._alerts.is_within_step = partial(_is_within_step, self._loop)
            self._live.tell(stage="train model")
            self._follow_process()
        except BaseException as error:
            super().__exit__(type(error), error, None)
            raise
        _open.append(self)

    def _end_run(self, error: BaseException | None) -> None:
        self._leave_process()
        told = self._classify(error)
        try:
            super().__exit__(type(told), told, None)
        except JournalError as lost:  # the loop itself came to its end
            log.error("%s", lost)
        if not self._is_quiet:
            self._print_report()

    def _add(self, metrics: dict[str, float], step: int) -> None:
        """Add metrics to a run that has ended: to its folder now, to MLflow when nobody is left who
        could log more."""
        curves, _ = self._make_curves(metrics, step)
        self.run["metrics"] = {**self.run["metrics"], **curves}
        self._journal.add(curves, step, self.run)
        if not self._is_lacking:
            self._is_lacking = True
            atexit.register(self.send_added)
            owner = None if self._owner is None else self._owner()
            if owner is not None:
                weakref.finalize(owner, self.send_added).atexit = False

    def _keep(self, found: Sequence[tuple[dict[str, float], int]]) -> None:
        """Keep metrics of steps, while that can be done: for a full disk no loop has to end."""
        if not self._is_full:
            lines = []
            for metrics, step in found:
                curves, age_s = self._make_curves(metrics, step)
                lines.append((curves, step, age_s))
            if self._loop is not None and not self._loop.is_deaf:
                self._judge_so_far(self._loop.accounts)
            try:
                self._journal.log_steps(lines)
            except JournalError as full:
                self._is_full = True
                self._found.warn(f"not all metrics were kept: {full}")
                log.warning("%s", full)

    def _detect(self, asked: Any, things: Any) -> DeviceFacts:
        name, how = find_device(asked, things)
        chosen = detect_best_device(name)
        _, bracket, rest = chosen.reason.partition(" (")
        return replace(
            chosen,
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
        """Go on with the run that the claim has found, else begin a new one."""
        if self._claim.resumes:
            self._find_earlier()
        start = self._claim.start
        if start is None:
            self._tell_anew(ANEW)
            start, _ = self._create(self.params, waits=False)
        self._announce(start, device)

    def _find_earlier(self) -> None:
        """Open the run that is gone on with; where that can't be, the claim is of a new one."""
        step, tags = self._claim.step, self._found.tags
        self._found.tags = {**tags, "resumed_from_step": str(step)}
        try:
            if self._reopen(step) is not None:
                return
        except TrackingError as unusable:
            if self._where.required:
                raise
            self._claim.begin_anew(unusable)
            self._follow_claim()
        self._found.tags = tags

    def _go_on_after(self, step: int) -> None:
        """Number the steps as those that follow this one."""
        if self._loop is not None and step:
            self._loop.go_on_after(step)
            self._found.tags["resumed_from_step"] = str(step)

    def _follow_process(self) -> None:
        """Let the run end with its process, by whatever way that ends."""
        self._program = ProgramEnd(self.end)
        atexit.register(self.abandon, is_over=True)
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        ):
            self._handler = self._raise_terminated
            signal.signal(signal.SIGTERM, self._handler)

    def _leave_process(self) -> None:
        atexit.unregister(self.abandon)
        if self._program is not None:
            self._program.close()
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
        findings = self._found
        if error is None or findings.failure is not None:
            return error
        if isinstance(error, GeneratorExit) or (
            isinstance(error, SystemExit) and error.code in (None, 0)
        ):
            how = "sys.exit(0)" if isinstance(error, SystemExit) else "closing its generator"
            findings.stopped = f"the program ended it by {how}"
            return None
        if isinstance(error, signals.Terminated):
            findings.failure = Failure("signal", "terminated", "KILLED")
        elif isinstance(error, SystemExit):
            findings.failure = Failure("user_code", f"sys.exit({error.code!r})")
        elif isinstance(error, KeyboardInterrupt):
            findings.failure = Failure("signal", "interrupted", "KILLED")
        elif is_oom(error) and self._loop is not None and self._device is not None:
            explanation = explain_out_of_memory(
                self._loop.note_failure(error),
                self._loop.accounts.phases.accounts.ledger,
                find_remedy=find_part,
                device=self._device.name,
                folder=self.folder,
            )
            findings.fail(OutOfMemory(explanation))
        return error

    def _prepare_end(self, error: BaseException | None) -> None:
        loop, device = self._loop, self._device
        if loop is None or device is None:
            return
        try:
            self._measure_last(loop, device)
        except Exception as own:
            self.take_error(own)
            if leaks.is_broken(loop.device) and error is None:  # it answers nothing but errors
                self._found.fail(own)
            self._found.warn(f"account: what the loop measured last is lost: {own}")
        if self._journal.is_begun:  # what the loop was too short for
            opened = self._clock.stages.get("time/open_run_s", 0.0)
            self._clock.time_stage("open_run", self._journal.wait_until_begun)
            self._clock.stages["time/open_run_s"] += opened

    def _measure_last(self, loop: OwnLoop, device: DeviceFacts) -> None:
        loop.close()
        self._found.summary |= loop.summarize()
        for step in self._protected:
            self._found.summary |= step.make_metrics()
            self._found.tags |= step.make_tags()
        by_rank = exchange_phases(select_phases(self._found.summary), turn=self._turn)
        slow_rank = find_slow_rank(by_rank)
        self._found.profile = {**loop.accounts.describe(), "slow_rank": slow_rank}
        self.keep_stats(loop.accounts.phases.meter.read_stats())
        self.keep_layers(loop.accounts.describe_layers())
        self._clock.stages["time/train_model_s"] = loop.accounts.watch.compute_total_s()
        held = self._clock.time_stage(
            "release_memory", loop.measure_held, baseline_bytes=device.baseline_bytes
        )
        self.keep_release(held)

    def _end(self, error: BaseException | None) -> None:
        try:
            super()._end(error)
        except JournalError:
            raise
        except Exception as own:  # of what is told beside: how the loop ended is not lost with it
            self.take_error(own)
            if error is not None:
                self._found.fail(error)
            self.run = {"name": self._claim.name, "params": {}, **self._found.make_report()}
            self._journal.close(self.run)

    def _prepare_report(self) -> None:
        if not self._is_quiet:
            _load_report()

    def _print_report(self) -> None:
        Console, run_report = _load_report()
        if self.run and not run_report.show_in_notebook(self.run, open_command=self._command):
            report = run_report.make_terminal_report(self.run, open_command=self._command)
            Console(file=sys.stderr).print(report, crop=False)

    @property
    def _command(self) -> str:
        """What opens the run in MLflow; empty while that has not got it."""
        return self.run["open_command"] if self.run["run_id"] else ""

    def _repr_html_(self) -> str:
        """Return the report for a notebook; of a run that has not ended a line."""
        _, run_report = _load_report()
        if self.run:
            return run_report.make_fragment(self.run, open_command=self._command)
        done = "" if self._loop is None else f", {self._loop.done:,} steps"
        state = "has not begun" if self._program is None else f"is open{done}"
        return f"<p>{escape(self._claim.name)} {escape(state)}</p>"


def _load_report() -> tuple[Any, Any]:
    """Import what prints a report."""
    import rich.console
    import rich.table

    from headroom.report import run_report

    return rich.console.Console, run_report


class _Unprotected:
    """Goes forward and backward, and no more."""

    def __init__(self, compute: Callable[..., Any], backward: Callable[[Tensor], object]) -> None:
        self._compute, self._backward = compute, backward

    def __call__(self, *batch: Any, **named: Any) -> Any:
        from headroom.training.step_passes import read_loss

        loss, _ = read_loss(self._compute(*batch, **named))
        self._backward(loss)
        return loss.detach()


class Batches:
    """What a loader gives, as often as somebody iterates it; for all else it is the loader."""

    def __init__(self, loader: Iterable[Any], begin: Callable[[], Iterator[Any]]) -> None:
        self._loader, self._begin = loader, begin
        self._begun: Iterator[Any] | None = None  # by `next`

    def __iter__(self) -> Iterator[Any]:
        begun, self._begun = self._begun, None
        return self._begin() if begun is None else begun

    def __next__(self) -> Any:
        if self._begun is None:
            self._begun = self._begin()
        return next(self._begun)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __reduce__(self) -> Any:
        # A copy, pickled or not, is that of the loader, and can be read where this project is not.
        return getitem, ((self._loader,), 0)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._loader, name)


def _is_within_step(loop: OwnLoop, _: object) -> bool:
    return loop.is_within_step


def _stop_measuring(device: str) -> None:
    _measuring[device] -= 1


def _find_source() -> str:
    """Return the file of the program, or of the notebook where that is known."""
    file = notebook.find_file() or getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.abspath(file) if file else "notebook"


def flatten_params(
    params: Mapping[Any, Any],
    fit: Callable[[str], str] = lambda name: name,
    above: str = "",
) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the params, those of a mapping under its name with a dot. fit:
    makes names fit for MLflow. Raises ValueError for one that is not."""
    for key, value in params.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from flatten_params(value, fit, f"{name}.")
            continue
        name = fit(name)
        check_name(name, "params")
        yield name, value if isinstance(value, _PLAIN) else str(value)


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Leave Python's random numbers as they were: a library that prints draws some."""
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)


def _find_flow_run_tags() -> dict[str, str]:
    """Return the tags that lead to the run that holds this one, and to the flow run around this
    loop, where Prefect is in use here."""
    if "prefect" not in sys.modules:
        return make_parent_tags()
    from headroom.prefect.this_flow_run import make_flow_run_tags

    return make_flow_run_tags()
