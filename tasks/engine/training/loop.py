"""The training paragraph: batch, step, log, and an evaluation after each epoch. It is handed
everything ready (batches, the step, clocks) and has one seam out, `log(metrics, step)`; it waits
for the device at readings only, and stops where the loss is no longer a number.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from tasks.engine.base.nested import rows_of
from tasks.engine.base.timing import Stopwatch, wait
from tasks.engine.batches.dataset_batches import Batches
from tasks.engine.data.run_warnings import ALIKE
from tasks.engine.step.best_weights import Best
from tasks.engine.step.build import Plan
from tasks.engine.step.evaluation import Evaluator, evaluate
from tasks.engine.step.micro_batches import Fitting, told_in
from tasks.engine.step.nan_origin import NanOrigin, row_sums
from tasks.engine.step.optim import Optimizer
from tasks.engine.step.optimizer_step import Steps
from tasks.engine.step.phases import Phases
from tasks.engine.training.step_metrics import Log, StepMetrics


@dataclass(frozen=True)
class Tools:
    """What the loop works with."""

    device: torch.device
    step: Steps
    micro: Fitting
    evaluator: Evaluator
    optimizer: Optimizer
    rate: Callable[[int], float]
    phases: Phases
    watch: Stopwatch
    speeds: Callable[[float], dict[str, float]]  # more of them, from the samples a second
    log: Log
    best: Best = field(default_factory=Best)
    outputs: list[tuple[str, Tensor]] = field(default_factory=list)  # see nan_origin.Seen


@dataclass(frozen=True)
class Fitted:
    steps: int
    epochs: int
    rows: int  # trained on, each as often as it was
    stopped_early: bool
    metrics: dict[str, float]  # of the weights that the model has: the best epoch's, or the last


def fit(model: nn.Module, train: Batches, val: Batches, *, plan: Plan, tools: Tools) -> Fitted:
    """Train `model` in place and return the validation metrics reached.

    Raises Diverged for a loss that is not finite: on a CPU at the next reading, elsewhere at the
    one after it, and at the latest when the epoch ends.
    """
    t, watch = tools, tools.watch
    step_metrics = StepMetrics(
        t.device, phases=t.phases, watch=watch, rate=t.rate, speeds=t.speeds, log=t.log
    )
    metrics: dict[str, float] = {}
    step = epoch = rows = 0
    last_step = plan.steps(train.steps(plan.batch_size))
    watch.lap("setup")

    def is_log_point(step: int) -> bool:
        return step % plan.log_every == 0 or step == last_step

    with told_in("training", step=lambda: step):
        for epoch in range(plan.epochs):  # noqa: B007 (its last value is a result)
            model.train()
            order = train.order(seed=plan.seed, epoch=epoch)
            t.phases.begin(step + 1, is_log_point=is_log_point(step + 1))
            step_metrics.begin()
            batches = train.shuffled(plan.batch_size, order, t.phases.mark)
            sent = _sent(batches, step=lambda: step + 1)  # noqa: B023 (asked while it is this)
            for x, y in islice(sent, last_step - step):
                t.optimizer.set_lr(t.rate(step))
                step += 1
                with t.phases.counting((x, y)):
                    outcome = t.step(x, y, norm=is_log_point(step), watched=t.phases.watched)
                rows += rows_of(y)
                sums = row_sums(x, y) if train.residency == "loader" else ()
                nan_origin = NanOrigin(sums, tuple(t.outputs))
                step_metrics.add(outcome, rows=rows_of(y), nan_origin=nan_origin)
                t.outputs.clear()
                if step == 1:
                    wait(t.device)
                    t.phases.restart()
                    step_metrics.restart()
                    watch.lap("first_step")
                if is_log_point(step):
                    step_metrics.point(outcome, epoch)
                    if t.phases.meter.is_thrashing():
                        t.micro.ease("the allocator had to free its cache twice running")
                t.phases.begin(step + 1, is_log_point=is_log_point(step + 1))
                del x, y  # gone before the next ones come
            sent.close()  # where max_steps ends it, batches are left
            step_metrics.drain(epoch)
            metrics = evaluate(model, val, t.evaluator)
            watch.lap("eval")
            logged = {name: value for name, value in metrics.items() if name != ALIKE}
            t.log({**logged, "train/epoch": epoch + 1.0}, step)
            watch.lap("log")
            t.best.judged(metrics, epoch + 1)
            is_enough = 0 < plan.patience <= t.best.waited
            stopped_early = is_enough and step < last_step
            if stopped_early or step == last_step:
                break
            t.best.keep(model)
            watch.lap("checkpoint")
    return Fitted(step, epoch + 1, rows, stopped_early, t.best.restored(model, metrics))


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
