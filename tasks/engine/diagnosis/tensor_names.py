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

from tasks.engine.base import nested

DEEPEST = 4  # containers and objects within one another
MOST = 1_000  # entries of a container that are looked at
VISITED = 20_000  # things that are looked at in all: some 0.1 s
_SKIPPED = (type, str, int, float, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_REGISTERED = ("_parameters", "_buffers", "_modules")
SPANNED = 2**20  # values whose least and largest are looked up
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
PARAMETER, BUFFER, PLAIN, LOOSE, ENTRY = (
    "parameter",
    "buffer",
    "plain tensor",
    "unregistered",
    "entry",
)


@dataclass(frozen=True)
class Seen:
    """A tensor, in words."""

    name: str  # as at the place where it was seen, "" where it has none there
    kind: str  # "" where it is none of the model's and the batch's
    known: str  # its path in the model or in the batch, where it has one
    dtype: str
    shape: tuple[int, ...]
    device: str
    span: tuple[int, int] | None  # least and largest value, of whole numbers on the host

    def __str__(self) -> str:
        """By the name it has in the line, and by that of the batch or the model."""
        if self.known in ("", self.name):
            return self.name or "a tensor made there"
        whose = "the batch's" if self.kind == ENTRY else self.kind
        return f"{self.name} ({whose} {self.known})"


class Names:
    """All that has a name. The ids are those of objects that are alive while a failure is told."""

    def __init__(self, model: nn.Module, batch: tuple[Any, Any]) -> None:
        self.layers: dict[int, str] = {}  # id of a module -> its path, "" for the model itself
        held = list(_held(model, self.layers))
        entries = [*nested.named(batch[0], "inputs"), *nested.named(batch[1], "targets")]
        self._paths = {id(tensor): (kind, path) for kind, path, tensor in held}
        self._paths |= {id(tensor): (ENTRY, path) for path, tensor in entries}
        self._storages = {_storage(tensor): (ENTRY, path) for path, tensor in reversed(entries)}
        self.held = [self.seen(path, tensor) for _, path, tensor in held]
        self.entries = [self.seen(path, tensor) for path, tensor in entries]

    def seen(self, name: str, tensor: Tensor) -> Seen:
        """A tensor found under `name`, and who it is; a view of an entry counts as that entry."""
        kind, path = self._paths.get(id(tensor)) or self._storages.get(_storage(tensor), ("", ""))
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Seen(name, kind, path, dtype, _shape(tensor), str(tensor.device), _span(tensor))

    def usual(self, of: str) -> str:
        """The device or dtype that most parameters have, or else the entries of the batch."""
        registered = [one for one in self.held if one.kind in (PARAMETER, BUFFER)]
        for group in (registered, self.entries):
            if values := [value for one in group if (value := getattr(one, of))]:
                return Counter(values).most_common(1)[0][0]
        return ""


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
        if id(value) in passed or isinstance(value, _SKIPPED):
            continue
        passed.add(id(value))
        if isinstance(value, Tensor | nn.Module):
            yield path, value
        if depth and not isinstance(value, Tensor):
            inside = islice(_inside(path, value), MOST)
            queue += [(at, one, depth - 1) for at, one in inside if not _is_empty(one)]


def _held(model: nn.Module, layers: dict[int, str]) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, path and tensor: first what is registered, then what is not. Adds to `layers`."""
    modules = list(model.named_modules())
    # A compiled model wraps the one that its user knows.
    layers |= {
        id(module): path.replace("_orig_mod.", "").removesuffix("_orig_mod").rstrip(".")
        for path, module in modules
    }
    passed = set(layers)
    for _, module in modules:
        for kind, name, tensor in weights(module):
            if id(tensor) not in passed:
                passed.add(id(tensor))
                yield kind, _joined(layers[id(module)], name), tensor
    roots = [
        (_joined(layers[id(module)], name), value)
        for _, module in modules
        for name, value in vars(module).items()
        if name not in _REGISTERED and not _is_empty(value)
    ]
    loose = set()
    for path, value in reached(roots, passed):
        if isinstance(value, nn.Module):
            layers[id(value)] = path
            loose.add(path)
        else:
            yield LOOSE if path.rpartition(".")[0] in loose else PLAIN, path, value


def weights(layer: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, name and tensor of the layer's own, without those of the layers in it."""
    for table, kind in (("_parameters", PARAMETER), ("_buffers", BUFFER)):
        for name, tensor in vars(layer).get(table, {}).items():
            if isinstance(tensor, Tensor):
                yield kind, name, tensor


def _inside(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", inner) for key, inner in dict.items(value))
    elif isinstance(value, list | tuple):
        yield from ((f"{path}[{at}]", inner) for at, inner in enumerate(value))
    else:
        try:  # an object's own attributes, without asking its class
            held = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return
        tables = (
            [held.get(name, {}) for name in _REGISTERED] if isinstance(value, nn.Module) else []
        )
        for table in (*tables, held):
            yield from ((_joined(path, n), v) for n, v in table.items() if n not in _REGISTERED)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, dict | list | tuple | set) and len(value) == 0)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shape(tensor: Tensor) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in tensor.shape)
    except RuntimeError:  # lazy parameters and nested tensors have none yet, or none at all
        return ()


def _span(tensor: Tensor) -> tuple[int, int] | None:
    """Only on the host: a device that failed is not asked."""
    is_here = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.dtype in WHOLE
    if not is_here or not 0 < tensor.numel() <= SPANNED:
        return None
    try:
        values = tensor.numpy()
    except (RuntimeError, AssertionError):  # a mode of fake tensors, or of functorch, refuses
        return None
    return int(values.min()), int(values.max())


def _storage(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        try:
            return Tensor.untyped_storage(tensor)._cdata
        except RuntimeError:  # sparse tensors have none
            return id(tensor)
