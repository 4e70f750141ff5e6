"""A DataLoader of the user's own for one of several ranks: of each batch that it draws in one
process, the rows of this rank. The order is drawn from random numbers of its own, seeded by the
run, so that it is the same on every rank and in one process. It refuses what has no row numbers to
split.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from tasks.engine.files.source_data import DataError

_END = object()


@dataclass(frozen=True)
class Share:
    """A rank's part of each batch: parts lie side by side, and differ by one row at most."""

    rank: int
    size: int

    def part(self, rows: int) -> slice:
        """Of a batch of that many rows; its first row, to fill in, where no row is left for it."""
        first, last = (self._begin(rank, rows) for rank in (self.rank, self.rank + 1))
        return slice(first, last) if last > first else slice(0, 1)

    def weight(self, rows: int) -> float:
        """Of this part in the mean over the ranks; 0 where it only fills in."""
        own = self._begin(self.rank + 1, rows) - self._begin(self.rank, rows)
        return own * self.size / max(1, rows)

    def _begin(self, rank: int, rows: int) -> int:
        return rank * (rows // self.size) + min(rank, rows % self.size)


class IndexBatches:
    """A batch sampler: this rank's part of what another one draws.

    What that one draws of the global random numbers of PyTorch, Python and NumPy comes from
    `generator` instead: those of the ranks part ways, as their models and rows draw from them.
    """

    def __init__(self, whole: Any, share: Share, *, seed: int) -> None:
        self._whole, self._share = whole, share
        self.batch_size = getattr(whole, "batch_size", None)
        self.generator = torch.Generator().manual_seed(seed % 2**63)
        # Rows of each whole batch that is on its way, of several ranks: it is read ahead.
        self.drawn: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._whole)

    def __iter__(self) -> Iterator[Any]:
        self.drawn.clear()
        seed = int(torch.randint(2**32, (), generator=self.generator))
        of_epoch = random.Random(seed).getstate(), np.random.MT19937(seed)
        found, of_python = self._drawn(partial(iter, self._whole), *of_epoch)
        return self._parts(found, of_python, of_epoch[1])

    def _parts(
        self, found: Iterator[Any], of_python: Any, of_numpy: np.random.MT19937
    ) -> Iterator[Any]:
        while True:
            batch, of_python = self._drawn(partial(next, found, _END), of_python, of_numpy)
            if batch is _END:
                return
            if self._share.size > 1:
                batch = batch if hasattr(batch, "__getitem__") else list(batch)
                self.drawn.append(len(batch))
                batch = batch[self._share.part(len(batch))]
            yield batch

    def _drawn(
        self, draw: Callable[[], Any], of_python: Any, of_numpy: np.random.MT19937
    ) -> tuple[Any, Any]:
        """What it gives, with the state of Python's numbers then."""
        kept = torch.get_rng_state(), random.getstate(), mtrand.get_bit_generator()
        torch.set_rng_state(self.generator.get_state())
        random.setstate(of_python)
        mtrand.set_bit_generator(of_numpy)  # 0.3 us, where its state would take 100
        try:
            return draw(), random.getstate()
        finally:
            self.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(kept[0])
            random.setstate(kept[1])
            mtrand.set_bit_generator(kept[2])


def shared_loader(loader: Any, *, rank: int, size: int, seed: int) -> Any:
    """The loader, with this rank's part of each batch; of one process with all of it, in the same
    order.

    One that cannot be split is left as it is in one process; of several it raises DataError.
    """
    what, remedy = _unsplit(loader)
    if what and size == 1:
        return loader
    if what:
        raise DataError(f"data.source: {what} cannot be split over {size} processes; {remedy}")
    # A copy: it keeps its class, its workers and all else, and a loader takes no other sampler.
    shared = copy.copy(loader)
    batches = IndexBatches(loader.batch_sampler, Share(rank, size), seed=seed)
    object.__setattr__(shared, "batch_sampler", batches)
    shared._iterator = None  # of workers that stay, which know the other sampler
    shared.in_order = loader.in_order or size > 1  # as the rows of its batches are counted
    return shared


def _unsplit(loader: Any) -> tuple[str, str]:
    """What about a loader is in the way of splitting it, with the remedy; nothing where it can."""
    remedy = "return a Dataset with __getitem__ and __len__, or train in one process"
    if not isinstance(loader, DataLoader):
        return f"a loader that is a {type(loader).__name__} and no DataLoader", remedy
    if isinstance(loader.dataset, IterableDataset):
        return "a loader over an IterableDataset", remedy
    if type(loader).__iter__ is not DataLoader.__iter__:
        return (
            f"a {type(loader).__name__}, which has an __iter__ of its own,",
            "return a plain DataLoader, or train in one process",
        )
    batches = loader.batch_sampler
    if batches is None:
        return "a loader with batch_size=None", "set batch_size, or give it a batch_sampler"
    if isinstance(getattr(batches, "sampler", loader.sampler), DistributedSampler):
        return (
            "a loader with a DistributedSampler, which has split it already,",
            "drop the sampler, and set shuffle=True where it shuffles: Headroom splits each batch",
        )
    try:
        len(loader)
    except TypeError:
        return "a loader without a length", "give its batch_sampler a __len__"
    return "", ""
