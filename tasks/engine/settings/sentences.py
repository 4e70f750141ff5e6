"""What is wrong with a value, in the words of a person who writes settings: rule, value, remedy.
Where pydantic's own words are as plain they are taken; they speak of inputs and instances else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from tasks.engine.settings.yaml_file import scalar

_KINDS = {
    "number": "a number",
    "whole number": "a whole number",
    "list": "a list of text, such as [a, b]",
    "mapping": "a mapping with names of text, such as {hidden: [64]}",
}


def number(value: float) -> str:
    """A limit as a person writes it: 10,000,000 or 0.5 or 2**63."""
    if isinstance(value, int) and value >= 2**32 and value.bit_count() == 1:
        return f"2**{value.bit_length() - 1}"
    return f"{int(value):,}" if float(value).is_integer() else repr(value)


def shown(value: Any) -> str:
    """The value as it would stand in the file, short enough for a line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print whole numbers of over 4,300 digits
        return "a value too long to print"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text):,} characters)"


def sentence(error: Mapping[str, Any], *, kind: str, limits: str) -> str:
    """One of pydantic's errors about a setting of this kind: "must be above 0 (got -0.1)"."""
    value, about = error["input"], error["type"]
    got = f" (got {shown(value)})"
    if about == "value_error":
        text = str(error["ctx"]["error"])
        return text if "(got" in text else text + got
    if about == "literal_error":
        return f"must be one of {limits}{got}{_did_you_mean(value, limits.split(', '))}"
    if about.startswith(("greater_than", "less_than")):
        lowest, *_, highest = limits.split(", ") * 2
        return f"must be {lowest if about.startswith('greater') else highest}{got}"
    if about.endswith("_type"):
        plain = kind.removesuffix(" or null")
        null = kind.removeprefix(plain)
        return f"must be {_KINDS.get(plain, plain)}{null}{got}{_remedy(plain, value)}"
    if about == "string_unicode":
        return f"must be text of whole characters{got}"
    return error["msg"].replace("Input should", "must").replace("String should", "must") + got


def _did_you_mean(value: Any, words: Sequence[str]) -> str:
    near = get_close_matches(value[:80].lower(), words, 1) if isinstance(value, str) else []
    return f"; did you mean {near[0]}?" if near else ""


def _remedy(kind: str, value: Any) -> str:
    if kind == "text" and isinstance(value, bool | int | float):
        return "; put it in quotes"
    if kind == "whole number" and isinstance(value, float):
        return f"; write {int(value)}" if value.is_integer() and abs(value) < 1e15 else ""
    if isinstance(value, str) and not isinstance(scalar(value), str) and value:
        return "; drop the quotes"
    return ""
