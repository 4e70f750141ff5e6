"""What the columns of a table say of themselves, in one pass over its blocks: count, mean and
squares of the training rows' numbers, and how often each text is there. It refuses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from tasks.engine.base.ordered_threads import in_order, usable_threads
from tasks.engine.tables.columns_table import Table


@dataclass(frozen=True)
class Moments:
    """What rows say of each of some columns: (columns,) each."""

    count: np.ndarray
    mean: np.ndarray
    squares: np.ndarray  # the sum of the squares of the differences from the mean

    def plus(self, other: Moments) -> Moments:
        """Of both together (Chan, Golub, LeVeque 1983): no small deviation is lost beside a large
        mean."""
        count = self.count + other.count
        share = other.count / np.maximum(count, 1)
        apart = other.mean - self.mean
        return Moments(
            count,
            self.mean + apart * share,
            self.squares + other.squares + apart**2 * self.count * share,
        )


@dataclass(frozen=True)
class Counted:
    """A block's share of what is measured."""

    moments: Moments  # of its training rows
    words: tuple[np.ndarray, ...]  # of all its rows: how often each code is there, by category


def measured(table: Table, for_training: np.ndarray) -> Counted:
    """Of all blocks together, added in their order. for_training: (rows,) booleans."""
    items = zip(range(len(table.spool)), table.starts(), strict=False)
    work = partial(_counted, table, for_training)
    blocks = in_order(work, items, threads=usable_threads())
    total = next(blocks)
    for block in blocks:
        words = tuple(a + b for a, b in zip(total.words, block.words, strict=True))
        total = Counted(total.moments.plus(block.moments), words)
    return total


def _counted(table: Table, for_training: np.ndarray, block: tuple[int, int]) -> Counted:
    index, start = block
    values = table.block(index)
    numeric = table.numeric
    chosen = for_training[start : start + values.shape[1]].astype(np.float64)
    numbers = values if numeric.all() else values[numeric]
    holes = [h > 0 for h, is_number in zip(table.holes, numeric, strict=True) if is_number]
    words = [w for w in table.words if w is not None]
    counts = tuple(
        np.bincount(codes[~np.isnan(codes)].astype(np.int64), minlength=len(known))
        for codes, known in zip(values[~numeric], words, strict=True)
    )
    return Counted(moments_of(numbers, chosen, holes=any(holes) and table.kept is None), counts)


def moments_of(values: np.ndarray, chosen: np.ndarray, *, holes: bool) -> Moments:
    """Of one block. values: (columns, rows); chosen: (rows,) 1 where a row counts, else 0."""
    if not holes:
        count = np.full(len(values), chosen.sum())
        mean = values @ chosen / np.maximum(count, 1)
        apart = values - mean[:, None]
        apart *= chosen
        left = apart.sum(axis=1)
    else:
        there = ~np.isnan(values) * chosen
        count = there.sum(axis=1)
        values = np.where(there > 0, values, 0)
        mean = values.sum(axis=1) / np.maximum(count, 1)
        apart = (values - mean[:, None]) * there
        left = apart.sum(axis=1)
    squares = np.einsum("ij,ij->i", apart, apart)
    most = np.maximum(count, 1)
    return Moments(count, mean + left / most, np.maximum(squares - left**2 / most, 0))


def standard(moments: Moments, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation, where what is missing counts as the mean; constants get deviation 1."""
    deviation = np.sqrt(moments.squares / rows)
    rounding = 8 * np.finfo(np.float64).eps * np.abs(moments.mean)
    return moments.mean, np.where(deviation > rounding, deviation, 1.0)
