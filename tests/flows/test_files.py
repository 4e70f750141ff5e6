"""A team's files, from the file to a logged model that predicts on the rows of the file."""

import json
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from mlflow import MlflowClient
from PIL import Image
from pyarrow import parquet
from sklearn.datasets import load_iris

from flows.predict import predict
from flows.train import train
from headroom.settings.run_config import RunConfig
from headroom.tracking.tracking_settings import read_tracking_settings

pytestmark = pytest.mark.usefixtures("prefect_api", "place")


def _train(**sections: Any) -> tuple[dict[str, Any], Any]:
    """The run, and its model as anybody loads it."""
    run = train(RunConfig.model_validate(sections))
    client = MlflowClient(read_tracking_settings().tracking_uri)
    logged = client.get_run(run["run_id"]).outputs.model_outputs[-1].model_id
    # mlflow.set_tracking_uri() would reach into os.environ, and the next test.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", read_tracking_settings().tracking_uri)
        return run, mlflow.pyfunc.load_model(f"models:/{logged}")


def test_a_csv_of_sklearn_with_strings_and_holes(place: Path) -> None:
    frame = load_iris(as_frame=True).frame
    frame["target"] = frame["target"].map(dict(enumerate(("setosa", "versicolor", "virginica"))))
    frame["island"] = np.where(np.arange(150) % 3, "north", "south")
    frame["flower"] = [f"f{i}" for i in range(150)]
    frame.loc[[3, 70], "petal length (cm)"] = np.nan
    frame.loc[90, "island"] = None
    frame.to_csv(place / "iris.csv", index=False)
    run, model = _train(
        data={"path": "iris.csv", "args": {"drop": ["flower"], "missing": "mean"}},
        train={"epochs": 40, "batch_size": 16},
        optim={"lr": 0.01},
    )
    assert run["metrics"]["val/accuracy"] > 0.85
    told = model.predict(pd.read_csv(place / "iris.csv").drop(columns="target"))
    right = (told["prediction"].to_numpy() == frame["target"].to_numpy()).mean()
    assert len(told) == 150 and right > 0.85


def test_json_lines_train_and_predict_as_a_csv_of_the_same_rows(place: Path) -> None:
    """To the bit; the keys come in another order in half of the lines."""
    random = np.random.default_rng(0)
    rows = [
        {
            "a": round(float(x), 3),
            "n": int(10 * y),
            "colour": ("red", "gr\u00fcn", None)[i % 3],
            "day": f"2026-11-{i % 28 + 1:02}",
            "flag": bool(x > 0),
            "label": "high" if x + y > 0 else "low",
        }
        for i, (x, y) in enumerate(random.normal(size=(300, 2)))
    ]
    lines = [
        json.dumps(row if i % 2 == 0 else dict(reversed(row.items()))) for i, row in enumerate(rows)
    ]
    (place / "rows.jsonl").write_text("\n".join(lines))
    pd.DataFrame(rows).to_csv(place / "rows.csv", index=False)
    weights, scores = [], []
    for name in ("rows.csv", "rows.jsonl"):
        run, model = _train(data={"path": name, "args": {"missing": "mean"}}, train={"epochs": 2})
        predict(name, f"{name}.predicted.jsonl", run=run["run_id"], keep=["colour"])
        weights.append(model._model_impl.model.state_dict())
        scores.append({k: v for k, v in run["metrics"].items() if k.startswith("val/")})
    assert scores[0] == scores[1] and len(scores[0]) > 3
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())
    found = [
        pd.read_json(f"{name}.predicted.jsonl", lines=True) for name in ("rows.csv", "rows.jsonl")
    ]
    pd.testing.assert_frame_equal(found[0].drop(columns="colour"), found[1].drop(columns="colour"))
    assert found[1]["colour"].iloc[:2].tolist() == ["red", "gr\u00fcn"]
    assert found[1]["colour"].isna().iloc[2]  # null stays null, where a CSV has an empty cell


def test_a_folder_of_parquet(place: Path) -> None:
    random = np.random.default_rng(0)
    (place / "parts").mkdir()
    for i in range(3):
        x = random.normal(size=(100, 2))
        columns = {"a": x[:, 0], "b": x[:, 1], "label": (x[:, 0] > x[:, 1]).astype(np.int8)}
        parquet.write_table(pa.table(columns), place / "parts" / f"{i}.parquet")
    run, model = _train(
        data={"source": "parquet", "path": "parts"},
        train={"epochs": 10, "batch_size": 20},
        optim={"lr": 0.01},
    )
    assert run["metrics"]["val/accuracy"] > 0.85
    assert model.predict(pd.DataFrame({"a": [2.0, -2.0], "b": [-2.0, 2.0]}))[
        "prediction"
    ].tolist() == ["1", "0"]


def test_a_folder_of_images(place: Path) -> None:
    random = np.random.default_rng(0)
    for name, level in (("dark", 60), ("light", 190)):
        (place / "pets" / name).mkdir(parents=True)
        for i in range(20):
            pixels = random.integers(level - 40, level + 40, (12, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / "pets" / name / f"{i}.png")
    run, model = _train(
        data={"source": "images", "path": "pets", "args": {"image_size": 8}},
        model={"name": "cnn", "args": {"width": 4}},
        train={"epochs": 10, "batch_size": 8},
        optim={"lr": 0.01},
    )
    assert run["metrics"]["val/accuracy"] == 1
    rows = np.stack([np.full((3, 8, 8), level, dtype=np.float32) for level in (60, 190)])
    assert model.predict(rows)["prediction"].tolist() == ["dark", "light"]
