"""Accounts for a loop that somebody else wrote: it drives the accounts by what the loop says, and
where it says nothing by what PyTorch tells of itself, the forward hooks of the watched models, the
gradient of their outputs and the step hooks of their optimizers. It changes nothing that is
computed, waits for the device at no step, and leaves out what nobody has told. Whatever it does
wrong, the loop goes on.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import count, islice
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode

from headroom.base import names, nested
from headroom.base.facts import ReleaseFacts
from headroom.base.import_paths import get_error_message
from headroom.base.names import COUNTED, OTHER
from headroom.watch.accounts import AFTER, Accounts, LoopFacts
from headroom.watch.allocation_log import ACTIVATIONS, AllocationLog
from headroom.watch.allocators import Allocator, NoAllocator
from headroom.watch.graph_size import MOST_OUTPUTS, measure_graph
from headroom.watch.guard import Block, Guarded, Hook, guard, take_own_error, unguard
from headroom.watch.holders import SAVED, find_live_tensors
from headroom.watch.kernel_memory import KernelMemory
from headroom.watch.layers import Layers, iterate_state
from headroom.watch.leaks import has_compiled, measure_held_memory
from headroom.watch.logged_values import LoggedValues, take_step
from headroom.watch.memory_by_owner import CountedAllocator, OwnedTensors
from headroom.watch.memory_meter import MemoryMeter
from headroom.watch.out_of_memory import MemoryFailure
from headroom.watch.phases import TIME_FIRST, Watched
from headroom.watch.sampled_clock import WAIT, make_sampled_clock
from headroom.watch.stack_samples import BETWEEN, STEP

LOG_EVERY = 10  # steps
EARLY = (2, 3, 4)  # log points beside these: one is counted by owner, two are timed
PHASES = [phase.name for phase in names.list_phases(names.PhaseKind.STEP) if phase.is_named]
BESIDE = [phase.name for phase in names.list_phases(names.PhaseKind.TRAINING) if phase.is_named]
READ_EVERY_S = 0.5  # ten times as seldom as a training that has a progress bar
EARLY_STEPS = 200  # of which more are timed, since a short run has no others
MANY_STEPS = 2000  # after which fewer are: enough were by then
PENDING = 100  # metrics on the device that may wait for a log point
# A step is counted where that takes at most this share of the training so far. Before one was, it
# is taken to cost so many steps, or so long for each module and parameter at each pass, and at
# least what the first one loads.
COUNT_SHARE = 0.01
COUNT_STEPS, COUNT_PART_S, COUNT_FIRST_S = 15, 3e-4, 0.01
# Their forward takes another way, with other rounding, where they have hooks, or takes none.
_HOOKED_OTHERWISE = (
    *(nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention),
    torch.jit.ScriptModule,
)


log = logging.getLogger(__name__)
NO_BATCH = object()  # nothing is asked of a user's object, not even if it is empty
LogSteps = Callable[[Sequence[tuple[dict[str, float], int]]], None]


def _tell_log(text: str) -> None:
    log.warning("%s", text)


def _keep_no_tag(name: str, text: str) -> None:
    pass


class _GuardedLog(AllocationLog):
    """Counts, and where it fails at that, the operations of the loop go on."""

    def __init__(self, device: torch.device, owner: Guarded) -> None:
        super().__init__(device, kernels=KernelMemory() if device.type == "cpu" else None)
        self._owner, self._has_failed = owner, False

    def note_failure(self) -> None:
        self._guard(super().note_failure)

    def add_outputs(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        self._guard(super().add_outputs, func, args, out)  # without a limit it refuses nothing

    def _guard(self, count: Callable[..., Any], *given: Any) -> None:
        if not self._has_failed:
            try:
                count(*given)
            except Exception as error:
                self._has_failed = True
                take_own_error(self._owner, error)


# What the account itself asks, under its own guard.
ASKED = (
    *("close", "summarize", "measure_held", "list_owned", "note_failure", "take_error", "end"),
    *("find_layers", "make_step_block", "make_phase_block", "settle"),
)


class OwnLoop(Guarded, raising=ASKED):
    """The accounts of somebody else's loop. Each method is one that a callback may call."""

    # Of one that measures nothing, since what would have begun it has failed.
    done = 0  # steps, with those of the run before it went on here
    earlier = 0  # of them
    rows = 0
    stage = ""  # what the loop says that it does, by the name of a phase
    has_updated = False  # an optimizer has, in the step that has begun
    is_deaf = True  # it measures nothing, not yet or no more
    batch_shape: tuple[int, ...] = ()
    models: list[nn.Module] = []  # noqa: RUF012 (nobody adds to it)
    optimizers: list[Optimizer] = []  # noqa: RUF012

    def __init__(
        self,
        name: str,
        *,
        log: LogSteps,
        measures_peaks: bool = True,
        tell: Callable[[str], None] = _tell_log,
        tag: Callable[[str, str], None] = _keep_no_tag,
    ) -> None:
        """name: of the device. log: gets metrics of steps. measures_peaks: no, where somebody
        else resets those of the device. tell: hears what a person should doubt. tag: keeps a word
        that was logged."""
        device = torch.device(name)
        ledger = _GuardedLog(device, self)
        source: Allocator | None = None if measures_peaks else NoAllocator()
        if device.type == "cpu":
            source = CountedAllocator(ledger, None)
        meter = MemoryMeter(device, source)
        self._log, self._lines, self._kept_s = log, [], 0.0  # type: ignore[var-annotated]
        self._tell, self.values = tell, LoggedValues(tell, tag)
        self._clock = make_sampled_clock(device)
        self.accounts = Accounts(
            *(device, meter, ledger, self.list_owned), log=self._add_line, clock=self._clock
        )
        self._looks = self.accounts.looks
        self.device = device
        self.models, self.optimizers = [], []
        facts = LoopFacts(
            *(0, LOG_EVERY, self._read_rate),
            early=EARLY,
            may_wait=False,
            may_count=self._can_afford_count,
            find_layers=self.find_layers,
        )
        self._metrics = self.accounts.begin_training(facts)
        self._metrics.read_every_s = READ_EVERY_S
        self._opened_s = self._ended_s = perf_counter()  # when a step began, and ended, last
        self._asked_s = self._apart_s = 0.0  # when a batch was asked for; and what is no step's
        self._late_s = 0.0  # waits of steps that never came, which are the next one's
        self._wait_s = self._aside_s = 0.0  # of the step that has begun: for batches; not its own
        self._metrics.begin(0)
        self._thread = get_ident()
        self._is_timed = False  # the step that has begun
        self._is_plain = False  # nothing of it is measured but how long it takes
        self._next = 1  # the next step of which more is
        self._plain_times: list[tuple[float, float]] = []  # that the accounts do not have yet
        self._plain_rows = 0
        self._is_quiet = False  # nothing is asked of its passes
        # What the first model was given first, without memory, and the type that autocast had.
        self.given: Any = None
        self.autocast: torch.dtype | None = None
        self._batch: Any = NO_BATCH
        self._is_open = self._is_asked = False  # a step has begun; the loop says where it ends
        self._begun_by_optimizer = False  # by its optimizer
        self._is_waiting = False  # for the first batch of the step
        self._is_backward = False
        self._updates = 0  # of optimizers, whoever saw them
        self._is_fed = False  # the loop tells of its batches
        self._by_passes = 0  # steps that were taken to end where the next forward pass began
        self._has_gradients = False  # a backward pass was done in the step that has begun
        self._forward_by = ""  # who has told of a forward pass since the last backward
        self._named: list[tuple[str, bool]] = []  # phases that the loop names; apart from its steps
        self._step_rows = self._pending = 0
        self._counting: AbstractContextManager[None] | None = None  # of this step's memory
        self._is_inference = False  # where that began
        self._is_counted = False  # the step that has begun is left out of the speed
        self._counted = (0, 0)  # steps that were, and their rows
        self._count_s = 0.0  # that they took, all together
        self._parts: int | None = None  # modules and parameters of what is watched
        self._began_s = self._first_s = 0.0  # when the first step began, and when it ended
        self._forwards = 1  # passes of a step, at most
        self._passes = 0  # of the step that has begun
        self._hooks: list[Any] = []  # handles, by which they are removed
        self._called: list[Hook] = []
        self._adopts = False  # optimizers of the watched models, since none was given
        self._told = {"log"}  # parts beside the steps of which something is known
        self.is_deaf = self._is_over = False

    @property
    def has_compiled(self) -> bool:
        """Return whether this process has compiled code, in which nobody sees the operations."""
        return has_compiled()

    @property
    def is_within_step(self) -> bool:
        """Return whether a step has begun, and the loop is at nothing beside it."""
        return not self.is_deaf and self._is_open and self.stage not in BESIDE

    def watch(self, *things: Any) -> None:
        """Watch these models and optimizers, or lists of them, from now on; each once."""
        self._parts = None
        for thing in _flatten(things):
            if not isinstance(thing, (nn.Module, Optimizer)):
                self._tell(_describe_unwatched(thing))
            elif isinstance(thing, Optimizer):
                thing = _unwrap(thing)
                if not _has_step_hooks(thing):
                    self._tell(
                        f"watch: {type(thing).__name__} was made without Optimizer.__init__, and "
                        "has no hooks that could tell of its steps"
                    )
                elif all(thing is not watched for watched in self.optimizers):
                    self.optimizers.append(thing)
                    before, after = self._hook(self._begin_update), self._hook(self._end_update)
                    self._hooks.append(thing.register_step_pre_hook(before))
                    self._hooks.append(thing.register_step_post_hook(after))
            else:
                if all(thing is not watched for watched in self.models):
                    self.models.append(thing)
                    if not isinstance(thing, _HOOKED_OTHERWISE):
                        before = self._hook(self._begin_forward)
                        after = self._hook(self._end_forward)
                        self._hooks.append(
                            thing.register_forward_pre_hook(before, with_kwargs=True)
                        )
                        self._hooks.append(thing.register_forward_hook(after))
        if self.models and not self.optimizers and not self._adopts:
            self._adopts = True
            self._hooks.append(register_optimizer_step_pre_hook(self._hook(self._adopt)))

    @property
    def _taken(self) -> int:
        """Return how many steps were taken here."""
        return self.done - self.earlier

    def go_on_after(self, step: int) -> None:
        """Number the steps as those that follow this one; before the first of them."""
        if not self._taken:
            self.done = self.earlier = step
            self._next = step + 1
            self._metrics.go_on_after(step)

    def settle(self) -> None:
        """Log what is not logged yet, on the device too: a checkpoint is written, and what a
        process had in mind ends with it."""
        if not self.is_deaf:
            self._settle_plain_steps()
            self._metrics.drain()
            self._keep_lines(at_once=True)

    def count_rows_of(self, model: nn.Module) -> None:
        """Count the rows that this model is given in training, where no batch tells of them."""

        if isinstance(model, torch.jit.ScriptModule):
            return
        before = self._hook(self._count_given)
        self._hooks.append(model.register_forward_pre_hook(before, with_kwargs=True))

    def _count_given(self, model: nn.Module, *given: Any) -> None:
        if self._is_open and model.training and torch.is_grad_enabled():
            with suppress(RuntimeError):  # of a nested tensor
                self._step_rows += nested.count_rows(given)

    def _hook(self, call: Callable[..., None]) -> Hook:
        hook = Hook(self, call)
        self._called.append(hook)
        return hook

    @partial(guard, otherwise=lambda _, loader: iter(loader))
    def iterate_batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield what the loader gives; the wait for it is the phase data_wait, and its rows are
        counted. Without gradients it is an evaluation, whose rows are nobody's step."""
        if not (self._is_open or self._named or torch.is_grad_enabled()):
            self.begin_phase("eval")
            try:
                yield from loader
            finally:
                self.end_phase()
            return
        if self._named and self._named[-1][0] in BESIDE:
            yield from loader
            return
        self._note_loader(loader)
        batches = None
        while True:
            self.begin_wait()
            is_first = batches is None
            try:
                if batches is None:  # workers are started here
                    batches = iter(loader)
                batch = next(batches)
            except StopIteration:
                self._late_s += perf_counter() - self._asked_s  # workers are ended here
                self._is_open = self._is_asked  # else a step that never came
                return
            self.end_wait(batch)
            if is_first and self._taken:
                self.accounts.first_waits_s += self._wait_s
            yield batch
            del batch  # gone before the next one comes

    def begin_wait(self) -> None:
        """The loop asks for a batch: a step begins."""
        self._is_fed = True
        if self._is_open and not (self._is_asked or self.optimizers):
            self._end_step()  # nobody else tells: a batch is a step
        if self._is_open:
            self._mark(OTHER)
        else:
            self._open()
            self._is_waiting = True
        self._looks.state = WAIT
        self._asked_s = perf_counter()

    def end_wait(self, batch: Any = (), *, rows: int | None = None) -> None:
        """The batch is there, of so many rows; by default those of its first tensor."""
        self._is_waiting = False
        if self._is_timed:
            self._mark(WAIT)
        self._wait_s += perf_counter() - self._asked_s
        self._looks.state = STEP
        first = batch[0] if type(batch) in (tuple, list) and batch else batch
        if type(first) is not Tensor:  # a dict, or a tensor that is more than one
            self._note_batch(batch)
            if rows is None:
                with suppress(RuntimeError):  # of a nested tensor
                    rows = nested.count_rows(batch)
            self._step_rows += rows or 0
            return
        self._batch = batch
        try:
            self.batch_shape = shape = first.shape
        except RuntimeError:  # a nested tensor has none
            shape, rows = torch.Size(), rows or 0
        if rows is None:
            rows = shape[0] if shape else nested.count_rows(batch)
        self._step_rows += rows

    def begin_step(self) -> None:
        """A step of the loop begins, that ends where `end_step` is called."""
        if self._is_open and self._is_asked:
            return
        if not self._is_open:
            self._open()
        elif self._is_timed:
            self._mark(OTHER)
        self._is_asked = True
        if not self._is_plain:
            self._count()

    def end_step(self, *, rows: int | None = None) -> None:
        """The step is done. rows: that it was trained on, where no batch has told."""
        self._end_step(rows)

    def _end_step(self, rows: int | None = None) -> None:
        if not self._is_open:
            return
        if self._is_plain:
            self._end_plain_step(rows)
            return
        if self._is_timed:
            self.accounts.mark(OTHER)
            self._forwards = max(self._forwards, self._passes)
            self.accounts.note_passes(are_seen=self._passes > 0 or not self._begun_by_optimizer)
        if self._counting is not None:
            self._leave_count()
        self._ended_s = perf_counter()
        if not self._is_counted:
            late_s, self._late_s = self._late_s, 0.0
            step_s = late_s + self._ended_s - self._opened_s - self._aside_s
            self._clock.add_step(step_s, min(late_s + self._wait_s, step_s))
        self._looks.state = BETWEEN
        self.done += 1
        step_rows = self._step_rows if rows is None else rows
        self.rows += step_rows
        self._step_rows, self._batch = 0, NO_BATCH
        is_counted = self._is_counted
        self._forget_step()
        if is_counted:
            steps, counted_rows = self._counted
            self._counted = steps + 1, counted_rows + step_rows
        self.accounts.end_step(
            self.done,
            None,
            None,
            rows=step_rows,
            begins_next=False,
            is_counted=is_counted,
        )
        self.accounts.skip_step()  # until one begins of which more is measured
        self._next = next(filter(self._is_watched, count(self.done + 1)))
        if self._taken == 1:
            self._first_s = perf_counter()
        if self._lines:
            self._keep_lines()

    def _end_plain_step(self, rows: int | None) -> None:
        """End a step as most are: what is done here each step pays."""
        if self._counting is not None:
            self._leave_count()
        self._ended_s = now_s = perf_counter()
        step_s, wait_s = now_s - self._opened_s - self._aside_s, self._wait_s
        if self._late_s:
            step_s, wait_s, self._late_s = step_s + self._late_s, wait_s + self._late_s, 0.0
        self._plain_times.append((step_s, wait_s if wait_s < step_s else step_s))
        self._looks.state = BETWEEN
        self.done += 1
        if rows is None:
            rows = self._step_rows
        self.rows += rows
        self._plain_rows += rows
        self._step_rows, self._batch = 0, NO_BATCH
        self._forget_step()
        if self._lines and now_s - self._kept_s >= READ_EVERY_S:
            self._keep_lines()

    def _is_watched(self, step: int) -> bool:
        """Return whether more than its time is measured of this step."""
        return _is_sampled(step - self.earlier) or step % LOG_EVERY == 0 or step in EARLY

    def _settle_plain_steps(self) -> None:
        """Let the accounts have the steps that were plain."""
        if self._plain_times:
            times, self._plain_times = self._plain_times, []
            rows, self._plain_rows = self._plain_rows, 0
            self.accounts.add_plain_steps(times, rows=rows)

    def mark(self, phase: str) -> None:
        """What the step has done since the last mark was this phase."""
        self._mark(phase)

    def _mark(self, phase: str) -> None:
        if self._is_timed and self._is_open:
            self.accounts.mark(phase)

    def drop_pass(self) -> None:
        """The pass that has begun came to no end, and the same is tried again: what it took is
        nobody's phase."""
        self._is_backward, self._forward_by = False, ""
        self._mark(OTHER)

    @partial(guard, otherwise=lambda _: nullcontext())
    def ignore_passes(self) -> AbstractContextManager[None]:
        """Return a context whose forward and backward passes are none of the loop's."""
        return self._ignore_passes()

    @contextmanager
    def _ignore_passes(self) -> Iterator[None]:
        was_quiet, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = was_quiet
            self._mark(OTHER)

    def drop_step(self) -> None:
        """The step that has begun came to no end: it does not count."""
        self._leave_count()
        self._forget_step()

    def _forget_step(self) -> None:
        if self._is_counted:
            self._end_counted()
        self._is_open = self._is_asked = self._is_waiting = self._is_backward = False
        self._is_quiet = self._begun_by_optimizer = self._has_gradients = False
        self._forward_by = ""

    def _end_counted(self) -> None:
        """What was since the counted step began is neither a step's time nor in a speed."""
        self._is_counted = False
        self._count_s += self.accounts.lap(COUNTED)
        self._metrics.restart()

    def begin_phase(self, name: str) -> None:
        """The loop does this from here on: a phase of its step, or a part of the run beside it."""
        if self._is_quiet and name in PHASES:
            self._named.append((name, False))
            self.stage = name
            return
        if name not in PHASES and name not in BESIDE:
            choices = ", ".join((*PHASES, *BESIDE))
            self._tell(f"phase: is one of {choices} (got {name!r}); it counts as {OTHER}")
            name = OTHER
        if self._is_waiting and name in BESIDE:  # the batch that was asked for does not come next
            self._forget_step()
        is_left = self._is_asked and name != "log"  # a step that is gone on with later
        is_apart = name in BESIDE and (is_left or not self._is_open)
        if is_apart:
            self._leave_count()
            if self._is_counted:
                self._end_counted()
            self._is_timed = False  # of a step that has begun, what is left
            self._is_quiet = self._is_open
            self._drain()
            self._looks.state = name
            self._apart_s = perf_counter()
            self._clock.begin_part()
        elif self._is_open:
            self._mark(self._named[-1][0] if self._named else OTHER)
        else:
            self._open()
        self._named.append((name, is_apart))
        self.stage = name

    def end_phase(self) -> None:
        """What the last `begin_phase` has begun is done."""
        if not self._named:
            return
        name, is_apart = self._named.pop()
        if is_apart:
            self._told.add(name)
            self._clock.end_part(name, self.accounts.lap(name))
            self._metrics.begin(0)
            self._aside_s += perf_counter() - self._apart_s
            self._looks.state = STEP if self._is_open else BETWEEN
        elif self._is_open:
            self._mark(name if name in PHASES else OTHER)
        self._forward_by = {"forward": "the loop", "backward": ""}.get(name, self._forward_by)
        self.stage = self._named[-1][0] if self._named else ""

    def drop_phase(self) -> None:
        """What the last `begin_phase` has begun has failed."""
        if not self._named:
            return
        name, _ = self._named[-1]
        self.end_phase()
        self.stage = name

    def make_step_block(self) -> Block:
        """Return the context of a step."""
        return Block(self, unguard(self.begin_step), self._end_step, unguard(self.drop_step))

    def make_phase_block(self, name: str) -> Block:
        """Return the context of what the loop calls by this name."""
        begin = partial(unguard(self.begin_phase), name)
        return Block(self, begin, unguard(self.end_phase), unguard(self.drop_phase))

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log these metrics: numbers, or tensors of one, which are read at a log point.

        step: by default the one that is taken, or was taken last."""
        taken = self.values.take(metrics)
        at = self.done + self._is_open
        if step is not None:
            at = take_step(step, at)
        if all(type(number) is float for number in taken.values()):
            self._lines.append((taken, at))
            return self._keep_lines()
        self._metrics.add_metrics(taken, at)
        self._pending += 1
        if self._pending >= PENDING:
            self._pending = 0
            self._settle_plain_steps()
            self._metrics.read()
        return None

    def take_error(self, error: BaseException) -> None:
        """Measure no more; tell why."""
        if self.is_deaf:
            return
        log.warning("an error of the account's own ended what it measures", exc_info=error)
        self._tell(
            f"account: an error of its own ended what it measures at step {self.done}, and the "
            f"loop went on ({type(error).__name__}: {error}); the log has its trace"
        )
        self.end()

    def end(self) -> None:
        """Measure no more, whatever state this is in; keep what was measured."""
        self.is_deaf = True
        with suppress(Exception):
            self._settle_plain_steps()
        self.accounts.looks.stop()
        self._is_timed = self._is_plain = self._is_open = False
        for hook in self._called:  # not removed: one of them may be what calls
            hook.call = self._rest
        with suppress(Exception):  # it may be this that has failed
            self._keep_lines(at_once=True)
        self._rest()

    def _rest(self, *_: Any) -> None:
        if self._counting is not None:
            self._leave_count()

    def close(self) -> None:
        """Let go of the watched models and optimizers, and log what is not logged yet."""
        if self._is_over:
            return
        self._is_over = True
        if not self.is_deaf and self._has_gradients and self._ends_by_passes():
            self._end_by_pass()
        self._doubt_steps()
        if self._is_counted:
            self._end_counted()
        self.end()
        for handle in self._hooks:
            handle.remove()
        watch = self.accounts.watch
        late_s = min(perf_counter() - self._ended_s, watch.compute_lap_s()) if self._taken else 0.0
        if (
            self._taken and self.done % LOG_EVERY and self.done not in EARLY
        ):  # nobody knew that it is the last one
            self._metrics.add_log_point(None)
        self._drain()
        watch.move(late_s, "steps", AFTER)  # since the last step
        self._keep_lines(at_once=True)

    def _doubt_steps(self) -> None:
        """Tell where steps were not seen, or taken for such."""
        if self._by_passes:
            self._tell(
                "steps: no optimizer of PyTorch was seen; each backward pass counts as a step, "
                "unless `with run.step():` says what is one"
            )
        if self._taken:
            return
        if self._updates:
            self._tell(
                f"steps: optimizers stepped {self._updates:,} times and no step was counted; say "
                "what is one by `with run.step():`"
            )
        elif "eval" not in self._told and (self.models or not self.optimizers) and not self.is_deaf:
            why = " of the watched models" if self.models else ", since nothing was given to watch"
            self._tell(f"steps: none was seen{why}; say what is one by `with run.step():`")

    def _add_line(self, metrics: dict[str, float], step: int) -> None:
        self._lines.append((metrics, step))

    def _keep_lines(self, *, at_once: bool = False) -> None:
        """Hand on what is to be logged: of short steps those of some time together, since each
        writing costs as much as ten lines."""
        now_s = perf_counter()
        if at_once or now_s - self._kept_s >= READ_EVERY_S or len(self._lines) >= PENDING:
            self._settle_plain_steps()
            lines, self._lines, self._kept_s = self._lines, [], now_s
            if lines:
                self._log(lines)

    def summarize(self) -> dict[str, float]:
        """Return what was measured, under the names of the run record."""
        metrics = self.accounts.measure_memory()
        metrics.pop("memory/data_mib", None)  # nobody tells what of a loop's tensors are data
        if not self._taken:
            return metrics
        metrics |= self.accounts.summarize(steps=self._taken, rows=self.rows, counted=self._counted)
        for part in BESIDE:  # nothing is known of those that the loop has not named
            if part not in self._told:
                metrics.pop(f"time/{part}_s", None)
        return metrics

    def measure_held(self, *, baseline_bytes: int) -> ReleaseFacts:
        """Return what models, optimizers and other objects of the loop hold at its end."""
        mine = [tensor for tensors in self.list_owned().values() for tensor in tensors]
        return measure_held_memory(self.device, mine, baseline_bytes=baseline_bytes)

    def list_owned(self) -> OwnedTensors:
        """Return what belongs to whom now, as far as models and optimizers tell."""
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        of_models = (p for model in self.models for p in model.parameters())
        parameters = list({id(p): p for p in (*of_models, *_list_params(groups))}.values())
        return {
            "parameters": parameters,
            "buffers": [b for model in self.models for b in model.buffers()],
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer_state": [tensor for _, tensor in iterate_state(self.optimizers)],
        }

    def find_layers(self) -> Layers:
        """Return the layers of the watched models."""
        return Layers(self.models, partial(iterate_state, self.optimizers))

    def note_failure(self, error: BaseException) -> MemoryFailure:
        """Keep in the ledger who holds the memory now that it ran out, while the frames of the
        error still hold what they held; return in which phase and step it did."""
        ledger = self.accounts.phases.accounts.ledger
        phase, inputs = self._find_phase(error), self._find_inputs(error)
        if inputs is not None and self._batch is NO_BATCH:
            self._note_batch(inputs)
        if not ledger.list_at_failure():  # nobody counted this step
            lives = find_live_tensors(self.device)
            ledger.track_tensors(live.tensor for live in lives)
            ledger.own(
                ACTIVATIONS,
                [
                    live.tensor
                    for live in lives
                    if live.relation == SAVED or live.tensor.grad_fn is not None
                ],
            )
            for owner, tensors in {
                **self.list_owned(),
                "batch": nested.find_tensors(self._batch),
            }.items():
                ledger.own(owner, tensors)
            ledger.end_phase("loop")  # what is nobody's is not the failed phase's
            layers = self.find_layers()
            ledger.place(layers.iterate_tensors())
            ledger.note_failure()
            ledger.failed_layer = layers.find_failed(error)
        return MemoryFailure(
            get_error_message(error),
            phase,
            step=self.done + 1,
            batch_shape=self.batch_shape,
            allocator=self.accounts.phases.meter.read_allocator(),
        )

    def _find_phase(self, error: BaseException) -> str:
        frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        if any("torch/autograd" in code.co_filename for code in frames):
            return "backward"
        if self.stage:
            return self.stage
        if any("torch/optim" in code.co_filename for code in frames):
            return "optimizer"
        return "loop" if self._find_inputs(error) is None else "forward"

    def _find_inputs(self, error: BaseException) -> Any:
        """Return what a watched model was given, in whose pass the error came; None elsewhere."""
        for frame, _ in traceback.walk_tb(error.__traceback__):
            called = frame.f_locals
            if any(called.get("self") is model for model in self.models) and "args" in called:
                return called["args"], called.get("kwargs")
        return None

    def _open(self) -> None:
        step, self.stage, self.has_updated = self.done + 1, "", False
        self._passes = 0
        self._is_plain = step < self._next
        self._is_timed = not self._is_plain and self._begin_watched_step(step)
        self._is_quiet = not (self._is_timed or self._ends_by_passes())
        self._is_open = True
        self._looks.state, self._looks.is_evaluating = STEP, False
        self._wait_s = self._aside_s = 0.0
        self._opened_s = perf_counter()

    def _begin_watched_step(self, step: int) -> bool:
        """Begin a step of which more is measured than its time; return whether its phases are."""
        self._settle_plain_steps()
        if not self._taken:
            self.accounts.lap("setup")
            self._began_s = perf_counter()
        is_sampled = _is_sampled(step - self.earlier)
        self.accounts.begin_step(step, is_sampled=is_sampled)
        return is_sampled or self.accounts.watched is not Watched.NOT

    def _note_loader(self, loader: Any) -> None:
        """Note how many processes feed the loop, where its loader tells."""
        workers = getattr(loader, "num_workers", None)
        if type(workers) is int:
            self.accounts.workers = max(workers, self.accounts.workers or 0)

    def _ends_by_passes(self) -> bool:
        """Return whether nobody tells of a step's end, but for the next forward pass."""
        return not (self.optimizers or self._is_asked or self._is_fed or self._named)

    def _can_afford_count(self) -> bool:
        """Return whether counting a step takes little beside what the training has taken."""
        steps, _ = self._counted
        if not self._taken:
            return False
        now_s = perf_counter()
        if steps:
            cost_s = self._count_s / steps
        else:
            if self._parts is None:
                self._parts = sum(1 for model in self.models for _ in model.modules())
                self._parts += sum(1 for _ in self.list_owned()["parameters"])
            parts = self._parts
            since_s, plain = now_s - self._first_s, self._taken - 1
            step_s = since_s / plain if plain else now_s - self._began_s
            cost_s = min(COUNT_STEPS * step_s, self._forwards * parts * COUNT_PART_S or step_s)
            cost_s = max(cost_s, COUNT_FIRST_S)
        return self._count_s + cost_s <= COUNT_SHARE * (now_s - self._began_s)

    def _drain(self) -> None:
        self._settle_plain_steps()
        self.accounts.end_epoch()
        self.accounts.lap("steps")
        self._pending = 0

    def _note_batch(self, batch: Any) -> None:
        first = next(nested.find_tensors(batch), None)
        if first is not None:
            self._batch = batch
            with suppress(RuntimeError):  # a nested tensor has none
                self.batch_shape = tuple(first.shape)

    def _count(self) -> None:
        """Count the memory of this step by owner, if it is due, and would not change it: compiled
        code is not run below another's eyes, and what torch.func makes has no memory to be seen."""
        if self.accounts.watched is not Watched.COUNTED or self._counting is not None:
            return
        if has_compiled() or _is_transformed() or _get_current_dispatch_mode() is not None:
            self.accounts.phases.watched = Watched.TIMED
            self.accounts.phases.clock.begin(sample=True)
            return
        self.accounts.lap("steps")
        self._is_counted = True
        batch = () if self._batch is NO_BATCH else (self._batch,)
        counting = self.accounts.count_step(batch)
        counting.__enter__()
        self._counting = counting
        self._is_inference = torch.is_inference_mode_enabled()

    def _leave_count(self) -> None:
        """Count no more, unless somebody's own mode is to be left first: inference mode, which was
        entered since, would bring back half of this one."""
        counting, ledger = self._counting, self.accounts.phases.accounts.ledger
        if counting is None or _get_current_dispatch_mode() is not ledger:
            return
        if torch.is_inference_mode_enabled() == self._is_inference:
            self._counting = None
            counting.__exit__(None, None, None)

    def _read_rate(self, step: int) -> float | None:
        for optimizer in self.optimizers:
            groups = optimizer.param_groups
            lr = groups[0].get("lr") if len(groups) else None
            if isinstance(lr, (int, float)):  # a tensor's would have to be waited for
                return float(lr)
        return None

    def _is_hooked(self) -> bool:
        """Return whether what a hook tells is of this loop: of its thread, and not while a graph is
        computed anew for its backward."""
        return not (self._is_backward or self._is_over or get_ident() != self._thread)

    def _keep_given(self, given: Any) -> None:
        try:
            self.given = nested.map_tensors(given, lambda t: torch.empty_like(t, device="meta"))
        except Exception:  # whatever structure somebody has made: only a forecast wants it
            self.given = ()
        kind = self.device.type
        if torch.is_autocast_enabled(kind):
            self.autocast = torch.get_autocast_dtype(kind)

    def _begin_forward(self, model: Any, *given: Any) -> None:
        if self._is_quiet or not self._is_hooked():
            return
        if self._has_gradients and model is self.models[0] and torch.is_grad_enabled():
            if self._ends_by_passes():
                self._end_by_pass()
            self._has_gradients = False
        if not self._is_open:
            if not torch.is_grad_enabled() or self._named:
                self._looks.is_evaluating = True
                return  # of an evaluation
            self._open()
            if not self._is_timed:
                return
        elif not self._named:
            self._mark(OTHER)
        self._passes += 1
        if self.given is None and model is self.models[0] and not _is_transformed():
            self._keep_given(given)
        if self._batch is NO_BATCH and not _is_transformed():
            self._note_batch(given)
            if self._counting is not None:
                self.accounts.phases.accounts.ledger.own("batch", nested.find_tensors(given))
        self._count()

    def _end_forward(self, _: Any, args: Any, output: Any) -> None:
        if self._is_quiet or not self._is_open or not self._is_hooked():
            return
        if not self._named:
            self._mark("forward")
        if not torch.is_grad_enabled() or _is_transformed():
            return
        self._forward_by = "a hook"
        if self._taken + 1 == EARLY[-1]:
            self.accounts.phases.add_graph(measure_graph(nested.find_tensors(output)))
        for tensor in islice(nested.find_tensors(output), MOST_OUTPUTS):
            if tensor.grad_fn is not None:
                tensor.register_hook(Hook(self, self._begin_backward))

    def _begin_backward(self, _: Tensor) -> None:
        """The first gradient of an output is there. On a GPU this is autograd's own thread."""
        if self._is_backward or self._named or not self._is_open or self._is_over:
            return
        self._is_backward = True
        # The loss belongs to it, where the loop does not say what does.
        self._mark("forward" if self._forward_by == "a hook" else OTHER)
        # After the callbacks of others: by one of them DDP waits for the gradients of its ranks.
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(engine.queue_callback, Hook(self, self._end_backward)))

    def _end_backward(self) -> None:
        self._is_backward, self._forward_by = False, ""
        if self._is_open:
            self._has_gradients = True
            self.accounts.phases.accounts.settle()  # gradients, while they are there
            self._mark("backward")

    def _adopt(self, optimizer: Any, *_: Any) -> None:
        """An optimizer begins a step that the loop has not named: it is, if its parameters are."""
        if any(optimizer is watched for watched in self.optimizers):
            return
        mine = {id(p) for model in self.models for p in model.parameters()}
        if any(id(p) in mine for p in _list_params(optimizer.param_groups)):
            self.watch(optimizer)

    def _end_by_pass(self) -> None:
        """End the step that has begun, unless there is an optimizer that may still do."""
        if not self._by_passes:  # once
            for thing in gc.get_objects():
                if issubclass(type(thing), Optimizer):
                    self._adopt(thing)
        if not self.optimizers:
            self._by_passes += 1
            self._end_step()

    def _begin_update(self, *_: Any) -> None:
        if self._is_quiet or not self._is_hooked():
            return
        if not self._is_open:  # its passes were compiled, and nobody saw them
            if self._named:
                return
            self._open()
            self._begun_by_optimizer = True
        if not self._is_timed:
            return
        self.accounts.phases.accounts.settle()
        if not self._named:
            # Where nobody heard of the backward pass, it is most of what was since the forward.
            self.accounts.mark("backward" if self._forward_by else OTHER)
            self._forward_by = ""

    def _end_update(self, optimizer: Any, *_: Any) -> None:
        self._updates += 1
        if not self._is_open or self._is_over or get_ident() != self._thread:
            return
        self.has_updated = True
        if self._is_timed and not self._named:
            self.accounts.mark("optimizer")
        if not self._is_asked and optimizer is self.optimizers[-1]:
            self._end_step()


def _is_sampled(step: int) -> bool:
    """Return whether this one of the steps that are taken here is timed phase by phase: the first
    ones, then a quarter, a sixteenth and at last a thirtieth of them, not at an even distance,
    since a loader may be late at each fourth batch."""
    if step <= EARLY_STEPS:
        return step <= TIME_FIRST or step * 7919 % 31 < 8
    return step * 7919 % 31 < (2 if step <= MANY_STEPS else 1)


def list_optimizers(*things: Any) -> list[Optimizer]:
    """Return the optimizers among these, those that others wrap as they are within."""
    return [_unwrap(thing) for thing in _flatten(things) if isinstance(thing, Optimizer)]


def _unwrap(optimizer: Optimizer) -> Optimizer:
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner  # accelerate and Lightning wrap it
    while not _has_step_hooks(optimizer):  # nor any other thing that PyTorch makes of one
        within = [thing for thing in vars(optimizer).values() if isinstance(thing, Optimizer)]
        if len(within) != 1:
            break
        optimizer = within[0]
    return optimizer


def _has_step_hooks(optimizer: Optimizer) -> bool:
    return hasattr(optimizer, "_optimizer_step_post_hooks")


def _is_transformed() -> bool:
    """Return whether a transform of torch.func is at work here."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def check_watched(*things: Any) -> None:
    """Raise TypeError for what is neither a model nor an optimizer, nor a list of such."""
    for thing in _flatten(things):
        if not isinstance(thing, (nn.Module, Optimizer)):
            raise TypeError(_describe_unwatched(thing))


def _describe_unwatched(thing: Any) -> str:
    kind = type(thing)
    of = "" if kind.__module__ == "builtins" else f"{kind.__module__}."  # others have an Optimizer
    return (
        "watch: takes models (torch.nn.Module) and optimizers (torch.optim.Optimizer) "
        f"(got {of}{kind.__name__})"
    )


def _list_params(groups: Iterable[dict[str, Any]]) -> Iterator[Tensor]:
    for group in groups:
        yield from group["params"]


def _flatten(things: Iterable[Any]) -> Iterator[Any]:
    for thing in things:
        if thing is None:
            continue
        if isinstance(thing, (list, tuple, set)):
            yield from _flatten(thing)
        else:
            yield thing


def find_device(device: Any, things: Iterable[Any]) -> tuple[str, str]:
    """Return the name of the device that a loop is on, and how that is known: as it says, or where
    its models are, else where new tensors of this process go."""
    if device is not None:
        return _name_device(torch.device(device)), "as the account was asked for"
    is_unmade = False  # of the meta device, where nothing is computed
    for thing in _flatten(things):
        if isinstance(thing, nn.Module):
            for tensor in (*thing.parameters(), *thing.buffers()):
                is_unmade |= tensor.is_meta
                if not tensor.is_meta:
                    return _name_device(tensor.device), "where the model is"
        if isinstance(thing, Optimizer):
            for tensor in _list_params(thing.param_groups):
                is_unmade |= tensor.is_meta
                if not tensor.is_meta:
                    return _name_device(tensor.device), "where the parameters are"
    default = torch.get_default_device()
    if is_unmade or default.type == "meta":
        best = torch.accelerator.current_accelerator(check_available=True)
        return _name_device(best or torch.device("cpu")), "since the model is on no device yet"
    return _name_device(default), "the default device of PyTorch here"


def _name_device(device: torch.device) -> str:
    if device.index is None and device.type in ("cuda", "xpu"):
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return device.type if device.type in ("mps", "cpu") else str(device)
