"""What a classification has made of each class: a line and a table of a report, and the confusion
matrix as a picture. It says nothing of other tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tasks.engine.base.units import number, printable
from tasks.engine.report.report_parts import Grid, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = {"val": "validation", "test": "test"}
HEAD = ("class", "rows", "precision", "recall", "F1")
WORST = 3  # classes that the line names
NAMES_SHOWN = 24  # letters of a class on the picture
FEW = 12  # classes: names lie straight, numbers are large


def classes(run: Mapping[str, Any], *, limit: int) -> Section:
    """The rows by class, of each part that was judged."""
    lines, grids = [], []
    for part, found in (run.get("classes") or {}).items():
        listed = [(_name(row[0], limit), *row[1:]) for row in found["listed"]]
        worst = sorted(listed, key=lambda row: row[-1])[:WORST]
        told = ", ".join(f"{name}: {number(f1)} ({rows:,} rows)" for name, rows, *_, f1 in worst)
        lines.append(f"lowest F1 of the {PARTS[part]} rows: {told}")
        title = f"{PARTS[part]} rows by class"
        if len(listed) < found["count"]:
            title += f", the {len(listed)} of {found['count']} with the lowest F1"
        rows = tuple(
            (name, f"{count:,}", *(f"{value:.3f}" for value in values))
            for name, count, *values in listed
        )
        grids.append(Grid(title, HEAD, rows))
    return Section("Classes", tuple(lines), grids=tuple(grids))


def confusion(run: Mapping[str, Any], part: str) -> Figure | None:
    """The confusion matrix of this part: a line a class, coloured by the share of its rows."""
    found = (run.get("classes") or {}).get(part)
    if not found:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names, matrix = [_name(name, NAMES_SHOWN) for name in found["drawn"]], found["matrix"]
    count = len(names)
    side = min(12.0, max(4.6, 1.8 + 0.34 * count))
    figure = Figure(figsize=(side + 0.6, side), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    shares = [[cell / (sum(line) or 1) for cell in line] for line in matrix]
    ax.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    size = 10 if count <= FEW else 6.5
    for i, line in enumerate(matrix):
        for j, cell in enumerate(line):
            if cell:
                colour = "white" if shares[i][j] > 0.5 else "#202020"
                text = f"{cell}" if cell < 10_000 else f"{cell / 1000:.0f}k"
                ax.text(j, i, text, ha="center", va="center", fontsize=size, color=colour)
    ax.set_xticks(range(count), names, rotation=0 if _fit(names) else 90, fontsize=9)
    ax.set_yticks(range(count), names, fontsize=9)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("predicted class", fontsize=9, color="#595959")
    ax.set_ylabel("true class", fontsize=9, color="#595959")
    some = "" if count == found["count"] else f", the {count} most confused of {found['count']}"
    ax.set_title(
        f"{PARTS[part].capitalize()} rows by class{some}",
        loc="left",
        fontsize=11,
        fontweight="bold",
        color="#202020",
    )
    return figure


def _name(name: Any, limit: int) -> str:
    return printable(name, limit=min(limit, 40)) or "(empty)"


def _fit(names: list[str]) -> bool:
    return len(names) <= FEW and max(map(len, names)) * len(names) <= 48
