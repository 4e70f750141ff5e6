"""Make the targets to learn from what a source gives: classes by their names, several labels, or
numbers; and scale a skewed target by its logarithm where that is shown to help. It works in blocks
of rows. It refuses missing labels, a single class, and values that are no usable number, each by
its row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headroom.base.units import format_number
from headroom.data.source_data import DataError, RawData, format_list, shorten
from headroom.settings.run_config import DataConfig

BLOCK_ROWS = 1 << 16


MOST_AUTO_CLASSES = 100
LARGEST_TARGET = 1e15  # its square still fits float32, as the loss needs
IGNORED = -100  # the label that PyTorch's losses skip by default
MISSING = {"", "nan", "null", "n/a", "#n/a", "na", "none"}  # what spreadsheets and pandas write


@dataclass(frozen=True)
class Labels:
    """Targets ready to be learnt.

    values: (n,) classes in the smallest whole numbers; (n, k) float32 of 0 and 1 for several
    labels; or (n, k) numbers as the target has them.
    """

    task: str
    values: np.ndarray
    class_names: tuple[str, ...] | None
    notes: tuple[str, ...] = ()

    @property
    def outputs(self) -> int:
        return self.values.shape[1] if self.class_names is None else len(self.class_names)


def encode_target(raw: RawData, task: str) -> Labels:
    """Encode the target as classes or numbers, by data.task.

    Text gets its classes in alphabetical order, numbers in numerical order; labels that are
    not 0..K-1 are mapped and keep their names. Errors: DataError.
    """
    target = raw.target
    if len(target) < 2:
        raise DataError(f"data.path: {raw.label} has {len(target)} row; a split needs at least 2")
    if target.dtype.kind == "O":
        return _encode_text(raw, task)
    _check_finite(raw)
    if target.ndim == 2:
        return _encode_wide(raw, task)
    if task == "multilabel":
        raise DataError(
            f"data.task: multilabel needs a target of several columns of 0 and 1 (got one value a "
            f"row in {raw.label}, target {raw.target_name!r}); set data.task to classification"
        )
    whole = target.dtype.kind in "biu" or all(
        (target[part] == np.round(target[part])).all() for part in iterate_row_blocks(len(target))
    )
    few = None
    notes: tuple[str, ...] = ()
    if task == "auto":
        few = _find_distinct(target, most=MOST_AUTO_CLASSES) if whole else None
        task = "regression" if few is None else "classification"
        notes = () if whole else _note_near_classes(raw)
    if task == "regression":
        return Labels("regression", target.reshape(-1, 1), None, notes)
    if not whole:
        row = int(np.flatnonzero(target != np.round(target))[0])
        raise DataError(
            f"data.target: {raw.label_at(row)}: a class must be text, a boolean or a whole number "
            f"(got {target[row].item()!r}); set data.task to regression, or mend the labels"
        )
    return _number_classes(raw, few)


def _note_near_classes(raw: RawData) -> tuple[str, ...]:
    """A note where a few fractions among few whole numbers made a regression of the target."""
    target = raw.target
    odd = np.flatnonzero(target != np.round(target))
    if 10 * len(odd) > len(target):
        return ()
    if _find_distinct(np.delete(target, odd), most=MOST_AUTO_CLASSES) is None:
        return ()
    row = int(odd[0])
    return (
        f"learnt as a regression, since {raw.label_at(row)} holds {target[row].item()!r} (of "
        f"{len(target):,}, {len(odd):,} are fractions); if these are classes, mend it",
    )


def _encode_wide(raw: RawData, task: str) -> Labels:
    """A target (n, k): k labels that each are there or not, or k amounts."""
    target = raw.target
    binary = (target == 0) | (target == 1)
    if task == "auto":
        task = "multilabel" if binary.all() else "regression"
    if task == "classification":
        raise DataError(
            f"data.target: {raw.label} target {raw.target_name!r} has {target.shape[1]} values a "
            "row, and a class is one; save its argmax, or set data.task to multilabel or regression"
        )
    if task == "regression":
        return Labels("regression", target, None)
    if not binary.all():
        row, column = np.argwhere(~binary)[0].tolist()
        raise DataError(
            f"data.target: {raw.label_at(row)}, column {column + 1}: must be 0 or 1 (got "
            f"{target[row, column].item()!r}); mend it, or set data.task to regression"
        )
    names = tuple(str(i) for i in range(target.shape[1]))
    return Labels("multilabel", target.astype(np.float32), names)


def _encode_text(raw: RawData, task: str) -> Labels:
    words: set[str] = set()
    for part in iterate_row_blocks(len(raw.target)):
        words.update(raw.target[part].tolist())
    names = sorted(words)
    for name in names:
        missing = raw.na is None and name.strip().lower() in MISSING
        if missing or any(ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in name):
            rule = "stands for a missing label" if missing else "is not printable text"
            way_out = ", or list the words that mean missing in data.args.na" if missing else ""
            row = raw.target.tolist().index(name)
            raise DataError(
                f"data.target: {raw.label_at(row)}: {shorten(name)} {rule}; mend or drop the row, "
                f"or give the class another name{way_out}"
            )
    if task != "classification":
        _refuse_amounts(raw, task, names)
    index = {name: i for i, name in enumerate(names)}
    values = np.empty(len(raw.target), dtype=np.min_scalar_type(len(names)))
    for part in iterate_row_blocks(len(values)):
        values[part] = [index[text] for text in raw.target[part].tolist()]
    return _refuse_single_class(raw, Labels("classification", values, tuple(names)))


def _refuse_amounts(raw: RawData, task: str, names: list[str]) -> None:
    """Raises DataError for text where numbers are asked for, and for numbers that came as text."""
    # 0.1 s for pyarrow, and most targets are no text.
    from headroom.data.columns import TEXT_TYPE, WRITTEN, describe_remedy, find_form

    forms = {name: find_form(name, raw.decimal or ".") for name in names}
    otherwise = [name for name in names if forms[name] == WRITTEN]
    words = [name for name in names if forms[name] == TEXT_TYPE]
    if task == "auto" and (
        2 * len(words) > len(names) or not (otherwise or len(names) > MOST_AUTO_CLASSES)
    ):
        return
    texts, odd = raw.target.tolist(), set(otherwise or words or names)
    row = next(i for i, text in enumerate(texts) if text in odd)
    if otherwise:
        mend = describe_remedy(texts[row], raw.decimal)
    elif 2 * len(words) > len(names):
        mend = "choose another target"
    else:
        mend = "mend or drop such rows" if words else "save it as numbers, not as text"
    raise DataError(
        f"data.target: {raw.label_at(row)}: a {'regression' if task == 'auto' else task} needs "
        f"numbers (got {shorten(texts[row])}); {mend}, or set data.task to classification if each "
        "text is a class"
    )


def _find_distinct(target: np.ndarray, most: int | None = None) -> np.ndarray | None:
    """The different values, sorted, in blocks: to sort all rows at once takes five times their
    memory. None once there are more than `most`."""
    distinct = target[:0]
    for part in iterate_row_blocks(len(target)):
        distinct = np.union1d(distinct, target[part])
        if most is not None and len(distinct) > most:
            return None
    return distinct


def _number_classes(raw: RawData, known_classes: np.ndarray | None) -> Labels:
    classes = _find_distinct(raw.target) if known_classes is None else known_classes
    assert classes is not None
    values = np.empty(len(raw.target), dtype=np.min_scalar_type(len(classes)))
    for part in iterate_row_blocks(len(values)):
        values[part] = np.searchsorted(classes, raw.target[part])
    if classes.dtype.kind == "f":
        classes = classes.astype(np.int64)
    plain = classes.tolist()
    if IGNORED in plain and min(c for c in plain + [0] if c != IGNORED) >= 0:
        row = int(np.flatnonzero(raw.target == IGNORED)[0])
        raise DataError(
            f"data.target: {raw.label_at(row)}: {IGNORED} is the label that losses skip, and would "
            "be learnt as a class here; drop such rows, or give the class another number"
        )
    notes = () if plain == list(range(len(plain))) else ("labels were mapped to 0..K-1 in order",)
    names = tuple(str(c) for c in plain)
    return _refuse_single_class(raw, Labels("classification", values, names, notes))


def _refuse_single_class(raw: RawData, labels: Labels) -> Labels:
    assert labels.class_names is not None
    if len(labels.class_names) < 2:
        raise DataError(
            f"data.target: {raw.label} has one class only ({format_list(labels.class_names)}); a "
            "classification needs at least 2"
        )
    return labels


def _check_finite(raw: RawData) -> None:
    if raw.target.dtype.kind not in "fiu":
        return
    bad, first = 0, None
    for part in iterate_row_blocks(len(raw.target)):
        # As float64, since -abs() of the smallest integer is itself negative.
        wrong = ~(np.abs(raw.target[part].astype(np.float64)) <= LARGEST_TARGET)
        bad += int(wrong.sum())
        if bad and first is None:
            first = np.argwhere(wrong)[0] + [part.start, 0][: wrong.ndim]
    if first is not None:
        place = tuple(first.tolist())
        more = f" (and {bad - 1} more)" if bad > 1 else ""
        raise DataError(
            f"data.target: {raw.label_at(place[0])}: must be a number of at most "
            f"{LARGEST_TARGET:g} in size (got {raw.target[place].item()!r}){more}; mend or drop "
            "such rows"
        )


def count_class_rows(labels: Labels, chosen: np.ndarray | None = None) -> np.ndarray:
    """Count the rows of each class; only among the chosen ones, (rows,) booleans, if given."""
    assert labels.class_names is not None
    counts = np.zeros(len(labels.class_names), dtype=np.int64)
    for part in iterate_row_blocks(len(labels.values)):
        some = labels.values[part] if chosen is None else labels.values[part][chosen[part]]
        counts += np.bincount(some, minlength=len(counts))
    return counts


def iterate_row_blocks(rows: int) -> Iterator[slice]:
    """Yield slices of rows: what is computed of all at once takes many times their memory."""
    for start in range(0, rows, BLOCK_ROWS):
        yield slice(start, min(rows, start + BLOCK_ROWS))


# A sample is enough to tell, and bounds the time: a second or two, once for prepared data.
MOST_TRAINED_ON, MOST_JUDGED, MOST_FEATURES = 10_000, 4_000, 256
LEAST_JUDGED = 30
SKEWED = 1.0  # skewness above which a logarithm is tried; that of an exponential target is 2
BETTER = 0.98  # of the errors without it: less is chance
MOST_GROWN = 80.0  # exp() of it is 5e34


@dataclass(frozen=True)
class TargetTransform:
    """How the targets are transformed. log: the unit of each target, of which log(1 + target /
    unit) is learnt; empty: none is."""

    log: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    def apply(self, values: np.ndarray) -> np.ndarray:
        if not self.log:
            return values
        transformed: np.ndarray = np.log1p(
            np.asarray(values, dtype=np.float64) / np.asarray(self.log)
        )
        return transformed


@dataclass(frozen=True)
class LinePlaces:
    """Inputs that are times, in which a line may go on; and other times, which would take a share
    of its slopes."""

    places: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()


NO_LINE = LinePlaces()


@dataclass(frozen=True)
class TreeJudge:
    """Compares ways to learn one target by the errors of boosted trees on validation rows."""

    inputs: dict[str, np.ndarray]  # of each part, (rows, inputs)
    amounts: dict[str, np.ndarray]  # (rows,) float64

    @classmethod
    def draw(
        cls, y: np.ndarray, rows: Mapping[str, np.ndarray], folder: Path, *, least: int
    ) -> TreeJudge | None:
        """Draw a sample of the rows; None where there are fewer validation rows than `least`, or
        too many features. y: (rows,); folder: has the inputs of the parts."""
        x = {part: np.load(folder / f"{part}_x.npy", mmap_mode="r") for part in ("train", "val")}
        if len(x["val"]) < least or int(np.prod(x["val"].shape[1:])) > MOST_FEATURES:
            return None
        most = {"train": MOST_TRAINED_ON, "val": MOST_JUDGED}
        drawn = {part: _sample_evenly(len(x[part]), most[part]) for part in x}
        return cls(
            {part: x[part][drawn[part]].reshape(len(drawn[part]), -1) for part in drawn},
            {part: np.asarray(y[rows[part]], dtype=np.float64)[drawn[part]] for part in drawn},
        )

    def measure_error(self, transform: TargetTransform, line: LinePlaces = NO_LINE) -> float:
        """Return the mean absolute and the root mean squared error in the target's units, their
        geometric mean. line: goes on beside the trees, see fit_line."""
        from sklearn.ensemble import HistGradientBoostingRegressor  # 1 s

        slopes, intercept = self.fit_line(transform, line)
        beside = {p: x[:, list(line.places)] @ slopes + intercept for p, x in self.inputs.items()}
        trees = HistGradientBoostingRegressor(max_iter=50, random_state=0, early_stopping=False)
        trees.fit(self.inputs["train"], transform.apply(self.amounts["train"]) - beside["train"])
        predictions = trees.predict(self.inputs["val"]) + beside["val"]
        if transform.log:
            predictions = np.expm1(np.minimum(predictions, MOST_GROWN)) * transform.log[0]
        apart = np.abs(predictions - self.amounts["val"])
        return float(np.sqrt(apart.mean() * np.sqrt(np.square(apart).mean())))

    def measure_least_error(self, transform: TargetTransform, line: LinePlaces) -> float:
        """Return the error with a line, or without where that is less."""
        ways = {NO_LINE, line}
        return min(self.measure_error(transform, way) for way in ways)

    def fit_line(self, transform: TargetTransform, line: LinePlaces) -> tuple[np.ndarray, float]:
        """Fit a ridge regression on the inputs to what is learnt; return its slopes at the places
        of the line, and the intercept of these alone."""
        places = list(line.places)
        x = self.inputs["train"].astype(np.float64)
        y = transform.apply(self.amounts["train"])
        apart = x - x.mean(0)
        apart[:, list(line.left_out)] = 0
        gram = apart.T @ apart + np.eye(x.shape[1])
        slopes = np.linalg.solve(gram, apart.T @ (y - y.mean()))[places]
        return slopes, float(y.mean() - x[:, places].mean(0) @ slopes)


def choose_transform(
    raw: RawData,
    labels: Labels,
    rows: Mapping[str, np.ndarray],
    data: DataConfig,
    draw_judge: Callable[[], TreeJudge | None],
    *,
    line: LinePlaces = NO_LINE,
) -> TargetTransform:
    """Return what data.target_transform says, or what scores better on validation rows.

    rows: of each part, (rows,) booleans. line: a target that grows by a share in these times may
    be better learnt by its logarithm though it is not skewed. Raises DataError.
    """
    requested = data.target_transform
    if labels.task != "regression":
        if requested == "log":
            raise DataError(
                f"data.target_transform: log is for a regression (this is a {labels.task}); drop it"
            )
        return TargetTransform()
    values, training = labels.values, rows["train"]
    if requested == "log":
        _refuse_negative(raw, values)
        units = tuple(map(float, _compute_units(values[training])))
        return TargetTransform(
            units, (f"learnt: log(1 + target / {', '.join(map(format_number, units))})",)
        )
    if requested in ("scale", "raw") or values.shape[1] > 1 or values.min() < 0:
        return TargetTransform()
    y = np.asarray(values[training][:, 0], dtype=np.float64)
    unit = _compute_units(y[:, None])
    skewness = _compute_skewness(y)
    is_skewed = skewness > SKEWED and _compute_skewness(np.log1p(y / unit[0])) < skewness
    judge = draw_judge() if is_skewed or line.places else None
    if judge is None:
        return TargetTransform()
    log = TargetTransform(tuple(unit.tolist()))
    error = judge.measure_least_error(TargetTransform(), line)
    ratio = judge.measure_least_error(log, line) / error if error > 0 else 1.0
    if ratio > BETTER:
        return TargetTransform()
    why = "is skewed to the right" if is_skewed else "grows by a share"
    return TargetTransform(
        log.log,
        (
            f"the target {why}, and log(1 + target / {format_number(unit[0])}) is "
            f"learnt instead: on a sample, boosted trees err by {format_number(ratio)} of what "
            "they do without it (data.target_transform)",
        ),
    )


def _compute_units(values: np.ndarray) -> np.ndarray:
    """The median of what is above 0 of each target; 1 where nothing is."""
    columns = (column[column > 0] for column in np.asarray(values, dtype=np.float64).T)
    return np.array([np.median(column) if len(column) else 1.0 for column in columns])


def _compute_skewness(y: np.ndarray) -> float:
    apart = y - y.mean()
    spread = float(np.sqrt(np.square(apart).mean()))
    return float((apart**3).mean()) / spread**3 if spread else 0.0


def _sample_evenly(rows: int, most: int) -> np.ndarray:
    """At most so many rows, evenly over all."""
    return np.linspace(0, rows - 1, min(rows, most)).astype(np.int64)


def _refuse_negative(raw: RawData, values: np.ndarray) -> None:
    below = np.argwhere(values < 0)
    if len(below):
        row, column = below[0].tolist()
        raise DataError(
            f"data.target_transform: log needs targets from 0 on (got "
            f"{values[row, column].item()!r} in {raw.label_at(row)}); set it to scale"
        )
