"""What was seen of one column while its blocks passed, and the verdict on it: numbers, or a
category, or why it can't be learnt from, by its row and cell. A text column of which at least half
the cells read as numbers is taken for a column of numbers with something stray in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tasks.engine.cells import CATEGORY, EMPTY, NUMBER, TEXT, Cells, refused_type
from tasks.engine.raw import shorten
from tasks.engine.scaling import LARGEST_FEATURE

MOST_CATEGORIES = 1000  # of one column; more are an id, a name or free text
MISSING_CATEGORY = "missing"


@dataclass
class Seen:
    """One column, as far as its blocks have passed. Rows from 0."""

    name: str
    kinds: set[str] = field(default_factory=set)
    whole: bool = True  # all numbers were integers or booleans
    rows: int = 0
    holes: int = 0
    first_hole: int = 0
    largest: float = 0.0  # in size
    far: tuple[int, float] | None = None  # the first number that is too large
    words: dict[str, int] = field(default_factory=dict)  # codes of the different texts
    texts: int = 0
    numerals: int = 0  # texts that read as numbers
    first: tuple[int, str] | None = None  # the first text
    stray: tuple[int, str] | None = None  # the first text that is no number

    def numbers(self, cells: Cells, start: int, *, least: float, most: float) -> None:
        """A block of numbers. least, most: of them, NaN where some are missing."""
        self._count(cells, start)
        self.whole = self.whole and cells.whole
        size = max(-least, most)
        if not size <= LARGEST_FEATURE:  # or NaN
            missing = cells.missing
            self._holes(missing, start)
            sizes = np.where(missing, 0, np.abs(cells.values))
            size = float(sizes.max(initial=0))
            if size > LARGEST_FEATURE and self.far is None:
                row = int(np.argmax(sizes > LARGEST_FEATURE))
                self.far = (start + row, float(cells.values[row]))
        self.largest = max(self.largest, size)

    def nothing(self, cells: Cells, start: int) -> None:
        """A block without any value, or of a type that is of no use."""
        self._count(cells, start)
        self._holes(np.ones(len(cells.values), dtype=bool), start)

    def text(self, cells: Cells, start: int, *, most: int | None) -> np.ndarray:
        """The codes of a block of text as float64, NaN for a missing one; most: different ones
        that are still told apart."""
        self._count(cells, start)
        missing = cells.values < 0
        if missing.any():
            self._holes(missing, start)
        counts = np.bincount(cells.values[~missing], minlength=len(cells.words))
        assert cells.numerals is not None
        self.texts += int(counts.sum())
        self.numerals += int(counts[cells.numerals].sum())
        if self.first is None and self.texts:
            self.first = self._place(cells, ~missing, start)
        if self.stray is None:
            odd = np.append(~cells.numerals, False)[cells.values]  # -1 is the last: missing
            if odd.any():
                self.stray = self._place(cells, odd, start)
        codes = np.full(len(cells.words) + 1, np.nan)
        for i in np.flatnonzero(counts):
            if most is None or len(self.words) <= most:
                codes[i] = self.words.setdefault(cells.words[i], len(self.words))
        return codes[cells.values]

    def kind(self) -> str:
        """number, category, empty, mixed (to be read as text once more), or a type of no use."""
        kinds = self.kinds - {EMPTY}
        if not kinds:
            return EMPTY
        if kinds <= {TEXT, CATEGORY}:
            return CATEGORY
        return "mixed" if len(kinds) > 1 else next(iter(kinds))

    def problem(self, *, target: str, label: str, note: str, missing: str) -> str | None:
        """Why this feature can't be learnt from."""
        where = f"data.path: {label} column {shorten(self.name)}"
        cell = f"{note}, column {shorten(self.name)}: "
        kind = self.kind()
        if kind not in (NUMBER, CATEGORY, EMPTY):
            return refused_type(self.name, kind, target=target, label=label)
        if self.holes == self.rows:
            return f"{where}: holds no value in any row; leave the column out by data.drop"
        if self.far is not None:
            return (
                f"data.path: {label} row {self.far[0] + 1}{cell}must be a number of at most "
                f"{LARGEST_FEATURE:g} in size (got {self.far[1]!r}); mend or drop such rows, or "
                "leave the column out by data.drop"
            )
        if kind == CATEGORY:
            found = self._text_problem(f"data.path: {label} row ", cell) or self._words_problem(
                where, missing=missing
            )
            if found:
                return found
        if self.holes and missing == "fail":
            return (
                f"data.path: {label} row {self.first_hole + 1}{cell}is missing (as in "
                f"{self.holes:,} rows); fill it in, or set data.missing to drop or mean"
            )
        return None

    def _text_problem(self, row: str, cell: str) -> str | None:
        if CATEGORY in self.kinds or 2 * self.numerals < self.texts:
            return None
        place = self.stray or self.first
        assert place is not None
        told = f"{row}{place[0] + 1}{cell}must be a number (got {shorten(place[1])})"
        if self.stray is None:
            return f"{told}, not text; save it as numbers, or as a column of categories"
        return (
            f"{told}, as {self.numerals:,} of its {self.texts:,} cells are; mend such cells, or "
            "leave the column out by data.drop"
        )

    def _words_problem(self, where: str, *, missing: str) -> str | None:
        if len(self.words) > MOST_CATEGORIES:
            return (
                f"{where}: has more than {MOST_CATEGORIES:,} different texts, such as "
                f"{shorten(next(iter(self.words)))}: too many for a category; leave the column "
                "out by data.drop"
            )
        if len(self.words) + (missing == "mean" and self.holes > 0) < 2:
            return (
                f"{where}: holds {shorten(next(iter(self.words)))} in every row, of which nothing "
                "can be learnt; leave the column out by data.drop"
            )
        return None

    def _count(self, cells: Cells, start: int) -> None:
        self.kinds.add(cells.kind)
        self.rows += len(cells.values)

    def _holes(self, missing: np.ndarray, start: int) -> None:
        count = int(missing.sum())
        if count and not self.holes:
            self.first_hole = start + int(np.argmax(missing))
        self.holes += count

    def _place(self, cells: Cells, those: np.ndarray, start: int) -> tuple[int, str]:
        row = int(np.argmax(those))
        return start + row, cells.words[cells.values[row]]
