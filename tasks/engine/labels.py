"""Decides what is learnt from the target, maps classes to 0..K-1 and splits the rows. It refuses
what would be learnt wrongly in silence: a missing label, one class only, a class that cannot be in
both parts, fractions as classes, and -100, which losses skip, among labels that count from 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tasks.engine.raw import MOST_SHOWN, DataError, Raw, listed, shorten

MOST_AUTO_CLASSES = 100
LARGEST_TARGET = 1e15  # its square still fits float32, as the loss needs
IGNORED = -100  # the label that PyTorch's losses skip by default
MISSING = {"", "nan", "null", "n/a", "#n/a", "na", "none"}  # what spreadsheets and pandas write


@dataclass(frozen=True)
class Labels:
    """Targets ready to be learnt.

    values: (n,) int64 classes, or (n, 1) float32 in the target's own units, which are not scaled:
    metrics are read in them.
    """

    task: str
    values: np.ndarray
    class_names: tuple[str, ...] | None
    notes: tuple[str, ...] = ()

    @property
    def outputs(self) -> int:
        return 1 if self.class_names is None else len(self.class_names)


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
    whole = target.dtype.kind in "biu" or bool((target == np.round(target)).all())
    if task == "auto":
        few = whole and len(np.unique(target)) <= MOST_AUTO_CLASSES
        task = "classification" if few else "regression"
    if task == "regression":
        return Labels("regression", target.astype(np.float32).reshape(-1, 1), None)
    if not whole:
        row = int(np.flatnonzero(target != np.round(target))[0])
        raise DataError(
            f"data.target: {raw.label_at(row)}: a class must be text, a boolean or a whole number "
            f"(got {target[row].item()!r}); set data.task to regression, or mend the labels"
        )
    return _numbered(raw)


def _text(raw: Raw, task: str) -> Labels:
    texts: list[str] = raw.target.tolist()
    names = sorted(set(texts))
    for name in names:
        missing = name.strip().lower() in MISSING
        if missing or any(ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in name):
            rule = "stands for a missing label" if missing else "is not printable text"
            raise DataError(
                f"data.target: {raw.label_at(texts.index(name))}: {shorten(name)} {rule}; mend or "
                "drop the row, or give the class another name"
            )
    if task == "regression":
        raise DataError(
            f"data.target: {raw.label_at(0)}: a regression needs numbers (got {shorten(texts[0])}"
            "); set data.task to classification, or choose another target"
        )
    index = {name: i for i, name in enumerate(names)}
    values = np.fromiter((index[text] for text in texts), dtype=np.int64, count=len(texts))
    return _several(raw, Labels("classification", values, tuple(names)))


def _numbered(raw: Raw) -> Labels:
    classes, values = np.unique(raw.target, return_inverse=True)
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
    return _several(raw, Labels("classification", values.astype(np.int64), names, notes))


def _several(raw: Raw, labels: Labels) -> Labels:
    assert labels.class_names is not None
    if len(labels.class_names) < 2:
        raise DataError(
            f"data.target: {raw.label} has one class only ({listed(labels.class_names)}); a "
            "classification needs at least 2"
        )
    return labels


def _check_finite(raw: Raw) -> None:
    if raw.target.dtype.kind != "f" and raw.target.dtype.kind not in "iu":
        return
    # As float64, since -abs() of the smallest integer is itself negative.
    size = np.abs(raw.target.astype(np.float64))
    bad = np.flatnonzero(~(size <= LARGEST_TARGET))
    if len(bad):
        row = int(bad[0])
        more = f" (and {len(bad) - 1} more rows)" if len(bad) > 1 else ""
        raise DataError(
            f"data.target: {raw.label_at(row)}: must be a number of at most {LARGEST_TARGET:g} in "
            f"size (got {raw.target[row].item()!r}){more}; mend or drop such rows"
        )


def validation_rows(raw: Raw, labels: Labels, *, fraction: float, seed: int) -> np.ndarray:
    """Which rows are for validation, as (n,) booleans; the same for the same seed.

    A classification takes the fraction of each class, at least one row and not all of them; what
    rounding leaves over goes to the classes that are furthest below theirs.
    Errors: DataError naming the classes of one row.
    """
    rows = len(labels.values)
    if labels.class_names is None:
        group, counts = np.zeros(rows, dtype=np.int64), np.array([rows])
    else:
        group = labels.values
        counts = np.bincount(group, minlength=len(labels.class_names))
        lonely = [labels.class_names[i] for i in np.flatnonzero(counts < 2)]
        if lonely:
            raise DataError(
                f"data.target: {raw.label} has classes of one row, which cannot be in both parts: "
                f"{listed(lonely, MOST_SHOWN)}; add rows of them, drop them, or set data.task to "
                "regression if these are amounts"
            )
    quota = counts * fraction
    taken = np.clip(np.floor(quota), 1, counts - 1).astype(np.int64)
    below = np.argsort(-(quota - taken), kind="stable")
    below = below[taken[below] < counts[below] - 1]
    taken[below[: max(0, round(rows * fraction) - int(taken.sum()))]] += 1
    order = np.lexsort((np.random.default_rng(seed).random(rows), group))
    rank = np.empty(rows, dtype=np.int64)  # of each row within its class
    rank[order] = np.arange(rows) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank < taken[group]
