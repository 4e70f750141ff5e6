"""A comparison that trains: each training in a process of its own, as a child of one run in MLflow,
which keeps the report, as the flow run in Prefect does. One that was interrupted goes on.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headroom.base import notebook
from headroom.base.names import Place, list_shown
from headroom.base.units import format_number
from headroom.comparison import page, search_space, trainings
from headroom.comparison.comparison import CURVE_POINTS, Comparison
from headroom.comparison.grid import Cell, ComparisonRequest, GridCheck
from headroom.comparison.page import ComparisonReport
from headroom.comparison.run_groups import (
    Goal,
    Group,
    MeasuredRun,
    choose_goal,
    find_best_group,
    group_runs,
    shorten_names,
)
from headroom.comparison.trainings import ComparisonFolder, TrainingEnd
from headroom.process.redaction import redact_command_line
from headroom.run.findings import make_process_tags
from headroom.run.known_runs import make_timestamp
from headroom.services import serve
from headroom.tracking.mlflow_pages import ComparisonView, make_comparison_path
from headroom.tracking.tracking_settings import read_tracking_settings

if TYPE_CHECKING:
    from headroom.comparison.search import Trials
    from headroom.tracking.query_runs import ExperimentRuns

SHOWN = 5  # of the trainings that were taken over


@dataclass(kw_only=True)
class TrainedComparison(Comparison):
    """Trainings side by side, from the first that begins to the report on all of them."""

    runs: Path  # where the folders of all runs are
    state: ComparisonFolder  # how far its trainings have come
    trials: Trials | None  # of a search
    status: str = "KILLED"  # of its run in MLflow, while it has not come to its end
    cell_line: notebook.Line | None = None  # how far it is, in a notebook

    @property
    def trained(self) -> list[Cell]:
        """Return its trainings; of a search those that were drawn by now."""
        return self.trials.list_cells() if self.trials else self.request.cells

    def measure(self) -> list[Group]:
        """Train all that has not ended yet, and return the trainings by group."""
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

    def compare(self, groups: Sequence[Group]) -> ComparisonReport:
        """Return the report on these groups; that on a search is told by its trials."""
        if self.trials is None:
            report = super().compare(groups)
        else:
            lines, goal = self.trials.describe(), self.trials.goal
            report = page.compare_groups(groups, title=self.title, goal=goal, lines=lines)
        if self.state.taken_over:
            taken_over = self.state.taken_over
            labels = [cell.called for cell in self.trained if cell.number in taken_over]
            more = f" and {len(labels) - SHOWN:,} more" if len(labels) > SHOWN else ""
            said = "; ".join(labels[:SHOWN]) + more
            report.notes.append(f"Trained before an interruption, and taken over: {said}")
        return report

    def publish(self, report: ComparisonReport) -> None:
        """Print the report, write its page and its plots, and show in MLflow what was best."""
        super().publish(report)
        if self.trials is not None and self.trials.best is not None:
            settings, again = self.trials.make_best_command()
            self.store.set_tags(self.state.run_id, {"best.command": again}, params=settings)
            self.say(f"Again    {again}")
            self.text += f"\n\n```\n{again}\n```"
        self._show_in_mlflow(report.groups)

    def describe(self, report: ComparisonReport) -> dict[str, Any]:
        """Return what it has found, for a program, with the run that holds the others."""
        return {**super().describe(report), "run_id": self.state.run_id}

    def _show_in_mlflow(self, groups: Sequence[Group]) -> None:
        """Save the view that shows the trainings, and give their parent the figures of the best."""
        goal = choose_goal(groups, self.trials.goal if self.trials is not None else None)
        run_id = self.state.run_id
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
        if ended is None or self.trials is None:
            return
        if ended.status == "PRUNED" and ended.run_id:
            self.store.set_tags(ended.run_id, {"pruned": ended.error})
        if ended == self.trials.best:
            tags = {"best": cell.label, "best.run_id": ended.run_id, "best.value": str(ended.value)}
            self.store.set_tags(self.state.run_id, tags)


@contextmanager
def open_new(request: ComparisonRequest) -> Iterator[TrainedComparison]:
    """Yield the comparison, new or one that goes on, inside of the run in MLflow that holds its
    trainings. Raises ConfigError and TrackingError for what can't be trained."""
    comparison = _begin(request)
    store, state = comparison.store, comparison.state
    try:
        yield comparison
    finally:
        files = comparison.files
        store.end(state.run_id, status=comparison.status, text=comparison.text, files=files)
    state.is_over = True
    state.keep()
    ids = {"experiment_id": store.experiment_id, "run_id": state.run_id}
    path = make_comparison_path(**ids)
    link = serve.make_open_command(store.where.tracking_uri, **ids, path=path)
    comparison.say(f"Open     {link}")


def _begin(request: ComparisonRequest) -> TrainedComparison:
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
    return TrainedComparison(
        request, store, name, state.folder, runs=runs, state=state, trials=trials
    )


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
