"""A training's allocations without their bytes: two steps of the real model with its optimizer, one
evaluation batch and, where steps may be replayed, a recorded one, on tensors that have shapes and
no memory, counted by the ledger that counts a training. It computes nothing and draws no random
number.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from tasks.engine.base import nested
from tasks.engine.base.facts import DataFacts, DeviceFacts
from tasks.engine.base.seeds import chosen_cublas_workspace_bytes
from tasks.engine.device.memory_limit import room_bytes
from tasks.engine.forecast.batch_bytes import Loader, Rows, make_empty_rows
from tasks.engine.memory.allocation_log import MIB, AllocationLog
from tasks.engine.memory.caching_allocator import Empty, Event, Take, rules
from tasks.engine.memory.memory_by_owner import BEST
from tasks.engine.memory.scratch_memory import scratch_of
from tasks.engine.models import builtin
from tasks.engine.scores.kept_rows import KeptRows, small
from tasks.engine.settings.run_config import ModelConfig
from tasks.engine.step import build
from tasks.engine.step.best_weights import tensors_of
from tasks.engine.step.evaluation import eval_rows
from tasks.engine.step.losses import loss_of
from tasks.engine.step.micro_batches import Fixed
from tasks.engine.step.optimizer_step import Step
from tasks.engine.step.phases import Watched
from tasks.engine.step.plan import Plan

# cuBLAS's workspace by the major version of the GPU's architecture: pytorch#95668, pytorch#89027.
# Each thread has a handle of its own, and matrices are multiplied in two: forwards and backwards.
HOPPER = 9
WORKSPACE_BYTES, HOPPER_WORKSPACE_BYTES = int(8.125 * MIB), 32 * MIB
# cuBLASLt's, which multiplies where a bias is added: forwards. It shares since pytorch#175879.
LT_WORKSPACE_BYTES, LT_SHARES_SINCE = 1 * MIB, "2.12"
_OPS = torch.ops.aten
PRODUCTS = {_OPS.mm.default, _OPS.addmm.default, _OPS.bmm.default, _OPS.baddbmm.default}
CONVOLUTIONS = {_OPS.convolution.default, _OPS.convolution_backward.default}
SETUP, EVALUATION = "setup", "eval"


@dataclass(frozen=True)
class Dry:
    """What a dry run has told."""

    parameter_bytes: int
    plain: Peaks
    convolves: bool  # has layers that cuDNN may compute
    graphed: Peaks | None = None


@dataclass
class Peaks:
    """Follows the ledger: the most of each phase, the owners at the most of all, and every
    allocation in its order."""

    ledger: AllocationLog
    events: list[Event]
    # Bytes, by the phase after which the first product of matrices takes them.
    workspaces: dict[str, list[int]]
    training: int = 0  # of the events, those before the last evaluation
    phases: dict[str, int] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)
    _most: int = 0
    _due: list[int] = field(default_factory=list)

    def called(self, func: Any) -> None:
        """An operation is under way, whose results are there."""
        is_product = func in PRODUCTS or (
            func in CONVOLUTIONS and not torch.backends.cudnn.enabled  # they are products then
        )
        if self._due and is_product:
            for size in self._due:  # below 0: no name of the ledger's
                self.events.append(Take(-1 - len(self.events), size))
            self._due = []

    def mark(self, phase: str) -> None:
        """`phase` ends here."""
        self.ledger.end_phase(phase)
        self._due += self.workspaces.pop(phase, ())
        self.phases[phase] = max(self.phases.get(phase, 0), self.ledger.peak_bytes)
        self.ledger.reset_peak()

    def so_far(self) -> Peaks:
        """A copy that later marks do not change."""
        return replace(
            self, events=list(self.events), phases=dict(self.phases), owners=dict(self.owners)
        )

    def settle(self) -> None:
        """What was counted since the last call belongs to whom the ledger knows by now."""
        if self.ledger.step_peak_bytes > self._most:
            self._most, self.owners = self.ledger.step_peak_bytes, self.ledger.owners_at_peak()
        self.ledger.begin_step()


def dry_run(plan: Plan, micro_batch: int, own: nn.Module | None) -> Dry:
    """Run a training without bytes. own: the model, where it is the user's; else it is built."""
    settings, data, facts = plan.settings, plan.data, plan.device
    device = _usable(plan.torch_device)
    events: list[Event] = []
    scratch = scratch_of(torch.device(facts.name))

    def scratch_bytes(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
        peaks.called(func)
        return scratch(func, args)

    ledger = AllocationLog(
        device,
        block=int if facts.kind == "cpu" else rules().rounded,
        scratch=scratch_bytes,
        told=events.append,
    )
    peaks = Peaks(ledger, events, workspaces_of(facts))
    with ledger:
        model = _model(settings.model, data, device) if own is None else _faked(own, device)
        ledger.own("parameters", model.parameters())
        ledger.own("buffers", model.buffers())
        parameter_bytes = ledger.allocated_bytes
        channels_last = build.takes_channels_last(settings.model.name, model)
        train, val = make_empty_rows(plan, device=device, channels_last=channels_last)
        ledger.own("data", (*train.tensors(), *val.tensors()))
        # On a CPU the weights of the best epoch are kept where the others are.
        keeps_best = plan.keeps_best and facts.kind == "cpu"
        best = [t.clone() for _, t in tensors_of(model)] if keeps_best else []
        ledger.own(BEST, best)
        peaks.mark(SETUP)
        peaks.settle()
        step = build.make_step(
            plan,
            model,
            build.make_optimizer(settings.optim, model),
            device=device,
            micro=Fixed(micro_batch),
            mark=peaks.mark,
        )
        whole = min(settings.train.batch_size, data.train_rows)
        steps = partial(_train, model, step, train, (whole, whole, data.train_rows % whole), peaks)
        steps()
        room = room_bytes(settings.memory.limit_mib, facts.free_bytes or 0)
        eval_batch = eval_rows(data, settings.train.batch_size, room_bytes=room)
        judged = partial(_evaluate, plan, model, step, val, peaks, min(eval_batch, data.val_rows))
        judged()
        convolves = any(isinstance(m, (_ConvNd, nn.RNNBase)) for m in model.modules())
        dry = Dry(parameter_bytes, peaks.so_far(), convolves)
        if plan.may_replay:
            kept = _record(model, step, train.gathered(settings.train.batch_size), peaks)
            steps()  # taken plainly in between
            judged()
            dry = replace(dry, graphed=peaks)
            del kept
        del best  # a training holds it to its end
    return dry


def _record(model: nn.Module, step: Step, batch: tuple[Any, Any], peaks: Peaks) -> Any:
    """A recorded step: in a pool of its own, beside which nothing is cached; what it keeps."""
    ledger = peaks.ledger
    model.train()
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
    return batch, grads, outcome


def _usable(device: torch.device) -> torch.device:
    """The device itself, or the CPU where autograd would not know one of that kind."""
    here = torch.accelerator.current_accelerator(check_available=True)
    return device if here is not None and here.type == device.type else torch.device("cpu")


def _model(settings: ModelConfig, data: DataFacts, device: torch.device) -> nn.Module:
    """The model of the training, none of whose weights is ever drawn."""
    with device:
        model = builtin.build(
            settings.name,
            input_shape=data.input_shape,
            outputs=data.outputs,
            args=settings.args,
        )
    if build.takes_channels_last(settings.name, model):
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
    model: nn.Module, step: Step, rows: Rows | Loader, sizes: tuple[int, ...], peaks: Peaks
) -> None:
    """Steps on so many rows each. The second has the first one's gradients and optimizer state;
    the last of an epoch may have fewer rows, whose tensors lie among the small ones."""
    model.train()
    for size in filter(None, sizes):
        batch = rows.gathered(size)
        peaks.ledger.own("batch", nested.tensors(batch))
        peaks.mark("data_wait")
        # The second micro-batch finds gradients there; those after it find nothing new.
        x, y = nested.head(batch, min(2 * step.micro.rows, size))
        step(x, y, norm=True, watched=Watched.NOT)
        gradients = (p.grad for p in step.optimizer.params if p.grad is not None)
        peaks.ledger.own("gradients", gradients)
        peaks.ledger.own("optimizer_state", step.optimizer.state_tensors())
        peaks.settle()
        del batch, x, y  # gone before the next one comes
    rows.let_go()


@torch.no_grad()  # in inference mode operations that are made of others would be seen as one
def _evaluate(
    plan: Plan,
    model: nn.Module,
    step: Step,
    rows: Rows | Loader,
    peaks: Peaks,
    most: int,
) -> None:
    """Two of the largest batches of an evaluation, the second beside what the first has left in the
    caches, then the last one, which may have fewer rows; what a regression keeps of all."""
    peaks.training = len(peaks.events)
    data, train = plan.data, plan.settings.train
    forward = build.choose_forward(plan.settings.model.name, train)(model)
    model.eval()
    kept = KeptRows(data.task, data.val_rows)
    whole, rest = divmod(data.val_rows, most)
    for size in (*[most] * min(2, whole), *([rest] if rest else [])):
        x, y = rows.in_order(size)
        with step.autocast():
            outputs, loss = forward(x)
            if loss is None:
                loss_of(train, data, outputs.device)(outputs, y)
        if data.task == "classification":
            told = outputs.argmax(1)
            _ = told == y
            kept.add(small(told, data.outputs), small(y, data.outputs))
        elif data.task == "multilabel":
            kept.add(outputs, y > 0.5)
        elif data.task == "regression":
            kept.add(outputs, y)
        del x, y, outputs, loss  # gone before the next ones come
    peaks.mark(EVALUATION)
    peaks.settle()


def workspaces_of(device: DeviceFacts) -> dict[str, list[int]]:
    """What libraries are known to keep, by the phase after which a thread multiplies its first
    matrices; nothing on devices of which nothing is known."""
    if device.kind != "cuda":
        return {}
    is_here = torch.cuda.is_available()
    newer = is_here and torch.cuda.get_device_capability(device.index)[0] >= HOPPER
    usual_bytes = HOPPER_WORKSPACE_BYTES if newer else WORKSPACE_BYTES
    cublas_bytes = chosen_cublas_workspace_bytes() or usual_bytes
    lt = [] if torch.__version__ >= LT_SHARES_SINCE else [min(LT_WORKSPACE_BYTES, cublas_bytes)]
    return {"data_wait": [cublas_bytes, *lt], "forward": [cublas_bytes]}
