"""Rows of an array on disk, read by calls and not through a memory map, whose pages would stay in
the memory of the process: slower, and for those who asked for little memory. It refuses an array
that is no map of a file.
"""

from __future__ import annotations

import os
import weakref

import numpy as np

from tasks.engine.files import prepared_cache


class Unmapped:
    """The rows of a memory-mapped array, C-contiguous, with as much of an array as readers use."""

    def __init__(self, array: np.ndarray) -> None:
        source = array
        while not isinstance(source, np.memmap):
            assert isinstance(source.base, np.ndarray), "an array that is no map of a file"
            source = source.base
        assert source.filename is not None
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes
        self._row_bytes = array.nbytes // max(1, len(array))
        self._begin = source.offset + array.ctypes.data - source.ctypes.data
        self._file = os.open(source.filename, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        first, last, _ = rows.indices(len(self))
        found = np.empty((max(0, last - first), *self.shape[1:]), self.dtype)
        self._read(found, first)
        return found

    def take(
        self, rows: np.ndarray, axis: int = 0, out: np.ndarray | None = None, mode: str = "raise"
    ) -> np.ndarray:
        """The rows of these numbers, in their order; `axis` is 0."""
        found = np.empty((len(rows), *self.shape[1:]), self.dtype) if out is None else out
        for i, row in enumerate(rows.tolist()):
            self._read(found[i : i + 1], row)
        return found

    def _read(self, into: np.ndarray, first_row: int) -> None:
        if not prepared_cache.filled(into, self._file, self._begin + first_row * self._row_bytes):
            raise EOFError("data.cache: prepared rows ended early; start again")
