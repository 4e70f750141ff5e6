"""Draw a run in pictures: its losses and scores, its time, its memory, its confusion matrix,
and how it compares with the last runs. Only what was measured is drawn: no data, no picture. It
never uses pyplot, whose state is the process's, and imports matplotlib only when it draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headroom.base.names import Place, list_words
from headroom.base.units import format_number, format_percent
from headroom.report.report_sections import PARTS, Block, make_report, shorten_class_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by every kind of eye: https://jfly.uni-koeln.de/color/
BLUE, VERMILION, GREEN, SKY, GREY = "#0072B2", "#D55E00", "#009E73", "#56B4E9", "#595959"
INK = "#202020"
TITLE: dict[str, Any] = {"loc": "left", "fontsize": 11, "fontweight": "bold", "color": INK}
INCHES = (8.0, 4.6)
DPI = 150
MOST_POINTS = 4000  # of one line; the picture is 1,200 pixels wide

COLOURS = {  # of the lines of a plot, in the order in which it shows metrics
    Place.LOSS_PLOT: (BLUE, VERMILION),
    Place.MEMORY_PLOT: (SKY, SKY, BLUE, VERMILION),  # the same as a peak and as it is
    Place.HOST_PLOT: (GREEN,),
}

Points = list[tuple[float, float]]
Line = tuple[str, str, Points]  # label, colour, points


def load_matplotlib() -> None:
    """Import what drawing needs; the first time on a machine this lists its fonts."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure
    import matplotlib.font_manager  # noqa: F401


def draw_run_plots(run: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write loss.png, time.png, memory.png and val_confusion.png, those whose data exist; return
    their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = (
        *(("loss", _draw_loss(run)), ("time", _draw_time(run)), ("memory", _draw_memory(run))),
        *((f"{part}_confusion", draw_confusion_matrix(run, part)) for part in PARTS),
    )
    files = []
    for name, figure in drawn:
        if figure is not None:
            files.append(folder / f"{name}.png")
            figure.savefig(files[-1], metadata={"Software": None})
    return files


def _draw_loss(run: Mapping[str, Any]) -> Figure | None:
    losses = _read_lines(run, Place.LOSS_PLOT)
    score = next((s for s in list_words(Place.SCORE_PLOT) if _read_points(run, s[0])), None)
    if not losses and score is None:
        return None
    axes = make_panels(bool(losses) + (score is not None))
    if losses:
        _draw_lines(axes[0], losses, "loss")
        values = [y for _, _, points in losses for _, y in points]
        if min(values) > 0 and max(values) > 50 * min(values):
            axes[0].set_yscale("log")
            axes[0].yaxis.set_major_formatter("{x:g}")
    if score is not None:
        name, title = score
        points = _read_points(run, name)
        _draw_lines(axes[-1], [("", GREEN, points)], title)
        value = (run.get("metrics") or {}).get(name)
        marked = next((p for p in points if p[1] == value), points[-1])  # of the weights kept
        _mark_point(axes[-1], marked, f"{marked[1]:.4g}")
    return axes[0].figure  # type: ignore[return-value]


def _draw_time(run: Mapping[str, Any]) -> Figure | None:
    return _draw_bar_charts(_find_blocks(run, "Time"), BLUE)


def _draw_memory(run: Mapping[str, Any]) -> Figure | None:
    series = [
        (title, lines)
        for title, lines in (
            ("device", _drop_repeated_colours(_read_lines(run, Place.MEMORY_PLOT))),
            ("host process", _read_lines(run, Place.HOST_PLOT)),
        )
        if lines
    ]
    blocks = _find_blocks(run, "Memory")[:1]
    if not series and not blocks:
        return None
    axes = make_panels(min(2, len(series) + len(blocks)))
    for ax, (title, lines) in zip(axes, series, strict=False):
        unit, scale = _choose_unit(max(y for _, _, points in lines for _, y in points))
        scaled = [(n, c, [(x, y / scale) for x, y in points]) for n, c, points in lines]
        _draw_lines(ax, scaled, f"{title} memory, {unit}")
        ax.set_ylim(0, 1.08 * max(ax.get_ylim()[1], 1e-9))
    if len(series) < len(axes):
        _draw_bars(axes[-1], blocks[0], GREEN)
    return axes[0].figure  # type: ignore[return-value]


def _choose_unit(largest_mib: float) -> tuple[str, float]:
    return ("GiB", 1024.0) if largest_mib >= 1000 else ("MiB", 1.0)


def _read_points(run: Mapping[str, Any], name: str) -> Points:
    """Return the finite values of a series by step, thinned to what a picture can show."""
    series = (run.get("series") or {}).get(name) or ()
    first: dict[float, float] = {}  # of a step: what is said again at the end is of a kept epoch
    for p in series:
        first.setdefault(float(p[0]), float(p[1]))
    points = sorted(first.items())
    points = [p for p in points if math.isfinite(p[1]) and abs(p[1]) < 1e300]  # MLflow's inf
    stride = -(-len(points) // MOST_POINTS) or 1
    return points[::stride]


def _read_lines(run: Mapping[str, Any], place: Place) -> list[Line]:
    wanted = zip(list_words(place), COLOURS[place], strict=True)
    lines = [(label, colour, _read_points(run, name)) for (name, label), colour in wanted]
    return [line for line in lines if line[2]]


def _drop_repeated_colours(lines: list[Line]) -> list[Line]:
    """Return at most one line a colour: the peak stands for its current value too."""
    kept: dict[str, Line] = {}
    for line in lines:
        kept.setdefault(line[1], line)
    return list(kept.values())


def _find_blocks(run: Mapping[str, Any], title: str) -> tuple[Block, ...]:
    blocks = [s.blocks for s in make_report(run).sections if s.title == title]
    return blocks[0] if blocks else ()


def make_panels(count: int) -> list[Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, count, squeeze=False)[0]
    figure.subplots_adjust(left=0.125, right=0.97, top=0.9, bottom=0.13, wspace=0.36)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color("#B0B0B0")
        ax.tick_params(colors=GREY, labelsize=9, length=3)
    return list(axes)


def label_axes(ax: Axes, title: str, *, unit: str = "", grid: Literal["x", "y"] = "y") -> None:
    """Write the title above and the unit below, and draw a light grid behind."""
    ax.set_title(title, **TITLE)
    ax.set_xlabel(unit, fontsize=9, color=GREY)
    ax.grid(axis=grid, color="#E6E6E6", linewidth=0.7)
    ax.set_axisbelow(True)


def place_legend(ax: Axes, *, colours: Sequence[str] | None = None) -> None:
    """Draw the legend below the axes, where no line is."""
    figure = ax.figure
    figure.subplots_adjust(bottom=0.2)
    ax.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        ncols=3,
        frameon=False,
        fontsize=9,
        labelcolor=colours,
        handlelength=1.2,
        columnspacing=1.2,
    )


def _draw_lines(ax: Axes, lines: list[Line], title: str) -> None:
    label_axes(ax, title, unit="optimizer step")
    ax.locator_params(axis="x", integer=True, nbins=7)
    for label, colour, points in lines:
        x, y = zip(*points, strict=True)
        marker = "o" if len(points) < 2 else ""
        ax.plot(x, y, color=colour, linewidth=1.7, label=label, marker=marker, markersize=4)
    if len(lines) > 1:
        place_legend(ax, colours=[colour for _, colour, _ in lines])


def _mark_point(ax: Axes, point: tuple[float, float], text: str) -> None:
    ax.plot(*point, marker="o", markersize=5, color=GREEN)
    is_early = point[0] < sum(ax.get_xlim()) / 2  # where the curve still rises on its left
    ax.annotate(
        text,
        point,
        xytext=(0, -16),
        textcoords="offset points",
        ha="left" if is_early else "right",
        fontsize=10,
        fontweight="bold",
        color=GREEN,
    )


def _draw_bar_charts(blocks: Sequence[Block], colour: str) -> Figure | None:
    if not blocks:
        return None
    axes = make_panels(len(blocks))
    if len(blocks) > 2:  # each with room for its labels and its words
        width = 4.8 * len(blocks)
        axes[0].figure.set_size_inches(width, INCHES[1])  # type: ignore[union-attr]
        axes[0].figure.subplots_adjust(left=1.0 / width, wspace=0.5)
    for ax, block in zip(axes, blocks, strict=True):
        _draw_bars(ax, block, colour)
    return axes[0].figure  # type: ignore[return-value]


def _draw_bars(ax: Axes, block: Block, colour: str) -> None:
    """Draw horizontal bars, the first on top, each with its size written at its end."""
    ax.set_title(block.title, **TITLE)
    places = range(len(block.bars))
    ax.barh(places, [bar.length for bar in block.bars], color=colour, height=0.55)
    ax.set_yticks(places, [bar.label for bar in block.bars], fontsize=10)
    ax.set_ylim(max(len(block.bars), 5) - 0.5, -0.5)  # few bars stay as thin as many
    ax.set_xlim(0, 1.6)  # room for the words
    ax.set_xticks([])
    ax.spines["bottom"].set_visible(False)
    ax.tick_params(axis="y", length=0, colors=INK)
    for place, bar in zip(places, block.bars, strict=True):
        share = "" if bar.share is None else f"   {format_percent(bar.share)}"
        ax.text(bar.length + 0.02, place, bar.value + share, va="center", fontsize=10)


COLUMNS = 3
CAPTION = (
    "runs, this one at 0; grey: within the limit for three in a row; dashed: that for one; "
    "green: the level that it once had"
)


def draw_trend(run: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write trend.png, where there is a trend, and return its path."""
    trends = [one for one in run.get("trend") or () if math.isfinite(one["values"][-1])]
    if not trends:
        return []
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    columns = min(COLUMNS, len(trends))
    axes = [*figure.subplots(-(-len(trends) // columns), columns, squeeze=False).flat]
    for ax, one in zip(axes, trends, strict=False):
        _draw_trend_panel(ax, one)
    for ax in axes[len(trends) :]:
        ax.set_axis_off()
    figure.supxlabel(CAPTION, fontsize=9, color=GREY)
    figure.savefig(folder / "trend.png", metadata={"Software": None})
    return [folder / "trend.png"]


def _draw_trend_panel(ax: Axes, one: Mapping[str, Any]) -> None:
    """Draw the runs from left to right, this one last; grey: as far as the limit for three in a
    row."""
    values, middle, near, far = one["values"], one["median"], one["near"], one["far"]
    places = range(1 - len(values), 1)
    colour = VERMILION if one["beyond"] else GREEN
    ax.axhspan(min(near, 2 * middle - near), max(near, 2 * middle - near), color="#ECECEC")
    ax.axhline(middle, color=GREY, linewidth=0.9, linestyle=":")
    ax.axhline(one.get("level", middle), color=GREEN, linewidth=0.9, linestyle="-.")
    low, high = min([*values, near, middle]), max([*values, near, middle])
    room = 0.15 * (high - low) or 1.0
    ax.set_ylim(low - room, high + room)
    ax.axhline(far, color=VERMILION, linewidth=0.9, linestyle="--")  # where it is not far outside
    ax.plot(places, values, color=BLUE, linewidth=1.2, marker="o", markersize=2.5)
    ax.plot(0, values[-1], color=colour, marker="o", markersize=7)
    name = dict(list_words(Place.TREND_PLOT)).get(one["metric"], one["metric"])
    title = f"{name}: {format_number(values[-1])}"
    ax.set_title(title, loc="left", fontsize=9, fontweight="bold", color=colour)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("#B0B0B0")
    ax.tick_params(colors=GREY, labelsize=8, length=3)
    ax.locator_params(axis="x", integer=True, nbins=5)
    ax.locator_params(axis="y", nbins=5)
    ax.ticklabel_format(axis="y", useOffset=False, style="plain")


NAMES_SHOWN = 24  # letters of a class on the picture
FEW_CLASSES = 12  # classes: names lie straight, numbers are large


def draw_confusion_matrix(run: Mapping[str, Any], part: str) -> Figure | None:
    """Draw the confusion matrix of this part: a line a class, coloured by the share of its rows."""
    classes = (run.get("classes") or {}).get(part)
    if not classes:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names, matrix = (
        [shorten_class_name(name, NAMES_SHOWN) for name in classes["drawn"]],
        classes["matrix"],
    )
    count = len(names)
    side = min(12.0, max(4.6, 1.8 + 0.34 * count))
    figure = Figure(figsize=(side + 0.6, side), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    shares = [[cell / (sum(line) or 1) for cell in line] for line in matrix]
    ax.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    size = 10 if count <= FEW_CLASSES else 6.5
    for i, line in enumerate(matrix):
        for j, cell in enumerate(line):
            if cell:
                colour = "white" if shares[i][j] > 0.5 else INK
                text = f"{cell}" if cell < 10_000 else f"{cell / 1000:.0f}k"
                ax.text(j, i, text, ha="center", va="center", fontsize=size, color=colour)
    ax.set_xticks(range(count), names, rotation=0 if _may_show_names(names) else 90, fontsize=9)
    ax.set_yticks(range(count), names, fontsize=9)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("predicted class", fontsize=9, color=GREY)
    ax.set_ylabel("true class", fontsize=9, color=GREY)
    some = "" if count == classes["count"] else f", the {count} most confused of {classes['count']}"
    ax.set_title(f"{PARTS[part].capitalize()} rows by class{some}", **TITLE)
    return figure


def _may_show_names(names: list[str]) -> bool:
    return len(names) <= FEW_CLASSES and max(map(len, names)) * len(names) <= 48
