"""The tensors of a model and of a batch, by the names that their user knows: parameters, buffers,
tensors that were never registered and so stay where they were made, and the entries of a batch. An
inventory holds words, never tensors; it reads no property of a foreign object.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

DEEPEST = 4  # containers and objects within one another
MOST = 1_000  # entries of a container that are looked at
VISITED = 20_000  # things that are looked at in all: some 0.1 s
_SKIPPED = (type, str, int, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
SPANNED = 2**20  # values whose least and largest are looked up
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

PARAMETER, BUFFER, PLAIN, LOOSE, ENTRY, VALUE = (
    "parameter",
    "buffer",
    "plain tensor",
    "unregistered",
    "entry",
    "value",
)


@dataclass(frozen=True)
class Seen:
    """A tensor, in words."""

    name: str  # as at the place where it was seen
    kind: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    known: str = ""  # the path of the same tensor in the model or in the batch, where it has one
    span: tuple[int, int] | None = None  # least and largest value, of whole numbers on the host

    @property
    def size(self) -> str:
        """The shape as Python writes it."""
        return str(self.shape)


@dataclass(frozen=True)
class Inventory:
    """All that has a name, in words; ids are those of objects that are alive now."""

    held: tuple[Seen, ...]  # of the model
    entries: tuple[Seen, ...]  # of the batch
    layers: dict[int, str]  # id of a module -> its path, "" for the model itself
    paths: dict[int, tuple[str, str]]  # id of a tensor -> kind and path
    storages: dict[int, str]  # key of a storage -> path of the entry, for views of one

    def seen(self, name: str, tensor: Tensor) -> Seen:
        """A tensor found under `name`, and who it is."""
        kind, path = self.paths.get(id(tensor), (VALUE, ""))
        if kind == VALUE and (key := _storage(tensor)) in self.storages:
            kind, path = ENTRY, self.storages[key]
        return _seen(name, tensor, kind=kind, known=path)

    def usual(self, of: str) -> str:
        """The device or dtype that most parameters have, or else the entries of the batch."""
        for group in (
            [one for one in self.held if one.kind in (PARAMETER, BUFFER)],
            list(self.entries),
        ):
            values = [getattr(one, of) for one in group]
            if of == "dtype":
                values = [value for value in values if "float" in value]
            if values:
                return Counter(values).most_common(1)[0][0]
        return ""


def inventory(model: nn.Module, batch: tuple[Any, Any]) -> Inventory:
    """What a model and a batch of (inputs, targets) hold."""
    modules = _modules(model, "")
    layers = {id(module): path for path, module in modules}
    tensors = list(_tensors(modules, layers))
    inputs, targets = batch
    entries = [*tensors_in("inputs", inputs), *tensors_in("targets", targets)]
    paths = {id(tensor): (kind, path) for path, kind, tensor in tensors}
    paths |= {id(tensor): (ENTRY, path) for path, tensor in entries}
    return Inventory(
        tuple(_seen(path, tensor, kind=kind, known=path) for path, kind, tensor in tensors),
        tuple(_seen(path, tensor, kind=ENTRY, known=path) for path, tensor in entries),
        layers,
        paths,
        {_storage(tensor): path for path, tensor in reversed(entries)},
    )


def tensors_in(path: str, value: Any, depth: int = DEEPEST) -> Iterator[tuple[str, Tensor]]:
    """The tensors in tuples, lists and mappings, with paths such as inputs['mask']."""
    if isinstance(value, Tensor):
        yield path, value
    elif depth and isinstance(value, Mapping):
        for key, inner in list(value.items())[:MOST]:
            yield from tensors_in(f"{path}[{key!r}]", inner, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for at, inner in enumerate(value[:MOST]):
            yield from tensors_in(f"{path}[{at}]", inner, depth - 1)


def unsaved(model: nn.Module) -> dict[str, Tensor]:
    """The tensors by their paths that a model holds, and its state_dict does not."""
    saved = model.state_dict().keys()
    held = _tensors(_modules(model, ""), {})
    return {path: tensor for path, _, tensor in held if path not in saved}


def held_by(thing: Any) -> dict[str, Any]:
    """An object's own attributes, without asking its class."""
    try:
        return object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}


def weights(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The layer's own parameters and buffers, without those of the layers in it."""
    for table in ("_parameters", "_buffers"):
        for name, tensor in vars(layer).get(table, {}).items():
            if isinstance(tensor, Tensor):
                yield name, tensor


def _tensors(
    modules: list[tuple[str, nn.Module]], layers: dict[int, str]
) -> Iterator[tuple[str, str, Tensor]]:
    """Path, kind and tensor: first what is registered, then what is not. Adds to `layers` those
    that are not registered."""
    seen: set[int] = set()
    for at, module in modules:
        for table, kind in (("_parameters", PARAMETER), ("_buffers", BUFFER)):
            for name, tensor in vars(module).get(table, {}).items():
                if isinstance(tensor, Tensor) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield _joined(at, name), kind, tensor
    own = ("_parameters", "_buffers", "_modules")
    rest = [
        (_joined(at, name), value, DEEPEST)
        for at, module in modules
        for name, value in vars(module).items()
        if name not in own
    ]
    yield from _loose(rest, seen, layers)


def _modules(model: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """The registered layers with their paths, each once, the outer ones first."""
    found: dict[int, tuple[str, nn.Module]] = {}
    waiting = deque([(path, model)])
    while waiting:
        at, one = waiting.popleft()
        if id(one) in found:
            continue
        found[id(one)] = (at, one)
        for name, inner in vars(one).get("_modules", {}).items():
            if isinstance(inner, nn.Module):
                # A compiled model wraps the one that its user knows.
                waiting.append((at if name == "_orig_mod" else _joined(at, name), inner))
    return list(found.values())


def _loose(
    waiting: list[tuple[str, Any, int]], seen: set[int], layers: dict[int, str]
) -> Iterator[tuple[str, str, Tensor]]:
    """Tensors that no parameter or buffer is, and those of layers that nothing registered."""
    queue = deque(waiting)
    for _ in range(VISITED):
        if not queue:
            return
        path, value, depth = queue.popleft()
        if id(value) in seen or id(value) in layers or isinstance(value, _SKIPPED):
            continue
        if isinstance(value, Tensor):
            seen.add(id(value))
            yield path, PLAIN, value
        elif isinstance(value, nn.Module):
            for at, module in _modules(value, path):
                layers.setdefault(id(module), at)
                for name, tensor in weights(module):
                    if id(tensor) not in seen:
                        seen.add(id(tensor))
                        yield _joined(layers[id(module)], name), LOOSE, tensor
        elif depth:
            seen.add(id(value))
            queue += [(at, inner, depth - 1) for at, inner in _inside(path, value)]


def _inside(path: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"{path}[{key!r}]", inner) for key, inner in islice(dict.items(value), MOST)]
    if isinstance(value, list | tuple):
        return [(f"{path}[{at}]", inner) for at, inner in enumerate(value[:MOST])]
    return [(_joined(path, name), inner) for name, inner in islice(held_by(value).items(), MOST)]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _seen(name: str, tensor: Tensor, *, kind: str, known: str) -> Seen:
    return Seen(
        name,
        kind,
        str(tensor.dtype).removeprefix("torch."),
        _shape(tensor),
        str(tensor.device),
        known,
        _span(tensor),
    )


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
