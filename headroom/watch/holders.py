"""Find which tensors are alive on a device, how many bytes they hold, and who holds an object,
in words a person can act on: "list in module my_hooks, name 'kept'"; and which list it is that has
a tensor of each step. Tensors are found through Python's garbage collector, gradients and autograd
graphs included; bytes are counted once per storage, since views share one. Fake, meta, functorch
and wrapper tensors, which hold no memory of their own, count nothing. Objects are only read: no
property of a foreign object is called, no hook is run, and no reference is kept.
"""

from __future__ import annotations

import gc
import inspect
import sys
import types
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

GRADIENT = "gradient"
SAVED = "saved for a backward"
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


@dataclass(frozen=True, eq=False, slots=True)
class LiveTensor:
    """One way to reach a storage: a tensor, and its relation to an object (`of`) where Python
    holds no reference."""

    tensor: Tensor
    storage: torch.UntypedStorage
    relation: str = ""  # or GRADIENT, SAVED
    of: Any = None  # the tensor whose gradient or graph it is, or the graph's top node

    @property
    def key(self) -> int:
        """Return the address of the storage's record; unique while the storage lives."""
        return self.storage._cdata

    @property
    def bytes(self) -> int:
        return self.storage.nbytes()


def find_live_tensors(device: torch.device) -> list[LiveTensor]:
    """Return everything alive in this process that holds memory of the device, several per storage.

    Tensors, their gradients, and what the autograd graphs behind them saved for a backward. Not
    seen: memory that only C++ holds (library workspaces), and objects in gc.freeze(). Costs one
    pass over all Python objects, some 0.05 s for half a million.
    """
    tensors, nodes = _find_objects()
    # Overrides of __torch_function__ (lazy parameters raise in theirs) are not ours to run.
    with torch._C.DisableTorchFunction():
        lives = [LiveTensor(t, s) for t in tensors for s in find_storages(t)]
        for tensor in tensors:
            if (grad := _get_gradient(tensor)) is not None:
                lives += [LiveTensor(grad, s, GRADIENT, tensor) for s in find_storages(grad)]
        lives += _find_saved(tensors, nodes)
        return [live for live in lives if _is_on_device(live.storage, device)]


def find_storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Return the storages with real memory behind a tensor: one, a sparse tensor's several, or
    none."""
    try:
        if tensor.layout in _SPARSE_PARTS:
            parts = [getattr(tensor, name)() for name in _SPARSE_PARTS[tensor.layout]]
            return [s for part in parts for s in find_storages(part)]
        storage = Tensor.untyped_storage(tensor)
        if storage.nbytes() == 0 or storage.device.type == "meta":
            return []
        # A wrapper subclass claims a storage's size but has no memory: its pointer is refused.
        if type(tensor) is not Tensor and storage.data_ptr() == 0:
            return []
    except RuntimeError:  # functorch, opaque and other tensors without a storage say so this way
        return []
    return [storage]


def _find_objects() -> tuple[list[Any], list[Any]]:
    """Return all tensors and all autograd nodes. Only type() is used: isinstance() would read
    __class__, which proxies and mocks answer as they please."""
    things = gc.get_objects()
    tensor_classes = _find_subclass_ids([Tensor])
    # The nodes of C++ have no common base; each class has this attribute of its own.
    tops = [cls for cls in type.__subclasses__(object) if "next_functions" in vars(cls)]
    node_classes = _find_subclass_ids(tops)
    wanted = tensor_classes | node_classes
    # By id, all in C: a metaclass may make a class that cannot be hashed.
    picked = list(compress(things, map(wanted.__contains__, map(id, map(type, things)))))
    tensors = [thing for thing in picked if id(type(thing)) in tensor_classes]
    return tensors, [thing for thing in picked if id(type(thing)) in node_classes]


def _find_subclass_ids(classes: list[type]) -> set[int]:
    subclasses: dict[int, type] = {}
    waiting = list(classes)
    while waiting:
        cls = waiting.pop()
        if id(cls) not in subclasses:
            subclasses[id(cls)] = cls
            waiting += type.__subclasses__(cls)
    return set(subclasses)


def _is_on_device(storage: torch.UntypedStorage, device: torch.device) -> bool:
    here = storage.device
    return here.type == device.type and (device.index is None or here.index in (None, device.index))


def _get_gradient(tensor: Tensor) -> Tensor | None:
    try:
        return tensor.grad if tensor.is_leaf and tensor.requires_grad else None
    except RuntimeError:
        return None


def _find_saved(tensors: list[Any], nodes: list[Any]) -> list[LiveTensor]:
    """Return what autograd graphs keep for a backward pass, with the tensor whose graph it is."""
    lives: list[LiveTensor] = []
    seen: dict[int, Any] = {}  # holds the nodes, so that their ids stay theirs
    starts = [(tensor, node) for tensor in tensors if (node := _get_graph(tensor)) is not None]
    starts += [(node, node) for node in nodes]
    # The latest first: it stands at the top of its graph, and is why the rest is alive.
    starts.sort(key=lambda start: -start[1]._sequence_nr())
    for origin, start in starts:
        stack = [start]
        while stack:
            node = stack.pop()
            if node is None or id(node) in seen:
                continue
            seen[id(node)] = node
            stack += [next_node for next_node, _ in node.next_functions]
            for tensor in _read_saved(node):
                lives += [LiveTensor(tensor, s, SAVED, origin) for s in find_storages(tensor)]
    return lives


def _get_graph(tensor: Tensor) -> Any:
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view whose history was made invalid refuses to tell
        return None


def _read_saved(node: Any) -> list[Tensor]:
    """Return the tensors that a node saved, as they are: unpacking would run hooks, which may
    copy or recompute."""
    names = {n for cls in type(node).__mro__ for n in vars(cls) if n.startswith("_raw_saved_")}
    tensors: list[Tensor] = []
    for name in names:
        try:
            saved = getattr(node, name)
        except RuntimeError:  # freed by a backward pass
            continue
        for one in saved if isinstance(saved, (list, tuple)) else (saved,):
            data: Any = getattr(one, "data", None)
            if Tensor in type(data).__mro__:
                tensors.append(data)
    return tensors


MOST_STEPS = (
    12  # up, three for a layer in another; each costs a pass over all Python objects, some 0.05 s
)
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")  # of an nn.Module: not worth a word


@dataclass(frozen=True, eq=False, slots=True)
class HolderStep:
    """One holder in words. rank: the lower, the more informative; above: the object whose
    holder comes next."""

    words: str
    rank: int
    above: Any = None  # None: has a name, climb no further


class Holders:
    """Names the holders of objects by a short chain of referrers. Discard it at once, since ids
    are reused."""

    def __init__(self, ours: Iterable[type] = ()) -> None:
        # `ours`: classes of the caller's own records, which hold the object only to look at it.
        self._ours = (*ours, HolderStep)
        self._locals = _find_running_locals()
        self._steps: dict[int, list[HolderStep]] = {}

    def find_holder(self, thing: Any) -> str | None:
        """Return who holds `thing`, from near to far; None where no Python object does."""
        words: list[str] = []
        above, seen = thing, {id(thing)}
        while above is not None and len(seen) <= MOST_STEPS:
            steps = self._find_steps(above)
            step = next((s for s in steps if s.above is None or id(s.above) not in seen), None)
            if step is None:
                break
            _join(words, step.words)
            above = step.above
            seen |= {id(above), id(_read_attributes(above))}
        return " in ".join(words) or None

    def _find_steps(self, thing: Any) -> list[HolderStep]:
        """Return the holders, the most informative first; remembered, since the parts of a
        model share them from the second on."""
        if id(thing) not in self._steps:
            steps = []
            # A plain loop: a comprehension would hold `thing` in a closure of ours, and find it.
            for holder in gc.get_referrers(thing):
                step = None if type(holder) in self._ours else _describe(holder, thing)
                if step is not None:
                    steps.append(step)
            if id(thing) in self._locals:
                steps.append(HolderStep(self._locals[id(thing)], rank=1))
            self._steps[id(thing)] = sorted(steps, key=lambda step: step.rank)
        return self._steps[id(thing)]


def _describe(holder: Any, thing: Any) -> HolderStep | None:
    kind = type(holder)
    if kind is types.ModuleType:
        return None  # its names are a dict, and named there
    if kind is types.FrameType:
        return _describe_frame(holder, thing)
    if kind is types.FunctionType:
        if holder.__code__.co_filename == __file__ or thing is holder.__globals__:
            return None
        place = _describe_place(holder.__code__, holder.__code__.co_firstlineno)
        return HolderStep(f"function {place}", rank=3, above=holder)
    if type in kind.__mro__:
        return HolderStep(f"of class {holder.__module__}.{holder.__qualname__}", rank=0)
    if dict in kind.__mro__:
        return _describe_dict(holder, thing)
    return _describe_object(holder, thing)


def _describe_dict(holder: dict[Any, Any], thing: Any) -> HolderStep:
    key = next((key for key, value in list(dict.items(holder)) if value is thing), None)
    module = dict.get(holder, "__name__") if type(holder) is dict else None
    if type(module) is str and "__spec__" in holder and "__loader__" in holder:
        return HolderStep(f"module {module}, name {_quote(key)}", rank=0)
    return HolderStep(f"dict, key {_quote(key)}", rank=4, above=holder)


def _describe_frame(holder: types.FrameType, thing: Any) -> HolderStep | None:
    """Of a function that has ended and is kept, as by a traceback."""
    if holder.f_code.co_filename == __file__:
        return None
    name = next((name for name, value in _copy_locals(holder).items() if value is thing), None)
    if name is None:  # the frame that it called, or its globals
        return None
    place = _describe_place(holder.f_code, holder.f_lineno)
    return HolderStep(f"local {_quote(name)} of the kept frame {place}", rank=2, above=holder)


def _describe_object(holder: Any, thing: Any) -> HolderStep:
    """Any other object: by attribute, where it has one of its own that is the thing."""
    kind, attributes = type(holder).__name__, _read_attributes(holder)
    if attributes is None:
        return HolderStep(kind, rank=5, above=holder)
    if thing is attributes:
        return HolderStep(f"of {kind}", rank=3, above=holder)
    name = next((name for name, value in list(attributes.items()) if value is thing), None)
    words = kind if name is None else f"attribute {_quote(name)} of {kind}"
    return HolderStep(words, rank=3, above=holder)


def _read_attributes(holder: Any) -> dict[str, Any] | None:
    try:
        attributes = object.__getattribute__(holder, "__dict__")
    except (AttributeError, TypeError):
        return None
    return attributes if type(attributes) is dict else None


def _join(words: list[str], more: str) -> None:
    """Add a step. An object and its __dict__ are one: "dict, key 'a'", "of Model" becomes
    "attribute 'a' of Model", and "'weight' of Linear" for the parts of an nn.Module."""
    prefix = "dict, key "
    if more.startswith("of "):
        if not words or not words[-1].startswith(prefix):
            more = more.removeprefix("of ")
        else:
            key = words.pop().removeprefix(prefix)
            if key.strip("'") in _MODULE_PARTS and words and words[-1].startswith(prefix):
                more = f"{words.pop().removeprefix(prefix)} {more}"
            else:
                more = f"attribute {key} {more}"
    elif words and words[-1].startswith(prefix) and more.startswith("attribute "):
        # From Python 3.13 on an object holds what its __dict__ does.
        key, _, of = more.removeprefix("attribute ").partition(" of ")
        if key.strip("'") in _MODULE_PARTS:
            more = f"{words.pop().removeprefix(prefix)} of {of}"
    if more != "traceback" or words[-1:] != [more]:  # those of several frames hold each other
        words.append(more)


def _find_running_locals() -> dict[int, str]:
    """Return the names of the locals of this thread's running functions, by the id of their
    values."""
    names: dict[int, str] = {}
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename != __file__ and frame.f_code.co_name != "<module>":
            place = _describe_place(frame.f_code, frame.f_lineno)
            for name, value in _copy_locals(frame).items():
                names.setdefault(id(value), f"local {_quote(name)} of function {place}")
        frame = frame.f_back
    return names


def _copy_locals(frame: types.FrameType) -> dict[str, Any]:
    """Return a copy of a frame's locals without leaving one behind.

    Before Python 3.13 f_locals is a dict that stays in the frame and would keep, until the
    function ends, what the function itself releases: a leak made by looking for one.
    """
    snapshot = frame.f_locals
    copied = dict(snapshot)
    is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    # 3 references: the frame's, ours, the call's. One more, and someone uses what locals() gave.
    if sys.version_info < (3, 13) and is_function and sys.getrefcount(snapshot) <= 3:
        snapshot.clear()
    return copied


def _describe_place(code: types.CodeType, line: int | None) -> str:
    name = code.co_filename.replace("\\", "/").rsplit("/", 1)[-1]
    return f"{code.co_qualname} ({name}:{line})"


def _quote(key: Any) -> str:
    if type(key) in (int, bool, float):
        return repr(key)
    return repr(key[:80]) if type(key) is str else type(key).__name__


_NAMES = ("attribute ", "local ", "module ", "of class ")


@dataclass(frozen=True)
class GrowingList:
    """A list, a deque or a dict by step that has a tensor of many steps."""

    holder: str  # in words: "list in module __main__, name 'history'"
    tensors: int
    shape: tuple[int, ...]  # of the last one
    has_graphs: bool


def find_growing_list(least: int) -> GrowingList | None:
    """Return the one whose tensors are the most bytes, of those with at least so many entries; None
    where there is none, or nobody knows its name. Costs one pass over all Python objects, some
    0.05 s for half a million."""
    best: Any = None
    most = 0
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in (list, deque, dict) or len(thing) < least:
            continue
        tensors = _find_tensors(_get_last(thing))
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors) * len(thing)
        if size > most:
            best, most = thing, size
    if best is None:
        return None
    holder = Holders().find_holder(best)
    last = _find_tensors(_get_last(best))
    if holder is None or not last:
        return None
    words = holder.split(" in ")  # what holds its holder is not asked for
    named = next((at for at, word in enumerate(words) if word.startswith(_NAMES)), len(words))
    return GrowingList(
        " in ".join([type(best).__name__, *words[: named + 1]]),
        len(best) * len(last),
        tuple(last[0].shape),
        any(tensor.requires_grad and not tensor.is_leaf for tensor in last),
    )


def _get_last(thing: Any) -> Any:
    if type(thing) is not dict:
        return thing[-1]
    key = next(reversed(thing))
    return thing[key] if type(key) is int else None  # one by name is no history


def _find_tensors(entry: Any) -> list[Tensor]:
    """Return the tensors of an entry: itself, or those of a tuple, list or dict. Parameters are
    what a model keeps, not what a loop does."""
    kind = type(entry)
    parts = entry.values() if kind is dict else entry if kind in (tuple, list) else (entry,)
    tensors = [part for part in parts if Tensor in type(part).__mro__]
    return [tensor for tensor in tensors if nn.Parameter not in type(tensor).__mro__]
