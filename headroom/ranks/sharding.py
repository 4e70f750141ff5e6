"""Models that several processes train together. With DistributedDataParallel each process has
the whole model, and gradients are averaged during the backward pass. With FSDP2 each holds a
part of every parameter, of its gradient and of its optimizer state, and gathers a block only
while that computes; the model is changed in place, before the optimizer is made, and a
parameter without rows is refused.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from headroom.base.nested import gather_full
from headroom.ranks.ranks import Ranks
from headroom.settings.read_settings import ConfigError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class ParallelModel:
    """A model under DistributedDataParallel, called like the model itself. At first it computes
    alone; after `together` its gradients are the mean over all ranks."""

    def __init__(
        self, model: nn.Module, ranks: Ranks, *, device: torch.device, mark: Callable[[str], None]
    ) -> None:
        """mark: called where the backward pass ends and only communication is left."""
        self._model, self._ranks, self._device, self._mark = model, ranks, device, mark
        self._together: DistributedDataParallel | None = None

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return (self._together or self._model)(*inputs, **named)

    def alone(self) -> AbstractContextManager[Any]:
        """Return a context in which gradients are those of this process, and no other is waited
        for."""
        return nullcontext() if self._together is None else self._together.no_sync()

    def together(self) -> None:
        """Average gradients from here on, and start with the weights of rank 0. Call it on all
        ranks after a backward pass, which shows the parameters that no loss reaches."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        mark = self._mark
        trained = [p for p in self._model.parameters() if p.requires_grad]
        has_unused = any(self._ranks.all_gather(any(p.grad is None for p in trained)))
        for parameter in trained:
            parameter.grad = None  # those to come lie in its buckets
        # Buffers of the lead are given to all before they are judged. PyTorch 2.13 has a new name.
        parameters = inspect.signature(DistributedDataParallel).parameters
        buffers = next(n for n in ("forward_sync_buffers", "broadcast_buffers") if n in parameters)
        together = cast(Any, DistributedDataParallel)(
            self._model,
            device_ids=None if self._device.type == "cpu" else [self._device],
            gradient_as_bucket_view=True,
            find_unused_parameters=has_unused,
            **{buffers: False},
        )

        if not has_unused:
            _order_buckets(together, trained)

        # It holds nothing that leads back to `together`: a garbage collection does not see through
        # PyTorch's reducer. It has no annotations: PyTorch compares them with classes, not names.
        def averaged(group, bucket):  # type: ignore[no-untyped-def]
            if bucket.is_last():
                mark("backward")
            return default_hooks.allreduce_hook(group, bucket)

        together.register_comm_hook(dist.group.WORLD, averaged)
        self._together = together


def _order_buckets(together: DistributedDataParallel, parameters: list[nn.Parameter]) -> None:
    """Have its buckets laid out for good, by a backward pass of zeros that ends with the first
    parameter. Else they are so after its first step, and a step that begins a training again from
    a checkpoint would add up the gradients of three ranks or more in another order."""
    zero = sum((parameter.reshape(-1)[:0].sum() for parameter in parameters), torch.zeros(()))
    together.reducer.prepare_for_backward([])
    zero.backward()
    for parameter in parameters:
        parameter.grad = None


UNCALLED = (nn.ModuleList, nn.ModuleDict)
# A smaller block would wait longer for its turn on the wire than its bytes take.
UNIT_BYTES = 64 * 1024


def shard_model(model: nn.Module, *, device: torch.device, recompute: bool) -> nn.Module:
    """Shard the model in place with FSDP2 and return it: each of its parameters becomes a DTensor,
    of which this rank holds its rows. All ranks begin with the weights and buffers of the first.
    recompute: what a block's forward pass leaves is dropped, and computed again for its backward.

    Blocks are gathered in the type of their parameters, and autocast stays around the forward pass:
    the arithmetic of one rank. FSDP's own policy would gather half the bytes, and run norms, sums
    and losses in bf16 too, or fail where a norm is given float32.

    Raises ConfigError for a parameter without rows.
    """
    # Here, since it brings DTensor and sympy: a second, in which most trainings have begun.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise ConfigError(
                f"train.parallel: fsdp shares out rows, and {name} of the model is a single "
                "number; make it a vector of one, or choose ddp"
            )
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.contiguous()  # FSDP shares out rows, not channels last
        dist.broadcast(tensor.detach(), 0)
    if recompute:
        recompute_activations(model)
    units = find_shard_units(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*units, model):
        fully_shard(module, mesh=mesh)
    for module in (*units, model):
        sharded = cast("FSDPModule", module)
        # What it is gathered into is made once: in an evaluation it would be fit for no training.
        sharded.unshard()
        sharded.reshard()
    # The root stays gathered for its backward pass: where none follows, parameters() would too.
    model.register_forward_hook(_reshard)
    return model


class ShardedModel(ParallelModel):
    """A sharded model as a step calls it; it works together with the other ranks from the first
    step on."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep the whole gradients of this process inside, instead of its share of the mean;
        gathering the parameters still waits for the other ranks."""
        model = cast("FSDPModule", self._model)
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def together(self) -> None:
        """Do nothing: a sharded model averages its gradients from the start."""


def find_shard_units(model: nn.Module) -> list[nn.Module]:
    """Return the blocks to gather one at a time: the modules in lists of modules that are large
    enough and share no parameter with the rest. A block that is most of the model is searched
    for blocks itself."""
    users, whole = _count_users(model), _count_bytes(model)

    def list_units(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            is_unit = (
                isinstance(module, (*UNCALLED, nn.Sequential))
                and not isinstance(child, UNCALLED)
                and _count_bytes(child) >= UNIT_BYTES
                and all(users[p] == count for p, count in _count_users(child).items())
            )
            inner = [] if is_unit and _count_bytes(child) <= whole / 2 else list(list_units(child))
            yield from inner or [child] * is_unit

    return list(dict.fromkeys(list_units(model)))


# Of transformers models, from version 5.23 on and before.
ENABLE = ("activation_checkpointing_enable", "gradient_checkpointing_enable")


def recompute_activations(model: nn.Module) -> None:
    """Make the blocks of the model keep only their inputs for the backward pass, and compute the
    rest again: by the method that transformers models have for it, since their blocks called twice
    would fill their cache twice. Raises ConfigError where there is neither."""
    enable = next((f for name in ENABLE if callable(f := getattr(model, name, None))), None)
    blocks, message = find_shard_units(model), ""
    if enable is not None:
        try:
            enable({"use_reentrant": False})
        except ValueError as error:
            message = str(error).rstrip(".")
    elif not blocks:
        message = (
            f"the model has no {ENABLE[1]}(), and no block of {UNIT_BYTES // 1024} KiB or more in "
            "an nn.Sequential or nn.ModuleList"
        )
    if message:
        raise ConfigError(
            f"memory.recompute: {message}; set it to false, or call torch.utils.checkpoint in "
            "forward"
        )
    for module in blocks if enable is None else ():
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def gather_full_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole state_dict on the host of the first rank; an empty one on the others.
    Collective."""
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        gathered = gather_full(tensor)  # one at a time: a device need not hold them all
        if dist.get_rank() == 0:
            state[name] = gathered.detach().to("cpu", copy=True)
    return state


def _reshard(model: nn.Module, inputs: Any, outputs: Any) -> None:
    if not torch.is_grad_enabled():
        cast("FSDPModule", model).reshard()


def _count_users(module: nn.Module) -> Counter[int]:
    """Count how many names each parameter has in the module, by id."""
    return Counter(id(p) for m in module.modules() for p in m._parameters.values() if p is not None)


def _count_bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())
