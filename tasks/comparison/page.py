"""A comparison as a person reads it: one table for the terminal, Markdown, CSV and a page that
stands alone, with what differs in words, and the pictures.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.table import Table

from tasks.comparison import differences
from tasks.comparison.pictures import ALT, pictures
from tasks.comparison.run_groups import (
    SPEED,
    Goal,
    Group,
    Measured,
    Points,
    epoch_j,
    epoch_s,
    peak_of,
    score_of,
    short,
    step_ms,
    with_spread,
)
from tasks.engine.base.units import mebibytes, milliseconds, number, printable, seconds
from tasks.engine.report.html_page import STYLE, document, image

WELL = ("FINISHED", "PRUNED")  # what is no failure
MOST_ROWS = 40  # of the terminal's table; the page has all
SHARED = ("data.source", "data.path", "model.name", "train.epochs", "train.batch_size")
MORE_STYLE = """
table.runs { font-size: .88rem; } table.runs th { text-align: left; color: var(--soft);
  font-weight: 600; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--line); }
table.runs th { white-space: nowrap; } table.runs td { overflow-wrap: normal; }
table.runs td.n, table.runs th.n { text-align: right; white-space: nowrap; }
body { max-width: 72rem; } li { margin: .2rem 0; }
"""


@dataclass(frozen=True)
class Comparison:
    """What is told: a table by column, in words, and of which runs."""

    title: str
    groups: Sequence[Group]
    columns: dict[str, list[str]]
    notes: list[str]  # groups that did not end well, and why
    words: list[str]
    goal: Goal | None = None  # of a search


def compared(
    groups: Sequence[Group], *, title: str, goal: Goal | None = None, told: Sequence[str] = ()
) -> Comparison:
    """All that is said of these groups. goal: of a search, of which this was `told` already."""
    score, peak = goal.name if goal is not None else score_of(groups), peak_of(groups)
    known = [group for group in groups if group.median(SPEED)]
    slowest = min(known, key=lambda group: group.median(SPEED) or 0.0, default=None)
    names = list(groups[0].settings)
    columns = {"#": [str(g.number) if g.called != g.label else "" for g in groups]} | {
        said: [group.settings[name] for group in groups]
        for said, name in zip(short(names), names, strict=True)
    }
    if any(len(group.runs) > 1 for group in groups):
        columns["runs"] = [_count(group) for group in groups]
    else:
        columns["run"] = [group.runs[0].run_id[:8] for group in groups]
    if any(group.state != "FINISHED" for group in groups):
        columns["state"] = [group.state for group in groups]
    if score:
        columns[score] = [
            _said(group.runs[0].metrics.get(score), number)
            if goal is not None  # where a pruned one has come to, too
            else with_spread(group, score)
            for group in groups
        ]
    columns["samples/s"] = [with_spread(group, SPEED) for group in groups]
    if slowest is not None and len(known) > 1 and goal is None:
        columns["speed-up"] = [_speed_up(group, slowest) for group in groups]
    columns["step ms"] = [with_spread(group, step_ms) for group in groups]
    columns["epoch"] = [_said(group.median(epoch_s), seconds) for group in groups]
    columns["J/epoch"] = [_said(group.median(epoch_j), number) for group in groups]
    columns["peak" if peak.endswith("allocated_mib") else "peak of the process"] = [
        _said(group.median(peak), mebibytes) for group in groups
    ]
    leaked = [group.median("memory/leaked_mib") for group in groups]
    columns["leaked"] = [_said(value, mebibytes) for value in leaked if any(leaked)]
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    failed = [(g, run) for g in groups for run in g.runs if run.status not in WELL]
    notes = [f"{g.called}: {run.status}" + f": {run.error}" * bool(run.error) for g, run in failed]
    said = list(told) if goal is not None else differences.told(groups)
    return Comparison(title, groups, kept, list(dict.fromkeys(notes)), said, goal)


def _count(group: Group) -> str:
    done, all_ = len(group.done), len(group.runs)
    return str(all_) if done == all_ else f"{done} of {all_}"


def _said(value: float | None, say: Callable[[float], str]) -> str:
    return "" if value is None else say(value)


def _speed_up(group: Group, slowest: Group) -> str:
    found = differences.speed_up(group, slowest)
    if found is None:
        return ""
    times, off = found
    return f"{times:.2f}x" + (f" \u00b1 {off:.2f}" if off else "")


def is_number(comparison: Comparison, column: str) -> bool:
    """Whether a column is read from the right."""
    return column not in ("#", "run", "state", *short(list(comparison.groups[0].settings)))


def terminal(comparison: Comparison, *, width: int) -> Table:
    """The table, without borders, of the first rows; the last columns go where there is no room."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    shown, left = dict(comparison.columns), width
    for name, cells in comparison.columns.items():
        left -= max(map(len, (name, *cells))) + 2
        if left < -2 and len(shown) > 1:
            del shown[name]
    for name in shown:
        justify = "right" if is_number(comparison, name) else "left"
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    rows = list(zip(*shown.values(), strict=True))
    for row, group in zip(rows[:MOST_ROWS], comparison.groups, strict=False):
        style = {"FINISHED": "", "PRUNED": "dim"}.get(group.state, "red")
        table.add_row(*map(_plain, row), style=style)
    if len(rows) > MOST_ROWS:
        table.caption = f"and {len(rows) - MOST_ROWS:,} more, on the page"
    return table


def _plain(text: str) -> str:
    return text.replace("[", r"\[")  # is markup of rich


def markdown(comparison: Comparison) -> str:
    """For MLflow's description of the run, and Prefect's artifact."""
    rows = list(zip(*comparison.columns.values(), strict=True))[:MOST_ROWS]
    marks = ["--:" if is_number(comparison, name) else ":--" for name in comparison.columns]
    lines = [" | ".join(cells) for cells in (list(comparison.columns), marks, *rows)]
    table = "\n".join(f"| {line} |" for line in lines)
    said = [f"- {line}" for line in (*comparison.words, *comparison.notes)]
    return "\n\n".join(filter(None, (f"**{comparison.title}**", table, "\n".join(said))))


def write(comparison: Comparison, folder: Path, *, series: Mapping[str, Points]) -> list[Path]:
    """comparison.html, comparison.csv and the pictures, in that folder; their paths."""
    files = pictures(comparison.groups, series, folder / "plots", goal=comparison.goal)
    page, table = folder / "comparison.html", folder / "comparison.csv"
    _write_csv(table, comparison)
    page.write_text(_html(comparison, files), encoding="utf-8")
    return [page, table, *files.values()]


def _write_csv(file: Path, comparison: Comparison) -> None:
    """A line a run, with all that it measured."""
    runs = [(group, run) for group in comparison.groups for run in group.runs]
    metrics = sorted({name for _, run in runs for name in run.metrics})
    settings = list(comparison.groups[0].settings)
    with file.open("w", newline="", encoding="utf-8") as opened:
        table = csv.writer(opened)
        table.writerow(["run_id", "run", "status", *settings, *metrics])
        for group, run in runs:
            values = [run.metrics.get(name, "") for name in metrics]
            table.writerow([run.run_id, run.name, run.status, *group.settings.values(), *values])


def _html(comparison: Comparison, files: Mapping[str, Path]) -> str:
    title = escape(comparison.title)
    heads = "".join(
        f"<th{' class=n' * is_number(comparison, name)}>{escape(name)}</th>"
        for name in comparison.columns
    )
    body = "".join(
        f"<tr{' class=bad' * (group.state not in WELL)}>{_cells(comparison, row)}</tr>"
        for row, group in zip(
            zip(*comparison.columns.values(), strict=True), comparison.groups, strict=True
        )
    )
    notes = "".join(f'<p class="error">{escape(note)}</p>' for note in comparison.notes[:MOST_ROWS])
    return document(
        title,
        STYLE + MORE_STYLE,
        f"<h1>{title}</h1>",
        _list("What was found" if comparison.goal else "What differs", comparison.words),
        f'<h2>The runs</h2><table class="runs"><tr>{heads}</tr>{body}</table>{notes}',
        *(
            f"<h2>{escape(ALT[name])}</h2>{image(ALT[name], file.read_bytes())}"
            for name, file in files.items()
        ),
        _shares(comparison.groups),
        _list("The same in all of them", _common(comparison.groups)),
    )


def _cells(comparison: Comparison, row: Sequence[str]) -> str:
    return "".join(
        f"<td{' class=n' * is_number(comparison, name)}>{escape(cell)}</td>"
        for name, cell in zip(comparison.columns, row, strict=True)
    )


def _list(title: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>{escape(title)}</h2><ul>{items}</ul>" if lines else ""


def _shares(groups: Sequence[Group]) -> str:
    """The whole sums behind the words, for those who check them."""
    told = []
    for title, parts_of, say in (
        ("Time of 1,000 samples, by phase", differences.time_parts, milliseconds),
        ("Memory at the peak, by owner", differences.memory_parts, mebibytes),
    ):
        known = [(group, parts) for group in groups if (parts := parts_of(group))]
        names = list(dict.fromkeys(name for _, parts in known for name in parts))
        if known:
            heads = "".join(f'<th class="n">{escape(name)}</th>' for name in ("all", *names))
            rows = "".join(
                f"<tr><td>{escape(group.label)}</td>"
                + "".join(
                    f'<td class="n">{escape(say(size))}</td>'
                    for size in (sum(parts.values()), *(parts.get(n, 0.0) for n in names))
                )
                + "</tr>"
                for group, parts in known[:MOST_ROWS]
            )
            table = f'<table class="runs"><tr><th></th>{heads}</tr>{rows}</table>'
            told.append(f"<details><summary>{escape(title)}</summary>{table}</details>")
    return "".join(told)


def _common(groups: Sequence[Group]) -> list[str]:
    """What a reader has to know of all of these runs, where it is the same in all."""
    runs: list[Measured] = [run for group in groups for run in group.runs if run.params]
    told = []
    for name in SHARED:
        values = {run.params.get(name, "") for run in runs}
        if len(values) == 1 and (value := values.pop()) not in ("", "None"):
            told.append(f"{name}: {printable(value, limit=200)}")
    for name in ("device", "device.model", "torch.version"):
        values = {run.tags.get(name, "") for run in runs if run.is_done}
        if len(values) == 1 and (value := values.pop()):
            told.append(f"{name}: {value}")
    return told
