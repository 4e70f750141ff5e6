"""Split the rows of a data set into training, validation and test: by chance, with the same share
of each class, by time or by groups. The same seed gives the same parts. It refuses parts for which
there are too few rows, times or groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tasks.engine.data.targets import (
    STREAM,
    Labels,
    choose_validation_rows,
    count_class_rows,
    draw_rows,
)
from tasks.engine.files.source_data import DataError, RawData, shorten
from tasks.engine.settings.run_config import DataConfig


@dataclass(frozen=True)
class RowParts:
    """The rows of each part, (rows,) booleans each; test is None where there are no test rows."""

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
