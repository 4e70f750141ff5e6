"""What the sections of a config are made of: strict types, frozen sections, and names that are
either known here or import paths to code of the user's own.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, Strict

Int = Annotated[int, Strict()]  # `true` is not 1
Float = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Bool = Annotated[bool, Strict()]  # "yes" is not true
Text = Annotated[str, Strict(), Field(max_length=4096)]

IMPORT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def is_import(name: str) -> bool:
    """Whether the name is an import path, package.module:attribute, of code of the user's own."""
    return ":" in name


def known_or_imported(name: str, known: tuple[str, ...]) -> str:
    """The name itself. Raises ValueError where it is neither known nor an import path."""
    if name in known or IMPORT.fullmatch(name):
        return name
    near = get_close_matches(name[:80].lower(), known, 1)
    raise ValueError(
        f"must be one of {', '.join(known)}, or package.module:attribute for your own "
        f"(got {name[:80]!r})" + (f"; did you mean {near[0]}?" if near else "")
    )


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True
    )
