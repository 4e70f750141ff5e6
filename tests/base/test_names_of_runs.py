"""What real runs log is what the list of names has: each name is a row, and each row is used."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from flows.predict import predict
from flows.train import train
from headroom import account
from headroom.base import names
from headroom.settings.run_config import RunConfig
from tests.base.recorded_names import list_unknown_metrics, list_unknown_tags
from tests.conftest import PYTHON, ROOT, desk_environment, query

RUNS: dict[str, dict[str, Any]] = {
    "digits": {"train": {"epochs": 3}},
    "uneven": {"data": {"path": "uneven.npz", "test_fraction": 0.2}},
    "labels": {"data": {"path": "labels.npz", "test_fraction": 0.2}},
    "houses": {"data": {"path": "houses.csv", "target": "price", "test_fraction": 0.2}},
    "text": {
        "data": {
            "source": "text",
            "path": "book.txt",
            "test_fraction": 0.2,
            "args": {"context": 16},
        },
        "model": {"name": "transformer", "args": {"layers": 1, "heads": 2, "width": 16}},
        "train": {"epochs": 4, "log_every": 2},
    },
    "images": {"data": {"source": "images", "path": "pictures"}, "train": {"batch_size": 8}},
}


def _write_inputs(folder: Path) -> None:
    draw, rows = np.random.default_rng(0), np.arange(2400)
    x = draw.normal(size=(2400, 5)).astype(np.float32)
    np.savez(folder / "uneven.npz", x=x, y=np.where(rows % 20, 0, rows // 20 % 12))
    np.savez(folder / "labels.npz", x=x[:400], y=(x[:400, :3] > 0).astype(np.int64))
    houses = pd.DataFrame({"area": x[:400, 0], "price": 3 * x[:400, 0] + 70})
    houses.to_csv(folder / "houses.csv", index=False)
    (folder / "book.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    for number in range(24):
        place = folder / "pictures" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 255, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")


def _take_steps_of_a_loop() -> None:
    net = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with account(run_name="loop", params={"lr": 0.1}, model=net, optimizer=optimizer) as run:
        for _ in range(30):
            net(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with run.phase("eval"):
            net(torch.randn(16, 8))
        run.log({"train/loss": 0.5, "loops/word": "a word"})


@dataclass(frozen=True)
class Logged:
    """The names that each of the runs has in MLflow."""

    metrics: dict[str, set[str]]
    tags: dict[str, set[str]]
    params: dict[str, set[str]]


@pytest.fixture(scope="module")
def logged(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logged]:
    folder = tmp_path_factory.mktemp("named")
    (folder / "mlflow.yaml").write_text((ROOT / "mlflow.yaml").read_text())
    _write_inputs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, given in RUNS.items():
            run = {"name": name, "experiment": "named"}
            made = train(RunConfig.model_validate({"train": {"epochs": 1}, **given, "run": run}))
            if name == "houses":
                predict("houses.csv", "told.csv", run=made["run_id"])
        _take_steps_of_a_loop()
        words = ("--vary", "optim.lr=0.001,0.1", "--train.epochs=1")
        subprocess.run(
            [PYTHON, "-m", "flows.compare", *words],
            cwd=folder,
            env=desk_environment(),
            check=True,
            capture_output=True,
            timeout=300,
        )
    found = (
        {
            name: {
                key for (key,) in query(folder, f"select key from {kind} where run_uuid = '{i}'")
            }
            for name, i in query(folder, "select name, run_uuid from runs")
        }
        for kind in ("metrics", "tags", "params")
    )
    yield Logged(*found)


def test_runs_of_all_kinds_are_there(logged: Logged) -> None:
    assert {*RUNS, "loop"} < {*logged.metrics} and len(logged.metrics) == len(RUNS) + 1 + 3


def test_every_metric_that_is_logged_is_a_row(logged: Logged) -> None:
    for run, metrics in logged.metrics.items():
        assert not list_unknown_metrics(metrics), run
        own = {"val/NAME"}  # nobody here has one
        rows = {row.name for name in metrics if (row := names.find_metric(name))}
        assert not rows & own, run


def test_every_tag_that_is_logged_is_a_row(logged: Logged) -> None:
    for run, tags in logged.tags.items():
        assert not list_unknown_tags(tags), run


def test_every_param_of_a_training_is_of_a_group(logged: Logged) -> None:
    groups = tuple(f"{group.name}." for group in names.PARAM_GROUPS)
    for run in RUNS:
        assert logged.params[run] and all(name.startswith(groups) for name in logged.params[run])


def test_every_row_that_needs_nothing_is_logged(logged: Logged) -> None:
    """A row that says what it needs is written where that is measured."""
    seen = {name for of in (logged.metrics, logged.tags) for found in of.values() for name in found}
    rows = [row for row in (*names.METRICS, *names.TAGS) if not names.is_family(row.name)]
    missing = [row for row in rows if row.name not in seen]
    assert not [row.name for row in missing if not row.needs]
    files = [f for f in (ROOT / "headroom").rglob("*.py") if f.name != "names.py"]
    text = "\n".join(file.read_text() for file in files)
    constants = {value: key for key, value in vars(names).items() if isinstance(value, str)}
    stems = {row.name: _find_stem(row.name) for row in missing}
    nowhere = [
        name
        for name, stem in stems.items()
        if not re.search(
            rf"\b({re.escape(stem)}(_|\b)|{constants.get(name, constants.get(stem, stem))}\b)", text
        )
    ]
    assert not nowhere


def _find_stem(name: str) -> str:
    """What of a name is written where it is measured: less its group, its unit and its window."""
    last = re.sub("^(recent|run)_", "", name.partition("/")[2] or name)
    unit = next((f"_{end}" for end in names.UNITS if last.endswith(f"_{end}")), "")
    return last.removesuffix(unit)
