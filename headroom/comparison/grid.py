"""Lists the trainings of a comparison: every combination of the values that were given,
checked before the first begins. It refuses what a training would, all of it at once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headroom.base.secret_names import is_secret
from headroom.base.units import make_printable
from headroom.comparison.search_space import Search
from headroom.process import children
from headroom.process.redaction import redact
from headroom.settings.read_settings import ConfigError, check_imports
from headroom.settings.run_config import RunConfig

MAX_TRAININGS = 1_000  # trainings
DEVICE, SEED = "device.name", "train.seed"
SEEDS = 2**63  # of train.seed
ALL = "all"
_OPENING, _CLOSING, _QUOTES = "[{(", "]})", "\"'"


@dataclass(frozen=True)
class Cell:
    """One training of the grid."""

    number: int  # from 1 on
    settings: dict[str, str]  # those that vary, as they were written
    config: RunConfig
    repeat: int = 1
    refused: str = ""  # why it can't be trained, where a search has drawn it
    folder: Path | None = None  # where it trains; by default in the working one
    title: str = ""  # of its run, where that is not told by what varies
    command: str = ""  # that trains with an account, instead of a training of these settings

    @property
    def device(self) -> str:
        return self.config.device.name

    @property
    def label(self) -> str:
        text = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return make_printable(text or self.config.model.name, limit=200)

    @property
    def turn(self) -> str:
        """Return which repeat it is, in words; empty for the first."""
        return f", repeat {self.repeat}" if self.repeat > 1 else ""

    @property
    def called(self) -> str:
        return self.label + self.turn


@dataclass(frozen=True)
class ComparisonRequest:
    """What a command line asks a comparison for."""

    words: list[str]
    base: RunConfig
    cells: list[Cell]  # none where runs that exist are compared; what a search is checked by
    varied: list[str]
    runs: list[str]
    last: int | None
    filter: str
    dry_run: bool
    debug: bool
    json: bool = False  # for a program
    search: Search | None = None
    is_anew: bool = False  # though the same words would go on with a comparison

    @property
    def count(self) -> int:
        """Return the number of trainings."""
        if self.search is None:
            return len(self.cells)
        return self.search.trials + self.search.repeats


def parse_count(text: str) -> int:
    """Return a number of trainings. Raises argparse.ArgumentTypeError."""
    if not text.isdecimal() or not 1 <= int(text) <= MAX_TRAININGS:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 1,000 (got {text!r})")
    return int(text)


def parse_axes(vary: Sequence[str], devices: str | None) -> dict[str, list[str]]:
    """Return the values of each setting that varies, from `NAME=A,B` and a list of devices.

    Raises ConfigError.
    """
    axes: dict[str, list[str]] = {DEVICE: split_values(devices)} if devices is not None else {}
    problems = []
    for text in vary:
        name, equals, words = text.removeprefix("--").partition("=")
        shown = make_printable(text, limit=80)
        if not equals:
            problems.append(f"--vary {shown}: must be NAME=VALUE,VALUE")
            continue
        if name in axes:
            problems.append(
                f"--vary {shown}: {name} is varied already; give all its values at once"
            )
        elif is_secret(name, words) or redact(words) != words:
            problems.append(f"--vary {name}: is a secret, which no page of a comparison may show")
        elif name.startswith("run."):
            problems.append(f"--vary {shown}: {name} is a name, and makes no other training")
        axes.setdefault(name, split_values(words))
    for name, values in axes.items():
        if not all(values) or len(set(values)) < len(values):
            wrong = "one that is empty" if not all(values) else "one twice"
            problems.append(f"{name}: {wrong} among its values ({', '.join(map(repr, values))})")
    count = 1
    for values in axes.values():
        count *= len(values)
    if count > MAX_TRAININGS:
        problems.append(
            f"--vary: makes {count:,} trainings; at most {MAX_TRAININGS:,} are compared"
        )
    if problems:
        raise ConfigError(*problems)
    return axes


def split_values(text: str, at: str = ",") -> list[str]:
    """Return the values between commas, or another mark, that stand in no brackets and no
    quotes."""
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote or letter in _QUOTES:
            quote = "" if letter == quote else quote or letter
        depth += (letter in _OPENING) - (letter in _CLOSING) if not quote else 0
        if letter == at and depth <= 0 and not quote:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values]


def make_cells(
    combinations: Sequence[Mapping[str, str]],
    *,
    resolve: Callable[[Mapping[str, str]], RunConfig],
    repeats: int = 1,
) -> list[Cell]:
    """Return the trainings in the order in which they run: repeats in turns, every other turn from
    the last to the first, so that a machine that grows slower makes none of them slower.

    The repeats of one have seeds of their own, where the seed does not vary. resolve: returns
    the settings with one combination. Raises ConfigError with every problem of all of them.
    """
    problems: list[str] = []
    made: list[tuple[dict[str, str], RunConfig]] = []
    for settings in combinations:
        try:
            config = resolve(settings)
            check_imports(config)
            made.append((dict(settings), config))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    turns = [(turn, *one) for turn in range(repeats) for one in made[:: -1 if turn % 2 else 1]]
    return [
        Cell(number, settings, config if SEED in settings else shift_seed(config, turn), turn + 1)
        for number, (turn, settings, config) in enumerate(turns, 1)
    ]


def shift_seed(config: RunConfig, turn: int) -> RunConfig:
    """Return the settings with the seed of this turn: scores of one seed show no chance."""
    seed = (config.train.seed + turn) % SEEDS
    return config.model_copy(update={"train": config.train.model_copy(update={"seed": seed})})


class GridCheck:
    """Checks data, devices and models of these trainings, in a process of its own.

    This process takes no memory of a device. What the check prepares, the trainings find
    prepared.
    """

    def __init__(self, grid: Sequence[Cell]) -> None:
        """Without trainings it is only asked for the devices that are here."""
        order = [
            {"label": cell.label, "config": cell.config.model_dump()}
            for cell in grid
            if cell.repeat == 1
        ]
        self._order = json.dumps(order)
        self.tasks: list[str] = []  # of the data of all of them, once it has answered
        self.data: dict[str, str] = {}  # fingerprints, by source
        self._process = children.start_child("headroom.comparison.check", stderr=subprocess.PIPE)

    def answer(self) -> list[str]:
        """Wait for the answer, and return the devices.

        Raises ConfigError with every problem.
        """
        try:
            out, err = self._process.communicate(self._order)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        try:
            answer: dict[str, Any] = json.loads(out.splitlines()[-1])
        except (ValueError, IndexError):
            last = (err.splitlines() or ["it said nothing"])[-1]
            raise ConfigError(f"--vary: could not be checked: {redact(last)}") from None
        if answer["problems"]:
            raise ConfigError(*answer["problems"])
        self.tasks, self.data = answer["tasks"], answer["data"]
        return [*answer["devices"]]
