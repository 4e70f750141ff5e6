"""What is known of the user's own loaders: facts from the first batch of each, taken before
anything is spent, and the loaders themselves again where the training feeds on them. It refuses a
first batch that could not be learnt from.
"""

from __future__ import annotations

import random
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from tasks.engine.base import nested
from tasks.engine.base.facts import DataFacts
from tasks.engine.base.field_types import is_import
from tasks.engine.batches.dataloaders import ENDLESS, Loaded
from tasks.engine.batches.loader_targets import Targets, task_of
from tasks.engine.batches.pinned_staging import PINNING
from tasks.engine.batches.shared_loader import shared_loader
from tasks.engine.data import run_warnings
from tasks.engine.data.own_data import Feeding, Feeds, made
from tasks.engine.files.source_data import DataError
from tasks.engine.settings.data_config import DataConfig
from tasks.engine.settings.run_config import TrainConfig

LOOKED_AT = 1024  # rows
CPU = torch.device("cpu")


def feeding_of(train: TrainConfig) -> Feeding:
    """How the rows will be taken, as far as a factory may ask for it."""
    return Feeding(train.batch_size, train.seed)


def facts_of(data: DataConfig, feeds: Feeds) -> DataFacts:
    """The facts of loaders, from one batch of each. Raises DataError."""
    train, val = Loaded(feeds.train, CPU), Loaded(feeds.val, CPU)
    x, y = _first(train)
    _refuse_nan(x)
    task = task_of(data.task, x, y)
    outputs = _outputs(task, y, feeds.classes)
    y = Targets(task, outputs, "training")(y, 1) if isinstance(y, Tensor) else y
    batch = nested.described((x, y), nested.rows_of(y))
    vx, vy = _first(val)
    vy = Targets(task, outputs, "validation")(vy, 1) if isinstance(vy, Tensor) else vy
    other = nested.described((vx, vy), nested.rows_of(vy))
    if task != "tokens" and _kinds(other) != _kinds(batch):
        raise DataError(
            f"data.source: {data.source} gives batches of {_told(vx)} to validate on and of "
            f"{_told(x)} to train on; give both the same"
        )
    first = next(nested.tensors(x), None)
    if first is None:
        raise DataError(
            f"data.source: {data.source} gives inputs without a tensor (got a {type(x).__name__}); "
            "return tensors from its data set or collate_fn"
        )
    return DataFacts(
        folder="",
        source=data.source,
        task=task,
        train_rows=len(train),
        val_rows=len(val),
        input_shape=tuple(first.shape[1:]),
        outputs=outputs,
        class_names=feeds.classes if task in ("classification", "multilabel") else None,
        feature_names=None,
        offset=(0.0,),
        scale=(1.0,),
        bytes=0,
        fingerprint="",
        reused=False,
        batch=batch,
        batch_rows=train.batch_size,
        warnings=(run_warnings.same(data.source),) if _is_same(feeds) else (),
        endless=train.steps(train.batch_size) == ENDLESS,
    )


def loaded(
    settings: DataConfig,
    train: TrainConfig,
    data: DataFacts,
    device: torch.device,
    *,
    rank: int = 0,
    size: int = 1,
) -> tuple[Loaded, Loaded]:
    """The loaders of a training on this device, of which this is one of `size` ranks: the factory
    is asked again, with PyTorch's random numbers in the same state on every rank. Raises DataError.
    """
    if size > 1:  # a factory that draws rows by numbers that nobody seeded draws them alike
        _seed(train.seed)
    feeds = made(settings, feeding_of(train), pins=device.type in PINNING)
    if rank:  # what its rows draw, they draw for other rows
        _seed(train.seed + rank)
    if not isinstance(feeds, Feeds):
        raise DataError(
            f"data.source: {settings.source} gave loaders at first and arrays now; let it "
            "return the same each time"
        )
    is_own = is_import(train.loss)
    share = partial(shared_loader, rank=rank, size=size, seed=train.seed)
    of_train, of_val = (
        Loaded(share(loader), device, look=Targets(data.task, data.outputs, part, is_own))
        for loader, part in ((feeds.train, "training"), (feeds.val, "validation"))
    )
    return of_train, of_val


def _seed(seed: int) -> None:
    """Of the random numbers that are not PyTorch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _first(loaded: Loaded) -> tuple[Any, Any]:
    with closing(loaded.in_order(1)) as batches:  # type: ignore[type-var]
        for batch in batches:
            return batch
    raise AssertionError("a loader without rows is refused by itself")


def _outputs(task: str, y: Any, classes: tuple[str, ...] | None) -> int:
    if task == "classification":
        return len(classes) if classes else 0
    if task == "tokens" or not isinstance(y, Tensor):
        return 0
    return int(y[0].numel()) if y.dim() > 1 else 1


def _refuse_nan(x: Any) -> None:
    for name, tensor in nested.named(x, "inputs"):
        if not tensor.is_floating_point() or bool(tensor.isfinite().all()):
            continue
        at = (~tensor.isfinite()).nonzero()[0].tolist()
        raise DataError(
            f"data.source: batch 1 of the training loader, row {at[0] + 1 if at else 1}: "
            f"{name} must hold finite numbers (got {tensor[tuple(at)].item()}); mend or drop such "
            "rows"
        )


def _is_same(feeds: Feeds) -> bool:
    """Whether both loaders read the same data set, or arrays that are equal as far as looked at."""
    train, val = (getattr(loader, "dataset", loader) for loader in (feeds.train, feeds.val))
    if not isinstance(train, TensorDataset) or not isinstance(val, TensorDataset):
        return train is val
    pairs = list(zip(train.tensors, val.tensors, strict=False))
    return all(a.shape == b.shape and torch.equal(a[:LOOKED_AT], b[:LOOKED_AT]) for a, b in pairs)


def _kinds(description: Any) -> Any:
    """The structure and types, with how many axes a row has; lengths may differ by batch."""
    if "shape" in description:
        return description["dtype"], len(description["shape"])
    inner = description.get("of", [])
    return list(map(_kinds, inner.values() if isinstance(inner, dict) else inner))


def _told(x: Any) -> str:
    kinds = [f"{n} {t.dim() - 1}-D {t.dtype}" for n, t in nested.named(x, "inputs")]
    return ", ".join(kinds).replace("torch.", "") or f"a {type(x).__name__}"
