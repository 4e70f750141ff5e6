"""How well the defaults learn: three regressions and three classifications of scikit-learn, with
nothing set, against its linear models and its gradient boosting on the same rows; and skewed
amounts, whose logarithm is learned, against gradient boosting of them and of their logarithm.
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
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import (
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingRegressor,
)
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import mean_absolute_error, r2_score

from benchmarks.conditions import publish
from headroom.data.preparation import load_arrays, prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.run_config import RunConfig
from headroom.training.plan import make_plan
from headroom.training.trainer import train

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


def heavy_tailed() -> tuple[np.ndarray, np.ndarray]:
    """The exponential of a sum: the largest of 3,000 targets is thousands of times their median."""
    random = np.random.default_rng(0)
    x = random.normal(size=(3000, 5))
    return x, np.exp(1.5 * (x[:, 0] + x[:, 1] * x[:, 2]) + 0.1 * random.normal(size=3000))


def zero_inflated() -> tuple[np.ndarray, np.ndarray]:
    """As heavy_tailed, less so, with 0 in half of the rows."""
    random = np.random.default_rng(0)
    x = random.normal(size=(3000, 5))
    return x, np.where(x[:, 3] > 0, 0, np.exp(x[:, 0] + x[:, 1] * x[:, 2] / 2))


SKEWED: dict[str, Table] = {"heavy-tailed": heavy_tailed, "zero-inflated": zero_inflated}


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
    yield from (
        "",
        "## Skewed amounts",
        "",
        f"- r2 and the mean absolute error in the target's units, the mean over {SPLITS} splits; "
        "no bar.",
        "- HGB: HistGradientBoostingRegressor; of the logarithm: in a TransformedTargetRegressor "
        "of log1p and",
        "  expm1. The median: that of the training rows, for every row.",
        "",
        "| | rows | ours | ours, no transform | HGB | HGB of the logarithm | the median |",
        "|:--|--:|:--|:--|:--|:--|:--|",
    )
    for name, table in SKEWED.items():
        yield _skewed(name, *table())


def _skewed(name: str, x: np.ndarray, y: np.ndarray) -> str:
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "table.npz", x=x, y=y)
        splits = [_errors(Path(folder), seed) for seed in range(SPLITS)]
    means = np.mean(splits, axis=0)  # (regressors, 2)
    told = " | ".join(f"{r2:.3f}, {mae:.3g}" for r2, mae in means)
    return f"| {name} | {len(x):,} | {told} |"


def _errors(folder: Path, seed: int) -> list[tuple[float, float]]:
    """r2 and the mean absolute error of each regressor on the validation rows of one split."""
    found = []
    for transform in ("auto", "scale"):
        config = _config(folder, "regression", seed, target_transform=transform)
        metrics = _learned(config, folder / f"{transform}-{seed}")
        found.append((metrics["val/r2"], metrics["val/mae"]))
    arrays = load_arrays(data := prepare_dataset(config.data))
    inputs = [np.asarray(part) for part in (arrays.train_x, arrays.val_x)]
    y, so = (
        np.asarray(part, dtype=np.float64)[:, 0] * data.target_scale[0] + data.target_offset[0]
        for part in (arrays.train_y, arrays.val_y)
    )
    y, so = np.maximum(y, 0), np.maximum(so, 0)  # float32 makes of 0 a little less
    trees = HistGradientBoostingRegressor(random_state=0)
    logarithm = TransformedTargetRegressor(trees, func=np.log1p, inverse_func=np.expm1)
    for model in (trees, logarithm):
        told = model.fit(inputs[0], y).predict(inputs[1])
        found.append((r2_score(so, told), mean_absolute_error(so, told)))
    told = np.full_like(so, np.median(y))
    return [*found, (r2_score(so, told), mean_absolute_error(so, told))]


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
    config = _config(folder, task, seed)
    metrics = _learned(config, folder / f"run-{seed}")
    plain = _config(folder, task, seed, target_transform="scale")
    arrays = load_arrays(prepare_dataset(plain.data))
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
    return metrics["val/r2" if regression else "val/accuracy"], linear, boosted


def _config(folder: Path, task: str, seed: int, **more: str) -> RunConfig:
    source = {"path": str(folder / "table.npz"), "cache": str(folder / "data"), **more}
    return RunConfig.model_validate({"data": {**source, "task": task, "split_seed": seed}})


def _learned(config: RunConfig, folder: Path) -> dict[str, float]:
    log = lambda metrics, step: None  # noqa: E731
    return train(
        make_plan(config, detect_best_device("auto"), prepare_dataset(config.data)),
        folder=folder,
        log=log,
    ).metrics


if __name__ == "__main__":
    sys.exit(main())
