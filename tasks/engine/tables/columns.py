"""One column of a table while its blocks pass, out of Arrow: numbers with NaN for a missing value,
codes for text; and the verdict on the whole of it: numbers, or a category, or why it can't be
learnt from, by its row and cell. A text column of which at least half the cells read as numbers is
taken for a column of numbers with something stray in it. No path through here imports pandas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from pyarrow import compute

from tasks.engine.files.number_formats import (
    CODE,
    DIGITS,
    FORMS,
    NUMERAL,
    WRITTEN,
    Spelling,
    is_iso_date,
    patterns,
    remedy,
)
from tasks.engine.files.number_formats import TEXT as WORDS
from tasks.engine.files.scaling import LARGEST_FEATURE
from tasks.engine.files.source_data import shorten
from tasks.engine.models.raw_inputs import DAY_S

NUMBER, TEXT, CATEGORY, EMPTY, MIXED = "number", "text", "category", "empty", "mixed"
DATE = "date"
OF_USE = (NUMBER, CATEGORY, DATE, EMPTY)
MOST_DIFFERENT = 100_000  # texts of one column; more are an id, a name or free text
FILL = "fill it in, or set data.missing to drop or mean"
LEAVE_OUT = "leave the column out by data.drop"
FEWEST_OF_AN_ID = 20  # texts, of which nearly each is there once
INEXACT = 2.0**53  # from here on float64 loses digits of whole numbers
NO_INTEGER = 2.0**63  # from here on Arrow takes a CSV's whole numbers for fractions


@dataclass(frozen=True)
class Origin:
    """Where a column comes from, as its sentences say it."""

    label: str  # the file's name
    note: str  # how its rows are counted
    target: str
    missing: str  # data.missing
    spelling: Spelling
    written: Callable[[str, int], str] | None  # what a file of text holds in a column and row


@dataclass
class ColumnSummary:
    """One column, as far as its blocks have passed. Rows from 0."""

    name: str
    origin: Origin
    most: int | None = MOST_DIFFERENT  # different texts that are still told apart
    kinds: set[str] = field(default_factory=set)
    whole: bool = True  # all numbers were integers or booleans
    has_times: bool = False  # some date has a time of day
    type: str = ""  # Arrow's name of the last type
    rows: int = 0
    holes: int = 0
    first_hole: int = 0
    far: tuple[int, float] | None = None  # the first number that is too large
    long: tuple[int, float] | None = None  # the first that may be whole, and loses digits
    words: dict[str, int] = field(default_factory=dict)  # codes of the different texts
    forms: np.ndarray = field(default_factory=lambda: np.zeros(len(FORMS), dtype=np.int64))
    first: dict[int, tuple[int, str]] = field(default_factory=dict)  # the first text of each form
    na: set[str] = field(default_factory=set)  # words that were read as missing

    def add(self, array: pa.Array) -> np.ndarray:
        """The next rows: numbers in their own type, codes of text as float64; NaN for a missing
        one."""
        kind, self.type = kind_of(array.type), str(array.type)
        self.kinds.add(kind)
        if kind == NUMBER:
            values = self._numbers(array)
        elif kind == DATE:
            values = self._seconds(array)
        elif kind in (TEXT, CATEGORY):
            values = self._codes(array, kind)
        else:
            values = np.full(len(array), np.nan)
            self._count_holes(np.ones(len(array), dtype=bool))
        self.rows += len(array)
        return values

    def kind(self) -> str:
        """number, category, date, empty, mixed (to be read as text once more), or of no use."""
        kinds = self.kinds - {EMPTY}
        if not kinds:
            return EMPTY
        if kinds <= {TEXT, CATEGORY}:
            return CATEGORY
        return MIXED if len(kinds) > 1 else next(iter(kinds))

    def problem(self) -> str | None:
        """Why this target can't be learnt, or this feature be learnt from."""
        is_target, kind = self.name == self.origin.target, self.kind()
        setting = "data.target" if is_target else "data.path"
        where = f"{setting}: {self.origin.label} column {shorten(self.name)}"
        if kind not in OF_USE or (is_target and kind == DATE):
            return refused_type(
                self.name, self.type, target=self.origin.target, label=self.origin.label
            )
        if self.holes == self.rows:
            mend = "choose another target" if is_target else LEAVE_OUT
            return f"{where}: holds no value in any row; {mend}"
        found = None
        if not is_target and kind == CATEGORY:
            found = self._text_problem() or self._words_problem(where)
        elif not is_target:
            found = self._far_problem()
        if found is None and self.holes and (is_target or self.origin.missing == "fail"):
            found = self._missing(setting, "fill it in or drop the rows" if is_target else FILL)
        return found

    def _cell(self, row: int, setting: str = "data.path") -> str:
        place = f"{self.origin.label} row {row + 1}{self.origin.note}"
        return f"{setting}: {place}, column {shorten(self.name)}: "

    def _missing(self, setting: str, mend: str) -> str:
        told = f"{self._cell(self.first_hole, setting)}is missing (as in {self.holes:,} rows)"
        word = self.origin.written(self.name, self.first_hole) if self.origin.written else ""
        if not word:
            return f"{told}; {mend}"
        told = f"{told}, as {shorten(word)} is read"
        return f"{told}; {mend}, or list the words that mean missing in data.na"

    def _far_problem(self) -> str | None:
        if self.long is not None:
            at, value = self.long
            text = f"{value:.0f}" if self.whole else ""
            if self.origin.written:
                text = self.origin.written(self.name, at).strip()
            if text.lstrip("+-").isdigit():
                return (
                    f"{self._cell(at)}must be below 2**53 in size, since larger whole numbers "
                    f"lose digits (got {text}); if it is an id, {LEAVE_OUT}, "
                    "else write it in a larger unit"
                )
        if self.far is None:
            return None
        at, value = self.far
        return (
            f"{self._cell(at)}must be a number of at most {LARGEST_FEATURE:g} in size (got "
            f"{value!r}); mend or drop such rows, or {LEAVE_OUT}"
        )

    def _text_problem(self) -> str | None:
        """Why text is rather a column of numbers. Whole numbers are text where some begin with a
        zero, as zip codes do."""
        texts, amounts = int(self.forms.sum()), int(self.forms[[NUMERAL, WRITTEN]].sum())
        is_text = CATEGORY in self.kinds or 2 * self.forms[WORDS] > texts
        if is_text or (self.forms[CODE] and not amounts):
            return None
        form = next(f for f in (WRITTEN, WORDS, CODE, NUMERAL, DIGITS) if f in self.first)
        at, word = self.first[form]
        told = f"{self._cell(at)}must be a number (got {shorten(word)})"
        if form == WRITTEN and is_iso_date(word):
            odd = next((w for w in self.words if not is_iso_date(w)), None)
            besides = "some without a zone" if odd is None else shorten(odd)
            return (
                f"data.path: {self.origin.label} column {shorten(self.name)}: holds dates such as "
                f"{shorten(word)}, and {besides}; write all alike, or {LEAVE_OUT}"
            )
        if form == WRITTEN:
            decimal = self.origin.spelling.decimal if self.origin.written else None
            return f"{told}; {remedy(word, decimal)}, or {LEAVE_OUT}"
        if form == WORDS:
            numerals = f"{texts - self.forms[WORDS]:,} of its {texts:,} cells"
            return f"{told}, as {numerals} are; mend such cells, or {LEAVE_OUT}"
        return f"{told}, not text; save it as numbers, or as a column of categories"

    def _words_problem(self, where: str) -> str | None:
        texts, different = int(self.forms.sum()), len(self.words)
        first = shorten(next(iter(self.words)))
        if different > MOST_DIFFERENT:
            return (
                f"{where}: has more than {MOST_DIFFERENT:,} different texts, such as "
                f"{first}: too many for a category; {LEAVE_OUT}"
            )
        if CATEGORY not in self.kinds and different >= max(FEWEST_OF_AN_ID, 0.9 * texts):
            return (
                f"{where}: has {different:,} different texts in {texts:,} rows, such as {first}, "
                f"as a name or an id has, of which nothing can be learnt; {LEAVE_OUT}"
            )
        if different + (self.origin.missing == "mean" and self.holes > 0) < 2:
            return (
                f"{where}: holds {first} in every row, of which nothing can be learnt; {LEAVE_OUT}"
            )
        return None

    def _count_holes(self, missing: np.ndarray) -> None:
        count = int(missing.sum())
        if count and not self.holes:
            self.first_hole = self.rows + int(np.argmax(missing))
        self.holes += count

    def _numbers(self, array: pa.Array) -> np.ndarray:
        values = _plain_numbers(array)
        absent = self.origin.spelling.missing_numbers
        if absent and (missing := np.isin(values, absent)).any():
            values = np.where(missing, np.nan, values)
        whole = not pa.types.is_floating(array.type)
        self.whole = self.whole and whole
        limit = INEXACT if whole else NO_INTEGER
        if not max(-float(values.min()), float(values.max())) < limit:  # or NaN
            self._count_holes(np.isnan(values))
            sizes = np.nan_to_num(np.abs(values.astype(np.float64)), nan=0, posinf=np.inf)
            self.far = self.far or self._first(values, sizes > LARGEST_FEATURE)
            self.long = self.long or self._first(values, sizes >= limit)
        return values

    def _seconds(self, array: pa.Array) -> np.ndarray:
        """Since 1970, float64."""
        if pa.types.is_date(array.type):
            array = array.cast(pa.timestamp("ms"))
        per_s = {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}[array.type.unit]
        values = _plain_numbers(array.cast(pa.int64())).astype(np.float64) / per_s
        self._count_holes(np.isnan(values))
        self.has_times = self.has_times or bool((np.nan_to_num(values) % DAY_S).any())
        return values

    def _first(self, values: np.ndarray, those: np.ndarray) -> tuple[int, float] | None:
        row = int(np.argmax(those))
        return (self.rows + row, float(values[row])) if those[row] else None

    def _codes(self, array: pa.Array, kind: str) -> np.ndarray:
        if pa.types.is_string_view(array.type):
            array = array.cast(pa.string())
        array = array if kind == CATEGORY else array.dictionary_encode()
        texts = array.dictionary.cast(pa.string())
        given = texts.to_pylist()
        words = [(word or "").strip() for word in given]
        nothing = self.origin.spelling.missing_words.intersection(given)
        self.na |= nothing
        empty = [not w or g in nothing for w, g in zip(words, given, strict=True)]
        places = _filled(array.indices.cast(pa.int64()), np.array([-1]))
        places = np.where(np.array([*empty, True])[places], -1, places)  # -1 is the last: missing
        self._count_holes(places < 0)
        counts = np.bincount(places[places >= 0], minlength=len(words))
        forms = self._forms(texts) if kind == TEXT else np.zeros(len(words), dtype=np.int64)
        self.forms += np.bincount(forms, counts, len(FORMS)).astype(np.int64)
        for form in set(forms[counts > 0].tolist()) - set(self.first):
            row = int(np.argmax(np.append(forms == form, False)[places]))
            self.first[form] = (self.rows + row, words[places[row]])
        codes = np.full(len(words) + 1, np.nan)
        for i in np.flatnonzero(counts):
            if self.most is None or len(self.words) <= self.most:
                codes[i] = self.words.setdefault(words[i], len(self.words))
        return codes[places]

    def _forms(self, texts: pa.Array) -> np.ndarray:
        """What each of the texts looks like, see number_formats.py."""
        forms = np.zeros(len(texts), dtype=np.int64)
        for form, pattern in reversed(patterns(self.origin.spelling.decimal).items()):
            found = compute.match_substring_regex(texts, pattern).cast(pa.uint8())
            fits = _filled(found, np.zeros(1, np.uint8)).astype(bool)
            if not fits.any():
                break
            forms[fits] = form
        return forms


def kind_of(kind: pa.DataType) -> str:
    """number, text, category, date or empty; the type's own name for what is of no use."""
    types = pa.types
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return NUMBER
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return TEXT
    if types.is_date(kind) or types.is_timestamp(kind):
        return DATE
    if types.is_dictionary(kind) and kind_of(kind.value_type) in (TEXT, NUMBER):
        return CATEGORY
    return EMPTY if types.is_null(kind) else str(kind)


def refused_type(name: str, kind: str, *, target: str, label: str) -> str:
    """Why a column of a type such as lists and decimals is of no use, and what to do."""
    where = f"data.path: {label} column {name!r}"
    if "binary" in kind:
        return f"{where} holds bytes that are not UTF-8 text; save it as UTF-8"
    if name == target:
        return f"{where} is of type {kind!r}; a target must be numbers, booleans or text"
    if kind.startswith("time"):
        return (
            f"{where} holds times of day; write them with their dates (2026-11-22T18:30:00), or as "
            f"hours, or {LEAVE_OUT}"
        )
    return f"{where} is of type {kind[:60]!r}; turn it into numbers or text, or {LEAVE_OUT}"


def _plain_numbers(array: pa.Array) -> np.ndarray:
    """In their own type; float64 with NaN where some are missing. Booleans are bool."""
    is_boolean = pa.types.is_boolean(array.type)
    array = array.cast(pa.uint8()) if is_boolean else array
    if array.null_count:
        return _filled(array.cast(pa.float64(), safe=False), np.array([np.nan]))
    values = np.from_dlpack(array)
    return values.astype(bool) if is_boolean else values


def _filled(array: pa.Array, missing: np.ndarray) -> np.ndarray:
    """With one value of its own type for what is missing. Arrow's fill_null and to_numpy would
    import pandas."""
    value = pa.Array.from_buffers(array.type, 1, [None, pa.py_buffer(missing)])[0]
    return np.from_dlpack(compute.coalesce(array, value))
