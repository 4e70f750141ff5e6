"""What a loop or a framework logs becomes metrics of the record: names are made fit, what is a word
becomes a tag, and what is neither a number nor a word is left out. Each is told once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

LETTERS = 250  # of a name, at most
TOLD = 10  # names of which a person hears
_NAME = re.compile(r"[\w.\- /:]{1,250}")  # of a metric or param, as MLflow takes it
_UNFIT = re.compile(r"[^\w.\- /:]+|\.{2,}")
RULE = f"a name has letters, digits, _ . - / : and spaces, at most {LETTERS}"


def check_name(name: str, what: str) -> None:
    """Raise ValueError for the name of a metric or a param that MLflow would refuse."""
    if not is_fit(name):
        raise ValueError(f"{what}: {RULE} (got {name!r})")


def is_fit(name: Any) -> bool:
    """Return whether MLflow takes this name."""
    return (
        isinstance(name, str)
        and _NAME.fullmatch(name) is not None
        and ".." not in name
        and name[0] not in "/ "
    )


class FitNames:
    """Names that were made fit, each always in the same way and no two alike."""

    def __init__(self, what: str, tell: Callable[[str], None]) -> None:
        """what: is named. tell: hears of each name that was changed, once."""
        self._what, self._tell = what, tell
        self._fit: dict[Any, str] = {}
        self._taken: set[str] = set()
        self._warning_count = 0

    def fit(self, name: Any) -> str:
        """Return the name as the record has it."""
        fitting = self._fit.get(name)
        if fitting is None:
            fitting = self._fit[name] = self._choose(name)
            self._taken.add(fitting)
        return fitting

    def tell_once(self, text: str) -> None:
        """Tell this of a name, while a person may still read it."""
        self._warning_count += 1
        if self._warning_count <= TOLD:
            self._tell(f"{self._what}: {text}")

    def _choose(self, name: Any) -> str:
        if is_fit(name):
            return str(name)
        fit = _UNFIT.sub("_", str(name)).strip("_/ ")[: LETTERS - 4] or "unnamed"
        chosen = next(
            one for one in (fit, *(f"{fit}_{n}" for n in range(2, 1000))) if one not in self._taken
        )
        self.tell_once(f"{name!r:.300} is called {chosen} here; {RULE}")
        return chosen


class LoggedValues:
    """What of the values that are logged is a metric. It never waits for a device."""

    def __init__(self, tell: Callable[[str], None], tag: Callable[[str, str], None]) -> None:
        """tell: hears once of each name that was changed or left out. tag: keeps a word."""
        self._names, self._tag = FitNames("log", tell), tag
        self._left: set[str] = set()

    def take(self, metrics: Mapping[Any, Any]) -> dict[str, float | Tensor]:
        """Return the numbers by fit names; on a device copies that the loop cannot change."""
        taken: dict[str, float | Tensor] = {}
        for key, value in metrics.items():
            name = self._names.fit(key)
            if isinstance(value, str):
                self._tag(f"log.{name}", value)
                continue
            number = take_number(value)
            if number is not None:
                taken[name] = number
            elif name not in self._left:
                self._left.add(name)
                self._names.tell_once(f"{name} is no number, and left out (got {_describe(value)})")
        return taken


def take_number(value: Any) -> float | Tensor | None:
    """Return the number, of a tensor on a device a copy; None for what is none."""
    try:
        if not isinstance(value, Tensor):
            return float(value)
        if value.numel() != 1:
            return None
        if value.device.type == "cpu":
            return float(value.item())
        if value.is_meta:
            return None
        value = value.detach()  # each of these costs some microseconds at each step that is logged
        return (value.reshape(()) if value.dim() else value).clone()
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def take_step(step: Any, otherwise: int) -> int:
    """Return the step that metrics are of, where a database can have it."""
    try:
        return number if abs(number := int(step)) < 2**63 else otherwise
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return otherwise


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__
