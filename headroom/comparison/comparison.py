"""A comparison of runs that exist, from what was asked for to what is left of it: it reads them
from MLflow, and shows the report on them in the terminal and as a page. It imports neither PyTorch
nor Prefect, and MLflow when it is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from headroom.base import notebook
from headroom.base.program import print_answer
from headroom.comparison import page
from headroom.comparison.differences import find_work_classes, needs_recent_speeds
from headroom.comparison.grid import ComparisonRequest
from headroom.comparison.page import MAX_GROUPS, ComparisonReport
from headroom.comparison.run_groups import RECENT_SPEED, Group, MeasuredRun, Points, group_runs
from headroom.run.known_runs import make_timestamp
from headroom.tracking.tracking_settings import TrackingError, read_tracking_settings

if TYPE_CHECKING:
    from headroom.tracking.query_runs import ExperimentRuns

CURVE_POINTS = 1_000  # of a line in a picture


@dataclass
class Comparison:
    """Runs side by side, and what is kept of them."""

    request: ComparisonRequest
    store: ExperimentRuns
    title: str
    folder: Path  # of its page and its plots
    text: str = ""
    files: list[Path] = field(default_factory=list)
    status = "FINISHED"

    def run(self) -> ComparisonReport:
        """Bring the runs together, compare them, and show the report. Raises TrackingError."""
        report = self.compare(self.measure())
        self.publish(report)
        return report

    def measure(self) -> list[Group]:
        """Return the runs that were asked for, by group. Raises TrackingError."""
        runs = (
            self.store.read_runs(self.request.runs)
            if self.request.runs
            else self.store.read_newest(last=self.request.last, query=self.request.filter)
        )
        if not runs:
            where = self.store.where.experiment
            raise TrackingError(f"--filter: no training of {where!r} is found")
        self.title = f"{len(runs):,} runs of {self.store.where.experiment}"
        return group_runs([MeasuredRun(**run) for run in runs])

    def compare(self, groups: Sequence[Group]) -> ComparisonReport:
        """Return the report on these groups."""
        return page.compare_groups(self._add_recent_speeds(groups), title=self.title)

    def _add_recent_speeds(self, groups: Sequence[Group]) -> Sequence[Group]:
        """Return the groups with what their runs' speeds were, where nothing else shows how much
        these vary."""
        if len(groups) < 2 or not needs_recent_speeds(find_work_classes(groups)):
            return groups

        def read(run: MeasuredRun) -> MeasuredRun:
            points = self.store.read_series(run.run_id, RECENT_SPEED, most=CURVE_POINTS)
            return replace(run, recent_speeds=[value for _, _, value in points])

        return [replace(g, runs=[read(r) if r.is_done else r for r in g.runs]) for g in groups]

    def publish(self, report: ComparisonReport) -> None:
        """Print the report, and write its page and its plots."""
        shown = [group.done[0].run_id for group in report.groups if group.done][:MAX_GROUPS]
        series: dict[str, Points] = {
            run_id: self.store.read_series(run_id, "train/loss", most=CURVE_POINTS)
            for run_id in shown
        }
        self.files = page.write_page(report, self.folder, series=series)
        self._print(report)
        self.text = page.make_markdown(report)

    def describe(self, report: ComparisonReport) -> dict[str, Any]:
        """Return what it has found, for a program."""
        return {**page.describe_report(report), "page": str(self.files[0]), "run_id": None}

    def say(self, line: str) -> None:
        """Print a line for a person."""
        if not self.request.json:
            print(line, flush=True)

    def _print(self, report: ComparisonReport) -> None:
        """Print the report, or all of it as one object for a program; show it in a notebook."""
        if self.request.json:
            return print_answer(self.describe(report))
        if notebook.find_shell() is not None:
            html = page.make_comparison_fragment(report)
            return notebook.show(html, page.make_markdown(report))
        console = Console(highlight=False)
        for line in report.doubts:
            console.print(f"! {line}", markup=False)
        console.print(page.make_terminal_table(report, width=console.width))
        for line in (*report.words, *report.notes):
            console.print(f"- {line}", markup=False)
        return console.print(f"Page     {self.files[0]}", markup=False, soft_wrap=True)


def open_existing(request: ComparisonRequest) -> Comparison:
    """Return the comparison of runs that exist. Raises TrackingError."""
    from headroom.tracking.query_runs import ExperimentRuns  # imports mlflow

    chosen = read_tracking_settings()
    if chosen.database is not None and not chosen.database.is_file():
        raise TrackingError(f"tracking_uri: {chosen.database} is not there; nothing has run yet")
    store = ExperimentRuns(chosen, request.base.run.experiment, makes=False)
    folder = Path(chosen.runs).parent / "comparisons" / make_timestamp()
    return Comparison(request, store, "", folder)
