"""A comparison from what was asked for to what is left of it: it trains in processes of their
own, as children of one run in MLflow, or reads runs that exist; and it shows the report on them
in the terminal, as a page, in MLflow and in Prefect.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from headroom.base import notebook
from headroom.base.names import Place, list_shown
from headroom.base.program import print_answer
from headroom.base.units import format_number
from headroom.comparison import page, search_space, trainings
from headroom.comparison.differences import find_work_classes, needs_recent_speeds
from headroom.comparison.grid import Cell, ComparisonRequest, GridCheck
from headroom.comparison.page import MAX_GROUPS, ComparisonReport
from headroom.comparison.run_groups import (
    RECENT_SPEED,
    Goal,
    Group,
    MeasuredRun,
    Points,
    choose_goal,
    find_best_group,
    group_runs,
    shorten_names,
)
from headroom.comparison.trainings import ComparisonFolder, TrainingEnd
from headroom.prefect.this_flow_run import move_process_tag, show_markdown
from headroom.process.redaction import redact_command_line
from headroom.run.findings import make_process_tags
from headroom.run.resume import make_timestamp
from headroom.services import serve
from headroom.tracking.mlflow_pages import ComparisonView, make_comparison_path
from headroom.tracking.tracking_settings import (
    TrackingError,
    TrackingSettings,
    read_tracking_settings,
)

if TYPE_CHECKING:
    from headroom.comparison.search import Trials
    from headroom.tracking.query_runs import ExperimentRuns

CURVE_POINTS = 1_000  # of a line in a picture
SHOWN = 5  # of the trainings that were taken over


@dataclass
class Comparison:
    """Runs side by side: where they come from, and what is to be kept of them."""

    request: ComparisonRequest
    store: ExperimentRuns
    title: str
    folder: Path  # of its page and its plots
    runs: Path  # where the folders of all runs are
    state: ComparisonFolder | None = None  # how far its trainings have come
    trials: Trials | None = None  # of a search
    status: str = "KILLED"  # of its run in MLflow, while it has not come to its end
    text: str = ""
    files: list[Path] = field(default_factory=list)
    cell_line: notebook.Line | None = None  # how far it is, in a notebook

    @property
    def trained(self) -> list[Cell]:
        """Return its trainings; of a search those that were drawn by now."""
        return self.trials.list_cells() if self.trials else self.request.cells

    def train(self) -> list[Group]:
        """Train all that has not ended yet, and return the trainings by group."""
        assert self.state is not None
        self.cell_line = notebook.make_line()
        source = self.trials or trainings.GridSource(self.state, self.request.cells)
        try:
            trainings.run_trainings(self.state, source, runs=self.runs, tell=self._tell)
        except (KeyboardInterrupt, SystemExit):  # by a signal
            print("\n".join(self._describe_interruption()), file=sys.stderr, flush=True)
            raise
        runs = _read_measured(self.store, self.trained, self.state)
        self.status = "FINISHED" if any(run.is_done for run in runs) else "FAILED"
        return (
            self.trials.make_groups(runs) if self.trials else group_runs(runs, self.request.varied)
        )

    def read(self) -> list[Group]:
        """Return the runs that were asked for, by group. Raises TrackingError."""
        groups = (
            self.store.read_runs(self.request.runs)
            if self.request.runs
            else self.store.read_newest(last=self.request.last, query=self.request.filter)
        )
        if not groups:
            where = self.store.where.experiment
            raise TrackingError(f"--filter: no training of {where!r} is found")
        self.title = f"{len(groups):,} runs of {self.store.where.experiment}"
        self.status = "FINISHED"
        return group_runs([MeasuredRun(**run) for run in groups])

    def compare(self, groups: Sequence[Group]) -> ComparisonReport:
        """Return the report on these groups; that on a search is told by its trials."""
        if self.trials is None:
            report = page.compare_groups(self._add_recent_speeds(groups), title=self.title)
        else:
            lines, goal = self.trials.describe(), self.trials.goal
            report = page.compare_groups(groups, title=self.title, goal=goal, lines=lines)
        if self.state is not None and self.state.taken_over:
            taken_over = self.state.taken_over
            labels = [cell.called for cell in self.trained if cell.number in taken_over]
            more = f" and {len(labels) - SHOWN:,} more" if len(labels) > SHOWN else ""
            said = "; ".join(labels[:SHOWN]) + more
            report.notes.append(f"Trained before an interruption, and taken over: {said}")
        return report

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
        self.folder.mkdir(parents=True, exist_ok=True)
        shown = [group.done[0].run_id for group in report.groups if group.done][:MAX_GROUPS]
        series: dict[str, Points] = {
            run_id: self.store.read_series(run_id, "train/loss", most=CURVE_POINTS)
            for run_id in shown
        }
        self.files = page.write_page(report, self.folder, series=series)
        self._print(report)
        self.text = page.make_markdown(report)
        if self.state is None:
            return
        if self.trials is not None and self.trials.best is not None:
            settings, again = self.trials.make_best_command()
            self.store.set_tags(self.state.run_id, {"best.command": again}, params=settings)
            self.say(f"Again    {again}")
            self.text += f"\n\n```\n{again}\n```"
        self._show_in_mlflow(report.groups, self.state.run_id)

    def say(self, line: str) -> None:
        """Print a line for a person."""
        if not self.request.json:
            print(line, flush=True)

    def describe(self, report: ComparisonReport) -> dict[str, Any]:
        """Return what it has found, for a program."""
        parent = self.state.run_id if self.state is not None else None
        return {**page.describe_report(report), "page": str(self.files[0]), "run_id": parent}

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

    def _show_in_mlflow(self, groups: Sequence[Group], run_id: str) -> None:
        """Save the view that shows the trainings, and give their parent the figures of the best."""
        goal = choose_goal(groups, self.trials.goal if self.trials is not None else None)
        done = [run for group in groups for run in group.done]
        view = ComparisonView(
            run_id,
            self.title,
            self.request.varied,
            goal.name if goal is not None else "",
            is_lower_better=goal is not None and goal.is_lower_better,
            is_grouped=any(len(group.runs) > 1 for group in groups),
            has_curves=any(run.metrics.get("train/epoch", 0) > 2 for run in done),
        )
        self.store.keep_view(view)
        best = find_best_group(groups, goal) if goal is not None else None
        if goal is None or best is None:
            return
        metrics = [*list_shown(Place.GOAL), *list_shown(Place.BEST_RUN)]
        figures = {metric: best.compute_median(metric) for metric in metrics}
        measured = {metric: value for metric, value in figures.items() if value is not None}
        # A search keeps its best trial's settings and tags itself.
        tags = {} if self.trials is not None else {"best": best.label}
        points = self.store.read_series(best.done[0].run_id, goal.name, most=CURVE_POINTS)
        step = points[-1][0] if points else 0  # where the best one's curve ends
        settings = best.settings if tags else None
        self.store.set_tags(run_id, tags, params=settings, metrics=measured, step=step)

    def _describe_interruption(self) -> list[str]:
        """Return how far the trainings have come, and what goes on with them."""
        assert self.state is not None
        words = [word for word in self.request.words if word != "--anew"]
        again = shlex.join(["python", "-m", "flows.compare", *redact_command_line(words)])
        ended = f"{len(self.state.ended)} of {self.request.count} trainings have ended"
        lines = [f"{ended}; the same command goes on with the others: {again}"]
        if self.trials is not None and (best := self.trials.describe_best()):
            lines.insert(0, f"So far {best}")
        return lines

    def _tell(self, cell: Cell, ended: TrainingEnd | None) -> None:
        """Print that a training begins, or how it ended; what a search knows of it, MLflow gets."""
        said = "begins" if ended is None else ended.status
        if ended is not None and ended.value is not None and self.trials is not None:
            said += f", {self.trials.goal.name} {format_number(ended.value)}"
        error = f": {ended.error}" if ended is not None and ended.error else ""
        line = f"{cell.number}/{self.request.count} {cell.called}: {said}{error}"
        if self.cell_line is not None:
            self.cell_line.write(line)
        else:
            print(line, file=sys.stderr, flush=True)
        if ended is None or self.trials is None or self.state is None:
            return
        if ended.status == "PRUNED" and ended.run_id:
            self.store.set_tags(ended.run_id, {"pruned": ended.error})
        if ended == self.trials.best:
            tags = {"best": cell.label, "best.run_id": ended.run_id, "best.value": str(ended.value)}
            self.store.set_tags(self.state.run_id, tags)


@contextmanager
def open_comparison(request: ComparisonRequest) -> Iterator[Comparison]:
    """Yield the comparison; where it trains, inside of the run in MLflow that holds the others.

    Raises ConfigError and TrackingError for what can be neither trained nor read.
    """
    move_process_tag()
    if not request.cells:
        comparison = _open_existing(request, read_tracking_settings())
        yield comparison
        show_markdown(comparison.text, f"comparison-{comparison.folder.name}", comparison.title)
        return
    comparison, state = _open_new(request)
    store, run_id = comparison.store, state.run_id
    try:
        yield comparison
    finally:
        store.end(run_id, status=comparison.status, text=comparison.text, files=comparison.files)
    state.is_over = True
    state.keep()
    ids = {"experiment_id": store.experiment_id, "run_id": run_id}
    path = make_comparison_path(**ids)
    link = serve.make_open_command(store.where.tracking_uri, **ids, path=path)
    comparison.say(f"Open     {link}")
    show_markdown(comparison.text, f"comparison-{run_id[:8]}", comparison.title)


def _open_existing(request: ComparisonRequest, chosen: TrackingSettings) -> Comparison:
    from headroom.tracking.query_runs import ExperimentRuns  # imports mlflow

    if chosen.database is not None and not chosen.database.is_file():
        raise TrackingError(f"tracking_uri: {chosen.database} is not there; nothing has run yet")
    store = ExperimentRuns(chosen, request.base.run.experiment, makes=False)
    runs = Path(chosen.runs)
    folder = runs.parent / "comparisons" / make_timestamp()
    return Comparison(request, store, "", folder, runs)


def _open_new(request: ComparisonRequest) -> tuple[Comparison, ComparisonFolder]:
    """Return the comparison, new or one that goes on, and how far its trainings have come."""
    check = GridCheck(request.cells)
    from headroom.tracking.query_runs import ExperimentRuns  # imports mlflow, while that looks

    check.answer()
    goal = _find_goal(request, check.tasks)
    chosen = read_tracking_settings()
    store = ExperimentRuns(chosen, request.base.run.experiment)
    runs = Path(chosen.runs)
    own = [word for word in request.words if word != "--anew"]
    words = [str(Path.cwd()), *redact_command_line(own)]
    state = trainings.open_comparison(
        runs.parent / "comparisons",
        " ".join(words),
        trainings.describe_inputs(request.cells, check.data),
        is_anew=request.is_anew,
    )
    trials = None
    if request.search is not None and goal is not None:
        from headroom.comparison.search import Trials  # imports Optuna

        trials = Trials(request.search, state, goal=goal, base=request.base)
    if state.ended:
        message = f"going on: {len(state.ended)} of {request.count} have ended"
        print(f"{message}, and are taken over; --anew trains all anew", file=sys.stderr)
    kind = "compare" if trials is None else "search"
    varied = ", ".join(shorten_names(request.varied)) or request.base.model.name
    name = request.base.run.name or f"{kind}-{varied} {make_timestamp()}"
    tags = make_process_tags("flows/compare.py")
    state.run_id = store.begin(state.run_id, name=name, count=request.count, tags=tags)
    state.keep()
    return Comparison(request, store, name, state.folder, runs, state, trials), state


def _find_goal(request: ComparisonRequest, tasks: list[str]) -> Goal | None:
    if request.search is None:
        return None
    return search_space.find_goal(request.search.goal, tasks, list(request.base.train.metrics))


def _read_measured(
    store: ExperimentRuns, trained: Sequence[Cell], state: ComparisonFolder
) -> list[MeasuredRun]:
    """Return the trainings as MLflow has them, and those that never had a run as they ended."""
    ends = [state.ended[cell.number] for cell in trained]
    by_id = {
        run["run_id"]: run for run in store.read_runs([end.run_id for end in ends if end.run_id])
    }
    runs = []
    for cell, end in zip(trained, ends, strict=True):
        run = by_id.get(end.run_id, {"run_id": "", "name": cell.label})
        params = {**run.get("params", {}), **cell.settings}  # as they were written
        outcome = {"status": end.status, "params": params, "error": end.error}
        runs.append(MeasuredRun(**{**run, **outcome}))
    return runs
