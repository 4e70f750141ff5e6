"""What was seen of one column while its blocks passed, and the verdict on it: numbers, or a
category, or why it can't be learnt from, by its row and cell. A text column of which at least half
the cells read as numbers is taken for a column of numbers with something stray in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tasks.engine.files.number_formats import CODE, DIGITS, FORMS, NUMERAL, WRITTEN, remedy
from tasks.engine.files.number_formats import TEXT as WORDS
from tasks.engine.files.scaling import LARGEST_FEATURE
from tasks.engine.files.source_data import shorten
from tasks.engine.tables.arrow_columns import CATEGORY, EMPTY, NUMBER, TEXT, Cells, refused_type

MOST_CATEGORIES = 1000  # of one column; more are an id, a name or free text
MISSING_CATEGORY = "missing"
FILL = "fill it in, or set data.missing to drop or mean"
FEWEST_OF_AN_ID = 20  # texts, of which nearly each is there once
INEXACT = 2.0**53  # from here on float64 loses digits of whole numbers
NO_INTEGER = 2.0**63  # from here on Arrow takes a CSV's whole numbers for fractions


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
    long: tuple[int, float] | None = None  # the first that may be whole, and loses digits
    words: dict[str, int] = field(default_factory=dict)  # codes of the different texts
    forms: np.ndarray = field(default_factory=lambda: np.zeros(len(FORMS), dtype=np.int64))
    first: dict[int, tuple[int, str]] = field(default_factory=dict)  # the first text of each form
    na: set[str] = field(default_factory=set)  # words that were read as missing

    def numbers(self, cells: Cells, start: int, *, least: float, most: float) -> None:
        """A block of numbers. least, most: of them, NaN where some are missing."""
        self._count(cells, start)
        self.whole = self.whole and cells.whole
        size = max(-least, most)
        limit = INEXACT if cells.whole else NO_INTEGER
        if not size < limit:  # or NaN
            missing = cells.missing
            self._holes(missing, start)
            sizes = np.where(missing, 0, np.abs(cells.values))
            size = float(sizes.max(initial=0))
            if size > LARGEST_FEATURE and self.far is None:
                row = int(np.argmax(sizes > LARGEST_FEATURE))
                self.far = (start + row, float(cells.values[row]))
            if size >= limit and self.long is None:
                row = int(np.argmax(sizes >= limit))
                self.long = (start + row, float(cells.values[row]))
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
        assert cells.forms is not None
        self.na.update(cells.nothing)
        self.forms += np.bincount(cells.forms, counts, len(FORMS)).astype(np.int64)
        for form in set(cells.forms[counts > 0].tolist()) - set(self.first):
            those = np.append(cells.forms == form, False)[cells.values]  # -1 is the last: missing
            row = int(np.argmax(those))
            self.first[form] = (start + row, cells.words[cells.values[row]])
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

    def problem(
        self,
        *,
        target: str,
        label: str,
        note: str,
        missing: str,
        decimal: str | None,
        look: Callable[[str, int], str] | None,
    ) -> str | None:
        """Why this feature can't be learnt from. decimal, look: of a file of text, see
        data.decimal, and what stands in a cell of a column and row."""
        where = f"data.path: {label} column {shorten(self.name)}"
        row = f"data.path: {label} row "
        cell = f"{note}, column {shorten(self.name)}: "
        kind = self.kind()
        if kind not in (NUMBER, CATEGORY, EMPTY):
            return refused_type(self.name, kind, target=target, label=label)
        if self.holes == self.rows:
            return f"{where}: holds no value in any row; leave the column out by data.drop"
        found = self._far_problem(row, cell, look)
        if kind == CATEGORY:
            found = self._text_problem(row, cell, decimal) or self._words_problem(
                where, missing=missing
            )
        if found is None and self.holes and missing == "fail":
            word = look(self.name, self.first_hole) if look else ""
            return f"{row}{self.first_hole + 1}{cell}{absent(self.holes, word, FILL)}"
        return found

    def _far_problem(
        self, row: str, cell: str, look: Callable[[str, int], str] | None
    ) -> str | None:
        if self.long is not None:
            at, value = self.long
            text = look(self.name, at).strip() if look else f"{value:.0f}" if self.whole else ""
            if text.lstrip("+-").isdigit():
                return (
                    f"{row}{at + 1}{cell}must be below 2**53 in size, since larger whole numbers "
                    f"lose digits (got {text}); if it is an id, leave the column out by data.drop, "
                    "else write it in a larger unit"
                )
        if self.far is None:
            return None
        return (
            f"{row}{self.far[0] + 1}{cell}must be a number of at most "
            f"{LARGEST_FEATURE:g} in size (got {self.far[1]!r}); mend or drop such rows, or "
            "leave the column out by data.drop"
        )

    def _text_problem(self, row: str, cell: str, decimal: str | None) -> str | None:
        """Why text is rather a column of numbers. Whole numbers are text where some begin with a
        zero, as zip codes do."""
        texts, amounts = int(self.forms.sum()), int(self.forms[[NUMERAL, WRITTEN]].sum())
        is_text = CATEGORY in self.kinds or 2 * self.forms[WORDS] > texts
        if is_text or (self.forms[CODE] and not amounts):
            return None
        form = next(f for f in (WRITTEN, WORDS, CODE, NUMERAL, DIGITS) if f in self.first)
        at, word = self.first[form]
        told = f"{row}{at + 1}{cell}must be a number (got {shorten(word)})"
        if form == WRITTEN:
            return f"{told}; {remedy(word, decimal)}, or leave the column out by data.drop"
        if form == WORDS:
            return (
                f"{told}, as {texts - self.forms[WORDS]:,} of its {texts:,} cells are; mend such "
                "cells, or leave the column out by data.drop"
            )
        return f"{told}, not text; save it as numbers, or as a column of categories"

    def _words_problem(self, where: str, *, missing: str) -> str | None:
        texts, first = int(self.forms.sum()), shorten(next(iter(self.words)))
        if len(self.words) > MOST_CATEGORIES:
            return (
                f"{where}: has more than {MOST_CATEGORIES:,} different texts, such as "
                f"{first}: too many for a category; leave the column out by data.drop"
            )
        if CATEGORY not in self.kinds and len(self.words) >= max(FEWEST_OF_AN_ID, 0.9 * texts):
            return (
                f"{where}: has {len(self.words):,} different texts in {texts:,} rows, such as "
                f"{first}, as a name or an id has, of which nothing can be learnt; leave the "
                "column out by data.drop"
            )
        if len(self.words) + (missing == "mean" and self.holes > 0) < 2:
            return (
                f"{where}: holds {first} in every row, of which nothing can be learnt; leave the "
                "column out by data.drop"
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


def absent(rows: int, word: str, mend: str) -> str:
    """What is said of a missing value. word: what stands there, where that is known."""
    if not word:
        return f"is missing (as in {rows:,} rows); {mend}"
    return (
        f"is missing (as in {rows:,} rows), as {shorten(word)} is read; {mend}, or list the words "
        "that mean missing in data.na"
    )
