"""The layers of a model by their paths, such as "encoder.layers.3.attn": which modules they are,
and which tensors lie in them: parameters with their gradients and optimizer state, and buffers.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from headroom.base import nested

# What is put around a module, by the name under which that is held: by PyTorch's compiler, FSDP and
# its wrapper for checkpointed activations.
_WRAPPED = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_REPLICATING = {"DistributedDataParallel", "DataParallel"}  # they hold it as `module`
# The parameters and the tensors of their state, in pairs.
State = Iterable[tuple[Tensor, Tensor]]


class Layers:
    """The layers of these models. It holds the models, and none of their tensors."""

    def __init__(
        self, models: Sequence[nn.Module] = (), iterate_state: Callable[[], State] = tuple
    ) -> None:
        """models: of several, the paths begin with their classes. iterate_state: gives the state of
        their optimizers now."""
        self.paths: dict[int, str] = {}  # by the ids of the modules
        self._modules: list[tuple[str, nn.Module]] = []
        self._iterate_state = iterate_state
        inner = [_unwrap(model) for model in models]
        for name, model, own in zip(_name_models(inner), models, inner, strict=True):
            for path, module in own.named_modules(prefix=name):
                if id(module) not in self.paths:  # a model within another
                    self.paths[id(module)] = path = _drop_wrappers(path)
                    self._modules.append((path, module))
            self.paths.setdefault(id(model), name)

    def iterate_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are there now, each with the path of its layer."""
        paths: dict[int, str] = {}  # of the parameters; of one that is tied, the first
        for path, module in self._modules:
            for weight in module._parameters.values():
                if weight is None or id(weight) in paths:
                    continue
                paths[id(weight)] = path
                yield path, weight
                if weight.grad is not None:
                    yield path, weight.grad
            for buffer in module._buffers.values():
                if buffer is not None:
                    yield path, buffer
        for parameter, tensor in self._iterate_state():
            if id(parameter) in paths:
                yield paths[id(parameter)], tensor

    def find_failed(self, error: BaseException) -> str | None:
        """Return the path of the innermost layer that the error came from; None where it was in
        none."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        called = [one for one in frames if one.f_code is nn.Module._call_impl.__code__]
        paths = [self.paths.get(id(one.f_locals["self"])) for one in called]
        return next((path for path in reversed(paths) if path is not None), None)


def iterate_state(optimizers: Iterable[Optimizer]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tensors of these optimizers' states, each with its parameter."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for tensor in nested.find_tensors(state):
                yield parameter, tensor


def describe_layers(
    owners: Mapping[str, int], layers: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """Return the bytes of a peak by layer as JSON holds them, the largest layer first, and what is
    in no layer; empty where none is known."""
    if not layers:
        return {}
    inside: Counter[str] = Counter()
    for held in layers.values():
        inside.update(held)
    outside = {owner: size - inside[owner] for owner, size in owners.items()}
    return {
        "peak_bytes": sum(owners.values()),
        "owners": dict(owners),
        "layers": dict(sorted(layers.items(), key=lambda item: -sum(item[1].values()))),
        "outside": {owner: size for owner, size in outside.items() if size},
    }


def _name_models(models: Sequence[nn.Module]) -> list[str]:
    """Return what the paths of each model begin with: nothing, where there is only one."""
    if len(models) == 1:
        return [""]
    classes = [type(model).__name__ for model in models]
    names = []
    for at, name in enumerate(classes):
        number = classes[:at].count(name) + 1
        names.append(f"{name}-{number}" if classes.count(name) > 1 else name)
    return names


def _unwrap(model: nn.Module) -> nn.Module:
    while type(model).__name__ in _REPLICATING or hasattr(model, "_orig_mod"):
        model = next(model.children())
    return model


def _drop_wrappers(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _WRAPPED)
