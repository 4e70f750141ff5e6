"""What a search looks through: the ranges and the choices of each setting, by which sampler, how
many trials, and which metric is the goal. It refuses what no search could be made of. search.py
draws the trials from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product

from headroom.base.names import Place, list_best_metrics, list_shown
from headroom.base.units import make_printable
from headroom.comparison.run_groups import Goal
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig
from headroom.settings.table import find_kind

SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("median", "none")
TRIALS = 20  # where no number is asked for; of a grid all
LOG_FROM = 100  # times the low end, from which on a range is searched by its powers of ten
DIGITS = 4  # of a number that is drawn: a command that a person can read
_WHOLE = re.compile(r"[+-]?\d+")


@dataclass(frozen=True)
class Range:
    """Every number from the low end to the high one."""

    ends: tuple[str, str]  # as they were written
    is_whole: bool

    @property
    def low(self) -> float:
        return float(self.ends[0])

    @property
    def high(self) -> float:
        return float(self.ends[1])

    @property
    def is_log(self) -> bool:
        return self.low > 0 and self.high >= LOG_FROM * self.low

    @property
    def description(self) -> str:
        return "..".join(self.ends) + ", by powers of ten" * self.is_log

    def format_value(self, value: float) -> str:
        """Return the number as a setting, with few digits where that stays in the range."""
        if self.is_whole:
            return str(int(value))
        short = f"{value:.{DIGITS}g}"
        return short if self.low <= float(short) <= self.high else repr(value)


Axes = Mapping[str, Range | Sequence[str]]


@dataclass(frozen=True)
class Search:
    """What is searched, and how."""

    how: str  # one of SAMPLERS
    trials: int
    pruner: str  # one of PRUNERS
    goal: str  # as asked for; empty: what the task is judged by
    axes: Axes
    devices: list[str]  # as asked for; none: that of the settings
    words: list[str]  # the flags of all trials
    resolve: Callable[[Mapping[str, str]], RunConfig]  # the settings of a trial
    repeats: int = 0  # of the best trial, with other seeds, when all have ended

    @property
    def combinations(self) -> list[dict[str, str]]:
        return make_combinations({n: v for n, v in self.axes.items() if not isinstance(v, Range)})


def make_combinations(axes: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Return every combination of the values, as settings."""
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def parse_range(values: Sequence[str], name: str = "") -> Range | None:
    """Return LOW..HIGH of this setting as a range; None where the values are a list of choices.

    Raises ConfigError where LOW is not below HIGH.
    """
    ends = values[0].split("..") if len(values) == 1 else []
    try:
        numbers = [float(end) for end in ends]
    except ValueError:
        return None
    if len(numbers) != 2 or not all(map(math.isfinite, numbers)):
        return None
    kind = find_kind(name)
    is_whole = all(_WHOLE.fullmatch(end.strip()) for end in ends)
    if kind.startswith("integer"):
        is_whole = all(number.is_integer() for number in numbers)
        ends = [str(int(number)) for number in numbers] if is_whole else ends
    axis_range = Range((ends[0], ends[1]), is_whole and not kind.startswith("number"))
    if axis_range.low >= axis_range.high:
        raise ConfigError(f"{name}: must be LOW..HIGH with LOW below HIGH (got {values[0][:80]!r})")
    return axis_range


def parse_ranges(texts: Mapping[str, Sequence[str]], *, how: str) -> Axes:
    """Return the ranges and choices.

    Raises ConfigError where the sampler can't draw from them.
    """
    axes: dict[str, Range | Sequence[str]] = {}
    problems: list[str] = []
    for name, values in texts.items():
        try:
            axes[name] = parse_range(values, name) or values
        except ConfigError as error:
            problems += error.problems
    if how not in ("tpe", "random"):
        asks = "a grid needs a list of values" if how else "a range is for --search tpe or random"
        problems += [
            f"--vary {name}={'..'.join(values.ends)}: {asks}"
            for name, values in axes.items()
            if isinstance(values, Range)
        ]
    if problems:
        raise ConfigError(*problems)
    return axes


def make_probes(search: Search) -> list[dict[str, str]]:
    """Return the settings by which a search is checked before it begins.

    Every end and every choice, and every device, with the others at their first values; or,
    where that is refused, at their last.
    """
    values = {n: v.ends if isinstance(v, Range) else v for n, v in search.axes.items()}
    first = {name: of[0] for name, of in values.items()}
    last = {name: of[-1] for name, of in values.items()}
    probes = []
    for name, value in [(name, value) for name, of in values.items() for value in of]:
        probe = {**first, name: value}
        try:
            search.resolve(probe)
        except ConfigError:
            probe = {**last, name: value}
        probes.append(probe)
    probes += [{**first, "device.name": device} for device in search.devices]
    return [one for at, one in enumerate(probes) if one not in probes[:at]]


def is_optuna_here() -> bool:
    """Return whether Optuna is installed."""
    return find_spec("optuna") is not None


def find_goal(word: str, tasks: Sequence[str], own: Sequence[str]) -> Goal:
    """Return the metric that is optimized, of those that these tasks measure.

    own: names of the user's. Raises ConfigError.
    """
    direction, colon, name = word.rpartition(":")
    lists = [list_best_metrics(task) or ["val/loss"] for task in tasks] or [["val/loss"]]
    shared = [metric for metric in lists[0] if all(metric in figures for figures in lists)]
    mine = [f"val/{metric}" for metric in own]
    if not word:
        scores = list_shown(Place.GOAL)
        return find_goal(next(score for score in scores if score in shared), tasks, own)
    if (colon and direction not in ("min", "max")) or name not in (*shared, *mine):
        choices = ", ".join(shared + mine)
        raise ConfigError(f"--goal {make_printable(word, limit=80)}: must be one of {choices}")
    if name in mine and name not in shared and not colon:
        raise ConfigError(f"--goal {name}: is your own; say min:{name} or max:{name}")
    return Goal.parse(word)
