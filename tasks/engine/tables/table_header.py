"""The names of a table's columns: read from the first line of a text; which are left out, which is
the target, which are learnt from. It refuses names that are missing, doubled or unprintable, and
settings that name what is not there, all at once, and a first line that holds no names.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tasks.engine.files.number_formats import is_number
from tasks.engine.files.source_data import DataError, has_no, listed, pick_target, shorten
from tasks.engine.settings.data_config import DataConfig
from tasks.engine.tables.csv_blocks import LONGEST_BYTES, not_utf8

HEAD_ROWS, HEAD_BYTES = 50, 1 << 16  # held against the names
MARKS = {"csv": (",", "commas"), "tsv": ("\t", "tabs")}


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
    dropped = set(data.drop)
    places = [i for i, name in enumerate(names) if name not in dropped]
    left = [names[i] for i in places]
    problems = [*_unknown(names, data.drop, label), *_unfit(names, left, label)]
    target = ""
    if data.target is not None and data.target in dropped:
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
            gone = " that is not left out" if dropped else ""
            problems.append(
                f"data.path: {label} has no column{gone} beside {target!r} to learn from; add "
                "features"
            )
    if problems:
        raise DataError("\n".join(problems))
    at = next(i for i in places if names[i] == target)
    notes = (f"left out by data.drop: {listed(data.drop, 12)}",) if dropped else ()
    return Chosen(tuple(names), tuple(i for i in places if i != at), at, notes)


def _unknown(names: Sequence[str], dropped: Sequence[str], label: str) -> list[str]:
    problems = []
    for name in dropped:
        if name not in names:
            problems.append(f"data.drop: {label} {has_no(name, names)}")
    return problems


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


def header(path: Path, source: str) -> tuple[list[str], int]:
    """The same as `first_line`. Raises DataError also for what is rather a row than names."""
    names, start = first_line(path, source)
    _refuse_other_marks(names, source, path.name)
    if _looks_headless(names, _first_rows(path, start, MARKS[source][0])):
        raise DataError(
            f"data.path: {path.name} line 1 looks like a row, not like names ({listed(names, 4)}); "
            "put the columns' names in line 1"
        )
    return names, start


def first_line(path: Path, source: str) -> tuple[list[str], int]:
    """The names in the first line, and where the rows begin, in bytes."""
    with open(path, "rb") as file:
        whole = file.read(LONGEST_BYTES)
    head = whole.removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n")
    line = head.split(b"\n", 1)[0].split(b"\r", 1)[0]
    if head[:4096].count(0) > len(head[:4096]) // 8:
        raise DataError(
            f"data.path: {path.name} looks like UTF-16 or binary (it holds NUL bytes); "
            "save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"
        )
    try:
        text = line.decode("utf-8")
        cells = next(csv.reader(io.StringIO(text), delimiter=MARKS[source][0]), [])
    except UnicodeDecodeError as error:
        raise DataError(not_utf8(path.name, 1, error)) from None
    except csv.Error as error:
        raise DataError(f"data.path: {path.name} line 1 is no header ({error}); mend it") from None
    if text.count('"') % 2:
        raise DataError(f"data.path: {path.name} has a header with unbalanced quotes; mend line 1")
    return [cell.strip() for cell in cells], len(whole) - len(head) + len(line)


def _first_rows(path: Path, start: int, mark: str) -> list[list[str]]:
    with open(path, "rb") as file:
        file.seek(start)
        text = io.StringIO(file.read(HEAD_BYTES).decode("utf-8", "replace"))
    with suppress(csv.Error):
        return list(islice(csv.reader(text, delimiter=mark), HEAD_ROWS))
    return []


def _refuse_other_marks(names: list[str], source: str, label: str) -> None:
    others = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
    mine, words = MARKS[source]
    for mark, found in others.items():
        if len(names) == 1 and mark != mine and mark in names[0]:
            known = next((kind for kind, (other, _) in MARKS.items() if other == mark), None)
            remedy = f"set data.source to {known}" if known else f"separate its cells by {words}"
            raise DataError(
                f"data.path: {label} is separated by {found} ({shorten(names[0])}); {remedy}"
            )


def _looks_headless(names: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Whether a first line is rather a row of the table than its columns' names, by some rows below
    it. Names such as 0, 1, 2 or 2019, 2020, 2021 are names."""
    numerals = [float(name) for name in names if is_number(name)]
    steps = [b - a for a, b in zip(numerals, numerals[1:], strict=False)]
    below = [row for row in rows if len(row) == len(names) and list(row) != list(names)]
    columns = [{cell.strip() for cell in column} for column in zip(*below, strict=True)]
    if len(numerals) == len(names):
        one_step = set(steps) == {1.0} if len(names) < 3 else len(set(steps)) == 1
        return not (one_step and steps[0] and all(n.is_integer() for n in numerals))
    alike = [
        all(is_number(cell) for cell in cells if cell) if is_number(name) else name in cells
        for name, cells in zip(names, columns, strict=False)
    ]
    in_order = all(step > 0 for step in steps) or len(set(steps)) == 1
    few = 2 * len(numerals) < len(names)
    return bool(alike) and (all(alike) or not (in_order or few or not numerals))
