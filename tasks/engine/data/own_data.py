"""Data of the user's own: what its factory returns is either arrays, which are prepared like those
of a file, or data sets and loaders, which feed the loop as they are. It refuses what holds no rows,
or no rows to validate on, in one sentence; whatever the user's code prints goes to stderr.
"""

from __future__ import annotations

import multiprocessing.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from tasks.engine.base import nested
from tasks.engine.base.factory_call import arguments, called
from tasks.engine.base.import_paths import found, told_of
from tasks.engine.data.own_arrays import Pair, checked, is_array, raw_of, tensor
from tasks.engine.files.source_data import DataError, Raw
from tasks.engine.files.split import STREAM
from tasks.engine.memory.memory_meter import is_oom
from tasks.engine.settings.data_config import DataConfig

TAKEN = (
    "(x, y) tensors or arrays, ((x, y), (x_val, y_val)), a Dataset, a DataLoader, or a pair of "
    "either: training and validation"
)


@dataclass(frozen=True)
class Feeding:
    """How the training will take its rows. seed: of their order."""

    batch_size: int = 64
    seed: int = 0


@dataclass(frozen=True)
class Feeds:
    """Loaders to train and to validate with."""

    train: Any
    val: Any
    classes: tuple[str, ...] | None  # where the data set names them


def made(data: DataConfig, feeding: Feeding, *, pins: bool = False) -> Raw | Feeds:
    """What the factory at data.source gives. pins: copies to the device go through pinned memory.

    Raises DataError.
    """
    factory = found(data.source, setting="data.source", refusal=DataError)
    offered = {"batch_size": feeding.batch_size, "seed": feeding.seed}
    given = arguments(factory, data.args, offered, setting="data.args", refusal=DataError)
    try:
        result = called(factory, given, setting="data.source", path=data.source, refusal=DataError)
    except (MemoryError, RuntimeError):
        result = NotImplemented
    if result is NotImplemented:  # said here, where what the error's frames held is gone
        raise DataError(
            f"data.source: {data.source} needs more memory than this host has; return a Dataset "
            "that reads its rows as they are asked for"
        )
    kind = f"({data.source})"
    if _is_pair(result) and all(map(is_array, result)):
        return _arrays(data, [tuple(result)], feeding, pins)
    if _is_pair(result) and all(_is_pair(p) and all(map(is_array, p)) for p in result):
        return _arrays(data, [tuple(part) for part in result], feeding, pins)
    parts = list(result) if _is_pair(result) else [result]
    if len(parts) == 2 and parts[1] is None:
        parts.pop()
    if not all(_is_loader(part) or _is_set(part) for part in parts):
        raise DataError(
            f"data.source: {data.source} must return {TAKEN} (got {_shown(result)}); change what "
            "it returns"
        )
    _refuse_empty(parts, kind)
    if len(parts) == 1:
        parts = _split(parts[0], data)
    train, val = (
        _loader(part, feeding, shuffles=i == 0, pins=pins) for i, part in enumerate(parts)
    )
    if getattr(train, "num_workers", 0) or getattr(val, "num_workers", 0):
        # One folder for the sockets of all workers, that goes with this process: a worker that is
        # killed would leave one of its own.
        multiprocessing.util.get_temp_dir()
    return Feeds(train, val, _classes(parts[0]))


def _arrays(
    data: DataConfig, parts: list[tuple[Any, Any]], feeding: Feeding, pins: bool
) -> Raw | Feeds:
    names = ("training", "validation")
    pairs = [checked(x, y, data, name) for (x, y), name in zip(parts, names, strict=False)]
    x, y = pairs[0]
    if data.task == "tokens" or x.ndim not in (2, 4) or y.ndim > 2:
        return _as_sets(data, pairs, feeding, pins)
    return raw_of(data, pairs, columns=getattr(parts[0][0], "columns", None))


def _as_sets(data: DataConfig, pairs: list[Pair], feeding: Feeding, pins: bool) -> Feeds:
    """Arrays that no table and no images are: fed as they are."""
    if any(y.dtype == object for _, y in pairs):
        raise DataError(
            f"data.source: {data.source} gives rows of shape {pairs[0][0].shape[1:]} with labels "
            "of text; give the number of the class"
        )
    sets: list[Any] = [TensorDataset(*map(tensor, pair)) for pair in pairs]
    parts = sets if len(sets) == 2 else _split(sets[0], data)
    train, val = (
        _loader(part, feeding, shuffles=i == 0, pins=pins) for i, part in enumerate(parts)
    )
    if getattr(train, "num_workers", 0) or getattr(val, "num_workers", 0):
        # One folder for the sockets of all workers, that goes with this process: a worker that is
        # killed would leave one of its own.
        multiprocessing.util.get_temp_dir()
    most = max(int(y.max()) for _, y in pairs) if pairs[0][1].dtype.kind in "iu" else -1
    return Feeds(train, val, tuple(map(str, range(most + 1))) if most >= 0 else None)


def _split(part: Any, data: DataConfig) -> list[Any]:
    """Training and validation parts of a data set, or of the one that a loader reads."""
    given: Any = part.dataset if isinstance(part, DataLoader) else part
    plain = not isinstance(part, DataLoader) or isinstance(
        part.sampler, (RandomSampler, SequentialSampler)
    )
    if isinstance(given, IterableDataset) or not hasattr(given, "__getitem__") or not plain:
        what = "an IterableDataset" if isinstance(given, IterableDataset) else "this loader"
        raise DataError(
            f"data.source: {data.source} gives no validation rows, and {what} cannot be split; "
            "return two: training and validation"
        )
    rows = _count(given)
    held = max(1, round(rows * data.validation_fraction))
    if held >= rows:
        raise DataError(
            f"data.source: {data.source} gives {rows} row, and a split needs at least 2; give more"
        )
    seed = STREAM << 32 | data.split_seed
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
    parts: list[Any] = [Subset(given, order[held:]), Subset(given, sorted(order[:held]))]
    return [_alike(part, some, i == 0) for i, some in enumerate(parts)]


def _alike(part: Any, rows: Any, is_first: bool) -> Any:
    """The rows as the loader that they come from would give them; a data set stays one."""
    if not isinstance(part, DataLoader):
        return rows
    return DataLoader(
        rows,
        batch_size=part.batch_size,
        shuffle=is_first and isinstance(part.sampler, RandomSampler),
        num_workers=part.num_workers,
        collate_fn=part.collate_fn,
        pin_memory=part.pin_memory,
        drop_last=is_first and part.drop_last,
        generator=part.generator,
        worker_init_fn=part.worker_init_fn,
        multiprocessing_context=part.multiprocessing_context,
        persistent_workers=part.persistent_workers,
    )


def _loader(part: Any, feeding: Feeding, *, shuffles: bool, pins: bool) -> Any:
    if _is_loader(part):
        return part
    is_stream = isinstance(part, IterableDataset)
    return DataLoader(
        part,
        batch_size=feeding.batch_size,
        shuffle=shuffles and not is_stream,
        generator=torch.Generator().manual_seed(feeding.seed % 2**63),
        pin_memory=pins and _is_on_host(part),
    )


def _is_on_host(part: Any) -> bool:
    """Whether rows may be pinned, which PyTorch refuses where they lie on a device."""
    if isinstance(part, IterableDataset):  # whose first row would be gone
        return True
    try:
        row = part[0]
    except Exception as error:
        if is_oom(error):
            raise
        told = told_of(error)
    else:
        return all(tensor.device.type == "cpu" for tensor in nested.tensors(row))
    raise DataError(f"data.source: the data set raised: {told}")


def _classes(part: Any) -> tuple[str, ...] | None:
    """The names of the classes, where the data set tells them as torchvision's do."""
    given = getattr(part, "dataset", part) if _is_loader(part) else part
    while isinstance(given, Subset):
        given = given.dataset
    names = getattr(given, "classes", None)
    if isinstance(names, int) and not isinstance(names, bool):
        names = range(names)
    if not isinstance(names, (list, tuple, range)) or not names:
        return None
    return tuple(map(str, names))


def _refuse_empty(parts: list[Any], kind: str) -> None:
    for part, name in zip(parts, ("training", "validation"), strict=False):
        if hasattr(part, "__len__") and not _is_loader(part) and _count(part) < 1:
            raise DataError(f"data.source: the {name} data set {kind} has no rows; give it some")


def _count(part: Any) -> int:
    try:
        return len(part)
    except Exception as error:
        told = told_of(error)
    raise DataError(f"data.source: len() of the data set raised: {told}")


def _is_pair(part: Any) -> bool:
    return isinstance(part, (tuple, list)) and len(part) == 2


def _is_loader(part: Any) -> bool:
    is_one = hasattr(part, "batch_size") or hasattr(part, "batch_sampler")
    return isinstance(part, DataLoader) or (is_one and hasattr(part, "__iter__"))


def _is_set(part: Any) -> bool:
    if isinstance(part, (tuple, list, str, bytes, Mapping)) or is_array(part):
        return False
    has_rows = hasattr(part, "__getitem__") and hasattr(part, "__len__")
    return has_rows or isinstance(part, IterableDataset)


def _shown(result: Any) -> str:
    if isinstance(result, (tuple, list)):
        inner = ", ".join(type(part).__name__ for part in result[:4])
        return f"a {type(result).__name__} of {len(result)}: {inner}"
    return f"a {type(result).__name__}" if result is not None else "None"
