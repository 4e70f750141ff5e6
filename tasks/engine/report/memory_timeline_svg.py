"""A step's memory as a picture: bytes by owner over the allocations of the step, stacked, with its
phases, its peak and the limit. It draws what a ledger counted, thinned out to what a screen shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tasks.engine.base.units import mebibytes
from tasks.engine.memory.allocation_log import ACTIVATIONS, LIBRARIES, MIB, REST, AllocationLog
from tasks.engine.memory.memory_by_owner import BEST, OWNERS

COLUMNS = 480  # of the picture: a point each two pixels
# Okabe and Ito's colours again, see plots.py: one an owner, in the order in which they are stacked.
COLOURS = {
    "parameters": "#0072b2",
    "buffers": "#f0e442",
    BEST: "#999933",
    "gradients": "#d55e00",
    "optimizer_state": "#e69f00",
    "data": "#009e73",
    "batch": "#56b4e9",
    ACTIVATIONS: "#cc79a7",
    LIBRARIES: "#5b4b8a",
    "graph": "#7f3b08",
    REST: "#8a929c",
}
WIDTH, HEIGHT = 1000.0, 430.0
LEFT, RIGHT, TOP, BOTTOM = 78.0, 16.0, 44.0, 46.0  # margins of the picture

Point = tuple[int, Mapping[str, int]]  # an allocation, and the bytes of each owner after it


@dataclass(frozen=True)
class _Scale:
    """From allocations and bytes to the picture's coordinates."""

    first: int
    last: int
    top_bytes: float

    def x(self, at: float) -> float:
        share = (at - self.first) / max(1, self.last - self.first)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, size_bytes: float) -> float:
        return HEIGHT - BOTTOM - size_bytes / self.top_bytes * (HEIGHT - TOP - BOTTOM)


def picture(points: Sequence[Point], ledger: AllocationLog) -> str:
    """The picture as an element of a page that has its styles."""
    limit = ledger.limit_bytes
    peak = max(points, key=total_of)
    most = total_of(peak)
    # A limit far above would press the picture flat.
    near = limit if limit is not None and limit <= 1.6 * most else None
    scale = _Scale(points[0][0], points[-1][0], 1.08 * max(most, near or 1))
    parts = [
        _grid(scale),
        *_areas(_thinned(points), scale),
        *_phases(ledger.phases(), scale),
        "" if near is None else _limit(near, scale),
        _peak(peak, scale),
    ]
    return (
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" '
        f'aria-label="Bytes by owner over the allocations of one step">{"".join(parts)}</svg>'
    )


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most one point a column, the one where most was held; the first and the last are kept."""
    inner = points[1:-1]
    width = -(-len(inner) // COLUMNS) or 1
    columns = [inner[i : i + width] for i in range(0, len(inner), width)]
    last = [points[-1]] if len(points) > 1 else []
    return [points[0], *(max(column, key=total_of) for column in columns), *last]


def _areas(points: Sequence[Point], scale: _Scale) -> list[str]:
    """A step-shaped area for each owner, one on top of the other."""
    floor = [0] * len(points)
    found = []
    for owner in owners_in(points):
        top = [low + held.get(owner, 0) for low, (_, held) in zip(floor, points, strict=True)]
        edge = _edge([(scale.x(at), scale.y(t)) for (at, _), t in zip(points, top, strict=True)])
        back = _edge([(scale.x(at), scale.y(f)) for (at, _), f in zip(points, floor, strict=True)])
        path = "M" + " ".join(edge) + " L" + " ".join(reversed(back)) + "Z"
        found.append(
            f'<path d="{path}" fill="{colour(owner)}"><title>{named(owner)}</title></path>'
        )
        floor = top
    return found


def _edge(points: Sequence[tuple[float, float]]) -> list[str]:
    """Level from each allocation to the next, where it changes at once."""
    corners = [points[0]]
    for x, y in points[1:]:
        if y != corners[-1][1]:
            corners += [(x, corners[-1][1]), (x, y)]
    if corners[-1][0] != points[-1][0]:
        corners.append((points[-1][0], corners[-1][1]))
    return [f"{x:.1f},{y:.1f}" for x, y in corners]


def _grid(scale: _Scale) -> str:
    lines = []
    unit = 1024 ** int(math.log(scale.top_bytes, 1024))
    for size in (unit * tick for tick in _ticks(scale.top_bytes / unit)):
        y = scale.y(size)
        lines.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        lines.append(_text(sized(size) if size else "0", LEFT - 8, y + 4, anchor="end"))
    for at in _ticks(scale.last - scale.first):
        x = scale.x(scale.first + at)
        lines.append(_text(f"{at:,.0f}", x, HEIGHT - BOTTOM + 19, anchor="middle"))
    lines.append(_text("allocations of the step", WIDTH - RIGHT, HEIGHT - 6, anchor="end"))
    return "".join(lines)


def _ticks(top: float) -> list[float]:
    """Some five round numbers from 0 to below `top`, whole ones."""
    rough = max(top / 5, 1e-9)
    power = 10.0 ** math.floor(math.log10(rough))
    step = max(1.0, next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= rough))
    return [step * i for i in range(int(top / step) + 1)]


def _phases(ends: Sequence[tuple[int, str]], scale: _Scale) -> list[str]:
    """A line where each phase ends, and its name above, where there is room for it."""
    parts: list[str] = []
    begin, room = scale.first, LEFT
    for end, name in ends:
        left, right = scale.x(begin), scale.x(end)
        parts.append(
            f'<line class="phase" x1="{right:.1f}" x2="{right:.1f}" y1="{TOP - 14}" '
            f'y2="{HEIGHT - BOTTOM}"/>'
        )
        half = 3.6 * len(name)
        middle = (left + right) / 2
        if middle - half >= room and middle + half <= WIDTH:
            parts.append(_text(name, middle, TOP - 20, anchor="middle"))
            room = middle + half + 6
        begin = end
    return parts


def _peak(peak: Point, scale: _Scale) -> str:
    x, y = scale.x(peak[0]), scale.y(total_of(peak))
    anchor, beside = ("end", -9) if x > WIDTH / 2 else ("start", 9)
    words = f"peak {sized(total_of(peak))}"
    return (
        f'<line class="peak" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{HEIGHT - BOTTOM}" '
        f'opacity=".35"/><circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
        + _text(words, x + beside, max(TOP, y - 6), anchor=anchor, style="strong")
    )


def _limit(limit: int, scale: _Scale) -> str:
    y = scale.y(limit)
    line = f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + _text(f"limit {sized(limit)}", LEFT + 6, y - 6, anchor="start", style="bad")


def owners_in(points: Sequence[Point]) -> list[str]:
    """Those that held anything, in the order in which they are stacked, unknown ones last."""
    seen = {owner for _, held in points for owner in held}
    return [o for o in OWNERS if o in seen] + sorted(seen - set(OWNERS))


def colour(owner: str) -> str:
    return COLOURS.get(owner, COLOURS[REST])


def named(owner: str) -> str:
    return escape(owner.replace("_", " "))


def _text(words: str, x: float, y: float, *, anchor: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def sized(size_bytes: float) -> str:
    return mebibytes(size_bytes / MIB)


def total_of(point: Point) -> int:
    return sum(point[1].values())
