"""What a training works with, put together: the step in all its ways, the micro-batches, the
evaluator; and what they have measured when it is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tasks.engine.base.timing import wait
from tasks.engine.batches.batches import Batches
from tasks.engine.checkpoint.checkpoints import Checkpoints, refuse_no_room
from tasks.engine.checkpoint.compatibility import code_of, identity
from tasks.engine.checkpoint.host_copies import HostCopies
from tasks.engine.checkpoint.kept_steps import CHECKPOINTS
from tasks.engine.checkpoint.training_state import RandomNumbers, Scaler, Stateful, Weights
from tasks.engine.device.memory_limit import room_bytes
from tasks.engine.distributed.ranks import Ranks
from tasks.engine.memory.allocator_history import Recorder
from tasks.engine.memory.memory_by_owner import BEST, Owned
from tasks.engine.memory.memory_meter import Meter
from tasks.engine.models import predictor
from tasks.engine.step.best_weights import Best
from tasks.engine.step.build import Shared, choose_forward, make_optimizer, make_step
from tasks.engine.step.choose_step import TunedStep
from tasks.engine.step.evaluation import Evaluator, eval_rows
from tasks.engine.step.losses import count_of, in_units, loss_of, metrics_of
from tasks.engine.step.micro_batches import MicroBatches
from tasks.engine.step.optim import Optimizer
from tasks.engine.step.optimizer_step import Step
from tasks.engine.step.own_model import Checked
from tasks.engine.step.plan import Plan
from tasks.engine.step.verdict import Known
from tasks.engine.training.accounts import Accounts
from tasks.engine.training.agreed_micro_batches import AgreedMicroBatches, FixedMicroBatches
from tasks.engine.training.shared_model import mesh_of, share_steps


@dataclass
class Owners:
    """What belongs to whom, whenever it is asked; filled while a training is put together."""

    model: nn.Module | None = None
    rows: tuple[Batches, ...] = ()
    optimizer: Optimizer | None = None
    best: Best | None = None
    recorded: list[Tensor] = field(default_factory=list)  # what a recorded graph keeps

    def __call__(self) -> Owned:
        assert self.model is not None and self.optimizer is not None and self.best is not None
        return {
            "data": [tensor for rows in self.rows for tensor in rows.tensors()],
            "parameters": self.model.parameters(),
            "buffers": self.model.buffers(),
            BEST: self.best.tensors(),
            "graph": self.recorded,
            "gradients": [p.grad for p in self.model.parameters() if p.grad is not None],
            "optimizer_state": self.optimizer.state_tensors(),
        }


@dataclass(frozen=True)
class _Witness:
    """Keeps what the device tells of the last attempt; see oom.Witness."""

    recorder: Recorder
    meter: Meter

    def start(self) -> None:
        self.recorder.start()

    def write(self) -> None:
        self.recorder.write()

    def reading(self) -> dict[str, int]:
        return self.meter.reading()


@dataclass(frozen=True)
class Start:
    """With what a training starts, as was found out before: on two rows, by a forecast, by runs
    alike."""

    checked: Checked  # what two rows have shown
    recorder: Recorder  # of the device's history
    known: Known | None  # what runs alike measured of compiling
    micro_rows: int  # of a micro-batch
    threads: int  # to try beside those of now
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
    best: Best
    outputs: list[tuple[str, Tensor]]  # see suspects.Seen

    def stateful(self, model: nn.Module, *, is_lead: bool = True) -> dict[str, Stateful]:
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

    def measured(self) -> dict[str, float]:
        """Under the names of the run record. Call it before the model is freed."""
        return {
            **self.accounts.measure_memory(),
            **self.tuned.verdict.metrics(),
            "memory/ooms_recovered": float(self.micro.recovered + self.evaluator.micro.recovered),
            "memory/micro_batch": float(self.micro.rows),
        }

    def tags(self) -> dict[str, str]:
        """Under the names of the run record."""
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
    here = ranks.largest_share(batch_size)
    optimizer, best = make_optimizer(settings.optim, model), Best(keeps=train.keep == "best")
    owners.model, owners.rows, owners.optimizer, owners.best = model, fed, optimizer, best
    # Held weakly: in a ring of references, a model would stay until the next collection.
    recorders: weakref.WeakSet[TunedStep] = weakref.WeakSet()
    shared: dict[str, Any] = {
        "device": device,
        "model": model,
        "accounts": accounts.phases.accounts,
        "witness": _Witness(start.recorder, accounts.phases.meter),
        "changes": start.checked.changes,
        "forget_graph": lambda: any(each.forget_graphs() for each in recorders),
    }
    count = count_of(train, data, of_labels=start.checked.of_labels)
    micro_rows, together = start.micro_rows, Shared(weight=lambda: fed[0].weight)
    kind: Callable[..., MicroBatches] = MicroBatches
    of_eval: Callable[..., MicroBatches] = MicroBatches
    if not ranks.is_alone:
        micro_rows = min(ranks.all_of(micro_rows))
        parallel = share_steps(model, ranks, device=device, mark=accounts.mark)
        together = Shared(parallel, weight=lambda: fed[0].weight)
        kind = partial(AgreedMicroBatches, ranks=ranks, together=parallel.together)
    if mesh_of(model) is not None:
        kind = of_eval = FixedMicroBatches
    micro = kind(micro_rows, whole=here, what="training", give_back=fed[0].give_back, **shared)
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
    )
    # What is chosen by timing may be chosen otherwise the next time.
    # And ranks that tried something out would wait for one another.
    is_timed = train.deterministic or not ranks.is_alone
    is_timed &= train.compile == "auto"
    tuned = TunedStep(
        step,
        mode="off" if is_timed else train.compile,
        steps=plan.schedule.count_steps(fed[0].steps(batch_size)),
        rows=0 if data.batch is not None else min(here, data.train_rows),
        wait=partial(wait, device),
        graphs=start.graphs and ranks.is_alone,
        threads=start.threads,
        known=start.known,
        recorded=partial(_keep_recorded, owners, accounts),
    )
    recorders.add(tuned)
    room = room_bytes(settings.memory.limit_mib, plan.device.free_bytes or 0)
    most = eval_rows(data, batch_size, room_bytes=room)
    evaluator = Evaluator(
        task=data.task,
        loss=loss_of(train, data, device),
        autocast=step.autocast,
        micro=of_eval(most, whole=most, what="eval", give_back=fed[1].give_back, **shared),
        phases=accounts.phases,
        forward=choose_forward(settings.model.name, train),
        count=count,
        metrics={n: in_units(m, data, device) for n, m in metrics_of(train).items()},
        to_units=partial(
            predictor.in_units,
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
        about={**identity(plan), **code_of(settings)},
        resumes=resumes,
        ranks=ranks,
        mesh=mesh_of(model),
    )


def _keep_recorded(owners: Owners, accounts: Accounts, tensors: list[Tensor]) -> None:
    owners.recorded = tensors
    accounts.phases.recount()
