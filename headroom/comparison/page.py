"""Writes a comparison for a person: one table for the terminal, Markdown, CSV and an HTML
page, with the differences in words, and plots of how fast the groups are, where their time
and memory went, and their loss by steps and by seconds. It draws what was measured: no
data, no plot.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from headroom.base.units import (
    format_mebibytes,
    format_milliseconds,
    format_number,
    format_seconds,
    make_printable,
)
from headroom.base.written_files import write_whole
from headroom.comparison import differences
from headroom.comparison.differences import compute_memory_parts, compute_time_parts
from headroom.comparison.run_groups import (
    SPEED,
    Goal,
    Group,
    MeasuredRun,
    Points,
    choose_goal,
    compute_epoch_j,
    compute_epoch_parts,
    compute_epoch_s,
    compute_step_ms,
    find_best_group,
    find_peak_metric,
    find_score,
    format_with_spread,
    shorten_names,
)
from headroom.report.html_page import STYLE, embed_image, make_document, make_fragment
from headroom.report.plots import (
    BLUE,
    GREEN,
    GREY,
    INK,
    SKY,
    VERMILION,
    label_axes,
    make_panels,
)
from headroom.report.verdict import BOUND

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_GROUPS = 12  # groups that a picture shows
NEAR = 3  # times what was taken at most: a device that has more would leave no bars to see
LETTERS = 34  # of a label
# Okabe and Ito's, as in the plots of a run, with the others of theirs.
OTHERS = ("#E69F00", "#CC79A7", "#999999", "#F0E442", "#000000")
COLOURS = (BLUE, VERMILION, GREEN, SKY, *OTHERS)

ALT = {
    "history": "What each trial came to, and the best so far",
    "speed": "Samples a second",
    "loss": "Training loss by step and by time",
    "time": "Where 1,000 samples spend their time",
    "epoch": "Where an epoch spends its time",
    "memory": "Where the memory went at its peak",
}


def draw_plots(
    groups: Sequence[Group],
    series: Mapping[str, Points],
    folder: Path,
    *,
    goal: Goal | None = None,
) -> dict[str, Path]:
    """Draw the plots whose data exist; return their files by name.

    series: of the training loss, by run_id. goal: of a search.
    """
    drawn: dict[str, Callable[[], Figure | None]] = {
        "history": lambda: _draw_history(groups, goal) if goal is not None else None,
        "speed": lambda: _draw_speed(groups),
        "loss": lambda: _draw_loss(groups, series),
        "time": lambda: _draw_stacked(groups, compute_time_parts, "milliseconds of 1,000 samples"),
        "epoch": lambda: _draw_stacked(groups, compute_epoch_parts, "seconds of an epoch"),
        "memory": lambda: _draw_memory(groups),
    }
    files = {}
    for name, draw in drawn.items():
        if (figure := draw()) is not None:
            files[name] = folder / f"{name}.png"
            with write_whole(files[name]) as half:
                figure.savefig(half, metadata={"Software": None})
    return files


def _draw_history(groups: Sequence[Group], goal: Goal) -> Figure | None:
    """Draw the values by the number of the trial; a pruned trial with its last value."""
    values = {g.number: (g.state, g.runs[0].metrics.get(goal.name)) for g in groups}
    shown = {n: (state, v) for n, (state, v) in sorted(values.items()) if v is not None}
    done = [(n, v) for n, (state, v) in shown.items() if state == "FINISHED"]
    if not done:
        return None
    axes = make_panels(1)[0]
    for state, colour, mark in (("FINISHED", BLUE, "o"), ("PRUNED", GREY, "x")):
        points = [(n, v) for n, (of, v) in shown.items() if of == state]
        if points:
            at, height = zip(*points, strict=True)
            axes.scatter(at, height, c=colour, marker=mark, label=state.lower())
    numbers, so_far = [n for n, _ in done], [v for _, v in done]
    best = [goal.choose_best(so_far[: at + 1]) for at in range(len(done))]
    axes.step(
        [*numbers, max(values)], [*best, best[-1]], where="post", color=VERMILION, label="best"
    )
    label_axes(axes, f"{goal.name} by trial", unit="trial")
    axes.locator_params(axis="x", integer=True)
    _place_legend(axes.figure, columns=3)  # type: ignore[arg-type]
    return axes.figure  # type: ignore[return-value]


def _make_label(group: Group) -> str:
    """Return the group's values as its label: the title of the page says of what."""
    label = ", ".join(group.settings.values()) or group.label
    label = make_printable(label, limit=LETTERS)
    return label if group.called == group.label else f"#{group.number} {label}"


def _make_row_axes(groups: Sequence[Group], *, title: str) -> tuple[Axes, Figure]:
    axes = make_panels(1)[0]
    figure: Figure = axes.figure  # type: ignore[assignment]
    longest = max(len(_make_label(group)) for group in groups)
    figure.set_size_inches(8.0, 1.3 + 0.36 * max(len(groups), 3))
    figure.subplots_adjust(
        left=min(0.45, 0.04 + 0.0105 * longest),
        top=1 - 0.42 / figure.get_figheight(),
        bottom=0.55 / figure.get_figheight(),
    )
    label_axes(axes, title, grid="x")
    axes.set_yticks(range(len(groups)), [_make_label(group) for group in groups], fontsize=9)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0, colors=INK)
    return axes, figure


def _draw_speed(groups: Sequence[Group]) -> Figure | None:
    measured = [group for group in groups if group.compute_median(SPEED)][:MAX_GROUPS]
    if not measured:
        return None
    axes, figure = _make_row_axes(measured, title="samples a second")
    speeds = [group.compute_median(SPEED) or 0.0 for group in measured]
    spreads = [group.compute_spread(SPEED) or 0.0 for group in measured]
    axes.barh(range(len(measured)), speeds, xerr=spreads, color=COLOURS[0], height=0.55)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlim(0, 1.18 * max(map(sum, zip(speeds, spreads, strict=True))))
    for place, (speed, spread) in enumerate(zip(speeds, spreads, strict=True)):
        said = f"  {speed:,.0f}" + (f" \u00b1 {spread:,.0f}" if spread else "")
        axes.text(speed + spread, place, said, va="center", fontsize=9, color=INK)
    return figure


def _draw_stacked(
    groups: Sequence[Group], parts_of: Callable[[Group], dict[str, float]], title: str
) -> Figure | None:
    measured = [(group, parts) for group in groups if (parts := parts_of(group))][:MAX_GROUPS]
    if not measured:
        return None
    axes, figure = _make_row_axes([group for group, _ in measured], title=title)
    names = list(dict.fromkeys(name for _, parts in measured for name in parts))
    left = [0.0] * len(measured)
    for colour, name in zip(COLOURS, names, strict=False):
        sizes = [max(0.0, parts.get(name, 0.0)) for _, parts in measured]
        if any(sizes):
            axes.barh(range(len(measured)), sizes, left=left, color=colour, height=0.55, label=name)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    _place_legend(figure, columns=7)
    return figure


def _place_legend(figure: Figure, *, columns: int) -> None:
    """Draw one legend for all axes below them, where no line is."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    high, count = figure.get_figheight(), len(labels)
    figure.subplots_adjust(bottom=(0.65 + 0.2 * -(-count // columns)) / high)
    figure.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(0.01, 0.02 / high),
        ncols=min(count, columns),
        frameon=False,
        fontsize=8.5,
        handlelength=0.9,
        columnspacing=1.1,
    )


def _draw_memory(groups: Sequence[Group]) -> Figure | None:
    """Draw the memory, and the device's total, as a line where it is near.

    The total is shown where all runs have the same.
    """
    figure = _draw_stacked(groups, compute_memory_parts, "MiB of tensors at the peak")
    totals = {group.find_tag("device.total_mib") for group in groups if group.done}
    if figure is None or len(totals) != 1 or not (total := next(iter(totals))):
        return figure
    axes = figure.axes[0]
    note = f"the device has {float(total):,.0f}"
    if float(total) <= NEAR * axes.get_xlim()[1]:
        axes.axvline(float(total), color=VERMILION, linewidth=1.2)
    axes.set_title(note, loc="right", fontsize=9, color=GREY)
    return figure


def _draw_loss(groups: Sequence[Group], series: Mapping[str, Points]) -> Figure | None:
    lines = []
    for group in groups:
        run = next((run for run in group.done if series.get(run.run_id)), None)
        if run is not None:
            lines.append((_make_label(group), series[run.run_id]))
    if not lines:
        return None
    by_step, by_time = make_panels(2)
    label_axes(by_step, "training loss", unit="optimizer step")
    label_axes(by_time, "by time", unit="s since the first of them")
    for colour, (label, points) in zip(COLOURS, lines, strict=False):
        steps, times, values = zip(*points, strict=True)
        seconds = [(at - times[0]) / 1000 for at in times]
        by_step.plot(steps, values, color=colour, linewidth=1.5, label=label)
        by_time.plot(seconds, values, color=colour, linewidth=1.5)
    losses = [value for _, points in lines[: len(COLOURS)] for _, _, value in points]
    if min(losses) > 0 and max(losses) > 50 * min(losses):
        for axes in (by_step, by_time):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
    by_step.locator_params(axis="x", integer=True, nbins=6)
    _place_legend(by_step.figure, columns=3)  # type: ignore[arg-type]
    return by_step.figure  # type: ignore[return-value]


GOOD_STATES = ("FINISHED", "PRUNED")  # what is no failure
MOST_ROWS = 40  # of the terminal's table; the page has all
SHARED_SETTINGS = ("data.source", "data.path", "model.name", "train.epochs", "train.batch_size")
MORE_STYLE = """
table.runs { font-size: .88rem; } table.runs th { text-align: left; color: var(--soft);
  font-weight: 600; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--line); }
table.runs th { white-space: nowrap; } table.runs td { overflow-wrap: normal; }
table.runs td.n, table.runs th.n { text-align: right; white-space: nowrap; }
body { max-width: 72rem; } li { margin: .2rem 0; }
"""


@dataclass(frozen=True)
class ComparisonReport:
    """A comparison for a person: a table by column, sentences, and the groups of runs."""

    title: str
    groups: Sequence[Group]
    columns: dict[str, list[str]]
    notes: list[str]  # groups that did not end well, and why
    words: list[str]
    goal: Goal | None = None  # of a search
    doubts: Sequence[str] = ()  # what makes the figures doubtful: stands before them


def compare_groups(
    groups: Sequence[Group], *, title: str, goal: Goal | None = None, lines: Sequence[str] = ()
) -> ComparisonReport:
    """Return the report on these groups.

    goal: of a search, which `lines` has described in words already.
    """
    score, peak = goal.name if goal is not None else find_score(groups), find_peak_metric(groups)
    classes = differences.find_work_classes(groups)
    speeds = differences.compare_speeds(classes) if goal is None else None
    names = list(groups[0].settings)
    columns = {"#": [str(g.number) if g.called != g.label else "" for g in groups]} | {
        said: [group.list_shown()[at] for group in groups]
        for at, said in enumerate(shorten_names(names))
    }
    if any(len(group.runs) > 1 for group in groups):
        columns["runs"] = [_describe_count(group) for group in groups]
    else:
        columns["run"] = [group.runs[0].run_id[:8] for group in groups]
    if any(group.state != "FINISHED" for group in groups):
        columns["state"] = [group.state for group in groups]
    if score:
        columns[score] = [
            _format_value(group.runs[0].metrics.get(score), format_number)
            if goal is not None  # where a pruned one has come to, too
            else format_with_spread(group, score)
            for group in groups
        ]
    columns["samples/s"] = [format_with_spread(group, SPEED) for group in groups]
    if speeds is not None:
        columns["speed-up"] = [
            _format_value(speeds.compute_speed_up(group), "{:.2f}x".format) for group in groups
        ]
    columns["step ms"] = [format_with_spread(group, compute_step_ms) for group in groups]
    columns["epoch"] = [
        _format_value(group.compute_median(compute_epoch_s), format_seconds) for group in groups
    ]
    columns["J/epoch"] = [
        _format_value(group.compute_median(compute_epoch_j), format_number) for group in groups
    ]
    of_tensors = peak.endswith("allocated_mib")
    columns["peak" if of_tensors else "peak of the process"] = [
        "at least " * (of_tensors and group.has_lower_bound)
        + _format_value(group.compute_median(peak), format_mebibytes)
        for group in groups
    ]
    columns["bound"] = [group.find_usual(BOUND).replace("_", " ") for group in groups]
    leaked = [group.compute_median("memory/leaked_mib") for group in groups]
    columns["leaked"] = [_format_value(value, format_mebibytes) for value in leaked if any(leaked)]
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    failed = [(g, run) for g in groups for run in g.runs if run.status not in GOOD_STATES]
    notes = [f"{g.called}: {run.status}" + f": {run.error}" * bool(run.error) for g, run in failed]
    notes = list(dict.fromkeys(notes))
    if goal is not None:
        return ComparisonReport(title, groups, kept, notes, list(lines), goal)
    said = differences.describe_differences(groups, classes, speeds)
    doubts = differences.describe_doubts(groups, classes)
    return ComparisonReport(title, groups, kept, notes, said, doubts=doubts)


def _describe_count(group: Group) -> str:
    done, all_ = len(group.done), len(group.runs)
    return str(all_) if done == all_ else f"{done} of {all_}"


def _format_value(value: float | None, say: Callable[[float], str]) -> str:
    return "" if value is None else say(value)


def is_number(comparison: ComparisonReport, column: str) -> bool:
    """Return whether a column holds numbers, which are aligned to the right."""
    return column not in ("#", "run", "state", *shorten_names(list(comparison.groups[0].settings)))


def make_terminal_table(comparison: ComparisonReport, *, width: int) -> Table:
    """Return the table, without borders, of the first rows.

    The last columns go where there is no room.
    """
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
        table.add_row(*map(_escape_markup, row), style=style)
    if len(rows) > MOST_ROWS:
        table.caption = f"and {len(rows) - MOST_ROWS:,} more, on the page"
    return table


def _escape_markup(text: str) -> str:
    return text.replace("[", r"\[")  # is markup of rich


def make_markdown(comparison: ComparisonReport) -> str:
    """Return the report in Markdown, for MLflow's description and Prefect's artifact."""
    rows = list(zip(*comparison.columns.values(), strict=True))[:MOST_ROWS]
    doubts = [f"- Doubtful: {line}" for line in comparison.doubts]
    marks = ["--:" if is_number(comparison, name) else ":--" for name in comparison.columns]
    lines = [" | ".join(cells) for cells in (list(comparison.columns), marks, *rows)]
    table = "\n".join(f"| {line} |" for line in lines)
    said = [f"- {line}" for line in (*comparison.words, *comparison.notes)]
    first = f"**{_describe_best(comparison) or comparison.title}**"
    return "\n\n".join(filter(None, (first, "\n".join((*doubts, *said)), table)))


def _describe_best(comparison: ComparisonReport) -> str:
    """Return the best of several groups in words; empty where they share no score."""
    goal = choose_goal(comparison.groups, comparison.goal)
    best = find_best_group(comparison.groups, goal) if goal is not None else None
    value = best.compute_median(goal.name) if best is not None and goal is not None else None
    if best is None or goal is None or value is None or len(comparison.groups) == 1:
        return ""
    return f"Best median {goal.name} {format_number(value)}: {best.label}"


def describe_report(report: ComparisonReport) -> dict[str, Any]:
    """Return the comparison for a program: groups with the medians of what they are judged by."""
    score, peak = find_score(report.groups), find_peak_metric(report.groups)
    names = [name for name in dict.fromkeys((score, SPEED, peak)) if name]
    return {
        "title": report.title,
        "doubts": [*report.doubts],
        "words": report.words,
        "notes": report.notes,
        "groups": [
            {
                "settings": group.settings,
                "status": group.state,
                "run_ids": [run.run_id for run in group.runs if run.run_id],
                "medians": {name: group.compute_median(name) for name in names},
                "deviations": {name: group.compute_spread(name) for name in names},
            }
            for group in report.groups
        ],
    }


def write_page(
    comparison: ComparisonReport, folder: Path, *, series: Mapping[str, Points]
) -> list[Path]:
    """Write comparison.html, comparison.csv and the plots into that folder.

    Return their paths. Raises OSError, which names the file.
    """
    files = draw_plots(comparison.groups, series, folder / "plots", goal=comparison.goal)
    page, table = folder / "comparison.html", folder / "comparison.csv"
    _write_csv(table, comparison)
    with write_whole(page) as half:
        half.write_text(_make_html(comparison, files), encoding="utf-8")
    return [page, table, *files.values()]


def _write_csv(file: Path, comparison: ComparisonReport) -> None:
    """Write a line for each run, with all that it measured."""
    runs = [(group, run) for group in comparison.groups for run in group.runs]
    metrics = sorted({name for _, run in runs for name in run.metrics})
    settings = list(comparison.groups[0].settings)
    with write_whole(file) as half, half.open("w", newline="", encoding="utf-8") as opened:
        table = csv.writer(opened)
        table.writerow(["run_id", "run", "status", *settings, *metrics])
        for group, run in runs:
            values = [run.metrics.get(name, "") for name in metrics]
            table.writerow([run.run_id, run.name, run.status, *group.settings.values(), *values])


def _make_html(comparison: ComparisonReport, files: Mapping[str, Path]) -> str:
    title = escape(comparison.title)
    return make_document(
        title,
        STYLE + MORE_STYLE,
        f"<h1>{title}</h1>",
        *_make_first_parts(comparison),
        *(
            f"<h2>{escape(ALT[name])}</h2>{embed_image(ALT[name], file.read_bytes())}"
            for name, file in files.items()
        ),
        *_make_last_parts(comparison),
    )


def make_comparison_fragment(comparison: ComparisonReport) -> str:
    """Return the page without pictures, for a notebook."""
    return make_fragment(*_make_first_parts(comparison), *_make_last_parts(comparison))


def _make_first_parts(comparison: ComparisonReport) -> tuple[str, ...]:
    heads = "".join(
        f"<th{' class=n' * is_number(comparison, name)}>{escape(name)}</th>"
        for name in comparison.columns
    )
    body = "".join(
        f"<tr{' class=bad' * (group.state not in GOOD_STATES)}>"
        f"{_make_table_cells(comparison, row)}</tr>"
        for row, group in zip(
            zip(*comparison.columns.values(), strict=True), comparison.groups, strict=True
        )
    )
    notes = "".join(f'<p class="error">{escape(note)}</p>' for note in comparison.notes[:MOST_ROWS])
    return (
        _make_html_list("What to doubt", comparison.doubts),
        _make_html_list("What was found" if comparison.goal else "What differs", comparison.words),
        f'<h2>The runs</h2><table class="runs"><tr>{heads}</tr>{body}</table>{notes}',
    )


def _make_last_parts(comparison: ComparisonReport) -> tuple[str, ...]:
    return (
        _make_share_tables(comparison.groups),
        _make_html_list("The same in all of them", _describe_common(comparison.groups)),
    )


def _make_table_cells(comparison: ComparisonReport, row: Sequence[str]) -> str:
    return "".join(
        f"<td{' class=n' * is_number(comparison, name)}>{escape(cell)}</td>"
        for name, cell in zip(comparison.columns, row, strict=True)
    )


def _make_html_list(title: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>{escape(title)}</h2><ul>{items}</ul>" if lines else ""


def _make_share_tables(groups: Sequence[Group]) -> str:
    """Return the sums behind the sentences as HTML tables, for those who check them."""
    tables = []
    for title, parts_of, say in (
        ("Time of 1,000 samples, by phase", differences.compute_time_parts, format_milliseconds),
        ("Time of an epoch", compute_epoch_parts, format_seconds),
        ("Memory at the peak, by owner", differences.compute_memory_parts, format_mebibytes),
    ):
        measured = [(group, parts) for group in groups if (parts := parts_of(group))]
        names = list(dict.fromkeys(name for _, parts in measured for name in parts))
        if measured:
            heads = "".join(f'<th class="n">{escape(name)}</th>' for name in ("all", *names))
            rows = "".join(
                f"<tr><td>{escape(group.label)}</td>"
                + "".join(
                    f'<td class="n">{escape(say(size))}</td>'
                    for size in (sum(parts.values()), *(parts.get(n, 0.0) for n in names))
                )
                + "</tr>"
                for group, parts in measured[:MOST_ROWS]
            )
            table = f'<table class="runs"><tr><th></th>{heads}</tr>{rows}</table>'
            tables.append(f"<details><summary>{escape(title)}</summary>{table}</details>")
    return "".join(tables)


def _describe_common(groups: Sequence[Group]) -> list[str]:
    """Return what a reader has to know of all of these runs, where it is the same in all."""
    runs: list[MeasuredRun] = [run for group in groups for run in group.runs if run.params]
    sentences = []
    for name in SHARED_SETTINGS:
        values = {run.params.get(name, "") for run in runs}
        if len(values) == 1 and (value := values.pop()) not in ("", "None"):
            sentences.append(f"{name}: {make_printable(value, limit=200)}")
    for name in ("device", "device.model", "torch.version"):
        values = {run.tags.get(name, "") for run in runs if run.is_done}
        if len(values) == 1 and (value := values.pop()):
            sentences.append(f"{name}: {value}")
    return sentences
