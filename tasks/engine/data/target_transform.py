"""Whether the logarithm of a regression's target is learnt instead of the target: asked for, or
found out on a sample of the prepared rows, where boosted trees predict skewed amounts better with
it. It refuses the logarithm of amounts below 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tasks.engine.base.units import number
from tasks.engine.files.source_data import DataError, Raw
from tasks.engine.files.target_encoding import Labels
from tasks.engine.settings.data_config import DataConfig

# A sample is enough to tell, and bounds the time: a second or two, once for prepared data.
MOST_TRAINED_ON, MOST_JUDGED, MOST_FEATURES = 10_000, 4_000, 256
LEAST_JUDGED = 30
SKEWED = 1.0  # skewness above which a logarithm is tried; that of an exponential target is 2
BETTER = 0.98  # of the errors without it: less is chance


@dataclass(frozen=True)
class Transform:
    """log: the unit of each target, of which log(1 + target / unit) is learnt; empty: none is."""

    log: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    def apply(self, values: np.ndarray) -> np.ndarray:
        if not self.log:
            return values
        found: np.ndarray = np.log1p(np.asarray(values, dtype=np.float64) / np.asarray(self.log))
        return found


def choose_transform(
    raw: Raw, labels: Labels, rows: Mapping[str, np.ndarray], data: DataConfig, folder: Path
) -> Transform:
    """Return what data.target_transform says, or what scores better on validation rows.

    rows: of each part, (rows,) booleans; folder: has the inputs of the parts. Raises DataError.
    """
    asked = data.target_transform
    if labels.task != "regression":
        if asked == "log":
            raise DataError(
                f"data.target_transform: log is for a regression (this is a {labels.task}); drop it"
            )
        return Transform()
    values, training = labels.values, rows["train"]
    if asked == "log":
        _refuse_negative(raw, values)
        units = tuple(map(float, _units(values[training])))
        return Transform(units, (f"learnt: log(1 + target / {', '.join(map(number, units))})",))
    if asked == "none" or not data.scale_target or values.shape[1] > 1 or values.min() < 0:
        return Transform()
    y = np.asarray(values[training][:, 0], dtype=np.float64)
    unit = _units(y[:, None])
    if _skewness(y) <= SKEWED or _skewness(np.log1p(y / unit[0])) >= _skewness(y):
        return Transform()
    log = Transform(tuple(unit.tolist()))
    ratio = _compare(log, values[:, 0], rows, folder)
    if ratio is None or ratio > BETTER:
        return Transform()
    return Transform(
        log.log,
        (
            f"the target is skewed to the right, and log(1 + target / {number(unit[0])}) is learnt "
            f"instead: on a sample, boosted trees err by {number(ratio)} of what they do without "
            "it (data.target_transform)",
        ),
    )


def _units(values: np.ndarray) -> np.ndarray:
    """The median of what is above 0 of each target; 1 where nothing is."""
    columns = (column[column > 0] for column in np.asarray(values, dtype=np.float64).T)
    return np.array([np.median(column) if len(column) else 1.0 for column in columns])


def _skewness(y: np.ndarray) -> float:
    apart = y - y.mean()
    spread = float(np.sqrt(np.square(apart).mean()))
    return float((apart**3).mean()) / spread**3 if spread else 0.0


def _compare(
    log: Transform, y: np.ndarray, rows: Mapping[str, np.ndarray], folder: Path
) -> float | None:
    """Return the errors on validation rows with the logarithm over those without: of the mean
    absolute and the root mean squared one, in the target's units, the geometric mean. None where
    there are too few rows, or features."""
    x = {part: np.load(folder / f"{part}_x.npy", mmap_mode="r") for part in ("train", "val")}
    if len(x["val"]) < LEAST_JUDGED or int(np.prod(x["val"].shape[1:])) > MOST_FEATURES:
        return None
    from sklearn.ensemble import HistGradientBoostingRegressor  # 1 s, for skewed targets only

    drawn = {
        part: _every(len(x[part]), most)
        for part, most in (("train", MOST_TRAINED_ON), ("val", MOST_JUDGED))
    }
    inputs = {part: x[part][drawn[part]].reshape(len(drawn[part]), -1) for part in drawn}
    amounts = {part: np.asarray(y[rows[part]], dtype=np.float64)[drawn[part]] for part in drawn}
    errors = []
    for transform in (log, Transform()):
        trees = HistGradientBoostingRegressor(max_iter=50, random_state=0, early_stopping=False)
        trees.fit(inputs["train"], transform.apply(amounts["train"]))
        found = trees.predict(inputs["val"])
        if transform.log:
            found = np.expm1(found) * transform.log[0]
        apart = np.abs(found - amounts["val"])
        errors.append(np.sqrt(apart.mean() * np.sqrt(np.square(apart).mean())))
    return float(errors[0] / errors[1]) if errors[1] > 0 else None


def _every(rows: int, most: int) -> np.ndarray:
    """At most so many rows, evenly over all."""
    return np.linspace(0, rows - 1, min(rows, most)).astype(np.int64)


def _refuse_negative(raw: Raw, values: np.ndarray) -> None:
    below = np.argwhere(values < 0)
    if len(below):
        row, column = below[0].tolist()
        raise DataError(
            f"data.target_transform: log needs targets from 0 on (got "
            f"{values[row, column].item()!r} in {raw.label_at(row)}); set it to none"
        )
