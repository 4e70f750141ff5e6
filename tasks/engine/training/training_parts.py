"""Builds what a training works with: its batches, those to be judged once, its step with the
optimizer, its evaluation, what belongs to whom, and its checkpoints; and takes two rows as an
example for predictions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tasks.engine.accounts.accounts import Accounts
from tasks.engine.base import nested
from tasks.engine.base.facts import DataFacts
from tasks.engine.batches.batches import Batches, RankShare
from tasks.engine.batches.dataloaders import LoaderBatches
from tasks.engine.batches.dataset_batches import (
    TRAIN_SHARE,
    VAL_SHARE,
    ResidentBatches,
    StreamedBatches,
    place_rows,
)
from tasks.engine.checkpoint.checkpoints import Checkpoints, refuse_no_room
from tasks.engine.checkpoint.compatibility import describe_code, describe_training
from tasks.engine.checkpoint.kept_steps import CHECKPOINTS
from tasks.engine.checkpoint.training_state import (
    HostCopies,
    RandomNumbers,
    Scaler,
    Stateful,
    Weights,
)
from tasks.engine.data import own_data
from tasks.engine.data import preparation as prepared
from tasks.engine.device.memory_limit import compute_room_bytes, compute_rows_room_bytes
from tasks.engine.distributed.ranks import Ranks
from tasks.engine.memory.allocators import wait_for_device
from tasks.engine.memory.memory_by_owner import BEST_WEIGHTS, OwnedTensors
from tasks.engine.memory.memory_meter import MemoryMeter
from tasks.engine.memory.snapshot import Recorder
from tasks.engine.models import predictor
from tasks.engine.step.averaging import choose_count
from tasks.engine.step.build import (
    Shared,
    choose_forward,
    make_optimizer,
    make_step,
    takes_channels_last,
)
from tasks.engine.step.choose_step import EarlierTimings, TunedStep
from tasks.engine.step.evaluation import BestWeights, Evaluator, choose_eval_rows
from tasks.engine.step.losses import (
    find_own_functions,
    load_own_metrics,
    make_loss,
    wrap_in_units,
)
from tasks.engine.step.micro_batches import MicroBatches
from tasks.engine.step.optim import Optimizer
from tasks.engine.step.optimizer_step import Step
from tasks.engine.step.own_model import ModelCheck
from tasks.engine.step.plan import Plan
from tasks.engine.training.shared_model import (
    AgreedMicroBatches,
    FixedMicroBatches,
    find_mesh,
    share_steps,
)


def open_batches(
    plan: Plan, model: nn.Module, *, rank: int = 0, size: int = 1
) -> tuple[Batches, Batches]:
    """Return the rows to train on and those to validate on, where they are fastest to reach; of
    several ranks a RankShare of each. Close both."""
    data, settings = plan.data, plan.settings
    if data.batch is not None:
        loaders = own_data.open_loaders(
            settings.data, settings.train, data, plan.torch_device, rank=rank, size=size
        )
        return _share_batches(loaders[0], rank, size), _share_batches(loaders[1], rank, size)
    arrays, send = prepared.load_arrays(data), _make_placer(plan, model)
    room = compute_rows_room_bytes(
        plan.device, limit_mib=settings.memory.limit_mib, rows_mib=settings.data.memory_mib
    )
    rows = send(arrays.train_x, arrays.train_y, room_bytes=TRAIN_SHARE * room)
    val = send(arrays.val_x, arrays.val_y, room_bytes=VAL_SHARE * room)
    return _share_batches(rows, rank, size), _share_batches(val, rank, size)


def open_test_batches(plan: Plan, model: nn.Module, *, rank: int = 0, size: int = 1) -> Batches:
    """Return the rows to be judged once: they stay on the host. Close them."""
    arrays = prepared.load_arrays(plan.data)
    assert arrays.test_x is not None and arrays.test_y is not None
    send = _make_placer(plan, model)
    return _share_batches(send(arrays.test_x, arrays.test_y, room_bytes=0), rank, size)


def _make_placer(plan: Plan, model: nn.Module) -> Callable[..., ResidentBatches | StreamedBatches]:
    return partial(
        place_rows,
        device=plan.torch_device,
        channels_last=takes_channels_last(plan.settings.model.name, model),
        is_spare=plan.settings.data.memory_mib is not None,
    )


def _share_batches(
    batches: ResidentBatches | StreamedBatches | LoaderBatches, rank: int, size: int
) -> Batches:
    return RankShare(batches, rank=rank, size=size) if size > 1 else batches


def read_first_rows(val: Batches) -> Any:
    """Read the inputs of two rows to validate on, as a batch holds them; of a loader that
    several ranks share, of one where its part of a batch has no more."""
    whole = val.whole if isinstance(val, RankShare) else val
    with closing(whole.iterate_in_order(2)) as batches:  # type: ignore[type-var]
        x, _ = next(batches)
        return nested.take_first_rows(x, 2)


def make_example(data: DataFacts, x: Any) -> dict[str, np.ndarray]:
    """Return two rows as their user has them, by the name of the input; the only one is called
    x.

    x: what read_first_rows gives.
    """
    if data.batch is None:
        return {"x": _unscale_rows(prepared.load_arrays(data).val_x[:2], data)}
    rows = nested.map_tensors(x, lambda tensor: tensor.detach().cpu())
    return {name: value.numpy() for name, value in name_inputs(rows).items()}


def name_inputs(x: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch's inputs: of a dict under its keys, of several under their
    numbers."""
    if isinstance(x, torch.Tensor):
        return {"x": x}
    named = x.items() if isinstance(x, dict) else enumerate(x)
    return {str(key): value for key, value in named if isinstance(value, torch.Tensor)}


def _unscale_rows(rows: np.ndarray, data: DataFacts) -> np.ndarray:
    """Return the rows as their user has them: the scaling undone."""
    if data.task == "tokens":
        return np.asarray(rows)
    return (rows * np.array(data.scale) + np.array(data.offset)).astype(np.float32)


@dataclass
class Owners:
    """What belongs to whom, whenever it is asked; filled while a training is put together."""

    model: nn.Module | None = None
    rows: tuple[Batches, ...] = ()
    optimizer: Optimizer | None = None
    best: BestWeights | None = None
    recorded: list[Tensor] = field(default_factory=list)  # what a recorded graph keeps

    def __call__(self) -> OwnedTensors:
        assert self.model is not None and self.optimizer is not None and self.best is not None
        return {
            "data": [tensor for rows in self.rows for tensor in rows.list_tensors()],
            "parameters": self.model.parameters(),
            "buffers": self.model.buffers(),
            BEST_WEIGHTS: self.best.iterate_kept(),
            "graph": self.recorded,
            "gradients": [p.grad for p in self.model.parameters() if p.grad is not None],
            "optimizer_state": self.optimizer.list_state_tensors(),
        }


@dataclass(frozen=True)
class _Witness:
    """Keeps what the device tells of the last attempt; see micro_batches.OomRecorder."""

    recorder: Recorder
    meter: MemoryMeter

    def start(self) -> None:
        self.recorder.start()

    def write(self) -> None:
        self.recorder.write()

    def read_allocator(self) -> dict[str, int]:
        return self.meter.read_allocator()


@dataclass(frozen=True)
class Start:
    """With what a training starts, as was found out before: on two rows, by a forecast, by runs
    alike."""

    checked: ModelCheck  # what two rows have shown
    recorder: Recorder  # of the device's history
    known: EarlierTimings | None  # what runs alike measured of compiling
    micro_rows: int  # of a micro-batch
    graphs: bool  # whether steps may be replayed


@dataclass(frozen=True)
class TrainingParts:
    """What a training works with, and is measured by."""

    optimizer: Optimizer
    accounts: Accounts
    micro: MicroBatches
    plain: Step
    tuned: TunedStep
    evaluator: Evaluator
    best: BestWeights
    outputs: list[tuple[str, Tensor]]  # see losses.NanOrigin

    def list_stateful(self, model: nn.Module, *, is_lead: bool = True) -> dict[str, Stateful]:
        """Return what its next step depends on, beside the rows. Random numbers are the lead's."""
        assert isinstance(self.evaluator.micro, MicroBatches)
        random = {"random": RandomNumbers(next(model.parameters()).device)} if is_lead else {}
        return {
            "model": Weights(model),
            "optimizer": self.optimizer,
            "scaler": Scaler(self.plain.scaler),
            "micro_batches": self.micro,
            "evaluation": self.evaluator.micro,
            "best": self.best,
            "step": self.tuned,
            "times": self.accounts.watch,
            **random,
        }

    def find_eval_rows(self, val: Batches) -> int | None:
        """Return the rows of the largest batch of an evaluation; None where one takes all rows."""
        most = val.batch_size if isinstance(val, LoaderBatches) else len(val)
        rows = min(self.evaluator.micro.rows, most)
        return rows if rows < len(val) else None

    def make_metrics(self) -> dict[str, float]:
        """Return the metrics, under the names of the run record. Call it before the model is
        freed."""
        return {
            **self.accounts.measure_memory(),
            **self.tuned.verdict.make_metrics(),
            "memory/ooms_recovered": float(self.micro.recovered + self.evaluator.micro.recovered),
            # From here the next run alike takes the rows to begin with.
            **({"memory/micro_batch": float(self.micro.rows)} if self.micro.is_learnt else {}),
        }

    def make_tags(self) -> dict[str, str]:
        """Return the tags, under the names of the run record."""
        return {
            "compiled": self.tuned.verdict.compiled,
            "compiled.reason": self.tuned.verdict.reason,
            "micro_batch": str(self.micro.rows),
        }


def build_parts(
    plan: Plan,
    model: nn.Module,
    fed: tuple[Batches, Batches],
    accounts: Accounts,
    *,
    owners: Owners,
    start: Start,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
) -> TrainingParts:
    """Return everything for one training of `model` on the rows of `fed`, those to validate on
    last. owners: gets to know whose tensors they are. ranks: who trains it, each on its share of a
    batch.
    """
    settings, data, device = plan.settings, plan.data, plan.torch_device
    train, batch_size = settings.train, settings.train.batch_size
    here = ranks.count_most_rows(batch_size)
    optimizer = make_optimizer(settings.optim, model)
    best = BestWeights(keeps=train.keep == "best", metric=train.best, min_delta=train.min_delta)
    owners.model, owners.rows, owners.optimizer, owners.best = model, fed, optimizer, best
    # Held weakly: in a ring of references, a model would stay until the next collection.
    recorders: weakref.WeakSet[TunedStep] = weakref.WeakSet()
    shared: dict[str, Any] = {
        "device": device,
        "model": model,
        "accounts": accounts.phases.accounts,
        "witness": _Witness(start.recorder, accounts.phases.meter),
        "beside": find_own_functions(train),
        "forget_graph": lambda: any(each.forget_graphs() for each in recorders),
    }
    count = choose_count(train, data, found=start.checked.averaging.count)
    micro_rows, together = start.micro_rows, Shared(weight=lambda: fed[0].weight)
    kind: Callable[..., MicroBatches] = MicroBatches
    of_eval: Callable[..., MicroBatches] = MicroBatches
    if not ranks.is_alone:
        micro_rows = min(ranks.all_gather(micro_rows))
        parallel = share_steps(model, ranks, device=device, mark=accounts.mark)
        together = Shared(parallel, weight=lambda: fed[0].weight)
        kind = partial(AgreedMicroBatches, ranks=ranks, together=parallel.together)
    if find_mesh(model) is not None:
        kind = of_eval = FixedMicroBatches
    micro = kind(
        micro_rows,
        whole=here,
        what="training",
        give_back=fed[0].give_back,
        changes=start.checked.changes,
        **shared,
    )
    outputs: list[tuple[str, Tensor]] = []
    step = make_step(
        plan,
        model,
        optimizer,
        micro=micro,
        mark=accounts.mark,
        outputs=outputs,
        shared=together,
        count=count,
        breaks_on_nothing=start.checked.averaging.breaks_on_nothing,
    )
    # What is chosen by timing may be chosen otherwise the next time.
    # And ranks that tried something out would wait for one another.
    is_timed = train.deterministic or not ranks.is_alone
    is_timed &= train.compile == "auto"
    tuned = TunedStep(
        step,
        mode="off" if is_timed else train.compile,
        steps=plan.schedule.count_steps(fed[0].count_steps(batch_size)),
        rows=0 if data.batch is not None else min(here, data.train_rows),
        wait=partial(wait_for_device, device),
        graphs=start.graphs and ranks.is_alone,
        known=start.known,
        recorded=partial(_keep_recorded, owners, accounts),
    )
    recorders.add(tuned)
    room = compute_room_bytes(settings.memory.limit_mib, plan.device.free_bytes or 0)
    most = choose_eval_rows(data, batch_size, room_bytes=room)
    evaluator = Evaluator(
        task=start.checked.task or data.task,
        loss=make_loss(train, data, device, is_judged=True),
        autocast=step.autocast,
        micro=of_eval(
            most,
            whole=most,
            what="eval",
            give_back=fed[1].give_back,
            changes=start.checked.judged,
            **shared,
        ),
        phases=accounts.phases,
        forward=choose_forward(settings.model.name, train, data),
        count=count,
        metrics={n: wrap_in_units(m, data, device) for n, m in load_own_metrics(train).items()},
        to_units=partial(
            predictor.restore_units,
            offset=data.target_offset,
            scale=data.target_scale,
            log=data.target_log,
        ),
        guess=data.target_guess,
        ranks=ranks,
    )
    return TrainingParts(optimizer, accounts, micro, step, tuned, evaluator, best, outputs)


def open_checkpoints(
    plan: Plan,
    model: nn.Module,
    *,
    folder: Path,
    resumes: bool,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
) -> Checkpoints:
    """Return those of a training, in the folder of its run. Raises ConfigError where the first one
    would find no room. Close them."""
    settings = plan.settings
    if settings.checkpoint.is_on and ranks.is_lead:
        # The weights, the state of an optimizer as large as Adam's, and the best weights.
        weights_bytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        refuse_no_room(folder, weights_bytes * (4 if settings.train.keep == "best" else 3))
    return Checkpoints(
        folder / CHECKPOINTS,
        settings.checkpoint,
        HostCopies(plan.torch_device),
        about={**describe_training(plan), **describe_code(settings)},
        resumes=resumes,
        ranks=ranks,
        mesh=find_mesh(model),
    )


def _keep_recorded(owners: Owners, accounts: Accounts, tensors: list[Tensor]) -> None:
    owners.recorded = tensors
    accounts.phases.recount()
