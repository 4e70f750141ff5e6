"""Show the report of a finished run: on a terminal, in aligned lines and short bars, in colour
where there is colour; as Markdown; as an HTML page and as pictures. It refuses to wrap inside a
short phrase, and to read markup in what it is given.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from headroom.base.units import format_command, format_percent
from headroom.report import html_page, plots
from headroom.report.report_sections import Block, Grid, Report, Section, make_report

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group, RenderResult
    from rich.measure import Measurement
    from rich.table import Table

WIDEST = 112  # columns; longer bars say no more
STATUS_STYLES = {"FINISHED": "bold green", "FAILED": "bold red", "KILLED": "bold yellow"}
_PHRASE = re.compile(r"[^,]{2,28}(?=,|$)")  # short enough to keep on one line


def render_terminal(report: Report, command: str) -> Group:
    """Return the report and the command that opens it, if any, to be printed by a rich console."""
    from rich.console import Group
    from rich.constrain import Constrain
    from rich.table import Table
    from rich.text import Text

    body = Table.grid(padding=(0, 1), expand=True)
    body.add_column(width=8, style="bold")
    body.add_column(ratio=1)
    if report.error:
        body.add_row("Error", _Line(report.error, "red"))
    if report.verdict:
        body.add_row("Verdict", _Line(report.verdict, ""))
    for section in report.sections:
        body.add_row("", "")
        content = Group(*_render_lines(section), *_render_blocks(section))
        body.add_row(section.title, _Wide(content))
    # Unbroken: an address that a terminal wraps can still be clicked and copied.
    opening = Text.assemble(("\nOpen     ", "bold"), command, overflow="ignore", no_wrap=True)
    return Group(_Title(report), Constrain(body, width=WIDEST), *([opening] if command else []))


def _render_lines(section: Section) -> Iterator[_Line]:
    styles = {True: "green", False: "bold red", None: ""}
    for i, line in enumerate(section.lines):
        yield _Line(line, styles[section.ok] if i == 0 else "")


def _render_blocks(section: Section) -> Iterator[Table]:
    """Yield the blocks of a section side by side, two in a row; those with long names after
    them."""
    from rich.table import Table

    drawn, _ = section.split_for_pages()
    if drawn:
        row = Table.grid(padding=(0, 2), expand=True)
        for _ in range(2):
            row.add_column(ratio=1)
        bars = [_Wide(_render_bars(block)) for block in drawn]
        for i in range(0, len(bars), 2):
            row.add_row(*bars[i : i + 2])
        yield row
    yield from (_render_bars(block) for block in section.blocks if block.page is not None)


def _render_bars(block: Block) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1), expand=True)
    for justify in ("left", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    table.add_column(ratio=1)
    for bar in block.bars:
        share = "" if bar.share is None else format_percent(bar.share)
        table.add_row(bar.label, bar.value, share, _Rule(bar.length))
    titled = Table.grid(expand=True)
    titled.add_row(Text(block.title, style="dim", no_wrap=True))
    titled.add_row(_Wide(table))
    return titled


@dataclass(frozen=True)
class _Wide:
    """Takes what width there is. A table that stands in others would be measured once for each:
    four fifths of the time of a report."""

    inner: Any

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.inner

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement(options.max_width, options.max_width)


@dataclass(frozen=True)
class _Title:
    """Status, name and headline on one line, or the headline on a second one, and never in two."""

    report: Report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        report, title = self.report, Text()
        if report.status:
            title.append(f"{report.status:<9}", style=STATUS_STYLES.get(report.status, "bold"))
        title.append(report.name, style="bold")
        facts = "  ".join(report.headline)
        if facts:
            fits = title.cell_len + 2 + len(facts) <= options.max_width
            title.append("  " if fits else "\n         ").append(facts)
        yield title


@dataclass(frozen=True)
class _Line:
    """A line that, where it is too long, breaks between its phrases and not inside them."""

    text: str
    style: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        kept = _PHRASE.sub(lambda m: m[0][0] + m[0][1:].replace(" ", "\xa0"), self.text)
        lines = textwrap.wrap(kept, width=options.max_width, break_on_hyphens=False)
        yield Text("\n".join(lines).replace("\xa0", " "), style=self.style, overflow="fold")


@dataclass(frozen=True)
class _Rule:
    """A horizontal bar as long as its part of the width there is; hyphens where no glyph is."""

    length: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        halves = round(2 * options.max_width * self.length)
        drawn = "-" * (halves // 2) if options.ascii_only else "\u2501" * (halves // 2)
        half = "\u2578" if halves % 2 and not options.ascii_only else ""
        yield Segment(drawn + half, console.get_style("cyan"))


MARKDOWN_LIMIT = 8000  # characters; MLflow cuts a longer tag in silence
COMMAND_LIMIT = 1000
URL_LETTERS = ":/?#@!$&+,;=%~[]"  # beside letters, digits and _.-
BAR_WIDTH = 20
LINE_LETTERS = 110  # of one line of MLflow's page
_MARKUP = re.compile(r"([\\`*_\[\]#|~])")


def make_terminal_report(run: Mapping[str, Any], *, open_command: str) -> Group:
    """Return the report for a rich console of 80 columns or more; without colour it says the
    same."""
    command = format_command(open_command, limit=COMMAND_LIMIT)
    return render_terminal(make_report(run, limit=240), command)


def make_html(run: Mapping[str, Any], plot_files: Iterable[Path], *, open_command: str) -> str:
    """Return the report as one HTML page that needs no network, the plots inside it."""
    command = format_command(open_command, limit=COMMAND_LIMIT)
    return html_page.render_html(make_report(run), command=command, run=run, plot_files=plot_files)


def draw_plots(run: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write loss.png, time.png, memory.png, PART_confusion.png and trend.png into `folder`,
    those whose data exist, and return their paths."""
    return [*plots.draw_run_plots(run, folder), *plots.draw_trend(run, folder)]


def load_plotting() -> None:
    """Import matplotlib and make its list of fonts before plots are needed, since that takes
    time."""
    plots.load_matplotlib()


def make_markdown(run: Mapping[str, Any], *, open_command: str) -> str:
    """Return the report as GitHub-flavoured Markdown, always under 8,000 characters."""
    command = format_command(open_command, limit=COMMAND_LIMIT)
    url = (run.get("tags") or {}).get("prefect.flow_run_url")
    link = f"\n[Its flow run in Prefect](<{quote(url, safe=URL_LETTERS)}>)\n" if url else ""
    for limit in (400, 120, 40, 20):
        text = _render_markdown(make_report(run, limit=limit), command) + link
        if len(text) < MARKDOWN_LIMIT:
            return text
    raise AssertionError(f"a report of {len(text)} characters with every text cut to {limit}")


def _render_markdown(report: Report, command: str) -> str:
    parts = ["  \n".join(_render_first_lines(report))]
    if report.error:
        parts.append(f"> {_escape_markup(report.error)}")
    if report.verdict:
        parts.append(f"### Verdict\n\n- {_escape_markup(report.verdict)}")
    for section in report.sections:
        parts.append(f"### {section.title}")
        if section.lines:
            parts.append("\n".join(f"- {_escape_markup(line)}" for line in section.lines))
        blocks, grids = section.split_for_pages()
        parts.extend(_render_markdown_table(block) for block in blocks)
        parts.extend(_render_markdown_grid(grid) for grid in grids)
    if command:
        ticks = max((len(run) for run in re.findall("`+", command)), default=0)
        fence = "`" * max(3, ticks + 1)
        parts.append(f"### Open it in MLflow\n\n{fence}sh\n{command}\n{fence}")
    return "\n\n".join(parts) + "\n"


def _render_first_lines(report: Report) -> list[str]:
    """Return what matters in three lines, four where there is a doubt: MLflow's page of a run shows
    no more of it unasked."""
    first_lines = {section.title: section.lines for section in report.sections if section.lines}
    doubts = [report.error or "", *first_lines.get("Warnings", ()), *first_lines.get("Gate", ())]
    doubts = [doubt for doubt in doubts if doubt]
    more = f" (and {len(doubts) - 1} more)" if len(doubts) > 1 else ""
    peak = first_lines.get("Memory", ("",))[0].partition(",")[0]
    release = ", ".join(first_lines.get("Release", ("",))[0].split(", ")[:2])
    facts = ", ".join([*report.headline, *([] if report.headline else [report.name])])
    lines = [
        f"**{_escape_markup(' '.join(filter(None, (report.status, facts))))}**",
        _escape_markup(_shorten(report.verdict.partition(". ")[0])),
        f"Doubt: {_escape_markup(_shorten(doubts[0]))}{more}" if doubts else "",
        _escape_markup("; ".join(filter(None, (peak, release and f"release {release}")))),
    ]
    return [line for line in lines if line]


def _shorten(text: str) -> str:
    return text if len(text) <= LINE_LETTERS else f"{text[: LINE_LETTERS - 3].rstrip()}..."


def _render_markdown_table(block: Block) -> str:
    rows = [f"| {_escape_markup(block.title)} | size | share | |", "|:--|--:|--:|:--|"]
    for bar in block.bars:
        share = "" if bar.share is None else _escape_markup(format_percent(bar.share))
        drawn = "\u2588" * round(BAR_WIDTH * bar.length)
        rows.append(f"| {_escape_markup(bar.label)} | {bar.value} | {share} | {drawn} |")
    return "\n".join(rows)


def _render_markdown_grid(grid: Grid) -> str:
    first, *others = map(_escape_markup, grid.head)
    rows = [f"| {first} | {' | '.join(others)} |", "|:--|" + "--:|" * len(others)]
    rows += ["| " + " | ".join(map(_escape_markup, row)) + " |" for row in grid.rows]
    return "\n".join((f"{_escape_markup(grid.title)}\n", *rows))


def _escape_markup(text: str) -> str:
    """Return the text with nothing left that Markdown or HTML would act on."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(r"\\\1", escaped)
