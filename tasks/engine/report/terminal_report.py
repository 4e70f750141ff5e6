"""The report on a terminal: aligned lines and short bars, two blocks side by side, in colour where
there is colour. It refuses to wrap inside a short phrase, and to read markup in what it is given.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.engine.base.units import percent
from tasks.engine.report.report_parts import Block, Report, Section

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group, RenderResult
    from rich.table import Table

WIDEST = 112  # columns; longer bars say no more
STATUS_STYLES = {"FINISHED": "bold green", "FAILED": "bold red", "KILLED": "bold yellow"}
_PHRASE = re.compile(r"[^,]{2,28}(?=,|$)")  # short enough to keep on one line


def terminal(report: Report, command: str) -> Group:
    """The report and the command that opens it, if any, to be printed by a rich console."""
    from rich.console import Group
    from rich.constrain import Constrain
    from rich.table import Table
    from rich.text import Text

    body = Table.grid(padding=(0, 1), expand=True)
    body.add_column(width=8, style="bold")
    body.add_column(ratio=1)
    if report.error:
        body.add_row("Error", _Line(report.error, "red"))
    for section in report.sections:
        body.add_row("", "")
        body.add_row(section.title, Group(*_lines(section), *_blocks(section)))
    # Unbroken: an address that a terminal wraps can still be clicked and copied.
    opening = Text.assemble(("\nOpen     ", "bold"), command, overflow="ignore", no_wrap=True)
    return Group(_Title(report), Constrain(body, width=WIDEST), *([opening] if command else []))


def _lines(section: Section) -> Iterator[_Line]:
    styles = {True: "green", False: "bold red", None: ""}
    for i, line in enumerate(section.lines):
        yield _Line(line, styles[section.ok] if i == 0 else "")


def _blocks(section: Section) -> Iterator[Table]:
    """The blocks of a section side by side, two in a row."""
    from rich.table import Table

    if section.blocks:
        row = Table.grid(padding=(0, 2), expand=True)
        for _ in range(2):
            row.add_column(ratio=1)
        bars = [_bars(block) for block in section.blocks]
        for i in range(0, len(bars), 2):
            row.add_row(*bars[i : i + 2])
        yield row


def _bars(block: Block) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1), expand=True)
    for justify in ("left", "right", "right"):
        table.add_column(justify=justify, no_wrap=True)
    table.add_column(ratio=1)
    for bar in block.bars:
        share = "" if bar.share is None else percent(bar.share)
        table.add_row(bar.label, bar.value, share, _Rule(bar.length))
    titled = Table.grid(expand=True)
    titled.add_row(Text(block.title, style="dim", no_wrap=True))
    titled.add_row(table)
    return titled


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
