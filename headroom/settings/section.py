"""What every section of the settings is made of: a frozen model that refuses unknown names, and
the types of its values, none of which is converted.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, Strict

Int = Annotated[int, Strict()]  # `true` is not 1
Float = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Bool = Annotated[bool, Strict()]  # "yes" is not true
Text = Annotated[str, Strict(), Field(max_length=4096)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True
    )
