"""Make the inputs of a model from features: numbers standardized by what the training rows say of
them, missing ones filled in by their mean, categories as one input for each of their values. It
works in blocks of rows, so that data larger than memory passes through. It refuses values that
arithmetic would turn into NaN or infinity, each by its row and column, and a column of which too
little is left to learn from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headroom.base.facts import Column
from headroom.base.raw_inputs import LARGEST
from headroom.data.source_data import DataError, RawData, format_list, shorten
from headroom.data.table_store import MOST_CATEGORIES, Table

LARGEST_FEATURE = LARGEST  # 1e38 is some format's "missing"; predictions hold the same
LARGEST_SCALED = 1e30
SCALED_VALUES = 1 << 19  # 4 MiB of float64


@dataclass(frozen=True)
class Scaling:
    """x_scaled = (x - offset) / scale, with float64 arrays that broadcast over rows."""

    offset: np.ndarray
    scale: np.ndarray


def iterate_feature_blocks(raw: RawData) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield the features in blocks of rows as float64."""
    rows = max(1, SCALED_VALUES // max(1, int(np.prod(raw.features.shape[1:]))))
    for start in range(0, len(raw.features), rows):
        part = slice(start, start + rows)
        with np.errstate(invalid="ignore"):  # a signalling NaN, which is refused as any other
            x = np.asarray(raw.features[part], dtype=np.float64)
        yield part, x


def measure_scaling(raw: RawData, *, for_training: np.ndarray, scale: bool) -> Scaling:
    """Measure mean and deviation of the training rows: per feature, or of all pixels of images.

    Constant features get scale 1. Errors: DataError naming the first value that is no usable
    number.
    """
    image = raw.features.ndim == 4
    axes = (0, 1, 2, 3) if image else (0,)
    width = 1 if image else raw.features.shape[1]
    total, largest, count = np.zeros(width), np.zeros(width), 0
    for part, x in iterate_feature_blocks(raw):
        _refuse_bad(raw, part.start, x)
        chosen = x[for_training[part]]
        total += chosen.sum(axis=axes)
        largest = np.maximum(largest, np.abs(chosen).max(axis=axes, initial=0))
        count += chosen.size // width
    if not scale:
        return Scaling(np.zeros(width), np.ones(width))
    # In a second pass, about a first mean: a mean of squares loses a small deviation beside a
    # large mean. What is left of the differences corrects both (Chan, Golub, LeVeque 1983).
    first, squares, left = total / count, np.zeros(width), np.zeros(width)
    for part, x in iterate_feature_blocks(raw):
        apart = x[for_training[part]] - first
        left += apart.sum(axis=axes)
        squares += (apart**2).sum(axis=axes)
    deviation = np.sqrt(np.maximum(squares / count - (left / count) ** 2, 0))
    rounding = 8 * np.finfo(np.float64).eps * largest
    return Scaling(first + left / count, np.where(deviation > rounding, deviation, 1.0))


def _refuse_bad(raw: RawData, start: int, x: np.ndarray) -> None:
    with np.errstate(invalid="ignore"):
        bad = ~(np.abs(x) <= LARGEST_FEATURE)
    if not bad.any():
        return
    places = np.argwhere(bad)
    row, *index = places[0].tolist()
    more = f" (and {len(places) - 1} more values near it)" if len(places) > 1 else ""
    raise DataError(
        f"data.path: {raw.cell(start + row, index)}: must be a number of at most "
        f"{LARGEST_FEATURE:g} in size (got {x[tuple(places[0])].item()!r}){more}; mend or drop "
        "such rows, or the column"
    )


def scale_features(raw: RawData, scaling: Scaling) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield the features in blocks of rows, scaled, as float32.

    Errors: DataError where a value lies so far from the training rows that it is no number.
    """
    for part, x in iterate_feature_blocks(raw):
        # Tiny deviations make huge values; they are looked for right below.
        with np.errstate(over="ignore"):
            x = (x - scaling.offset) / scaling.scale
        far = np.argwhere(~(np.abs(x) <= LARGEST_SCALED))
        if len(far):
            row, *index = far[0].tolist()
            raise DataError(
                f"data.path: {raw.cell(part.start + row, index)}: lies more than "
                f"{LARGEST_SCALED:g} deviations from the training rows; mend or drop the row, or "
                "the column"
            )
        yield part, x.astype(np.float32)


MISSING_CATEGORY, OTHER = "missing", "other"
FEWEST_ROWS = 5  # of a text that gets an input of its own where there are too many texts
ENCODED_VALUES = 1 << 20  # inputs encoded at once: 4 MiB of float32
LEAVE_OUT = "leave the column out by data.args.drop"


@dataclass(frozen=True)
class Moments:
    """Count, mean and squared deviations of some columns over some rows: (columns,) each."""

    count: np.ndarray
    mean: np.ndarray
    squares: np.ndarray  # the sum of the squares of the differences from the mean

    def plus(self, other: Moments) -> Moments:
        """Combine both (Chan, Golub, LeVeque 1983): no small deviation is lost beside a large
        mean."""
        count = self.count + other.count
        share = other.count / np.maximum(count, 1)
        apart = other.mean - self.mean
        return Moments(
            count,
            self.mean + apart * share,
            self.squares + other.squares + apart**2 * self.count * share,
        )


@dataclass(frozen=True)
class Encoding:
    """How the columns of a table become inputs."""

    raw: RawData
    columns: tuple[Column, ...]
    scaling: Scaling  # an offset and a scale for each input; 0 and 1 for those of categories
    notes: tuple[str, ...]
    _fills: np.ndarray  # of the numbers, (numbers,)
    _places: np.ndarray  # of the numbers, among the inputs
    _codes: tuple[np.ndarray, ...]  # of each category: the place of a code's input, or -1

    @property
    def names(self) -> tuple[str, ...]:
        """Of the inputs: the column's, or `column=value`, or `column.part` of a date."""
        marks = {"category": "=", "date": "."}
        named = (
            [f"{c.name}{marks[c.kind]}{value}" for value in c.values] or [c.name]
            for c in self.columns
        )
        return tuple(name for names in named for name in names)

    def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield the inputs in blocks of rows, (rows, inputs) float32, scaled.

        Errors: DataError where a value lies so far from the training rows that it is no number.
        """
        for parts in self.raw.features.map_blocks(self._encode_block, threads=2):
            yield from parts

    def _encode_block(self, start: int, values: np.ndarray) -> list[tuple[slice, np.ndarray]]:
        rows = max(1, ENCODED_VALUES // len(self.scaling.offset))
        cuts = range(0, values.shape[1], rows)
        parts = ((start + at, values[:, at : at + rows]) for at in cuts)
        return [
            (slice(first, first + part.shape[1]), self._inputs(part, first))
            for first, part in parts
        ]

    def _inputs(self, values: np.ndarray, start: int) -> np.ndarray:
        """values: (columns, rows)."""
        table: Table = self.raw.features
        inputs = np.zeros((values.shape[1], len(self.scaling.offset)), dtype=np.float32)
        numeric = table.numeric
        numbers = table.numbers(values)
        if table.missing == "mean" and any(column.holes for column in table.columns):
            numbers = np.where(np.isnan(numbers), self._fills[:, None], numbers)
        offset, scale = (of[self._places][:, None] for of in vars(self.scaling).values())
        # Tiny deviations make huge values; they are looked for right below.
        with np.errstate(over="ignore"):
            scaled = numbers - offset
            scaled /= scale
        self._refuse_far(scaled, start)
        if len(self._places) == inputs.shape[1]:
            inputs = np.ascontiguousarray(scaled.astype(np.float32).T)
        else:
            inputs[:, self._places] = scaled.T
        for codes, places in zip(values[~numeric], self._codes, strict=True):
            code = np.where(np.isnan(codes), -1, codes).astype(np.int64)
            place = places[code]  # the last: of what is missing
            there = np.flatnonzero(place >= 0)
            inputs[there, place[there]] = 1
        return inputs

    def _refuse_far(self, scaled: np.ndarray, start: int) -> None:
        sizes = (scaled.max(axis=1, initial=0), -scaled.min(axis=1, initial=0))
        if all((size <= LARGEST_SCALED).all() for size in sizes):
            return
        column, row = np.argwhere(~(np.abs(scaled) <= LARGEST_SCALED))[0].tolist()
        table: Table = self.raw.features
        name = [table.owners[column]]
        raise DataError(
            f"data.path: {self.raw.cell(start + row, name)}: lies more than {LARGEST_SCALED:g} "
            f"deviations from the training rows; mend or drop the row, or {LEAVE_OUT}"
        )


def fit_encoding(raw: RawData, *, for_training: np.ndarray, scale: bool) -> Encoding:
    """Decide how the columns of raw.features, a Table, become inputs; for_training: (rows,)
    booleans.

    Errors: DataError for a category with one value left, and for a column without any number
    among the training rows by whose mean its missing ones could be filled.
    """
    table: Table = raw.features
    moments, counts = _measure_columns(table, for_training)
    fills = table.missing == "mean"
    columns: list[Column] = []
    places: list[int] = []
    codes, at = [], 0
    means, counted = iter(moments.mean.tolist()), iter(counts)
    for column in table.columns:
        name = column.name
        if column.words is not None:
            missing = fills and column.holes > 0
            values, place = _choose_values(column.words, next(counted), missing=missing)
            fill = MISSING_CATEGORY if fills else None
            rest = OTHER if len(column.words) > MOST_CATEGORIES and OTHER in values else None
            columns.append(Column(name, "category", values, fill, rest=rest))
            codes.append(np.where(place < 0, -1, place + at))
            at += len(values)
            continue
        of = tuple(next(means) for _ in column.parts or (name,))
        if column.parts:
            columns.append(Column(name, "date", column.parts, of if fills else None))
        else:
            fill = of[0] if fills else None
            columns.append(Column(name, "number", fill=fill, whole=column.whole))
        places += range(at, at + len(of))
        at += len(of)
    _refuse_useless(raw, columns, dict(zip(table.owners, moments.count, strict=True)))
    offsets, scales = np.zeros(at), np.ones(at)
    if scale:
        offsets[places], scales[places] = compute_mean_deviation(moments, int(for_training.sum()))
    return Encoding(
        raw,
        tuple(columns),
        Scaling(offsets, scales),
        _list_notes(table, columns, is_split=raw.split_keys is not None),
        _fills=moments.mean,
        _places=np.array(places, dtype=np.int64),
        _codes=tuple(codes),
    )


def _measure_columns(table: Table, for_training: np.ndarray) -> tuple[Moments, list[np.ndarray]]:
    """Of the training rows' numbers the moments, and how often each code is there in all rows, by
    category. All blocks are added in their order. for_training: (rows,) booleans."""
    numeric = table.numeric
    holes = table.kept is None and any(c.holes for c in table.columns if c.words is None)
    words = [column.words for column in table.columns if column.words is not None]

    def measure(start: int, values: np.ndarray) -> tuple[Moments, list[np.ndarray]]:
        chosen = for_training[start : start + values.shape[1]].astype(np.float64)
        counts = [
            np.bincount(codes[~np.isnan(codes)].astype(np.int64), minlength=len(column_words))
            for codes, column_words in zip(values[~numeric], words, strict=True)
        ]
        return compute_moments(table.numbers(values), chosen, holes=holes), counts

    blocks = table.map_blocks(measure)
    moments, counts = next(blocks)
    for more, others in blocks:
        moments = moments.plus(more)
        counts = [a + b for a, b in zip(counts, others, strict=True)]
    return moments, counts


def _choose_values(
    words: tuple[str, ...], counts: np.ndarray, *, missing: bool
) -> tuple[tuple[str, ...], np.ndarray]:
    """The values that are there, sorted, and for each code its place among them, or -1; the last
    for what is missing. Of more than MOST_CATEGORIES those in the most rows, and OTHER."""
    seen = {word for word, count in zip(words, counts, strict=True) if count}
    rest = ""
    if len(seen) > MOST_CATEGORIES:
        often = np.argsort(-counts, kind="stable")[: MOST_CATEGORIES - 1]
        seen, rest = {words[i] for i in often if counts[i] >= FEWEST_ROWS} | {OTHER}, OTHER
    values = tuple(sorted(seen | ({MISSING_CATEGORY} if missing else set())))
    place = {word: i for i, word in enumerate(values)}
    codes = [place.get(word, place.get(rest, -1)) for word in words]
    return values, np.array([*codes, place[MISSING_CATEGORY] if missing else -1], dtype=np.int64)


def _refuse_useless(raw: RawData, columns: list[Column], counts: dict[int, float]) -> None:
    """counts: of the numbers among the training rows, by the place of a column of numbers."""
    problems = [
        f"data.path: {raw.label} column {shorten(column.name)}: has no value in any training row, "
        f"of which to take the mean; {LEAVE_OUT}"
        for place, column in enumerate(columns)
        if not counts.get(place, 1)
    ]
    problems += [
        f"data.path: {raw.label} column {shorten(column.name)}: has more than {MOST_CATEGORIES:,} "
        f"different texts, none of them in {FEWEST_ROWS} rows: too many for a category; {LEAVE_OUT}"
        for column in columns
        if column.rest is not None and set(column.values) <= {OTHER, MISSING_CATEGORY}
    ]
    problems += [
        f"data.path: {raw.label} column {shorten(column.name)}: holds {format_list(column.values)} "
        f"in every row that is left, of which nothing can be learnt; {LEAVE_OUT}"
        for column in columns
        if column.kind == "category" and len(column.values) < 2 and column.rest is None
    ]
    if problems:
        raise DataError("\n".join(problems))


def _list_notes(table: Table, columns: list[Column], *, is_split: bool) -> tuple[str, ...]:
    """is_split: whether the rows are split by a column."""
    notes = []
    for column, learnt in zip(columns, table.columns, strict=True):
        name, holes = shorten(column.name), learnt.holes
        if holes and column.kind == "number" and column.fill is not None:
            notes.append(
                f"{holes:,} missing values of {name} became {column.fill:.6g}, the mean of the "
                "training rows"
            )
        if column.kind == "category":
            missing = f", {holes:,} missing ones as {MISSING_CATEGORY}"
            missing = missing if column.fill and holes else ""
            each = "one for each text" if column.rest is None else "one for each frequent text"
            each += "" if column.rest is None else f", {OTHER} for the rest"
            notes.append(f"{name} became {len(column.values)} inputs, {each}{missing}")
        if column.kind == "date":
            newest = "; data.split time:COLUMN would hold out the newest rows"
            notes.append(
                f"the dates of {name} became {len(column.values)} inputs: "
                f"{', '.join(column.values)}{'' if is_split else newest}"
            )
    return tuple(notes)


def compute_moments(values: np.ndarray, chosen: np.ndarray, *, holes: bool) -> Moments:
    """Compute the moments of one block. values: (columns, rows); chosen: (rows,) 1 where a row
    counts, else 0."""
    if not holes:
        count = np.full(len(values), chosen.sum())
        mean = values @ chosen / np.maximum(count, 1)
        apart = values - mean[:, None]
        apart *= chosen
        left = apart.sum(axis=1)
    else:
        there = ~np.isnan(values) * chosen
        count = there.sum(axis=1)
        values = np.where(there > 0, values, 0)
        mean = values.sum(axis=1) / np.maximum(count, 1)
        apart = (values - mean[:, None]) * there
        left = apart.sum(axis=1)
    squares = np.einsum("ij,ij->i", apart, apart)
    most = np.maximum(count, 1)
    return Moments(count, mean + left / most, np.maximum(squares - left**2 / most, 0))


def compute_mean_deviation(moments: Moments, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and deviation, where a missing value counts as the mean; constants get
    deviation 1."""
    deviation = np.sqrt(moments.squares / rows)
    rounding = 8 * np.finfo(np.float64).eps * np.abs(moments.mean)
    return moments.mean, np.where(deviation > rounding, deviation, 1.0)
