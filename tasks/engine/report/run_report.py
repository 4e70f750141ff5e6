"""The report of a run for people, from a plain dict of run-record names: Markdown for MLflow's
description and Prefect's artifact, a terminal's lines, one HTML page, and plots. All say what
`sections` found, and nothing else. It refuses to let a name, a path or an error message act as
markup, and keeps the Markdown under MLflow's limit for a tag.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.engine.base.units import command_line, percent
from tasks.engine.report import html_page, terminal_report, trend_plot
from tasks.engine.report import plots as drawing
from tasks.engine.report.report_parts import Block, Grid, Report
from tasks.engine.report.report_sections import sections

if TYPE_CHECKING:
    from rich.console import Group

MARKDOWN_LIMIT = 8000  # characters; MLflow cuts a longer tag in silence
COMMAND_LIMIT = 1000
BAR_WIDTH = 20
_MARKUP = re.compile(r"([\\`*_\[\]#|~])")


def terminal(run: Mapping[str, Any], *, open_command: str) -> Group:
    """The report for a rich console of 80 columns or more; without colour it says the same."""
    command = command_line(open_command, limit=COMMAND_LIMIT)
    return terminal_report.terminal(sections(run, limit=240), command)


def html(run: Mapping[str, Any], plot_files: Iterable[Path], *, open_command: str) -> str:
    """The report as one HTML page that needs no network, the plots inside it."""
    command = command_line(open_command, limit=COMMAND_LIMIT)
    return html_page.html(sections(run), command=command, run=run, plot_files=plot_files)


def plots(run: Mapping[str, Any], folder: Path) -> list[Path]:
    """The files loss.png, time.png, memory.png, PART_confusion.png and trend.png in `folder`: those
    whose data exist."""
    return [*drawing.plots(run, folder), *trend_plot.plots(run, folder)]


def load_plotting() -> None:
    """Import matplotlib and make its list of fonts, at a moment when nobody waits for them."""
    drawing.load()


def markdown(run: Mapping[str, Any], *, open_command: str) -> str:
    """The report as GitHub-flavoured Markdown, always under 8,000 characters."""
    command = command_line(open_command, limit=COMMAND_LIMIT)
    for limit in (400, 120, 40, 20):
        text = _markdown(sections(run, limit=limit), command)
        if len(text) < MARKDOWN_LIMIT:
            return text
    raise AssertionError(f"a report of {len(text)} characters with every text cut to {limit}")


def _markdown(report: Report, command: str) -> str:
    status = [f"**{_plain(report.status)}**"] if report.status else []
    parts = [" ".join([*status, _plain(report.name)])]
    if report.headline:
        parts.append("**" + _plain(", ".join(report.headline)) + "**")
    if report.error:
        parts.append(f"> {_plain(report.error)}")
    for section in report.sections:
        parts.append(f"### {section.title}")
        if section.lines:
            parts.append("\n".join(f"- {_plain(line)}" for line in section.lines))
        parts.extend(_markdown_table(block) for block in section.blocks)
        parts.extend(_markdown_grid(grid) for grid in section.grids)
    if command:
        ticks = max((len(run) for run in re.findall("`+", command)), default=0)
        fence = "`" * max(3, ticks + 1)
        parts.append(f"### Open it in MLflow\n\n{fence}sh\n{command}\n{fence}")
    return "\n\n".join(parts) + "\n"


def _markdown_table(block: Block) -> str:
    rows = [f"| {_plain(block.title)} | size | share | |", "|:--|--:|--:|:--|"]
    for bar in block.bars:
        share = "" if bar.share is None else _plain(percent(bar.share))
        drawn = "\u2588" * round(BAR_WIDTH * bar.length)
        rows.append(f"| {_plain(bar.label)} | {bar.value} | {share} | {drawn} |")
    return "\n".join(rows)


def _markdown_grid(grid: Grid) -> str:
    first, *others = map(_plain, grid.head)
    rows = [f"| {first} | {' | '.join(others)} |", "|:--|" + "--:|" * len(others)]
    rows += ["| " + " | ".join(map(_plain, row)) + " |" for row in grid.rows]
    return "\n".join((f"{_plain(grid.title)}\n", *rows))


def _plain(text: str) -> str:
    """The text with nothing left that Markdown or HTML would act on."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(r"\\\1", escaped)
