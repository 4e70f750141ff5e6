"""The figures that a run is compared by, over the last runs, with the limits that its gate went by.
No history, no picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.engine.base.units import number
from tasks.engine.report.plots import BLUE, DPI, GREEN, GREY, INCHES, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES = {
    "speed/samples_per_s": "samples a second",
    "time/fast_step_ms": "fast step, ms",
    "memory/run_peak_allocated_mib": "peak memory, MiB",
    "memory/leaked_mib": "leaked, MiB",
}
COLUMNS = 3
CAPTION = "runs, this one at 0; grey: within the limit for three in a row; dashed: that for one"


def plots(run: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write trend.png, where there is a trend; its path."""
    found = [one for one in run.get("trend") or () if math.isfinite(one["values"][-1])]
    if not found:
        return []
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    columns = min(COLUMNS, len(found))
    axes = [*figure.subplots(-(-len(found) // columns), columns, squeeze=False).flat]
    for ax, one in zip(axes, found, strict=False):
        _draw(ax, one)
    for ax in axes[len(found) :]:
        ax.set_axis_off()
    figure.supxlabel(CAPTION, fontsize=9, color=GREY)
    figure.savefig(folder / "trend.png", metadata={"Software": None})
    return [folder / "trend.png"]


def _draw(ax: Axes, one: Mapping[str, Any]) -> None:
    """Runs from left to right, this one last; grey: as far as the limit for three in a row."""
    values, middle, near, far = one["values"], one["median"], one["near"], one["far"]
    places = range(1 - len(values), 1)
    colour = VERMILION if one["beyond"] else GREEN
    ax.axhspan(min(near, 2 * middle - near), max(near, 2 * middle - near), color="#ECECEC")
    ax.axhline(middle, color=GREY, linewidth=0.9, linestyle=":")
    low, high = min([*values, near, middle]), max([*values, near, middle])
    room = 0.15 * (high - low) or 1.0
    ax.set_ylim(low - room, high + room)
    ax.axhline(far, color=VERMILION, linewidth=0.9, linestyle="--")  # where it is not far outside
    ax.plot(places, values, color=BLUE, linewidth=1.2, marker="o", markersize=2.5)
    ax.plot(0, values[-1], color=colour, marker="o", markersize=7)
    title = f"{TITLES.get(one['metric'], one['metric'])}: {number(values[-1])}"
    ax.set_title(title, loc="left", fontsize=9, fontweight="bold", color=colour)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("#B0B0B0")
    ax.tick_params(colors=GREY, labelsize=8, length=3)
    ax.locator_params(axis="x", integer=True, nbins=5)
    ax.locator_params(axis="y", nbins=5)
    ax.ticklabel_format(axis="y", useOffset=False, style="plain")
