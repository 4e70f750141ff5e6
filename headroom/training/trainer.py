"""Trains one model, from a plan to facts. The recipe is `_train`: take a place on the device, build
the state of the training, fit, judge, save. Everything that holds device memory lives and dies
inside `train`, also when it raises.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from headroom.base import scores
from headroom.base.facts import TrainFacts
from headroom.base.import_paths import forbid_exit
from headroom.data.run_warnings import warn_of_results, warn_of_test
from headroom.data.source_data import DataError
from headroom.ranks.ranks import Ranks, is_lost_peer
from headroom.ranks.slow_rank import find_slow_rank, select_phases
from headroom.report.memory_timeline import write_timeline
from headroom.settings.model_args import ModelError
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import TrainConfig
from headroom.training.admission import (
    PastRuns,
    make_forecast_figures,
)
from headroom.training.averaging import warn_of_parts
from headroom.training.best_weights import BestWeights
from headroom.training.build import describe_model
from headroom.training.check_training import check_plan
from headroom.training.checkpoint_files import DamagedCheckpoint, NewerCheckpoint
from headroom.training.evaluation import evaluate
from headroom.training.loop import (
    StopCheck,
    TimeBudget,
    TrainingResult,
    agree_on_stop,
    fit_model,
)
from headroom.training.micro_batches import MemoryExhausted, MicroBatches
from headroom.training.place import Place, take_place
from headroom.training.plan import Plan
from headroom.training.reload_check import write_model
from headroom.training.shared_model import (
    gather_whole,
    is_shared_out,
    summarize_ranks,
)
from headroom.training.stateful import StateMismatch
from headroom.training.train_state import EndStep, TrainState, build_state
from headroom.training.training_parts import open_test_batches
from headroom.watch import failed_step, memory_meter, out_of_memory
from headroom.watch.accounts import HELD
from headroom.watch.allocation_log import AllocationLog
from headroom.watch.leaks import survive_broken_device
from headroom.watch.oom_report import (
    OomExplanation,
    OutOfMemory,
    explain_out_of_memory,
    find_setting,
)
from headroom.watch.out_of_memory import MemoryFailure
from headroom.watch.step_metrics import Log
from headroom.watch.throughput import make_peak_tags


def train(
    plan: Plan,
    *,
    past: PastRuns = PastRuns(),  # noqa: B008 (frozen)
    folder: Path,
    log: Log,
    resumes: bool = False,
    check_stop: StopCheck = lambda: None,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
    end_step: EndStep | None = None,
) -> TrainFacts:
    """Train as planned and write the model to `folder`/model, checkpoints to `folder`/checkpoints;
    return what was measured.

    log: is called with metrics and their step, at every log point. resumes: whether to go on from
    the newest checkpoint. check_stop: tells whether somebody wants a checkpoint, or the end.
    ranks: the processes that train it together, joined; the lead of them writes. end_step: is
    called after each step; see train_state.

    Raises step_metrics.Diverged for a loss that is not finite, and whatever PyTorch raises; the
    frames of an exception are cleared of tensors.
    """
    failure = None
    log = log if ranks.is_lead else _log_nothing
    try:
        return _train(
            plan,
            past=past,
            folder=folder,
            log=log,
            resumes=resumes,
            check_stop=check_stop,
            ranks=ranks,
            end_step=end_step,
        )
    except BaseException as error:
        # Prefect keeps the exception of a failed task, and with it every tensor of its frames.
        out_of_memory.clear_frames(error)
        if not isinstance(error, Exception):
            out_of_memory.forget_frames(error)
            raise
        if isinstance(error, OutOfMemory) or not out_of_memory.is_oom(error):
            raise
        # Beside the steps, where nothing is repeated and nobody counted: the model, its rows or a
        # batch found no room.
        failure = MemoryFailure(str(error), phase="set-up")
    raise OutOfMemory(_explain_lack(failure, AllocationLog(plan.torch_device), plan, folder))


@forbid_exit
def _train(
    plan: Plan,
    *,
    past: PastRuns,
    folder: Path,
    log: Log,
    resumes: bool,
    check_stop: StopCheck,
    ranks: Ranks,
    end_step: EndStep | None,
) -> TrainFacts:
    """The recipe of a training: each line is a page of its own."""
    plan = check_plan(plan)
    with ExitStack() as stack:
        place = stack.enter_context(take_place(plan, past=past, ranks=ranks))
        state = build_state(
            plan, place, stack, folder=folder, log=log, resumes=resumes, end_step=end_step
        )
        stop = TimeBudget(plan.settings.train, check_stop)
        state.tuned.end_by(stop.compute_left_s)
        check_agreed_stop = agree_on_stop(stop, ranks, every=plan.schedule.log_every)
        result = _fit_and_judge(state, plan, place, check_agreed_stop, folder)
        return _save(state, plan, place, result, folder)


def _fit_and_judge(
    state: TrainState, plan: Plan, place: Place, check_stop: StopCheck, folder: Path
) -> TrainingResult:
    """Return what the steps have come to. Raises what ends them as one sentence, and without the
    frames that hold tensors."""
    exhausted = mistake = None
    try:
        with survive_broken_device(plan.torch_device):
            result = fit_model(state, plan.schedule, check_stop=check_stop)
            return _judge_test_rows(state, plan, place.ranks, result)
    except MemoryExhausted as error:
        exhausted = error.failure
    except (StateMismatch, DamagedCheckpoint, NewerCheckpoint) as error:
        raise ConfigError(f"--resume: {error}") from None
    except (ConfigError, DataError):
        raise  # a sentence by now, though the words of PyTorch are in it
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        # To see it once more, a rank would need the others, and they may be what is gone.
        may_look = not is_shared_out(plan.settings.train, place.ranks) and not is_lost_peer(error)
        mistake = _explain_mistake(error, state) if may_look else None
        if mistake is None:
            raise
    finally:
        state.take_batch()
    if mistake is not None:
        raise ModelError(mistake)
    assert exhausted is not None
    # Explained apart from the error, which keeps what it came through.
    ledger = state.accounts.phases.accounts.ledger
    explanation = _explain_lack(exhausted, ledger, plan, folder)
    title = f"Out of memory: {explanation.phase} of step {explanation.step}"
    write_timeline(ledger, folder, title=title, lines=[explanation.sentence])
    raise OutOfMemory(explanation)


def _explain_lack(
    failure: MemoryFailure, ledger: AllocationLog, plan: Plan, folder: Path
) -> OomExplanation:
    return explain_out_of_memory(
        failure,
        ledger,
        find_remedy=partial(find_setting, config=plan.settings, precision=plan.precision),
        device=plan.device.name,
        folder=folder,
    )


def _judge_test_rows(
    state: TrainState, plan: Plan, ranks: Ranks, result: TrainingResult
) -> TrainingResult:
    """Return the result with the metrics of the rows that were put aside, of a training that is
    done."""
    if not plan.data.test_rows or result.stopped:
        return result
    rows = open_test_batches(plan, state.model, rank=ranks.rank, size=ranks.size)
    with closing(rows) as test:
        tested = evaluate(state.model, test, state.evaluator, part="test")
    state.accounts.lap("eval")
    return replace(result, tested=tested)


def _save(
    state: TrainState, plan: Plan, place: Place, result: TrainingResult, folder: Path
) -> TrainFacts:
    """Write the model and what belongs to it; return all that is known of the training."""
    settings, data, ranks, check = plan.settings, plan.data, place.ranks, plan.model_check
    accounts, checkpoints = state.accounts, state.checkpoints
    micro, tuned = state.micro, state.tuned
    assert check is not None and isinstance(micro, MicroBatches)
    threads = torch.get_num_threads()
    recovered = micro.recovered + state.evaluator.micro.recovered
    measured = {
        **accounts.measure_memory(),
        **tuned.verdict.make_metrics(),
        "memory/ooms_recovered": float(recovered),
        # From here the next run alike takes the rows to begin with.
        **({"memory/micro_batch": float(micro.rows)} if micro.is_learnt else {}),
        **checkpoints.make_metrics(),
        **make_forecast_figures(
            place.admission, place.past, settings.memory.limit_mib, tuned.has_recorded
        ),
    }
    stats, layers = place.meter.read_stats(), accounts.describe_layers()
    if settings.memory.snapshot and ranks.is_lead:
        title = f"Memory of a training step on {plan.device.name}"
        write_timeline(place.ledger, folder, title=title, lines=[])
    ended_s = accounts.lap("log")
    held_bytes = memory_meter.count_allocated_bytes(place.device)
    accounts.lap(HELD)  # on a CPU it looks at every object that Python has
    logged, moves = gather_whole(state.model, plan, ranks), ""
    if ranks.is_lead:
        spec = describe_model(plan, logged, outputs=check.outputs, task=check.task or data.task)
        moves = write_model(
            logged, spec, data, state.val, folder / "model", precision=plan.precision
        )
    saved_s = accounts.lap("checkpoint")
    classes = {
        part: scores.write_class_scores(one.cells, data.class_names, folder, part=part)
        for part, one in (("val", result.evaluation), ("test", result.tested))
        if one is not None and one.cells is not None and ranks.is_lead
    }
    measured |= accounts.summarize(
        steps=result.steps,
        rows=result.rows,
        replays=tuned.replays,
        copy_s=state.train.copy_s,
    )
    by_rank = summarize_ranks(ranks, plan.device.name, measured)
    profile = accounts.describe()
    slow_rank = find_slow_rank(ranks.all_gather(select_phases(measured)))
    least_rows = min(micro.smallest, ranks.count_most_rows(settings.train.batch_size))
    return TrainFacts(
        metrics={**result.metrics, **measured, **by_rank.metrics},
        tags={
            "precision": plan.precision,
            "threads": str(threads),
            "data.residency": state.train.residency,
            "data.residency.reason": state.train.reason,
            "memory.admission": place.admission.reason,
            "compiled": tuned.verdict.compiled,
            "compiled.reason": tuned.verdict.reason,
            "micro_batch": str(micro.rows),
            **checkpoints.make_tags(),
            **make_peak_tags(place.peak),
            **by_rank.tags,
        },
        steps=result.steps,
        epochs=result.epochs,
        stopped_early=result.stopped_early,
        stopped=result.stopped,
        model_folder=str(folder / "model"),
        held_bytes=held_bytes,
        stats=stats,
        layers=layers,
        profile={
            **profile,
            "once_s": {**profile["once_s"], "log": ended_s, "checkpoint": saved_s},
            "slow_rank": slow_rank,
        },
        warnings=(
            *check.warnings,
            *warn_of_results(
                data,
                result.evaluation,
                loss=settings.train.loss,
                best=settings.train.best.name,
            ),
            *warn_of_test(data, result.evaluation, result.tested),
            *warn_of_progress(settings.train, result, state.best),
            *warn_of_parts(
                settings.train,
                check.averaging,
                check.changes,
                model=settings.model.name,
                micro_rows=least_rows,
                eval_rows=state.find_eval_rows(),
            ),
            *((moves,) if moves else ()),
            *checkpoints.warnings,
        ),
        classes=classes,
    )


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


def _log_nothing(metrics: dict[str, float], step: int) -> None:
    """Of a rank that is not the lead."""


def _explain_mistake(error: Exception, state: TrainState) -> str | None:
    """Return the sentence for a mistake of the user's; its batch lives no longer than that."""
    batch, step = state.take_batch(), state.tuned.plain
    rows = (None, None) if batch is None else (batch.x, batch.y)
    return failed_step.explain_failure(error, state.model, rows, partial(step.forward, *rows))
