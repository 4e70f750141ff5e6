"""The feature columns of a table between being read and being written: numbers and codes of
categories in blocks of rows, in memory up to a limit and beyond it in a file that has no name, so
that nothing is left of it whatever ends the process. It refuses a disk that has no room, by the
setting data.cache.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from tasks.engine.files import prepared_cache
from tasks.engine.models.raw_inputs import date_parts

VALUE_BYTES = 8
MOST_CATEGORIES = 1000  # inputs that a column of text becomes


class Spool:
    """Blocks of float64 values, each (columns, rows), for rows that follow each other."""

    def __init__(self, columns: int, *, folder: Path, kept_bytes: int) -> None:
        self.columns = columns
        self.starts = [0]  # of each block, and the number of rows at the end
        self._folder, self._kept_bytes = folder, kept_bytes
        self._memory: dict[int, np.ndarray] = {}
        self._file: int | None = None

    @property
    def rows(self) -> int:
        return self.starts[-1]

    def __len__(self) -> int:
        """How many blocks there are."""
        return len(self.starts) - 1

    def reserve(self, rows: int, *, block_rows: int) -> None:
        """Room for so many rows more, in blocks of `block_rows`, to be filled by `put`."""
        end = self.rows + rows
        self.starts += [*range(self.rows + block_rows, end, block_rows), end]
        if self._file is None and self._at(end) > self._kept_bytes:
            self._to_file()

    def put(self, column: int, start: int, values: np.ndarray) -> None:
        """Values of one column, from row `start` on."""
        block = int(np.searchsorted(self.starts, start, side="right")) - 1
        while len(values):
            first, last = self.starts[block], self.starts[block + 1]
            part, values = values[: last - start], values[last - start :]
            if self._file is not None:
                at = self._at(first) + (column * (last - first) + start - first) * VALUE_BYTES
                self._write(at, part.astype(np.float64))
            else:
                if block not in self._memory:
                    self._memory[block] = np.empty((self.columns, last - first))
                self._memory[block][column, start - first : start - first + len(part)] = part
            start, block = last, block + 1

    def block(self, index: int) -> np.ndarray:
        """The values of a block, (columns, rows); not to be written to."""
        if self._file is None:
            return self._memory[index]
        values = np.empty((self.columns, self.starts[index + 1] - self.starts[index]))
        with prepared_cache.refusals(self._folder):
            if not prepared_cache.filled(values, self._file, self._at(self.starts[index])):
                raise OSError("it ended early")
        return values

    def _at(self, row: int) -> int:
        return row * self.columns * VALUE_BYTES

    def _to_file(self) -> None:
        prepared_cache.check_room(self._folder, self._at(self.rows))
        with prepared_cache.refusals(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115, closed with the spool
        weakref.finalize(self, file.close)
        self._file = file.fileno()
        for index in sorted(self._memory):
            self._write(self._at(self.starts[index]), self._memory.pop(index))

    def _write(self, at: int, values: np.ndarray) -> None:
        assert self._file is not None
        view = values.data.cast("B")
        with prepared_cache.refusals(self._folder):
            while len(view):
                wrote = os.pwrite(self._file, view, at)
                view, at = view[wrote:], at + wrote


@dataclass(frozen=True)
class Table:
    """Feature columns by name; a value that is missing is NaN."""

    names: tuple[str, ...]
    words: tuple[tuple[str, ...] | None, ...]  # of a category, by code; None: numbers
    whole: tuple[bool, ...]  # numbers that are integers or booleans
    holes: tuple[int, ...]  # how many values are missing, before rows were left out
    spool: Spool
    missing: str  # fail, drop or mean
    kept: np.ndarray | None = None  # (rows of the file,) booleans; None: all
    dates: tuple[tuple[str, ...], ...] = ()  # by column: the parts of a date, which is seconds here

    @property
    def shape(self) -> tuple[int, int]:
        rows = self.spool.rows if self.kept is None else int(self.kept.sum())
        return rows, len(self.names)

    @property
    def inputs(self) -> int:
        """About how many inputs the columns become."""
        of_words = sum(min(len(w), MOST_CATEGORIES) + 1 for w in self.words if w is not None)
        return of_words + len(self.owners)

    @property
    def owners(self) -> list[int]:
        """Of each number of a row, as `numbers` tells them, the column that it is of."""
        dates = self.dates or ((),) * len(self.words)
        return [
            i
            for i, (words, parts) in enumerate(zip(self.words, dates, strict=True))
            if words is None
            for _ in parts or (i,)
        ]

    def numbers(self, values: np.ndarray) -> np.ndarray:
        """Of (columns, rows) values those that are numbers, and the parts of dates, (numbers,
        rows)."""
        if not any(self.dates):
            return values if self.numeric.all() else values[self.numeric]
        found = [
            date_parts(column, parts) if parts else column[None]
            for column, parts, words in zip(values, self.dates, self.words, strict=True)
            if words is None
        ]
        return np.concatenate(found) if found else values[:0]

    @property
    def numeric(self) -> np.ndarray:
        """Which columns hold numbers or dates, (columns,) booleans."""
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
