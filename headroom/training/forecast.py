"""Forecasts how much device memory steps of a training will take, before they take any. They are
taken on tensors that have shapes and no memory; nothing is computed and no random number drawn. The
result is what these tensors hold, and what a caching allocator reserves for them by its rules. Of
what libraries take for themselves only cuBLAS's workspaces are known. plan_forecast.py takes the
steps of a plan, loop_forecast.py one of a loop that somebody else wrote.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from headroom.base import nested
from headroom.base.facts import DeviceFacts
from headroom.watch.allocation_log import (
    LIBRARIES,
    MIB,
    REST,
    AllocationLog,
    sum_by_layer,
    sum_by_owner,
)
from headroom.watch.layers import Layers, State
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

B = TypeVar("B")  # a batch: tensors, or structures of them

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
    """The bytes that a training's tensors will take on the device at their peak.

    layers: of `owners`, what lies in a module of the model: by the module's path, such as
    "encoder.layers.3.attn", and there by owner: parameters, buffers, gradients, optimizer_state,
    activations, and what operations of the module took beside them (rest, libraries). Each byte is
    told of the innermost module alone; "" is the model itself. What no module is known of, such as
    the loss and the batch, is in `owners` only.
    """

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
    layers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def peak_mib(self) -> float:
        return self.peak_bytes / MIB


class UnforeseeableMemory(ValueError):
    """The memory cannot be forecast: a model or a loss of the user's own that can't run
    without the bytes of its tensors, or an optimizer whose state is not known."""


@contextmanager
def use_fake_tensors(*, allow_real: bool) -> Iterator[None]:
    """Make tensors inside without memory. allow_real: beside such as have some.

    What cannot run without bytes is told by its error, and not by PyTorch's log too; and padded
    rows stay so in an evaluation: the nested tensors that its own layers make of them have no
    shape.
    """
    # Here, since entering it imports the compiler: 2 s, once in a process.
    from torch._subclasses.fake_tensor import FakeTensorMode

    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, is_fast = log.level, torch.backends.mha.get_fastpath_enabled()
    log.setLevel(logging.CRITICAL)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with FakeTensorMode(allow_non_fake_inputs=allow_real):
            yield
    finally:
        log.setLevel(before)
        torch.backends.mha.set_fastpath_enabled(is_fast)


class DryRun:
    """Counts what a training takes that runs on tensors without memory: the peak of each phase, the
    owners at the highest peak, and every allocation in its order. What is counted is computed while
    it is entered."""

    def __init__(self, facts: DeviceFacts, *, is_portable: bool = False) -> None:
        """facts: of the device that is meant, which need not be here. is_portable: count as where
        no GPU is, whose kernels differ from one to the next, so that all machines count the same.
        """
        # That the tensors say they are on.
        self.device = torch.device("cpu") if is_portable else _choose_device(facts)
        self.parameter_bytes = 0
        self._facts = facts
        self._scratch = make_scratch_counter(self.device)
        self._events: list[AllocatorEvent] = []
        self._log = AllocationLog(
            self.device,
            block=int if facts.kind == "cpu" else read_rules().round_up,
            scratch=self._count_scratch,
            record_event=self._events.append,
        )
        # Bytes, by the phase after which the first product of matrices takes them.
        self._workspaces = list_workspaces(facts, is_here=self.device.type == "cuda")
        self._due: list[int] = []
        self._libraries_bytes = 0
        self._trained: int | None = None  # of the events, those before the last evaluation
        self._marks: list[tuple[str, int]] = []  # phases, and the events by then
        self._phases: dict[str, int] = {}
        self._owners: dict[str, int] = {}
        self._by_layer: dict[str, dict[str, int]] = {}
        self._layers, self._state = Layers(), list[tuple[Tensor, Tensor]]()
        self._most = 0
        self._convolves = False  # has layers that cuDNN may compute

    def __enter__(self) -> Self:
        self._log.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._log.__exit__(*error)

    def add_model(self, model: nn.Module) -> None:
        """Count a model whose tensors were made here."""
        self.own("parameters", model.parameters())
        self.own("buffers", model.buffers())
        self._layers = Layers([model], lambda: self._state)
        self._log.know_layers(self._layers.paths)
        self._log.place(self._layers.iterate_tensors())
        self.parameter_bytes = self._log.allocated_bytes
        self._convolves = any(isinstance(m, (_ConvNd, nn.RNNBase)) for m in model.modules())

    def own(self, owner: str, tensors: Iterable[Tensor]) -> None:
        """Assign these tensors to an owner."""
        self._log.own(owner, tensors)

    def own_trained(self, model: nn.Module, state: State = ()) -> None:
        """Assign what a step has made for the model that was added: gradients, and the state of its
        optimizer."""
        self._state = list(state)
        self.own("gradients", (p.grad for p in model.parameters() if p.grad is not None))
        self.own("optimizer_state", (tensor for _, tensor in self._state))
        self._log.place(self._layers.iterate_tensors())
        self._state = []

    def mark(self, phase: str) -> None:
        """End `phase` here."""
        self._log.end_phase(phase)
        self._due += self._workspaces.pop(phase, ())
        self._phases[phase] = max(self._phases.get(phase, 0), self._log.peak_bytes)
        self._marks.append((phase, len(self._events)))
        self._log.reset_peak()

    def settle(self) -> None:
        """Assign what was counted since the last call to the owners that are known by now."""
        if self._log.step_peak_bytes > self._most:
            at_peak = self._log.list_at_peak()
            self._most = self._log.step_peak_bytes
            self._owners, self._by_layer = sum_by_owner(at_peak), sum_by_layer(at_peak)
        self._log.begin_step()

    def end_setup(self) -> None:
        """What is there before the first step is there."""
        self.mark(SETUP)
        self.settle()

    def take_step(self, make_batch: Callable[[], B], take: Callable[[B], None]) -> None:
        """Count a step on this batch, which is gone before the next one comes. take: marks its
        phases and names the owners of what it leaves."""
        batch = make_batch()
        self.own("batch", nested.find_tensors(batch))
        self.mark("data_wait")
        take(batch)
        self.settle()

    @contextmanager
    def count_evaluation(self) -> Iterator[None]:
        """Count what happens inside as an evaluation, after the steps that have to fit."""
        self._trained = len(self._events)
        yield
        self.mark(EVALUATION)
        self.settle()

    @contextmanager
    def record_graph(self) -> Iterator[None]:
        """Count what happens inside as the recording of a graph: in a pool of its own, beside which
        nothing is cached."""
        self._log.reset_peak()  # which strikes out what is freed
        self._events.append(EmptyCacheEvent())
        self._log.pool = 1
        yield
        self._log.pool = 0

    def make_forecast(self, rows: int) -> Forecast:
        """Return the memory of all that was counted so far. rows: of a micro-batch."""
        is_pooled = self._facts.kind in POOLED
        phases = self._count_blocks() if is_pooled else dict(self._phases)
        phase = max(phases, key=lambda name: phases[name])
        owners = dict(self._owners)
        if self._libraries_bytes:
            owners[LIBRARIES] = owners.get(LIBRARIES, 0) + self._libraries_bytes
        beside_bytes = phases[phase] - sum(owners.values())  # in blocks, and in no tensor
        if beside_bytes > 0:
            owners[REST] = owners.get(REST, 0) + beside_bytes
        forecast = Forecast(
            peak_bytes=phases[phase],
            reserved_bytes=None,
            needed_bytes=max(most for name, most in phases.items() if name != EVALUATION),
            phase=phase,
            owners=owners,
            phases=phases,
            parameter_bytes=self.parameter_bytes,
            micro_batch=rows,
            note="; ".join(self._list_notes()),
            layers=self._by_layer,
        )
        return self._count_segments(forecast) if is_pooled else forecast

    def _count_segments(self, forecast: Forecast) -> Forecast:
        """Return the forecast with what an allocator takes for its tensors in whole segments."""
        steps = self._events[: self._trained]
        most = SimulatedAllocator().follow(steps).peak_reserved
        needed_bytes = find_smallest_limit(steps, up_to=most) + SPARE_BYTES
        return replace(
            forecast,
            reserved_bytes=SimulatedAllocator().follow(self._events).peak_reserved,
            needed_bytes=int(needed_bytes * WIDER) if read_rules().unfollowed else needed_bytes,
        )

    def _count_blocks(self) -> dict[str, int]:
        """Return the most that the allocator counts as held in each phase: whole blocks, of which
        those above 1 MiB are up to 1 MiB larger than their tensors, where such a rest is not split
        off."""
        counts: dict[str, int] = {}
        allocator, begin = SimulatedAllocator(), 0
        for phase, end in self._marks:
            allocator.peak_allocated = allocator.allocated
            allocator.follow(self._events[begin:end])
            counts[phase] = max(counts.get(phase, 0), allocator.peak_allocated)
            begin = end
        return counts

    def _list_notes(self) -> list[str]:
        """Return what could not be followed."""
        notes, kind = [], self._facts.kind
        if kind in POOLED and (unfollowed := read_rules().unfollowed):
            settings = ", ".join(unfollowed)
            notes.append(
                f"PYTORCH_ALLOC_CONF: {settings} is not followed: {WIDER:g} times the room"
            )
        if self._convolves and kind == "cuda" and torch.backends.cudnn.enabled:
            notes.append(CUDNN)
        return notes

    def _count_scratch(self, func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Return what an operation, whose results are there, takes for a moment; count what
        libraries keep from it on."""
        is_product = func in PRODUCTS or (
            func in CONVOLUTIONS and not torch.backends.cudnn.enabled  # they are products then
        )
        if self._due and is_product:
            for size in self._due:  # below 0: no name of the log's
                self._events.append(AllocateEvent(-1 - len(self._events), size))
                self._libraries_bytes += size
            self._due = []
        return self._scratch(func, args)


def _choose_device(facts: DeviceFacts) -> torch.device:
    """Return the device itself, or the CPU where autograd would not know one of that kind."""
    device = torch.device(facts.name)
    here = torch.accelerator.current_accelerator(check_available=True)
    return device if here is not None and here.type == device.type else torch.device("cpu")


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


def list_workspaces(device: DeviceFacts, *, is_here: bool) -> dict[str, list[int]]:
    """Return the bytes that libraries are known to keep, by the phase after which a thread
    multiplies its first matrices; none on devices of which nothing is known."""
    if device.kind != "cuda":
        return {}
    newer = is_here and torch.cuda.get_device_capability(device.index)[0] >= HOPPER
    usual_bytes = HOPPER_WORKSPACE_BYTES if newer else WORKSPACE_BYTES
    cublas_bytes = read_cublas_workspace_bytes() or usual_bytes
    lt = [] if torch.__version__ >= LT_SHARES_SINCE else [min(LT_WORKSPACE_BYTES, cublas_bytes)]
    return {"data_wait": [cublas_bytes, *lt], "forward": [cublas_bytes]}


def find_largest_rows(
    count_needed: Callable[[int], float],
    room_bytes: float,
    *,
    rows: int,
    most: int,
    factor: int = 2,
    close: float = math.inf,
) -> int | None:
    """Return the largest batch that fits into the room; None where not even a row does.

    count_needed: returns the bytes that so many rows need. Tried are `rows`, with `factor` as many
    again and again up to `most`, or half as many again and again; then what lies between the
    largest that fits and the smallest that does not, until they are so close to one another, as a
    share of the batch.
    """
    fits, over = 0, rows
    while count_needed(over) <= room_bytes:
        fits = over
        if factor * over > most:
            return fits
        over *= factor
    while not fits and over > 1:
        half = math.ceil(over / 2)
        if count_needed(half) <= room_bytes:
            fits = half
        else:
            over = half
    while fits and over - fits > max(1, close * fits):
        beyond_bytes = count_needed(over) - count_needed(fits)
        share = (room_bytes - count_needed(fits)) / max(1, beyond_bytes)
        guess = fits + int(share * (over - fits))  # what takes memory is mostly the rows
        between = min(max(guess, fits + 1, int(fits * (1 + close / 2))), over - 1)
        if count_needed(between) <= room_bytes:
            fits = between
        else:
            over = between
    return fits or None
