"""The rows of a training, where it takes them from: prepared arrays, on the device or streamed to
it, or the loaders of the user's own; and two rows of them, as an example for those who predict.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from tasks.engine.base import nested
from tasks.engine.base.facts import DataFacts
from tasks.engine.batches.batches import Batches
from tasks.engine.batches.dataloaders import Loaded
from tasks.engine.batches.dataset_batches import TRAIN_SHARE, VAL_SHARE, Resident, Streamed, feed
from tasks.engine.batches.rank_share import RankShare
from tasks.engine.data import own_facts
from tasks.engine.data import preparation as prepared
from tasks.engine.device.memory_limit import rows_room_bytes
from tasks.engine.step.build import takes_channels_last
from tasks.engine.step.plan import Plan


def open_batches(
    plan: Plan, model: nn.Module, *, rank: int = 0, size: int = 1
) -> tuple[Batches, Batches]:
    """Return the rows to train on and those to validate on, where they are fastest to reach; of
    several ranks a RankShare of each. Close both."""
    data, settings = plan.data, plan.settings
    if data.batch is not None:
        loaders = own_facts.loaded(
            settings.data, settings.train, data, plan.torch_device, rank=rank, size=size
        )
        return _shared(loaders[0], rank, size), _shared(loaders[1], rank, size)
    arrays, send = prepared.load(data), _sending(plan, model)
    room = rows_room_bytes(
        plan.device, limit_mib=settings.memory.limit_mib, rows_mib=settings.data.memory_mib
    )
    rows = send(arrays.train_x, arrays.train_y, room_bytes=TRAIN_SHARE * room)
    val = send(arrays.val_x, arrays.val_y, room_bytes=VAL_SHARE * room)
    return _shared(rows, rank, size), _shared(val, rank, size)


def open_test_batches(plan: Plan, model: nn.Module, *, rank: int = 0, size: int = 1) -> Batches:
    """Return the rows to be judged once: they stay on the host. Close them."""
    arrays = prepared.load(plan.data)
    assert arrays.test_x is not None and arrays.test_y is not None
    send = _sending(plan, model)
    return _shared(send(arrays.test_x, arrays.test_y, room_bytes=0), rank, size)


def _sending(plan: Plan, model: nn.Module) -> Callable[..., Resident | Streamed]:
    return partial(
        feed,
        device=plan.torch_device,
        channels_last=takes_channels_last(plan.settings.model.name, model),
        is_spare=plan.settings.data.memory_mib is not None,
    )


def _shared(batches: Resident | Streamed | Loaded, rank: int, size: int) -> Batches:
    return RankShare(batches, rank=rank, size=size) if size > 1 else batches


def first_rows(val: Batches) -> Any:
    """The inputs of two rows to validate on, as a batch holds them; of a loader that several ranks
    share, of one where its part of a batch has no more."""
    whole = val.whole if isinstance(val, RankShare) else val
    with closing(whole.in_order(2)) as batches:  # type: ignore[type-var]
        x, _ = next(batches)
        return nested.head(x, 2)


def example(data: DataFacts, x: Any) -> dict[str, np.ndarray]:
    """Two rows as their user has them, by the name of the input; the only one is called x.

    x: what first_rows gives.
    """
    if data.batch is None:
        return {"x": _raw(prepared.load(data).val_x[:2], data)}
    rows = nested.mapped(x, lambda tensor: tensor.detach().cpu())
    return {name: value.numpy() for name, value in inputs_by_name(rows).items()}


def inputs_by_name(x: Any) -> dict[str, torch.Tensor]:
    """The tensors of a batch's inputs: of a dict under its keys, of several under their numbers."""
    if isinstance(x, torch.Tensor):
        return {"x": x}
    named = x.items() if isinstance(x, dict) else enumerate(x)
    return {str(key): value for key, value in named if isinstance(value, torch.Tensor)}


def _raw(rows: np.ndarray, data: DataFacts) -> np.ndarray:
    """The rows as their user has them: the scaling undone."""
    if data.task == "tokens":
        return np.asarray(rows)
    return (rows * np.array(data.scale) + np.array(data.offset)).astype(np.float32)
