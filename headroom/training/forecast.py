"""Forecasts how much device memory a training will take, before it takes any. A dry run takes
two steps of the real model with its optimizer, one evaluation batch and, where steps may be
replayed, a recorded one, on tensors that have shapes and no memory; it computes nothing and
draws no random number. The result is what its tensors hold, and what a caching allocator
reserves for them by its rules. Of what libraries take for themselves only cuBLAS's workspaces
are known.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from headroom.base import nested
from headroom.base.facts import DataFacts, DeviceFacts
from headroom.base.import_paths import describe_error, is_import_path
from headroom.base.python_state import keep_python_state
from headroom.base.scores import KeptRows, shrink_classes
from headroom.data.batch import Batch
from headroom.data.dataset_batches import (
    BLOCK_BYTES,
    RESIDENT_SHARE,
    TRAIN_SHARE,
    VAL_SHARE,
    choose_layout,
)
from headroom.data.prefetch import find_dtype
from headroom.data.preparation import load_arrays
from headroom.device.memory_limit import compute_room_bytes, compute_rows_room_bytes
from headroom.models import builtin
from headroom.models.parameter_patterns import freeze_parameters
from headroom.settings.run_config import FUSED, ModelConfig
from headroom.training import build, own_model
from headroom.training.best_weights import iterate_tensors
from headroom.training.evaluation import choose_eval_rows
from headroom.training.losses import find_own_functions, make_loss
from headroom.training.micro_batches import SingleAttempt
from headroom.training.optimizer_step import Step
from headroom.training.plan import Plan
from headroom.watch.allocation_log import LIBRARIES, MIB, REST, AllocationLog
from headroom.watch.memory_by_owner import BEST_WEIGHTS
from headroom.watch.phases import Watched
from headroom.watch.pinned_memory import PINNING
from headroom.watch.simulated_allocator import (
    SMALL_SEGMENT_BYTES,
    AllocateEvent,
    AllocatorEvent,
    EmptyCacheEvent,
    SimulatedAllocator,
    find_smallest_limit,
    make_scratch_counter,
    read_cublas_workspace_bytes,
    read_rules,
)


@dataclass(frozen=True)
class _StoredArray:
    """One kept array: inputs, targets, or both in one."""

    rows: int
    shape: tuple[int, ...]  # of a row; of a text's tokens ()
    dtype: torch.dtype
    bytes: int
    channels_last: bool

    def make_empty(self, rows: int, device: torch.device) -> Tensor:
        return torch.empty(
            (rows, *self.shape),
            dtype=self.dtype,
            device=device,
            memory_format=torch.channels_last if self.channels_last else torch.contiguous_format,
        )


class DryRows:
    """Batches of prepared rows in a dry run. kind: of the device meant; device: of the
    tensors."""

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        *,
        kind: str,
        device: torch.device,
        room_bytes: float,
        channels_last: bool,
        is_shuffled: bool,
    ) -> None:
        arrays, self._layout = choose_layout(x, y, channels_last=channels_last)
        is_resident = sum(array.nbytes for array in arrays) <= RESIDENT_SHARE * room_bytes
        # Streamed ones are converted on the way.
        images = self._layout.channels_last and is_resident
        self._parts = [
            _StoredArray(len(a), a.shape[1:], find_dtype(a), a.nbytes, images and a.ndim == 4)
            for a in arrays
        ]
        self._device = device
        self._in_place = is_resident and kind == "cuda"
        self._reads_ahead = not is_resident and kind in PINNING
        self._batch: list[Tensor] = []  # where batches are gathered in place
        self._next: list[Tensor] = []  # what was sent ahead
        self._whole = [self._send(part) for part in self._parts] if is_resident else []
        self._order: list[Tensor] = []
        if is_shuffled and (is_resident or kind == "cpu"):  # where it is gathered
            self._order = [torch.empty(len(x), dtype=torch.int64, device=device)]

    def list_tensors(self) -> list[Tensor]:
        """Return the tensors that hold rows, and their order, on the device for the whole
        run."""
        return [*self._whole, *self._order]

    def make_train_batch(self, rows: int) -> Batch:
        """Return a batch to train on."""
        if self._in_place:
            self._batch = self._batch or self._make_parts(rows)
            return self._layout.open(self._batch)
        parts, self._next = self._next or self._make_parts(rows), []
        if self._reads_ahead:
            self._next = self._make_parts(rows)
        return self._layout.open(parts)

    def make_val_batch(self, rows: int) -> Batch:
        """Return a batch to validate on."""
        whole = [self._layout.view_rows(part)[:rows] for part in self._whole]
        return self._layout.open(whole or self._make_parts(rows))

    def let_go(self) -> None:
        """End an epoch: no batch is left but the memory that all of them come in."""
        self._next = []

    def _make_parts(self, rows: int) -> list[Tensor]:
        if self._layout.context is None:
            return [part.make_empty(rows, self._device) for part in self._parts]
        shape = (rows, self._layout.context + 1)
        if self._whole:  # where each token of the rows lies
            torch.empty(shape, dtype=torch.int64, device=self._device)
        text = self._parts[0].dtype
        return [torch.empty(shape, dtype=text, device=self._device)]

    def _send(self, part: _StoredArray) -> Tensor:
        whole = part.make_empty(part.rows, self._device)
        # In blocks, each of which is there twice while it is copied.
        torch.empty(min(part.bytes, BLOCK_BYTES), dtype=torch.uint8, device=self._device)
        return whole


class DryLoader:
    """Batches of a loader of the user's own in a dry run: each is made anew, and may be any
    structure."""

    def __init__(self, description: Any, device: torch.device) -> None:
        self._description, self._device = description, device

    def list_tensors(self) -> list[Tensor]:
        return []

    def make_train_batch(self, rows: int) -> Batch:
        x, y = nested.make_zeros(self._description, rows, device=self._device)
        return Batch(x, y, rows)

    def let_go(self) -> None:
        pass

    make_val_batch = make_train_batch


def make_empty_rows(
    plan: Plan, *, device: torch.device, channels_last: bool
) -> tuple[DryRows, DryRows] | tuple[DryLoader, DryLoader]:
    """Return the rows to train on and those to validate on, with the room that a training gives
    each. device: of the tensors."""
    if plan.data.batch is not None:
        return DryLoader(plan.data.batch, device), DryLoader(plan.data.batch, device)
    arrays, settings = load_arrays(plan.data), plan.settings
    room = compute_rows_room_bytes(
        plan.device, limit_mib=settings.memory.limit_mib, rows_mib=settings.data.memory_mib
    )

    def make_rows(x: np.ndarray, y: np.ndarray, *, share: float, is_shuffled: bool) -> DryRows:
        return DryRows(
            x,
            y,
            kind=plan.torch_device.type,
            device=device,
            room_bytes=share * room,
            channels_last=channels_last,
            is_shuffled=is_shuffled,
        )

    return (
        make_rows(arrays.train_x, arrays.train_y, share=TRAIN_SHARE, is_shuffled=True),
        make_rows(arrays.val_x, arrays.val_y, share=VAL_SHARE, is_shuffled=False),
    )


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
class DryRun:
    """The result of a dry run."""

    parameter_bytes: int
    plain: PhasePeaks
    convolves: bool  # has layers that cuDNN may compute
    graphed: PhasePeaks | None = None


@dataclass
class PhasePeaks:
    """Follows the allocation log: the peak of each phase, the owners at the highest peak, and
    every allocation in its order."""

    ledger: AllocationLog
    events: list[AllocatorEvent]
    # Bytes, by the phase after which the first product of matrices takes them.
    workspaces: dict[str, list[int]]
    training: int = 0  # of the events, those before the last evaluation
    marks: list[tuple[str, int]] = field(default_factory=list)  # phases, and the events by then
    phases: dict[str, int] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)
    _most: int = 0
    _due: list[int] = field(default_factory=list)

    def note_operation(self, func: Any) -> None:
        """Note that an operation is under way, whose results are there."""
        is_product = func in PRODUCTS or (
            func in CONVOLUTIONS and not torch.backends.cudnn.enabled  # they are products then
        )
        if self._due and is_product:
            for size in self._due:  # below 0: no name of the ledger's
                self.events.append(AllocateEvent(-1 - len(self.events), size))
            self._due = []

    def mark(self, phase: str) -> None:
        """End `phase` here."""
        self.ledger.end_phase(phase)
        self._due += self.workspaces.pop(phase, ())
        self.phases[phase] = max(self.phases.get(phase, 0), self.ledger.peak_bytes)
        self.marks.append((phase, len(self.events)))
        self.ledger.reset_peak()

    def copy(self) -> PhasePeaks:
        """Return a copy that later marks do not change."""
        return replace(
            self,
            events=list(self.events),
            marks=list(self.marks),
            phases=dict(self.phases),
            owners=dict(self.owners),
        )

    def settle(self) -> None:
        """Assign what was counted since the last call to the owners that the log knows by
        now."""
        if self.ledger.step_peak_bytes > self._most:
            self._most, self.owners = self.ledger.step_peak_bytes, self.ledger.sum_owners_at_peak()
        self.ledger.begin_step()


def make_peaks(device: torch.device, facts: DeviceFacts) -> PhasePeaks:
    """Return what follows a dry run whose tensors say that they are on `device`, as it would be on
    the one of the facts."""
    events: list[AllocatorEvent] = []
    scratch = make_scratch_counter(torch.device(facts.name))

    def scratch_bytes(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
        peaks.note_operation(func)
        return scratch(func, args)

    ledger = AllocationLog(
        device,
        block=int if facts.kind == "cpu" else read_rules().round_up,
        scratch=scratch_bytes,
        told=events.append,
    )
    peaks = PhasePeaks(ledger, events, list_workspaces(facts))
    return peaks


def run_dry_training(plan: Plan, micro_batch: int, own: nn.Module | None) -> DryRun:
    """Run a training without bytes. own: the model, where it is the user's; else it is built."""
    with keep_python_state(find_own_functions(plan.settings.train).values()):
        return _run_dry_training(plan, micro_batch, own)


def _run_dry_training(plan: Plan, micro_batch: int, own: nn.Module | None) -> DryRun:
    settings, data, facts = plan.settings, plan.data, plan.device
    device = choose_device(plan.torch_device)
    peaks = make_peaks(device, facts)
    ledger = peaks.ledger
    with ledger:
        model = (
            _build_model(settings.model, data, device) if own is None else fake_model(own, device)
        )
        ledger.own("parameters", model.parameters())
        ledger.own("buffers", model.buffers())
        parameter_bytes = ledger.allocated_bytes
        channels_last = build.takes_channels_last(settings.model.name, model)
        train, val = make_empty_rows(plan, device=device, channels_last=channels_last)
        ledger.own("data", (*train.list_tensors(), *val.list_tensors()))
        # On a CPU the weights of the best epoch are kept where the others are.
        keeps_best = plan.keeps_best and facts.kind == "cpu"
        best = [t.clone() for _, t in iterate_tensors(model)] if keeps_best else []
        ledger.own(BEST_WEIGHTS, best)
        peaks.mark(SETUP)
        peaks.settle()
        step = build.make_step(
            plan,
            model,
            build.make_optimizer(settings.optim, model),
            device=device,
            micro=SingleAttempt(micro_batch),
            mark=peaks.mark,
        )
        whole = min(settings.train.batch_size, data.train_rows)
        steps = partial(
            _train_steps, model, step, train, (whole, whole, data.train_rows % whole), peaks
        )
        steps()
        room = compute_room_bytes(settings.memory.limit_mib, facts.free_bytes or 0)
        eval_batch = choose_eval_rows(data, settings.train.batch_size, room_bytes=room)
        judged = partial(
            _evaluate_batches, plan, model, step, val, peaks, min(eval_batch, data.val_rows)
        )
        judged()
        convolves = any(isinstance(m, (_ConvNd, nn.RNNBase)) for m in model.modules())
        dry = DryRun(parameter_bytes, peaks.copy(), convolves)
        if plan.may_replay:
            kept = _record_step(
                model, step, train.make_train_batch(settings.train.batch_size), peaks
            )
            steps()  # taken plainly in between
            judged()
            dry = replace(dry, graphed=peaks)
            del kept
        del best  # a training holds it to its end
    return dry


def _record_step(model: nn.Module, step: Step, batch: Batch, peaks: PhasePeaks) -> Any:
    """A recorded step: in a pool of its own, beside which nothing is cached; what it keeps."""
    ledger = peaks.ledger
    model.train()
    step.optimizer.zero_grad()
    ledger.reset_peak()  # which strikes out what is freed
    peaks.events.append(EmptyCacheEvent())
    ledger.pool = 1
    outcome = step.make_recordable()(batch, norm=False, watched=Watched.NOT)
    ledger.pool = 0
    grads = [p.grad for p in step.optimizer.params if p.grad is not None]
    ledger.own("graph", [*grads, outcome.loss])
    peaks.mark("recording")
    peaks.settle()
    return batch, grads, outcome


def choose_device(device: torch.device) -> torch.device:
    """Return the device itself, or the CPU where autograd would not know one of that kind."""
    here = torch.accelerator.current_accelerator(check_available=True)
    return device if here is not None and here.type == device.type else torch.device("cpu")


def _build_model(settings: ModelConfig, data: DataFacts, device: torch.device) -> nn.Module:
    """Return the model of the training, none of whose weights is ever drawn."""
    with device:
        model = builtin.build_model(
            settings.name,
            input_shape=data.input_shape,
            outputs=data.outputs,
            args=settings.args,
            times=None if data.times is None else asdict(data.times),
        )
    freeze_parameters(model, settings.freeze)
    if build.takes_channels_last(settings.name, model):
        # Not by model.to(), which can't convert such tensors.
        for weight in (p for p in model.parameters() if p.dim() == 4):
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    return model


def fake_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the same model on the device, with tensors that have no bytes; tied ones stay tied."""
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            empty = torch.empty_like(tensor, device=device)
            is_weight = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_weight else empty
        return made[id(tensor)]

    for module in model.modules():
        for kept in (module._parameters, module._buffers):
            for name, tensor in kept.items():
                if tensor is not None:
                    kept[name] = fake(tensor)  # type: ignore[assignment]
    return model


def _train_steps(
    model: nn.Module,
    step: Step,
    rows: DryRows | DryLoader,
    sizes: tuple[int, ...],
    peaks: PhasePeaks,
) -> None:
    """Steps on so many rows each. The second has the first one's gradients and optimizer state;
    the last of an epoch may have fewer rows, whose tensors lie among the small ones."""
    model.train()
    for size in filter(None, sizes):
        batch = rows.make_train_batch(size)
        peaks.ledger.own("batch", nested.find_tensors(batch))
        peaks.mark("data_wait")
        # The second micro-batch finds gradients there; those after it find nothing new.
        first = min(2 * step.micro.rows, size)
        x, y = nested.take_first_rows((batch.x, batch.y), first)
        step(Batch(x, y, first), norm=True, watched=Watched.NOT)
        gradients = (p.grad for p in step.optimizer.params if p.grad is not None)
        peaks.ledger.own("gradients", gradients)
        peaks.ledger.own("optimizer_state", step.optimizer.list_state_tensors())
        peaks.settle()
        del batch, x, y  # gone before the next one comes
    rows.let_go()


@torch.no_grad()  # in inference mode operations that are made of others would be seen as one
def _evaluate_batches(
    plan: Plan,
    model: nn.Module,
    step: Step,
    rows: DryRows | DryLoader,
    peaks: PhasePeaks,
    most: int,
) -> None:
    """Two of the largest batches of an evaluation, the second beside what the first has left in the
    caches, then the last one, which may have fewer rows; what a regression keeps of all."""
    peaks.training = len(peaks.events)
    data, train = plan.data, plan.settings.train
    forward = build.choose_forward(plan.settings.model.name, train, data)(model)
    model.eval()
    kept = KeptRows(data.task, data.val_rows)
    whole, rest = divmod(data.val_rows, most)
    for size in (*[most] * min(2, whole), *([rest] if rest else [])):
        x, y, *_ = rows.make_val_batch(size)
        with step.autocast():
            outputs, loss = forward(x)
            if loss is None:
                make_loss(train, data, outputs.device, is_judged=True)(outputs, y)
        if data.task == "classification":
            predicted = outputs.argmax(1)
            _ = predicted == y
            kept.add(shrink_classes(predicted, data.outputs), shrink_classes(y, data.outputs))
        elif data.task == "multilabel":
            kept.add(outputs, y > 0.5)
        elif data.task == "regression":
            kept.add(outputs, y)
        del x, y, outputs, loss  # gone before the next ones come
    peaks.mark(EVALUATION)
    peaks.settle()


def list_workspaces(device: DeviceFacts) -> dict[str, list[int]]:
    """Return the bytes that libraries are known to keep, by the phase after which a thread
    multiplies its first matrices; none on devices of which nothing is known."""
    if device.kind != "cuda":
        return {}
    is_here = torch.cuda.is_available()
    newer = is_here and torch.cuda.get_device_capability(device.index)[0] >= HOPPER
    usual_bytes = HOPPER_WORKSPACE_BYTES if newer else WORKSPACE_BYTES
    cublas_bytes = read_cublas_workspace_bytes() or usual_bytes
    lt = [] if torch.__version__ >= LT_SHARES_SINCE else [min(LT_WORKSPACE_BYTES, cublas_bytes)]
    return {"data_wait": [cublas_bytes, *lt], "forward": [cublas_bytes]}


POOLED = ("cuda", "rocm", "xpu")  # whose allocators cache as simulated_allocator.py tells
# What lies among the small tensors and in no dry run, such as losses that wait to be read: an mlp
# and a transformer took one segment more than their dry runs, and no more.
SPARE_BYTES = SMALL_SEGMENT_BYTES
CUDNN = "without what cuDNN takes for a moment, which it chooses when it runs"
WIDER = (
    1.25  # room where the allocator's settings are not all followed: a margin, of no measurement
)


@dataclass(frozen=True)
class Forecast:
    """The bytes that a training's tensors will take on the device at their peak."""

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
    note: str = ""  # what the forecast could not follow
    graphed: Forecast | None = None  # the same with steps replayed from a graph, where they may be


class UnforeseeableMemory(ValueError):
    """The memory cannot be forecast: a model or a loss of the user's own that can't run
    without the bytes of its tensors, or an optimizer whose state is not known."""


@contextmanager
def prepare_fake_tensors() -> Iterator[None]:
    """What cannot run without bytes is told by its error, and not by PyTorch's log too; and padded
    rows stay so in an evaluation: the nested tensors that its own layers make of them have no
    shape."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, is_fast = log.level, torch.backends.mha.get_fastpath_enabled()
    log.setLevel(logging.CRITICAL)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        log.setLevel(before)
        torch.backends.mha.set_fastpath_enabled(is_fast)


def forecast_training(plan: Plan, *, micro_batch: int | None = None) -> Forecast:
    """Return the memory of this training. micro_batch: rows; as train.accumulate says where None.

    Where this PyTorch can't use a device of that kind, the CPU's operations stand in for its own.
    """
    # Here, since entering it imports the compiler: 2 s, once in a process.
    from torch._subclasses.fake_tensor import FakeTensorMode

    config, data, device = plan.settings, plan.data, plan.device
    if config.optim.name not in FUSED:
        raise UnforeseeableMemory(
            f"optim.name: what {config.optim.name} will take cannot be told beforehand"
        )
    rows = micro_batch or plan.micro_batch
    # Built outside, where its constructor may compute; a tensor that it keeps beside its parameters
    # is a real one.
    own = (
        own_model.build_model_on_host(config.model, data)
        if is_import_path(config.model.name)
        else None
    )
    # A loss of the user's own may hold real ones too, such as weights of the classes.
    setting, theirs = ("train.loss", config.train.loss)
    if own is not None:
        setting, theirs = ("model.name", config.model.name)
    untold = None
    try:
        mode = FakeTensorMode(allow_non_fake_inputs=is_import_path(theirs))
        with prepare_fake_tensors(), mode:
            dry = run_dry_training(plan, rows, own)
    except Exception as error:
        if not is_import_path(theirs):
            raise
        untold = describe_error(error)
    if untold is not None:
        raise UnforeseeableMemory(
            f"{setting}: what {theirs} will take cannot be told beforehand ({untold}); "
            "it needs more than the shapes of its inputs"
        )
    forecast = make_forecast(dry.plain, dry.parameter_bytes, device, rows)
    if dry.convolves and device.kind == "cuda" and torch.backends.cudnn.enabled:
        forecast = replace(forecast, note="; ".join(filter(None, (forecast.note, CUDNN))))
    if dry.graphed is None:
        return forecast
    return replace(forecast, graphed=make_forecast(dry.graphed, dry.parameter_bytes, device, rows))


def make_forecast(
    peaks: PhasePeaks, parameter_bytes: int, device: DeviceFacts, rows: int
) -> Forecast:
    libraries_bytes = sum(map(sum, list_workspaces(device).values()))
    phases = {
        phase: most + (0 if phase == SETUP else libraries_bytes)
        for phase, most in peaks.phases.items()
    }
    if device.kind in POOLED:
        phases = _count_blocks(peaks)
    phase = max(phases, key=lambda name: phases[name])
    owners = dict(peaks.owners)
    if libraries_bytes:
        owners[LIBRARIES] = owners.get(LIBRARIES, 0) + libraries_bytes
    beside_bytes = phases[phase] - sum(owners.values())  # in blocks, and in no tensor
    if beside_bytes > 0:
        owners[REST] = owners.get(REST, 0) + beside_bytes
    needed_bytes = max(most for phase, most in phases.items() if phase != EVALUATION)
    reserved_bytes = None
    if device.kind in POOLED:
        reserved_bytes = SimulatedAllocator().follow(peaks.events).peak_reserved
        without = peaks.events[: peaks.training]
        needed_bytes = (
            find_smallest_limit(without, up_to=SimulatedAllocator().follow(without).peak_reserved)
            + SPARE_BYTES
        )
    note = ""
    if device.kind in POOLED and (unfollowed := read_rules().unfollowed):
        needed_bytes = int(needed_bytes * WIDER)
        note = (
            f"PYTORCH_ALLOC_CONF: {', '.join(unfollowed)} is not followed: {WIDER:g} times the room"
        )
    return Forecast(
        phases[phase],
        reserved_bytes,
        needed_bytes,
        phase,
        owners,
        phases,
        parameter_bytes,
        rows,
        note,
    )


def _count_blocks(peaks: PhasePeaks) -> dict[str, int]:
    """Return the most that the allocator counts as held in each phase: whole blocks, of which those
    above 1 MiB are up to 1 MiB larger than their tensors, where such a rest is not split off."""
    counts: dict[str, int] = {}
    allocator, begin = SimulatedAllocator(), 0
    for phase, end in peaks.marks:
        allocator.peak_allocated = allocator.allocated
        allocator.follow(peaks.events[begin:end])
        counts[phase] = max(counts.get(phase, 0), allocator.peak_allocated)
        begin = end
    return counts


def find_largest_micro_batch(plan: Plan, room_bytes: float) -> int | None:
    """Return the largest of batch_size and its halves that fits; None where not even a row does."""
    rows = plan.settings.train.batch_size
    while forecast_training(plan, micro_batch=rows).needed_bytes > room_bytes:
        if rows == 1:
            return None
        rows = math.ceil(rows / 2)
    return rows
