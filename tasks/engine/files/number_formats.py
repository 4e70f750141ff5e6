"""Numbers as people and spreadsheets write them in text: with a decimal comma, thousands, a sign of
money or percent, a typographic minus, as a date; and codes, such as zip codes, whose leading zeros
a number would lose. It tells what a text is and how a number has to be written; the patterns mean
the same to Arrow and to Python.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property

from tasks.engine.models.raw_inputs import find_numbers

FORMS = TEXT, DIGITS, NUMERAL, CODE, WRITTEN = range(
    5
)  # WRITTEN: a number, not as float() takes it

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
    found = {CODE: "0[0-9]+", DIGITS: "[0-9]+", NUMERAL: plain, WRITTEN: f"{_OTHERWISE}|{_DATE}"}
    # Most texts are none of these, as this finds out four times faster than the one before it.
    found[TEXT] = "[^A-Za-z]*(?:[A-Z]{3}[^A-Za-z]*)?[0-9](?s:.*)"
    return {form: rf"^\s*(?:{pattern})\s*$" for form, pattern in found.items()}


def find_form(text: str, decimal: str) -> int:
    """Return which of FORMS a text has."""
    known = make_patterns(decimal).items()
    return next((form for form, pattern in known if re.match(pattern, text, re.ASCII)), TEXT)


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
    """Describe what to do about a number that is written otherwise. decimal: data.decimal;
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
        other = f"set data.decimal to {mark!r}"
        return f"write it as {plain}, or {other} where it is no thousands" if groups else other
    return f"write it as {plain}"
