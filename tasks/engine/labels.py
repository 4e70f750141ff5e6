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
BLOCK_ROWS = 1 << 16
MISSING = {"", "nan", "null", "n/a", "#n/a", "na", "none"}  # what spreadsheets and pandas write


@dataclass(frozen=True)
class Labels:
    """Targets ready to be learnt.

    values: (n,) int64 classes, (n, k) float32 of 0 and 1 for several labels, or (n, k) float32 in
    the target's own units, which are not scaled: metrics are read in them.
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
    whole = target.dtype.kind in "biu" or bool((target == np.round(target)).all())
    few = None
    if task == "auto":
        few = _distinct(target, most=MOST_AUTO_CLASSES) if whole else None
        task = "regression" if few is None else "classification"
    if task == "regression":
        return Labels("regression", target.astype(np.float32).reshape(-1, 1), None)
    if not whole:
        row = int(np.flatnonzero(target != np.round(target))[0])
        raise DataError(
            f"data.target: {raw.label_at(row)}: a class must be text, a boolean or a whole number "
            f"(got {target[row].item()!r}); set data.task to regression, or mend the labels"
        )
    return _numbered(raw, few)


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
        return Labels("regression", target.astype(np.float32), None)
    if not binary.all():
        row, column = np.argwhere(~binary)[0].tolist()
        raise DataError(
            f"data.target: {raw.label_at(row)}, column {column + 1}: must be 0 or 1 (got "
            f"{target[row, column].item()!r}); mend it, or set data.task to regression"
        )
    names = tuple(str(i) for i in range(target.shape[1]))
    return Labels("multilabel", target.astype(np.float32), names)


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
    if task != "auto" and task != "classification":
        raise DataError(
            f"data.target: {raw.label_at(0)}: a {task} needs numbers (got {shorten(texts[0])}"
            "); set data.task to classification, or choose another target"
        )
    index = {name: i for i, name in enumerate(names)}
    values = np.fromiter((index[text] for text in texts), dtype=np.int64, count=len(texts))
    return _several(raw, Labels("classification", values, tuple(names)))


def _distinct(target: np.ndarray, most: int | None = None) -> np.ndarray | None:
    """The different values, sorted, in blocks: to sort all rows at once takes five times their
    memory. None once there are more than `most`."""
    found = target[:0]
    for start in range(0, len(target), BLOCK_ROWS):
        found = np.union1d(found, target[start : start + BLOCK_ROWS])
        if most is not None and len(found) > most:
            return None
    return found


def _numbered(raw: Raw, known: np.ndarray | None) -> Labels:
    classes = _distinct(raw.target) if known is None else known
    assert classes is not None
    values = np.searchsorted(classes, raw.target)  # int64
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
    bad = np.argwhere(~(size <= LARGEST_TARGET))
    if len(bad):
        place = tuple(bad[0].tolist())
        row, more = place[0], f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise DataError(
            f"data.target: {raw.label_at(row)}: must be a number of at most {LARGEST_TARGET:g} in "
            f"size (got {raw.target[place].item()!r}){more}; mend or drop such rows"
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
        group, counts = np.zeros(rows, dtype=np.int64), np.array([rows])
    else:
        assert labels.class_names is not None
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
    order = np.argsort(np.random.default_rng(seed).random(rows), kind="stable")
    if len(counts) > 1:  # then by class; of 16 bits numpy sorts in linear time
        group = group.astype(np.uint16) if len(counts) <= 1 << 16 else group
        order = order[np.argsort(group[order], kind="stable")]
    chosen = np.zeros(rows, dtype=bool)
    for first, some in zip(np.cumsum(counts) - counts, taken, strict=True):
        chosen[order[first : first + some]] = True
    return chosen


def _given(raw: Raw, rows: int) -> np.ndarray:
    chosen = np.asarray(raw.validation, dtype=bool)
    assert chosen.shape == (rows,)
    if chosen.all() or not chosen.any():
        part = "training" if chosen.all() else "validation"
        raise DataError(f"data.source: {raw.label} has no {part} rows; give both parts some")
    return chosen
