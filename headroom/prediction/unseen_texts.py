"""Tells of texts in the rows to predict that training never saw: all inputs of such a category are
0, so that the prediction knows nothing of it. Where texts that are rare have an input of their own
together, nobody knows which ones training saw, and nothing is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headroom.base.raw_inputs import CATEGORY, NOTHING, is_unseen
from headroom.prediction.input_batches import Batch

MOST_TOLD = 3


class UnseenTexts:
    """Counts the rows with texts that training never saw."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._columns: Sequence[Mapping[str, Any]] = [
            column
            for column in spec.get("columns") or ()
            if column["kind"] == CATEGORY and column.get("rest") is None
        ]
        self._nothing = NOTHING if spec.get("na") is None else {"", *spec["na"]}
        self._rows = self._all = 0
        self._first: dict[str, int] = {}  # the first row of each, from 1

    def add(self, batch: Batch) -> None:
        """Look at the next rows."""
        self._all += len(batch.rows)
        is_unseen_row = np.zeros(len(batch.rows), dtype=bool)
        for column in self._columns if hasattr(batch.rows, "columns") else ():
            if column["name"] not in batch.rows.columns:
                continue
            cells = batch.rows[column["name"]]
            unseen = [v for v in cells.unique() if is_unseen(v, column, self._nothing)]
            for value in unseen:
                rows = np.asarray(cells == value)
                name = f"{column['name']}={str(value).strip()[:60]}"
                self._first.setdefault(name, batch.first + int(rows.argmax()) + 1)
                is_unseen_row |= rows
        self._rows += int(is_unseen_row.sum())

    def describe(self) -> str:
        """Describe them in a sentence; empty where there are none."""
        if not self._rows:
            return ""
        texts = [f"{name} (row {row})" for name, row in list(self._first.items())[:MOST_TOLD]]
        more = len(self._first) - MOST_TOLD
        rest = f" and {more:,} more" if more > 0 else ""
        return (
            f"{self._rows:,} of {self._all:,} {'row' if self._all == 1 else 'rows'} "
            f"{'has' if self._rows == 1 else 'have'} texts that training never saw: "
            f"{', '.join(texts)}{rest}"
        )
