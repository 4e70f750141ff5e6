"""How many processes train one model, on which machines. It refuses what is no number or name of
them; whether there are devices for so many is found out later.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, field_validator

from tasks.engine.base.field_types import Float, Int, Section, Text

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_COUNT = re.compile(r"[1-9][0-9]{0,2}|10[01][0-9]|102[0-4]")


class LaunchConfig(Section):
    processes: Text = "1"
    """Processes that train one model together, each on a device of its own and on its share of each
    batch: a number, or auto: one for each GPU here. On a CPU they share its cores."""
    nodes: Text = ""
    """Machines that train one model together, by their names or addresses: host1,host2. The same
    command is given on each of them; launch.processes is then of each. Empty: this one alone."""
    port: Annotated[Int, Field(ge=1, le=65535)] = 29400
    """Where they meet, on the first of them by name."""
    wait_s: Annotated[Float, Field(ge=1, le=10**6)] = 600.0
    """Seconds to wait for all machines, and then for all processes, to come."""
    timeout_s: Annotated[Float, Field(ge=10, le=10**6)] = 600.0
    """Seconds that processes wait for one that does not come to a step, an evaluation or the end.
    Then all begin again from the last checkpoint. It is the time-out of PyTorch's process group:
    nobody but you knows how long one may be busy alone, with a data set or a file."""

    @field_validator("processes", mode="before")
    @classmethod
    def _count(cls, value: Any) -> Any:
        text = str(value) if type(value) is int else value
        if text != "auto" and not (isinstance(text, str) and _COUNT.fullmatch(text)):
            raise ValueError("must be auto, or a whole number from 1 to 1,024")
        return text

    @field_validator("nodes")
    @classmethod
    def _names(cls, text: str) -> str:
        names = [name.strip() for name in text.split(",")] if text else []
        if not all(map(_NAME.fullmatch, names)) or len(names) == 1 or len({*names}) < len(names):
            raise ValueError("must be names of two or more machines, such as host1,host2")
        return ",".join(sorted(names))

    @property
    def machines(self) -> list[str]:
        """Their names, as PyTorch's launcher numbers them."""
        return self.nodes.split(",") if self.nodes else []

    @property
    def count(self) -> int | None:
        """Of processes; None: one for each GPU."""
        return None if self.processes == "auto" else int(self.processes)
