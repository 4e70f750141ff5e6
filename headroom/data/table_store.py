"""Keep the features of a table as numbers, in memory or in a file that has no name, and hand them
out block by block: a table may be larger than memory. It refuses a disk that has no room, by the
setting data.cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headroom.base.raw_inputs import compute_date_parts
from headroom.base.threads import R, count_usable_threads, map_in_order
from headroom.data import prepared_cache

if TYPE_CHECKING:  # it brings pyarrow, and most runs read no table
    from headroom.data.columns import LearntColumn

VALUE_BYTES = 8
MOST_CATEGORIES = 1000  # inputs that a column of text becomes


class RowStore:
    """Blocks of float64 values, each (columns, block_rows), for rows that follow each other; the
    last may have fewer. Sums over blocks depend on how rows are cut, which is why it is not done as
    they come: the same rows become the same to the bit, whatever the format and its blocks."""

    def __init__(
        self, columns: int, folder: Path, *, block_rows: int, is_small: bool = False
    ) -> None:
        """is_small: they lie in memory, and not in a file in this folder."""
        self.columns, self.block_rows, self.rows = columns, block_rows, 0
        self._file = prepared_cache.ScratchFile(folder, is_in_memory=is_small)

    @property
    def starts(self) -> list[int]:
        """Of each block, and the number of rows at the end."""
        return [*range(0, self.rows, self.block_rows), self.rows]

    def reserve(self, rows: int) -> None:
        """Make room for so many rows more, to be filled by `put`."""
        self.rows += rows

    def put(self, column: int, start: int, values: np.ndarray) -> None:
        """Store values of one column, from row `start` on."""
        while len(values):
            left = self.block_rows - start % self.block_rows
            part, values = values[:left], values[left:]
            self._file.write(np.asarray(part, dtype=np.float64), self._find_place(column, start))
            start += len(part)

    def read(self) -> Iterator[np.ndarray]:
        """Yield the values of each block, (columns, rows)."""
        for first, last in pairwise(self.starts):
            values = np.empty((self.columns, last - first))
            if last - first == self.block_rows:
                self._file.fill(values, self._find_place(0, first))
            else:  # behind the last rows of a column there is nothing
                for column, part in enumerate(values):
                    self._file.fill(part, self._find_place(column, first))
            yield values

    def _find_place(self, column: int, row: int) -> int:
        """Where a value is in the file, in bytes."""
        first = row - row % self.block_rows
        return (first * self.columns + column * self.block_rows + row - first) * VALUE_BYTES


@dataclass(frozen=True)
class Table:
    """Feature columns; a value that is missing is NaN."""

    columns: tuple[LearntColumn, ...]
    store: RowStore
    missing: str  # fail, drop or mean
    kept: np.ndarray | None = None  # (rows of the file,) booleans; None: all

    @property
    def shape(self) -> tuple[int, int]:
        rows = self.store.rows if self.kept is None else int(self.kept.sum())
        return rows, len(self.columns)

    @property
    def inputs(self) -> int:
        """About how many inputs the columns become."""
        words = [column.words for column in self.columns if column.words is not None]
        return sum(min(len(w), MOST_CATEGORIES) + 1 for w in words) + len(self.owners)

    @property
    def owners(self) -> list[int]:
        """Of each number of a row, as `numbers` tells them, the column that it is of."""
        columns = enumerate(self.columns)
        return [i for i, c in columns if c.words is None for _ in c.parts or (i,)]

    @property
    def numeric(self) -> np.ndarray:
        """Which columns hold numbers or dates, (columns,) booleans."""
        return np.array([column.words is None for column in self.columns], dtype=bool)

    def numbers(self, values: np.ndarray) -> np.ndarray:
        """Return, of (columns, rows) values, the numbers and the parts of dates, (numbers,
        rows)."""
        if not any(column.parts for column in self.columns):
            return values if self.numeric.all() else values[self.numeric]
        numbers = [
            compute_date_parts(cells, column.parts) if column.parts else cells[None]
            for cells, column in zip(values, self.columns, strict=True)
            if column.words is None
        ]
        return np.concatenate(numbers) if numbers else values[:0]

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        """All rows as float64, codes for categories."""
        blocks = self.map_blocks(lambda _, values: values.T)
        return np.ascontiguousarray(np.concatenate(list(blocks)))

    def map_blocks(
        self, work: Callable[[int, np.ndarray], R], *, threads: int | None = None
    ) -> Iterator[R]:
        """Yield work(start, values) of the rows that count, block by block: the place of its
        first row among them, and (columns, rows) float64."""

        return map_in_order(
            lambda block: work(*block), self._cut_rows(), threads=threads or count_usable_threads()
        )

    def _cut_rows(self) -> Iterator[tuple[int, np.ndarray]]:
        start = 0
        for (first, last), values in zip(
            pairwise(self.store.starts), self.store.read(), strict=True
        ):
            if self.kept is not None:
                values = values[:, self.kept[first:last]]
            yield start, values
            start += values.shape[1]

    def find_whole_rows(self) -> np.ndarray:
        """Return which rows miss nothing, (rows of the file,) booleans."""
        some = [i for i, column in enumerate(self.columns) if column.holes]
        everything = replace(self, kept=None)
        is_whole = everything.map_blocks(lambda _, values: ~np.isnan(values[some]).any(axis=0))
        return np.concatenate(list(is_whole))
