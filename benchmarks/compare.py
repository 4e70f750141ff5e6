"""What a comparison tells that is so, on pages of made-up runs, and how long it takes to read 1,000
runs out of MLflow and to tell of them: `python -m benchmarks.compare [RUNS] [PAGES]`. The runs are
made up; the store is a real one, on SQLite.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from mlflow.entities import Metric, Param, RunTag

from benchmarks.compare_pages import NOISE, ROWS, measure_share, measure_stressed
from benchmarks.conditions import publish
from headroom.comparison import page
from headroom.comparison.page import MAX_GROUPS
from headroom.comparison.run_groups import MeasuredRun, group_runs
from headroom.settings.run_config import RunConfig
from headroom.tracking.query_runs import ExperimentRuns
from headroom.tracking.tracking_settings import TrackingSettings

RUNS, SERIES = 1_000, 100  # runs, and points of each one's loss
PAGES = 2_000
SUMMARIES = 50  # further metrics of a run


def fill(store: ExperimentRuns, count: int) -> None:
    """Runs with all params, tags and metrics that a training leaves, and a loss."""
    drawn = random.Random(0)
    for number in range(count):
        run = store.client.create_run(store.experiment_id, run_name=f"run-{number}")
        params = {**RunConfig().flat(), "optim.lr": 10 ** drawn.uniform(-4, -1)}
        speed = drawn.uniform(900, 1100)
        metrics = {
            "speed/samples_per_s": speed,
            "speed/steps_per_s": speed / 64,
            "time/forward_ms": 20.0,
            "time/backward_ms": 35.0,
            "val/loss": drawn.uniform(0.1, 0.9),
            **{f"memory/part_{n}_mib": drawn.uniform(1, 2) for n in range(SUMMARIES)},
        }
        points = [Metric("train/loss", 1 / (n + 1), n * 100, n) for n in range(SERIES)]
        points += [Metric(name, value, 0, SERIES) for name, value in metrics.items()]
        told = [Param(name, str(value)) for name, value in params.items()]
        store.client.log_batch(
            run.info.run_id, metrics=points, params=told, tags=[RunTag("device", "cpu")]
        )
        store.client.set_terminated(run.info.run_id)


def main(count: int = RUNS, pages: int = PAGES) -> None:
    """Print both tables, and keep them."""
    publish("compare", "Comparisons", chain(_tell_of_pages(pages), [""], _time_reading(count)))


def _tell_of_pages(pages: int) -> Iterator[str]:
    yield f"\n## What is told, of {pages:,} pages each, with a noise of {NOISE:.0%} of a speed\n"
    yield "| runs | by their range, before | must be | pages that tell it |\n|:--|--:|:--|--:|"
    for row in ROWS:
        yield f"| {row.what} | {row.before} | {row.must} | {measure_share(row, pages):.1%} |"
    yield "\nEqual settings told as slower, where the noise is not what the tests assume:\n"
    yield "| runs | pages |\n|:--|--:|"
    for what, share in measure_stressed(pages):
        yield f"| {what} | {share:.1%} |"


def _time_reading(count: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        uri, files = f"sqlite:///{place}/mlflow.db", str(place / "files")
        told = {"tracking_uri": uri, "artifacts": files, "runs": str(place / "runs")}
        store = ExperimentRuns(TrackingSettings.model_validate(told))
        fill(store, count)
        began, used = time.perf_counter(), time.process_time()
        runs = [MeasuredRun(**run) for run in store.read_newest(last=count)]
        read_s, read_cpu_s = time.perf_counter() - began, time.process_time() - used
        comparison = page.compare_groups(group_runs(runs), title="benchmark")
        ids = [group.done[0].run_id for group in comparison.groups[:MAX_GROUPS]]
        series = {run_id: store.read_series(run_id, "train/loss", most=1_000) for run_id in ids}
        page.write_page(comparison, place, series=series)
        all_s, all_cpu_s = time.perf_counter() - began, time.process_time() - used
        yield f"## {len(runs):,} runs that exist, read and told of\n"
        yield "| | seconds | of the processor |\n|:--|--:|--:|"
        yield f"| reading them | {read_s:.2f} | {read_cpu_s:.2f} |"
        told_s, told_cpu_s = all_s - read_s, all_cpu_s - read_cpu_s
        yield f"| table, words, page, pictures | {told_s:.2f} | {told_cpu_s:.2f} |"
        yield f"| all | {all_s:.2f} | {all_cpu_s:.2f} |"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
