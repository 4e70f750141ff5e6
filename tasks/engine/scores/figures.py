"""The figures of an evaluation, equal to scikit-learn's, from answers that lie on the host. It
leaves out what these rows do not define: R2 of a target that never changes, the average precision
of a label that no row has. Scikit-learn is imported for several labels only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Figures = dict[str, float]
# Of amounts: the share of its error that the best single answer would have, where the model's error
# is not smaller beyond chance. Beside the metrics of an evaluation; see of_guesses.
MEAN, MEDIAN = "as the mean", "as the median"
CHANCE_T = 1.645  # one side, 5 %
LARGEST_CLASS = 0.9  # share of the rows above which the accuracy says little
MOST_CELLS = 2**20  # of a whole matrix: 8 MiB; of more classes the answers are sorted


def load() -> None:
    """Import what the figures need: a second, and 140 MiB of the host."""
    import sklearn.metrics  # noqa: F401


@dataclass(frozen=True)
class Cells:
    """The cells of a confusion matrix that are not 0, (3, cells) int64: the class that rows have,
    the class that they were given, and how many they are."""

    table: np.ndarray

    @classmethod
    def of(cls, given: np.ndarray, classes: np.ndarray) -> Cells:
        """given: (rows,) answers; classes: what is so."""
        known = classes >= 0
        so, told = classes[known].astype(np.int64), given[known].astype(np.int64)
        width = int(max(so.max(initial=0), told.max(initial=0))) + 1
        place = so * width + told
        if width * width <= MOST_CELLS:
            counts = np.bincount(place)
            place = np.flatnonzero(counts)
            counts = counts[place]
        else:
            place, counts = np.unique(place, return_counts=True)
        return cls(np.stack([place // width, place % width, counts]))


@dataclass(frozen=True)
class ByClass:
    """Each class that a row has or was given, in order: its number, and (classes,) figures."""

    classes: np.ndarray
    rows: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray


def by_class(cells: Cells) -> ByClass:
    """0 where a class was never given, or no row has it."""
    so, told, rows = cells.table
    classes = np.union1d(so, told)
    right, is_so, given = (
        np.bincount(np.searchsorted(classes, of), weights, len(classes))
        for of, weights in ((so, np.where(so == told, rows, 0)), (so, rows), (told, rows))
    )
    return ByClass(
        classes,
        is_so.astype(np.int64),
        right / np.maximum(given, 1),
        right / np.maximum(is_so, 1),
        2 * right / (is_so + given),
    )


def of_classes(cells: Cells) -> Figures:
    """Balanced accuracy: the mean recall of the classes that rows have; the mean F1 of those, and
    of classes that were given to a row. Where nearly all rows are of one class, its share."""
    if not cells.table.size:
        return {}
    found = by_class(cells)
    recall = found.recall[found.rows > 0].mean()
    share = float(found.rows.max() / found.rows.sum())
    return {
        "balanced_accuracy": float(recall),
        "macro_f1": float(found.f1.mean()),
        **({"largest_class_share": share} if share > LARGEST_CLASS else {}),
    }


def of_labels(logits: np.ndarray, labels: np.ndarray) -> Figures:
    """The mean F1 of the labels that a row has or was given, and the mean average precision of
    those that a row has. logits, labels: (rows, labels), of which labels are booleans."""
    from sklearn.metrics import average_precision_score, f1_score

    told, found = logits > 0, {}
    seen = np.any(told | labels, axis=0)
    if seen.any():
        average = "binary" if seen.sum() == 1 else None
        each = f1_score(_only(labels, seen), _only(told, seen), average=average)
        found["macro_f1"] = float(np.mean(each))
    there = np.any(labels, axis=0)
    if there.any() and np.isfinite(logits).all():
        each = average_precision_score(_only(labels, there), _only(logits, there), average=None)
        found["average_precision"] = float(np.mean(each))
    return found


def _only(values: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Of one column what is no table, which scikit-learn would take for a target of two classes."""
    return values[:, columns].squeeze(1) if columns.sum() == 1 else values[:, columns]


def of_amounts(outputs: np.ndarray, targets: np.ndarray) -> Figures:
    """R2, over several targets that of the sum of their squares, and the mean over the targets of
    the absolute error and of the root of the squared one. outputs, targets: (rows, targets)."""
    if outputs.shape != targets.shape:  # a loss of the user's own takes others
        return {}
    if not np.isfinite(outputs).all():
        return dict.fromkeys(("mae", "rmse"), float("nan"))
    error = outputs - targets
    found = {
        "mae": float(np.abs(error).mean()),
        "rmse": float(np.sqrt(np.square(error).mean(0)).mean()),
    }
    if (targets != targets[:1]).any():
        spread = np.square(targets - targets.mean(0)).sum()
        found = {"r2": float(1 - np.square(error).sum() / spread), **found}
    return found


def of_guesses(
    outputs: np.ndarray,
    targets: np.ndarray,
    guess: tuple[tuple[float, ...], tuple[float, ...]] | None,
) -> Figures:
    """Errors of the best answer that is the same for all rows, where the model's are not smaller
    beyond chance: MEAN, the root mean squared error of the training rows' mean; MEDIAN, the mean
    absolute error of their median. outputs, targets: (rows, 1); of several targets nothing is told.

    Beyond chance: by a t-test of the differences row by row, on one side, at 5 %, or where a few
    rows are most of the error, by a sign test, which counts the rows that the model is nearer to.
    """
    if guess is None or outputs.shape != targets.shape or targets.shape[1] != 1:
        return {}
    if len(targets) < 2 or not np.isfinite(outputs).all():
        return {}
    found = {}
    for name, (answer,), power in ((MEAN, guess[0], 2), (MEDIAN, guess[1], 1)):
        errors = np.abs(targets - answer) ** power
        gained = errors - np.abs(targets - outputs) ** power
        least = CHANCE_T / np.sqrt(len(gained))
        is_more = gained.mean() > least * gained.std(ddof=1)
        is_nearer = gained.mean() > 0 and (gained > 0).mean() - 0.5 > least / 2
        if not (is_more or is_nearer):
            found[name] = float(errors.mean() ** (1 / power))
    return found
