"""Read the column of a table by which its rows are split, as one number a row: of times their
order, of groups a hash of 64 bits, so that it takes 8 bytes a row however many values there are. It
refuses cells that are missing, and times that are neither numbers nor dates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from typing import NoReturn

import numpy as np
import pyarrow as pa
from pyarrow import compute

from headroom.data.columns import DATES, Spelling, find_stray_cell, parse_cells, trim_cells
from headroom.data.source_data import DataError, shorten
from headroom.settings.run_config import DataConfig

TYPES = (
    *(pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal),
    *(pa.types.is_date, pa.types.is_timestamp, pa.types.is_string, pa.types.is_null),
)

TIMES = (pa.int64(), pa.float64(), *DATES[:2])  # what cells of text may be as times

EXAMPLES = "2026-11-22 or 2026-11-22T18:30:00"


def compute_split_keys(
    blocks: Iterable[pa.Array], data: DataConfig, *, label: str, note: str, spelling: Spelling
) -> np.ndarray:
    """Compute the split keys: (rows,) int64 or float64 times, or uint64 groups. label, note:
    of the rows, for the message. spelling: of cells of text.

    Errors: DataError.
    """
    column = _KeyColumn(data, label, note, spelling)
    keys = [column.keys(block) for block in blocks]
    column.refuse_holes()
    return np.concatenate(keys)


class _KeyColumn:
    def __init__(self, data: DataConfig, label: str, note: str, spelling: Spelling) -> None:
        self._data, self._label, self._note, self._spelling = data, label, note, spelling
        self._rows = self._holes = self._first = 0
        self._is_date: bool | None = None
        self._ways = list(TIMES)  # first that of the block before

    def keys(self, array: pa.Array) -> np.ndarray:
        """Of the next rows."""
        if pa.types.is_dictionary(array.type):
            array = array.cast(array.type.value_type)
        if pa.types.is_string_view(array.type) or pa.types.is_large_string(array.type):
            array = array.cast(pa.string())
        if not any(fits(array.type) for fits in TYPES):
            raise DataError(
                f"data.split: {self._label} column {shorten(self._data.split_column)} is of "
                f"type {str(array.type)[:60]!r}; write it as numbers, dates or text"
            )
        if pa.types.is_string(array.type):
            array = trim_cells(array, self._spelling)
        missing = compute.is_null(array, nan_is_null=True)
        holes = compute.sum(missing).as_py() or 0
        if holes and not self._holes:
            self._first = self._rows + compute.index(missing, True).as_py()
        self._holes += holes
        if holes:  # which is refused when all has been counted
            keys = np.zeros(len(array), dtype=np.int64)
        else:
            keys = (
                self._convert_times(array) if self._data.split_by == "time" else _hash_cells(array)
            )
        self._rows += len(array)
        return keys

    def refuse_holes(self) -> None:
        """Raises DataError where a cell was missing."""
        if self._holes:
            raise DataError(
                f"data.split: {self._at(self._first)} is missing (as in {self._holes:,} "
                "rows); fill it in or drop the rows"
            )

    def _convert_times(self, array: pa.Array) -> np.ndarray:
        if pa.types.is_string(array.type):
            array = self._parse(array)
        is_date = pa.types.is_temporal(array.type)
        if self._is_date not in (None, is_date):
            self._refuse(0, array, "other rows hold " + ("numbers" if is_date else "dates"))
        self._is_date = is_date
        if is_date:
            if pa.types.is_date(array.type):
                array = array.cast(pa.timestamp("us"))
            array = array.cast(pa.int64())
        elif not pa.types.is_signed_integer(array.type):
            array = array.cast(pa.float64(), safe=False)
        return np.from_dlpack(array).copy()  # not what lies in Arrow's memory

    def _parse(self, texts: pa.Array) -> pa.Array:
        """Numbers, or dates and times as ISO 8601 writes them."""
        for kind in self._ways:
            with suppress(pa.ArrowInvalid):
                parsed = parse_cells(texts, kind, self._spelling)
                self._ways = [kind, *TIMES]
                return parsed
        row = find_stray_cell(texts, TIMES, self._spelling)
        if row < len(texts):
            self._refuse(row, texts, f"write it as a number, or as {EXAMPLES}")
        self._refuse(0, texts, "the rows near it are written otherwise; write all alike")

    def _refuse(self, row: int, array: pa.Array, why: str) -> NoReturn:
        raise DataError(
            f"data.split: {self._at(self._rows + row)} must be a time (got "
            f"{shorten(str(array[row].as_py()))}): {why}"
        )

    def _at(self, row: int) -> str:
        column = shorten(self._data.split_column)
        return f"{self._label} row {row + 1}{self._note}, column {column}:"


def _hash_cells(array: pa.Array) -> np.ndarray:
    coded = array.dictionary_encode()
    words = [str(value).encode() for value in coded.dictionary.to_pylist()]
    hashed = [hashlib.blake2b(word, digest_size=8).digest() for word in words]
    hashes = np.frombuffer(b"".join(hashed), dtype=np.uint64)
    return hashes[np.from_dlpack(coded.indices.cast(pa.int64()))]
