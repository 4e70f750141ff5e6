"""Compute the scores of an evaluation, equal to scikit-learn's, from outputs on the host; write
those of each class, and keep the rows that they need. What these rows do not define is left
out: R2 of a target that never changes, the average precision of a label that no row has.
Scikit-learn is imported for several labels only.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Figures = dict[str, float]
CHANCE_T = 1.645  # one side, 5 %
LARGEST_CLASS = 0.9  # share of the rows above which the accuracy says little
ZERO = 1e-6  # of the largest target: less is none, where these were scaled in single precision
MOST_CELLS = 2**20  # of a whole matrix: 8 MiB; of more classes the answers are sorted


def load_sklearn() -> None:
    """Import scikit-learn for the scores: a second, and 140 MiB of the host."""
    import sklearn.metrics  # noqa: F401


@dataclass(frozen=True)
class ConfusionCells:
    """The cells of a confusion matrix that are not 0, (3, cells) int64: the true class of rows,
    their predicted class, and how many they are."""

    table: np.ndarray

    @classmethod
    def of(cls, predictions: np.ndarray, classes: np.ndarray) -> ConfusionCells:
        """Count the cells. predictions: (rows,) classes; classes: the true ones."""
        has_class = classes >= 0
        so, predicted_classes = (
            classes[has_class].astype(np.int64),
            predictions[has_class].astype(np.int64),
        )
        width = int(max(so.max(initial=0), predicted_classes.max(initial=0))) + 1
        place = so * width + predicted_classes
        if width * width <= MOST_CELLS:
            counts = np.bincount(place)
            place = np.flatnonzero(counts)
            counts = counts[place]
        else:
            place, counts = np.unique(place, return_counts=True)
        return cls(np.stack([place // width, place % width, counts]))


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation of a model has come to: its metrics, under the names of the record, and
    what is logged nowhere, but that warnings are made of."""

    metrics: dict[str, float] = field(default_factory=dict)
    cells: ConfusionCells | None = None  # of a classification
    is_constant: bool = False  # every row was given the same answer, of more than one row
    is_by_chance: bool = False  # the predicted classes have nothing to do with those of the rows
    r2_error: float | None = None  # the standard error of R2
    # Of amounts, the errors of the best constant prediction, the mean or the median of the training
    # rows, where the model's is not smaller beyond chance.
    mean_rmse: float | None = None
    median_mae: float | None = None


@dataclass(frozen=True)
class ClassScores:
    """The scores of each class that a row has or was predicted as, in order: its number, and
    (classes,) figures."""

    classes: np.ndarray
    rows: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray


def compute_scores_by_class(cells: ConfusionCells) -> ClassScores:
    """Compute the scores of each class; 0 where a class was never predicted, or no row has it."""
    so, answers, rows = cells.table
    classes = np.union1d(so, answers)
    right, is_so, answer_counts = (
        np.bincount(np.searchsorted(classes, of), weights, len(classes))
        for of, weights in ((so, np.where(so == answers, rows, 0)), (so, rows), (answers, rows))
    )
    return ClassScores(
        classes,
        is_so.astype(np.int64),
        right / np.maximum(answer_counts, 1),
        right / np.maximum(is_so, 1),
        2 * right / (is_so + answer_counts),
    )


def compute_class_scores(cells: ConfusionCells) -> Figures:
    """Return balanced accuracy (the mean recall of the classes that rows have), the mean F1 of
    those and of predicted classes, and, where nearly all rows are of one class, its share."""
    if not cells.table.size:
        return {}
    by_class = compute_scores_by_class(cells)
    recall = by_class.recall[by_class.rows > 0].mean()
    share = float(by_class.rows.max() / by_class.rows.sum())
    return {
        "balanced_accuracy": float(recall),
        "macro_f1": float(by_class.f1.mean()),
        **({"largest_class_share": share} if share > LARGEST_CLASS else {}),
    }


def is_by_chance(cells: ConfusionCells) -> bool:
    """Return whether the predictions have nothing to do with the classes: whether their balanced
    accuracy is not above that of the same ones in a random order, at 5 %.

    By the mean and variance over all orders (Hoeffding 1951), of the sum of the recalls.
    """
    if not cells.table.size:
        return False
    so, answers, _ = cells.table
    classes = np.union1d(so, answers)
    by_class = compute_scores_by_class(cells)
    rows = by_class.rows.astype(np.float64)
    counts = np.bincount(np.searchsorted(classes, answers), cells.table[2], len(classes))
    total = rows.sum()
    if total < 2:
        return True
    is_there = rows > 0
    each = np.divide(1.0, rows, out=np.zeros_like(rows), where=is_there)
    # Of a row of class k and a prediction p the term is each[k] where they are the same, else 0.
    by_row, by_answer = counts * each / total, is_there / total
    mean = float((rows * by_row).sum() / total)
    apart = mean - by_row
    everywhere = (
        rows @ apart**2 * total
        - 2 * (rows @ apart) * (counts @ by_answer)
        + total * (counts @ by_answer**2)
    )
    other = apart - by_answer
    diagonal = (rows * counts) @ ((each + other) ** 2 - other**2)
    spread = math.sqrt(max(0.0, float(everywhere + diagonal)) / (total - 1))
    gained = float((by_class.recall * is_there).sum()) - total * mean
    return gained <= CHANCE_T * spread + 1e-9


def compute_label_scores(logits: np.ndarray, labels: np.ndarray) -> Figures:
    """Return the mean F1 of the labels that a row has or was given, and the mean average precision
    of those that a row has. logits, labels: (rows, labels), of which labels are booleans."""
    from sklearn.metrics import average_precision_score, f1_score

    answers, figures = logits > 0, {}
    seen = np.any(answers | labels, axis=0)
    if seen.any():
        average = "binary" if seen.sum() == 1 else None
        each = f1_score(
            _select_columns(labels, seen), _select_columns(answers, seen), average=average
        )
        figures["macro_f1"] = float(np.mean(each))
    there = np.any(labels, axis=0)
    if there.any() and np.isfinite(logits).all():
        each = average_precision_score(
            _select_columns(labels, there), _select_columns(logits, there), average=None
        )
        figures["average_precision"] = float(np.mean(each))
    return figures


def _select_columns(values: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Select columns; a single one as a vector, since scikit-learn would take a table for a
    target of two classes."""
    return values[:, columns].squeeze(1) if columns.sum() == 1 else values[:, columns]


def compute_regression_scores(outputs: np.ndarray, targets: np.ndarray) -> Figures:
    """Return R2, over several targets that of the sum of their squares, and the mean over the
    targets of the absolute error, in its unit and in per cent, and of the root of the squared one.
    outputs, targets: (rows, targets)."""
    if outputs.shape != targets.shape:  # a loss of the user's own takes others
        return {}
    percent = compute_percentage_error(outputs, targets)
    if not np.isfinite(outputs).all():
        return {**dict.fromkeys(("mae", "rmse"), float("nan")), **percent}
    error = outputs - targets
    scores = {
        "mae": float(np.abs(error).mean()),
        "rmse": float(np.sqrt(np.square(error).mean(0)).mean()),
        **percent,
    }
    if (targets != targets[:1]).any():
        spread = np.square(targets - targets.mean(0)).sum()
        scores = {"r2": float(1 - np.square(error).sum() / spread), **scores}
    return scores


def compute_percentage_error(outputs: np.ndarray, targets: np.ndarray) -> Figures:
    """Return the mean absolute error in per cent of the targets, (rows, targets); nothing where a
    target is 0, of which no error is a share: scikit-learn divides by 2e-16 there, so that such a
    row alone decides the mean. Targets were kept in single precision: 0 is what that tells from it.
    """
    sizes = np.abs(targets)
    if (sizes <= ZERO * sizes.max(initial=0.0)).any():
        return {}
    return {"mape": 100 * float(np.abs((outputs - targets) / targets).mean())}


def compute_r2_error(outputs: np.ndarray, targets: np.ndarray) -> float | None:
    """Return the standard error of R2 over independent rows, by its linearization; None where it
    is not defined. outputs, targets: (rows, targets)."""
    if outputs.shape != targets.shape or len(targets) < 3 or not np.isfinite(outputs).all():
        return None
    errors = np.square(outputs - targets).sum(1)
    spread = np.square(targets - targets.mean(0)).sum(1)
    if not spread.any():
        return None
    left = errors.sum() / spread.sum()
    influence = (errors - left * spread) / spread.mean()
    return float(influence.std(ddof=1) / np.sqrt(len(targets)))


def compute_constant_baseline(
    outputs: np.ndarray,
    targets: np.ndarray,
    guess: tuple[tuple[float, ...], tuple[float, ...]] | None,
) -> tuple[float | None, float | None]:
    """Return the errors of the best constant prediction, each None where the model's is smaller
    beyond chance: the root mean squared error of the training rows' mean, and the mean absolute
    error of their median. outputs, targets: (rows, 1); several targets give nothing.

    Beyond chance: by a t-test of the differences row by row, on one side, at 5 %, or where a few
    rows are most of the error, by a sign test, which counts the rows that the model is nearer to.
    """
    if guess is None or outputs.shape != targets.shape or targets.shape[1] != 1:
        return None, None
    if len(targets) < 2 or not np.isfinite(outputs).all():
        return None, None
    baseline: list[float | None] = []
    for (answer,), power in ((guess[0], 2), (guess[1], 1)):
        errors = np.abs(targets - answer) ** power
        gained = errors - np.abs(targets - outputs) ** power
        least = CHANCE_T / np.sqrt(len(gained))
        is_more = gained.mean() > least * gained.std(ddof=1)
        is_nearer = gained.mean() > 0 and (gained > 0).mean() - 0.5 > least / 2
        is_better = is_more or is_nearer
        baseline.append(None if is_better else float(errors.mean() ** (1 / power)))
    return baseline[0], baseline[1]


SCORES_FOLDER = "scores"
MOST_LISTED = 20  # classes in a report: those with the lowest F1
MOST_DRAWN = 30  # classes in the picture of the matrix: those with the most wrong rows


def write_class_scores(
    cells: ConfusionCells, names: Sequence[str] | None, folder: Path, *, part: str
) -> dict[str, Any]:
    """Write `folder`/scores/PART_classes.csv, a line a class, and PART_confusion.csv, a line
    for each pair of a class and what its rows were predicted to be. Return what a report shows."""
    by_class = compute_scores_by_class(cells)
    name = _make_class_names(names, int(cells.table[:2].max()) + 1)
    lines = [
        [name[k], int(rows), *(round(float(value), 6) for value in values)]
        for k, rows, *values in zip(
            by_class.classes,
            by_class.rows,
            by_class.precision,
            by_class.recall,
            by_class.f1,
            strict=True,
        )
    ]
    pairs = [[name[so], name[answer], int(rows)] for so, answer, rows in cells.table.T]
    _write_csv(folder, f"{part}_classes.csv", ("class", "rows", "precision", "recall", "f1"), lines)
    _write_csv(folder, f"{part}_confusion.csv", ("class", "predicted", "rows"), pairs)
    listed = lines
    if len(lines) > MOST_LISTED:
        worst = np.argsort(by_class.f1, kind="stable")[:MOST_LISTED]
        listed = [lines[i] for i in worst]
    drawn, matrix = _find_most_confused(cells, by_class.classes)
    return {
        "count": len(lines),
        "listed": listed,
        "drawn": [name[k] for k in drawn],
        "matrix": matrix.tolist(),
    }


def _find_most_confused(
    cells: ConfusionCells, classes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the most confused classes and the rows between them: of each in a line, how many
    were predicted as each."""
    so, answers, rows = np.searchsorted(classes, cells.table[0]), *cells.table[1:]
    answers = np.searchsorted(classes, answers)
    wrong = np.where(so != answers, rows, 0)
    each = np.bincount(so, wrong, len(classes)) + np.bincount(answers, wrong, len(classes))
    kept = np.sort(np.argsort(-each, kind="stable")[:MOST_DRAWN])
    place = np.full(len(classes), -1)
    place[kept] = np.arange(len(kept))
    matrix = np.zeros((len(kept), len(kept)), dtype=np.int64)
    inside = (place[so] >= 0) & (place[answers] >= 0)
    matrix[place[so[inside]], place[answers[inside]]] = rows[inside]
    return classes[kept], matrix


def _make_class_names(names: Sequence[str] | None, count: int) -> list[str]:
    known_names = list(names or ())
    return known_names + [str(k) for k in range(len(known_names), count)]


def _write_csv(
    folder: Path, name: str, head: Sequence[str], lines: Sequence[Sequence[Any]]
) -> None:
    (folder / SCORES_FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(folder / SCORES_FOLDER / name, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *lines])


# Values of the outputs. Those of a classification are classes, of 2 or 4 bytes each with their
# targets'. To sort the scores of several labels takes 0.25 us for each.
MOST_VALUES = {"classification": 2**24, "regression": 2**22, "multilabel": 2**18}


def shrink_classes(classes: Tensor, count: int) -> Tensor:
    """Return the same classes in the smallest integer type that `count` classes fit in."""
    return classes.to(torch.int16 if count <= 2**15 else torch.int32)


class KeptRows:
    """The outputs and targets of an evaluation's rows."""

    def __init__(self, task: str, rows: int) -> None:
        """rows: of the whole evaluation."""
        self._most, self._rows = MOST_VALUES.get(task, 0), rows
        self._kept: tuple[Tensor, Tensor] | None = None
        self._stride, self._seen, self._count = 1, 0, 0

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add the next rows. outputs, targets: (rows, ...)."""
        if self._kept is None:
            width = max(1, outputs[:1].numel())
            self._stride = -(-self._rows * width // self._most)
            count = -(-self._rows // self._stride)
            self._kept = (
                outputs.new_empty(count, *outputs.shape[1:]),
                targets.new_empty(count, *targets.shape[1:]),
            )
        rows = slice(-self._seen % self._stride, None, self._stride)
        self._seen += len(outputs)
        end = min(self._count + len(outputs[rows]), len(self._kept[0]))
        for kept, batch in zip(self._kept, (outputs, targets), strict=True):
            kept[self._count : end] = batch[rows][: end - self._count]
        self._count = end

    def on_host(self) -> tuple[Tensor, Tensor] | None:
        """Return outputs and targets on the host, after waiting for the device; None where no
        row came."""
        if self._kept is None:
            return None
        outputs, targets = self._kept
        return outputs[: self._count].cpu(), targets[: self._count].cpu()
