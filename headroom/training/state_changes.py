"""What code of the user's own changes in a step beside gradients: buffers, frozen parameters,
attributes of layers and of losses, the rows of the batch. It is found by two rows before the first
step, kept before each attempt, and put back where that ran out of memory and is made again. What
cannot be put back is named. No code of the user's is called to compare two states.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from headroom.base import nested

DEEPEST = 6  # containers and objects within one another
MOST = 100_000  # things that are looked at in all: some 0.2 s
PLAIN = (int, float, complex, str, bytes, bool, type(None), np.generic, torch.Size, torch.dtype)
CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
ABSENT = object()  # of an attribute that is not there yet

Slot = tuple[str, str, str]  # whose it is ("" for the model's), path of the layer, name


@dataclass(frozen=True)
class StateChanges:
    """What a model, its loss and its metrics change beside gradients and PyTorch's random numbers:
    a batch that is taken a second time has to find it as the first time did."""

    own: bool = False  # code of the user's runs, which may draw from Python's and numpy's numbers
    inputs: bool = False  # something in the batch is written to
    slots: frozenset[Slot] = frozenset()  # buffers, frozen parameters and other attributes
    mutated: frozenset[Slot] = frozenset()  # those of them whose contents change: a list, an object
    trained: frozenset[Slot] = frozenset()  # parameters that the optimizer has
    # Of the slots those that the next pass begins with: saved buffers but those of norms, frozen
    # parameters, numbers.
    lasting: frozenset[Slot] = frozenset()
    written: frozenset[Slot] = frozenset()  # tensors among the slots that stay what they are

    def replace_model(self, model_changes: StateChanges) -> StateChanges:
        """Return the same with those of the model in another mode, which are `model_changes`."""
        return replace(
            self,
            inputs=self.inputs or model_changes.inputs,
            slots=model_changes.slots | {slot for slot in self.slots if slot[0]},
            mutated=model_changes.mutated | {slot for slot in self.mutated if slot[0]},
            trained=model_changes.trained,
        )


class ChangeFinder:
    """Finds what has changed since it was made: in a model, in what is called beside it, and in a
    batch that they were given. All lie on the host."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        beside: Mapping[str, Any] | None = None,
        *,
        is_light: bool = False,
        ignored: Set[str] = frozenset(),
    ) -> None:
        """beside: losses and metrics of the user's own, by their settings. is_light: tensors are
        told by their versions alone, wherever they lie. ignored: attributes that are nobody's
        state, as those by which a framework knows its module."""
        self._model, self._beside = model, beside or {}
        self._is_light, self._ignored = is_light, ignored
        self._batch = [(t, _describe(t)) for t in nested.find_tensors(batch)]
        describer = _Describer(self._iterate_layers(), is_light=is_light)
        self._before = {
            slot: (space[slot[-1]], describer.describe(space[slot[-1]]))
            for slot, space in self._iterate_slots()
        }
        self._written: set[int] = set()

    def watch(self) -> AbstractContextManager[Any]:
        """Return a context in which all is seen that operations write to: what goes by `.data`
        counts no version, and may leave the values that there are."""
        return _WriteWatch(self._written)

    def find_changes(self, writes: bool = False) -> StateChanges:
        """Return the changes of code of the user's own. writes: whether outputs were written to."""
        slots: set[Slot] = set()
        mutated: set[Slot] = set()
        trained: set[Slot] = set()
        written: set[Slot] = set()
        describer = _Describer(self._iterate_layers(), self._written, is_light=self._is_light)
        now = {slot: space[slot[-1]] for slot, space in self._iterate_slots()}
        for slot, (was, described) in self._before.items():  # in the order of before
            value, is_other = now.get(slot, ABSENT), describer.describe(was) != described
            is_plain = isinstance(was, PLAIN) and isinstance(value, PLAIN)
            if is_plain:
                is_other = describer.describe(value) != described
            if not is_other and (is_plain or value is was):
                continue
            if _is_trained(slot, was):
                trained.add(slot)
                continue
            slots.add(slot)
            if isinstance(was, Tensor) and value is was:
                written.add(slot)
            if is_other and not isinstance(was, (Tensor, *PLAIN)):
                mutated.add(slot)
        inputs = any(_describe(t, self._written) != described for t, described in self._batch)
        return StateChanges(
            own=True,
            inputs=writes or inputs,
            slots=frozenset(slots | (now.keys() - self._before.keys())),
            mutated=frozenset(mutated),
            trained=frozenset(trained),
            lasting=frozenset(slots & self._find_lasting()),
            written=frozenset(written),
        )

    def _find_lasting(self) -> set[Slot]:
        """Return what is carried from one pass to the next, of all that has a name. The running
        means of norms are, and are those of micro-batches everywhere."""
        slots = set()
        for owner, path, layer in self._iterate_layers():
            if isinstance(layer, nn.modules.batchnorm._NormBase):
                continue
            held: dict[str, Any] = getattr(layer, "__dict__", {})
            names = [name for name, value in held.items() if type(value) in (int, float)]
            if isinstance(layer, nn.Module):
                names += layer._buffers.keys() - layer._non_persistent_buffers_set
                names += [k for k, p in layer._parameters.items() if p is not None]
            slots |= {(owner, path, name) for name in names}
        return slots

    def _iterate_layers(self) -> Iterator[tuple[str, str, Any]]:
        return _iterate_layers(self._model, self._beside)

    def _iterate_slots(self) -> Iterator[tuple[Slot, dict[str, Any]]]:
        for slot, space in _iterate_slots(self._iterate_layers()):
            if slot[-1] not in self._ignored:
                yield slot, space


class _WriteWatch(TorchDispatchMode):
    """Notes the memory that operations write to."""

    supports_higher_order_operators = True

    def __init__(self, written: set[int]) -> None:
        super().__init__()
        self._written = written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for i, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[i] if i < len(args) else kwargs.get(argument.name)
                    self._written.update(map(_find_storage, nested.find_tensors(value)))
        return func(*args, **kwargs)


class StateKeeper:
    """Keeps what an attempt changes of a model and of what is called beside it."""

    def __init__(
        self, model: nn.Module, changes: StateChanges, beside: Mapping[str, Any] | None = None
    ) -> None:
        kinds = nn.modules.batchnorm._NormBase  # instance norms may keep running means too
        self._changes = changes
        self._norms: list[tuple[Slot, dict[str, Any]]] = []  # their buffers, of any model
        self._slots: list[tuple[Slot, dict[str, Any]]] = []  # that an attempt changes besides
        self._constant: list[tuple[Slot, Tensor]] = []  # tensors that it does not
        layers = list(_iterate_layers(model, beside or {}))
        by_place = {(owner, path): layer for owner, path, layer in layers}
        for slot, space in _iterate_slots(layers):
            layer, value = by_place[slot[:2]], space[slot[-1]]
            is_norm = isinstance(layer, kinds) and space is layer._buffers and value is not None
            if is_norm:
                self._norms.append((slot, space))
            elif slot in changes.slots:
                self._slots.append((slot, space))
            elif changes.own and isinstance(value, Tensor) and _counts_writes(value):
                self._constant.append((slot, value))
        slots = {slot for slot, _ in _iterate_slots(layers)}
        for slot in changes.slots - slots:  # made in the first step
            if slot[:2] in by_place:
                self._slots.append((slot, vars(by_place[slot[:2]])))

    def list_mutated(self) -> list[Any]:
        """Return what an attempt changes within, such as lists, of which `keep` has no copy."""
        mutated = self._changes.mutated
        return [space.get(slot[-1]) for slot, space in self._slots if slot in mutated]

    def keep(self) -> KeptState:
        """Return the state of now."""
        norms = [(slot, space, b := space[slot[-1]], b.clone()) for slot, space in self._norms]
        slots = [
            _KeptSlot(slot, space, is_mutated=slot in self._changes.mutated)
            for slot, space in self._slots
        ]
        return KeptState(norms, slots, self._constant, self._changes.trained)

    def read(self) -> dict[Slot, Any]:
        """Return the tensors and numbers of now, of what an attempt changes."""
        held = {slot: space.get(slot[-1]) for slot, space in (*self._norms, *self._slots)}
        return {
            slot: value.detach().clone() if isinstance(value, Tensor) else value
            for slot, value in held.items()
            if isinstance(value, (Tensor, *PLAIN))
        }


class KeptState:
    """The state of one moment, as far as it is kept."""

    def __init__(
        self,
        norms: list[tuple[Slot, dict[str, Any], Tensor, Tensor]],
        slots: list[_KeptSlot],
        constant: list[tuple[Slot, Tensor]],
        trained: frozenset[Slot],
    ) -> None:
        self._norms, self._slots, self._constant, self._trained = norms, slots, constant, trained
        self._marks = [_read_mark(t) for _, t in constant]  # 0.3 us each

    def find_lost(self) -> str:
        """Return the name of something that has changed since, and that `restore` does not put
        back; empty where there is nothing."""
        written = (
            slot
            for (slot, t), mark in zip(self._constant, self._marks, strict=True)
            if _read_mark(t) != mark
        )
        mutated = (kept.slot for kept in self._slots if kept.is_lost())
        lost = next(chain(sorted(self._trained), written, mutated), ())
        return ".".join(filter(None, lost))

    @torch.no_grad()
    def restore(self, *, but: Set[Slot] = frozenset()) -> None:
        """Be as in that moment. but: what is left as it is now."""
        for slot, space, buffer, values in self._norms:
            if slot not in but:
                buffer.copy_(values)
                space[slot[-1]] = buffer
        for kept in self._slots:
            if kept.slot not in but:
                kept.restore()


class _KeptSlot:
    """One tensor or attribute. Of a tensor the values are kept, unless it has a graph, as what a
    forward pass leaves behind has: of that, as of all that is no tensor, it is kept which it was,
    and seen whether it was written to."""

    def __init__(self, slot: Slot, space: dict[str, Any], *, is_mutated: bool) -> None:
        self.slot, self._space = slot, space
        self._value = value = space.get(slot[-1], ABSENT)
        self._copy: Tensor | None = None
        self._described: Any = None
        if isinstance(value, Tensor) and value.grad_fn is None:
            self._copy = value.detach().clone()
        elif not isinstance(value, PLAIN):
            self._described = _describe_lightly(value, is_mutated)

    def is_lost(self) -> bool:
        if self._described is None:
            return False
        return bool(_describe_lightly(self._value) != self._described)

    def restore(self) -> None:
        if self._copy is not None:
            self._value.copy_(self._copy)
        if self._value is ABSENT:
            self._space.pop(self.slot[-1], None)
        else:
            self._space[self.slot[-1]] = self._value


def _counts_writes(tensor: Tensor) -> bool:
    try:
        return tensor._version >= 0 and tensor.data_ptr() >= 0
    except RuntimeError:  # one made in inference mode, or without memory of its own
        return False


def _read_mark(tensor: Tensor) -> Any:
    """Return what differs once the tensor was written to; of a frozen one also once its `.data` is
    another."""
    return tensor._version if tensor.requires_grad else (tensor._version, tensor.data_ptr())


def _iterate_slots(
    layers: Iterable[tuple[str, str, Any]],
) -> Iterator[tuple[Slot, dict[str, Any]]]:
    """Yield everything that has a name there, with the dict that holds it: what is registered comes
    first."""
    layers = list(layers)
    for owner, path, layer in layers:
        if isinstance(layer, nn.Module):
            registered: tuple[dict[str, Any], ...] = (layer._parameters, layer._buffers)
            for space in registered:
                for name in space:
                    yield (owner, path, name), space
    for owner, path, layer in layers:
        held: dict[str, Any] = getattr(layer, "__dict__", {})
        internals = _list_internals() if isinstance(layer, nn.Module) else ()
        for name in list(held) if isinstance(held, dict) else ():
            if name not in internals:
                yield (owner, path, name), held


def _iterate_layers(model: nn.Module, beside: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for owner, part in (("", model), *beside.items()):
        layers = part.named_modules() if isinstance(part, nn.Module) else [("", part)]
        for path, layer in layers:
            yield owner, path, layer


@cache
def _list_internals() -> frozenset[str]:
    """Return the names under which PyTorch keeps what is its own in a layer."""
    return frozenset(vars(nn.Module()))


def _is_trained(slot: Slot, value: Any) -> bool:
    return not slot[0] and isinstance(value, nn.Parameter) and value.requires_grad


def list_restorable(model: nn.Module, beside: Mapping[str, Any]) -> frozenset[Slot]:
    """Return what an attempt may change and a copy can bring back: buffers and plain values."""
    return frozenset(
        slot
        for slot, space in _iterate_slots(_iterate_layers(model, beside))
        if isinstance(value := space[slot[-1]], PLAIN)
        or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter))
    )


def read_version(tensor: Tensor) -> int:
    """Return how often it was written to; one made in inference mode does not count it."""
    return 0 if tensor.is_inference() else tensor._version


def _find_storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # sparse tensors have none
        return id(tensor)


def _describe(value: Any, written: Set[int] = frozenset()) -> Any:
    return _Describer((), written).describe(value)


def _describe_lightly(value: Any, is_mutated: bool = False) -> Any:
    """Describe it without a look at the values of tensors. is_mutated: what it holds is known to
    change, so that tensors among it count as changed."""
    describer = _Describer((), is_light=True)
    described = describer.describe(value)
    return object() if is_mutated and describer.has_tensors else described


class _Describer:
    """Describes values so that two descriptions differ where one has changed in between. What was
    described once is only named after that."""

    def __init__(
        self,
        layers: Iterable[tuple[str, str, Any]],
        written: Set[int] = frozenset(),
        *,
        is_light: bool = False,
    ) -> None:
        """layers: are described by their own slots. written: memory whose tensors have changed."""
        self._written, self._is_light, self.has_tensors = written, is_light, False
        self._seen = {id(layer) for _, _, layer in layers}

    def describe(self, value: Any, depth: int = DEEPEST) -> Any:
        if isinstance(value, PLAIN):
            return type(value), repr(value)
        identity = (type(value), id(value))
        if isinstance(value, CODE) or id(value) in self._seen or len(self._seen) > MOST:
            return identity
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self.has_tensors = True
            return *identity, *self._describe_tensor(value)
        state = _read_random_state(value)
        if state is not None:
            return *identity, state
        if isinstance(value, np.ndarray):
            return *identity, value.shape, zlib.crc32(value.tobytes())
        return *identity, *(self.describe(part, depth - 1) for part in _list_parts(value) if depth)

    def _describe_tensor(self, tensor: Tensor) -> tuple[Any, ...]:
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            return (read_version(tensor), _find_storage(tensor) in self._written)
        place = (read_version(tensor), tensor.data_ptr(), tuple(tensor.shape))
        if self._is_light:
            return place
        rows = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        values = zlib.crc32(rows.reshape(-1).view(torch.uint8).numpy().data)
        return *place, values, _find_storage(tensor) in self._written


def _read_random_state(value: Any) -> Any:
    """Return the state of a source of random numbers; None for anything else."""
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    return None


def _list_parts(value: Any) -> list[Any]:
    """Return what a container or an object holds, without calling its class."""
    if isinstance(value, dict):
        return [part for pair in dict.items(value) for part in pair]
    for kind in (list, tuple, deque):
        if isinstance(value, kind):
            return list(cast(Any, kind).__iter__(value))
    if isinstance(value, (set, frozenset)):
        return sorted(map(id, value))
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return []
    return [part for pair in dict(held).items() for part in pair]
