"""Trains one model, from a plan to facts. The recipe is `_train`: place it on the device, build the
model, open the batches, build the step, resume, fit, judge, save. Everything that holds device
memory lives and dies inside `train`, also when it raises.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from tasks.engine.accounts.accounts import HELD, Accounts
from tasks.engine.accounts.phases import Stopwatch
from tasks.engine.accounts.step_metrics import Log
from tasks.engine.accounts.throughput import (
    make_peak_tags,
    make_rates,
)
from tasks.engine.base import scores
from tasks.engine.base.facts import TrainFacts
from tasks.engine.base.figures import ALIKE, UNLOGGED
from tasks.engine.base.import_paths import forbid_exit
from tasks.engine.batches.batches import Batches
from tasks.engine.checkpoint.checkpoint_files import DamagedCheckpoint, NewerCheckpoint
from tasks.engine.checkpoint.checkpoints import Checkpoints
from tasks.engine.checkpoint.training_state import StateMismatch
from tasks.engine.data.run_warnings import warn_of_results, warn_of_test
from tasks.engine.diagnosis import failed_step
from tasks.engine.distributed.ranks import Ranks
from tasks.engine.files.source_data import DataError
from tasks.engine.memory import memory_meter, out_of_memory
from tasks.engine.memory.leaks import survive_broken_device
from tasks.engine.memory.snapshot import Recorder, record_history
from tasks.engine.settings.model_args import ModelError
from tasks.engine.settings.read_settings import ConfigError
from tasks.engine.settings.run_config import TrainConfig
from tasks.engine.step.averaging import warn_of_parts
from tasks.engine.step.build import describe_model
from tasks.engine.step.evaluation import BestWeights, evaluate
from tasks.engine.step.micro_batches import MemoryExhausted
from tasks.engine.step.optim import Plateau, make_schedule
from tasks.engine.step.optimizer_step import Step
from tasks.engine.step.own_model import ModelCheck
from tasks.engine.step.plan import Plan
from tasks.engine.training.admission import (
    PastRuns,
    make_forecast_figures,
)
from tasks.engine.training.check_training import check_plan
from tasks.engine.training.loop import (
    LoopTools,
    StopCheck,
    TimeBudget,
    TrainingResult,
    agree_on_stop,
    find_batch,
    fit_model,
)
from tasks.engine.training.oom_report import (
    OutOfMemory,
    describe_setup_failure,
    explain_failure,
    write_timeline,
)
from tasks.engine.training.place import Place, take_place
from tasks.engine.training.reload_check import write_model
from tasks.engine.training.shared_model import (
    build_model_on_device,
    find_mesh,
    gather_whole,
    summarize_ranks,
)
from tasks.engine.training.training_parts import (
    TrainingParts,
    build_parts,
    open_batches,
    open_checkpoints,
    open_test_batches,
)


@dataclass(frozen=True)
class Order:
    """What a training is asked for beside its plan."""

    folder: Path  # of the run: gets model and checkpoints
    log: Log  # is called with metrics and their step, at every log point
    past: PastRuns = PastRuns()
    resumes: bool = False  # whether to go on from the newest checkpoint
    asked: StopCheck = lambda: None  # tells whether somebody wants a checkpoint, or the end
    ranks: Ranks = Ranks()  # the processes that train it together, joined; the lead of them writes


def train(
    plan: Plan,
    *,
    past: PastRuns = PastRuns(),  # noqa: B008 (frozen)
    folder: Path,
    log: Log,
    resumes: bool = False,
    asked: StopCheck = lambda: None,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
) -> TrainFacts:
    """Train as planned and write the model to `folder`/model, checkpoints to `folder`/checkpoints;
    return what was measured. See Order for the arguments.

    Raises step_metrics.Diverged for a loss that is not finite, and whatever PyTorch raises; the
    frames of an exception are cleared of tensors.
    """
    failure = None
    log = log if ranks.is_lead else _log_nothing
    try:
        return _train(plan, Order(folder, log, past, resumes, asked, ranks))
    except BaseException as error:
        # Prefect keeps the exception of a failed task, and with it every tensor of its frames.
        out_of_memory.clear_frames(error)
        if not isinstance(error, Exception):
            out_of_memory.forget_frames(error)
            raise
        if isinstance(error, OutOfMemory) or not out_of_memory.is_oom(error):
            raise
        failure = describe_setup_failure(error)
    # Beside the steps: the model, its rows or a batch found no room.
    raise OutOfMemory(explain_failure(failure, None, plan=plan, folder=folder))


@forbid_exit
def _train(plan: Plan, order: Order) -> TrainFacts:
    """The recipe of a training: each line is a page of its own."""
    ranks, watch = order.ranks, Stopwatch()
    plan = check_plan(plan)
    checked = plan.model_check
    assert checked is not None
    with ExitStack() as stack:
        place = stack.enter_context(take_place(plan, checked, past=order.past, ranks=ranks))
        accounts = Accounts(
            place.device, place.meter, place.ledger, place.owners,
            log=order.log, watch=watch, ranks=ranks,
        )  # fmt: skip
        model = build_model_on_device(plan, ranks)
        place.recorder = stack.enter_context(_record_history(plan, order))
        rows, val = open_batches(plan, model, rank=ranks.rank, size=ranks.size)
        stack.callback(rows.close)
        stack.callback(val.close)
        parts = build_parts(
            plan, model, (rows, val), accounts,
            owners=place.owners, start=place.start(plan, checked, order.past), ranks=ranks,
        )  # fmt: skip
        if not ranks.is_lead:  # what is drawn from here on, is drawn for other rows
            torch.manual_seed(plan.settings.train.seed + ranks.rank)
        checkpoints = open_checkpoints(
            plan, model, folder=order.folder, resumes=order.resumes, ranks=ranks
        )
        stack.callback(checkpoints.close)
        checkpoints.follow(**parts.list_stateful(model, is_lead=ranks.is_lead))
        trained = _Trained(plan, order, place, model, rows, val, parts, checkpoints)
        result = _fit_and_judge(trained, checked.work)
        return trained.save(result, checked)


def _record_history(plan: Plan, order: Order) -> AbstractContextManager[Recorder]:
    """Return what records the history of the device's memory, on the lead and where asked for."""
    is_on = plan.settings.memory.snapshot and order.ranks.is_lead
    return record_history(plan.torch_device, folder=order.folder, on=is_on)


@dataclass(frozen=True)
class _Trained:
    """A training that is put together: fitted, judged and saved, one after another."""

    plan: Plan
    order: Order
    place: Place
    model: nn.Module
    rows: Batches
    val: Batches
    parts: TrainingParts
    checkpoints: Checkpoints

    def fit(self, work: int) -> TrainingResult:
        """Train the model. work: multiply-adds of a row's forward pass."""
        plan, parts, ranks, peak = self.plan, self.parts, self.order.ranks, self.place.peak
        schedule = plan.schedule
        steps = schedule.count_steps(self.rows.count_steps(schedule.batch_size))
        train = plan.settings.train
        rate = make_schedule(
            plan.settings.optim,
            steps=steps,
            epoch_steps=plan.epoch_steps,
            best=train.best,
            min_delta=train.min_delta,
        )
        judged: Callable[[dict[str, float]], None] = _ignore_evaluation
        if isinstance(rate, Plateau):
            judged = rate.record
            self.checkpoints.follow(schedule=rate)
        tools = LoopTools(
            step=parts.tuned,
            micro=parts.micro,
            evaluator=parts.evaluator,
            optimizer=parts.optimizer,
            rate=rate,
            judged=judged,
            accounts=parts.accounts,
            speeds=make_rates(plan.data, work=work, peak=peak),
            best=parts.best,
            outputs=parts.outputs,
            checkpoints=self.checkpoints,
            stop=agree_on_stop(
                TimeBudget(plan.settings.train, self.order.asked), ranks, every=schedule.log_every
            ),
        )
        return fit_model(self.model, self.rows, self.val, schedule=schedule, tools=tools)

    def judge(self, result: TrainingResult) -> TrainingResult:
        """Return the result with the metrics of the rows that were put aside, of a training that
        is done."""
        if not self.plan.data.test_rows or result.stopped:
            return result
        ranks = self.order.ranks
        with closing(
            open_test_batches(self.plan, self.model, rank=ranks.rank, size=ranks.size)
        ) as test:
            tested = evaluate(self.model, test, self.parts.evaluator, part="test")
        self.parts.accounts.lap("eval")
        return replace(result, tested=tested)

    def save(self, result: TrainingResult, checked: ModelCheck) -> TrainFacts:
        """Write the model and what belongs to it; return all that is known of the training."""
        plan, order, place, parts = self.plan, self.order, self.place, self.parts
        data, ranks, accounts = plan.data, order.ranks, parts.accounts
        threads = torch.get_num_threads()  # after the trial
        limit_mib = plan.settings.memory.limit_mib
        measured = {
            **parts.make_metrics(),
            **self.checkpoints.make_metrics(),
            **make_forecast_figures(
                place.admission, order.past, limit_mib, parts.tuned.has_recorded
            ),
        }
        stats = place.meter.read_stats()
        if plan.settings.memory.snapshot and ranks.is_lead:
            title = f"Memory of a training step on {plan.device.name}"
            write_timeline(place.ledger, order.folder, title=title, lines=[])
        accounts.lap("log")
        held_bytes = memory_meter.count_allocated_bytes(place.device)
        accounts.lap(HELD)  # on a CPU it looks at every object that Python has
        logged, moves = gather_whole(self.model, plan, ranks), ""
        if ranks.is_lead:
            task = checked.task or data.task
            spec = describe_model(plan, logged, outputs=checked.outputs, task=task)
            moves = write_model(
                logged, spec, data, self.val, order.folder / "model", precision=plan.precision
            )
        accounts.lap("checkpoint")
        alike = bool(result.metrics.get(ALIKE, 0))
        found = {k: v for k, v in (result.metrics | result.tested).items() if k not in UNLOGGED}
        judged = {"val": result.cells, "test": parts.evaluator.told if result.tested else None}
        classes = {
            part: scores.write_class_scores(cells, data.class_names, order.folder, part=part)
            for part, cells in judged.items()
            if cells is not None and ranks.is_lead
        }
        measured |= accounts.summarize(
            steps=result.steps,
            rows=result.rows,
            replays=parts.tuned.replays,
            copy_s=self.rows.copy_s,
        )
        by_rank = summarize_ranks(ranks, plan.device.name, measured)
        least_rows = min(
            parts.micro.smallest, ranks.count_most_rows(plan.settings.train.batch_size)
        )
        return TrainFacts(
            metrics={**found, **measured, **by_rank.metrics},
            tags={
                "precision": plan.precision,
                "threads": str(threads),
                "data.residency": self.rows.residency,
                "data.residency.reason": self.rows.reason,
                "memory.admission": place.admission.reason,
                **parts.make_tags(),
                **self.checkpoints.make_tags(),
                **make_peak_tags(place.peak),
                **by_rank.tags,
            },
            steps=result.steps,
            epochs=result.epochs,
            stopped_early=result.stopped_early,
            stopped=result.stopped,
            model_folder=str(order.folder / "model"),
            held_bytes=held_bytes,
            stats=stats,
            warnings=(
                *checked.warnings,
                *warn_of_results(
                    data,
                    result.metrics,
                    loss=plan.settings.train.loss,
                    alike=alike,
                    best=plan.settings.train.best.name,
                ),
                *warn_of_test(data, result.metrics, result.tested),
                *warn_of_progress(plan.settings.train, result, parts.best),
                *warn_of_parts(
                    plan.settings.train,
                    checked.averaging,
                    model=plan.settings.model.name,
                    micro_rows=least_rows,
                    eval_rows=parts.find_eval_rows(self.val),
                ),
                *((moves,) if moves else ()),
                *self.checkpoints.warnings,
            ),
            classes=classes,
        )


def _fit_and_judge(trained: _Trained, work: int) -> TrainingResult:
    """Return what the steps have come to. Raises what ends them as one sentence, and without the
    frames that hold tensors."""
    exhausted = mistake = None
    parts, plan = trained.parts, trained.plan
    try:
        with survive_broken_device(plan.torch_device):
            return trained.judge(trained.fit(work))
    except MemoryExhausted as error:
        exhausted = error.failure
    except (StateMismatch, DamagedCheckpoint, NewerCheckpoint) as error:
        raise ConfigError(f"--resume: {error}") from None
    except (ConfigError, DataError):
        raise  # a sentence by now, though the words of PyTorch are in it
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        # To see it once more, a rank would need the others.
        may_look = find_mesh(trained.model) is None
        mistake = _explain_mistake(error, trained.model, parts.plain) if may_look else None
        if mistake is None:
            raise
    if mistake is not None:
        raise ModelError(mistake)
    assert exhausted is not None
    # Explained apart from the error, which keeps what it came through.
    phases, folder = parts.accounts.phases, trained.order.folder
    raise OutOfMemory(explain_failure(exhausted, phases, plan=plan, folder=folder))


def warn_of_progress(
    train: TrainConfig, result: TrainingResult, best: BestWeights
) -> tuple[str, ...]:
    """Return the warning where training was still getting better in its last evaluations."""
    if result.stopped or result.stopped_early or not best.is_improving():
        return ()
    name, setting = train.best.name, "max_steps" if train.max_steps else "epochs"
    return (
        f"{name} was best at the end of {result.epochs} epochs and still getting better: it may "
        f"not be done; raise train.{setting}",
    )


def _ignore_evaluation(metrics: dict[str, float]) -> None:
    """Of a schedule that depends on the step alone."""


def _log_nothing(metrics: dict[str, float], step: int) -> None:
    """Of a rank that is not the lead."""


def _explain_mistake(error: Exception, model: nn.Module, step: Step) -> str | None:
    """Return the sentence for a mistake of the user's; its batch lives no longer than that."""
    batch = find_batch(error)
    return failed_step.explain_failure(error, model, batch, partial(step.forward, *batch))
