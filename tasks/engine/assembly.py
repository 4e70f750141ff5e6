"""The parts of a training, made from its settings: model, step, optimizer, rate; the same for a
training, a forecast and a benchmark. It refuses nothing: what does not fit was refused before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tasks.engine import models, optim
from tasks.engine.config import RunConfig
from tasks.engine.facts import DataFacts
from tasks.engine.loop import Plan
from tasks.engine.losses import loss_of
from tasks.engine.oom import Fitting
from tasks.engine.precision import autocast
from tasks.engine.step import Loss, Step


def model_of(config: RunConfig, data: DataFacts, device: torch.device) -> nn.Module:
    """The model on its device, with the weights that the seed of now draws."""
    # Drawn on the CPU: the same seed then gives the same weights on every device.
    model = models.build(
        config.model.name,
        input_shape=data.input_shape,
        outputs=data.outputs,
        args=config.model.args,
    ).to(device)
    if is_convolutional(model):
        # 1.4 to 1.5 times as fast on a CPU (cnn, 3x32x32), and what tensor cores work on.
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def is_convolutional(model: nn.Module) -> bool:
    """Whether images are kept channels last for it."""
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


@dataclass(frozen=True)
class _Compute:
    """The loss of a micro-batch. No closure: see oom.Fitting.fit."""

    model: nn.Module
    loss: Loss

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.model(x), y)


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
) -> Step:
    """The plain step. precision: as resolved for the device; mark: told where a phase ends."""
    loss = loss_of(config.train.loss, data.task)
    return Step(
        compute=_Compute(model, loss),
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(device.type, enabled=precision == "fp16"),
        autocast=autocast(precision, device),
        clip_norm=config.optim.clip_norm,
        micro=micro,
        mark=mark,
    )


def optimizer_of(config: RunConfig, model: nn.Module) -> optim.Optimizer:
    """The optimizer over the model's parameters."""
    o = config.optim
    return optim.make(
        o.name,
        model.parameters(),
        lr=o.lr,
        weight_decay=o.weight_decay,
        momentum=o.momentum,
        beta2=o.beta2,
    )


def rate_of(config: RunConfig, *, steps: int) -> Callable[[int], float]:
    """The learning rate of each step of a run of `steps`."""
    o = config.optim
    return optim.schedule(o.schedule, lr=o.lr, total_steps=steps, warmup_fraction=o.warmup_fraction)


def plan_of(config: RunConfig) -> Plan:
    """How long the training is."""
    t = config.train
    return Plan(
        epochs=t.epochs,
        batch_size=t.batch_size,
        log_every=t.log_every,
        patience=t.patience,
        seed=t.seed,
    )


def spec_of(config: RunConfig, data: DataFacts) -> dict[str, Any]:
    """What a predictor has to know beside the weights."""
    return {
        "model": config.model.name,
        "args": config.model.args,
        "source": data.source,
        "task": data.task,
        "input_shape": data.input_shape,
        "outputs": data.outputs,
        "class_names": data.class_names,
        "feature_names": data.feature_names,
        "offset": data.offset,
        "scale": data.scale,
    }
