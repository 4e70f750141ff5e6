"""The model of a training as its processes hold it: whole, or each its share (train.parallel), and
whole again where one of them logs it. It imports what shares it out only for a run that asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from tasks.engine.distributed.parallel import Parallel
from tasks.engine.distributed.ranks import Ranks
from tasks.engine.memory import leaks
from tasks.engine.settings.run_config import TrainConfig
from tasks.engine.step.build import make_model
from tasks.engine.step.plan import Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def build_model_on_device(plan: Plan, ranks: Ranks) -> nn.Module:
    """Return the model on its device, whole or this rank's share of it. Raises ConfigError."""
    device, recompute = plan.torch_device, plan.settings.memory.recompute
    model = make_model(plan.settings.model, plan.data, device)
    if is_shared_out(plan.settings.train, ranks):
        from tasks.engine.distributed.sharding import sharded

        model = sharded(model, device=device, recompute=recompute)
        if (mesh := mesh_of(model)) is not None:
            leaks.keeps(mesh.mesh)  # in what PyTorch remembers of each operation
        return model
    if recompute:
        from tasks.engine.distributed.sharding import recomputed, units

        recomputed(units(model))
    return model


def is_shared_out(train: TrainConfig, ranks: Ranks) -> bool:
    return train.parallel == "fsdp" and not ranks.is_alone


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """What it is shared out over; None where it is whole."""
    mesh: DeviceMesh | None = getattr(next(model.parameters()), "device_mesh", None)
    return mesh


def share_steps(
    model: nn.Module, ranks: Ranks, *, device: torch.device, mark: Callable[[str], None]
) -> Parallel:
    """Return the model as a step of several processes calls it."""
    if mesh_of(model) is None:
        return Parallel(model, ranks, device=device, mark=mark)
    from tasks.engine.distributed.sharding import Sharded

    return Sharded(model, ranks, device=device, mark=mark)


def gather_whole(model: nn.Module, plan: Plan, ranks: Ranks) -> nn.Module:
    """Return the model with all its weights, on the lead; all ranks call it."""
    if mesh_of(model) is None:
        return model
    from tasks.engine.distributed.sharding import whole_state

    state = whole_state(model)
    if not ranks.is_lead:
        return model
    found = make_model(plan.settings.model, plan.data, plan.torch_device)
    found.load_state_dict(state)
    return found
