"""The state of a training: the model and all that changes with it from step to step, what takes its
steps and measures them, and how far it is. `build_state` makes it from a plan, on the device; a
checkpoint keeps what `state_dict` gives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from headroom.base.seeds import seed_libraries
from headroom.data.batch import Batch
from headroom.data.batches import Batches
from headroom.data.dataloaders import LoaderBatches
from headroom.device.memory_limit import compute_room_bytes
from headroom.models import predictor
from headroom.training.averaging import choose_count
from headroom.training.best_weights import BestWeights
from headroom.training.build import choose_forward, make_optimizer, make_step
from headroom.training.checkpoints import Checkpoints, TrainingPosition
from headroom.training.choose_step import TunedStep
from headroom.training.evaluation import Evaluator, choose_eval_rows
from headroom.training.losses import (
    find_own_functions,
    load_own_metrics,
    make_loss,
    wrap_in_units,
)
from headroom.training.micro_batches import MicroBatches, MicroBatching
from headroom.training.optim import Optimizer, Plateau, make_schedule
from headroom.training.optimizer_step import StepTaker
from headroom.training.place import Place
from headroom.training.plan import Plan
from headroom.training.shared_model import (
    AgreedMicroBatches,
    FixedMicroBatches,
    build_model_on_device,
    find_mesh,
    share_steps,
)
from headroom.training.stateful import RandomNumbers, Scaler, Stateful, Weights
from headroom.training.step_digests import StepDigests
from headroom.training.training_parts import open_batches, open_checkpoints
from headroom.watch.accounts import Accounts
from headroom.watch.allocators import wait_for_device
from headroom.watch.memory_by_owner import BEST_WEIGHTS, OwnedTensors
from headroom.watch.memory_meter import MemoryMeter
from headroom.watch.snapshot import Recorder, record_history
from headroom.watch.step_metrics import Log
from headroom.watch.throughput import make_rates


def _ignore_step(state: TrainState, step: int, loss: Tensor) -> None:
    """Of a training whose steps nobody looks at."""


EndStep = Callable[["TrainState", int, Tensor], None]  # of the state, its step and the loss of that


@dataclass
class TrainState:
    """A training as it is now."""

    model: nn.Module
    train: Batches
    val: Batches
    optimizer: Optimizer
    step: StepTaker
    micro: MicroBatching  # how many rows of a step go through the model at once
    evaluator: Evaluator
    rate: Callable[[int], float]  # of learning, by step
    accounts: Accounts
    best: BestWeights = field(default_factory=BestWeights)
    checkpoints: Checkpoints = field(default_factory=Checkpoints.make_disabled)
    speeds: Callable[[float], dict[str, float]] = lambda samples_per_s: {}  # see LoopFacts
    outputs: list[tuple[str, Tensor]] = field(default_factory=list)  # see losses.NanOrigin
    end_step: EndStep = _ignore_step  # called after each step, before it is judged or kept
    parts: Mapping[str, Stateful] = field(default_factory=dict)  # that a checkpoint keeps, by name
    position: TrainingPosition = TrainingPosition()
    batch: Batch | None = None  # that is trained on now, or was when a step failed

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on, beside the position."""
        return {name: part.state() for name, part in self._list_parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to where `state` was taken. Raises StateMismatch."""
        for name, part in self._list_parts().items():
            if name in state:
                part.restore(state[name])

    def _list_parts(self) -> dict[str, Stateful]:
        assert self.accounts.steps is not None, "a loop has not begun"
        return {**self.parts, "rows": self.train, "step_metrics": self.accounts.steps}

    @property
    def tuned(self) -> TunedStep:
        """Return the step of a training that was built from a plan."""
        assert isinstance(self.step, TunedStep)
        return self.step

    def choose_step(self) -> StepTaker:
        """Return what takes the next steps, without what stands before it only to try others."""
        return self.step.settled if isinstance(self.step, TunedStep) else self.step

    def take_batch(self) -> Batch | None:
        """Return the batch that was trained or evaluated on when an error ended it, and keep it no
        longer; None where there was none."""
        batch, self.batch = self.batch or self.evaluator.batch, None
        self.evaluator.batch = None
        return batch

    def find_eval_rows(self) -> int | None:
        """Return the rows of the largest batch of an evaluation; None where one takes all rows."""
        val = self.val
        most = val.batch_size if isinstance(val, LoaderBatches) else len(val)
        rows = min(self.evaluator.micro.rows, most)
        return rows if rows < len(val) else None


def build_state(
    plan: Plan,
    place: Place,
    stack: ExitStack,
    *,
    folder: Path,
    log: Log,
    resumes: bool = False,
    end_step: EndStep | None = None,
) -> TrainState:
    """Return the training of this plan as it begins, or as it goes on from its checkpoint once the
    loop has resumed it. stack: closes what has to be closed. end_step: see TrainState; without it a
    training that can be repeated keeps digests of its steps. Raises ConfigError."""
    settings, data, device, check = plan.settings, plan.data, plan.torch_device, plan.model_check
    train, batch_size, ranks = settings.train, settings.train.batch_size, place.ranks
    assert check is not None, "check_plan comes first"

    model = build_model_on_device(plan, ranks)
    records = settings.memory.snapshot and ranks.is_lead
    recorder = stack.enter_context(record_history(device, folder=folder, on=records))
    rows, val = open_batches(plan, model, rank=ranks.rank, size=ranks.size)
    stack.callback(rows.close)
    stack.callback(val.close)
    optimizer = make_optimizer(settings.optim, model)
    best = BestWeights(keeps=train.keep == "best", metric=train.best, min_delta=train.min_delta)
    recorded: list[Tensor] = []  # what a recorded graph keeps
    owned = partial(_list_owned, model, (rows, val), optimizer, best, recorded)
    accounts = Accounts(
        device, place.meter, place.ledger, owned, log=log, watch=place.watch, ranks=ranks
    )
    accounts.workers = getattr(rows, "workers", None)
    stack.callback(accounts.looks.stop)

    # Held weakly: in a ring of references, a model would stay until the next collection.
    steps: weakref.WeakSet[TunedStep] = weakref.WeakSet()
    shared: dict[str, Any] = {
        "device": device,
        "model": model,
        "accounts": accounts.phases.accounts,
        "witness": _Witness(recorder, place.meter),
        "beside": find_own_functions(train),
        "forget_graph": lambda: any(each.forget_graphs() for each in steps),
    }
    here = ranks.count_most_rows(batch_size)
    micro_rows, parallel = place.admission.micro_batch, None
    kind: Callable[..., MicroBatches] = MicroBatches
    of_eval: Callable[..., MicroBatches] = MicroBatches
    if not ranks.is_alone:
        micro_rows = min(ranks.all_gather(micro_rows))
        parallel = share_steps(model, ranks, device=device, mark=accounts.mark)
        kind = partial(AgreedMicroBatches, ranks=ranks, together=parallel.together)
    if find_mesh(model) is not None:
        kind = of_eval = FixedMicroBatches
    micro = kind(
        micro_rows,
        whole=here,
        what="training",
        give_back=rows.give_back,
        changes=check.changes,
        **shared,
    )
    count = choose_count(train, data, own_count=check.averaging.count)
    outputs: list[tuple[str, Tensor]] = []
    plain = make_step(
        plan,
        model,
        optimizer,
        micro=micro,
        mark=accounts.mark,
        outputs=outputs,
        parallel=parallel,
        count=count,
        breaks_on_nothing=check.averaging.breaks_on_nothing,
    )
    # What is chosen by timing may be chosen otherwise the next time.
    # And ranks that tried something out would wait for one another.
    is_timed = (train.deterministic or not ranks.is_alone) and train.compile == "auto"
    all_steps = plan.schedule.count_steps(rows.count_steps(batch_size))
    tuned = TunedStep(
        plain,
        mode="off" if is_timed else train.compile,
        steps=all_steps,
        rows=0 if data.batch is not None else min(here, data.train_rows),
        wait=partial(wait_for_device, device),
        graphs=place.admission.fits_graph and plan.may_replay and ranks.is_alone,
        timings=place.past.find_compile_timings(),
        recorded=partial(_keep_recorded, recorded, accounts),
    )
    steps.add(tuned)
    room = compute_room_bytes(settings.memory.limit_mib, plan.device.free_bytes or 0)
    most = choose_eval_rows(data, batch_size, room_bytes=room)
    eval_micro = of_eval(
        most, whole=most, what="eval", give_back=val.give_back, changes=check.judged, **shared
    )
    evaluator = Evaluator(
        task=check.task or data.task,
        loss=make_loss(train, data, device, is_judged=True),
        autocast=plain.autocast,
        micro=eval_micro,
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
    if not ranks.is_lead:  # what is drawn from here on, is drawn for other rows
        seed_libraries(train.seed + ranks.rank)
    checkpoints = open_checkpoints(plan, model, folder=folder, resumes=resumes, ranks=ranks)
    stack.callback(checkpoints.close)
    rate = make_schedule(
        settings.optim,
        steps=all_steps,
        epoch_steps=plan.epoch_steps,
        best=train.best,
        min_delta=train.min_delta,
    )
    if end_step is None and train.deterministic and ranks.is_alone:
        digests = StepDigests(folder)
        stack.callback(digests.flush)
        end_step = digests.end_step
    parts: dict[str, Stateful] = {
        "model": Weights(model),
        "optimizer": optimizer,
        "scaler": Scaler(plain.scaler),
        "micro_batches": micro,
        "evaluation": eval_micro,
        "best": best,
        "step": tuned,
        "times": accounts.watch,
        # Gathered beside the steps that the device has still to take.
        "random": RandomNumbers(next(model.parameters()).device, ranks.make_side_group()),
    }
    if isinstance(rate, Plateau):
        parts["schedule"] = rate
    return TrainState(
        model=model,
        train=rows,
        val=val,
        optimizer=optimizer,
        step=tuned,
        micro=micro,
        evaluator=evaluator,
        rate=rate,
        accounts=accounts,
        best=best,
        checkpoints=checkpoints,
        speeds=make_rates(data, work=check.work, peak=place.peak),
        outputs=outputs,
        end_step=end_step or _ignore_step,
        parts=parts,
    )


def _list_owned(
    model: nn.Module,
    batches: tuple[Batches, ...],
    optimizer: Optimizer,
    best: BestWeights,
    recorded: list[Tensor],
) -> OwnedTensors:
    """Return what belongs to whom, at this moment."""
    return {
        "data": [tensor for rows in batches for tensor in rows.list_tensors()],
        "parameters": model.parameters(),
        "buffers": model.buffers(),
        BEST_WEIGHTS: best.iterate_kept(),
        "graph": recorded,
        "gradients": [p.grad for p in model.parameters() if p.grad is not None],
        "optimizer_state": optimizer.list_state_tensors(),
    }


def _keep_recorded(recorded: list[Tensor], accounts: Accounts, tensors: list[Tensor]) -> None:
    recorded[:] = tensors
    accounts.phases.recount()


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
