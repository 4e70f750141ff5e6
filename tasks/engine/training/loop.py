"""The training paragraph: batch, step, log, and an evaluation after each epoch. It is handed
everything ready (batches, the step, clocks) and has one seam out, `log(metrics, step)`; it waits
for the device at readings only, and stops where the loss is no longer a number.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor, nn

from tasks.engine.base.nested import rows_of
from tasks.engine.batches.batches import Batches
from tasks.engine.checkpoint.checkpoints import Checkpoints, Position
from tasks.engine.data.run_warnings import UNLOGGED
from tasks.engine.scores.figures import Cells
from tasks.engine.step.best_weights import Best
from tasks.engine.step.evaluation import Evaluator, evaluate
from tasks.engine.step.micro_batches import Fitting, told_in
from tasks.engine.step.nan_origin import NOBODY, NanOrigin, row_sums
from tasks.engine.step.optim import Optimizer
from tasks.engine.step.optimizer_step import Steps
from tasks.engine.step.plan import Schedule
from tasks.engine.training.accounts import Accounts, LoopFacts


@dataclass(frozen=True)
class Stop:
    """Somebody wants a checkpoint now."""

    reason: str  # of an end that is none of the training's own; see TrainingResult
    ends: bool = True  # the training, after the checkpoint
    act: Callable[[], None] = lambda: None  # called when it is written: a signal raises here


@dataclass(frozen=True)
class Tools:
    """What the loop works with."""

    step: Steps
    micro: Fitting
    evaluator: Evaluator
    optimizer: Optimizer
    rate: Callable[[int], float]
    accounts: Accounts
    speeds: Callable[[float], dict[str, float]] = lambda samples_per_s: {}  # see LoopFacts
    best: Best = field(default_factory=Best)
    outputs: list[tuple[str, Tensor]] = field(default_factory=list)  # see nan_origin.Seen
    checkpoints: Checkpoints = field(default_factory=Checkpoints.none)
    stop: Callable[[], Stop | None] = lambda: None  # asked after each step


@dataclass(frozen=True)
class TrainingResult:
    """What a loop has come to."""

    steps: int
    epochs: int
    rows: int  # trained on, each as often as it was
    stopped_early: bool
    stopped: str  # why it ended before it was done; empty: it is done
    metrics: dict[str, float]  # of the weights that the model has: the best epoch's, or the last
    cells: Cells | None = None  # of a classification, of the same weights
    tested: dict[str, float] = field(default_factory=dict)  # of the rows that were put aside


def fit(
    model: nn.Module, train: Batches, val: Batches, *, schedule: Schedule, tools: Tools
) -> TrainingResult:
    """Train `model` in place and return the validation metrics reached.

    Raises Diverged for a loss that is not finite: on a CPU at the next reading, elsewhere at the
    one after it, and at the latest when the epoch ends.
    """
    t, accounts = tools, tools.accounts
    metrics: dict[str, float] = {}
    of_epoch = train.steps(schedule.batch_size)
    last_step = schedule.count_steps(of_epoch)
    step_metrics = accounts.begin_training(
        LoopFacts(last_step, schedule.log_every, t.rate, t.speeds)
    )
    t.checkpoints.follow(rows=train, step_metrics=step_metrics)
    at = t.checkpoints.resumed()
    step, epoch, rows = at.step, at.epoch - 1, at.rows
    t.best.keep(model)  # where the epoch before was the best
    stop: Stop | None = None
    stopped_early = 0 < schedule.patience <= t.best.waited and step < last_step
    is_done = at.batch == 0 and (stopped_early or step == last_step)
    accounts.lap("setup")

    with told_in("training", step=lambda: step):
        for epoch in range(at.epoch, 0 if is_done else schedule.epochs):
            model.train()
            batch = 0 if train.begins_again else at.batch
            order = train.order(seed=schedule.seed, epoch=epoch)[batch * schedule.batch_size :]
            accounts.begin_epoch(epoch, step + 1)
            batches = train.shuffled(schedule.batch_size, order, accounts.mark)
            sent = _sent(batches, step=lambda: step + 1)  # noqa: B023 (asked while it is this)
            for x, y in islice(sent, last_step - step):
                t.optimizer.set_lr(t.rate(step))
                t.checkpoints.let_go_on()
                step, batch = step + 1, batch + 1
                with accounts.count_step((x, y)):
                    norm = accounts.is_log_point(step)
                    outcome = t.step(x, y, norm=norm, watched=accounts.watched)
                step_rows = train.rows_of_whole or rows_of(y)
                rows += step_rows
                sums = row_sums(x, y) if train.residency == "loader" else ()
                nan_origin = NanOrigin(sums, tuple(t.outputs)) if sums or t.outputs else NOBODY
                accounts.end_step(step, *outcome, rows=step_rows, blame=nan_origin.blamed)
                t.outputs.clear()
                if accounts.is_short_of_memory(step):
                    t.micro.ease("the allocator had to free its cache twice running")
                accounts.begin_step(step + 1)
                del x, y  # gone before the next ones come
                at = Position(step, epoch, batch, rows)
                if batch < of_epoch:  # else it is judged first
                    t.checkpoints.step_done(at)
                    stop = _asked(t, at) if step < last_step else None
                if stop is not None:
                    break
            sent.close()  # where max_steps ends it, batches are left
            accounts.end_epoch()
            if stop is not None:
                break
            metrics = evaluate(model, val, t.evaluator)
            accounts.lap("eval")
            logged = {name: value for name, value in metrics.items() if name not in UNLOGGED}
            accounts.log({**logged, "train/epoch": epoch + 1.0}, step)
            accounts.lap("log")
            t.best.judged(metrics, epoch + 1, cells=t.evaluator.told)
            is_enough = 0 < schedule.patience <= t.best.waited
            stopped_early = is_enough and step < last_step
            at = Position(step, epoch + 1, 0, rows)
            if stopped_early or step == last_step:
                t.checkpoints.finish(at)
                break
            t.checkpoints.epoch_done(at, is_best=t.best.waited == 0)
            t.checkpoints.let_go_on()
            t.best.keep(model)
            accounts.lap("checkpoint")
            stop = _asked(t, at)
            if stop is not None:
                break
        if not metrics and not t.best.has_weights:  # ended before an epoch was
            metrics = evaluate(model, val, t.evaluator)
    ended = stop.reason if stop is not None else ""
    cells = t.best.cells if t.best.has_weights else t.evaluator.told
    metrics = t.best.restored(model, metrics)
    return TrainingResult(step, epoch + 1, rows, stopped_early, ended, metrics, cells)


def _asked(t: Tools, at: Position) -> Stop | None:
    """Whether the training ends here for now; there is a checkpoint then."""
    stop = t.stop()
    if stop is not None:
        t.checkpoints.save(at, last=True)
        t.accounts.lap("checkpoint")
        stop.act()
    return stop if stop is not None and stop.ends else None


def _sent(
    batches: Iterator[tuple[Any, Any]], *, step: Callable[[], int]
) -> Generator[Any, None, None]:
    """The same batches; one that finds no room has run out of memory at that step."""
    with told_in("sending", step=step):
        yield from batches


def batch_of(error: BaseException) -> tuple[Any, Any]:
    """The batch that was trained or judged on when it was raised; nothing where there was none."""
    trace, found = error.__traceback__, (None, None)
    while trace is not None:
        # The name of one of ours: what a user calls x and y is no batch.
        if trace.tb_frame.f_globals.get("__name__") in (__name__, evaluate.__module__):
            here = trace.tb_frame.f_locals
            found = (here["x"], here["y"]) if {"x", "y"} <= here.keys() else found
        trace = trace.tb_next
    return found
