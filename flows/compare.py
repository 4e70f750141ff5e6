"""Compares trainings: the same one on several devices or over settings, each in a process of its
own and a child of one run in MLflow; or runs that exist. `python -m flows.compare` plays it.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from tasks.process import home, signals, streams

    streams.keep()
    signals.catch()
    home.provide()
    # It answers --help and bad settings before prefect is imported.
    from flows.cli.compare_command import main
    from flows.cli.train_command import leave

    leave(main(sys.argv[1:]))

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect.runtime import flow_run
from rich.console import Console

from flows.cli.compare_command import parse
from tasks import serve
from tasks.comparison import page, search_space, trainings
from tasks.comparison.grid import Asked, Cell, Check
from tasks.comparison.pictures import MOST
from tasks.comparison.run_groups import Group, Measured, Points, grouped
from tasks.comparison.trainings import Ended
from tasks.device_tags import process_tags
from tasks.engine.base.units import number, printable
from tasks.flow_run import CalledFlow, show
from tasks.process.redaction import redacted_errors, without_secret_words
from tasks.resume import stamp
from tasks.tracking.where import TrackingError, where

if TYPE_CHECKING:
    from tasks.comparison.search import Trials
    from tasks.tracking.query_runs import Comparisons

CURVE_POINTS = 1_000  # of a line in a picture


def _shown(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"words": without_secret_words(parameters["words"])}


def _name() -> str:
    return printable(" ".join(["compare", *flow_run.parameters["words"]]), limit=100)


@partial(CalledFlow, name="compare", shown=_shown, flow_run_name=_name, validate_parameters=False)
def compare(words: list[str], plan: Asked | None = None) -> int:
    """Train what the words of the command line ask for, or read the runs that they name.

    Args:
        words: As behind `python -m flows.compare`, e.g. ["--vary", "train.batch_size=64,256"].
        plan: What they mean, where that is known already.
    """
    with redacted_errors():
        asked = plan or parse(words)
        return _trained(asked) if asked.cells else _read(asked)


def _trained(asked: Asked) -> int:
    check = Check(asked.cells)
    from tasks.tracking.query_runs import Comparisons  # imports mlflow, while that looks

    check.answer()
    goal = None
    if asked.search is not None:
        goal = search_space.goal_of(asked.search.goal, check.tasks, list(asked.base.train.metrics))
    chosen = where()
    store = Comparisons(chosen, asked.base.run.experiment)
    place = Path(chosen.runs).parent / "comparisons"
    words = [str(Path.cwd()), *without_secret_words(asked.words)]
    comparison = trainings.opened(place, " ".join(words))
    trials = None
    if asked.search is not None and goal is not None:
        from tasks.comparison.search import Trials  # imports Optuna

        trials = Trials(asked.search, comparison, goal=goal, base=asked.base)
    count = asked.search.trials if asked.search is not None else len(asked.cells)
    title = ", ".join(asked.varied) or asked.base.model.name
    if comparison.ended:
        print(f"going on: {len(comparison.ended)} of {count} have ended", file=sys.stderr)
    kind = "compare" if trials is None else "search"
    name = asked.base.run.name or f"{kind}-{title}-{stamp()}"
    tags = process_tags("flows/compare.py")
    comparison.run_id = store.begin(comparison.run_id, name=name, count=count, tags=tags)
    comparison.keep()
    status = "KILLED"
    text, files = "", list[Path]()
    try:
        source = trials or trainings.Grid(comparison, asked.cells)
        tell = _tell(count, store, trials)
        trainings.play(comparison, source, runs=Path(chosen.runs), tell=tell)
        runs = _measured(store, trials.cells() if trials else asked.cells, comparison)
        groups = trials.groups(runs) if trials else grouped(runs, asked.varied)
        text, files = _told(store, groups, name, comparison.folder, trials)
        status = "FINISHED" if any(run.is_done for run in runs) else "FAILED"
    finally:
        store.end(comparison.run_id, status=status, text=text, files=files)
    comparison.is_over = True
    comparison.keep()
    ids = {"experiment_id": store.experiment_id, "run_id": comparison.run_id}
    print(f"Open     {serve.open_command(store.where.tracking_uri, **ids)}", flush=True)
    show(text, f"comparison-{comparison.run_id}", name)
    return 0 if status == "FINISHED" else 1


def _read(asked: Asked) -> int:
    from tasks.tracking.query_runs import Comparisons

    chosen = where()
    if chosen.database is not None and not chosen.database.is_file():
        raise TrackingError(f"tracking_uri: {chosen.database} is not there; nothing has run yet")
    store = Comparisons(chosen, asked.base.run.experiment, makes=False)
    query = asked.filter
    found = store.runs(asked.runs) if asked.runs else store.newest(last=asked.last, query=query)
    if not found:
        raise TrackingError(f"--filter: no training of {store.where.experiment!r} is found")
    runs = [Measured(**run) for run in found]
    folder = Path(chosen.runs).parent / "comparisons" / stamp()
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{len(runs):,} runs of {store.where.experiment}"
    text, _ = _told(store, grouped(runs), title, folder)
    show(text, f"comparison-{folder.name}", title)
    return 0


def _tell(
    count: int, store: Comparisons, trials: Trials | None
) -> Callable[[Cell, Ended | None], None]:
    def tell(cell: Cell, ended: Ended | None) -> None:
        said = "begins" if ended is None else ended.status
        if ended is not None and ended.value is not None and trials is not None:
            said += f", {trials.goal.name} {number(ended.value)}"
        error = f": {ended.error}" if ended is not None and ended.error else ""
        print(f"{cell.number}/{count} {cell.label}: {said}{error}", file=sys.stderr, flush=True)
        if ended is not None and ended.status == "PRUNED" and ended.run_id:
            store.tag(ended.run_id, {"pruned": ended.error})
        if ended is not None and trials is not None and ended == trials.best:
            tags = {"best": cell.label, "best.run_id": ended.run_id, "best.value": str(ended.value)}
            store.tag(trials.comparison.run_id, tags)

    return tell


def _measured(
    store: Comparisons, trained: Sequence[Cell], comparison: trainings.Comparison
) -> list[Measured]:
    """The trainings as MLflow has them, and those that never had a run as they ended."""
    ends = [comparison.ended[cell.number] for cell in trained]
    found = {run["run_id"]: run for run in store.runs([end.run_id for end in ends if end.run_id])}
    runs = []
    for cell, end in zip(trained, ends, strict=True):
        run = found.get(end.run_id, {"run_id": "", "name": cell.label})
        params = {**run.get("params", {}), **cell.settings}  # as they were written
        told = {"status": end.status, "params": params, "error": end.error}
        runs.append(Measured(**{**run, **told}))
    return runs


def _told(
    store: Comparisons,
    groups: Sequence[Group],
    title: str,
    folder: Path,
    trials: Trials | None = None,
) -> tuple[str, list[Path]]:
    """Print the table and write the page; the report in Markdown, and the files."""
    goal = trials.goal if trials is not None else None
    told = trials.told() if trials is not None else ()
    comparison = page.compared(groups, title=title, goal=goal, told=told)
    shown = [group.done[0].run_id for group in groups if group.done][:MOST]
    series: dict[str, Points] = {
        run_id: store.series(run_id, "train/loss", most=CURVE_POINTS) for run_id in shown
    }
    files = page.write(comparison, folder, series=series)
    console = Console(highlight=False)
    console.print(page.terminal(comparison, width=console.width))
    for line in (*comparison.words, *comparison.notes):
        console.print(f"- {line}", markup=False)
    console.print(f"Page     {files[0]}", markup=False, soft_wrap=True)
    text = page.markdown(comparison)
    if trials is not None and trials.best is not None:
        settings, again = trials.again()
        store.tag(trials.comparison.run_id, {"best.command": again}, params=settings)
        console.print(f"Again    {again}", markup=False, soft_wrap=True)
        text += f"\n\n```\n{again}\n```"
    return text, files
