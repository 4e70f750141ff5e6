"""What a training works with, put together: the step in all its ways, the micro-batches, the
evaluator, the clocks and accounts; and what they have measured when it is over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tasks.engine.base.facts import DataFacts, DeviceFacts
from tasks.engine.base.timing import Stopwatch, phase_clock, wait
from tasks.engine.batches.batches import Batches
from tasks.engine.checkpoint.checkpoints import Checkpoints, refuse_no_room
from tasks.engine.checkpoint.compatibility import code_of, identity
from tasks.engine.checkpoint.host_copies import HostCopies
from tasks.engine.checkpoint.kept_steps import CHECKPOINTS
from tasks.engine.checkpoint.training_state import RandomNumbers, Scaler, Stateful, Weights
from tasks.engine.device.memory_limit import room_bytes
from tasks.engine.distributed.parallel import Parallel
from tasks.engine.distributed.ranks import Ranks
from tasks.engine.memory.allocation_log import AllocationLog
from tasks.engine.memory.allocator_history import Recorder
from tasks.engine.memory.memory_by_owner import BEST, MemoryByOwner, Owned
from tasks.engine.memory.memory_meter import Meter
from tasks.engine.models import predictor
from tasks.engine.settings.run_config import RunConfig
from tasks.engine.step.best_weights import Best
from tasks.engine.step.build import forward_of, optimizer_of, plan_of, step_of
from tasks.engine.step.choose_step import TunedStep
from tasks.engine.step.evaluation import Evaluator, eval_rows
from tasks.engine.step.losses import count_of, in_units, loss_of, metrics_of
from tasks.engine.step.micro_batches import MicroBatches
from tasks.engine.step.optim import Optimizer
from tasks.engine.step.optimizer_step import Step
from tasks.engine.step.own_model import Checked
from tasks.engine.step.phases import COUNT_EVERY, Phases
from tasks.engine.step.verdict import Known
from tasks.engine.training.agreed_micro_batches import AgreedMicroBatches, FixedMicroBatches
from tasks.engine.training.shared_model import called, mesh_of


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
class TrainingParts:
    """What a training works with, and is measured by."""

    optimizer: Optimizer
    phases: Phases
    micro: MicroBatches
    plain: Step
    tuned: TunedStep
    evaluator: Evaluator
    steps: int  # of the whole run
    best: Best
    outputs: list[tuple[str, Tensor]]  # see suspects.Seen

    def stateful(
        self, model: nn.Module, watch: Stopwatch, *, is_lead: bool = True
    ) -> dict[str, Stateful]:
        """What its next step depends on, beside the rows. Random numbers are the lead's."""
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
            "times": watch,
            **random,
        }

    def measured(self) -> dict[str, float]:
        """Under the names of the run record. Call it before the model is freed."""
        memory = self.phases.meter.summary()
        return {
            **memory,
            **self.phases.accounts.metrics(peak_mib=memory.get("memory/run_peak_allocated_mib")),
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


def training_parts(
    config: RunConfig,
    data: DataFacts,
    model: nn.Module,
    fed: tuple[Batches, Batches],
    *,
    facts: DeviceFacts,
    precision: str,
    ledger: AllocationLog,
    meter: Meter,
    recorder: Recorder,
    known: Known | None,
    micro_rows: int,
    threads: int,
    graphs: bool,
    checked: Checked,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
) -> TrainingParts:
    """Everything for one training of `model` on the rows of `fed`, those to validate on last.

    precision: as resolved for the device; ledger: as limits.limited() yields it; recorder: of the
    device's history; known: what runs alike measured of compiling; micro_rows: of a micro-batch to
    start with; threads: to try beside those of now; graphs: whether steps may be replayed.
    checked: what two rows have shown. ranks: who trains it, each on its share of a batch.
    """
    device = torch.device(facts.name)
    batch_size = config.train.batch_size
    here = ranks.largest_share(batch_size)
    optimizer = optimizer_of(config, model)

    best = Best(keeps=config.train.keep == "best")
    owned = _Owned(fed, model, optimizer, best)
    phases = Phases(
        phase_clock(device),
        meter,
        MemoryByOwner(
            ledger, owned, partial(_in_use, meter) if device.type != "cpu" else lambda: None
        ),
        count_every=COUNT_EVERY if device.type == "cpu" else None,
    )
    # Held weakly: in a ring of references, a model would stay until the next collection.
    recorders: weakref.WeakSet[TunedStep] = weakref.WeakSet()
    shared: dict[str, Any] = {
        "device": device,
        "model": model,
        "accounts": phases.accounts,
        "witness": _Witness(recorder, phases.meter),
        "changes": checked.changes,
        "forget_graph": lambda: any(each.forget_graphs() for each in recorders),
    }
    count = count_of(config.train, data, of_labels=checked.of_labels)
    parallel: Parallel | None = None
    kind: Callable[..., MicroBatches] = MicroBatches
    of_eval: Callable[..., MicroBatches] = MicroBatches
    if not ranks.is_alone:
        micro_rows = min(ranks.all_of(micro_rows))
        parallel = called(model, ranks, device=device, mark=phases.mark)
        kind = partial(AgreedMicroBatches, ranks=ranks, together=parallel.together)
    if mesh_of(model) is not None:
        kind = of_eval = FixedMicroBatches
    micro = kind(micro_rows, whole=here, what="training", give_back=fed[0].give_back, **shared)
    outputs: list[tuple[str, Tensor]] = []
    step = step_of(
        config,
        data,
        model,
        optimizer,
        device=device,
        precision=precision,
        micro=micro,
        mark=phases.mark,
        outputs=outputs,
        parallel=parallel,
        weight=lambda: fed[0].weight,
        count=count,
    )
    # What is chosen by timing may be chosen otherwise the next time.
    # And ranks that tried something out would wait for one another.
    is_timed = config.train.deterministic or not ranks.is_alone
    is_timed &= config.train.compile == "auto"
    steps = plan_of(config).steps(fed[0].steps(batch_size))
    tuned = TunedStep(
        step,
        mode="off" if is_timed else config.train.compile,
        steps=steps,
        rows=0 if data.batch is not None else min(here, data.train_rows),
        wait=partial(wait, device),
        graphs=graphs and ranks.is_alone,
        threads=threads,
        known=known,
        recorded=partial(_recorded, owned, phases),
    )
    recorders.add(tuned)
    most = eval_rows(data, batch_size, room_bytes=room_bytes(config, facts.free_bytes or 0))
    evaluator = Evaluator(
        task=data.task,
        loss=loss_of(config.train, data, device),
        autocast=step.autocast,
        micro=of_eval(most, whole=most, what="eval", give_back=fed[1].give_back, **shared),
        phases=phases,
        forward=forward_of(config),
        count=count,
        metrics={n: in_units(m, data, device) for n, m in metrics_of(config.train).items()},
        to_units=partial(
            predictor.in_units,
            offset=data.target_offset,
            scale=data.target_scale,
            log=data.target_log,
        ),
        guess=data.target_guess,
        ranks=ranks,
    )
    return TrainingParts(optimizer, phases, micro, step, tuned, evaluator, steps, best, outputs)


def checkpoints_of(
    config: RunConfig,
    data: DataFacts,
    model: nn.Module,
    *,
    folder: Path,
    resumes: bool,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
) -> Checkpoints:
    """Those of a training, in the folder of its run. Raises ConfigError where the first one would
    find no room."""
    device = next(model.parameters()).device
    if config.checkpoint.is_on and ranks.is_lead:
        # The weights, the state of an optimizer as large as Adam's, and the best weights.
        weights_bytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        refuse_no_room(folder, weights_bytes * (4 if config.train.keep == "best" else 3))
    return Checkpoints(
        folder / CHECKPOINTS,
        config.checkpoint,
        HostCopies(device),
        about={**identity(config, data, device_type=device.type), **code_of(config)},
        resumes=resumes,
        ranks=ranks,
        mesh=mesh_of(model),
    )


@dataclass
class _Owned:
    """What belongs to whom, whenever it is asked."""

    fed: tuple[Batches, Batches]
    model: nn.Module
    optimizer: Optimizer
    best: Best
    recorded: list[Tensor] = field(default_factory=list)

    def __call__(self) -> Owned:
        return {
            "data": [tensor for rows in self.fed for tensor in rows.tensors()],
            "parameters": self.model.parameters(),
            "buffers": self.model.buffers(),
            BEST: self.best.tensors(),
            "graph": self.recorded,
            "gradients": [p.grad for p in self.model.parameters() if p.grad is not None],
            "optimizer_state": self.optimizer.state_tensors(),
        }


def _recorded(owned: _Owned, phases: Phases, tensors: list[Tensor]) -> None:
    owned.recorded = tensors
    phases.recount()


def _in_use(meter: Meter) -> int | None:
    return meter.reading().get("allocated")
