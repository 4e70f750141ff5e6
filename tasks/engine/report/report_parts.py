"""The parts a report is made of, and how measured numbers become its phrases and bars. It refuses
to invent: a metric that is not there makes no phrase, and a part without a whole has no share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tasks.engine.base.units import mebibytes, milliseconds, number, seconds

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Bar:
    """One measured part: its name, its size in words, its share of the whole if known, and how
    long to draw it: 1 for the largest of its block."""

    label: str
    value: str
    share: float | None
    length: float


@dataclass(frozen=True)
class Block:
    """Parts of one whole, drawn as bars under a title."""

    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Grid:
    """A table of words, the first column of them names."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """One subject of the report: `ok` is its verdict, None where there is none to give."""

    title: str
    lines: tuple[str, ...]
    blocks: tuple[Block, ...] = ()
    ok: bool | None = None
    grids: tuple[Grid, ...] = ()  # on pages: a terminal has no room for them


@dataclass(frozen=True)
class Report:
    """Everything a report says. `headline` holds the key metric, the total time, the device."""

    name: str
    status: str
    headline: tuple[str, ...]
    error: str | None
    sections: tuple[Section, ...]


def joined(parts: Iterable[str]) -> tuple[str, ...]:
    """The parts that are there, as one line; no line where there are none."""
    line = ", ".join(part for part in parts if part)
    return (line,) if line else ()


def said(metrics: Numbers, *wanted: tuple[str, str]) -> list[str]:
    """The sentences `(key, template)` whose metric was measured, with its value in words."""
    return [
        template.format(_words(key, metrics[key])) for key, template in wanted if key in metrics
    ]


def _words(key: str, value: float) -> str:
    units = {"mib": mebibytes, "ms": milliseconds, "s": seconds}
    rate = key.endswith("_per_s")
    return number(value) if rate else units.get(key.rpartition("_")[2], number)(value)


def bars(
    parts: list[tuple[str, float]], *, whole: float | None, words: Callable[[float], str]
) -> tuple[Bar, ...]:
    """The parts as bars, each with its share of the whole, where the whole is known."""
    largest = max((size for _, size in parts), default=0.0)
    return tuple(
        Bar(label, words(size), _share(size, whole), _share(size, largest) or 0.0)
        for label, size in parts
    )


def _share(size: float, whole: float | None) -> float | None:
    return min(1.0, max(0.0, size / whole)) if whole and whole > 0 else None
