"""What a classification has made of each class: files for a person's own tools, and as much of it
as a report shows. Of many classes that is those that matter: the worst, and the most confused.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tasks.engine.scores.figures import Cells, by_class

FOLDER = "scores"
MOST_LISTED = 20  # classes in a report: those with the lowest F1
MOST_DRAWN = 30  # classes in the picture of the matrix: those with the most wrong rows


def written(
    cells: Cells, names: Sequence[str] | None, folder: Path, *, part: str
) -> dict[str, Any]:
    """What a report shows. Writes `folder`/scores/PART_classes.csv, a line a class, and
    PART_confusion.csv, a line for each pair of a class and what its rows were predicted to be."""
    found = by_class(cells)
    name = _names(names, int(cells.table[:2].max()) + 1)
    lines = [
        [name[k], int(rows), *(round(float(value), 6) for value in values)]
        for k, rows, *values in zip(
            found.classes, found.rows, found.precision, found.recall, found.f1, strict=True
        )
    ]
    pairs = [[name[so], name[told], int(rows)] for so, told, rows in cells.table.T]
    _write(folder, f"{part}_classes.csv", ("class", "rows", "precision", "recall", "f1"), lines)
    _write(folder, f"{part}_confusion.csv", ("class", "predicted", "rows"), pairs)
    listed = lines
    if len(lines) > MOST_LISTED:
        worst = np.argsort(found.f1, kind="stable")[:MOST_LISTED]
        listed = [lines[i] for i in worst]
    drawn, matrix = _most_confused(cells, found.classes)
    return {
        "count": len(lines),
        "listed": listed,
        "drawn": [name[k] for k in drawn],
        "matrix": matrix.tolist(),
    }


def _most_confused(cells: Cells, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Classes and the rows between them: of each in a line, how many were given each."""
    so, told, rows = np.searchsorted(classes, cells.table[0]), *cells.table[1:]
    told = np.searchsorted(classes, told)
    wrong = np.where(so != told, rows, 0)
    each = np.bincount(so, wrong, len(classes)) + np.bincount(told, wrong, len(classes))
    kept = np.sort(np.argsort(-each, kind="stable")[:MOST_DRAWN])
    place = np.full(len(classes), -1)
    place[kept] = np.arange(len(kept))
    matrix = np.zeros((len(kept), len(kept)), dtype=np.int64)
    inside = (place[so] >= 0) & (place[told] >= 0)
    matrix[place[so[inside]], place[told[inside]]] = rows[inside]
    return classes[kept], matrix


def _names(names: Sequence[str] | None, count: int) -> list[str]:
    given = list(names or ())
    return given + [str(k) for k in range(len(given), count)]


def _write(folder: Path, name: str, head: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
    (folder / FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(folder / FOLDER / name, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *lines])
