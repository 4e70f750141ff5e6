"""The building blocks of the config's sections: strict types, frozen sections, and names that
are either known here or import paths to a user's own code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict

Int = Annotated[int, Strict()]  # `true` is not 1
Float = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Bool = Annotated[bool, Strict()]  # "yes" is not true
Text = Annotated[str, Strict(), Field(max_length=4096)]


def _check_printable(text: str) -> str:
    if text and (not text.isprintable() or not text.strip()):
        raise ValueError("must be printable text on one line")
    return text


PRINTABLE = AfterValidator(_check_printable)
Name = Annotated[Text, Field(min_length=1, max_length=250), PRINTABLE]

IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def is_import_path(name: str) -> bool:
    """Return whether the name is an import path, package.module:attribute, to a user's own
    code."""
    return ":" in name


def require_known(known: Iterable[str]) -> AfterValidator:
    """Return pydantic's validator of a name that is one of these, or an import path."""

    def check(name: str) -> str:
        if name in known or IMPORT_PATH.fullmatch(name):
            return name
        near = get_close_matches(name[:80].lower(), known, 1)
        raise ValueError(
            f"must be one of {', '.join(known)}, or package.module:attribute for your own "
            f"(got {name[:80]!r})" + (f"; did you mean {near[0]}?" if near else "")
        )

    return AfterValidator(check)


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True
    )
