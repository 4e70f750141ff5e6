"""The names of a table's columns: which are left out, which is the target, which are learnt from.
It refuses names that are missing, doubled or unprintable, and settings that name what is not there,
all at once; and a first line that holds no names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tasks.engine.files.number_formats import is_number
from tasks.engine.files.source_data import DataError, has_no, listed, pick_target, shorten
from tasks.engine.settings.data_config import DataConfig


@dataclass(frozen=True)
class Chosen:
    """The columns of a table by their place in it."""

    names: tuple[str, ...]  # of all
    features: tuple[int, ...]
    target: int
    notes: tuple[str, ...]

    @property
    def feature_names(self) -> tuple[str, ...]:
        return tuple(self.names[i] for i in self.features)

    @property
    def target_name(self) -> str:
        return self.names[self.target]


def choose(names: Sequence[str], data: DataConfig, label: str) -> Chosen:
    """What data.drop and data.target make of a table's columns.

    Errors: DataError with a line for each name at fault.
    """
    aside = [*data.drop, *([data.split_column] if data.split_column is not None else [])]
    left = [name for name in names if name not in aside]
    unknown = [name for name in data.drop if name not in names]
    problems = [f"data.drop: {label} {has_no(name, names)}" for name in unknown]
    problems += _unfit_split(names, data, label)
    problems += _unfit(names, left, label)
    target = ""
    if data.target is not None and data.target == data.split_column:
        pass  # told already
    elif data.target is not None and data.target in data.drop:
        problems.append(
            f"data.drop: holds {shorten(data.target)}, which is data.target; take it out of one"
        )
    elif not left:
        problems.append(f"data.drop: leaves no column of {label}; keep the target and some others")
    else:
        try:
            target = pick_target(left, data.target, label)
        except DataError as error:
            problems.append(str(error))
            if any(is_number(name) for name in left):
                problems.append(
                    f"data.path: {label} has numbers for names; put the columns' names in line 1"
                )
        if target and len(left) < 2:
            gone = " that is not left out" if data.drop else ""
            problems.append(
                f"data.path: {label} has no column{gone} beside {target!r} to learn from; add "
                "features"
            )
    if problems:
        raise DataError("\n".join(problems))
    places = [i for i, name in enumerate(names) if name in left and name != target]
    notes = [f"left out by data.drop: {listed(data.drop, 12)}"] if data.drop else []
    if data.split_column is not None:
        notes.append(f"split by {shorten(data.split_column)}, which is no feature")
    return Chosen(tuple(names), tuple(places), list(names).index(target), tuple(notes))


def _unfit_split(names: Sequence[str], data: DataConfig, label: str) -> list[str]:
    column = data.split_column
    if column is None:
        return []
    if column == data.target:
        return [f"data.split_column: is {shorten(column)}, the target; name another column"]
    if names.count(column) != 1:
        many = "has more than one" if column in names else has_no(column, names)
        told = f"{many} {shorten(column)}; rename one" if column in names else many
        return [f"data.split_column: {label} {told}"]
    return []


def _unfit(names: Sequence[str], left: Sequence[str], label: str) -> list[str]:
    problems = []
    double = sorted(name for name, times in Counter(left).items() if times > 1 and name)
    if double:
        problems.append(
            f"data.path: {label} has columns of one name: {listed(double)}; rename one, or leave "
            "them out by data.drop"
        )
    if "" in left:
        problems.append(
            f"data.path: {label} column {list(names).index('') + 1} has no name; name it, or leave "
            "it out by data.drop: [''] if it is a saved index (pandas: index=False)"
        )
    odd = [name for name in left if name and not name.isprintable()]
    if odd:
        problems.append(f"data.path: {label} has unprintable names: {listed(odd)}; rename them")
    return problems


def refuse_no_header(names: Sequence[str], label: str) -> None:
    """Raises DataError for a first line that is rather a row: numbers may be names where they rise,
    or are evenly apart, as wavelengths and years are."""
    steps = {b - a for a, b in pairwise(float(name) for name in names if is_number(name))}
    if steps and min(steps) <= 0 and (len(steps) > 1 or 0 in steps):
        raise DataError(
            f"data.path: {label} line 1 looks like a row, not like names ({listed(names, 4)}); "
            "put the columns' names in line 1"
        )
