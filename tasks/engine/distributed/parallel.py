"""A model as several processes train it: DistributedDataParallel, by which each has all of it and
the gradients are averaged while the backward pass goes on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tasks.engine.distributed.ranks import Ranks


class Parallel:
    """The model, called like itself. At first it is alone; once `together` was called its gradients
    become the mean over all ranks."""

    def __init__(
        self, model: nn.Module, ranks: Ranks, *, device: torch.device, mark: Callable[[str], None]
    ) -> None:
        """mark: told where the backward pass ends and only communication is left."""
        self._model, self._ranks, self._device, self._mark = model, ranks, device, mark
        self._together: DistributedDataParallel | None = None

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return (self._together or self._model)(*inputs, **named)

    def alone(self) -> AbstractContextManager[Any]:
        """Inside, gradients are those of this process, and no other is waited for."""
        return nullcontext() if self._together is None else self._together.no_sync()

    def together(self) -> None:
        """From here on gradients are averaged, and all start with the weights of the lead. Call it
        on all ranks after a backward pass, which shows the parameters that no loss reaches."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        mark = self._mark
        trained = [p for p in self._model.parameters() if p.requires_grad]
        has_unused = any(self._ranks.all_of(any(p.grad is None for p in trained)))
        for parameter in trained:
            parameter.grad = None  # those to come lie in its buckets
        # Buffers of the lead are given to all before they are judged. PyTorch 2.13 has a new name.
        known = inspect.signature(DistributedDataParallel).parameters
        buffers = next(n for n in ("forward_sync_buffers", "broadcast_buffers") if n in known)
        together = cast(Any, DistributedDataParallel)(
            self._model,
            device_ids=None if self._device.type == "cpu" else [self._device],
            gradient_as_bucket_view=True,
            find_unused_parameters=has_unused,
            **{buffers: False},
        )

        # It holds nothing that leads back to `together`: a garbage collection does not see through
        # PyTorch's reducer. It has no annotations: PyTorch compares them with classes, not names.
        def averaged(group, bucket):  # type: ignore[no-untyped-def]
            if bucket.is_last():
                mark("backward")
            return default_hooks.allreduce_hook(group, bucket)

        together.register_comm_hook(dist.group.WORLD, averaged)
        self._together = together
