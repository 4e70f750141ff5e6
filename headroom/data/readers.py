"""The one way from a file to its rows, for training and prediction alike: FORMATS (file_formats.py)
names what opens a file of each format, and what is open is a table or holds arrays. Either knows
what the head of its file says, and reads the rows anew each time, block by block, so that a file
may be larger than memory. Whatever is wrong is a DataError that names the row, line or column.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headroom.settings.file_formats import FORMATS

if TYPE_CHECKING:  # pyarrow takes 0.1 s, and most runs read no table
    import numpy as np
    import pyarrow as pa

    from headroom.data.arrays import ArrayHeader

USUAL_BYTES = 1 << 30  # of memory, where nobody says how much reading may take


class TableFile(Protocol):
    """A file of rows in named columns."""

    @property
    def path(self) -> Path: ...

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns, as they lie; not always different ones."""

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        """Of the columns; all of them string where `is_written`."""

    @property
    def is_written(self) -> bool:
        """True if cells are text as it is written, and what they hold is for others to find."""

    @property
    def note(self) -> str:
        """How rows are counted, always from 1, in words that follow a row's number."""

    @property
    def rows(self) -> int | None:
        """As the head claims; None where only reading tells."""

    @property
    def amount(self) -> int:
        """How much there is to read, in units of the file's own."""

    @property
    def column_bytes(self) -> int:
        """Memory that reading a column takes beside its values."""

    def count_most_cells(self, columns: int) -> int:
        """Return how many cells so many columns may hold at the most."""

    def read(self, places: Sequence[int]) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield all rows of the columns at these places, block by block, in order; and how much of
        `amount` has been read."""


class ArrayFile(Protocol):
    """A file of arrays with names; one alone may have none."""

    @property
    def headers(self) -> Mapping[str, ArrayHeader]: ...

    def load(self, names: Sequence[str], memory_mib: float | None) -> list[np.ndarray]:
        """Return whole arrays, mapped where the file allows it, else within so much memory."""

    def read(self, names: Sequence[str], block_bytes: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield blocks of the rows of arrays that have as many, each block about so large, and one
        block even of no rows. Nothing of them is mapped."""


def open_table(
    path: Path, source: str, *, allowed_bytes: int = USUAL_BYTES, skips_late: bool = False
) -> TableFile:
    """Open a table by its head. allowed_bytes: of memory that reading may take. skips_late: columns
    that come to light only below the head are left out; else they are refused. Errors: DataError.
    """
    table: TableFile = _find_opener(source)(
        path, source, allowed_bytes=allowed_bytes, skips_late=skips_late
    )
    return table


def open_arrays(
    path: Path,
    source: str,
    pick: Callable[[list[str]], Collection[str]] = lambda names: names,
) -> ArrayFile:
    """Open a file of arrays by the headers of those that `pick` chooses by name. Errors:
    DataError."""
    arrays: ArrayFile = _find_opener(source)(path, pick)
    return arrays


def _find_opener(source: str) -> Callable[..., Any]:
    module, _, name = FORMATS[source].opens.partition(":")
    opener: Callable[..., Any] = getattr(import_module(module), name)
    return opener


def read_cell(table: TableFile, place: int, row: int) -> str:
    """Return a cell of the column at `place` as it is written, empty where it is missing; the file
    is read up to it."""
    for cells, _ in table.read([place]):
        if row < len(cells):
            value = cells[0][row].as_py()
            return "" if value is None else str(value)
        row -= len(cells)
    return ""
