"""Writes a session of judgements as one HTML page: how good one run is, what each candidate came to
with its interval, what was kept, how the base got better, and how many runs went to changes that
were none.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, cast

from headroom.base.units import format_number, format_seconds
from headroom.base.written_files import write_whole
from headroom.comparison.session import Candidate, JudgedRun, Session
from headroom.comparison.session_report import PAGE, express_gain, format_gain
from headroom.report.html_page import STYLE, embed_image, make_document
from headroom.report.plots import BLUE, GREEN, GREY, VERMILION, label_axes, make_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 60  # candidates in the picture, the newest
COLOURS = {"keep": GREEN, "discard": GREY, "undecided": BLUE, "open": BLUE, "refused": VERMILION}
_STYLE = (
    STYLE
    + """
td.v { font-weight: 600; } td.keep { color: var(--good); }
td.v, td.w, th { white-space: nowrap; } th + th { text-align: left; }
"""
)
LEGEND = (
    "Green: kept, which is the base from there on; grey: discarded; orange: refused; blue: the "
    "first base, and what is undecided. A line is the mean of a base."
)


def write_session_page(session: Session) -> Path:
    """Write the page into the session's folder, and return its file. Raises OSError."""
    noise = session.compute_noise()
    facts = [
        f"One run is good to &plusmn;{100 * noise:.2g} % (standard deviation)"
        if noise is not None
        else "How much a run varies is not known yet",
        _describe_count(session),
    ]
    name = escape(session.name)
    parts = [
        f"<h1>{name}</h1>",
        f"<p>{escape(session.goal_name)}; base: {escape(session.base.label)}</p>",
        *(f'<p class="facts">{fact}</p>' for fact in facts),
        _draw(session),
        _make_table(session),
    ]
    file = session.folder / PAGE
    with write_whole(file) as half:
        half.write_text(make_document(name, _STYLE, *parts))
    return file


def _describe_count(session: Session) -> str:
    kept = [one for one in session.candidates if one.verdict == "keep"]
    ended = [run for run in session.runs if run.status == "FINISHED"]
    none = {one.number for one in session.candidates if one.verdict == "discard"}
    spent = [run for run in session.runs if run.of in none]
    alpha, used = session.trial.budget.alpha, session.trial.budget.spent
    return (
        f"{len(session.candidates)} candidates, {len(kept)} kept; {len(ended)} runs, of which "
        f"{len(spent)} ({format_seconds(sum(run.seconds for run in spent))}) were of changes that "
        f"were discarded; {100 * used:.2g} of {100 * alpha:g} % of error spent"
    )


def _draw(session: Session) -> str:
    """Return the picture of all gains and of all runs; empty before there is one."""
    measured = [one for one in session.candidates if one.gain is not None][-MOST_ROWS:]
    runs = [run for run in session.runs if session.goal_name in run.figures]
    if not runs:
        return ""
    axes = make_panels(2 if measured else 1)
    figure = cast("Figure", axes[0].figure)
    height = max(3.2, 0.24 * len(measured) + 1.4)
    figure.set_size_inches(11, height)
    figure.subplots_adjust(left=0.24, right=0.98, top=1 - 0.4 / height, bottom=0.6 / height)
    if measured:
        _draw_gains(axes[0], session, measured)
    _draw_runs(axes[-1], session, runs)
    png = io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    picture = embed_image("Gains of the candidates, and every run in order", png.getvalue())
    return f"{picture}<p>{LEGEND}</p>"


def _draw_gains(ax: Axes, session: Session, measured: Sequence[Candidate]) -> None:
    goal = session.trial.goal
    unit = "%" if goal.scale == "log" else session.goal_name
    label_axes(ax, "gain of each candidate, with its interval", unit=unit, grid="x")
    ax.axvline(0.0, color=GREY, linewidth=0.9)
    for row, one in enumerate(measured):
        assert one.gain is not None
        colour = COLOURS[one.verdict]
        ends = [express_gain(end, goal) for end in (one.gain.low, one.gain.high)]
        middle = express_gain(one.gain.gain, goal)
        if all(map(math.isfinite, ends)):
            ax.plot(ends, [row, row], color=colour, linewidth=1.6)
        ax.plot(middle, row, "o", color=colour, markersize=5)
    ax.set_yticks(range(len(measured)), [_shorten(one) for one in measured], fontsize=8)
    ax.set_ylim(len(measured) - 0.5, -0.5)
    _limit_to_middles(ax, [express_gain(m.gain.gain, goal) for m in measured if m.gain])


def _limit_to_middles(ax: Axes, middles: Sequence[float]) -> None:
    """Let a wide interval not squeeze all others: it is cut at the edge."""
    if middles:
        low, high = min(0.0, *middles), max(0.0, *middles)
        room = 0.6 * (high - low) or 1.0
        ax.set_xlim(low - room, high + room)


def _shorten(one: Candidate) -> str:
    label = one.side.label
    return f"#{one.number} " + (label if len(label) <= 34 else label[:33] + "\u2026")


def _draw_runs(ax: Axes, session: Session, runs: Sequence[JudgedRun]) -> None:
    """Draw every run in the order of time; the line is the mean of the base of then."""
    label_axes(ax, f"{session.goal_name} of every run, in order")
    kept = {one.number for one in session.candidates if one.verdict == "keep"}
    verdicts = {one.number: one.verdict for one in session.candidates}
    for run in runs:
        is_base = run.of == 0 or run.of in kept
        colour = BLUE if run.of == 0 else COLOURS[verdicts[run.of]]
        size = 4 if is_base else 3
        ax.plot(run.number, run.figures[session.goal_name], "o", color=colour, markersize=size)
    for of in (0, *sorted(kept)):
        mine = [(run.number, run.figures[session.goal_name]) for run in runs if run.of == of]
        if mine:
            mean = sum(value for _, value in mine) / len(mine)
            ends = [min(n for n, _ in mine), max(n for n, _ in mine)]
            ax.plot(ends, [mean, mean], color=BLUE if of == 0 else GREEN, linewidth=1.4)
    ax.set_xlabel("run", fontsize=9)


def _make_table(session: Session) -> str:
    head = (
        "<tr><th>#</th><th>change</th><th>verdict</th><th>gain</th><th>runs</th><th>why</th></tr>"
    )
    rows = []
    for one in session.candidates:
        gain = format_gain(one.gain, session.trial.goal) if one.gain is not None else ""
        cells = [
            f'<td class="w">{one.number}</td><td>{escape(one.side.label)}</td>',
            f'<td class="v {one.verdict}">{one.verdict}</td><td class="w">{escape(gain)}</td>',
            f"<td>{len(session.list_runs(one.number))}</td><td>{escape(one.reason)}</td>",
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    base = [run.figures[session.goal_name] for run in session.list_runs(session.base_number)]
    mean = f", {format_number(sum(base) / len(base))}" if base else ""
    title = f"<h2>Candidates</h2><p>The base is now {escape(session.base.label)}{mean}.</p>"
    return f"{title}<table>{head}{''.join(rows)}</table>"
