"""Record which owner holds which bytes, operation by operation: a dispatch mode that counts
each storage from the operation that makes it until it is freed, and names the operation and the
nearest Python line outside PyTorch and the layer that it is in (in a backward pass, those of the
forward operation whose gradient it computes). It sees what tensors hold on any device, real or
fake, and not what libraries take for themselves; it costs some microseconds an operation, so that
training uses it on sampled steps, for a limit, and to explain why memory ran out.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import _engine_run_backward
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from headroom.base.nested import get_local_part
from headroom.base.units import format_mebibytes
from headroom.watch.kernel_memory import KernelMemory
from headroom.watch.simulated_allocator import AllocateEvent, AllocatorEvent, FreeEvent

_TORCH = str(Path(torch.__file__).parent)
_OURS = __file__


_CALL, _ENGINE = nn.Module._call_impl.__code__, _engine_run_backward.__code__


class Place(NamedTuple):
    """Where an operation is: its line, and the path of the innermost layer that is being called;
    None outside of all."""

    line: str
    layer: str | None


class OperationPlaces:
    """Finds the places of a step's operations. Call it inside each operation, below autograd."""

    def __init__(self, paths: Mapping[int, str]) -> None:
        """paths: of layers, by the ids of their modules. They are found on the stack of calls, not
        by hooks: some of PyTorch's own layers compute otherwise where they have hooks, and an error
        would leave a call open."""
        self._paths = paths
        self._forward: dict[int, Place] = {}  # by the number of the autograd node that is made

    def find_place(self, *, is_needed: bool) -> Place:
        """Return the place of the operation that runs now; it may be empty where it is not
        needed."""
        # A backward runs in a thread of C++ on a GPU, with no Python on its stack.
        node = torch._C._current_autograd_node()
        if node is not None:
            known = self._forward.get(node._sequence_nr(), NOWHERE)
            again = self._find_layer(sys._getframe()) if self._paths else None
            if again is not None:
                known = Place(known.line, again)
            if torch.is_grad_enabled():  # of a checkpoint, which has a backward of its own
                self._forward.setdefault(_get_sequence_nr() - 1, known)
            line = f"backward of {known.line}" if known.line else node.name()
            return Place(line, known.layer)
        # Of an operation that will be differentiated the node was made just before it runs.
        number = _get_sequence_nr() - 1
        if not is_needed and number in self._forward:
            return NOWHERE
        # No frame keeps itself: it would keep all that called it, and their tensors.
        layer = self._find_layer(sys._getframe()) if self._paths else None
        place = Place(_find_python_line(sys._getframe()), layer)
        self._forward.setdefault(number, place)
        return place

    def _find_layer(self, frame: FrameType | None) -> str | None:
        """Return the path of the innermost layer that is called; in a backward pass, of one that is
        computed anew."""
        while frame is not None and frame.f_code is not _ENGINE:
            if frame.f_code is _CALL:
                path = self._paths.get(id(frame.f_locals["self"]))
                if path is not None:
                    return path
            frame = frame.f_back
        return None


NOWHERE = Place("", None)


def _find_python_line(frame: FrameType | None) -> str:
    """Return the nearest Python line outside PyTorch and the log; empty where there is none."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_TORCH) and name != _OURS and not name.startswith("<"):
            return f"{os.path.basename(name)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def find_output_tensors(out: Any) -> Iterator[Tensor]:
    """Yield all tensors that an operation returned; of a sharded one, the local part."""
    if isinstance(out, Tensor):
        yield get_local_part(out)
    elif isinstance(out, (list, tuple)):
        for one in out:
            yield from find_output_tensors(one)


def describe_output(func: Any, tensor: Tensor) -> str:
    """Describe the operation and its output: "mm (128, 256) float32"."""
    return f"{get_operation_name(func)} {describe_tensor(tensor)}"


def get_operation_name(func: Any) -> str:
    """Return the operation's name: "mm"."""
    return str(func.__name__).partition(".")[0]


def describe_tensor(tensor: Tensor) -> str:
    """Describe a tensor's shape and type: "(128, 256) float32"."""
    # A nested one, which PyTorch's own layers make of padded rows, has none.
    shape = "nested" if tensor.is_nested else tuple(tensor.shape)
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"


MIB = 1024**2
ACTIVATIONS, LIBRARIES, REST = "activations", "libraries", "rest"
# Of an operation and its arguments, in bytes of each allocation, which it holds together.
Scratch = Callable[[Any, tuple[Any, ...]], tuple[int, ...]]
# What StorageWeakRef.expired() asks, without its two Python calls: a step of a transformer has some
# hundred storages, each asked at each allocation.
_EXPIRED = torch.UntypedStorage._expired


@dataclass(slots=True)
class Entry:
    """One storage: the operation and line that made it, its owner, and the allocations from
    which to which it lived."""

    ref: StorageWeakRef | None  # None of an operation's own memory
    bytes: int
    born: int
    line: str  # "model.py:12 forward": nearest to the operation outside PyTorch; "backward of ..."
    what: str  # "mm (128, 256) float32"
    phase: str = ""
    owner: str = REST
    died: int | None = None
    layer: str | None = None  # the path of the module that it lies in; None: in none that is known


class AllocationLog(TorchDispatchMode):
    """Counts the storages of one device. Enter it around what is to be counted."""

    def __init__(
        self,
        device: torch.device,
        *,
        limit_bytes: int | None = None,
        block: Callable[[int], int] = int,
        scratch: Scratch = lambda func, args: (),
        record_event: Callable[[AllocatorEvent], None] = lambda event: None,
        kernels: KernelMemory | None = None,
    ) -> None:
        """limit_bytes: more raises torch.OutOfMemoryError, as a device would. block: the bytes that
        the device's allocator gives for so many. scratch: what an operation takes for itself while
        it runs. record_event: hears of every storage that is made and of its end. kernels: measures
        what operations take for themselves, where they are computed on a CPU."""
        super().__init__()
        self._scratch, self._record_event, self._kernels = scratch, record_event, kernels
        self._taken_bytes = 0  # by the operation that has just run, its outputs included
        self.operations = 0  # that were called since the step began
        self.pool = 0  # that storages are made in from here on
        self._device, self._limit, self._block = device, limit_bytes, block
        self.is_active = False
        self._live: dict[int, Entry] = {}
        self._gone: list[Entry] = []  # of this step: the peak may lie where they lived
        self._allocations = 0
        self._unphased: list[Entry] = []
        self._phases: list[tuple[int, str]] = []
        self._at_failure: list[Entry] = []
        self._paths: Mapping[int, str] = {}
        self._places = OperationPlaces(self._paths)
        self.failed_layer: str | None = None  # in which an operation of this step last failed
        self._allocated = 0  # what has died since the last sweep included
        self.peak_bytes = 0  # since reset_peak()
        self.step_peak_bytes = 0
        self._step_peak_at = self._step_from = 0

    @contextmanager
    def count_allocations(self) -> Iterator[None]:
        """Count inside the block; nothing changes where this log counts already."""
        if self.is_active:
            yield
            return
        self.is_active = True
        try:
            with self:
                yield
        finally:
            self.is_active = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Asks PyTorch not to wrap this mode for its compiler, whose import costs two seconds;
        # nothing is compiled under it.
        return False

    @property
    def allocated_bytes(self) -> int:
        self._sweep()
        return self._allocated

    @property
    def limit_bytes(self) -> int | None:
        return self._limit

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def misses_kernels(self) -> bool:
        """Return whether operations took more than was counted, on a CPU, of which nobody else
        tells."""
        return self._device.type == "cpu" and not (self._kernels and self._kernels.is_whole)

    def track_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of these tensors, without naming their owner."""
        for tensor in tensors:
            self._find_entry(tensor, place=NOWHERE, what=describe_tensor(tensor))

    def own(self, owner: str, tensors: Iterable[Tensor]) -> None:
        """Assign the storages of these tensors to `owner`, also those made before."""
        for tensor in map(get_local_part, tensors):
            entry = self._find_entry(tensor, place=NOWHERE, what=describe_tensor(tensor))
            if entry is not None:
                entry.owner = owner

    def know_layers(self, paths: Mapping[int, str]) -> None:
        """From here on, tell the layer of an operation. paths: by the ids of modules that are
        alive; none of them: tell of no layer."""
        self._paths = paths
        self._places = OperationPlaces(paths)

    def place(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Say in which layer the storages of these tensors lie, each with its path: one that
        several layers share, in what has them all."""
        paths: dict[int, str] = {}
        for path, tensor in tensors:
            key = _get_storage_key(get_local_part(tensor))
            known = paths.setdefault(key, path)
            if known != path:
                paths[key] = _find_shared_path(known, path)
        for key, path in paths.items():
            if key in self._live:
                self._live[key].layer = path

    def begin_step(self) -> None:
        """Forget what was freed before; the peak is that of the step which begins here."""
        self.step_peak_bytes = self.allocated_bytes
        self._gone, self._unphased, self._phases, self._at_failure = [], [], [], []
        self._places, self.failed_layer = OperationPlaces(self._paths), None
        self.operations = 0
        self._step_peak_at = self._step_from = self._allocations

    def end_phase(self, name: str) -> None:
        """Assign what was made since the last phase to this one. What a forward pass leaves
        alive are activations; of an evaluation, which leaves none, all that it made."""
        self._sweep()
        for entry in self._unphased:
            entry.phase = name
            is_left = name == "forward" and entry.died is None
            if (is_left or name == "eval") and entry.owner == REST:
                entry.owner = ACTIVATIONS
        self._unphased = []
        self._phases.append((self._allocations, name))

    def end_failed_phase(self, name: str) -> None:
        """End the phase in which an operation failed."""
        for entry in self._unphased:
            entry.phase = name
        if name == "forward":
            unphased = {id(entry) for entry in self._unphased}
            for entry in self._at_failure:
                if id(entry) in unphased and entry.owner == REST:
                    entry.owner = ACTIVATIONS
        self._unphased = []
        self._phases.append((self._allocations, name))

    def reset_peak(self) -> None:
        self.peak_bytes = self.allocated_bytes

    def list_at_peak(self) -> list[Entry]:
        """Return what was alive at the peak of this step, the largest first."""
        at = self._step_peak_at
        held = [
            e for e in self._iterate_entries() if e.born <= at and (e.died is None or e.died > at)
        ]
        return sorted(held, key=lambda entry: -entry.bytes)

    def list_at_failure(self) -> list[Entry]:
        """Return what was alive where an operation of this step last failed, the largest first;
        empty where none did. What the operation had asked for is not among it."""
        return sorted(self._at_failure, key=lambda entry: -entry.bytes)

    def list_phases(self) -> list[tuple[int, str]]:
        """Return the phases of this step that have ended, each with the last allocation made in
        it."""
        return list(self._phases)

    def sum_owners_at_peak(self) -> dict[str, int]:
        """Return the bytes by owner at the peak of this step."""
        return sum_by_owner(self.list_at_peak())

    def compute_timeline(self) -> list[tuple[int, dict[str, int]]]:
        """Return the bytes by owner where this step began, and after each of its allocations."""
        self._sweep()
        changes: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for entry in self._iterate_entries():
            changes[max(entry.born, self._step_from)].append((entry.owner, entry.bytes))
            if entry.died is not None:
                changes[entry.died].append((entry.owner, -entry.bytes))
        now: dict[str, int] = defaultdict(int)
        points = []
        for at in sorted(changes):
            for owner, change in changes[at]:
                now[owner] += change
            points.append((at, {owner: size for owner, size in now.items() if size}))
        return points

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operations += 1
        try:
            out = self._call(func, args, kwargs or {})
        except Exception:
            self.note_failure()
            raise
        refusal = self.add_outputs(func, args, out)
        if refusal is not None:
            del out  # the error's frames must not keep what did not fit
            raise refusal
        return out

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._kernels is None:
            return func(*args, **kwargs)
        measured = self._kernels.call(func, args, kwargs)
        self._taken_bytes = measured.most_bytes or 0
        return measured.out

    def add_outputs(
        self, func: Any, args: tuple[Any, ...], out: Any
    ) -> torch.OutOfMemoryError | None:
        """Count what an operation has made; return the error where that lies above the limit."""
        made = [tensor for tensor in find_output_tensors(out) if self._is_unknown(tensor)]
        refusal = self._make_refusal(made)
        if refusal is not None:
            return refusal
        place = self._places.find_place(is_needed=bool(made))
        entries = [
            self._find_entry(tensor, place=place, what=describe_output(func, tensor))
            for tensor in made
        ]
        # Of two outputs in one storage there is one entry.
        made_bytes = sum({id(entry): entry.bytes for entry in entries if entry}.values())
        own_bytes = self._taken_bytes - made_bytes
        taken = self._scratch(func, args)
        if own_bytes > 0:
            self._sweep()  # what died before, where nothing was made
            taken = (*taken, own_bytes)
        if taken:
            self._add_scratch(
                taken, place=place, what=f"scratch memory of {get_operation_name(func)}"
            )
        return None

    def _make_refusal(self, made: list[Tensor]) -> torch.OutOfMemoryError | None:
        """Return the error, where these would lie above the limit."""
        if self._limit is None or not made:
            return None
        requested_bytes = sum(
            {_get_storage_key(tensor): self._compute_size_bytes(tensor) for tensor in made}.values()
        )
        # Only where it looks full is it worth looking for what has died.
        if (
            self._allocated + requested_bytes <= self._limit
            or self.allocated_bytes + requested_bytes <= self._limit
        ):
            return None
        self.note_failure()
        free = max(0, self._limit - self._allocated)
        return torch.OutOfMemoryError(
            f"{self._device.type.upper()} out of memory. Tried to allocate "
            f"{format_mebibytes(requested_bytes / MIB)}; {format_mebibytes(free / MIB)} of the "
            f"limit of {format_mebibytes(self._limit / MIB)} are free"
        )

    def note_failure(self) -> None:
        """Keep what is alive now, where memory has run out."""
        self._sweep()
        self._at_failure = list(self._live.values())
        self.failed_layer = self._places.find_place(is_needed=True).layer

    def _is_unknown(self, tensor: Tensor) -> bool:
        return (
            tensor.device.type == self._device.type
            and tensor.layout == torch.strided
            and _get_storage_key(tensor) not in self._live
        )

    def _compute_size_bytes(self, tensor: Tensor) -> int:
        return self._block(Tensor.untyped_storage(tensor).nbytes())

    def _find_entry(self, tensor: Tensor, *, place: Place, what: str) -> Entry | None:
        """Return the entry of the tensor's storage, made where there is none yet."""
        if not self._is_unknown(tensor):
            return self._live.get(_get_storage_key(tensor))
        size_bytes = self._compute_size_bytes(tensor)
        if not size_bytes:
            return None
        self._sweep()
        self._allocations += 1
        ref = StorageWeakRef(Tensor.untyped_storage(tensor))
        entry = Entry(*(ref, size_bytes, self._allocations, place.line, what), layer=place.layer)
        self._live[_get_storage_key(tensor)] = entry
        self._record_event(AllocateEvent(entry.born, size_bytes, self.pool))
        self._unphased.append(entry)
        self._allocated += size_bytes
        self._note_peak(self._allocated)
        return entry

    def _add_scratch(self, sizes: Sequence[int], *, place: Place, what: str) -> None:
        """Memory that an operation has taken, all of it at once, and given back."""
        first, most = self._allocations + 1, 0
        self._allocations += len(sizes)
        for at, size_bytes in enumerate(sizes, first):
            died = self._allocations + 1
            size = self._block(size_bytes)
            entry = Entry(None, size, at, place.line, what, owner=LIBRARIES, died=died)
            entry.layer = place.layer
            self._gone.append(entry)
            self._unphased.append(entry)
            self._record_event(AllocateEvent(at, entry.bytes, self.pool))
            most += entry.bytes
        for at in range(first, first + len(sizes)):
            self._record_event(FreeEvent(at))
        self._note_peak(self._allocated + most)

    def _note_peak(self, in_use_bytes: int) -> None:
        self.peak_bytes = max(self.peak_bytes, in_use_bytes)
        if in_use_bytes > self.step_peak_bytes:
            self.step_peak_bytes, self._step_peak_at = in_use_bytes, self._allocations

    def _sweep(self) -> None:
        """Strike out the storages that have died since."""
        for key in list(filter(_EXPIRED, self._live)):
            entry = self._live.pop(key)
            entry.died = self._allocations + 1
            self._allocated -= entry.bytes
            self._gone.append(entry)
            self._record_event(FreeEvent(entry.born))

    def _iterate_entries(self) -> Iterator[Entry]:
        yield from self._gone
        yield from self._live.values()


def sum_by_owner(entries: Iterable[Entry]) -> dict[str, int]:
    """Return the bytes by owner."""
    by_owner: dict[str, int] = defaultdict(int)
    for entry in entries:
        by_owner[entry.owner] += entry.bytes
    return dict(by_owner)


def sum_by_layer(entries: Iterable[Entry]) -> dict[str, dict[str, int]]:
    """Return the bytes by owner of each layer that has any, by its path."""
    by_layer: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for entry in entries:
        if entry.layer is not None:
            by_layer[entry.layer][entry.owner] += entry.bytes
    return {path: dict(owners) for path, owners in by_layer.items()}


def _find_shared_path(one: str, other: str) -> str:
    """Return the path of the innermost module that has both of these."""
    parts = zip(one.split("."), other.split("."), strict=False)
    return ".".join(part for part, _ in takewhile(lambda pair: pair[0] == pair[1], parts))


def _get_storage_key(tensor: Tensor) -> int:
    return Tensor.untyped_storage(tensor)._cdata if tensor.layout == torch.strided else 0
