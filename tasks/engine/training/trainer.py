"""One training from facts to facts: builds what the loop works with, runs it, saves the model and
measures. Everything that holds device memory lives and dies inside `train`, also when it raises.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import torch
from torch import nn

from tasks.engine.base.facts import DataFacts, DeviceFacts, TrainFacts
from tasks.engine.base.import_paths import ends_told
from tasks.engine.base.seeds import seeded
from tasks.engine.base.timing import Stopwatch
from tasks.engine.checkpoint.checkpoint_files import Damaged, Newer
from tasks.engine.checkpoint.training_state import Mismatch
from tasks.engine.data.run_warnings import ALIKE, UNLOGGED, of_results
from tasks.engine.device.detection import resolve_precision
from tasks.engine.device.memory_limit import limited
from tasks.engine.device.precision import matmul_mode
from tasks.engine.diagnosis import explain
from tasks.engine.distributed.ranks import Ranks
from tasks.engine.files.source_data import DataError
from tasks.engine.forecast.admission import admit
from tasks.engine.memory import glibc_heap, memory_meter
from tasks.engine.memory.allocator_history import recording
from tasks.engine.memory.allocator_stats import give_back
from tasks.engine.memory.broken_device import outlived
from tasks.engine.scores import by_class, figures
from tasks.engine.settings.model_args import ModelError
from tasks.engine.settings.read_settings import ConfigError
from tasks.engine.settings.run_config import RunConfig
from tasks.engine.step.build import (
    plan_of,
    rate_of,
    settled,
    spec_of,
    steps_of,
    with_batch_of,
)
from tasks.engine.step.cpu_threads import fitting_threads
from tasks.engine.step.cuda_graph import may_replay, own_stream
from tasks.engine.step.evaluation import evaluate
from tasks.engine.step.losses import warn_of_parts
from tasks.engine.step.micro_batches import MemoryExhausted
from tasks.engine.step.optimizer_step import Step
from tasks.engine.training.budget import Asked, Budget, agreed
from tasks.engine.training.check_training import check
from tasks.engine.training.loop import Tools, batch_of, fit
from tasks.engine.training.oom_files import OutOfMemory, draw, told, unwatched
from tasks.engine.training.rank_facts import of_ranks
from tasks.engine.training.reload_check import leave_model
from tasks.engine.training.shared_model import held, is_shared_out, mesh_of, whole
from tasks.engine.training.similar_runs import Past, forecast_figures
from tasks.engine.training.step_metrics import Log
from tasks.engine.training.throughput import peak_of, peak_tags, rates, timings
from tasks.engine.training.training_batches import fed, put_aside
from tasks.engine.training.training_parts import checkpoints_of, training_parts


def train(
    config: RunConfig,
    device: DeviceFacts,
    data: DataFacts,
    *,
    past: Past = Past(),  # noqa: B008 (frozen)
    folder: Path,
    log: Log,
    resumes: bool = False,
    asked: Asked = lambda: None,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
) -> TrainFacts:
    """Train as `config` says and write the model to `folder`/model, checkpoints to
    `folder`/checkpoints. resumes: go on from the newest. asked: whether somebody wants one. ranks:
    the processes that train it together, joined; the lead of them writes.

    `log(metrics, step)` is called at every log point. Raises readings.Diverged for a loss that is
    not finite, and whatever PyTorch raises; the frames of an exception are cleared of tensors.
    """
    failure = None
    try:
        return _train(
            config,
            device,
            data,
            past=past,
            folder=folder,
            log=log if ranks.is_lead else _unlogged,
            resumes=resumes,
            asked=asked,
            ranks=ranks,
        )
    except BaseException as error:
        # Prefect keeps the exception of a failed task, and with it every tensor of its frames.
        memory_meter.clear_frames(error)
        if not isinstance(error, Exception):
            memory_meter.forget_frames(error)
            raise
        if isinstance(error, OutOfMemory) or not memory_meter.is_oom(error):
            raise
        failure = unwatched(error)
    # Beside the steps: the model, its rows or a batch found no room.
    raise OutOfMemory(
        told(failure, None, config=config, device=device, precision="", folder=folder)
    )


@ends_told
def _train(
    config: RunConfig,
    facts: DeviceFacts,
    data: DataFacts,
    *,
    past: Past,
    folder: Path,
    log: Log,
    resumes: bool,
    asked: Asked,
    ranks: Ranks,
) -> TrainFacts:
    watch = Stopwatch()
    config = settled(config, data)
    device = torch.device(facts.name)
    checked = check(config, data)
    work = checked.work
    if data.task == "multilabel":
        figures.load()  # not in the first epoch
    precision = resolve_precision(config.train.precision, facts)
    with ExitStack() as stack:
        stack.enter_context(glibc_heap.kept(device))
        stack.enter_context(matmul_mode(precision))
        here = ranks.largest_share(config.train.batch_size)
        batch_work = here * work
        threads = stack.enter_context(
            fitting_threads(batch_work, device, fixed=config.train.deterministic)
        )
        if facts.index is not None and device.type != "cpu":
            stack.enter_context(torch.accelerator.device_index(facts.index))
        stack.enter_context(own_stream(device))
        peak = peak_of(facts, precision, task=data.task)
        if device.type != "cpu":
            give_back(device)  # what was cached by then is no part of the run, and escapes a limit
        admission = admit(
            with_batch_of(config, here),
            data,
            facts,
            past_peak_bytes=past.peak_bytes(),
            past_reserved_bytes=past.reserved_bytes(),
            past_micro_batch=past.micro_batch(),
            is_shared_out=is_shared_out(config, ranks),
        )
        # After the forecasts, which build a model of the user's own as often as memory is short.
        stack.enter_context(seeded(config.train.seed, deterministic=config.train.deterministic))
        ledger, source = stack.enter_context(limited(facts, config.memory.limit_mib))
        meter = memory_meter.Meter(device, source)  # before the model and the rows: they count too
        model = held(config, data, device, ranks)
        snapshot = config.memory.snapshot and ranks.is_lead
        recorder = stack.enter_context(recording(device, folder=folder, on=snapshot))
        rows, val = fed(config, facts, data, model, rank=ranks.rank, size=ranks.size)
        stack.callback(rows.close)
        stack.callback(val.close)
        parts = training_parts(
            config,
            data,
            model,
            (rows, val),
            facts=facts,
            precision=precision,
            ledger=ledger,
            meter=meter,
            recorder=recorder,
            known=past.compiling(),
            micro_rows=admission.micro_batch,
            threads=threads,
            graphs=admission.fits_graph
            and may_replay(config, facts, precision, steps=steps_of(config, data)),
            checked=checked,
            ranks=ranks,
        )
        if not ranks.is_lead:  # what is drawn from here on, is drawn for other rows
            torch.manual_seed(config.train.seed + ranks.rank)
        checkpoints = checkpoints_of(
            config, data, model, folder=folder, resumes=resumes, ranks=ranks
        )
        stack.callback(checkpoints.close)
        checkpoints.follow(**parts.stateful(model, watch, is_lead=ranks.is_lead))
        tools = Tools(
            device=device,
            step=parts.tuned,
            micro=parts.micro,
            evaluator=parts.evaluator,
            optimizer=parts.optimizer,
            rate=rate_of(config, steps=parts.steps),
            phases=parts.phases,
            watch=watch,
            speeds=rates(data, work=work, peak_flops_per_s=peak.flops_per_s if peak else None),
            log=log,
            best=parts.best,
            outputs=parts.outputs,
            checkpoints=checkpoints,
            stop=agreed(Budget(config.train, asked), ranks, every=config.train.log_every),
            ranks=ranks,
        )
        exhausted = mistake = None
        tested: dict[str, float] = {}
        try:
            with outlived(device):
                fitted = fit(model, rows, val, plan=plan_of(config), tools=tools)
                if data.test_rows and not fitted.stopped:
                    with closing(
                        put_aside(config, facts, data, model, rank=ranks.rank, size=ranks.size)
                    ) as test:
                        tested = evaluate(model, test, parts.evaluator, part="test")
                    watch.lap("eval")
        except MemoryExhausted as error:
            exhausted = error.failure
        except (Mismatch, Damaged, Newer) as error:
            raise ConfigError(f"--resume: {error}") from None
        except (ConfigError, DataError):
            raise  # a sentence by now, though the words of PyTorch are in it
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            # To see it once more, a rank would need the others.
            may_look = mesh_of(model) is None
            mistake = _mistake(error, model, parts.plain) if may_look else None
            if mistake is None:
                raise
        if mistake is not None:
            raise ModelError(mistake)
        if exhausted is not None:  # told apart from the error, which keeps what it came through
            raise OutOfMemory(
                told(
                    exhausted,
                    parts.phases,
                    config=config,
                    device=facts,
                    precision=precision,
                    folder=folder,
                )
            )
        threads = torch.get_num_threads()  # after the trial
        measured = {
            **parts.measured(),
            **checkpoints.measured(),
            **forecast_figures(admission, past, config.memory.limit_mib, parts.tuned.has_recorded),
        }
        stats = parts.phases.meter.stats()
        held_bytes = memory_meter.allocated_bytes(device)
        if snapshot:
            title = f"Memory of a training step on {facts.name}"
            draw(parts.phases.accounts.ledger, folder, title=title, lines=[])
        watch.lap("log")
        logged, moves = whole(model, config, data, device, ranks), ""
        if ranks.is_lead:
            spec = spec_of(config, data, outputs=checked.outputs)
            moves = leave_model(logged, spec, data, val, folder / "model", precision=precision)
        watch.lap("checkpoint")
        alike = bool(fitted.metrics.get(ALIKE, 0))
        found = {k: v for k, v in (fitted.metrics | tested).items() if k not in UNLOGGED}
        judged = {"val": fitted.cells, "test": parts.evaluator.told if tested else None}
        classes = {
            part: by_class.written(cells, data.class_names, folder, part=part)
            for part, cells in judged.items()
            if cells is not None and ranks.is_lead
        }
        measured |= timings(tools, fitted, rows=rows, replays=parts.tuned.replays)
        by_rank = of_ranks(ranks, facts.name, measured)
    return TrainFacts(
        metrics={**found, **measured, **by_rank.metrics},
        tags={
            "precision": precision,
            "threads": str(threads),
            "data.residency": rows.residency,
            "data.residency.reason": rows.reason,
            "memory.admission": admission.reason,
            **parts.tags(),
            **checkpoints.tags(),
            **peak_tags(peak),
            **by_rank.tags,
        },
        steps=fitted.steps,
        epochs=fitted.epochs,
        stopped_early=fitted.stopped_early,
        stopped=fitted.stopped,
        model_folder=str(folder / "model"),
        held_bytes=held_bytes,
        stats=stats,
        warnings=(
            *of_results(data, fitted.metrics, loss=config.train.loss, alike=alike),
            *warn_of_parts(
                config.train, is_sum=checked.adds_up, micro_rows=min(parts.micro.smallest, here)
            ),
            *((moves,) if moves else ()),
            *checkpoints.warnings,
        ),
        classes=classes,
    )


def _unlogged(metrics: dict[str, float], step: int) -> None:
    """Of a rank that is not the lead."""


def _mistake(error: Exception, model: nn.Module, step: Step) -> str | None:
    """The sentence for a mistake of the user's; its batch lives no longer than that is told."""
    batch = batch_of(error)
    return explain.explained(error, model, batch, partial(step.forward, *batch))
