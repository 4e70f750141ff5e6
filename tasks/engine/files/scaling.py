"""Standardizes features by what the training rows say of themselves, in blocks of rows so that
data larger than memory passes through. It refuses the values that arithmetic would turn into NaN
or infinity, each by its row and column.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tasks.engine.base.raw_inputs import LARGEST
from tasks.engine.files.source_data import DataError, RawData

LARGEST_FEATURE = LARGEST  # 1e38 is some format's "missing"; predictions hold the same
LARGEST_SCALED = 1e30
BLOCK_VALUES = 1 << 19  # 4 MiB of float64


@dataclass(frozen=True)
class Scaling:
    """x_scaled = (x - offset) / scale, with float64 arrays that broadcast over rows."""

    offset: np.ndarray
    scale: np.ndarray


def iterate_feature_blocks(raw: RawData) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield the features in blocks of rows as float64."""
    rows = max(1, BLOCK_VALUES // max(1, int(np.prod(raw.features.shape[1:]))))
    for start in range(0, len(raw.features), rows):
        part = slice(start, start + rows)
        with np.errstate(invalid="ignore"):  # a signalling NaN, which is refused as any other
            x = np.asarray(raw.features[part], dtype=np.float64)
        yield part, x


def measure_scaling(raw: RawData, *, for_training: np.ndarray, scale: bool) -> Scaling:
    """Measure mean and deviation of the training rows: per feature, or of all pixels of
    images.

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
