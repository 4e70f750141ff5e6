"""Which rows are trained on, which are validated on, and which are put aside to be judged once, at
the end. By chance, by time, or by groups of rows that stay together. It refuses a split that leaves
a part without a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tasks.engine.files.source_data import DataError, Raw, shorten
from tasks.engine.files.split import STREAM, drawn
from tasks.engine.files.target_encoding import Labels, class_counts, validation_rows
from tasks.engine.settings.data_config import DataConfig

NAMES = {"train": "training", "val": "validation", "test": "test"}


@dataclass(frozen=True)
class RowParts:
    """(rows,) booleans each; test is None where no row is put aside."""

    validation: np.ndarray
    test: np.ndarray | None = None

    @property
    def training(self) -> np.ndarray:
        return ~self.validation if self.test is None else ~(self.validation | self.test)

    def by_name(self) -> dict[str, np.ndarray]:
        found = {"train": self.training, "val": self.validation}
        return found if self.test is None else {**found, "test": self.test}


def parted(raw: Raw, labels: Labels, data: DataConfig) -> RowParts:
    """The parts; the same for the same seed. Errors: DataError."""
    for name in data.own_split if raw.validation is not None else ():
        raise DataError(
            f"data.{name}: has no meaning where {raw.label} gives validation rows of its own; "
            "drop it, or let it give all rows as one"
        )
    if data.split == "random":
        return _random(raw, labels, data)
    rows = len(labels.values)
    keys = np.arange(rows) if raw.split_keys is None else raw.split_keys
    wanted = [data.validation_fraction, *([data.test_fraction] if data.test_fraction else [])]
    counts = [max(1, round(rows * fraction)) for fraction in wanted]
    find = _latest if data.split == "time" else _groups
    places = find(keys, counts, raw, data)
    return RowParts(places == 1, places == 2 if data.test_fraction else None)


def _random(raw: Raw, labels: Labels, data: DataConfig) -> RowParts:
    """Of a classification, the same share of each class."""
    fraction, seed = data.validation_fraction + data.test_fraction, data.split_seed
    held = validation_rows(raw, labels, fraction=fraction, seed=seed)
    if not data.test_fraction:
        return RowParts(held)
    within = replace(labels, values=labels.values[held])
    group, counts = None, np.array([len(within.values)])
    if labels.task == "classification":
        group, counts = within.values, class_counts(within)
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
    test[held] = drawn(group, counts, taken, seed=seed + 2**32)  # no seed of a validation
    return RowParts(held & ~test, test)


def _latest(keys: np.ndarray, counts: list[int], raw: Raw, data: DataConfig) -> np.ndarray:
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


def _groups(keys: np.ndarray, counts: list[int], raw: Raw, data: DataConfig) -> np.ndarray:
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


def _refuse_few(values: int, parts: int, raw: Raw, data: DataConfig) -> None:
    where = "the order of its rows"
    if data.split_column is not None:
        where = f"column {shorten(data.split_column)}"
    raise DataError(
        f"data.split: {raw.label}: {where} has {values:,} different "
        f"{'value' if values == 1 else 'values'}, and each of {parts + 1} parts needs one; choose "
        "another data.split_column, or split by chance"
    )
