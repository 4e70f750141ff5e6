"""Decides what becomes of times that the training rows do not reach, where a column of times splits
the rows: a net that has learned from dates answers anything at all to later ones. What it sees of
them ends where the training rows do; beside it goes on a line, fitted to the training rows, where
boosted trees, which cannot go on, are better on the validation rows with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headroom.base.facts import Column, TimeInputs
from headroom.base.raw_inputs import SEASON_PARTS
from headroom.base.units import format_number
from headroom.data.encoding import Scaling
from headroom.data.source_data import shorten
from headroom.data.targets import (
    BETTER,
    LEAST_JUDGED,
    Labels,
    LinePlaces,
    TargetTransform,
    TreeJudge,
    iterate_row_blocks,
)
from headroom.settings.run_config import DataConfig

LEAST_TIMES = 5  # validation rows: of a trend a few tell
YEAR_DAYS = 366  # of which the seasons are known; of fewer days they would pass for a trend
STEPS = ("year",)  # a part that a line would go on in by leaps, beside the days


@dataclass(frozen=True)
class TimePlaces:
    """Where among the inputs the column of times is that splits the rows."""

    column: Column
    first: int

    @property
    def places(self) -> list[int]:
        return list(range(self.first, self.first + (len(self.column.values) or 1)))


def measure_time_range(
    columns: Sequence[Column] | None, scaling: Scaling, data: DataConfig, folder: Path
) -> TimeRange | None:
    """Measure the times of the training rows in the inputs that lie in the folder; None where no
    column of times splits the rows."""
    places = _find_time_places(columns or (), data)
    if places is None:
        return None
    x = np.load(folder / "train_x.npy", mmap_mode="r")
    blocks = [x[part][:, places.places] for part in iterate_row_blocks(len(x))]
    low = np.min([block.min(0) for block in blocks], axis=0)
    high = np.max([block.max(0) for block in blocks], axis=0)
    return TimeRange(places, low, high, float(scaling.scale[places.first]))


def _find_time_places(columns: Sequence[Column], data: DataConfig) -> TimePlaces | None:
    if data.split_by != "time" or data.split_column is None:
        return None
    first = 0
    for column in columns:
        if column.name == data.split_column and column.kind != "category":
            return TimePlaces(column, first)
        first += len(column.values) or 1
    return None


@dataclass(frozen=True)
class TimeRange:
    """The times of the training rows, as inputs."""

    time: TimePlaces
    low: np.ndarray  # of each place
    high: np.ndarray
    unit: float  # what the first of the inputs was divided by

    @property
    def line(self) -> LinePlaces:
        """Return the inputs that a line may go on in."""
        column, places = self.time.column, self.time.places
        span = float(self.high[0] - self.low[0]) * self.unit
        is_short = column.kind == "date" and span < YEAR_DAYS
        steps = (*STEPS, *(SEASON_PARTS if is_short else ()))
        left_out = [p for p, name in zip(places, column.values, strict=False) if name in steps]
        return LinePlaces(tuple(p for p in places if p not in left_out), tuple(left_out))


def choose_line(
    times: TimeRange, judge: TreeJudge | None, transform: TargetTransform, target: Scaling
) -> tuple[TimeInputs, tuple[str, ...]]:
    """Return what a model is to do about times, and a note for a person. judge: None where nothing
    tells whether a line is better."""
    places, low, high = times.time.places, times.low.tolist(), times.high.tolist()
    held, name = (
        TimeInputs(tuple(places), tuple(low), tuple(high)),
        shorten(times.time.column.name),
    )
    if judge is None:
        return held, ()
    line = times.line
    alone, beside = judge.measure_error(transform), judge.measure_error(transform, line)
    ratio = beside / alone if alone > 0 else 1.0
    if ratio > BETTER:
        return held, (
            f"beyond the training rows the built-in mlp takes {name} for what it was at their end: "
            "with a line that goes on, boosted trees err no less on the validation rows",
        )
    slopes, intercept = judge.fit_line(transform, line)
    slope = np.zeros(len(places))
    slope[np.array(line.places) - places[0]] = slopes / target.scale[0]
    return (
        TimeInputs(
            tuple(places),
            tuple(low),
            tuple(high),
            slope=tuple(slope.tolist()),
            intercept=float((intercept - target.offset[0]) / target.scale[0]),
        ),
        (
            f"beside the built-in mlp a line in {name} goes on beyond the training rows: with it, "
            f"boosted trees err by {format_number(ratio)} of what they do without on the "
            "validation rows",
        ),
    )


def make_judge(
    labels: Labels, rows: Mapping[str, np.ndarray], folder: Path, *, is_timed: bool
) -> TreeJudge | None:
    """Return what compares ways to learn one target of a regression; None for others, and where
    too few rows or too many features would tell nothing."""
    if labels.task != "regression" or labels.values.shape[1] > 1:
        return None
    least = LEAST_TIMES if is_timed else LEAST_JUDGED
    return TreeJudge.draw(labels.values[:, 0], rows, folder, least=least)
