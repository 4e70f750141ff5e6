"""A model that is shared out among the ranks (FSDP2): each holds a part of every parameter, of its
gradient and of what the optimizer keeps for it, and gathers a block whole only while that computes.
It changes the model in place, before the optimizer is made, and refuses a parameter without rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from tasks.engine.distributed.parallel import Parallel
from tasks.engine.distributed.shards import full
from tasks.engine.settings.read_settings import ConfigError

UNCALLED = (nn.ModuleList, nn.ModuleDict)
# A smaller block would wait longer for its turn on the wire than its bytes take.
UNIT_BYTES = 64 * 1024


def sharded(model: nn.Module, *, device: torch.device, recompute: bool) -> nn.Module:
    """The same model, each of its parameters a DTensor of which this rank holds its rows. All ranks
    begin with the weights and buffers of the first. recompute: what a block's forward pass leaves
    is dropped, and made again for its backward.

    Blocks are gathered in the type of their parameters, and autocast stays around the forward pass:
    the arithmetic of one rank. FSDP's own policy would gather half the bytes, and run norms, sums
    and losses in bf16 too, or fail where a norm is given float32.

    Raises ConfigError for a parameter without rows.
    """
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise ConfigError(
                f"train.parallel: fsdp shares out rows, and {name} of the model is a single "
                "number; make it a vector of one, or choose ddp"
            )
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.contiguous()  # FSDP shares out rows, not channels last
        dist.broadcast(tensor.detach(), 0)
    found = units(model)
    if recompute:
        recomputed(found)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*found, model):
        fully_shard(module, mesh=mesh)
    for module in (*found, model):
        assert isinstance(module, FSDPModule)
        # What it is gathered into is made once: in an evaluation it would be fit for no training.
        module.unshard()
        module.reshard()
    # The root stays gathered for its backward pass: where none follows, parameters() would too.
    model.register_forward_hook(_shared_out_again)
    return model


class Sharded(Parallel):
    """Such a model as a step calls it, from the first one on together with the other ranks."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, gradients are those of this process, which keeps all of them and not its share;
        what blocks are gathered from is still waited for."""
        assert isinstance(self._model, FSDPModule)
        self._model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._model.set_requires_gradient_sync(True)

    def together(self) -> None:
        """It is."""


def units(model: nn.Module) -> list[nn.Module]:
    """The blocks that are gathered one at a time: what lists of modules hold, where it is large
    enough and shares no parameter with the rest. A block that is most of the model is looked
    into."""
    users, whole = _users(model), _bytes(model)

    def found(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            is_unit = (
                isinstance(module, (*UNCALLED, nn.Sequential))
                and not isinstance(child, UNCALLED)
                and _bytes(child) >= UNIT_BYTES
                and all(users[p] == count for p, count in _users(child).items())
            )
            inner = [] if is_unit and _bytes(child) <= whole / 2 else list(found(child))
            yield from inner or [child] * is_unit

    return list(dict.fromkeys(found(model)))


def recomputed(modules: list[nn.Module]) -> None:
    """From here on they keep their inputs alone for the backward pass, and compute again."""
    for module in modules:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """On the first rank its state_dict, whole and on the host; empty on the others. Collective."""
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        gathered = full(tensor)  # one at a time: a device need not hold them all
        if dist.get_rank() == 0:
            state[name] = gathered.detach().to("cpu", copy=True)
    return state


def _shared_out_again(model: nn.Module, inputs: Any, outputs: Any) -> None:
    if not torch.is_grad_enabled():
        assert isinstance(model, FSDPModule)
        model.reshard()


def _users(module: nn.Module) -> Counter[int]:
    """How many names each parameter has in it, by id."""
    return Counter(id(p) for m in module.modules() for p in m._parameters.values() if p is not None)


def _bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())
