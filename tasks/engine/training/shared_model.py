"""The model of a training as its processes hold it: whole, or each its share (train.parallel), and
whole again where one of them logs it. It imports what shares it out only for a run that asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from tasks.engine.base.facts import DataFacts
from tasks.engine.distributed.parallel import Parallel
from tasks.engine.distributed.ranks import Ranks
from tasks.engine.memory import leaks
from tasks.engine.settings.run_config import RunConfig
from tasks.engine.step.build import model_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def held(config: RunConfig, data: DataFacts, device: torch.device, ranks: Ranks) -> nn.Module:
    """The model on its device, as the settings ask. Raises ConfigError."""
    model, recompute = model_of(config, data, device), config.memory.recompute
    if is_shared_out(config, ranks):
        from tasks.engine.distributed.sharding import sharded

        model = sharded(model, device=device, recompute=recompute)
        if (mesh := mesh_of(model)) is not None:
            leaks.keeps(mesh.mesh)  # in what PyTorch remembers of each operation
        return model
    if recompute:
        from tasks.engine.distributed.sharding import recomputed, units

        recomputed(units(model))
    return model


def is_shared_out(config: RunConfig, ranks: Ranks) -> bool:
    return config.train.parallel == "fsdp" and not ranks.is_alone


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """What it is shared out over; None where it is whole."""
    mesh: DeviceMesh | None = getattr(next(model.parameters()), "device_mesh", None)
    return mesh


def called(
    model: nn.Module, ranks: Ranks, *, device: torch.device, mark: Callable[[str], None]
) -> Parallel:
    """The model as a step of several processes calls it."""
    if mesh_of(model) is None:
        return Parallel(model, ranks, device=device, mark=mark)
    from tasks.engine.distributed.sharding import Sharded

    return Sharded(model, ranks, device=device, mark=mark)


def whole(
    model: nn.Module, config: RunConfig, data: DataFacts, device: torch.device, ranks: Ranks
) -> nn.Module:
    """The model with all its weights, on the lead; all call it."""
    if mesh_of(model) is None:
        return model
    from tasks.engine.distributed.sharding import whole_state

    state = whole_state(model)
    if not ranks.is_lead:
        return model
    found = model_of(config, data, device)
    found.load_state_dict(state)
    return found
