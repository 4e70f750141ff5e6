"""Reads the columns of a table block by block out of Arrow: numbers with NaN for a missing
value, codes for text; decides whether a column is numbers, a category, or unusable, by its row
and cell; and keeps the values in memory up to a limit, beyond it in a file that has no name,
so that nothing is left of it. A text column of which at least half the cells read as numbers
is taken for a column of numbers with something stray in it. No path through here imports
pandas. It refuses a disk that has no room, by the setting data.cache.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import compute

from tasks.engine.files import prepared_cache
from tasks.engine.files.number_formats import (
    CODE,
    DIGITS,
    FORMS,
    NUMERAL,
    WRITTEN,
    Spelling,
    describe_remedy,
    is_iso_date,
    make_patterns,
)
from tasks.engine.files.number_formats import TEXT as WORDS
from tasks.engine.files.scaling import LARGEST_FEATURE
from tasks.engine.files.source_data import shorten
from tasks.engine.models.raw_inputs import DAY_S, compute_date_parts

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
class ColumnSource:
    """Where a column comes from, as error messages name it."""

    label: str  # the file's name
    note: str  # how its rows are counted
    target: str
    missing: str  # data.missing
    spelling: Spelling
    written: Callable[[str, int], str] | None  # what a file of text holds in a column and row


@dataclass
class ColumnSummary:
    """What is known of one column from the blocks read so far. Rows from 0."""

    name: str
    origin: ColumnSource
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
        """Add the next rows and return them: numbers in their own type, codes of text as
        float64; NaN for a missing value."""
        kind, self.type = classify_type(array.type), str(array.type)
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
        """Return number, category, date, empty, mixed (to be read as text once more), or the
        type that is of no use."""
        kinds = self.kinds - {EMPTY}
        if not kinds:
            return EMPTY
        if kinds <= {TEXT, CATEGORY}:
            return CATEGORY
        return MIXED if len(kinds) > 1 else next(iter(kinds))

    def problem(self) -> str | None:
        """Describe why this target can't be learnt, or this feature not learnt from; None
        where it can."""
        is_target, kind = self.name == self.origin.target, self.kind()
        setting = "data.target" if is_target else "data.path"
        where = f"{setting}: {self.origin.label} column {shorten(self.name)}"
        if kind not in OF_USE or (is_target and kind == DATE):
            return describe_refused_type(
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
            return f"{told}; {describe_remedy(word, decimal)}, or {LEAVE_OUT}"
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
        values = _convert_numbers(array)
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
        values = _convert_numbers(array.cast(pa.int64())).astype(np.float64) / per_s
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
        places = _fill_missing(array.indices.cast(pa.int64()), np.array([-1]))
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
        for form, pattern in reversed(make_patterns(self.origin.spelling.decimal).items()):
            found = compute.match_substring_regex(texts, pattern).cast(pa.uint8())
            fits = _fill_missing(found, np.zeros(1, np.uint8)).astype(bool)
            if not fits.any():
                break
            forms[fits] = form
        return forms


def classify_type(kind: pa.DataType) -> str:
    """Return number, text, category, date or empty for an Arrow type; the type's own name for
    one that is of no use."""
    types = pa.types
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return NUMBER
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return TEXT
    if types.is_date(kind) or types.is_timestamp(kind):
        return DATE
    if types.is_dictionary(kind) and classify_type(kind.value_type) in (TEXT, NUMBER):
        return CATEGORY
    return EMPTY if types.is_null(kind) else str(kind)


def describe_refused_type(name: str, kind: str, *, target: str, label: str) -> str:
    """Describe why a column of a type such as lists and decimals is of no use, and what to
    do."""
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


def _convert_numbers(array: pa.Array) -> np.ndarray:
    """In their own type; float64 with NaN where some are missing. Booleans are bool."""
    is_boolean = pa.types.is_boolean(array.type)
    array = array.cast(pa.uint8()) if is_boolean else array
    if array.null_count:
        return _fill_missing(array.cast(pa.float64(), safe=False), np.array([np.nan]))
    values = np.from_dlpack(array)
    return values.astype(bool) if is_boolean else values


def _fill_missing(array: pa.Array, missing: np.ndarray) -> np.ndarray:
    """With one value of its own type for what is missing. Arrow's fill_null and to_numpy would
    import pandas."""
    value = pa.Array.from_buffers(array.type, 1, [None, pa.py_buffer(missing)])[0]
    return np.from_dlpack(compute.coalesce(array, value))


VALUE_BYTES = 8
MOST_CATEGORIES = 1000  # inputs that a column of text becomes


class Spool:
    """Stores blocks of float64 values, each (columns, rows), for rows that follow each
    other."""

    def __init__(self, columns: int, *, folder: Path, kept_bytes: int) -> None:
        self.columns = columns
        self.starts = [0]  # of each block, and the number of rows at the end
        self._folder, self._kept_bytes = folder, kept_bytes
        self._memory: dict[int, np.ndarray] = {}
        self._file: int | None = None

    @property
    def rows(self) -> int:
        return self.starts[-1]

    def __len__(self) -> int:
        """How many blocks there are."""
        return len(self.starts) - 1

    def reserve(self, rows: int, *, block_rows: int) -> None:
        """Make room for so many rows more, in blocks of `block_rows`, to be filled by
        `put`."""
        end = self.rows + rows
        self.starts += [*range(self.rows + block_rows, end, block_rows), end]
        if self._file is None and self._at(end) > self._kept_bytes:
            self._to_file()

    def put(self, column: int, start: int, values: np.ndarray) -> None:
        """Store values of one column, from row `start` on."""
        block = int(np.searchsorted(self.starts, start, side="right")) - 1
        while len(values):
            first, last = self.starts[block], self.starts[block + 1]
            part, values = values[: last - start], values[last - start :]
            if self._file is not None:
                at = self._at(first) + (column * (last - first) + start - first) * VALUE_BYTES
                self._write(at, part.astype(np.float64))
            else:
                if block not in self._memory:
                    self._memory[block] = np.empty((self.columns, last - first))
                self._memory[block][column, start - first : start - first + len(part)] = part
            start, block = last, block + 1

    def block(self, index: int) -> np.ndarray:
        """Return the values of a block, (columns, rows); not to be written to."""
        if self._file is None:
            return self._memory[index]
        values = np.empty((self.columns, self.starts[index + 1] - self.starts[index]))
        with prepared_cache.refuse_unwritable(self._folder):
            if not prepared_cache.fill_from_file(values, self._file, self._at(self.starts[index])):
                raise OSError("it ended early")
        return values

    def _at(self, row: int) -> int:
        return row * self.columns * VALUE_BYTES

    def _to_file(self) -> None:
        prepared_cache.check_disk_room(self._folder, self._at(self.rows))
        with prepared_cache.refuse_unwritable(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115, closed with the spool
        weakref.finalize(self, file.close)
        self._file = file.fileno()
        for index in sorted(self._memory):
            self._write(self._at(self.starts[index]), self._memory.pop(index))

    def _write(self, at: int, values: np.ndarray) -> None:
        assert self._file is not None
        view = values.data.cast("B")
        with prepared_cache.refuse_unwritable(self._folder):
            while len(view):
                wrote = os.pwrite(self._file, view, at)
                view, at = view[wrote:], at + wrote


@dataclass(frozen=True)
class Table:
    """Feature columns by name; a value that is missing is NaN."""

    names: tuple[str, ...]
    words: tuple[tuple[str, ...] | None, ...]  # of a category, by code; None: numbers
    whole: tuple[bool, ...]  # numbers that are integers or booleans
    holes: tuple[int, ...]  # how many values are missing, before rows were left out
    spool: Spool
    missing: str  # fail, drop or mean
    kept: np.ndarray | None = None  # (rows of the file,) booleans; None: all
    dates: tuple[tuple[str, ...], ...] = ()  # by column: the parts of a date, which is seconds here

    @property
    def shape(self) -> tuple[int, int]:
        rows = self.spool.rows if self.kept is None else int(self.kept.sum())
        return rows, len(self.names)

    @property
    def inputs(self) -> int:
        """About how many inputs the columns become."""
        of_words = sum(min(len(w), MOST_CATEGORIES) + 1 for w in self.words if w is not None)
        return of_words + len(self.owners)

    @property
    def owners(self) -> list[int]:
        """Of each number of a row, as `numbers` tells them, the column that it is of."""
        dates = self.dates or ((),) * len(self.words)
        return [
            i
            for i, (words, parts) in enumerate(zip(self.words, dates, strict=True))
            if words is None
            for _ in parts or (i,)
        ]

    def numbers(self, values: np.ndarray) -> np.ndarray:
        """Return, of (columns, rows) values, the numbers and the parts of dates, (numbers,
        rows)."""
        if not any(self.dates):
            return values if self.numeric.all() else values[self.numeric]
        found = [
            compute_date_parts(column, parts) if parts else column[None]
            for column, parts, words in zip(values, self.dates, self.words, strict=True)
            if words is None
        ]
        return np.concatenate(found) if found else values[:0]

    @property
    def numeric(self) -> np.ndarray:
        """Which columns hold numbers or dates, (columns,) booleans."""
        return np.array([words is None for words in self.words], dtype=bool)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        """All rows as float64, codes for categories."""
        blocks = [self.block(i).T for i in range(len(self.spool))]
        return np.ascontiguousarray(np.concatenate(blocks))

    def only(self, kept: np.ndarray) -> Table:
        """Return the same table, of whose rows only those in `kept` count."""
        return replace(self, kept=kept)

    def starts(self) -> list[int]:
        """Return where the blocks begin among the rows that count, and the number of these."""
        if self.kept is None:
            return list(self.spool.starts)
        bounds = self.spool.starts
        counts = [int(self.kept[a:b].sum()) for a, b in pairwise(bounds)]
        return [0, *accumulate(counts)]

    def block(self, index: int) -> np.ndarray:
        """Return the rows that count of a block, (columns, rows) float64; not to be written
        to."""
        values = self.spool.block(index)
        if self.kept is None:
            return values
        first, last = self.spool.starts[index : index + 2]
        return values[:, self.kept[first:last]]

    def whole_rows(self) -> np.ndarray:
        """Return which rows miss nothing, (rows of the file,) booleans."""
        found = np.ones(self.spool.rows, dtype=bool)
        some = [i for i, count in enumerate(self.holes) if count]
        for index in range(len(self.spool)):
            first, last = self.spool.starts[index : index + 2]
            found[first:last] = ~np.isnan(self.spool.block(index)[some]).any(axis=0)
        return found
