"""Opens what a training reads and writes: its batches, those to be judged once, its checkpoints;
and takes two rows as an example for predictions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from headroom.base import nested
from headroom.base.facts import DataFacts
from headroom.data import own_data
from headroom.data import preparation as prepared
from headroom.data.batches import Batches, RankShare
from headroom.data.dataloaders import LoaderBatches
from headroom.data.dataset_batches import (
    TRAIN_SHARE,
    VAL_SHARE,
    ResidentBatches,
    StreamedBatches,
    place_rows,
)
from headroom.device.memory_limit import compute_rows_room_bytes
from headroom.ranks.ranks import Ranks
from headroom.training.build import (
    takes_channels_last,
)
from headroom.training.checkpoints import Checkpoints, refuse_no_room
from headroom.training.compatibility import describe_code, describe_training
from headroom.training.kept_steps import CHECKPOINTS
from headroom.training.plan import Plan
from headroom.training.shared_model import (
    find_mesh,
)
from headroom.training.stateful import (
    HostCopies,
)


def open_batches(
    plan: Plan, model: nn.Module, *, rank: int = 0, size: int = 1
) -> tuple[Batches, Batches]:
    """Return the rows to train on and those to validate on, where they are fastest to reach; of
    several ranks a RankShare of each. Close both."""
    data, settings = plan.data, plan.settings
    if data.batch is not None:
        loaders = own_data.open_loaders(
            settings.data, settings.train, data, plan.torch_device, rank=rank, size=size
        )
        return _share_batches(loaders[0], rank, size), _share_batches(loaders[1], rank, size)
    arrays, send = prepared.load_arrays(data), _make_placer(plan, model)
    room = compute_rows_room_bytes(
        plan.device, limit_mib=settings.memory.limit_mib, rows_mib=settings.data.memory_mib
    )
    rows = send(arrays.train_x, arrays.train_y, room_bytes=TRAIN_SHARE * room)
    val = send(arrays.val_x, arrays.val_y, room_bytes=VAL_SHARE * room)
    return _share_batches(rows, rank, size), _share_batches(val, rank, size)


def open_test_batches(plan: Plan, model: nn.Module, *, rank: int = 0, size: int = 1) -> Batches:
    """Return the rows to be judged once: they stay on the host. Close them."""
    arrays = prepared.load_arrays(plan.data)
    assert arrays.test_x is not None and arrays.test_y is not None
    send = _make_placer(plan, model)
    return _share_batches(send(arrays.test_x, arrays.test_y, room_bytes=0), rank, size)


def _make_placer(plan: Plan, model: nn.Module) -> Callable[..., ResidentBatches | StreamedBatches]:
    return partial(
        place_rows,
        device=plan.torch_device,
        channels_last=takes_channels_last(plan.settings.model.name, model),
        is_spare=plan.settings.data.memory_mib is not None,
    )


def _share_batches(
    batches: ResidentBatches | StreamedBatches | LoaderBatches, rank: int, size: int
) -> Batches:
    return RankShare(batches, rank=rank, size=size) if size > 1 else batches


def read_first_rows(val: Batches) -> Any:
    """Read the inputs of two rows to validate on, as a batch holds them; of a loader that
    several ranks share, of one where its part of a batch has no more."""
    whole = val.whole if isinstance(val, RankShare) else val
    with closing(whole.iterate_in_order(2)) as batches:  # type: ignore[type-var]
        return nested.take_first_rows(next(batches).x, 2)


def make_example(data: DataFacts, x: Any) -> dict[str, np.ndarray]:
    """Return two rows as their user has them, by the name of the input; the only one is called
    x.

    x: what read_first_rows gives.
    """
    if data.batch is None:
        return {"x": _unscale_rows(prepared.load_arrays(data).val_x[:2], data)}
    rows = nested.map_tensors(x, lambda tensor: tensor.detach().cpu())
    return {name: value.numpy() for name, value in name_inputs(rows).items()}


def name_inputs(x: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch's inputs: of a dict under its keys, of several under their
    numbers."""
    if isinstance(x, torch.Tensor):
        return {"x": x}
    named = x.items() if isinstance(x, dict) else enumerate(x)
    return {str(key): value for key, value in named if isinstance(value, torch.Tensor)}


def _unscale_rows(rows: np.ndarray, data: DataFacts) -> np.ndarray:
    """Return the rows as their user has them: the scaling undone."""
    if data.task == "tokens":
        return np.asarray(rows)
    return (rows * np.array(data.scale) + np.array(data.offset)).astype(np.float32)


def open_checkpoints(
    plan: Plan,
    model: nn.Module,
    *,
    folder: Path,
    resumes: bool,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
) -> Checkpoints:
    """Return those of a training, in the folder of its run. Raises ConfigError where the first one
    would find no room. Close them."""
    settings = plan.settings
    # The weights, the state of an optimizer as large as Adam's, and the best weights.
    weights_bytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    size_bytes = weights_bytes * (4 if settings.train.keep == "best" else 3)
    if settings.checkpoint.is_on and ranks.is_lead:
        refuse_no_room(folder, size_bytes)
    return Checkpoints(
        folder / CHECKPOINTS,
        settings.checkpoint,
        HostCopies(plan.torch_device),
        about={**describe_training(plan), **describe_code(settings)},
        size_bytes=size_bytes,
        resumes=resumes,
        ranks=ranks,
        mesh=find_mesh(model),
    )
