"""Makes inputs of a table's columns: numbers standardized by what the training rows say of them,
missing ones filled in by their mean, categories as one input for each of their values. It works in
blocks of rows, in one pass to measure and one to encode. It refuses a column of which too little is
left to learn from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tasks.engine.base.facts import Column
from tasks.engine.base.ordered_threads import in_order
from tasks.engine.files.scaling import LARGEST_SCALED, Scaling
from tasks.engine.files.source_data import DataError, Raw, listed, shorten
from tasks.engine.tables.columns_table import Table
from tasks.engine.tables.running_statistics import Moments, measured, standard

MISSING_CATEGORY = "missing"
BLOCK_VALUES = 1 << 20  # inputs encoded at once: 4 MiB of float32


@dataclass(frozen=True)
class Encoding:
    """How the columns of a table become inputs."""

    raw: Raw
    columns: tuple[Column, ...]
    scaling: Scaling  # an offset and a scale for each input; 0 and 1 for those of categories
    notes: tuple[str, ...]
    _fills: np.ndarray  # of the numbers, (numbers,)
    _places: np.ndarray  # of the numbers, among the inputs
    _first: tuple[int, ...]  # of each category's inputs
    _codes: tuple[np.ndarray, ...]  # of each category: its code's place among its inputs, or -1

    @property
    def names(self) -> tuple[str, ...]:
        """Of the inputs: the column's, or `column=value`."""
        return tuple(
            name
            for column in self.columns
            for name in (
                [f"{column.name}={value}" for value in column.values]
                if column.kind == "category"
                else [column.name]
            )
        )

    def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """The inputs in blocks of rows, (rows, inputs) float32, scaled.

        Errors: DataError where a value lies so far from the training rows that it is no number.
        """
        table: Table = self.raw.features
        for start, parts in in_order(
            self._encoded, zip(range(len(table.spool)), table.starts(), strict=False), threads=2
        ):
            for part in parts:
                yield slice(start, start + len(part)), part
                start += len(part)

    def _encoded(self, block: tuple[int, int]) -> tuple[int, list[np.ndarray]]:
        index, start = block
        table: Table = self.raw.features
        values = table.block(index)
        width = len(self.scaling.offset)
        rows = max(1, BLOCK_VALUES // width)
        parts = [values[:, at : at + rows] for at in range(0, values.shape[1], rows)]
        return start, [
            self._inputs(part, start + i * rows) for i, part in enumerate(parts) if part.size
        ]

    def _inputs(self, values: np.ndarray, start: int) -> np.ndarray:
        """values: (columns, rows)."""
        table: Table = self.raw.features
        inputs = np.zeros((values.shape[1], len(self.scaling.offset)), dtype=np.float32)
        numeric = table.numeric
        numbers = values if numeric.all() else values[numeric]
        if table.missing == "mean" and any(table.holes):
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
        for codes, first, places in zip(values[~numeric], self._first, self._codes, strict=True):
            code = np.where(np.isnan(codes), len(places) - 1, codes).astype(np.int64)
            place = places[code]  # the last: of what is missing
            there = np.flatnonzero(place >= 0)
            inputs[there, first + place[there]] = 1
        return inputs

    def _refuse_far(self, scaled: np.ndarray, start: int) -> None:
        sizes = (scaled.max(axis=1, initial=0), -scaled.min(axis=1, initial=0))
        if all((size <= LARGEST_SCALED).all() for size in sizes):
            return
        column, row = np.argwhere(~(np.abs(scaled) <= LARGEST_SCALED))[0].tolist()
        table: Table = self.raw.features
        name = [np.flatnonzero(table.numeric)[column]]
        raise DataError(
            f"data.path: {self.raw.cell(start + row, name)}: lies more than {LARGEST_SCALED:g} "
            "deviations from the training rows; mend or drop the row, or leave the column out by "
            "data.drop"
        )


def fit(raw: Raw, *, for_training: np.ndarray, scale: bool) -> Encoding:
    """How the columns of raw.features, a Table, become inputs; for_training: (rows,) booleans.

    Errors: DataError for a category with one value left, and for a column without any number among
    the training rows by whose mean its missing ones could be filled.
    """
    table: Table = raw.features
    counted = measured(table, for_training)
    moments, words = counted.moments, counted.words
    training = int(for_training.sum())
    numeric = table.numeric
    names = np.array(table.names, dtype=object)
    holes = np.array(table.holes)
    fills_in = (table.missing == "mean") & (holes > 0)
    allowed = MISSING_CATEGORY if table.missing == "mean" else None
    problems = _empty(raw, names[numeric], moments)
    categories = [
        _category(name, known, count, fills_in=bool(there), fill=allowed)
        for name, known, count, there in zip(
            names[~numeric],
            [w for w in table.words if w is not None],
            words,
            fills_in[~numeric],
            strict=True,
        )
    ]
    problems += [_constant(raw, column) for column, _ in categories if len(column.values) < 2]
    if problems:
        raise DataError("\n".join(problems))
    offset, deviation = standard(moments, training)
    if not scale:
        offset, deviation = np.zeros_like(offset), np.ones_like(deviation)
    return _encoding(raw, moments.mean, categories, offset, deviation)


def _encoding(
    raw: Raw,
    means: np.ndarray,
    categories: list[tuple[Column, np.ndarray]],
    offset: np.ndarray,
    scale: np.ndarray,
) -> Encoding:
    table: Table = raw.features
    columns, places, first, at = [], [], [], 0
    numbers, texts = iter(means.tolist()), iter(categories)
    for name, words, whole in zip(table.names, table.words, table.whole, strict=True):
        if words is None:
            mean = next(numbers)
            fill = mean if table.missing == "mean" else None
            columns.append(Column(name, "number", fill=fill, whole=whole))
            places.append(at)
            at += 1
        else:
            columns.append(next(texts)[0])
            first.append(at)
            at += len(columns[-1].values)
    offsets, scales = np.zeros(at), np.ones(at)
    offsets[places], scales[places] = offset, scale
    return Encoding(
        raw,
        tuple(columns),
        Scaling(offsets, scales),
        _notes(table, columns),
        _fills=means,
        _places=np.array(places, dtype=np.int64),
        _first=tuple(first),
        _codes=tuple(codes for _, codes in categories),
    )


def _category(
    name: str,
    known: tuple[str, ...],
    counts: np.ndarray,
    *,
    fills_in: bool,
    fill: str | None,
) -> tuple[Column, np.ndarray]:
    """The column, and for each code the place of its input; the last for what is missing."""
    found = {word for word, count in zip(known, counts, strict=True) if count}
    values = tuple(sorted(found | ({MISSING_CATEGORY} if fills_in else set())))
    place = {word: i for i, word in enumerate(values)}
    codes = [place.get(word, -1) for word in known]
    codes.append(place[MISSING_CATEGORY] if fills_in else -1)
    column = Column(name, "category", values, fill)
    return column, np.array(codes, dtype=np.int64)


def _empty(raw: Raw, names: np.ndarray, moments: Moments) -> list[str]:
    return [
        f"data.path: {raw.label} column {shorten(name)}: has no value in any training row, of "
        "which to take the mean; leave the column out by data.drop"
        for name, count in zip(names, moments.count, strict=True)
        if not count
    ]


def _constant(raw: Raw, column: Column) -> str:
    return (
        f"data.path: {raw.label} column {shorten(column.name)}: holds {listed(column.values)} in "
        "every row that is left, of which nothing can be learnt; leave the column out by data.drop"
    )


def _notes(table: Table, columns: list[Column]) -> tuple[str, ...]:
    notes = []
    for column, holes in zip(columns, table.holes, strict=True):
        name = shorten(column.name)
        if holes and column.kind == "number" and column.fill is not None:
            notes.append(
                f"{holes:,} missing values of {name} became {column.fill:.6g}, the mean of the "
                "training rows"
            )
        if column.kind == "category":
            missing = f", {holes:,} missing ones as {MISSING_CATEGORY}"
            missing = missing if column.fill and holes else ""
            notes.append(f"{name} became {len(column.values)} inputs, one for each text{missing}")
    return tuple(notes)
