"""How much device memory a training will take, told before it takes any: two steps of the real
model with the real optimizer and one evaluation batch, on tensors that have shapes and no bytes,
counted by the ledger that counts a training; where steps may be replayed, a recorded one too. What
a caching allocator reserves for them follows from its rules; see pool.py. It refuses nothing,
computes nothing and draws no random number; of what libraries take for themselves it knows cuBLAS's
workspaces alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tasks.engine import assembly, models, own_model, tree
from tasks.engine.compiling import may_replay
from tasks.engine.config import RunConfig
from tasks.engine.device import resolve_precision
from tasks.engine.evaluation import eval_rows
from tasks.engine.facts import DataFacts, DeviceFacts
from tasks.engine.forecast_rows import Loader, Rows, fed
from tasks.engine.imports import told_of
from tasks.engine.ledger import LIBRARIES, MIB, Ledger
from tasks.engine.limits import room_bytes
from tasks.engine.losses import loss_of
from tasks.engine.oom import Fixed
from tasks.engine.pool import BLOCK_BYTES, Empty, Event, Pool, Take, least_room
from tasks.engine.reductions import scratch_of
from tasks.engine.section import is_import
from tasks.engine.step import Step, Watched

# cuBLAS's workspace by the major version of the GPU's architecture: pytorch#95668, pytorch#89027.
# Each thread has a handle of its own, and matrices are multiplied in two: forwards and backwards.
HOPPER = 9
WORKSPACE_BYTES, HOPPER_WORKSPACE_BYTES = int(8.125 * MIB), 32 * MIB
THREADS = 2
SETUP, EVALUATION = "setup", "eval"
# Where a thread multiplies its first matrices: after the set-up, and after the first forward pass.
WORKSPACES_AFTER = {SETUP: -1, "forward": -2}
POOLED = ("cuda", "rocm", "xpu")  # whose allocators cache as pool.py tells


@dataclass(frozen=True)
class Forecast:
    """Bytes that tensors will take on the device where a training holds most."""

    peak_bytes: int
    reserved_bytes: int | None  # the most that the allocator will hold; None where there is none
    # What has to fit: all but the evaluation, which takes its batches in smaller parts. Below
    # reserved_bytes, since an allocator that runs into a limit gives back what it caches.
    needed_bytes: int
    phase: str  # where the peak lies
    owners: Mapping[str, int]  # bytes there
    phases: Mapping[str, int]  # the most of each
    parameter_bytes: int
    micro_batch: int  # rows
    graphed: Forecast | None = None  # the same with steps replayed from a graph, where they may be


class Unforeseeable(ValueError):
    """A model or a loss of the user's own that can't run without the bytes of its tensors."""


def asked_micro_batch(config: RunConfig) -> int:
    """Rows that go through the model at once if nothing speaks against it."""
    return math.ceil(config.train.batch_size / config.train.accumulate)


def forecast(
    config: RunConfig, data: DataFacts, device: DeviceFacts, *, micro_batch: int | None = None
) -> Forecast:
    """The memory of this training. micro_batch: rows; as train.accumulate says where None.

    Where this PyTorch can't use a device of that kind, the CPU's operations stand in for its own.
    """
    # Here, since entering it imports the compiler: 2 s, once in a process.
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = assembly.settled(config, data)
    rows = micro_batch or asked_micro_batch(config)
    # Built outside, where its constructor may compute; a tensor that it keeps beside its parameters
    # is a real one.
    own = own_model.build(config, data) if is_import(config.model.name) else None
    # A loss of the user's own may hold real ones too, such as weights of the classes.
    setting, theirs = ("train.loss", config.train.loss)
    if own is not None:
        setting, theirs = ("model.name", config.model.name)
    untold = None
    try:
        with FakeTensorMode(allow_non_fake_inputs=is_import(theirs)):
            dry = _dry_run(config, data, device, rows, own)
    except Exception as error:
        if not is_import(theirs):
            raise
        untold = told_of(error)
    if untold is not None:
        raise Unforeseeable(
            f"{setting}: what {theirs} will take cannot be told beforehand ({untold}); "
            "it needs the values of its inputs"
        )
    told = _told(dry.plain, dry.parameter_bytes, device, rows)
    if dry.graphed is None:
        return told
    return replace(told, graphed=_told(dry.graphed, dry.parameter_bytes, device, rows))


def _told(peaks: _Peaks, parameter_bytes: int, device: DeviceFacts, rows: int) -> Forecast:
    libraries_bytes = THREADS * _workspace_bytes(device)
    phases = {
        phase: most + (0 if phase == SETUP else libraries_bytes)
        for phase, most in peaks.phases.items()
    }
    phase = max(phases, key=lambda name: phases[name])
    owners = dict(peaks.owners)
    if libraries_bytes:
        owners[LIBRARIES] = owners.get(LIBRARIES, 0) + libraries_bytes
    needed_bytes = max(most for phase, most in phases.items() if phase != EVALUATION)
    reserved_bytes = None
    if device.kind in POOLED:
        reserved_bytes = Pool().follow(peaks.events).peak_reserved
        without = peaks.events[: peaks.training]
        needed_bytes = least_room(without, up_to=Pool().follow(without).peak_reserved)
    return Forecast(
        phases[phase],
        reserved_bytes,
        needed_bytes,
        phase,
        owners,
        phases,
        parameter_bytes,
        rows,
    )


def largest_micro_batch(
    config: RunConfig, data: DataFacts, device: DeviceFacts, room_bytes: float
) -> int | None:
    """The largest of batch_size and its halves that fits; None where not even one row does."""
    rows = assembly.settled(config, data).train.batch_size
    while forecast(config, data, device, micro_batch=rows).needed_bytes > room_bytes:
        if rows == 1:
            return None
        rows = math.ceil(rows / 2)
    return rows


@dataclass(frozen=True)
class _Dry:
    """What a dry run has told."""

    parameter_bytes: int
    plain: _Peaks
    graphed: _Peaks | None = None


@dataclass
class _Peaks:
    """Follows the ledger: the most of each phase, the owners at the most of all, and every
    allocation in its order."""

    ledger: Ledger
    events: list[Event]
    workspace_bytes: int
    training: int = 0  # of the events, those before the last evaluation
    phases: dict[str, int] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)
    _most: int = 0

    def mark(self, phase: str) -> None:
        """`phase` ends here."""
        self.ledger.end_phase(phase)
        if self.workspace_bytes and phase not in self.phases and phase in WORKSPACES_AFTER:
            self.events.append(Take(WORKSPACES_AFTER[phase], self.workspace_bytes))
        self.phases[phase] = max(self.phases.get(phase, 0), self.ledger.peak_bytes)
        self.ledger.reset_peak()

    def so_far(self) -> _Peaks:
        """A copy that later marks do not change."""
        return replace(
            self, events=list(self.events), phases=dict(self.phases), owners=dict(self.owners)
        )

    def settle(self) -> None:
        """What was counted since the last call belongs to whom the ledger knows by now."""
        if self.ledger.step_peak_bytes > self._most:
            self._most, self.owners = self.ledger.step_peak_bytes, self.ledger.owners_at_peak()
        self.ledger.begin_step()


def _dry_run(
    config: RunConfig,
    data: DataFacts,
    facts: DeviceFacts,
    micro_batch: int,
    own: nn.Module | None,
) -> _Dry:
    device = _usable(torch.device(facts.name))
    precision = resolve_precision(config.train.precision, facts)
    events: list[Event] = []
    ledger = Ledger(
        device,
        block_bytes=1 if facts.kind == "cpu" else BLOCK_BYTES,
        scratch=scratch_of(torch.device(facts.name)),
        told=events.append,
    )
    peaks = _Peaks(ledger, events, _workspace_bytes(facts))
    with ledger:
        model = _model(config, data, device) if own is None else _faked(own, device)
        ledger.own("parameters", model.parameters())
        ledger.own("buffers", model.buffers())
        parameter_bytes = ledger.allocated_bytes
        train, val = fed(
            config,
            facts,
            data,
            device=device,
            channels_last=assembly.takes_channels_last(config, model),
        )
        ledger.own("data", (*train.tensors(), *val.tensors()))
        # On a CPU the weights of the best epoch are kept where the others are.
        keeps_best = config.train.patience and facts.kind == "cpu"
        best = [t.clone() for t in model.state_dict().values()] if keeps_best else []
        ledger.own("best_weights", best)
        peaks.mark(SETUP)
        peaks.settle()
        step = assembly.step_of(
            config,
            data,
            model,
            assembly.optimizer_of(config, model),
            device=device,
            precision=precision,
            micro=Fixed(micro_batch),
            mark=peaks.mark,
        )
        last = _train(model, step, train, min(config.train.batch_size, data.train_rows), peaks)
        eval_batch = eval_rows(
            data, config.train.batch_size, room_bytes=room_bytes(config, facts.free_bytes or 0)
        )
        judged = partial(
            _evaluate, config, data, model, step, val, peaks, min(eval_batch, data.val_rows)
        )
        judged()
        dry = _Dry(parameter_bytes, peaks.so_far())
        if may_replay(config, facts, precision, steps=assembly.steps_of(config, data)):
            kept = _record(step, last, peaks)
            _step(step, last, peaks)  # steps are taken plainly in between
            judged()
            dry = replace(dry, graphed=peaks)
            del kept
        del last, best  # a training holds both to its end
    return dry


def _record(step: Step, batch: tuple[Any, Any], peaks: _Peaks) -> Any:
    """A recorded step: in a pool of its own, beside which nothing is cached; what it leaves."""
    ledger = peaks.ledger
    step.optimizer.zero_grad()
    ledger.reset_peak()  # which strikes out what is freed
    peaks.events.append(Empty())
    ledger.pool = 1
    outcome = step.recordable()(*batch, norm=False, watched=Watched.NOT)
    ledger.pool = 0
    grads = [p.grad for p in step.optimizer.params if p.grad is not None]
    ledger.own("graph", [*grads, outcome.loss])
    peaks.mark("recording")
    peaks.settle()
    return grads, outcome


def _usable(device: torch.device) -> torch.device:
    """The device itself, or the CPU where autograd would not know one of that kind."""
    here = torch.accelerator.current_accelerator(check_available=True)
    return device if here is not None and here.type == device.type else torch.device("cpu")


def _model(config: RunConfig, data: DataFacts, device: torch.device) -> nn.Module:
    """The model of the training, none of whose weights is ever drawn."""
    with device:
        model = models.build(
            config.model.name,
            input_shape=data.input_shape,
            outputs=data.outputs,
            args=config.model.args,
        )
    if assembly.takes_channels_last(config, model):
        # Not by model.to(), which can't convert such tensors.
        for weight in (p for p in model.parameters() if p.dim() == 4):
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    return model


def _faked(model: nn.Module, device: torch.device) -> nn.Module:
    """The same model on the device, with tensors that have no bytes; tied ones stay tied."""
    made: dict[int, Tensor] = {}

    def faked(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            empty = torch.empty_like(tensor, device=device)
            is_weight = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_weight else empty
        return made[id(tensor)]

    for module in model.modules():
        for kept in (module._parameters, module._buffers):
            for name, tensor in kept.items():
                if tensor is not None:
                    kept[name] = faked(tensor)  # type: ignore[assignment]
    return model


def _train(
    model: nn.Module, step: Step, rows: Rows | Loader, batch_size: int, peaks: _Peaks
) -> tuple[Any, Any]:
    """Two steps: the second has the first one's gradients and optimizer state. The last batch."""
    model.train()
    for _ in range(2):
        # Gathered while the loop still holds the one before.
        following = rows.gathered(batch_size)
        peaks.ledger.own("batch", tree.tensors(following))
        peaks.mark("data_wait")
        batch = following
        del following
        # The second micro-batch finds gradients there; those after it find nothing new.
        taken = tree.head(batch, min(2 * step.micro.rows, batch_size))
        _step(step, taken, peaks)
        del taken
    return batch


def _step(step: Step, batch: tuple[Any, Any], peaks: _Peaks) -> None:
    step(*batch, norm=True, watched=Watched.NOT)
    grads = [p.grad for p in step.optimizer.params if p.grad is not None]
    peaks.ledger.own("gradients", grads)
    peaks.ledger.own("optimizer_state", step.optimizer.state_tensors())
    peaks.settle()


@torch.inference_mode()
def _evaluate(
    config: RunConfig,
    data: DataFacts,
    model: nn.Module,
    step: Step,
    rows: Rows | Loader,
    peaks: _Peaks,
    most: int,
) -> None:
    """The largest batch of an evaluation, and what a regression keeps of all the others."""
    peaks.training = len(peaks.events)
    model.eval()
    x, y = rows.in_order(most)
    kept = []
    if data.task == "regression":
        kept = [y.new_empty(data.val_rows - most, data.outputs)]
    with step.autocast():
        outputs, loss = assembly.forward_of(config)(model)(x)
        if loss is None:
            loss_of(config.train, data, outputs.device)(outputs, y)
    if data.task == "classification":
        _ = outputs.argmax(1) == y
    elif data.task == "regression":
        _ = torch.cat([*kept, outputs])
    peaks.mark(EVALUATION)
    peaks.settle()


def _workspace_bytes(device: DeviceFacts) -> int:
    """What cuBLAS is known to keep for a thread; 0 on devices of which nothing is known."""
    if device.kind != "cuda":
        return 0
    is_here = torch.cuda.is_available()
    newer = is_here and torch.cuda.get_device_capability(device.index)[0] >= HOPPER
    return HOPPER_WORKSPACE_BYTES if newer else WORKSPACE_BYTES
