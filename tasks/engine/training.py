"""One training from facts to facts: builds what the loop works with, runs it, saves the model and
measures. Everything that holds device memory lives and dies inside `train`, also when it raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from tasks.engine import data as prepared
from tasks.engine import memory, models, optim, predictor
from tasks.engine.batches import Batches, feed, row_order
from tasks.engine.config import RunConfig
from tasks.engine.device import limit, resolve_precision
from tasks.engine.facts import DataFacts, DeviceFacts, TrainFacts
from tasks.engine.loop import Fitted, Log, Plan, Tools, fit
from tasks.engine.precision import autocast, matmul_mode
from tasks.engine.seeds import seeded
from tasks.engine.settings import ConfigError
from tasks.engine.threads import fitting_threads
from tasks.engine.timing import PHASES, Stopwatch, phase_clock, wait


def check(config: RunConfig, data: DataFacts) -> int:
    """Refuse what can't be trained before a device is touched; the multiply-adds of one row.

    Raises models.ModelError for the model and ConfigError for a setting that contradicts the data.
    """
    work = models.check(
        config.model.name,
        input_shape=data.input_shape,
        outputs=data.outputs,
        args=config.model.args,
    )
    _loss(config.train.loss, data.task)
    if config.train.batch_size > data.train_rows:
        raise ConfigError(
            f"train.batch_size: must be at most the {data.train_rows} training rows "
            f"(got {config.train.batch_size})"
        )
    return work


def train(
    config: RunConfig, device: DeviceFacts, data: DataFacts, *, folder: Path, log: Log
) -> TrainFacts:
    """Train as `config` says and write the model to `folder`.

    `log(metrics, step)` is called at every log point. Raises loop.Diverged for a loss that is not
    finite, and whatever PyTorch raises; the frames of an exception are cleared of their tensors.
    """
    try:
        return _train(config, device, data, folder=folder, log=log)
    except BaseException as error:
        # Prefect keeps the exception of a failed task, and with it every tensor of its frames.
        memory.clear_frames(error)
        raise


def _train(
    config: RunConfig, facts: DeviceFacts, data: DataFacts, *, folder: Path, log: Log
) -> TrainFacts:
    watch = Stopwatch()
    device = torch.device(facts.name)
    work = config.train.batch_size * check(config, data)
    precision = resolve_precision(config.train.precision, facts)
    with ExitStack() as stack:
        stack.enter_context(seeded(config.train.seed, deterministic=config.train.deterministic))
        stack.enter_context(matmul_mode(precision))
        threads = stack.enter_context(fitting_threads(work, device))
        if config.memory.limit_mib is not None:
            stack.callback(limit(facts, config.memory.limit_mib))
        if facts.index is not None and device.type != "cpu":
            stack.enter_context(torch.accelerator.device_index(facts.index))
        meter = memory.Meter(device)
        arrays = prepared.load(data)
        # Two thirds of the room for the training rows: both parts may then live there.
        room = (facts.free_bytes or 0) / 3
        rows = feed(arrays.train_x, arrays.train_y, device=device, room_bytes=2 * room)
        val = feed(arrays.val_x, arrays.val_y, device=device, room_bytes=room)
        model = _model(config, data, device)
        step_model = _compiled(config.train.compile, model)
        plan = _plan(config, data.task)
        tools = Tools(
            loss=_loss(config.train.loss, data.task),
            optimizer=_optimizer(config, model),
            rate=_rate(config, steps=plan.total_steps(len(rows))),
            scaler=torch.amp.GradScaler(device.type, enabled=precision == "fp16"),
            autocast=autocast(precision, device),
            clock=phase_clock(device),
            meter=meter,
            watch=watch,
            wait=partial(wait, device),
            log=log,
        )
        fitted = fit(step_model, rows, val, plan=plan, tools=tools)
        held = memory.by_owner(model, tools.optimizer.state_tensors())
        measured = {**meter.summary(), **held}
        stats = meter.stats()
        held_bytes = memory.allocated_bytes(device)
        measured["memory/activations_mib"] = _activations(model, rows, plan=plan, tools=tools)
        watch.lap("log")
        predictor.save(model, _spec(config, data), folder)
        np.save(folder / "example.npy", _raw(arrays.val_x[:2], data))
        watch.lap("checkpoint")
    return TrainFacts(
        metrics={**fitted.metrics, **_timings(tools, fitted, rows=len(rows)), **measured},
        tags={
            "precision": precision,
            "threads": str(threads),
            "compiled": "no" if step_model is model else config.train.compile,
            "data.residency": rows.residency,
            "micro_batch": str(math.ceil(plan.batch_size / plan.accumulate)),
        },
        steps=fitted.steps,
        epochs=fitted.epochs,
        stopped_early=fitted.stopped_early,
        model_folder=str(folder),
        held_bytes=held_bytes,
        stats=stats,
    )


def _model(config: RunConfig, data: DataFacts, device: torch.device) -> nn.Module:
    # Drawn on the CPU: the same seed then gives the same weights on every device.
    return _built(config, data).to(device)


def _built(config: RunConfig, data: DataFacts) -> nn.Module:
    return models.build(
        config.model.name,
        input_shape=data.input_shape,
        outputs=data.outputs,
        args=config.model.args,
    )


def _compiled(mode: str, model: nn.Module) -> nn.Module:
    if mode in ("auto", "off"):
        return model
    compiled = torch.compile(model, mode="max-autotune" if mode == "max" else "default")
    return cast(nn.Module, compiled)


def _plan(config: RunConfig, task: str) -> Plan:
    t = config.train
    return Plan(
        epochs=t.epochs,
        batch_size=t.batch_size,
        accumulate=t.accumulate,
        log_every=t.log_every,
        patience=t.patience,
        seed=t.seed,
        clip_norm=config.optim.clip_norm,
        task=task,
    )


def _optimizer(config: RunConfig, model: nn.Module) -> optim.Optimizer:
    o = config.optim
    return optim.make(
        o.name,
        model.parameters(),
        lr=o.lr,
        weight_decay=o.weight_decay,
        momentum=o.momentum,
        beta2=o.beta2,
    )


def _rate(config: RunConfig, *, steps: int) -> Callable[[int], float]:
    o = config.optim
    return optim.schedule(o.schedule, lr=o.lr, total_steps=steps, warmup_fraction=o.warmup_fraction)


def _loss(name: str, task: str) -> Callable[[Tensor, Tensor], Tensor]:
    fits = {"classification": "cross_entropy", "regression": "mse"}[task]
    if name not in ("auto", fits):
        raise ConfigError(f"train.loss: {name} does not fit a {task}; use auto or {fits}")
    return nn.functional.cross_entropy if task == "classification" else nn.functional.mse_loss


def _activations(model: nn.Module, rows: Batches, *, plan: Plan, tools: Tools) -> float:
    """MiB that one forward pass keeps for its backward pass."""
    order = row_order(len(rows), seed=plan.seed, epoch=0)[: plan.batch_size]
    micro = math.ceil(plan.batch_size / plan.accumulate)
    x, y = next(iter(rows.shuffled(micro, order, lambda phase: None)))
    model.train()
    with memory.SavedActivations(model.parameters()) as saved, tools.autocast():
        tools.loss(model(x), y)
    return saved.bytes / memory.MIB


def _timings(tools: Tools, fitted: Fitted, *, rows: int) -> dict[str, float]:
    spent = tools.watch.seconds
    total_s = tools.watch.total_s()
    phase_s = tools.clock.seconds_per_step()
    known_s = sum(spent[part] for part in ("setup", "first_step", "eval", "log", "checkpoint"))
    known_s += sum(phase_s.values()) * (fitted.steps - 1)
    loop_s = spent["first_step"] + spent["steps"]
    timings = {
        **{f"time/{p}_ms": 1000 * phase_s[p] for p in PHASES if p in phase_s},
        "time/setup_s": spent["setup"],
        "time/first_step_s": spent["first_step"],
        "time/eval_s": spent["eval"],
        "time/log_s": spent["log"],
        "time/checkpoint_s": spent["checkpoint"],
        "speed/samples_per_s": fitted.epochs * rows / loop_s,
        "speed/steps_per_s": fitted.steps / loop_s,
    }
    if phase_s:
        timings["time/unaccounted_pct"] = 100 * max(0.0, total_s - known_s) / total_s
    return timings


def _raw(rows: np.ndarray, data: DataFacts) -> np.ndarray:
    """The rows as their user has them: the scaling undone."""
    return (rows * np.array(data.scale) + np.array(data.offset)).astype(np.float32)


def _spec(config: RunConfig, data: DataFacts) -> dict[str, Any]:
    return {
        "model": config.model.name,
        "args": config.model.args,
        "task": data.task,
        "input_shape": data.input_shape,
        "outputs": data.outputs,
        "class_names": data.class_names,
        "feature_names": data.feature_names,
        "offset": data.offset,
        "scale": data.scale,
    }
