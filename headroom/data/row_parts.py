"""Split the rows of a data set into training, validation and test: by chance, with the same share
of each class, by time or by groups. The same seed gives the same parts. It refuses parts for which
there are too few rows, times or groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from headroom.data.source_data import MOST_SHOWN, DataError, RawData, format_list, shorten
from headroom.data.targets import BLOCK_ROWS, Labels, count_class_rows
from headroom.settings.run_config import DataConfig

MOST_BINS = 1 << 12
# Beside the seed: rows that their user drew with the same one would else lie in validation for
# what their first column says.
STREAM = 0x5EED


@dataclass(frozen=True)
class RowParts:
    """The rows of each part, (rows,) booleans each; test is None where there are no test rows."""

    validation: np.ndarray
    test: np.ndarray | None = None

    @property
    def training(self) -> np.ndarray:
        return ~self.validation if self.test is None else ~(self.validation | self.test)

    def by_name(self) -> dict[str, np.ndarray]:
        parts = {"train": self.training, "val": self.validation}
        return parts if self.test is None else {**parts, "test": self.test}


def split_rows(raw: RawData, labels: Labels, data: DataConfig) -> RowParts:
    """Split the rows into training, validation and test; the same for the same seed. Errors:
    DataError."""
    for name in data.own_split if raw.validation is not None else ():
        raise DataError(
            f"data.{name}: has no meaning where {raw.label} gives validation rows of its own; "
            "drop it, or let it give all rows as one"
        )
    if data.split_by == "random":
        return _split_randomly(raw, labels, data)
    rows = len(labels.values)
    keys = np.arange(rows) if raw.split_keys is None else raw.split_keys
    wanted = [data.validation_fraction, *([data.test_fraction] if data.test_fraction else [])]
    counts = [max(1, round(rows * fraction)) for fraction in wanted]
    find = _split_by_time if data.split_by == "time" else _split_by_group
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
        "another column, or split by chance"
    )


def draw_rows(
    group: np.ndarray | None, counts: np.ndarray, taken: np.ndarray, *, seed: int
) -> np.ndarray:
    """Draw rows for validation: (rows,) booleans, true for taken[k] rows of each class k; the
    same for the same seed.

    group: (rows,) classes from 0, None where all rows are of one; counts: rows of each.
    """
    rows, classes = int(counts.sum()), len(counts)
    bins = max(1, min(MOST_BINS, (1 << 20) // classes))
    seen = np.zeros(classes * bins, dtype=np.int64)
    for _, _, _, place in _iterate_random_blocks(group, rows, seed, bins):
        seen += np.bincount(place, minlength=len(seen))
    below = np.cumsum(seen.reshape(classes, bins), axis=1)
    # The bin in which the last row to take lies: those below are taken, of it the smallest few.
    last = (below >= taken[:, None]).argmax(axis=1)
    left = taken - np.where(last > 0, below[np.arange(classes), np.maximum(last - 1, 0)], 0)
    edge = np.arange(classes) * bins + last
    chosen = np.zeros(rows, dtype=bool)
    open_rows, open_values, open_groups = [], [], []
    for start, values, of, place in _iterate_random_blocks(group, rows, seed, bins):
        at = edge[of]
        chosen[start : start + len(values)] = place < at
        inside = np.flatnonzero(place == at)
        open_rows.append(start + inside)
        open_values.append(values[inside])
        open_groups.append(of[inside])
    row, of = np.concatenate(open_rows), np.concatenate(open_groups)
    order = np.lexsort((np.concatenate(open_values), of))
    ends = np.searchsorted(of[order], np.arange(classes))
    rank = np.arange(len(order)) - ends[of[order]]
    chosen[row[order][rank < left[of[order]]]] = True
    return chosen


def _iterate_random_blocks(
    group: np.ndarray | None, rows: int, seed: int, bins: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """In blocks: the first row, each row's random number, its class, and its bin among those of
    all classes."""
    random = np.random.default_rng([STREAM, seed])
    for start in range(0, rows, BLOCK_ROWS):
        count = min(BLOCK_ROWS, rows - start)
        values = random.random(count)
        some = np.zeros(count, np.int64) if group is None else group[start : start + count]
        of = some.astype(np.int64)
        yield start, values, of, of * bins + (values * bins).astype(np.int64)


def choose_validation_rows(
    raw: RawData, labels: Labels, *, fraction: float, seed: int
) -> np.ndarray:
    """Choose the rows for validation, as (n,) booleans; the same for the same seed.

    Where the source brought a split of its own, that. Else a classification takes the fraction
    of each class, at least one row and not all of them; what rounding leaves over goes to the
    classes that are furthest below theirs. Errors: DataError naming the classes of one row, or
    where a part would have no row.
    """
    rows = len(labels.values)
    if raw.validation is not None:
        return _use_given_split(raw, rows)
    if labels.task != "classification":
        group, counts = None, np.array([rows])
    else:
        assert labels.class_names is not None
        group = labels.values
        counts = count_class_rows(labels)
        lonely = [labels.class_names[i] for i in np.flatnonzero(counts < 2)]
        if lonely:
            raise DataError(
                f"data.target: {raw.label} has classes of one row, which cannot be in both parts: "
                f"{format_list(lonely, MOST_SHOWN)}; add rows of them, or drop them"
                + (
                    ", or set data.task to regression if these are amounts"
                    if raw.target.dtype.kind != "O"
                    else ""
                )
            )
    quota = counts * fraction
    taken = np.clip(np.floor(quota), 1, counts - 1).astype(np.int64)
    below = np.argsort(-(quota - taken), kind="stable")
    below = below[taken[below] < counts[below] - 1]
    taken[below[: max(0, round(rows * fraction) - int(taken.sum()))]] += 1
    return draw_rows(group, counts, taken, seed=seed)


def _use_given_split(raw: RawData, rows: int) -> np.ndarray:
    chosen = np.asarray(raw.validation, dtype=bool)
    assert chosen.shape == (rows,)
    if chosen.all() or not chosen.any():
        part = "training" if chosen.all() else "validation"
        raise DataError(f"data.source: {raw.label} has no {part} rows; give both parts some")
    return chosen
