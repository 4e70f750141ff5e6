"""Which tensors are alive on a device, and how many bytes they hold: found through Python's
garbage collector, gradients and autograd graphs included. Bytes are counted once per storage, since
views share one. It only looks: no property of a foreign object is read, no hook is run, and fake,
meta, functorch and wrapper tensors, which hold no memory of their own, count nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor

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
class Live:
    """One way to reach a storage: a tensor, and what holds it where Python holds no reference."""

    tensor: Tensor
    storage: torch.UntypedStorage
    relation: str = ""  # or GRADIENT, SAVED
    of: Any = None  # the tensor whose gradient or graph it is, or the graph's top node

    @property
    def key(self) -> int:
        """Address of the storage's record; unique while the storage lives."""
        return self.storage._cdata

    @property
    def bytes(self) -> int:
        return self.storage.nbytes()


def live_tensors(device: torch.device) -> list[Live]:
    """Everything alive in this process that holds memory of the device, several per storage.

    Tensors, their gradients, and what the autograd graphs behind them saved for a backward. Not
    seen: memory that only C++ holds (library workspaces), and objects in gc.freeze().
    Costs one pass over all Python objects, some 0.05 s for half a million.
    """
    tensors, nodes = _found()
    # Overrides of __torch_function__ (lazy parameters raise in theirs) are not ours to run.
    with torch._C.DisableTorchFunction():
        lives = [Live(t, s) for t in tensors for s in storages_of(t)]
        for tensor in tensors:
            if (grad := _gradient(tensor)) is not None:
                lives += [Live(grad, s, GRADIENT, tensor) for s in storages_of(grad)]
        lives += _saved(tensors, nodes)
        return [live for live in lives if _on(live.storage, device)]


def unique_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each counted once; meta tensors count nothing."""
    with torch._C.DisableTorchFunction():
        sizes = {s._cdata: s.nbytes() for tensor in tensors for s in storages_of(tensor)}
    return sum(sizes.values())


def storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """The storages with real memory in them behind a tensor: one, a sparse tensor's, or none."""
    try:
        if tensor.layout in _SPARSE_PARTS:
            parts = [getattr(tensor, name)() for name in _SPARSE_PARTS[tensor.layout]]
            return [s for part in parts for s in storages_of(part)]
        storage = Tensor.untyped_storage(tensor)
        if storage.nbytes() == 0 or storage.device.type == "meta":
            return []
        # A wrapper subclass claims a storage's size but has no memory: its pointer is refused.
        if type(tensor) is not Tensor and storage.data_ptr() == 0:
            return []
    except RuntimeError:  # functorch, opaque and other tensors without a storage say so this way
        return []
    return [storage]


def _found() -> tuple[list[Any], list[Any]]:
    """All tensors and all autograd nodes. Asks for their classes only: isinstance() would read
    __class__, which proxies and mocks answer as they please."""
    things = gc.get_objects()
    tensor_classes = _with_subclasses([Tensor])
    # The nodes of C++ have no common base; each class has this attribute of its own.
    tops = [cls for cls in type.__subclasses__(object) if "next_functions" in vars(cls)]
    node_classes = _with_subclasses(tops)
    wanted = tensor_classes | node_classes
    # By id, all in C: a metaclass may make a class that cannot be hashed.
    picked = list(compress(things, map(wanted.__contains__, map(id, map(type, things)))))
    tensors = [thing for thing in picked if id(type(thing)) in tensor_classes]
    return tensors, [thing for thing in picked if id(type(thing)) in node_classes]


def _with_subclasses(classes: list[type]) -> set[int]:
    found: dict[int, type] = {}
    waiting = list(classes)
    while waiting:
        cls = waiting.pop()
        if id(cls) not in found:
            found[id(cls)] = cls
            waiting += type.__subclasses__(cls)
    return set(found)


def _on(storage: torch.UntypedStorage, device: torch.device) -> bool:
    here = storage.device
    return here.type == device.type and (device.index is None or here.index in (None, device.index))


def _gradient(tensor: Tensor) -> Tensor | None:
    try:
        return tensor.grad if tensor.is_leaf and tensor.requires_grad else None
    except RuntimeError:
        return None


def _saved(tensors: list[Any], nodes: list[Any]) -> list[Live]:
    """What autograd graphs keep for a backward pass, with the tensor whose graph it is."""
    lives: list[Live] = []
    seen: dict[int, Any] = {}  # holds the nodes, so that their ids stay theirs
    starts = [(tensor, node) for tensor in tensors if (node := _graph_of(tensor)) is not None]
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
            for tensor in _saved_by(node):
                lives += [Live(tensor, s, SAVED, origin) for s in storages_of(tensor)]
    return lives


def _graph_of(tensor: Tensor) -> Any:
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view whose history was made invalid refuses to tell
        return None


def _saved_by(node: Any) -> list[Tensor]:
    """Tensors a node saved, as they are: unpacking would run hooks, which may copy or recompute."""
    names = {n for cls in type(node).__mro__ for n in vars(cls) if n.startswith("_raw_saved_")}
    found: list[Tensor] = []
    for name in names:
        try:
            saved = getattr(node, name)
        except RuntimeError:  # freed by a backward pass
            continue
        for one in saved if isinstance(saved, (list, tuple)) else (saved,):
            data: Any = getattr(one, "data", None)
            if Tensor in type(data).__mro__:
                found.append(data)
    return found
