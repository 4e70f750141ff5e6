"""Show a step's memory as one HTML page that stands alone: a picture of the bytes by owner over
the allocations of the step, thinned out to what a screen shows, with its phases, its peak and
the limit, and what was held at the peak by which line. No script, no network; only what an
allocation log counted is drawn.
"""

from __future__ import annotations

import io
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from headroom.base.names import OWNERS
from headroom.base.units import format_mebibytes, format_percent, make_printable
from headroom.report.html_page import STYLE, embed_image, make_document
from headroom.report.plots import GREY, INK, make_panels
from headroom.watch.allocation_log import (
    ACTIVATIONS,
    LIBRARIES,
    MIB,
    REST,
    AllocationLog,
    Entry,
)
from headroom.watch.memory_by_owner import BEST_WEIGHTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 480  # of the picture: a point each two or three pixels
# Okabe and Ito's colours again, see plots.py: one an owner, in the order in which they are stacked.
COLOURS = {
    "parameters": "#0072b2",
    "buffers": "#f0e442",
    BEST_WEIGHTS: "#999933",
    "gradients": "#d55e00",
    "optimizer_state": "#e69f00",
    "data": "#009e73",
    "batch": "#56b4e9",
    ACTIVATIONS: "#cc79a7",
    LIBRARIES: "#5b4b8a",
    "graph": "#7f3b08",
    REST: "#8a929c",
}
RED = "#b3261e"
LETTER = 0.008  # of the picture's width

log = logging.getLogger(__name__)

Point = tuple[int, Mapping[str, int]]  # an allocation, and the bytes of each owner after it


def write_timeline(
    ledger: AllocationLog, folder: Path, *, title: str, lines: Sequence[str]
) -> None:
    """Write the last step that was counted as the page `folder`/memory/snapshot.html."""
    try:
        (folder / "memory").mkdir(parents=True, exist_ok=True)
        file = folder / "memory" / "snapshot.html"
        file.write_text(make_timeline_page(ledger, title=title, lines=lines), encoding="utf-8")
    except (OSError, MemoryError) as error:  # drawing takes some 40 MiB
        log.warning("memory/snapshot.html could not be written: %s", error)


def render_timeline(points: Sequence[Point], ledger: AllocationLog) -> bytes:
    """Return the picture as a PNG."""
    file = io.BytesIO()
    figure = draw_timeline(points, ledger).figure
    figure.savefig(file, metadata={"Software": None})  # type: ignore[union-attr]
    return file.getvalue()


def draw_timeline(points: Sequence[Point], ledger: AllocationLog) -> Axes:
    """Draw the picture, in which allocations count from the first and each owner is an area."""
    shown, first = thin_out_points(points), points[0][0]
    peak = max(points, key=sum_bytes)
    most, last = sum_bytes(peak), points[-1][0]
    # A limit far above would press the picture flat.
    is_near = ledger.limit_bytes is not None and ledger.limit_bytes <= 1.6 * most
    near = ledger.limit_bytes if is_near else None
    (axes,) = make_panels(1)
    owners = find_owners(points) or [REST]
    axes.stackplot(
        [at - first for at, _ in shown],
        [[held.get(owner, 0) for _, held in shown] for owner in owners],
        colors=[choose_colour(owner) for owner in owners],
        labels=owners,
        step="post",
    )
    axes.set_xlim(0, max(1, last - first))
    top = 1.08 * max(most, near or 1)
    axes.set_ylim(0, top)
    step = 2 ** max(0, math.ceil(math.log2(top / 6)))
    axes.set_yticks(
        range(0, int(top) + 1, step), [format_bytes(n) for n in range(0, int(top) + 1, step)]
    )
    axes.set_xlabel("allocations of the step", fontsize=9, color=GREY)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    _draw_phases(axes, [(at - first, name) for at, name in ledger.list_phases()])
    if near is not None:
        axes.axhline(near, color=RED, linestyle="--", gid="limit")
        axes.text(0, near, f" limit {format_bytes(near)}", color=RED, va="bottom", fontsize=9)
    at, is_right = peak[0] - first, peak[0] - first > (last - first) / 2
    axes.plot(at, most, "o", color=INK, markersize=4, gid="peak", clip_on=False)
    words = f"  peak {format_bytes(most)}  "
    side = "right" if is_right else "left"
    axes.text(at, most, words, ha=side, va="top", fontsize=9, fontweight="bold", color=INK)
    return axes


def _draw_phases(axes: Axes, ends: Sequence[tuple[int, str]]) -> None:
    """Draw a line where each phase ends, and its name above, where there is room for it."""
    begin, room, width = 0, 0.0, axes.get_xlim()[1]
    for end, name in ends:
        axes.axvline(end, color=GREY, linestyle=":", linewidth=0.8, gid="phase")
        middle, half = (begin + end) / 2 / width, LETTER * len(name)
        if middle - half >= room and middle + half <= 1:
            place = axes.get_xaxis_transform()
            axes.text(middle * width, 1.02, name, transform=place, ha="center", fontsize=9)
            room = middle + half
        begin = end


def thin_out_points(points: Sequence[Point]) -> list[Point]:
    """Return at most one point a column, the one where most was held; the first and the last
    are kept."""
    inner = points[1:-1]
    width = -(-len(inner) // COLUMNS) or 1
    columns = [inner[i : i + width] for i in range(0, len(inner), width)]
    last = [points[-1]] if len(points) > 1 else []
    return [points[0], *(max(column, key=sum_bytes) for column in columns), *last]


def find_owners(points: Sequence[Point]) -> list[str]:
    """Return the owners that held anything, in the order in which they are stacked, unknown
    ones last."""
    seen = {owner for _, held in points for owner in held}
    return [o for o in OWNERS if o in seen] + sorted(seen - set(OWNERS))


def choose_colour(owner: str) -> str:
    return COLOURS.get(owner, COLOURS[REST])


def format_bytes(size_bytes: float) -> str:
    return format_mebibytes(size_bytes / MIB)


def sum_bytes(point: Point) -> int:
    return sum(point[1].values())


SHOWN = 20  # rows of the table
MORE_STYLE = """
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .5rem;
  vertical-align: -.08rem; }
.wide { overflow-x: auto; } th { text-align: left; color: var(--soft); font-weight: 500;
  padding: .15rem .8rem .15rem 0; } th.n { text-align: right; }
td, th { white-space: nowrap; } .any { white-space: normal; }
tr + tr td { border-top: 1px solid var(--line); } code { font-size: .88rem; }
"""


def make_timeline_page(ledger: AllocationLog, *, title: str, lines: Iterable[str] = ()) -> str:
    """Return the page of the step that the log counted last; `lines` are written above the
    picture."""
    points = ledger.compute_timeline() or [(0, {})]
    first, last = points[0][0], points[-1][0]
    at, at_peak = max(points, key=sum_bytes)
    limit = "" if ledger.limit_bytes is None else f", limit {format_bytes(ledger.limit_bytes)}"
    name = escape(make_printable(title, limit=200))
    return make_document(
        name,
        STYLE + MORE_STYLE,
        f"<h1>{name}</h1>",
        f'<p class="facts">{format_bytes(sum(at_peak.values()))} at the peak, at allocation '
        f"{at - first:,} of {last - first:,}{limit}</p>",
        *(f"<p>{escape(make_printable(line, limit=2000))}</p>" for line in lines),
        embed_image(
            "Bytes by owner over the allocations of one step", render_timeline(points, ledger)
        ),
        _make_legend(at_peak, find_owners(points)),
        f"<h2>Largest at the peak</h2>{_make_table(ledger.list_at_peak())}",
    )


def _make_legend(at_peak: Mapping[str, int], owners: Sequence[str]) -> str:
    whole = max(1, sum(at_peak.values()))
    rows = []
    for owner in reversed(owners):  # as they lie in the picture, from the top
        size = at_peak.get(owner, 0)
        bar = f"background:{choose_colour(owner)};width:{100 * size / whole:.1f}%"
        rows.append(
            f'<tr><td>{_make_colour_key(owner)}</td><td class="n">{format_bytes(size)}</td>'
            f'<td class="n">{format_percent(size / whole)}</td>'
            f'<td class="b"><div class="bar" style="{bar}"></div></td></tr>'
        )
    return f"<table><caption>by owner, of the peak</caption>{''.join(rows)}</table>"


def _make_table(entries: Sequence[Entry]) -> str:
    """Make the table of the largest entries; what one line made alike for one owner is one row."""
    groups: dict[tuple[str, str, str, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[entry.owner, entry.what, entry.line, entry.phase].append(entry)
    sizes = {alike: sum(entry.bytes for entry in group) for alike, group in groups.items()}
    order = sorted(groups, key=lambda alike: -sizes[alike])
    rows = []
    for alike in order[:SHOWN]:
        what, line, phase = (make_printable(word, limit=120) for word in alike[1:])
        rows.append(
            f"<tr><td>{_make_colour_key(alike[0])}</td><td "
            f'class="n">{format_bytes(sizes[alike])}</td>'
            f'<td class="n">{len(groups[alike]):,}</td><td class="any">{escape(what)}</td>'
            f"<td><code>{escape(line)}</code></td><td>{escape(phase)}</td></tr>"
        )
    left = order[SHOWN:]
    count, size = sum(len(groups[alike]) for alike in left), sum(sizes[alike] for alike in left)
    more = f"<p>and {count:,} more, {format_bytes(size)}</p>" if left else ""
    head = (
        '<tr><th>owner</th><th class="n">size</th><th class="n">tensors</th><th>made by, each</th>'
        "<th>line</th><th>phase</th></tr>"
    )
    return f'<div class="wide"><table>{head}{"".join(rows)}</table></div>{more}'


def _make_colour_key(owner: str) -> str:
    name = escape(make_printable(owner, limit=120).replace("_", " "))
    return f'<span class="key" style="background:{choose_colour(owner)}"></span>{name}'
