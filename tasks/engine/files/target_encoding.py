"""Decides what is learnt from the target, maps classes to 0..K-1 and splits the rows. It refuses
what would be learnt wrongly in silence: a missing label, one class only, a class that cannot be in
both parts, fractions as classes, and -100, which losses skip, among labels that count from 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tasks.engine.files.number_formats import TEXT, WRITTEN, form_of, remedy
from tasks.engine.files.source_data import MOST_SHOWN, DataError, Raw, listed, shorten
from tasks.engine.files.split import BLOCK_ROWS, drawn

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


def encode(raw: Raw, task: str) -> Labels:
    """The target as classes or numbers, by data.task.

    Text gets its classes in alphabetical order, numbers in numerical order; labels that are not
    0..K-1 are mapped and keep their names. Errors: DataError.
    """
    target = raw.target
    if len(target) < 2:
        raise DataError(f"data.path: {raw.label} has {len(target)} row; a split needs at least 2")
    if target.dtype.kind == "O":
        return _text(raw, task)
    _check_finite(raw)
    if target.ndim == 2:
        return _wide(raw, task)
    if task == "multilabel":
        raise DataError(
            f"data.task: multilabel needs a target of several columns of 0 and 1 (got one value a "
            f"row in {raw.label}, target {raw.target_name!r}); set data.task to classification"
        )
    whole = target.dtype.kind in "biu" or all(
        (target[part] == np.round(target[part])).all() for part in blocks_of(len(target))
    )
    few = None
    notes: tuple[str, ...] = ()
    if task == "auto":
        few = _distinct(target, most=MOST_AUTO_CLASSES) if whole else None
        task = "regression" if few is None else "classification"
        notes = () if whole else _nearly_classes(raw)
    if task == "regression":
        return Labels("regression", target.reshape(-1, 1), None, notes)
    if not whole:
        row = int(np.flatnonzero(target != np.round(target))[0])
        raise DataError(
            f"data.target: {raw.label_at(row)}: a class must be text, a boolean or a whole number "
            f"(got {target[row].item()!r}); set data.task to regression, or mend the labels"
        )
    return _numbered(raw, few)


def _nearly_classes(raw: Raw) -> tuple[str, ...]:
    """A note where a few fractions among few whole numbers made a regression of the target."""
    target = raw.target
    odd = np.flatnonzero(target != np.round(target))
    if 10 * len(odd) > len(target):
        return ()
    if _distinct(np.delete(target, odd), most=MOST_AUTO_CLASSES) is None:
        return ()
    row = int(odd[0])
    return (
        f"learnt as a regression, since {raw.label_at(row)} holds {target[row].item()!r} (of "
        f"{len(target):,}, {len(odd):,} are fractions); if these are classes, mend it",
    )


def _wide(raw: Raw, task: str) -> Labels:
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


def _text(raw: Raw, task: str) -> Labels:
    found: set[str] = set()
    for part in blocks_of(len(raw.target)):
        found.update(raw.target[part].tolist())
    names = sorted(found)
    for name in names:
        missing = raw.na is None and name.strip().lower() in MISSING
        if missing or any(ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in name):
            rule = "stands for a missing label" if missing else "is not printable text"
            way_out = ", or list the words that mean missing in data.na" if missing else ""
            row = raw.target.tolist().index(name)
            raise DataError(
                f"data.target: {raw.label_at(row)}: {shorten(name)} {rule}; mend or drop the row, "
                f"or give the class another name{way_out}"
            )
    if task != "classification":
        _refuse_amounts(raw, task, names)
    index = {name: i for i, name in enumerate(names)}
    values = np.empty(len(raw.target), dtype=np.min_scalar_type(len(names)))
    for part in blocks_of(len(values)):
        values[part] = [index[text] for text in raw.target[part].tolist()]
    return _several(raw, Labels("classification", values, tuple(names)))


def _refuse_amounts(raw: Raw, task: str, names: list[str]) -> None:
    """Raises DataError for text where numbers are asked for, and for numbers that came as text."""
    forms = {name: form_of(name, raw.decimal or ".") for name in names}
    otherwise = [name for name in names if forms[name] == WRITTEN]
    words = [name for name in names if forms[name] == TEXT]
    if task == "auto" and (
        2 * len(words) > len(names) or not (otherwise or len(names) > MOST_AUTO_CLASSES)
    ):
        return
    texts, odd = raw.target.tolist(), set(otherwise or words or names)
    row = next(i for i, text in enumerate(texts) if text in odd)
    if otherwise:
        mend = remedy(texts[row], raw.decimal)
    elif 2 * len(words) > len(names):
        mend = "choose another target"
    else:
        mend = "mend or drop such rows" if words else "save it as numbers, not as text"
    raise DataError(
        f"data.target: {raw.label_at(row)}: a {'regression' if task == 'auto' else task} needs "
        f"numbers (got {shorten(texts[row])}); {mend}, or set data.task to classification if each "
        "text is a class"
    )


def _distinct(target: np.ndarray, most: int | None = None) -> np.ndarray | None:
    """The different values, sorted, in blocks: to sort all rows at once takes five times their
    memory. None once there are more than `most`."""
    found = target[:0]
    for part in blocks_of(len(target)):
        found = np.union1d(found, target[part])
        if most is not None and len(found) > most:
            return None
    return found


def _numbered(raw: Raw, known: np.ndarray | None) -> Labels:
    classes = _distinct(raw.target) if known is None else known
    assert classes is not None
    values = np.empty(len(raw.target), dtype=np.min_scalar_type(len(classes)))
    for part in blocks_of(len(values)):
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
    return _several(raw, Labels("classification", values, names, notes))


def _several(raw: Raw, labels: Labels) -> Labels:
    assert labels.class_names is not None
    if len(labels.class_names) < 2:
        raise DataError(
            f"data.target: {raw.label} has one class only ({listed(labels.class_names)}); a "
            "classification needs at least 2"
        )
    return labels


def _check_finite(raw: Raw) -> None:
    if raw.target.dtype.kind not in "fiu":
        return
    bad, first = 0, None
    for part in blocks_of(len(raw.target)):
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


def validation_rows(raw: Raw, labels: Labels, *, fraction: float, seed: int) -> np.ndarray:
    """Which rows are for validation, as (n,) booleans; the same for the same seed.

    Where the source brought a split of its own, that. Else a classification takes the fraction of
    each class, at least one row and not all of them; what rounding leaves over goes to the classes
    that are furthest below theirs.
    Errors: DataError naming the classes of one row, or where a part would have no row.
    """
    rows = len(labels.values)
    if raw.validation is not None:
        return _given(raw, rows)
    if labels.task != "classification":
        group, counts = None, np.array([rows])
    else:
        assert labels.class_names is not None
        group = labels.values
        counts = class_counts(labels)
        lonely = [labels.class_names[i] for i in np.flatnonzero(counts < 2)]
        if lonely:
            raise DataError(
                f"data.target: {raw.label} has classes of one row, which cannot be in both parts: "
                f"{listed(lonely, MOST_SHOWN)}; add rows of them, or drop them"
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
    return drawn(group, counts, taken, seed=seed)


def class_counts(labels: Labels, chosen: np.ndarray | None = None) -> np.ndarray:
    """How many rows each class has; among the chosen ones, (rows,) booleans, if so asked."""
    assert labels.class_names is not None
    counts = np.zeros(len(labels.class_names), dtype=np.int64)
    for part in blocks_of(len(labels.values)):
        some = labels.values[part] if chosen is None else labels.values[part][chosen[part]]
        counts += np.bincount(some, minlength=len(counts))
    return counts


def blocks_of(rows: int) -> Iterator[slice]:
    """Rows in blocks: what is computed of all at once takes many times their memory."""
    for start in range(0, rows, BLOCK_ROWS):
        yield slice(start, min(rows, start + BLOCK_ROWS))


def _given(raw: Raw, rows: int) -> np.ndarray:
    chosen = np.asarray(raw.validation, dtype=bool)
    assert chosen.shape == (rows,)
    if chosen.all() or not chosen.any():
        part = "training" if chosen.all() else "validation"
        raise DataError(f"data.source: {raw.label} has no {part} rows; give both parts some")
    return chosen
