"""Reads the columns of a table, block by block out of Arrow: what a column is (numbers, dates, a
category, or of no use, by its row and cell), its values as numbers with NaN for a missing one, and
codes for text. Numbers in text are told as people and spreadsheets write them: with a decimal
comma, thousands, a sign of money or percent; codes, such as zip codes, keep their zeros. Nothing
here imports pandas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, cached_property

import numpy as np
import pyarrow as pa
from pyarrow import compute

from headroom.base.raw_inputs import (
    DATE_PARTS,
    DAY_S,
    LARGEST,
    TIME_PARTS,
    find_numbers,
)
from headroom.data.source_data import shorten

# WRITTEN: a number, not as float() takes it
FORMS = TEXT_TYPE, DIGITS, NUMERAL, CODE, WRITTEN = range(5)

_SIGN = "[+\u2212-]?"
_GAP = "[ \xa0\u2009\u202f]"
_MONEY = "(?:[$\xa2\xa3\xa5\u20a9\u20ac\u20b9\u20bd\u20bf]|USD|EUR|GBP|CHF|JPY)"
_AMOUNT = (
    "(?:[0-9]{1,3}(?:[,.'\u2019_ \xa0\u2009\u202f][0-9]{3})+(?:[.,][0-9]+)?"
    "|[0-9]+(?:[.,][0-9]*)?|[.,][0-9]+)(?:[eE][+-]?[0-9]+)?"
)
_DATE = (
    "(?:[0-9]{1,2}[/.-][0-9]{1,2}[/.-][0-9]{4}|[0-9]{4}[/.-][0-9]{1,2}[/.-][0-9]{1,2}"
    "|[0-9]{1,2}/[0-9]{1,2}/[0-9]{2})(?:[ T][0-9]{1,2}:[0-9]{2}.*)?"
)
CLOCK = re.compile("[0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]+)?)?")  # a time of day
_OTHERWISE = f"{_SIGN}{_MONEY}?{_GAP}?{_SIGN}{_AMOUNT}{_GAP}?(?:%|{_MONEY})?"


@dataclass(frozen=True)
class Spelling:
    """How the cells of a table are written."""

    decimal: str = "."
    na: tuple[str, ...] = ()  # beside the empty cell, what means missing

    @cached_property
    def missing_words(self) -> frozenset[str]:
        return frozenset(self.na) - {""}

    @cached_property
    def missing_numbers(self) -> list[float]:
        return find_numbers(self.na)


@cache
def make_patterns(decimal: str) -> dict[int, str]:
    """Return the pattern of each form a text may have; each pattern takes what the ones before
    it take, and the first that fits counts."""
    # What Python's float() takes, infinities left out.
    plain = rf"[+-]?([0-9]+([{decimal}][0-9]*)?|[{decimal}][0-9]+)([eE][+-]?[0-9]+)?"
    patterns = {CODE: "0[0-9]+", DIGITS: "[0-9]+", NUMERAL: plain, WRITTEN: f"{_OTHERWISE}|{_DATE}"}
    # Most texts are none of these, as this finds out four times faster than the one before it.
    patterns[TEXT_TYPE] = "[^A-Za-z]*(?:[A-Z]{3}[^A-Za-z]*)?[0-9](?s:.*)"
    return {form: rf"^\s*(?:{pattern})\s*$" for form, pattern in patterns.items()}


def find_form(text: str, decimal: str) -> int:
    """Return which of FORMS a text has."""
    patterns = make_patterns(decimal).items()
    return next(
        (form for form, pattern in patterns if re.match(pattern, text, re.ASCII)), TEXT_TYPE
    )


def is_number(text: str) -> bool:
    """Return whether float() accepts the text, NaN left out."""
    try:
        return float(text) == float(text)
    except ValueError:
        return False


def is_iso_date(text: str) -> bool:
    """Return whether the text is a date, or a date and a time, as ISO 8601 writes them."""
    try:
        datetime.fromisoformat(text.strip())
    except ValueError:
        return False
    return "-" in text


def describe_remedy(word: str, decimal: str | None) -> str:
    """Describe what to do about a number that is written otherwise. decimal: data.args.decimal;
    None where it has no meaning."""
    if re.match(rf"\s*{_DATE}\s*$", word, re.ASCII):
        return "write dates as 2026-11-22, with a time as 2026-11-22T18:30:00"
    text = word.strip().replace("\u2212", "-")
    bare = re.sub(f"{_MONEY}|[^0-9eE.,+-]", "", text)
    at = max(bare.rfind("."), bare.rfind(","))
    mark = bare[at] if at >= 0 else ""
    groups = re.fullmatch("[+-]?[1-9][0-9]{0,2}([.,][0-9]{3})", bare)
    if mark and (bare.count(mark) > 1 or (groups and mark != (decimal or "."))):
        at = len(bare)
    whole, fraction = re.sub("[.,]", "", bare[:at] if mark else bare), bare[at + 1 :]
    plain = whole + (f"{decimal or '.'}{fraction}" if mark and fraction else "")
    if decimal is None:
        return f"save it as numbers, such as {plain}"
    if mark and mark != decimal and bare == text and sum(map(bare.count, ".,")) == 1:
        other = f"set data.args.decimal to {mark!r}"
        return f"write it as {plain}, or {other} where it is no thousands" if groups else other
    return f"write it as {plain}"


NUMBER, TEXT, CATEGORY, EMPTY, DATE = "number", "text", "category", "empty", "date"
OF_USE = (NUMBER, CATEGORY, DATE, EMPTY, TEXT)
# What cells of text may be, the narrowest first.
DATES = (pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.timestamp("ns"))
WAYS = (pa.int64(), pa.float64(), pa.bool_(), *DATES)
MOST_DIFFERENT = 100_000  # texts of one column; more are an id, a name or free text
FILL = "fill it in, or set data.args.missing to drop or mean"
LEAVE_OUT = "leave the column out by data.args.drop"
FEWEST_OF_AN_ID = 20  # texts, of which nearly each is there once
INEXACT = 2.0**53  # from here on float64 loses digits of whole numbers
NO_INTEGER = 2.0**63  # from here on Arrow takes a CSV's whole numbers for fractions


def trim_cells(cells: pa.Array, spelling: Spelling) -> pa.Array:
    """Return cells of text without white space about them; null where one is missing."""
    cells = compute.utf8_trim_whitespace(cells)
    missing = compute.is_in(cells, value_set=_make_texts(("", *spelling.na)))
    return compute.if_else(missing, pa.nulls(len(cells), cells.type), cells)


@cache
def _make_texts(words: tuple[str, ...]) -> pa.Array:
    """As pa.array would, which imports pandas."""
    encoded = [word.encode() for word in words]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.Array.from_buffers(
        pa.string(), len(encoded), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    )


def parse_cells(cells: pa.Array, kind: pa.DataType, spelling: Spelling) -> pa.Array:
    """Return cells of text as values of a type, null where one is missing.

    Raises pa.ArrowInvalid where one is no such value.
    """
    with suppress(pa.ArrowInvalid):  # most blocks miss nothing, and comparing takes its time
        return _cast_cells(cells, kind, spelling.decimal)
    return _cast_cells(trim_cells(cells, spelling), kind, spelling.decimal)


def _cast_cells(cells: pa.Array, kind: pa.DataType, decimal: str) -> pa.Array:
    if decimal != "." and pa.types.is_floating(kind):
        cells = compute.replace_substring(cells, ".", "_")  # no mark of a fraction here
        cells = compute.replace_substring(cells, decimal, ".")
    return cells.cast(kind)


def find_stray_cell(cells: pa.Array, kinds: Sequence[pa.DataType], spelling: Spelling) -> int:
    """Return the first cell of text that is of none of these types, or the number of cells."""

    def is_stray(row: int) -> bool:
        for kind in kinds:
            with suppress(pa.ArrowInvalid):
                return parse_cells(cells.slice(row, 1), kind, spelling) is None
        return True

    return next((row for row in range(len(cells)) if is_stray(row)), len(cells))


def _hold_codes(cells: pa.Array) -> bool:
    matches = compute.match_substring_regex(cells, make_patterns(".")[CODE])
    return bool(compute.any(matches).as_py())


@dataclass(frozen=True)
class LearntColumn:
    """A column of features."""

    name: str
    words: tuple[str, ...] | None = None  # of a category, by code; None: numbers
    parts: tuple[str, ...] = ()  # of a date, which is seconds since 1970
    whole: bool = False  # numbers that are integers or booleans
    holes: int = 0  # how many values are missing, before rows were left out


@dataclass(frozen=True)
class ColumnSource:
    """Where a column comes from, as error messages name it."""

    label: str  # the file's name
    note: str  # how its rows are counted
    target: str
    missing: str  # data.args.missing
    spelling: Spelling
    written: Callable[[str, int], str] | None  # what a file of text holds in a column and row
    decimal: str | None  # data.args.decimal; None where it has no meaning


@dataclass
class ColumnSummary:
    """What is known of one column from the blocks read so far. Rows from 0."""

    name: str
    origin: ColumnSource
    type: pa.DataType  # as it is stored
    most: int | None = MOST_DIFFERENT  # different texts that are still told apart
    ways: tuple[pa.DataType, ...] = ()  # that cells of text may still be read as
    is_stale: bool = False  # a block is not what those before it were read as: all are read anew
    whole: bool = True  # all numbers were integers or booleans
    has_times: bool = False  # some date has a time of day
    rows: int = 0
    holes: int = 0
    first_hole: int = 0
    far: tuple[int, float] | None = None  # the first number that is too large
    long: tuple[int, float] | None = None  # the first that may be whole, and loses digits
    words: dict[str, int] = field(default_factory=dict)  # codes of the different texts
    forms: np.ndarray = field(default_factory=lambda: np.zeros(len(FORMS), dtype=np.int64))
    first: dict[int, tuple[int, str]] = field(default_factory=dict)  # the first text of each form
    na: set[str] = field(default_factory=set)  # words that were read as missing

    def add(self, array: pa.Array) -> np.ndarray | None:
        """Add the next rows and return them: numbers in their own type, dates in seconds since
        1970, codes of text; NaN for a missing value. None where all rows are to be read anew."""
        if self.ways:
            array = self._parse(array)
        if self.is_stale:
            return None
        kind = self.kind
        if kind in (TEXT, CATEGORY):
            values = self._add_texts(array)
        elif kind == DATE:
            values = _read_seconds(array)
            self._count_holes(np.isnan(values))
            self.has_times = self.has_times or bool((np.nan_to_num(values) % DAY_S).any())
        elif kind == NUMBER:
            values = self._add_numbers(array)
        else:
            values = np.full(len(array), np.nan)
            self._count_holes(np.isnan(values))
        self.rows += len(array)
        return values

    def start_anew(self) -> ColumnSummary:
        """Return the summary of no rows yet, with what is known of their type."""
        return ColumnSummary(self.name, self.origin, self.type, self.most, self.ways)

    @property
    def read_as(self) -> pa.DataType:
        return self.ways[0] if self.ways else self.type

    @property
    def kind(self) -> str:
        """Return number, text, category, date or empty; or the type that is of no use."""
        return classify_type(self.read_as)

    def learnt(self) -> LearntColumn:
        """Return the column as it is to be read."""
        kind, parts = self.kind, DATE_PARTS + (TIME_PARTS if self.has_times else ())
        return LearntColumn(
            self.name,
            words=tuple(self.words) if kind in (TEXT, CATEGORY) else None,
            parts=parts if kind == DATE else (),
            whole=kind == NUMBER and self.whole,
            holes=self.holes,
        )

    def _parse(self, cells: pa.Array) -> pa.Array:
        """The cells as values of the first type that they and all before them have."""
        while self.ways:
            with suppress(pa.ArrowInvalid):
                parsed = parse_cells(cells, self.read_as, self.origin.spelling)
                if not (pa.types.is_integer(parsed.type) and _hold_codes(cells)):
                    return parsed
                self.ways = self.ways[:1]  # zeros before them are a part of them, as in 007
            self.ways = self.ways[1:]
            self.is_stale = self.rows > 0
        return cells

    def problem(self) -> str | None:
        """Describe why this target can't be learnt, or this feature not learnt from; None
        where it can."""
        is_target, kind = self.name == self.origin.target, self.kind
        if self.origin.written and self.words and all(map(CLOCK.fullmatch, self.words)):
            kind = "time of day"
        setting = "data.target" if is_target else "data.path"
        where = f"{setting}: {self.origin.label} column {shorten(self.name)}"
        if kind not in OF_USE or (is_target and kind == DATE):
            return describe_refused_type(
                self.name, kind, target=self.origin.target, label=self.origin.label
            )
        if self.holes == self.rows:
            mend = "choose another target" if is_target else LEAVE_OUT
            return f"{where}: holds no value in any row; {mend}"
        problem = None
        if not is_target and kind in (TEXT, CATEGORY):
            problem = self._text_problem() or self._words_problem(where)
        elif not is_target:
            problem = self._far_problem()
        if problem is None and self.holes and (is_target or self.origin.missing == "fail"):
            problem = self._missing(setting, "fill it in or drop the rows" if is_target else FILL)
        return problem

    def _cell(self, row: int, setting: str = "data.path") -> str:
        place = f"{self.origin.label} row {row + 1}{self.origin.note}"
        return f"{setting}: {place}, column {shorten(self.name)}: "

    def _missing(self, setting: str, mend: str) -> str:
        sentence = f"{self._cell(self.first_hole, setting)}is missing (as in {self.holes:,} rows)"
        word = self.origin.written(self.name, self.first_hole) if self.origin.written else ""
        if not word:
            return f"{sentence}; {mend}"
        sentence = f"{sentence}, as {shorten(word)} is read"
        return f"{sentence}; {mend}, or list the words that mean missing in data.args.na"

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
            f"{self._cell(at)}must be a number of at most {LARGEST:g} in size (got "
            f"{value!r}); mend or drop such rows, or {LEAVE_OUT}"
        )

    def _text_problem(self) -> str | None:
        """Why text is rather a column of numbers. Whole numbers are text where some begin with a
        zero, as zip codes do."""
        texts, amounts = int(self.forms.sum()), int(self.forms[[NUMERAL, WRITTEN]].sum())
        is_text = self.kind == CATEGORY or 2 * self.forms[TEXT_TYPE] > texts
        if is_text or (self.forms[CODE] and not amounts):
            return None
        form = next(f for f in (WRITTEN, TEXT_TYPE, CODE, NUMERAL, DIGITS) if f in self.first)
        at, word = self.first[form]
        sentence = f"{self._cell(at)}must be a number (got {shorten(word)})"
        if form == WRITTEN and is_iso_date(word):
            odd = next((w for w in self.words if not is_iso_date(w)), None)
            besides = "some without a zone" if odd is None else shorten(odd)
            return (
                f"data.path: {self.origin.label} column {shorten(self.name)}: holds dates such as "
                f"{shorten(word)}, and {besides}; write all alike, or {LEAVE_OUT}"
            )
        if form == WRITTEN:
            return f"{sentence}; {describe_remedy(word, self.origin.decimal)}, or {LEAVE_OUT}"
        if form == TEXT_TYPE:
            numerals = f"{texts - self.forms[TEXT_TYPE]:,} of its {texts:,} cells"
            return f"{sentence}, as {numerals} are; mend such cells, or {LEAVE_OUT}"
        return f"{sentence}, not text; save it as numbers, or as a column of categories"

    def _words_problem(self, where: str) -> str | None:
        texts, different = int(self.forms.sum()), len(self.words)
        first = shorten(next(iter(self.words)))
        if different > MOST_DIFFERENT:
            return (
                f"{where}: has more than {MOST_DIFFERENT:,} different texts, such as "
                f"{first}: too many for a category; {LEAVE_OUT}"
            )
        if self.kind == TEXT and different >= max(FEWEST_OF_AN_ID, 0.9 * texts):
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

    def _add_numbers(self, array: pa.Array) -> np.ndarray:
        values, whole = _read_numbers(array), not pa.types.is_floating(array.type)
        absent = self.origin.spelling.missing_numbers
        if absent and (missing := np.isin(values, absent)).any():
            values = np.where(missing, np.nan, values)
        self.whole = self.whole and whole
        limit = INEXACT if whole else NO_INTEGER
        if not max(-float(values.min()), float(values.max())) < limit:  # or NaN
            self._count_holes(np.isnan(values))
            sizes = np.nan_to_num(np.abs(values.astype(np.float64)), nan=0, posinf=np.inf)
            self.far = self.far or self._first(values, sizes > LARGEST)
            self.long = self.long or self._first(values, sizes >= limit)
        return values

    def _first(self, values: np.ndarray, those: np.ndarray) -> tuple[int, float] | None:
        row = int(np.argmax(those))
        return (self.rows + row, float(values[row])) if those[row] else None

    def _add_texts(self, array: pa.Array) -> np.ndarray:
        if pa.types.is_string_view(array.type):
            array = array.cast(pa.string())
        coded = array if self.kind == CATEGORY else array.dictionary_encode()
        texts = coded.dictionary.cast(pa.string())
        words = [(word or "").strip() for word in texts.to_pylist()]
        nothing = self.origin.spelling.missing_words.intersection(words)
        self.na |= nothing
        empty = [not word or word in nothing for word in words]
        places = _fill_missing(coded.indices.cast(pa.int64()), np.array([-1]))
        places = np.where(np.array([*empty, True])[places], -1, places)  # -1 is the last: missing
        self._count_holes(places < 0)
        counts = np.bincount(places[places >= 0], minlength=len(words))
        is_plain = self.kind == TEXT
        forms = self._forms(texts) if is_plain else np.zeros(len(words), dtype=np.int64)
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
        """What each of the texts looks like, see FORMS."""
        forms = np.zeros(len(texts), dtype=np.int64)
        for form, pattern in reversed(make_patterns(self.origin.spelling.decimal).items()):
            matches = compute.match_substring_regex(texts, pattern).cast(pa.uint8())
            fits = _fill_missing(matches, np.zeros(1, np.uint8)).astype(bool)
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
    """Describe why a column of a type such as lists and decimals is of no use, and what to do."""
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


def _read_numbers(array: pa.Array) -> np.ndarray:
    """In their own type; float64 with NaN where some are missing. Booleans are bool."""
    is_boolean = pa.types.is_boolean(array.type)
    array = array.cast(pa.uint8()) if is_boolean else array
    if array.null_count:
        return _fill_missing(array.cast(pa.float64(), safe=False), np.array([np.nan]))
    values = np.from_dlpack(array)
    return values.astype(bool) if is_boolean else values


def _read_seconds(array: pa.Array) -> np.ndarray:
    """Since 1970, float64."""
    if pa.types.is_date(array.type):
        array = array.cast(pa.timestamp("ms"))
    per_s = {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}[array.type.unit]
    return _read_numbers(array.cast(pa.int64())).astype(np.float64) / per_s


def _fill_missing(array: pa.Array, missing: np.ndarray) -> np.ndarray:
    """With one value of its own type for what is missing. Arrow's fill_null and to_numpy would
    import pandas."""
    value = pa.Array.from_buffers(array.type, 1, [None, pa.py_buffer(missing)])[0]
    return np.from_dlpack(compute.coalesce(array, value))
