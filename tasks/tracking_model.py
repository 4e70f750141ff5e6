"""Logs a trained model as an MLflow model: its weights and description, the code that reads them,
signature, input example and requirements; `mlflow.pyfunc.load_model` needs nothing else. Part of
the sending process.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow.pyfunc
import numpy as np
import pandas as pd
from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput
from mlflow.models import ModelSignature
from mlflow.types import ColSpec, Schema, TensorSpec

if TYPE_CHECKING:
    from tasks.tracking_run import State

CODE = ("__init__.py", "engine/__init__.py", "engine/models.py", "engine/predictor.py")
REQUIREMENTS = ("torch", "numpy", "pandas")


def log(client: MlflowClient, state: State, folder: Path) -> None:
    """Log `folder`/model as the model named `model` of the run."""
    spec = json.loads((folder / "model" / "spec.json").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        code = Path(scratch) / "code" / "tasks"
        for name in CODE:
            (code / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(__file__).parent / name, code / name)
        logged = client.create_logged_model(
            state.experiment_id, name="model", source_run_id=state.run_id, model_type=spec["model"]
        )
        mlflow.pyfunc.save_model(
            f"{scratch}/model",
            loader_module="tasks.engine.predictor",
            data_path=str(folder / "model"),
            code_paths=[str(code)],
            signature=signature(spec),
            input_example=_example(folder / "model" / "example.npy", spec["feature_names"]),
            pip_requirements=[f"{name}=={version(name)}" for name in REQUIREMENTS],
        )
        client.log_model_artifacts(logged.model_id, f"{scratch}/model")
    client.finalize_logged_model(logged.model_id, "READY")
    client.log_outputs(state.run_id, models=[LoggedModelOutput(logged.model_id, step=0)])


def _example(file: Path, names: list[str] | None) -> Any:
    rows = np.load(file)
    return rows if names is None else pd.DataFrame(rows.astype("float64"), columns=names)


def signature(spec: dict[str, Any]) -> ModelSignature:
    """Rows in, by column name where there are names; a prediction for each row out."""
    names = spec["feature_names"]
    inputs: list[Any] = [TensorSpec(np.dtype("float32"), (-1, *spec["input_shape"]))]
    if names:
        inputs = [ColSpec("double", name) for name in names]
    outputs: list[Any] = [ColSpec("double", "prediction")]
    if spec["task"] == "classification":
        outputs = [ColSpec("string", "prediction"), ColSpec("float", "probability")]
    return ModelSignature(inputs=Schema(inputs), outputs=Schema(outputs))
