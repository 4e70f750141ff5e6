"""The tensors of a model and of a batch, by the names that their user knows: parameters, buffers,
tensors that were never registered and so stay where they were made, and the entries of a batch. It
holds words, never tensors, and reads no property of a foreign object.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from tasks.engine.base import nested

DEEPEST = 4  # containers and objects within one another
MOST = 1_000  # entries of a container that are looked at
VISITED = 20_000  # things that are looked at in all: some 0.1 s
PARAMETER, BUFFER, PLAIN = "parameter", "buffer", "plain tensor"
LOOSE, ENTRY = "unregistered", "the batch's"
_REGISTERED = ("_parameters", "_buffers", "_modules")
_SKIPPED = (type, str, int, float, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


@dataclass(frozen=True)
class Seen:
    """A tensor, in words."""

    name: str  # as at the place where it was seen, "" where it has none there
    kind: str  # "" where it is none of the model's and the batch's
    known: str  # its path in the model or in the batch, where it has one
    is_made: bool  # of the one that is known
    dtype: str
    shape: tuple[int, ...]
    device: str

    def __str__(self) -> str:
        """By the name it has in the line, and by that of the batch or the model."""
        if self.known in ("", self.name):
            return self.name or "a tensor made there"
        known = "made of " * self.is_made + f"{self.kind} {self.known}"
        return f"{self.name} ({known})" if self.name else known


class Names:
    """All that has a name. The ids are those of objects that are alive while a failure is told."""

    def __init__(self, model: nn.Module, batch: tuple[Any, Any]) -> None:
        self.layers: dict[int, str] = {}  # id of a module -> its path, "" for the model itself
        self._made: Any = WeakTensorKeyDictionary()
        held = list(_held(model, self.layers))
        entries = [*nested.named(batch[0], "inputs"), *nested.named(batch[1], "targets")]
        self._known = {_storage(tensor): (ENTRY, path) for path, tensor in reversed(entries)}
        self._known |= {id(tensor): (kind, path) for kind, path, tensor in held}
        self._known |= {id(tensor): (ENTRY, path) for path, tensor in entries}
        self.held = [self.seen(path, tensor) for _, path, tensor in held]
        self.entries = [self.seen(path, tensor) for path, tensor in entries]

    def seen(self, name: str, tensor: Tensor) -> Seen:
        """A tensor found under `name`, and who it is; a view of an entry counts as that entry."""
        known = self._known.get(id(tensor)) or self._known.get(_storage(tensor))
        kind, path = known or self._made.get(tensor) or ("", "")
        try:
            shape = tuple(int(size) for size in tensor.shape)
        except RuntimeError:  # lazy parameters and nested tensors have none yet, or none at all
            shape = ()
        dtype, device = str(tensor.dtype).removeprefix("torch."), str(tensor.device)
        return Seen(name, kind, path, known is None, dtype, shape, device)

    def made(self, tensor: Tensor, given: Iterable[Tensor]) -> None:
        """Know a tensor as made of the first with a name that was given on its device."""
        seen = (self.seen("", one) for one in given if one.device == tensor.device)
        self._made[tensor] = next(((one.kind, one.known) for one in seen if one.kind), None)

    def usual(self, of: str) -> str:
        """The device or dtype that most parameters have, or else the entries of the batch."""
        registered = [one for one in self.held if one.kind in (PARAMETER, BUFFER)]
        values = [getattr(one, of) for one in registered or self.entries]
        return Counter(values).most_common(1)[0][0] if values else ""


def unsaved(model: nn.Module) -> dict[str, Tensor]:
    """The tensors by their paths that a model holds, and its state_dict does not."""
    saved = model.state_dict().keys()
    return {path: tensor for _, path, tensor in _held(model, {}) if path not in saved}


def reached(
    roots: Iterable[tuple[str, Any]], passed: set[int]
) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """The tensors and layers that variables lead to, the nearest first, with how each is reached:
    self.tables['shift']. passed: ids of what is left out, to which all that was visited is added.
    """
    queue = deque((path, value, DEEPEST) for path, value in roots)
    for _ in range(VISITED):
        if not queue:
            return
        path, value, depth = queue.popleft()
        if value is None or id(value) in passed or isinstance(value, _SKIPPED):
            continue
        passed.add(id(value))
        if isinstance(value, Tensor | nn.Module):
            yield path, value
        if depth and not isinstance(value, Tensor):
            queue += [(at, one, depth - 1) for at, one in islice(_inside(path, value), MOST)]


def _held(model: nn.Module, layers: dict[int, str]) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, path and tensor: first what is registered, then what is not. Adds to `layers`."""
    modules = list(model.named_modules())
    layers |= {id(module): _users(path) for path, module in modules}
    passed, loose = set(layers), set()
    for kind, table in ((PARAMETER, model.named_parameters()), (BUFFER, model.named_buffers())):
        for path, tensor in table:
            passed.add(id(tensor))
            yield kind, _users(path), tensor
    roots = [one for path, module in modules for one in _inside(_users(path), module, _REGISTERED)]
    for path, value in reached(roots, passed):
        if isinstance(value, nn.Module):
            layers[id(value)] = path
            loose.add(path)
        else:
            yield LOOSE if path.rpartition(".")[0] in loose else PLAIN, path, value


def _users(path: str) -> str:
    """A compiled model wraps the one that its user knows."""
    return path.replace("_orig_mod.", "").removesuffix("_orig_mod").rstrip(".")


def _inside(path: str, value: Any, without: Iterable[str] = ()) -> Iterator[tuple[str, Any]]:
    """What a container or an object holds, and how it is reached, without asking its class."""
    if isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", one) for key, one in dict.items(value))
    elif isinstance(value, list | tuple):
        yield from ((f"{path}[{at}]", one) for at, one in enumerate(value))
    else:
        try:
            held = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return
        # FSDP keeps a tuple under such a name, beside the modules that are its own.
        tables = [
            held[name]
            for name in _REGISTERED
            if isinstance(held.get(name), dict) and name not in without
        ]
        for table in (*tables, held):
            for name, one in table.items():
                is_empty = one is None or (isinstance(one, dict | list | tuple | set) and not one)
                if name not in _REGISTERED and not is_empty:
                    yield f"{path}.{name}".lstrip("."), one


def _storage(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        try:
            return Tensor.untyped_storage(tensor)._cdata
        except RuntimeError:  # sparse tensors have none
            return id(tensor)
