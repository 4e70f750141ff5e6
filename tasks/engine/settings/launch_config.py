"""How many processes train one model. It refuses what is no number of them; whether there are
devices for so many is found out later.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import field_validator

from tasks.engine.base.field_types import Section, Text

_COUNT = re.compile(r"[1-9][0-9]{0,2}|10[01][0-9]|102[0-4]")


class LaunchConfig(Section):
    processes: Text = "1"
    """Processes that train one model together, each on a device of its own and on its share of each
    batch: a number, or auto: one for each GPU here. On a CPU they share its cores. For several
    machines: docs/many-devices.md."""

    @field_validator("processes", mode="before")
    @classmethod
    def _count(cls, value: Any) -> Any:
        text = str(value) if type(value) is int else value
        if text != "auto" and not (isinstance(text, str) and _COUNT.fullmatch(text)):
            raise ValueError("must be auto, or a whole number from 1 to 1,024")
        return text

    @property
    def count(self) -> int | None:
        """Of processes; None: one for each GPU."""
        return None if self.processes == "auto" else int(self.processes)
