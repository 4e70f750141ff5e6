"""A DataLoader of the user's own, seen by the loop like any other rows: its batches moved to the
device, its order and batch size left to it. It refuses a loader that is empty or does not say how
much it gives, and a batch that is not a pair of inputs and targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tasks.engine.raw import DataError
from tasks.engine.staging import PINNING, Mark


class Loaded:
    """Batches of a loader, each (inputs, targets): tensors, or tuples, lists and dicts of them.

    Rows of one epoch are those that the loader announces until a whole epoch was counted.
    """

    residency = "loader"
    copy_s = None  # copies run in the stream that computes, where the h2d phase shows them

    def __init__(self, loader: Any, device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._batches = _length(loader)
        self.batch_size = _batch_size(loader)
        self._rows = _announced_rows(loader, self._batches, self.batch_size)
        self._pinned = bool(getattr(loader, "pin_memory", False)) and device.type in PINNING
        workers = getattr(loader, "num_workers", 0)
        self.reason = (
            f"a loader of its own: batches of {self.batch_size} from "
            f"{f'{workers} worker processes' if workers else 'this process'}, "
            f"{'pinned' if self._pinned else 'not pinned'}"
        )

    def __len__(self) -> int:
        return self._rows

    def steps(self, batch_size: int) -> int:
        """The loader's own number of batches, whatever the size asked for."""
        return self._batches

    def shuffled(self, batch_size: int, order: Tensor, mark: Mark) -> Iterator[tuple[Any, Any]]:
        """The loader's batches in its own order and of its own size."""
        return self._read(mark)

    def in_order(self, batch_size: int) -> Iterator[tuple[Any, Any]]:
        return self._read(lambda phase: None)

    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def close(self) -> None:
        """End the processes of a loader whose workers outlive an epoch (persistent_workers)."""
        # Private names, since PyTorch has no public way but to drop the loader, which is not ours.
        kept = getattr(self._loader, "_iterator", None)
        if kept is not None and hasattr(kept, "_shutdown_workers"):
            kept._shutdown_workers()
            self._loader._iterator = None

    def _read(self, mark: Mark) -> Iterator[tuple[Any, Any]]:
        # Held by this frame alone: worker processes end with the iterator.
        found = iter(self._loader)
        rows = 0
        for batch in found:
            mark("data_wait")
            inputs, targets = _pair(batch)
            if self._device.type != "cpu":
                inputs, targets = self._moved(inputs), self._moved(targets)
                mark("h2d")
            rows += _rows(targets)
            yield inputs, targets
        if rows == 0:
            raise DataError("data.source: the loader gave no rows; give it at least one")
        self._rows = rows

    def _moved(self, part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.to(self._device, non_blocking=self._pinned)
        if isinstance(part, Mapping):
            return {key: self._moved(value) for key, value in part.items()}
        if isinstance(part, (tuple, list)):
            make = getattr(type(part), "_make", type(part))  # a named tuple's own way
            return make(map(self._moved, part))
        return part


def _length(loader: Any) -> int:
    try:
        batches = len(loader)
    except TypeError:
        raise DataError(
            f"data.source: the loader must have a length (got {type(loader).__name__} without "
            "one); give its data set a __len__, so that the steps of an epoch are known"
        ) from None
    if batches < 1:
        raise DataError(
            f"data.source: the loader must have at least one batch (got {batches}); "
            "give it more rows, a smaller batch_size, or drop_last=False"
        )
    return batches


def _batch_size(loader: Any) -> int:
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if not isinstance(size, int) or size < 1:
        raise DataError(
            f"data.source: the loader must tell its batch size (got {size}); set batch_size, or "
            "give its batch_sampler an attribute batch_size: the rows of its largest batch"
        )
    return size


def _announced_rows(loader: Any, batches: int, batch_size: int) -> int:
    most = batches * batch_size
    try:
        return min(most, len(loader.sampler))
    except (AttributeError, TypeError):  # no sampler, or an endless one
        return most


def _pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    got = type(batch).__name__
    if isinstance(batch, (tuple, list)):
        got += f" of {len(batch)}"
    raise DataError(
        f"data.source: a batch of the loader must be a pair of inputs and targets (got a {got}); "
        "return (inputs, targets) from its data set or collate_fn"
    )


def _rows(targets: Any) -> int:
    """Rows of the first tensor found in the targets."""
    while not isinstance(targets, Tensor):
        if isinstance(targets, Mapping):
            targets = tuple(targets.values())
        if not isinstance(targets, (tuple, list)) or not targets:
            raise DataError(
                "data.source: the targets of a batch must be a tensor, or hold one "
                f"(got {type(targets).__name__}); return tensors from the data set or collate_fn"
            )
        targets = targets[0]
    return len(targets)
