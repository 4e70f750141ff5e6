"""Where the columns of a table wait between being read and being written: blocks of rows, in memory
up to a limit and beyond it in a file that has no name, so that nothing is left of it whatever ends
the process. It refuses a disk that has no room, by the setting data.cache.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path

import numpy as np

from tasks.engine.files import prepared_cache

VALUE_BYTES = 8


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

    def append(self, block: np.ndarray) -> None:
        """The next rows, (columns, rows) float64."""
        self.starts.append(self.rows + block.shape[1])
        if self._file is None and self._bytes(self.rows) > self._kept_bytes:
            self._to_file()
        if self._file is None:
            self._memory[len(self) - 1] = block
        else:
            self._write(len(self) - 1, 0, block)

    def reserve(self, rows: int, *, block_rows: int) -> None:
        """Room for so many rows, to be filled by `put`, in blocks of `block_rows`."""
        assert not len(self) and rows
        if self._bytes(rows) > self._kept_bytes:
            prepared_cache.check_room(self._folder, self._bytes(rows))
        self.starts += [*range(block_rows, rows, block_rows), rows]
        if self._bytes(rows) > self._kept_bytes:
            self._to_file()

    def put(self, column: int, start: int, values: np.ndarray) -> None:
        """Values of one column, from row `start` on."""
        block = int(np.searchsorted(self.starts, start, side="right")) - 1
        while len(values):
            first, last = self.starts[block], self.starts[block + 1]
            part, values = values[: last - start], values[last - start :]
            if self._file is not None:
                at = column * (last - first) + start - first
                self._write(block, at, np.ascontiguousarray(part, dtype=np.float64))
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
            if not prepared_cache.filled(values, self._file, self._bytes(self.starts[index])):
                raise OSError("it ended early")
        return values

    def _bytes(self, rows: int) -> int:
        return rows * self.columns * VALUE_BYTES

    def _to_file(self) -> None:
        with prepared_cache.refusals(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file, name = tempfile.mkstemp(prefix=".rows.", suffix=".tmp", dir=self._folder)
            os.unlink(name)
        weakref.finalize(self, os.close, self._file)
        for index in sorted(self._memory):
            self._write(index, 0, self._memory.pop(index))

    def _write(self, block: int, value: int, values: np.ndarray) -> None:
        assert self._file is not None
        view = np.ascontiguousarray(values).data.cast("B")
        at = self._bytes(self.starts[block]) + value * VALUE_BYTES
        with prepared_cache.refusals(self._folder):
            while len(view):
                wrote = os.pwrite(self._file, view, at)
                view, at = view[wrote:], at + wrote
