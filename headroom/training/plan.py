"""What one training will do, decided once, when its device and its data are known: how many steps
and epochs, of how many rows, in which arithmetic, and which runs it may be compared with. All that
comes after it, the forecast, the trainer and the record, reads the plan.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from headroom.base.facts import DataFacts, DeviceFacts
from headroom.data.dataloaders import ENDLESS
from headroom.device.detection import resolve_precision
from headroom.ranks.ranks import read_ranks_from_environment
from headroom.settings.run_config import RunConfig, TrainConfig
from headroom.training.cuda_graph import may_replay
from headroom.training.own_model import ModelCheck


@dataclass(frozen=True)
class Schedule:
    """How long to train, and when to log. batch_size in rows of one optimizer step."""

    epochs: int
    batch_size: int
    log_every: int
    patience: int
    seed: int
    max_steps: int | None = None
    eval_every_steps: int | None = None  # beside the evaluation at the end of an epoch

    def count_steps(self, epoch_steps: int) -> int:
        """Return the optimizer steps of all epochs, at most max_steps; patience may end it
        earlier."""
        all_steps = self.epochs * epoch_steps
        return min(all_steps, self.max_steps or all_steps)


@dataclass(frozen=True)
class Plan:
    """What one training will do. Made by make_plan; derive others with `with_batch`."""

    settings: RunConfig  # with what the data decides: a loader's batches are as large as they are
    device: DeviceFacts
    data: DataFacts
    precision: str  # as resolved for the device
    epoch_steps: int  # optimizer steps of one epoch; ENDLESS of a loader without length
    steps: int  # of the whole run
    epochs: int  # that these steps begin
    may_replay: bool  # whether steps may be replayed from a CUDA graph, if that is faster
    model_check: ModelCheck | None = None  # what check_plan has learnt; None: not checked yet

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device.name)

    @property
    def schedule(self) -> Schedule:
        return _make_schedule(self.settings.train)

    @property
    def micro_batch(self) -> int:
        """Rows that go through the model at once, if nothing speaks against it."""
        t = self.settings.train
        return math.ceil(t.batch_size / t.accumulate)

    @property
    def keeps_best(self) -> bool:
        """True if weights are kept beside those that are trained: of one evaluation there are no
        others."""
        t = self.settings.train
        return t.keep == "best" and (t.epochs > 1 or t.eval_every_steps is not None)

    @cached_property
    def comparable(self) -> str:
        """A name for the work of a step: the same for runs whose steps cost the same, so also
        whether they may be replayed from a graph. 16 hex digits."""
        t, o, m, device = self.settings.train, self.settings.optim, self.settings.model, self.device
        # The second: of those that torchrun started.
        processes = (self.settings.launch.processes, read_ranks_from_environment().size)
        work = [
            [device.kind, device.model, device.total_bytes, device.torch_version],
            [self.data.task, self.data.input_shape, self.data.outputs, self.data.bytes],
            [m.name, m.args],
            [o.name, o.has_momentum, o.clip_norm is not None],
            [
                *(t.batch_size, t.accumulate, self.precision, t.deterministic),
                *(self.settings.memory.limit_mib, self.may_replay),
            ],
            [self.keeps_best and device.kind == "cpu"],  # beside the weights that are trained
            *([] if processes == ("1", 1) else [*processes, t.parallel]),
            *(["recompute"] if self.settings.memory.recompute else []),
            *(["label_smoothing"] if t.cross_entropy.label_smoothing else []),
            *([["args", flags]] if (flags := [n for n, v in o.args.items() if v is True]) else []),
            *([["ema"]] if o.ema_decay is not None else []),
            *([["parts", m.freeze, [*o.groups]]] if m.freeze or o.groups else []),
        ]
        return hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()[:16]

    def with_batch(self, rows: int) -> Plan:
        """Return the plan of a training whose batches have so many rows: a rank's share, say."""
        return replace(self, settings=_set_batch(self.settings, rows))


def make_plan(settings: RunConfig, device: DeviceFacts, data: DataFacts) -> Plan:
    """Decide what a training with these settings does on this device with this data.

    Raises DeviceError for a precision that the device does not have.
    """
    if data.batch_rows is not None and data.batch_rows != settings.train.batch_size:
        settings = _set_batch(settings, data.batch_rows)
    train = settings.train
    epoch_steps = ENDLESS if data.endless else math.ceil(data.train_rows / train.batch_size)
    steps = _make_schedule(train).count_steps(epoch_steps)
    precision = resolve_precision(train.precision, device)
    return Plan(
        settings,
        device,
        data,
        precision=precision,
        epoch_steps=epoch_steps,
        steps=steps,
        epochs=math.ceil(steps / epoch_steps),
        may_replay=may_replay(settings, device, precision, steps=steps),
    )


def _make_schedule(train: TrainConfig) -> Schedule:
    return Schedule(
        epochs=train.epochs,
        max_steps=train.max_steps,
        batch_size=train.batch_size,
        log_every=train.log_every,
        patience=train.patience,
        seed=train.seed,
        eval_every_steps=train.eval_every_steps,
    )


def _set_batch(settings: RunConfig, rows: int) -> RunConfig:
    """Return the settings of a training of batches of so many rows."""
    accumulate = min(settings.train.accumulate, rows)
    update = {"batch_size": rows, "accumulate": accumulate}
    return settings.model_copy(update={"train": settings.train.model_copy(update=update)})
