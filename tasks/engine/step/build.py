"""The parts of a training, made from its settings: model, step, optimizer, rate; the same for a
training, a forecast and a benchmark. It refuses nothing: what does not fit was refused before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tasks.engine.base.facts import DataFacts
from tasks.engine.base.field_types import is_import
from tasks.engine.batches.dataloaders import ENDLESS
from tasks.engine.device.precision import autocast
from tasks.engine.distributed.parallel import Parallel
from tasks.engine.models.model_call import Forward, Plain, free
from tasks.engine.settings.read_settings import hidden
from tasks.engine.settings.run_config import FUSED, RunConfig
from tasks.engine.step import optim, own_model, own_optim
from tasks.engine.step.losses import count_of, gives_own_loss, loss_of
from tasks.engine.step.micro_batches import Fitting
from tasks.engine.step.nan_origin import Seen
from tasks.engine.step.optimizer_step import Count, Loss, Step


def with_batch_of(config: RunConfig, rows: int) -> RunConfig:
    """The settings of a training of batches of so many rows."""
    accumulate = min(config.train.accumulate, rows)
    update = {"batch_size": rows, "accumulate": accumulate}
    return config.model_copy(update={"train": config.train.model_copy(update=update)})


def settled(config: RunConfig, data: DataFacts) -> RunConfig:
    """The settings with what the data decides: a loader's batches are as large as they are."""
    if data.batch_rows is None or data.batch_rows == config.train.batch_size:
        return config
    return with_batch_of(config, data.batch_rows)


def steps_of(config: RunConfig, data: DataFacts) -> int:
    """Optimizer steps of all epochs, at most train.max_steps; patience may end it earlier."""
    return plan_of(config).steps(_epoch_steps(config, data))


def epochs_of(config: RunConfig, data: DataFacts) -> int:
    """Epochs that these steps begin."""
    return math.ceil(steps_of(config, data) / _epoch_steps(config, data))


def _epoch_steps(config: RunConfig, data: DataFacts) -> int:
    batch_rows = data.batch_rows or config.train.batch_size
    return ENDLESS if data.endless else math.ceil(data.train_rows / batch_rows)


def keeps_best(config: RunConfig) -> bool:
    """Whether weights are kept beside those that are trained: of one epoch there are no others."""
    return config.train.keep == "best" and config.train.epochs > 1


def model_of(config: RunConfig, data: DataFacts, device: torch.device) -> nn.Module:
    """The model on its device, with the weights that the seed of now draws."""
    # Drawn on the CPU: the same seed then gives the same weights on every device.
    model = own_model.build(config, data).to(device)
    if takes_channels_last(config, model):
        # 1.4 to 1.5 times as fast on a CPU (cnn, 3x32x32), and what tensor cores work on.
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def takes_channels_last(config: RunConfig, model: nn.Module) -> bool:
    """Whether images are kept channels last for it. Not for a model of the user's own, where
    view() may follow a convolution and would then fail."""
    return not is_import(config.model.name) and is_convolutional(model)


def is_convolutional(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


def forward_of(config: RunConfig) -> Callable[[nn.Module], Forward]:
    """How a model of this name is called."""
    if is_import(config.model.name):
        return partial(free, takes_loss=gives_own_loss(config.train))
    return Plain


@dataclass(frozen=True)
class _Compute:
    """The loss of a micro-batch. No closure: see oom.Fitting.fit."""

    model: Callable[[Tensor], Any]
    loss: Loss

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.model(x), y)


@dataclass(frozen=True)
class _OwnCompute:
    """The same of a model of the user's own, which may give its loss itself."""

    forward: Forward
    loss: Loss

    def __call__(self, x: Any, y: Any) -> Tensor:
        outputs, loss = self.forward(x)
        return self.loss(outputs, y) if loss is None else loss


def step_of(
    config: RunConfig,
    data: DataFacts,
    model: nn.Module,
    optimizer: optim.Optimizer,
    *,
    device: torch.device,
    precision: str,
    micro: Fitting,
    mark: Callable[[str], None],
    outputs: list[tuple[str, Tensor]] | None = None,
    parallel: Parallel | None = None,
    weight: Callable[[], float] | None = None,
    count: Count | None = None,
) -> Step:
    """The plain step. precision: as resolved for the device; mark: told where a phase ends.
    outputs: where to keep what a loss of the user's own was given; see suspects.Seen. parallel,
    weight: where several processes train it; see Step. count: see losses.count_of."""
    loss = loss_of(config.train, data, device)
    if outputs is not None and is_import(config.train.loss):
        loss = Seen(config.train.loss, loss, outputs)
    forward = forward_of(config)(model)
    if parallel is not None:
        forward = replace(forward, model=parallel)
    step = Step(
        compute=_Compute(parallel or model, loss)
        if isinstance(forward, Plain)
        else _OwnCompute(forward, loss),
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(device.type, enabled=precision == "fp16"),
        autocast=autocast(precision, device),
        clip_norm=config.optim.clip_norm,
        micro=micro,
        mark=mark,
        count=count or count_of(config.train, data),
        parallel=parallel,
    )
    return step if weight is None else replace(step, weight=weight)


def optimizer_of(config: RunConfig, model: nn.Module) -> optim.Optimizer:
    """The optimizer over the model's parameters."""
    o = config.optim
    if o.name not in FUSED:
        return own_optim.make(o, model.parameters(), undecayed=optim.undecayed(model))
    return optim.make(
        o.name,
        model.parameters(),
        lr=o.lr,
        weight_decay=o.weight_decay,
        momentum=o.momentum,
        beta2=o.beta2,
        undecayed=optim.undecayed(model),
    )


def rate_of(config: RunConfig, *, steps: int) -> Callable[[int], float]:
    """The learning rate of each step of a run of `steps`."""
    o = config.optim
    if is_import(o.schedule):
        return own_optim.schedule(o, steps=steps)
    return optim.schedule(
        o.schedule,
        lr=o.lr,
        total_steps=steps,
        warmup_fraction=o.warmup_fraction,
        min_fraction=o.min_lr_fraction,
    )


@dataclass(frozen=True)
class Plan:
    """How long and how to train. batch_size in rows of one optimizer step."""

    epochs: int
    batch_size: int
    log_every: int
    patience: int
    seed: int
    max_steps: int | None = None

    def steps(self, of_epoch: int) -> int:
        """Of the whole training, where an epoch has so many."""
        return min(self.epochs * of_epoch, self.max_steps or self.epochs * of_epoch)


def plan_of(config: RunConfig) -> Plan:
    """How long the training is."""
    t = config.train
    return Plan(
        epochs=t.epochs,
        max_steps=t.max_steps,
        batch_size=t.batch_size,
        log_every=t.log_every,
        patience=t.patience,
        seed=t.seed,
    )


def spec_of(config: RunConfig, data: DataFacts, *, outputs: int) -> dict[str, Any]:
    """What a predictor has to know beside the weights. outputs: as the model told."""
    names = data.class_names
    if names is None and data.task in ("classification", "multilabel"):
        names = tuple(map(str, range(outputs)))
    return {
        "model": config.model.name,
        "args": hidden(config).model.args,
        "source": data.source,
        "task": data.task,
        "input_shape": data.input_shape,
        "outputs": data.outputs or outputs,
        "offered_outputs": data.outputs,
        "inputs": None if data.batch is None else data.batch["of"][0],
        "class_names": names,
        "feature_names": data.feature_names,
        "offset": data.offset,
        "scale": data.scale,
        "target_offset": data.target_offset,
        "target_scale": data.target_scale,
        "target_log": data.target_log,
        "columns": None if data.columns is None else [asdict(c) for c in data.columns],
        "missing": data.missing,
        "na": data.na,
        "decimal": data.decimal,
    }
