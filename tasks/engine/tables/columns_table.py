"""The feature columns of a table as they were read: numbers and codes of categories in a spool,
row by row where a person or a test asks for them. It holds no rows itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from tasks.engine.tables.spill_file import Spool


@dataclass(frozen=True)
class Table:
    """Feature columns by name; a value that is missing is NaN."""

    names: tuple[str, ...]
    words: tuple[tuple[str, ...] | None, ...]  # of a category, by code; None: numbers
    whole: tuple[bool, ...]  # numbers that are integers or booleans
    holes: tuple[int, ...]  # how many values are missing, before rows were left out
    largest: tuple[float, ...]  # of numbers, in size
    spool: Spool
    missing: str  # fail, drop or mean
    kept: np.ndarray | None = None  # (rows of the file,) booleans; None: all

    @property
    def shape(self) -> tuple[int, int]:
        rows = self.spool.rows if self.kept is None else int(self.kept.sum())
        return rows, len(self.names)

    @property
    def inputs(self) -> int:
        """About how many inputs the columns become."""
        return sum(1 if words is None else len(words) + 1 for words in self.words)

    @property
    def numeric(self) -> np.ndarray:
        """Which columns hold numbers, (columns,) booleans."""
        return np.array([words is None for words in self.words], dtype=bool)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        """All rows as float64, codes for categories."""
        blocks = [self.block(i).T for i in range(len(self.spool))]
        return np.ascontiguousarray(np.concatenate(blocks))

    def only(self, kept: np.ndarray) -> Table:
        """The same table, of whose rows only some count."""
        return replace(self, kept=kept)

    def starts(self) -> list[int]:
        """Where the blocks begin among the rows that count, and the number of these."""
        if self.kept is None:
            return list(self.spool.starts)
        bounds = self.spool.starts
        counts = [int(self.kept[a:b].sum()) for a, b in pairwise(bounds)]
        return [0, *accumulate(counts)]

    def block(self, index: int) -> np.ndarray:
        """The rows that count of a block, (columns, rows) float64; not to be written to."""
        values = self.spool.block(index)
        if self.kept is None:
            return values
        first, last = self.spool.starts[index : index + 2]
        return values[:, self.kept[first:last]]

    def whole_rows(self) -> np.ndarray:
        """Which rows miss nothing, (rows of the file,) booleans."""
        found = np.ones(self.spool.rows, dtype=bool)
        some = [i for i, count in enumerate(self.holes) if count]
        for index in range(len(self.spool)):
            first, last = self.spool.starts[index : index + 2]
            found[first:last] = ~np.isnan(self.spool.block(index)[some]).any(axis=0)
        return found
