"""Groups side by side in pictures: how fast they are, where their time and memory went, and their
loss by steps and by seconds. It draws what was measured: no data, no picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.comparison.differences import memory_parts, time_parts
from tasks.comparison.run_groups import SPEED, Goal, Group, Points
from tasks.engine.report.plots import BLUE, GREEN, GREY, SKY, VERMILION, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 12  # groups that a picture shows
NEAR = 3  # times what was taken at most: a device that has more would leave no bars to see
LETTERS = 34  # of a label
INK = "#202020"
# Okabe and Ito's, as in the plots of a run, with the others of theirs.
OTHERS = ("#E69F00", "#CC79A7", "#999999", "#F0E442", "#000000")
COLOURS = (BLUE, VERMILION, GREEN, SKY, *OTHERS)

ALT = {
    "history": "What each trial came to, and the best so far",
    "speed": "Samples a second",
    "loss": "Training loss by step and by time",
    "time": "Where 1,000 samples spend their time",
    "memory": "Where the memory went at its peak",
}


def pictures(
    groups: Sequence[Group],
    series: Mapping[str, Points],
    folder: Path,
    *,
    goal: Goal | None = None,
) -> dict[str, Path]:
    """Write those whose data exist. series: of the training loss, by run_id. goal: of a search."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, Callable[[], Figure | None]] = {
        "history": lambda: _history(groups, goal) if goal is not None else None,
        "speed": lambda: _speed(groups),
        "loss": lambda: _loss(groups, series),
        "time": lambda: _stacked(groups, time_parts, "milliseconds of 1,000 samples"),
        "memory": lambda: _memory(groups),
    }
    files = {}
    for name, draw in drawn.items():
        if (figure := draw()) is not None:
            files[name] = folder / f"{name}.png"
            figure.savefig(files[name], metadata={"Software": None})
    return files


def _history(groups: Sequence[Group], goal: Goal) -> Figure | None:
    """By the number of the trial; a pruned one as far as it came."""
    values = {g.number: (g.state, g.runs[0].metrics.get(goal.name)) for g in groups}
    told = {n: (state, v) for n, (state, v) in sorted(values.items()) if v is not None}
    done = [(n, v) for n, (state, v) in told.items() if state == "FINISHED"]
    if not done:
        return None
    axes = panels(1)[0]
    for state, colour, mark in (("FINISHED", BLUE, "o"), ("PRUNED", GREY, "x")):
        points = [(n, v) for n, (of, v) in told.items() if of == state]
        if points:
            at, height = zip(*points, strict=True)
            axes.scatter(at, height, c=colour, marker=mark, label=state.lower())
    numbers, so_far = [n for n, _ in done], [v for _, v in done]
    best = [goal.best(so_far[: at + 1]) for at in range(len(done))]
    axes.step(
        [*numbers, max(values)], [*best, best[-1]], where="post", color=VERMILION, label="best"
    )
    axes.set_title(f"{goal.name} by trial", loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel("trial", fontsize=9, color=GREY)
    axes.locator_params(axis="x", integer=True)
    axes.legend(frameon=False, fontsize=8.5, handlelength=1.2)
    return axes.figure  # type: ignore[return-value]


def _label(group: Group) -> str:
    """The values alone: the title of the page says of what."""
    label = ", ".join(group.settings.values()) or group.label
    label = label if len(label) <= LETTERS else label[: LETTERS - 3] + "..."
    return label if group.called == group.label else f"#{group.number} {label}"


def _rows(groups: Sequence[Group], *, title: str) -> tuple[Axes, Figure]:
    axes = panels(1)[0]
    figure: Figure = axes.figure  # type: ignore[assignment]
    longest = max(len(_label(group)) for group in groups)
    figure.set_size_inches(8.0, 1.3 + 0.36 * max(len(groups), 3))
    figure.subplots_adjust(
        left=min(0.45, 0.04 + 0.0105 * longest),
        top=1 - 0.42 / figure.get_figheight(),
        bottom=0.55 / figure.get_figheight(),
    )
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_yticks(range(len(groups)), [_label(group) for group in groups], fontsize=9)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0, colors=INK)
    axes.grid(axis="x", color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    return axes, figure


def _speed(groups: Sequence[Group]) -> Figure | None:
    known = [group for group in groups if group.median(SPEED)][:MOST]
    if not known:
        return None
    axes, figure = _rows(known, title="samples a second")
    speeds = [group.median(SPEED) or 0.0 for group in known]
    spreads = [group.spread(SPEED) or 0.0 for group in known]
    axes.barh(range(len(known)), speeds, xerr=spreads, color=COLOURS[0], height=0.55)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlim(0, 1.18 * max(map(sum, zip(speeds, spreads, strict=True))))
    for place, (speed, spread) in enumerate(zip(speeds, spreads, strict=True)):
        said = f"  {speed:,.0f}" + (f" \u00b1 {spread:,.0f}" if spread else "")
        axes.text(speed + spread, place, said, va="center", fontsize=9, color=INK)
    return figure


def _stacked(
    groups: Sequence[Group], parts_of: Callable[[Group], dict[str, float]], title: str
) -> Figure | None:
    known = [(group, parts) for group in groups if (parts := parts_of(group))][:MOST]
    if not known:
        return None
    axes, figure = _rows([group for group, _ in known], title=title)
    names = list(dict.fromkeys(name for _, parts in known for name in parts))
    left = [0.0] * len(known)
    for colour, name in zip(COLOURS, names, strict=False):
        sizes = [max(0.0, parts.get(name, 0.0)) for _, parts in known]
        if any(sizes):
            axes.barh(range(len(known)), sizes, left=left, color=colour, height=0.55, label=name)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    high = figure.get_figheight()
    figure.subplots_adjust(bottom=0.85 / high)
    figure.legend(
        loc="lower left",
        bbox_to_anchor=(0.01, 0.02 / high),
        ncols=min(len(names), 6),
        frameon=False,
        fontsize=8.5,
        handlelength=0.9,
        columnspacing=1.1,
    )
    return figure


def _memory(groups: Sequence[Group]) -> Figure | None:
    """With what the device has in all, where all have the same: as a line where it is near."""
    figure = _stacked(groups, memory_parts, "MiB of tensors at the peak")
    totals = {group.tag("device.total_mib") for group in groups if group.done}
    if figure is None or len(totals) != 1 or not (total := next(iter(totals))):
        return figure
    axes = figure.axes[0]
    told = f"the device has {float(total):,.0f}"
    if float(total) <= NEAR * axes.get_xlim()[1]:
        axes.axvline(float(total), color=VERMILION, linewidth=1.2)
    axes.set_title(told, loc="right", fontsize=9, color=GREY)
    return figure


def _loss(groups: Sequence[Group], series: Mapping[str, Points]) -> Figure | None:
    lines = []
    for group in groups:
        run = next((run for run in group.done if series.get(run.run_id)), None)
        if run is not None:
            lines.append((_label(group), series[run.run_id]))
    if not lines:
        return None
    by_step, by_time = panels(2)
    titles = ((by_step, "training loss", "optimizer step"), (by_time, "by time", "s"))
    for axes, title, unit in titles:
        axes.set_xlabel(unit, fontsize=9, color=GREY)
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
        axes.grid(axis="y", color="#E6E6E6", linewidth=0.7)
        axes.set_axisbelow(True)
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
    by_step.legend(frameon=False, fontsize=8.5, labelcolor="linecolor", handlelength=1.2)
    return by_step.figure  # type: ignore[return-value]
