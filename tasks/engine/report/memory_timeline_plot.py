"""A step's memory as a picture: bytes by owner over the allocations of the step, stacked, with its
phases, its peak and the limit. It draws what a ledger counted, thinned out to what a screen shows.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tasks.engine.base.units import mebibytes
from tasks.engine.memory.allocation_log import ACTIVATIONS, LIBRARIES, MIB, REST, AllocationLog
from tasks.engine.memory.memory_by_owner import BEST, OWNERS
from tasks.engine.report.plots import GREY, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 480  # of the picture: a point each two or three pixels
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
INK, RED = "#202020", "#b3261e"
LETTER = 0.008  # of the picture's width

Point = tuple[int, Mapping[str, int]]  # an allocation, and the bytes of each owner after it


def picture(points: Sequence[Point], ledger: AllocationLog) -> bytes:
    """The picture as a PNG."""
    file = io.BytesIO()
    figure = drawn(points, ledger).figure
    figure.savefig(file, metadata={"Software": None})  # type: ignore[union-attr]
    return file.getvalue()


def drawn(points: Sequence[Point], ledger: AllocationLog) -> Axes:
    """The picture, in which allocations count from the first and each owner is an area."""
    shown, first = thinned(points), points[0][0]
    peak = max(points, key=total_of)
    most, last = total_of(peak), points[-1][0]
    # A limit far above would press the picture flat.
    is_near = ledger.limit_bytes is not None and ledger.limit_bytes <= 1.6 * most
    near = ledger.limit_bytes if is_near else None
    (axes,) = panels(1)
    owners = owners_in(points) or [REST]
    axes.stackplot(
        [at - first for at, _ in shown],
        [[held.get(owner, 0) for _, held in shown] for owner in owners],
        colors=[colour(owner) for owner in owners],
        labels=owners,
        step="post",
    )
    axes.set_xlim(0, max(1, last - first))
    top = 1.08 * max(most, near or 1)
    axes.set_ylim(0, top)
    step = 2 ** max(0, math.ceil(math.log2(top / 6)))
    axes.set_yticks(range(0, int(top) + 1, step), [sized(n) for n in range(0, int(top) + 1, step)])
    axes.set_xlabel("allocations of the step", fontsize=9, color=GREY)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    _phases(axes, [(at - first, name) for at, name in ledger.phases()])
    if near is not None:
        axes.axhline(near, color=RED, linestyle="--", gid="limit")
        axes.text(0, near, f" limit {sized(near)}", color=RED, va="bottom", fontsize=9)
    at, is_right = peak[0] - first, peak[0] - first > (last - first) / 2
    axes.plot(at, most, "o", color=INK, markersize=4, gid="peak", clip_on=False)
    words = f"  peak {sized(most)}  "
    side = "right" if is_right else "left"
    axes.text(at, most, words, ha=side, va="top", fontsize=9, fontweight="bold", color=INK)
    return axes


def _phases(axes: Axes, ends: Sequence[tuple[int, str]]) -> None:
    """A line where each phase ends, and its name above, where there is room for it."""
    begin, room, width = 0, 0.0, axes.get_xlim()[1]
    for end, name in ends:
        axes.axvline(end, color=GREY, linestyle=":", linewidth=0.8, gid="phase")
        middle, half = (begin + end) / 2 / width, LETTER * len(name)
        if middle - half >= room and middle + half <= 1:
            place = axes.get_xaxis_transform()
            axes.text(middle * width, 1.02, name, transform=place, ha="center", fontsize=9)
            room = middle + half
        begin = end


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most one point a column, the one where most was held; the first and the last are kept."""
    inner = points[1:-1]
    width = -(-len(inner) // COLUMNS) or 1
    columns = [inner[i : i + width] for i in range(0, len(inner), width)]
    last = [points[-1]] if len(points) > 1 else []
    return [points[0], *(max(column, key=total_of) for column in columns), *last]


def owners_in(points: Sequence[Point]) -> list[str]:
    """Those that held anything, in the order in which they are stacked, unknown ones last."""
    seen = {owner for _, held in points for owner in held}
    return [o for o in OWNERS if o in seen] + sorted(seen - set(OWNERS))


def colour(owner: str) -> str:
    return COLOURS.get(owner, COLOURS[REST])


def sized(size_bytes: float) -> str:
    return mebibytes(size_bytes / MIB)


def total_of(point: Point) -> int:
    return sum(point[1].values())
