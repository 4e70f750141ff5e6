"""A model as several processes train it: DistributedDataParallel, by which each has all of it and
the gradients are averaged while the backward pass goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def replicated(
    model: nn.Module, *, device: torch.device, mark: Callable[[str], None]
) -> DistributedDataParallel:
    """The model, called so that its gradients become the mean over all ranks; all start with the
    weights of the first. mark: told where the backward pass ends and only communication is left.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    parallel = DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device],
        gradient_as_bucket_view=True,
        broadcast_buffers=False,  # those of the lead are given to all before they are judged
    )

    # Without annotations, since PyTorch compares them with its classes, and not with their names.
    def averaged(group, bucket):  # type: ignore[no-untyped-def]
        if bucket.is_last():
            mark("backward")
        return default_hooks.allreduce_hook(group, bucket)

    parallel.register_comm_hook(dist.group.WORLD, averaged)
    return parallel


def unsynchronized(model: nn.Module | None) -> AbstractContextManager[Any]:
    """Inside, gradients are those of this process alone, and no other is waited for."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
