"""Compares trainings: the same one on several devices or over settings, each in a process
of its own and a child of one run in MLflow; or runs that exist. `python -m flows.compare`
runs it.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from tasks.process import home, signals

    signals.protect_standard_streams()
    signals.install_signal_handlers()
    home.provide()
    # It answers --help and bad settings before prefect is imported.
    from flows.cli.compare_command import main
    from flows.cli.train_command import exit_process

    exit_process(main(sys.argv[1:]))

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect.runtime import flow_run
from rich.console import Console

from flows.cli.compare_command import parse_comparison
from tasks.comparison import page, search_space, trainings
from tasks.comparison.grid import Cell, ComparisonRequest, GridCheck
from tasks.comparison.page import MAX_GROUPS
from tasks.comparison.run_groups import (
    FIGURES,
    Goal,
    Group,
    MeasuredRun,
    Points,
    find_best_group,
    find_score,
    group_runs,
    shorten_names,
)
from tasks.comparison.trainings import TrainingEnd
from tasks.engine.base.units import format_number, make_printable
from tasks.process.redaction import redact_command_line, redact_errors
from tasks.run.findings import make_process_tags
from tasks.run.flow_run import CalledFlow, show_markdown
from tasks.run.gate import LOWER_IS_BETTER
from tasks.run.resume import make_timestamp
from tasks.services import serve
from tasks.tracking.mlflow_pages import ComparisonView, make_comparison_path
from tasks.tracking.where import TrackingError, read_tracking_settings

if TYPE_CHECKING:
    from tasks.comparison.search import Trials
    from tasks.tracking.query_runs import ExperimentRuns

CURVE_POINTS = 1_000  # of a line in a picture


def _hide_secrets(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"words": redact_command_line(parameters["words"])}


def _make_name() -> str:
    return make_printable(" ".join(["compare", *flow_run.parameters["words"]]), limit=100)


@partial(
    CalledFlow,
    name="compare",
    shown=_hide_secrets,
    flow_run_name=_make_name,
    validate_parameters=False,
)
def compare(words: list[str], plan: ComparisonRequest | None = None) -> int:
    """Train what the words of the command line ask for, or read the runs that they name.

    Args:
        words: As behind `python -m flows.compare`, e.g. ["--vary", "train.batch_size=64,256"].
        plan: What they mean, where that is known already.
    """
    with redact_errors():
        asked = plan or parse_comparison(words)
        return _train_all(asked) if asked.cells else _read_runs(asked)


def _train_all(asked: ComparisonRequest) -> int:
    check = GridCheck(asked.cells)
    from tasks.tracking.query_runs import ExperimentRuns  # imports mlflow, while that looks

    check.answer()
    goal = None
    if asked.search is not None:
        goal = search_space.find_goal(
            asked.search.goal, check.tasks, list(asked.base.train.metrics)
        )
    chosen = read_tracking_settings()
    store = ExperimentRuns(chosen, asked.base.run.experiment)
    place = Path(chosen.runs).parent / "comparisons"
    words = [str(Path.cwd()), *redact_command_line(asked.words)]
    comparison = trainings.open_comparison(place, " ".join(words))
    trials = None
    if asked.search is not None and goal is not None:
        from tasks.comparison.search import Trials  # imports Optuna

        trials = Trials(asked.search, comparison, goal=goal, base=asked.base)
    count = asked.search.trials if asked.search is not None else len(asked.cells)
    title = ", ".join(shorten_names(asked.varied)) or asked.base.model.name
    if comparison.ended:
        print(f"going on: {len(comparison.ended)} of {count} have ended", file=sys.stderr)
    kind = "compare" if trials is None else "search"
    name = asked.base.run.name or f"{kind}-{title} {make_timestamp()}"
    tags = make_process_tags("flows/compare.py")
    comparison.run_id = store.begin(comparison.run_id, name=name, count=count, tags=tags)
    comparison.keep()
    status = "KILLED"
    text, files = "", list[Path]()
    try:
        source = trials or trainings.GridSource(comparison, asked.cells)
        tell = _make_teller(count, store, trials)
        trainings.run_trainings(comparison, source, runs=Path(chosen.runs), tell=tell)
        runs = _read_measured(store, trials.list_cells() if trials else asked.cells, comparison)
        groups = trials.make_groups(runs) if trials else group_runs(runs, asked.varied)
        _show_in_mlflow(store, groups, asked.varied, comparison.run_id, name, trials)
        text, files = _write_report(store, groups, name, comparison.folder, trials)
        status = "FINISHED" if any(run.is_done for run in runs) else "FAILED"
    finally:
        store.end(comparison.run_id, status=status, text=text, files=files)
    comparison.is_over = True
    comparison.keep()
    ids = {"experiment_id": store.experiment_id, "run_id": comparison.run_id}
    path = make_comparison_path(**ids)
    opened = serve.make_open_command(store.where.tracking_uri, **ids, path=path)
    print(f"Open     {opened}", flush=True)
    show_markdown(text, f"comparison-{comparison.run_id}", name)
    return 0 if status == "FINISHED" else 1


def _read_runs(asked: ComparisonRequest) -> int:
    from tasks.tracking.query_runs import ExperimentRuns

    chosen = read_tracking_settings()
    if chosen.database is not None and not chosen.database.is_file():
        raise TrackingError(f"tracking_uri: {chosen.database} is not there; nothing has run yet")
    store = ExperimentRuns(chosen, asked.base.run.experiment, makes=False)
    query = asked.filter
    found = (
        store.read_runs(asked.runs)
        if asked.runs
        else store.read_newest(last=asked.last, query=query)
    )
    if not found:
        raise TrackingError(f"--filter: no training of {store.where.experiment!r} is found")
    runs = [MeasuredRun(**run) for run in found]
    folder = Path(chosen.runs).parent / "comparisons" / make_timestamp()
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{len(runs):,} runs of {store.where.experiment}"
    text, _ = _write_report(store, group_runs(runs), title, folder)
    show_markdown(text, f"comparison-{folder.name}", title)
    return 0


def _make_teller(
    count: int, store: ExperimentRuns, trials: Trials | None
) -> Callable[[Cell, TrainingEnd | None], None]:
    def tell(cell: Cell, ended: TrainingEnd | None) -> None:
        said = "begins" if ended is None else ended.status
        if ended is not None and ended.value is not None and trials is not None:
            said += f", {trials.goal.name} {format_number(ended.value)}"
        error = f": {ended.error}" if ended is not None and ended.error else ""
        print(f"{cell.number}/{count} {cell.label}: {said}{error}", file=sys.stderr, flush=True)
        if ended is not None and ended.status == "PRUNED" and ended.run_id:
            store.set_tags(ended.run_id, {"pruned": ended.error})
        if ended is not None and trials is not None and ended == trials.best:
            tags = {"best": cell.label, "best.run_id": ended.run_id, "best.value": str(ended.value)}
            store.set_tags(trials.comparison.run_id, tags)

    return tell


def _read_measured(
    store: ExperimentRuns, trained: Sequence[Cell], comparison: trainings.ComparisonFolder
) -> list[MeasuredRun]:
    """Return the trainings as MLflow has them, and those that never had a run as they ended."""
    ends = [comparison.ended[cell.number] for cell in trained]
    found = {
        run["run_id"]: run for run in store.read_runs([end.run_id for end in ends if end.run_id])
    }
    runs = []
    for cell, end in zip(trained, ends, strict=True):
        run = found.get(end.run_id, {"run_id": "", "name": cell.label})
        params = {**run.get("params", {}), **cell.settings}  # as they were written
        told = {"status": end.status, "params": params, "error": end.error}
        runs.append(MeasuredRun(**{**run, **told}))
    return runs


def _show_in_mlflow(
    store: ExperimentRuns,
    groups: Sequence[Group],
    varied: Sequence[str],
    run_id: str,
    name: str,
    trials: Trials | None,
) -> None:
    """Save the view that shows the trainings, and give their parent the figures of the best."""
    score = trials.goal.name if trials is not None else find_score(groups)
    is_lower_better = (
        trials.goal.is_lower_better if trials is not None else score in LOWER_IS_BETTER
    )
    done = [run for group in groups for run in group.done]
    store.keep_view(
        ComparisonView(
            run_id,
            name,
            varied,
            score,
            is_lower_better=is_lower_better,
            is_grouped=any(len(group.runs) > 1 for group in groups),
            has_curves=any(run.metrics.get("train/epoch", 0) > 2 for run in done),
        )
    )
    best = find_best_group(groups, Goal(score, is_lower_better)) if score else None
    if best is not None:
        figures = {metric: best.compute_median(metric) for metric in FIGURES}
        known = {metric: value for metric, value in figures.items() if value is not None}
        # A search keeps its best trial's settings and tags itself.
        told = {} if trials is not None else {"best": best.label}
        points = store.read_series(best.done[0].run_id, score, most=CURVE_POINTS)
        step = points[-1][0] if points else 0  # where the best one's curve ends
        settings = best.settings if told else None
        store.set_tags(run_id, told, params=settings, metrics=known, step=step)


def _write_report(
    store: ExperimentRuns,
    groups: Sequence[Group],
    title: str,
    folder: Path,
    trials: Trials | None = None,
) -> tuple[str, list[Path]]:
    """Print the table and write the page; return the report in Markdown, and the files."""
    goal = trials.goal if trials is not None else None
    told = trials.describe() if trials is not None else ()
    comparison = page.compare_groups(groups, title=title, goal=goal, told=told)
    shown = [group.done[0].run_id for group in groups if group.done][:MAX_GROUPS]
    series: dict[str, Points] = {
        run_id: store.read_series(run_id, "train/loss", most=CURVE_POINTS) for run_id in shown
    }
    files = page.write_page(comparison, folder, series=series)
    console = Console(highlight=False)
    console.print(page.make_terminal_table(comparison, width=console.width))
    for line in (*comparison.words, *comparison.notes):
        console.print(f"- {line}", markup=False)
    console.print(f"Page     {files[0]}", markup=False, soft_wrap=True)
    text = page.make_markdown(comparison)
    if trials is not None and trials.best is not None:
        settings, again = trials.make_best_command()
        store.set_tags(trials.comparison.run_id, {"best.command": again}, params=settings)
        console.print(f"Again    {again}", markup=False, soft_wrap=True)
        text += f"\n\n```\n{again}\n```"
    return text, files
