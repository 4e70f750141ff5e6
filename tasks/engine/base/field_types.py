"""The building blocks of the config's sections: strict types, frozen sections, and names that
are either known here or import paths to a user's own code.
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

IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def is_import_path(name: str) -> bool:
    """Return whether the name is an import path, package.module:attribute, to a user's own
    code."""
    return ":" in name


def check_known_name(name: str, known: tuple[str, ...]) -> str:
    """Return the name. Raises ValueError where it is neither known nor an import path."""
    if name in known or IMPORT_PATH.fullmatch(name):
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
