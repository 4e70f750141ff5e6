"""The column of a table by which its rows are split, as one number a row: of times their order, of
groups a hash of 64 bits, so that it takes 8 bytes a row however many values there are. It refuses
cells that are missing, and times that are neither numbers nor dates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
import pyarrow as pa
from pyarrow import compute

from tasks.engine.files.columns import DATES, Spelling, find_stray_cell, parse_cells, trim_cells
from tasks.engine.files.source_data import DataError, RawData, shorten
from tasks.engine.files.targets import (
    STREAM,
    Labels,
    choose_validation_rows,
    count_class_rows,
    draw_rows,
)
from tasks.engine.settings.run_config import DataConfig

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
    found = [column.keys(block) for block in blocks]
    column.refuse_holes()
    return np.concatenate(found)


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
                f"data.split_column: {self._label} column {shorten(self._data.split_column)} is of "
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
            keys = self._convert_times(array) if self._data.split == "time" else _hash_cells(array)
        self._rows += len(array)
        return keys

    def refuse_holes(self) -> None:
        """Raises DataError where a cell was missing."""
        if self._holes:
            raise DataError(
                f"data.split_column: {self._at(self._first)} is missing (as in {self._holes:,} "
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
                found = parse_cells(texts, kind, self._spelling)
                self._ways = [kind, *TIMES]
                return found
        row = find_stray_cell(texts, TIMES, self._spelling)
        if row < len(texts):
            self._refuse(row, texts, f"write it as a number, or as {EXAMPLES}")
        self._refuse(0, texts, "the rows near it are written otherwise; write all alike")

    def _refuse(self, row: int, array: pa.Array, why: str) -> NoReturn:
        raise DataError(
            f"data.split_column: {self._at(self._rows + row)} must be a time (got "
            f"{shorten(str(array[row].as_py()))}): {why}"
        )

    def _at(self, row: int) -> str:
        column = shorten(self._data.split_column)
        return f"{self._label} row {row + 1}{self._note}, column {column}:"


def _hash_cells(array: pa.Array) -> np.ndarray:
    coded = array.dictionary_encode()
    words = [str(value).encode() for value in coded.dictionary.to_pylist()]
    hashed = [hashlib.blake2b(word, digest_size=8).digest() for word in words]
    found = np.frombuffer(b"".join(hashed), dtype=np.uint64)
    return found[np.from_dlpack(coded.indices.cast(pa.int64()))]


PART_NAMES = {"train": "training", "val": "validation", "test": "test"}


@dataclass(frozen=True)
class RowParts:
    """The rows of each part, (rows,) booleans each; test is None where there are no test
    rows."""

    validation: np.ndarray
    test: np.ndarray | None = None

    @property
    def training(self) -> np.ndarray:
        return ~self.validation if self.test is None else ~(self.validation | self.test)

    def by_name(self) -> dict[str, np.ndarray]:
        found = {"train": self.training, "val": self.validation}
        return found if self.test is None else {**found, "test": self.test}


def split_rows(raw: RawData, labels: Labels, data: DataConfig) -> RowParts:
    """Split the rows into training, validation and test; the same for the same seed. Errors:
    DataError."""
    for name in data.own_split if raw.validation is not None else ():
        raise DataError(
            f"data.{name}: has no meaning where {raw.label} gives validation rows of its own; "
            "drop it, or let it give all rows as one"
        )
    if data.split == "random":
        return _split_randomly(raw, labels, data)
    rows = len(labels.values)
    keys = np.arange(rows) if raw.split_keys is None else raw.split_keys
    wanted = [data.validation_fraction, *([data.test_fraction] if data.test_fraction else [])]
    counts = [max(1, round(rows * fraction)) for fraction in wanted]
    find = _split_by_time if data.split == "time" else _split_by_group
    places = find(keys, counts, raw, data)
    return RowParts(places == 1, places == 2 if data.test_fraction else None)


def _split_randomly(raw: RawData, labels: Labels, data: DataConfig) -> RowParts:
    """Of a classification, the same share of each class."""
    fraction, seed = data.validation_fraction + data.test_fraction, data.split_seed
    held = choose_validation_rows(raw, labels, fraction=fraction, seed=seed)
    if not data.test_fraction:
        return RowParts(held)
    within = replace(labels, values=labels.values[held])
    group, counts = None, np.array([len(within.values)])
    if labels.task == "classification":
        group, counts = within.values, count_class_rows(within)
    quota = counts * (data.test_fraction / fraction)
    most = np.maximum(counts - 1, 0)  # the validation keeps one
    taken = np.minimum(np.maximum(np.floor(quota), 1), most).astype(np.int64)
    short = np.argsort(taken - quota, kind="stable")
    short = short[taken[short] < most[short]]
    missing = round(len(labels.values) * data.test_fraction) - int(taken.sum())
    taken[short[: max(0, missing)]] += 1
    if not taken.sum():
        raise DataError(
            f"data.test_fraction: {data.test_fraction:g} of the {len(labels.values):,} rows of "
            f"{raw.label} is no row; raise it"
        )
    test = np.zeros(len(held), dtype=bool)
    test[held] = draw_rows(group, counts, taken, seed=seed + 2**32)  # no seed of a validation
    return RowParts(held & ~test, test)


def _split_by_time(
    keys: np.ndarray, counts: list[int], raw: RawData, data: DataConfig
) -> np.ndarray:
    """0 for the earliest rows, 1 for the later ones, 2 for the latest. Rows of one time are in one
    part: it begins at the change of time that is nearest to what was asked for."""
    times = np.sort(keys)
    changes = np.flatnonzero(times[1:] != times[:-1]) + 1
    if len(changes) < len(counts):
        _refuse_few(len(changes) + 1, len(counts), raw, data)
    places, first = np.zeros(len(keys), dtype=np.int8), len(times) - sum(counts)
    for part, count in enumerate(counts, start=1):
        later = len(counts) - part  # changes that the parts after this one need
        open_to = changes[: len(changes) - later]
        begin = open_to[np.argmin(np.abs(open_to - first))]
        places += keys >= times[begin]
        changes, first = changes[changes > begin], first + count
    return places


def _split_by_group(
    keys: np.ndarray, counts: list[int], raw: RawData, data: DataConfig
) -> np.ndarray:
    """0, 1 or 2 for each row, the same for all rows of a group. Groups are drawn until a part is as
    near to its share of the rows as whole groups bring it."""
    names, of, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    if len(names) < len(counts) + 1:
        _refuse_few(len(names), len(counts), raw, data)
    order = np.random.default_rng([STREAM, data.split_seed]).permutation(len(names))
    part = np.zeros(len(names), dtype=np.int8)
    for number, count in enumerate(counts, start=1):
        left = len(counts) - number + 1  # groups that the other parts need
        filled = np.cumsum(sizes[order])[: len(order) - left]
        taken = int(np.argmin(np.abs(filled - count))) + 1
        part[order[:taken]], order = number, order[taken:]
    return part[of]


def _refuse_few(values: int, parts: int, raw: RawData, data: DataConfig) -> None:
    where = "the order of its rows"
    if data.split_column is not None:
        where = f"column {shorten(data.split_column)}"
    raise DataError(
        f"data.split: {raw.label}: {where} has {values:,} different "
        f"{'value' if values == 1 else 'values'}, and each of {parts + 1} parts needs one; choose "
        "another data.split_column, or split by chance"
    )
