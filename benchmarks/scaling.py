"""How this project's cost grows with rows, parameters, steps and logged metrics: each measured at
four sizes, with the line that fits best. It refuses to conclude from the line alone: R^2 stands
beside it.

`python -m benchmarks.scaling [ROUNDS]` prints the tables and keeps them in benchmarks/results.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from benchmarks.conditions import publish
from benchmarks.headroom import ENDED, NO_TRACKER, timed, where_to
from benchmarks.trial import Trial
from benchmarks.turns import in_turns
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.run_config import RunConfig
from headroom.tracking.journal import Journal
from headroom.training import trainer
from headroom.training.plan import make_plan

Costs = dict[str, float]  # seconds by what they were spent on
Fit = Callable[[Sequence[float], Sequence[float]], str]
FEATURES = 64
KEYS = 8  # metrics of one log point


def main(rounds: int) -> None:
    """Measure, print, keep."""
    publish("scaling", "How cost grows", _report(rounds))


def _report(rounds: int) -> Iterator[str]:
    yield f"- medians of {rounds} turns"
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        yield from _table(
            f"Rows of {FEATURES} features, mlp 64-128-64-10, batch 64",
            {rows: partial(_rows, rows, scratch) for rows in (5_000, 20_000, 50_000, 100_000)},
            rounds,
            power_law,
        )
        yield from _table(
            "Parameters of an mlp, batch 128",
            {_parameters(w): partial(_sized, w, scratch) for w in (128, 512, 1024, 2048)},
            rounds,
            power_law,
        )
        yield from _table(
            "Steps on digits, batch 64",
            {23 * epochs: partial(_steps, epochs, scratch) for epochs in (10, 40, 80, 160)},
            rounds,
            line,
        )
        yield from _table(
            f"Logged metrics, {KEYS} a log point, to an SQLite MLflow",
            {n: partial(_metrics, n, scratch) for n in (1_000, 4_000, 8_000, 16_000)},
            rounds,
            line,
        )


def _rows(rows: int, scratch: Path) -> Costs:
    """Preparation with nothing in the cache, and one epoch."""
    cache = tempfile.mkdtemp(dir=scratch)
    config = RunConfig.model_validate(
        {
            "data": {
                "source": "synthetic",
                "cache": cache,
                "args": {"rows": rows, "features": FEATURES},
            },
            "train": {"epochs": 2},
        }
    )
    began = perf_counter()
    data = prepare_dataset(config.data)
    prepare_s = perf_counter() - began
    trial = Trial(config, detect_best_device(), data, warm_up=0, tracking_uri=None)
    return {
        "preparation": prepare_s,
        "epoch": timed(trial, NO_TRACKER, scratch / "model").epoch_s,
    }


def _parameters(wide: int) -> int:
    """Of the mlp 784-wide-wide-10."""
    return 784 * wide + wide + wide * wide + wide + wide * 10 + 10


def _sized(wide: int, scratch: Path) -> Costs:
    """A step, and writing the model at the end."""
    rows = {
        "source": "synthetic",
        "cache": str(scratch / "data"),
        "args": {"rows": 1_600, "features": 784},
    }
    config = RunConfig.model_validate(
        {
            "data": rows,
            "model": {"name": "mlp", "args": {"hidden": [wide, wide]}},
            "train": {"epochs": 2, "batch_size": 128},
        }
    )
    trial = Trial(
        config, detect_best_device(), prepare_dataset(config.data), warm_up=0, tracking_uri=None
    )
    run = timed(trial, NO_TRACKER, scratch / "model")
    return {"step": run.epoch_s / trial.steps, "checkpoint": run.facts.metrics["time/checkpoint_s"]}


def _steps(epochs: int, scratch: Path) -> Costs:
    """The whole training, from facts to the model on disk."""
    config = RunConfig.model_validate(
        {"data": {"cache": str(scratch / "data")}, "train": {"epochs": epochs}}
    )
    data = prepare_dataset(config.data)
    began = perf_counter()
    trainer.train(make_plan(config, detect_best_device(), data), folder=scratch, log=NO_TRACKER.log)
    return {"training": perf_counter() - began}


def _metrics(count: int, scratch: Path) -> Costs:
    """Keeping them, which the training waits for, and the end of the run, which sends the rest."""
    runs = Path(tempfile.mkdtemp(dir=scratch))
    with Journal(where_to(f"sqlite:///{scratch}/mlflow.db", runs), runs / "one") as journal:
        journal.open("scaling")
        journal.create(name="scaling", params={}, tags={})
        began = perf_counter()
        for step in range(count // KEYS):
            journal.log({f"train/metric_{key}": float(step) for key in range(KEYS)}, step)
        kept = perf_counter()
        journal.close(ENDED)
        return {"kept": kept - began, "sent": perf_counter() - kept}


def power_law(sizes: Sequence[float], seconds: Sequence[float]) -> str:
    """The straight line through the logarithms."""
    slope, _, r2 = _fitted(np.log(sizes), np.log(seconds))
    return f"size^{slope:.2f} (log-log), R^2 {r2:.3f}"


def line(sizes: Sequence[float], seconds: Sequence[float]) -> str:
    """The straight line."""
    slope, start, r2 = _fitted(np.asarray(sizes), np.asarray(seconds))
    return f"{start:.2f} s + {1e6 * slope:.1f} us each (linear), R^2 {r2:.3f}"


def _fitted(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Slope and intercept of least squares, and the share of the variance that they explain."""
    slope, start = np.polyfit(x, y, 1)
    left = y - (slope * x + start)
    return float(slope), float(start), float(1 - left.var() / y.var())


def _table(
    title: str, runs: Mapping[int, Callable[[], Costs]], rounds: int, fit: Fit
) -> Iterator[str]:
    found = in_turns(runs, rounds)
    yield ""
    yield f"## {title}"
    yield ""
    yield "| s | " + " | ".join(f"{size:,}" for size in found) + " | fit |"
    yield "|:--|" + "--:|" * len(found) + ":--|"
    for cost in next(iter(found.values()))[0]:
        seconds = [median(turn[cost] for turn in turns) for turns in found.values()]
        cells = " | ".join(f"{s:.4f}" for s in seconds)
        yield f"| {cost} | {cells} | {fit(list(found), seconds)} |"


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
