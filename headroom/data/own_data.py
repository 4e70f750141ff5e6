"""Loads data of the user's own. What the factory at data.source returns is either arrays,
which are prepared like those of a file, or data sets and loaders, which the training loop
reads as they are; their facts come from the first batch of each. It refuses, in one sentence,
what holds no numbers, no rows, no rows to validate on, or a first batch that could not be
learnt from. Whatever the user's code prints goes to stderr.
"""

from __future__ import annotations

import hashlib
import multiprocessing.util
import random
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from headroom.base import nested
from headroom.base.facts import DataFacts
from headroom.base.import_paths import (
    bind_arguments,
    call_factory,
    describe_error,
    import_callable,
    is_import_path,
)
from headroom.data import run_warnings
from headroom.data.dataloaders import (
    ENDLESS,
    LoaderBatches,
    TargetConverter,
    find_task,
    share_loader,
)
from headroom.data.row_parts import STREAM
from headroom.data.source_data import DataError, RawData
from headroom.settings.run_config import DataConfig, TrainConfig
from headroom.watch.out_of_memory import is_oom
from headroom.watch.pinned_memory import PINNING

Pair = tuple[np.ndarray, np.ndarray]


def is_array(part: Any) -> bool:
    return isinstance(part, (Tensor, np.ndarray)) or hasattr(part, "__array__")


def make_raw_data(data: DataConfig, pairs: list[Pair], *, columns: Any) -> RawData:
    """Return one table or stack of images; the second pair, where there is one, is for
    validation."""
    x, y = pairs[0]
    validation = None
    if len(pairs) == 2:
        vx, vy = pairs[1]
        if vx.shape[1:] != x.shape[1:] or vy.shape[1:] != y.shape[1:]:
            raise DataError(
                f"data.source: {data.source} gives training rows of {x.shape[1:]} and validation "
                f"rows of {vx.shape[1:]}; give both the same columns"
            )
        validation = np.arange(len(x) + len(vx)) >= len(x)
        x, y = np.concatenate((x, vx)), np.concatenate((y, vy))
    return RawData(
        features=x,
        target=y,
        feature_names=None if columns is None else tuple(map(str, columns)),
        target_name="y",
        label=data.source,
        validation=validation,
    )


def hash_arrays(raw: RawData) -> str:
    """Hash the arrays and what is known about them."""
    said = hashlib.sha256(repr((raw.feature_names, raw.target_name)).encode())
    for array in (raw.features, raw.target, raw.validation):
        if array is not None:
            said.update(repr((array.shape, array.dtype.str)).encode())
            is_text = array.dtype == object
            said.update(
                "\0".join(array.tolist()).encode()
                if is_text
                else np.ascontiguousarray(array).view(np.uint8).data
            )
    return said.hexdigest()


def make_tensor(array: np.ndarray) -> Tensor:
    """Return the array as a data set gives it: 64-bit floats narrowed to the 32 that models
    have."""
    narrow = array.astype(np.float32) if array.dtype == np.float64 else array
    return torch.from_numpy(np.ascontiguousarray(narrow))


def check_arrays(x: Any, y: Any, data: DataConfig, name: str) -> Pair:
    """Return both as arrays of numbers, x (rows, ...) and y (rows,) or (rows, ...); y may be text.

    name: training or validation. Raises DataError.
    """
    features, target = (
        _convert_to_numpy(x, data, f"{name} x"),
        _convert_to_numpy(y, data, f"{name} y"),
    )
    if features.dtype.kind not in "fiub":
        raise DataError(
            f"data.source: {data.source} {name} x must hold numbers (got {features.dtype}); encode "
            "text as numbers first, or write a csv or parquet file"
        )
    if target.dtype.kind in "OUS":
        target = np.array([str(value) for value in target.tolist()], dtype=object)
    elif target.dtype.kind not in "fiub":
        raise DataError(f"data.source: {data.source} {name} y must hold numbers or text")
    if features.ndim == 1:
        features = features[:, None]
    if target.ndim == 2 and target.shape[1] == 1:
        target = target[:, 0]
    if not target.ndim or len(features) != len(target):
        rows = len(target) if target.ndim else "no"
        raise DataError(
            f"data.source: {data.source} gives {len(features):,} rows of {name} x and {rows} of y; "
            "give one y for each row"
        )
    if not len(target) or not features.size:
        raise DataError(
            f"data.source: {data.source} gives no {name} rows; give some (got x of shape "
            f"{features.shape})"
        )
    return features, target


def _convert_to_numpy(part: Any, data: DataConfig, name: str) -> np.ndarray:
    try:
        if isinstance(part, Tensor):
            part = part.detach().cpu()
            part = (part.float() if part.dtype == torch.bfloat16 else part).numpy()
        array = np.asarray(part)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"data.source: {data.source} {name} cannot be made an array ({str(error)[:200]}); "
            "return a dense array of numbers"
        ) from None
    if not array.ndim:
        raise DataError(f"data.source: {data.source} {name} must have rows (got a single value)")
    return array.astype(np.float32) if array.dtype == np.float16 else array


TAKEN = (
    "(x, y) tensors or arrays, ((x, y), (x_val, y_val)), a Dataset, a DataLoader, or a pair of "
    "either: training and validation"
)


@dataclass(frozen=True)
class LoaderOptions:
    """How loaders are to batch and order the rows. seed: of their order."""

    batch_size: int = 64
    seed: int = 0


@dataclass(frozen=True)
class Loaders:
    """The loaders for training and validation."""

    train: Any
    val: Any
    classes: tuple[str, ...] | None  # where the data set names them


def call_data_factory(
    data: DataConfig, feeding: LoaderOptions, *, pins: bool = False
) -> RawData | Loaders:
    """Call the factory at data.source and return its arrays or loaders. pins: copies to the
    device go through pinned memory.

    Raises DataError.
    """
    factory = import_callable(data.source, setting="data.source", refusal=DataError)
    offered = {"batch_size": feeding.batch_size, "seed": feeding.seed}
    arguments = bind_arguments(factory, data.args, offered, setting="data.args", refusal=DataError)
    try:
        result = call_factory(
            factory, arguments, setting="data.source", path=data.source, refusal=DataError
        )
    except (MemoryError, RuntimeError):
        result = NotImplemented
    if result is NotImplemented:  # said here, where what the error's frames held is gone
        raise DataError(
            f"data.source: {data.source} needs more memory than this host has; return a Dataset "
            "that reads its rows as they are asked for"
        )
    kind = f"({data.source})"
    if _is_pair(result) and all(map(is_array, result)):
        return _use_arrays(data, [tuple(result)], feeding, pins)
    if _is_pair(result) and all(_is_pair(p) and all(map(is_array, p)) for p in result):
        return _use_arrays(data, [tuple(part) for part in result], feeding, pins)
    parts = list(result) if _is_pair(result) else [result]
    if len(parts) == 2 and parts[1] is None:
        parts.pop()
    if not all(_is_loader(part) or _is_dataset(part) for part in parts):
        raise DataError(
            f"data.source: {data.source} must return {TAKEN} (got {_describe_result(result)}); "
            "change what it returns"
        )
    _refuse_empty(parts, kind)
    if len(parts) == 1:
        parts = _split_dataset(parts[0], data)
    train, val = (
        _make_loader(part, feeding, shuffles=i == 0, pins=pins) for i, part in enumerate(parts)
    )
    if getattr(train, "num_workers", 0) or getattr(val, "num_workers", 0):
        # One folder for the sockets of all workers, that goes with this process: a worker that is
        # killed would leave one of its own.
        multiprocessing.util.get_temp_dir()
    return Loaders(train, val, _find_class_names(parts[0]))


def _use_arrays(
    data: DataConfig, parts: list[tuple[Any, Any]], feeding: LoaderOptions, pins: bool
) -> RawData | Loaders:
    names = ("training", "validation")
    pairs = [check_arrays(x, y, data, name) for (x, y), name in zip(parts, names, strict=False)]
    x, y = pairs[0]
    if data.task in ("tokens", "own") or x.ndim not in (2, 4) or y.ndim > 2:
        return _wrap_arrays(data, pairs, feeding, pins)
    return make_raw_data(data, pairs, columns=getattr(parts[0][0], "columns", None))


def _wrap_arrays(
    data: DataConfig, pairs: list[Pair], feeding: LoaderOptions, pins: bool
) -> Loaders:
    """Arrays that no table and no images are: fed as they are."""
    if any(y.dtype == object for _, y in pairs):
        raise DataError(
            f"data.source: {data.source} gives rows of shape {pairs[0][0].shape[1:]} with labels "
            "of text; give the number of the class"
        )
    sets: list[Any] = [TensorDataset(*map(make_tensor, pair)) for pair in pairs]
    parts = sets if len(sets) == 2 else _split_dataset(sets[0], data)
    train, val = (
        _make_loader(part, feeding, shuffles=i == 0, pins=pins) for i, part in enumerate(parts)
    )
    if getattr(train, "num_workers", 0) or getattr(val, "num_workers", 0):
        # One folder for the sockets of all workers, that goes with this process: a worker that is
        # killed would leave one of its own.
        multiprocessing.util.get_temp_dir()
    most = max(int(y.max()) for _, y in pairs) if pairs[0][1].dtype.kind in "iu" else -1
    return Loaders(train, val, tuple(map(str, range(most + 1))) if most >= 0 else None)


def _split_dataset(part: Any, data: DataConfig) -> list[Any]:
    """Training and validation parts of a data set, or of the one that a loader reads."""
    dataset: Any = part.dataset if isinstance(part, DataLoader) else part
    plain = not isinstance(part, DataLoader) or isinstance(
        part.sampler, (RandomSampler, SequentialSampler)
    )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not plain:
        what = "an IterableDataset" if isinstance(dataset, IterableDataset) else "this loader"
        raise DataError(
            f"data.source: {data.source} gives no validation rows, and {what} cannot be split; "
            "return two: training and validation"
        )
    rows = _count_dataset_rows(dataset)
    held = max(1, round(rows * data.validation_fraction))
    if held >= rows:
        raise DataError(
            f"data.source: {data.source} gives {rows} row, and a split needs at least 2; give more"
        )
    seed = STREAM << 32 | data.split_seed
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
    parts: list[Any] = [Subset(dataset, order[held:]), Subset(dataset, sorted(order[:held]))]
    return [_rebuild_loader(part, some, i == 0) for i, some in enumerate(parts)]


def _rebuild_loader(part: Any, rows: Any, is_first: bool) -> Any:
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


def _make_loader(part: Any, feeding: LoaderOptions, *, shuffles: bool, pins: bool) -> Any:
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
    """True if rows may be pinned, which PyTorch refuses where they lie on a device."""
    if isinstance(part, IterableDataset):  # whose first row would be gone
        return True
    try:
        row = part[0]
    except Exception as error:
        if is_oom(error):
            raise
        message = describe_error(error)
    else:
        return all(tensor.device.type == "cpu" for tensor in nested.find_tensors(row))
    raise DataError(f"data.source: the data set raised: {message}")


def _find_class_names(part: Any) -> tuple[str, ...] | None:
    """The names of the classes, where the data set tells them as torchvision's do."""
    dataset = getattr(part, "dataset", part) if _is_loader(part) else part
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    names = getattr(dataset, "classes", None)
    if isinstance(names, int) and not isinstance(names, bool):
        names = range(names)
    if not isinstance(names, (list, tuple, range)) or not names:
        return None
    return tuple(map(str, names))


def _refuse_empty(parts: list[Any], kind: str) -> None:
    for part, name in zip(parts, ("training", "validation"), strict=False):
        if hasattr(part, "__len__") and not _is_loader(part) and _count_dataset_rows(part) < 1:
            raise DataError(f"data.source: the {name} data set {kind} has no rows; give it some")


def _count_dataset_rows(part: Any) -> int:
    try:
        return len(part)
    except Exception as error:
        message = describe_error(error)
    raise DataError(f"data.source: len() of the data set raised: {message}")


def _is_pair(part: Any) -> bool:
    return isinstance(part, (tuple, list)) and len(part) == 2


def _is_loader(part: Any) -> bool:
    is_one = hasattr(part, "batch_size") or hasattr(part, "batch_sampler")
    return isinstance(part, DataLoader) or (is_one and hasattr(part, "__iter__"))


def _is_dataset(part: Any) -> bool:
    if isinstance(part, (tuple, list, str, bytes, Mapping)) or is_array(part):
        return False
    has_rows = hasattr(part, "__getitem__") and hasattr(part, "__len__")
    return has_rows or isinstance(part, IterableDataset)


def _describe_result(result: Any) -> str:
    if isinstance(result, (tuple, list)):
        inner = ", ".join(type(part).__name__ for part in result[:4])
        return f"a {type(result).__name__} of {len(result)}: {inner}"
    return f"a {type(result).__name__}" if result is not None else "None"


LOOKED_AT = 1024  # rows
FIRST_ROWS = 4  # that a model and a loss are tried on
CPU = torch.device("cpu")


def make_loader_options(train: TrainConfig) -> LoaderOptions:
    """Return the batch size and seed of the training, which a factory may ask for."""
    return LoaderOptions(train.batch_size, train.seed)


def describe_loaders(data: DataConfig, feeds: Loaders) -> DataFacts:
    """Return the facts of loaders, from one batch of each. Raises DataError."""
    train, val = LoaderBatches(feeds.train, CPU), LoaderBatches(feeds.val, CPU)
    x, y = _read_first_batch(train)
    _refuse_nan(x)
    if not train.has_targets and data.task not in ("auto", "own"):
        raise DataError(
            f"data.task: {data.task} needs targets, and the batches of {data.source} hold none; "
            "return (inputs, targets) or a dict with labels, or drop it where the model gives its "
            "loss itself"
        )
    task = find_task(data.task, x, y) if train.has_targets else "own"
    outputs = _count_outputs(task, y, feeds.classes)
    first = nested.pack_rows((x, y), whole=nested.count_rows(y), most=FIRST_ROWS)
    y = TargetConverter(task, outputs, "training")(y, 1) if isinstance(y, Tensor) else y
    batch = nested.describe_structure((x, y), nested.count_rows(y))
    vx, vy = _read_first_batch(val)
    vy = TargetConverter(task, outputs, "validation")(vy, 1) if isinstance(vy, Tensor) else vy
    other = nested.describe_structure((vx, vy), nested.count_rows(vy))
    if task != "tokens" and _list_kinds(other) != _list_kinds(batch):
        raise DataError(
            f"data.source: {data.source} gives batches of {_describe_inputs(vx)} to validate on "
            f"and of {_describe_inputs(x)} to train on; give both the same"
        )
    shown = next(nested.find_tensors(x), None)
    if shown is None:
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
        input_shape=tuple(shown.shape[1:]),
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
        val_batch_rows=val.batch_size,
        first_rows=first,
        warnings=(run_warnings.warn_of_same_rows(data.source),) if _has_same_data(feeds) else (),
        endless=train.count_steps(train.batch_size) == ENDLESS,
    )


def open_loaders(
    settings: DataConfig,
    train: TrainConfig,
    data: DataFacts,
    device: torch.device,
    *,
    rank: int = 0,
    size: int = 1,
) -> tuple[LoaderBatches, LoaderBatches]:
    """Open the loaders of a training on this device, of which this is one of `size` ranks: the
    factory is called again, with PyTorch's random numbers in the same state on every rank.
    Raises DataError."""
    if size > 1:  # a factory that draws rows by numbers that nobody seeded draws them alike
        _seed_random(train.seed)
    feeds = call_data_factory(settings, make_loader_options(train), pins=device.type in PINNING)
    if rank:  # what its rows draw, they draw for other rows
        _seed_random(train.seed + rank)
    if not isinstance(feeds, Loaders):
        raise DataError(
            f"data.source: {settings.source} gave loaders at first and arrays now; let it "
            "return the same each time"
        )
    is_own = is_import_path(train.loss)
    share = partial(share_loader, rank=rank, size=size, seed=train.seed)
    of_train, of_val = (
        LoaderBatches(
            share(loader), device, look=TargetConverter(data.task, data.outputs, part, is_own)
        )
        for loader, part in ((feeds.train, "training"), (feeds.val, "validation"))
    )
    return of_train, of_val


def _seed_random(seed: int) -> None:
    """Of the random numbers that are not PyTorch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _read_first_batch(loaded: LoaderBatches) -> tuple[Any, Any]:
    with closing(loaded.iterate_in_order(1)) as batches:  # type: ignore[type-var]
        for batch in batches:
            return batch.x, batch.y
    raise AssertionError("a loader without rows is refused by itself")


def _count_outputs(task: str, y: Any, classes: tuple[str, ...] | None) -> int:
    if task == "classification":
        return len(classes) if classes else 0
    if task in ("tokens", "own") or not isinstance(y, Tensor):
        return 0
    return int(y[0].numel()) if y.dim() > 1 else 1


def _refuse_nan(x: Any) -> None:
    for name, tensor in nested.find_named_tensors(x, "inputs"):
        if not tensor.is_floating_point() or bool(tensor.isfinite().all()):
            continue
        at = (~tensor.isfinite()).nonzero()[0].tolist()
        raise DataError(
            f"data.source: batch 1 of the training loader, row {at[0] + 1 if at else 1}: {name} "
            f"must hold finite numbers (got {tensor[tuple(at)].item()}); mend or drop such rows"
        )


def _has_same_data(feeds: Loaders) -> bool:
    """True if both loaders read the same data set, or arrays that are equal as far as looked at."""
    train, val = (getattr(loader, "dataset", loader) for loader in (feeds.train, feeds.val))
    if not isinstance(train, TensorDataset) or not isinstance(val, TensorDataset):
        return train is val
    pairs = list(zip(train.tensors, val.tensors, strict=False))
    return all(a.shape == b.shape and torch.equal(a[:LOOKED_AT], b[:LOOKED_AT]) for a, b in pairs)


def _list_kinds(description: Any) -> Any:
    """The structure and types, with how many axes a row has; lengths may differ by batch."""
    if "shape" in description:
        return description["dtype"], len(description["shape"])
    inner = description.get("of", [])
    return list(map(_list_kinds, inner.values() if isinstance(inner, dict) else inner))


def _describe_inputs(x: Any) -> str:
    kinds = [f"{n} {t.dim() - 1}-D {t.dtype}" for n, t in nested.find_named_tensors(x, "inputs")]
    return ", ".join(kinds).replace("torch.", "") or f"a {type(x).__name__}"
