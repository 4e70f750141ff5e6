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

from headroom.base import nested

DEEPEST = 4  # containers and objects within one another
MOST = 1_000  # entries of a container that are looked at
VISITED = 20_000  # things that are looked at in all: some 0.1 s
PARAMETER, BUFFER, PLAIN = "parameter", "buffer", "plain tensor"
LOOSE, ENTRY = "unregistered", "the batch's"
_REGISTERED = ("_parameters", "_buffers", "_modules")
_SKIPPED = (type, str, int, float, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


@dataclass(frozen=True)
class NamedTensor:
    """A tensor, in words."""

    name: str  # as at the place where it was seen, "" where it has none there
    kind: str  # "" where it is none of the model's and the batch's
    path: str  # its name in the model or in the batch, where it has one
    is_made: bool  # of the one that is known
    dtype: str
    shape: tuple[int, ...]
    device: str

    def __str__(self) -> str:
        """Return the name it has in the line, and that of the batch or the model."""
        if self.path in ("", self.name):
            return self.name or "a tensor made there"
        words = "made of " * self.is_made + f"{self.kind} {self.path}"
        return f"{self.name} ({words})" if self.name else words


class TensorNames:
    """The names of all tensors of a model and a batch. Ids are those of objects that are alive
    while a failure is explained."""

    def __init__(self, model: nn.Module, batch: tuple[Any, Any]) -> None:
        self.layers: dict[int, str] = {}  # id of a module -> its path, "" for the model itself
        self._made: Any = WeakTensorKeyDictionary()
        held = list(_find_model_tensors(model, self.layers))
        entries = [
            *nested.find_named_tensors(batch[0], "inputs"),
            *nested.find_named_tensors(batch[1], "targets"),
        ]
        self._names = {_get_storage_id(tensor): (ENTRY, path) for path, tensor in reversed(entries)}
        self._names |= {id(tensor): (kind, path) for kind, path, tensor in held}
        self._names |= {id(tensor): (ENTRY, path) for path, tensor in entries}
        self.held = [self.name_tensor(path, tensor) for _, path, tensor in held]
        self.entries = [self.name_tensor(path, tensor) for path, tensor in entries]

    def name_tensor(self, name: str, tensor: Tensor) -> NamedTensor:
        """Return the words for a tensor found under `name`; a view of an entry counts as that
        entry."""
        known_name = self._names.get(id(tensor)) or self._names.get(_get_storage_id(tensor))
        kind, path = known_name or self._made.get(tensor) or ("", "")
        try:
            shape = tuple(int(size) for size in tensor.shape)
        except RuntimeError:  # lazy parameters and nested tensors have none yet, or none at all
            shape = ()
        dtype, device = str(tensor.dtype).removeprefix("torch."), str(tensor.device)
        return NamedTensor(name, kind, path, known_name is None, dtype, shape, device)

    def record_tensor(self, tensor: Tensor, sources: Iterable[Tensor]) -> None:
        """Record that a tensor was made from the first named tensor among `sources` on its
        device."""
        seen = (self.name_tensor("", one) for one in sources if one.device == tensor.device)
        self._made[tensor] = next(((one.kind, one.path) for one in seen if one.kind), None)

    def find_usual(self, of: str) -> str:
        """Return the device or dtype that most parameters have, or else the entries of the
        batch."""
        registered = [one for one in self.held if one.kind in (PARAMETER, BUFFER)]
        values = [getattr(one, of) for one in registered or self.entries]
        return Counter(values).most_common(1)[0][0] if values else ""


def find_unsaved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors, by their paths, that a model holds and its state_dict does not."""
    saved = model.state_dict().keys()
    return {path: tensor for _, path, tensor in _find_model_tensors(model, {}) if path not in saved}


def find_reachable(
    roots: Iterable[tuple[str, Any]], passed: set[int]
) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Yield the tensors and layers that variables lead to, the nearest first, with how each is
    reached: self.tables['shift'].

    passed: ids of what is left out, to which all that was visited is added.
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
            queue += [(at, one, depth - 1) for at, one in islice(_list_contents(path, value), MOST)]


def _find_model_tensors(
    model: nn.Module, layers: dict[int, str]
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield kind, path and tensor: first what is registered, then what is not. Adds to `layers`."""
    modules = list(model.named_modules())
    layers |= {id(module): _strip_compiled_prefix(path) for path, module in modules}
    passed, loose = set(layers), set()
    for kind, table in ((PARAMETER, model.named_parameters()), (BUFFER, model.named_buffers())):
        for path, tensor in table:
            passed.add(id(tensor))
            yield kind, _strip_compiled_prefix(path), tensor
    roots = [
        one
        for path, module in modules
        for one in _list_contents(_strip_compiled_prefix(path), module, _REGISTERED)
    ]
    for path, value in find_reachable(roots, passed):
        if isinstance(value, nn.Module):
            layers[id(value)] = path
            loose.add(path)
        else:
            yield LOOSE if path.rpartition(".")[0] in loose else PLAIN, path, value


def _strip_compiled_prefix(path: str) -> str:
    """Return the path in the user's model, which a compiled model wraps."""
    return path.replace("_orig_mod.", "").removesuffix("_orig_mod").rstrip(".")


def _list_contents(path: str, value: Any, without: Iterable[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield what a container or an object holds, and how it is reached, without calling its
    class."""
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


def _get_storage_id(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        try:
            return Tensor.untyped_storage(tensor)._cdata
        except RuntimeError:  # sparse tensors have none
            return id(tensor)
