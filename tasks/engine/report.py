"""The report of a run for people: in Markdown for MLflow's description and Prefect's artifact, and
for the terminal. Both say what `sections` found, and nothing else. It refuses to let a name, a
path or an error message act as markup, and keeps the Markdown under MLflow's limit for a tag.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.engine.phrases import Block, Report, Section
from tasks.engine.sections import sections
from tasks.engine.units import percent, printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group, RenderResult
    from rich.table import Table
    from rich.text import Text

MARKDOWN_LIMIT = 8000  # characters; MLflow cuts a longer tag in silence
COMMAND_LIMIT = 1000
BAR_WIDTH = 20
STATUS_STYLES = {"FINISHED": "bold green", "FAILED": "bold red", "KILLED": "bold yellow"}
_PHRASE = re.compile(r"[^,]{2,28}(?=,|$)")  # short enough to keep on one line
_MARKUP = re.compile(r"([\\`*_\[\]#|~])")


def markdown(run: Mapping[str, Any], *, open_command: str) -> str:
    """The report as GitHub-flavoured Markdown, always under 8,000 characters."""
    command = printable(open_command, limit=COMMAND_LIMIT)
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
    ticks = max((len(run) for run in re.findall("`+", command)), default=0)
    fence = "`" * max(3, ticks + 1)
    parts.append(f"### Open it in MLflow\n\n{fence}sh\n{command}\n{fence}")
    return "\n\n".join(parts) + "\n"


def _markdown_table(block: Block) -> str:
    rows = [f"| {_plain(block.title)} | size | share | |", "|:--|--:|--:|:--|"]
    for bar in block.bars:
        share = "" if bar.share is None else percent(bar.share)
        drawn = "\u2588" * round(BAR_WIDTH * bar.length)
        rows.append(f"| {_plain(bar.label)} | {bar.value} | {share} | {drawn} |")
    return "\n".join(rows)


def _plain(text: str) -> str:
    """The text with nothing left that Markdown or HTML would act on."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(r"\\\1", escaped)


def terminal(run: Mapping[str, Any], *, open_command: str) -> Group:
    """The report for a rich console of 80 columns or more; without colour it says the same."""
    from rich.console import Group
    from rich.constrain import Constrain
    from rich.table import Table
    from rich.text import Text

    report = sections(run, limit=240)
    body = Table.grid(padding=(0, 1), expand=True)
    body.add_column(width=8, style="bold")
    body.add_column(ratio=1)
    if report.error:
        body.add_row("Error", _Line(report.error, "red"))
    for section in report.sections:
        body.add_row("", "")
        body.add_row(section.title, Group(*_lines(section), *_blocks(section)))
    command = Text.assemble(
        ("\nOpen     ", "bold"), printable(open_command, limit=COMMAND_LIMIT), overflow="fold"
    )
    return Group(_title(report), Constrain(body, width=112), command)


def _title(report: Report) -> Text:
    from rich.text import Text

    title = Text()
    if report.status:
        title.append(f"{report.status:<9}", style=STATUS_STYLES.get(report.status, "bold"))
    title.append(report.name, style="bold")
    for fact in report.headline:
        title.append(f"  {fact}")
    return title


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
        row.add_row(*(_bars(block) for block in section.blocks))
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
