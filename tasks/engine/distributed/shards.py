"""Functions on tensors that may be sharded among ranks (DTensor). A run of one rank calls them
too and imports nothing for it: torch.distributed.tensor would cost half a second.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor


def get_local_part(tensor: Tensor) -> Tensor:
    """Return the part of the tensor that this rank holds; of a DTensor, that which has the
    memory."""
    # Not to_local(), which autograd and dispatch modes would take for an operation.
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def gather_full(tensor: Tensor) -> Tensor:
    """Return the whole tensor. Collective, where it is sharded."""
    full_tensor = getattr(tensor, "full_tensor", None)
    return tensor if full_tensor is None else cast(Tensor, full_tensor())


def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that every rank has whole, sharded as `like` is; nothing is sent for
    it."""
    if not hasattr(like, "device_mesh") or hasattr(whole, "device_mesh"):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor  # imported already: see `like`

    assert isinstance(like, DTensor)
    there = whole.to(like.device)
    return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None)
