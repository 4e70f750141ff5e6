"""One column of a block of rows, out of Arrow: numbers as float64 in which NaN stands for a missing
value, text as codes of its different words. It judges nothing: what is no number and no text is
told by the name of its type, and refused where the whole column is known. No path through here
imports pandas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyarrow import compute

from tasks.engine.files.number_formats import CODE, Spelling, patterns

NUMBER, TEXT, CATEGORY, EMPTY = "number", "text", "category", "empty"
AS_IT_IS = Spelling()
IN_CACHE_BYTES = 1 << 16


@dataclass(frozen=True)
class Cells:
    """What one column holds in a block of rows.

    values: of numbers (rows,) float64 with NaN for a missing one, for a target in their own type;
    of text (rows,) indices of `words`, -1 for a missing one.
    """

    kind: str  # number, text, category (text that was declared as such), empty, or another type
    values: np.ndarray
    whole: bool = False  # integers or booleans
    words: tuple[str, ...] = ()  # as they are, stripped; several may be the same word
    forms: np.ndarray | None = None  # what each of the words looks like, see numerals.py
    nothing: tuple[str, ...] = ()  # words that were read as missing

    @property
    def missing(self) -> np.ndarray:
        return self.values < 0 if self.kind in (TEXT, CATEGORY) else np.isnan(self.values)


def kind_of(kind: pa.DataType) -> str:
    """number, text, category or empty; the type's own name for what is of no use."""
    types = pa.types
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        return NUMBER
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return TEXT
    if types.is_dictionary(kind) and kind_of(kind.value_type) in (TEXT, NUMBER):
        return CATEGORY
    return EMPTY if types.is_null(kind) else str(kind)


def cells_of(
    array: pa.Array, into: np.ndarray | None = None, *, spelling: Spelling = AS_IT_IS
) -> Cells:
    """The cells of an Arrow array. into: where numbers are put, (rows,) float64."""
    kind = kind_of(array.type)
    if kind == NUMBER:
        values = numbers(array, spelling)
        if into is not None:
            into[:] = values
            values = into
        return Cells(kind, values, whole=not pa.types.is_floating(array.type))
    if kind in (TEXT, CATEGORY):
        return _words(array, kind, spelling)
    nothing = np.full(len(array), np.nan) if into is None else into
    nothing[:] = np.nan
    return Cells(kind, nothing)


def numbers(array: pa.Array, spelling: Spelling = AS_IT_IS) -> np.ndarray:
    """Numbers in their own type; float64 with NaN where some are missing. Booleans are bool."""
    values = _plain_numbers(array)
    if spelling.missing_numbers:
        missing = np.isin(values, spelling.missing_numbers)
        return np.where(missing, np.nan, values) if missing.any() else values
    return values


def may_hold_codes(lines: bytes) -> bool:
    """Whether some cell may begin with a zero and another digit; sees gigabytes a second."""
    given = np.frombuffer(lines, np.uint8)
    for at in range(0, len(given), IN_CACHE_BYTES):
        part = given[at : at + IN_CACHE_BYTES + 2]
        found = part[1:-1] == ord("0")
        found &= part[:-2] <= ord(",")  # a tab, comma, blank, quote or end of line too
        found &= part[2:] >= ord("0")
        if found.any():
            return True
    return lines[:1] == b"0" and lines[1:2].isdigit()


def holds_codes(texts: pa.Array) -> bool:
    """Whether a text is of digits, the first a zero and not the last."""
    found = compute.match_substring_regex(texts, patterns(".")[CODE])
    return bool(compute.any(found).as_py())


def _plain_numbers(array: pa.Array) -> np.ndarray:
    if array.null_count:
        if pa.types.is_boolean(array.type):
            array = array.cast(pa.uint8())
        return _filled(array.cast(pa.float64(), safe=False), np.nan)
    elif pa.types.is_boolean(array.type):
        return np.from_dlpack(array.cast(pa.uint8())).astype(bool)
    return np.from_dlpack(array)  # Arrow's own to_numpy imports pandas


def _words(array: pa.Array, kind: str, spelling: Spelling) -> Cells:
    if kind == TEXT:
        if pa.types.is_string_view(array.type):
            array = array.cast(pa.string())
        array = array.dictionary_encode()
    texts = array.dictionary.cast(pa.string())
    values = _filled(array.indices.cast(pa.int64()), -1)
    given = texts.to_pylist()
    words = tuple((word or "").strip() for word in given)
    forms = np.zeros(len(words), dtype=np.int64)
    known = reversed(patterns(spelling.decimal).items())
    for form, pattern in known if kind == TEXT else ():
        found = compute.match_substring_regex(texts, pattern)
        fits = _filled(found.cast(pa.uint8()), 0).astype(bool)
        if not fits.any():
            break
        forms[fits] = form
    blank = np.array([not word for word in words], dtype=bool)
    nothing = spelling.missing_words.intersection(given)
    if nothing:
        blank |= np.array([word in nothing for word in given], dtype=bool)
    if blank.any():
        values = np.where((values >= 0) & blank[values], -1, values)
    return Cells(kind, values, words=words, forms=forms, nothing=tuple(sorted(nothing)))


def _filled(array: pa.Array, missing: float) -> np.ndarray:
    """Arrow's own fill_null imports pandas."""
    if not array.null_count:
        return np.from_dlpack(array)
    buffers = [None, array.buffers()[1]]
    whole = pa.Array.from_buffers(array.type, len(array), buffers, offset=array.offset)
    empty = np.from_dlpack(array.is_null().cast(pa.uint8())).astype(bool)
    return np.where(empty, missing, np.from_dlpack(whole))


def refused_types(fields: Sequence[pa.Field], target: str, label: str) -> list[str]:
    """A line for each column of a type that is of no use, such as dates, lists and decimals."""
    found = []
    for field in fields:
        if kind_of(field.type) not in (NUMBER, TEXT, CATEGORY, EMPTY):
            found.append(refused_type(field.name, str(field.type), target=target, label=label))
    return found


def refused_type(name: str, kind: str, *, target: str, label: str) -> str:
    """Why a column of this type is of no use, and what to do."""
    where = f"data.path: {label} column {name!r}"
    if "binary" in kind:
        return f"{where} holds bytes that are not UTF-8 text; save it as UTF-8"
    if name == target:
        return f"{where} is of type {kind!r}; a target must be numbers, booleans or text"
    return (
        f"{where} is of type {kind[:60]!r}; turn it into numbers or text, or leave it out by "
        "data.drop"
    )
