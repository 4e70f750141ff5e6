"""Makes the parts of a training: model, step, optimizer; the same for a training, a
forecast and a benchmark. It refuses nothing: what does not fit was refused before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headroom.base.facts import DataFacts
from headroom.base.import_paths import is_import_path
from headroom.device.detection import make_autocast
from headroom.models.predictor import is_writing
from headroom.models.user_model import BuiltinForward, Forward, make_own_forward
from headroom.ranks.sharding import ParallelModel
from headroom.settings.read_settings import hide_config_secrets
from headroom.settings.run_config import FUSED, ModelConfig, OptimConfig, TrainConfig
from headroom.training import optim, own_model
from headroom.training.averaging import choose_count
from headroom.training.losses import WatchedLoss, find_own_loss, make_loss
from headroom.training.micro_batches import MicroBatching
from headroom.training.optimizer_step import Count, Loss, Step, stop_empty_gradients
from headroom.training.plan import Plan


def make_model(settings: ModelConfig, data: DataFacts, device: torch.device) -> nn.Module:
    """Return the model on its device, with the weights that the seed of now draws."""
    # Drawn on the CPU: the same seed then gives the same weights on every device.
    model = own_model.build_model_on_host(settings, data).to(device)
    if takes_channels_last(settings.name, model):
        # 1.4 to 1.5 times as fast on a CPU (cnn, 3x32x32), and what tensor cores work on.
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def takes_channels_last(name: str, model: nn.Module) -> bool:
    """Return whether images are kept channels last for the model of this name. Not for one of the
    user's own, where view() may follow a convolution and would then fail."""
    return not is_import_path(name) and is_convolutional(model)


def is_convolutional(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


def choose_forward(
    name: str, train: TrainConfig, data: DataFacts
) -> Callable[[nn.Module], Forward]:
    """Return how a model of this name is called."""
    if is_import_path(name):
        return partial(make_own_forward, takes_loss=find_own_loss(train, data))
    return BuiltinForward


@dataclass(frozen=True)
class _Compute:
    """The loss of a micro-batch. No closure: see micro_batches.MicroBatching.fit."""

    model: Callable[[Tensor], Any]
    loss: Loss

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.model(x), y)


@dataclass(frozen=True)
class _OwnCompute:
    """The same of a model of the user's own, which may give its loss itself."""

    forward: Forward
    loss: Loss
    may_be_empty: bool = False  # the rows may hold no label that counts

    def __call__(self, x: Any, y: Any) -> Tensor:
        outputs, loss = self.forward(x)
        if loss is None:
            loss = self.loss(outputs, y)
        if self.may_be_empty:
            stop_empty_gradients(outputs, loss)
        return loss


def make_step(
    plan: Plan,
    model: nn.Module,
    optimizer: optim.Optimizer,
    *,
    micro: MicroBatching,
    mark: Callable[[str], None],
    device: torch.device | None = None,
    outputs: list[tuple[str, Tensor]] | None = None,
    parallel: ParallelModel | None = None,
    count: Count | None = None,
    breaks_on_nothing: bool = False,
) -> Step:
    """Return the plain step.

    mark: is called where a phase ends. device: where it computes, if not on the plan's. outputs:
    where to keep what a loss of the user's own was given; see losses.NanOrigin. parallel: how
    the model is called where several processes take one step. count: see averaging.choose_count;
    breaks_on_nothing: see averaging.Averaging.
    """
    train, data, device = plan.settings.train, plan.data, device or plan.torch_device
    loss = make_loss(train, data, device)
    if outputs is not None and is_import_path(train.loss):
        loss = WatchedLoss(train.loss, loss, outputs)
    forward = choose_forward(plan.settings.model.name, train, data)(model)
    if parallel is not None:
        forward = replace(forward, model=parallel)
    compute: Loss = _Compute(parallel or model, loss)
    compute_part = None
    if not isinstance(forward, BuiltinForward):
        compute = _OwnCompute(forward, loss)
        compute_part = replace(compute, may_be_empty=True) if breaks_on_nothing else None
    return Step(
        compute=compute,
        compute_part=compute_part,
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(device.type, enabled=plan.precision == "fp16"),
        autocast=make_autocast(plan.precision, device),
        clip_norm=plan.settings.optim.clip_norm,
        micro=micro,
        mark=mark,
        count=count or choose_count(train, data),
        parallel=parallel,
    )


def make_optimizer(o: OptimConfig, model: nn.Module) -> optim.Optimizer:
    """Return the optimizer over the model's parameters."""
    parameters, undecayed = model.parameters(), optim.list_undecayed(model)
    groups = optim.find_groups(o, model)
    made: optim.Optimizer
    if o.name in FUSED:
        made = optim.make_fused_optimizer(
            o.name,
            parameters,
            lr=o.lr,
            weight_decay=o.decay,
            args=o.args,
            undecayed=undecayed,
        )
        made.set_groups(groups, lr=o.lr)
    else:
        made = optim.make_torch_optimizer(o, parameters, undecayed=undecayed, groups=groups)
    if o.ema_decay is not None:
        made.keep_average(o.ema_decay)
    return made


def _count_written(data: DataFacts) -> int:
    """Return how many tokens the labels of a row had in the first batch."""
    return 0 if data.batch is None else int(data.batch["of"][1]["shape"][0])


def describe_model(plan: Plan, model: nn.Module, *, outputs: int, task: str) -> dict[str, Any]:
    """Return what a predictor has to know beside the weights. outputs, task: as the model told."""
    data, settings = plan.data, plan.settings
    names = data.class_names
    if names is None and task in ("classification", "multilabel"):
        names = tuple(map(str, range(outputs)))
    return {
        "model": settings.model.name,
        "args": hide_config_secrets(settings).model.args,
        "source": data.source,
        "task": task,
        "input_shape": data.input_shape,
        "outputs": data.outputs or outputs,
        "offered_outputs": data.outputs,
        "inputs": None if data.batch is None else data.batch["of"][0],
        "writes": _count_written(data) if task == "tokens" and is_writing(model) else 0,
        "class_names": names,
        "feature_names": data.feature_names,
        "offset": data.offset,
        "scale": data.scale,
        "target_offset": data.target_offset,
        "target_scale": data.target_scale,
        "target_log": data.target_log,
        "times": None if data.times is None else asdict(data.times),
        "columns": None if data.columns is None else [asdict(c) for c in data.columns],
        "missing": data.missing,
        "na": data.na,
        "decimal": data.decimal,
    }
