"""What is wrong with a value, in the words of a person who writes settings: rule, value, remedy.
It knows the kinds of settings and the types of pydantic's errors, and refuses to pass on pydantic's
own wording, which speaks of inputs and instances.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from tasks.engine.settings.yaml_file import scalar

_KINDS = {
    "number": "a number",
    "whole number": "a whole number",
    "text": "text",
    "true or false": "true or false",
    "list": "a list of text, such as [a, b]",
    "mapping": "a mapping with names of text, such as {hidden: [64]}",
}
_LIMITS = {
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "finite_number": "a finite number",
    "string_too_short": "text of {min_length} or more characters",
    "string_too_long": "text of at most {max_length} characters",
    "string_unicode": "text of whole characters",
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


def sentence(error: Mapping[str, Any], *, kind: str, choices: tuple[str, ...]) -> str:
    """One of pydantic's errors about a setting of this kind: "must be above 0 (got -0.1)"."""
    value, context = error["input"], error.get("ctx", {})
    got = f" (got {shown(value)})"
    if error["type"] == "value_error":
        text = str(context["error"])
        return text if "(got" in text else text + got
    if error["type"] == "literal_error":
        return f"must be one of {', '.join(choices)}{got}{_nearest(value, choices)}"
    if error["type"] in _LIMITS:
        limits = {k: number(v) for k, v in context.items() if isinstance(v, int | float)}
        return f"must be {_LIMITS[error['type']].format_map(limits)}{got}"
    plain, _, optional = kind.partition(" or null")
    or_null = " or null" if kind != plain + optional else ""
    return f"must be {_KINDS[plain]}{or_null}{got}{_remedy(plain, value)}"


def _nearest(value: Any, choices: tuple[str, ...]) -> str:
    near = get_close_matches(value[:80].lower(), choices, 1) if isinstance(value, str) else []
    return f"; did you mean {near[0]}?" if near else ""


def _remedy(kind: str, value: Any) -> str:
    if kind == "text" and isinstance(value, bool | int | float):
        return "; put it in quotes"
    if kind == "whole number" and isinstance(value, float):
        return f"; write {int(value)}" if value.is_integer() and abs(value) < 1e15 else ""
    if isinstance(value, str) and not isinstance(scalar(value), str) and value:
        return "; drop the quotes"
    return ""
