"""How well the defaults learn: three regressions and three classifications of scikit-learn, with
nothing set, against its linear models and its gradient boosting on the same rows.
`python -m benchmarks.quality` prints the table and keeps it; no network is needed.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sklearn import datasets
from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, Ridge

from benchmarks.conditions import publish
from tasks.engine.data.preparation import load, prepare
from tasks.engine.device.detection import detect
from tasks.engine.settings.run_config import RunConfig
from tasks.engine.training.trainer import train

SPLITS = 3
BAR = -0.03  # against the linear model, in the mean over the splits

Table = Callable[[], tuple[np.ndarray, np.ndarray]]
REGRESSIONS: dict[str, Table] = {
    "diabetes": partial(datasets.load_diabetes, return_X_y=True),
    "friedman1": partial(datasets.make_friedman1, 1000, noise=1.0, random_state=0),
    "friedman2": partial(datasets.make_friedman2, 1000, noise=100.0, random_state=0),
}
CLASSIFICATIONS: dict[str, Table] = {
    "breast cancer": partial(datasets.load_breast_cancer, return_X_y=True),
    "digits": partial(datasets.load_digits, return_X_y=True),
    "wine": partial(datasets.load_wine, return_X_y=True),
}


def main() -> int:
    """Measure, print, keep; 1 where the defaults are behind a linear model by more than the bar."""
    behind: list[str] = []
    publish("quality", "How well the defaults learn", _lines(behind))
    return int(bool(behind))


def _lines(behind: list[str]) -> Iterator[str]:
    yield from (
        "",
        f"- The mean over {SPLITS} splits (data.split_seed), in brackets the worst of their "
        "differences.",
        "- Everything at its default, ours and theirs (LogisticRegression: max_iter 1000). Theirs "
        "get the",
        "  same rows, scaled as ours are.",
        f"- The bar: {-BAR:g} below the linear model.",
        "",
        "| | rows | figure | ours | Ridge, LogisticRegression | ours - theirs | GradientBoosting "
        "| ours - theirs |",
        "|:--|--:|:--|--:|--:|:--|--:|:--|",
    )
    for task, tables in (("regression", REGRESSIONS), ("classification", CLASSIFICATIONS)):
        for name, table in tables.items():
            yield _row(name, task, table(), behind)


def _row(name: str, task: str, table: tuple[np.ndarray, np.ndarray], behind: list[str]) -> str:
    x, y = table
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "table.npz", x=x, y=y)
        figures = [_figures(Path(folder), task, seed) for seed in range(SPLITS)]
    ours, linear, boosted = zip(*figures, strict=True)
    apart = _apart(ours, linear)
    if statistics.mean(ours) < statistics.mean(linear) + BAR:
        behind.append(name)
        apart += " **missed**"
    figure = "r2" if task == "regression" else "accuracy"
    means = [f"{statistics.mean(of):.3f}" for of in (ours, linear, boosted)]
    return (
        f"| {name} | {len(x):,} | {figure} | {means[0]} | {means[1]} | {apart} | {means[2]} "
        f"| {_apart(ours, boosted)} |"
    )


def _apart(ours: tuple[float, ...], theirs: tuple[float, ...]) -> str:
    apart = [a - b for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.mean(apart):+.3f} ({min(apart):+.3f})"


def _figures(folder: Path, task: str, seed: int) -> tuple[float, float, float]:
    """Of ours, the linear model and the boosted trees, on the validation rows of one split."""
    source = {"path": str(folder / "table.npz"), "cache": str(folder / "data")}
    config = RunConfig.model_validate({"data": {**source, "task": task, "split_seed": seed}})
    data = prepare(config.data)
    facts = train(
        config,
        detect("auto"),
        data,
        folder=folder / f"run-{seed}",
        log=lambda metrics, step: None,
    )
    arrays = load(data)
    rows = [np.asarray(part) for part in (arrays.train_x, arrays.val_x)]
    targets = [np.asarray(part).reshape(-1) for part in (arrays.train_y, arrays.val_y)]
    regression = task == "regression"
    theirs: list[Any] = (
        [Ridge(), GradientBoostingRegressor(random_state=0)]
        if regression
        else [LogisticRegression(max_iter=1000), GradientBoostingClassifier(random_state=0)]
    )
    linear, boosted = (
        model.fit(rows[0], targets[0]).score(rows[1], targets[1]) for model in theirs
    )
    return facts.metrics["val/r2" if regression else "val/accuracy"], linear, boosted


if __name__ == "__main__":
    sys.exit(main())
