"""What is asked of tensors that may be shared out among ranks. A run of one rank
asks it too and imports nothing for it: torch.distributed.tensor would cost half a second.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it: of a DTensor its own part, which has the memory."""
    # Not to_local(), which autograd and dispatch modes would take for an operation.
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def full(tensor: Tensor) -> Tensor:
    """All of it. Collective, where it is shared out."""
    full_tensor = getattr(tensor, "full_tensor", None)
    return tensor if full_tensor is None else cast(Tensor, full_tensor())


def placed(whole: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has whole, shared out as `like` is; nothing is sent for it."""
    if not hasattr(like, "device_mesh") or hasattr(whole, "device_mesh"):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor  # imported already: see `like`

    assert isinstance(like, DTensor)
    there = whole.to(like.device)
    return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None)
