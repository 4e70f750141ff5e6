"""A step's memory as one HTML page that stands alone: bytes by owner over the allocations of the
step, its phases, its peak and the limit, and what was held at the peak by which line. No script, no
network; it draws what a ledger counted and nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from tasks.engine.base.units import percent, printable
from tasks.engine.memory.allocation_log import AllocationLog, Entry
from tasks.engine.report.html_page import STYLE, document, image
from tasks.engine.report.memory_timeline_plot import (
    colour,
    owners_in,
    picture,
    sized,
    total_of,
)

SHOWN = 20  # rows of the table
MORE_STYLE = """
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .5rem;
  vertical-align: -.08rem; }
.wide { overflow-x: auto; } th { text-align: left; color: var(--soft); font-weight: 500;
  padding: .15rem .8rem .15rem 0; } th.n { text-align: right; }
td, th { white-space: nowrap; } .any { white-space: normal; }
tr + tr td { border-top: 1px solid var(--line); } code { font-size: .88rem; }
"""


def page(ledger: AllocationLog, *, title: str, lines: Iterable[str] = ()) -> str:
    """The page of the step that the ledger counted last; `lines` are said above the picture."""
    points = ledger.timeline() or [(0, {})]
    first, last = points[0][0], points[-1][0]
    at, at_peak = max(points, key=total_of)
    limit = "" if ledger.limit_bytes is None else f", limit {sized(ledger.limit_bytes)}"
    name = escape(printable(title, limit=200))
    return document(
        name,
        STYLE + MORE_STYLE,
        f"<h1>{name}</h1>",
        f'<p class="facts">{sized(sum(at_peak.values()))} at the peak, at allocation '
        f"{at - first:,} of {last - first:,}{limit}</p>",
        *(f"<p>{escape(printable(line, limit=2000))}</p>" for line in lines),
        image("Bytes by owner over the allocations of one step", picture(points, ledger)),
        _legend(at_peak, owners_in(points)),
        f"<h2>Largest at the peak</h2>{_table(ledger.at_peak())}",
    )


def _legend(at_peak: Mapping[str, int], owners: Sequence[str]) -> str:
    whole = max(1, sum(at_peak.values()))
    rows = []
    for owner in reversed(owners):  # as they lie in the picture, from the top
        size = at_peak.get(owner, 0)
        bar = f"background:{colour(owner)};width:{100 * size / whole:.1f}%"
        rows.append(
            f'<tr><td>{_key(owner)}</td><td class="n">{sized(size)}</td>'
            f'<td class="n">{percent(size / whole)}</td>'
            f'<td class="b"><div class="bar" style="{bar}"></div></td></tr>'
        )
    return f"<table><caption>by owner, of the peak</caption>{''.join(rows)}</table>"


def _table(entries: Sequence[Entry]) -> str:
    """What one line made alike for one owner is one row."""
    groups: dict[tuple[str, str, str, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[entry.owner, entry.what, entry.line, entry.phase].append(entry)
    sizes = {alike: sum(entry.bytes for entry in group) for alike, group in groups.items()}
    order = sorted(groups, key=lambda alike: -sizes[alike])
    rows = []
    for alike in order[:SHOWN]:
        what, line, phase = (printable(word, limit=120) for word in alike[1:])
        rows.append(
            f'<tr><td>{_key(alike[0])}</td><td class="n">{sized(sizes[alike])}</td>'
            f'<td class="n">{len(groups[alike]):,}</td><td class="any">{escape(what)}</td>'
            f"<td><code>{escape(line)}</code></td><td>{escape(phase)}</td></tr>"
        )
    left = order[SHOWN:]
    count, size = sum(len(groups[alike]) for alike in left), sum(sizes[alike] for alike in left)
    more = f"<p>and {count:,} more, {sized(size)}</p>" if left else ""
    head = (
        '<tr><th>owner</th><th class="n">size</th><th class="n">tensors</th><th>made by, each</th>'
        "<th>line</th><th>phase</th></tr>"
    )
    return f'<div class="wide"><table>{head}{"".join(rows)}</table></div>{more}'


def _key(owner: str) -> str:
    name = escape(printable(owner, limit=120).replace("_", " "))
    return f'<span class="key" style="background:{colour(owner)}"></span>{name}'
