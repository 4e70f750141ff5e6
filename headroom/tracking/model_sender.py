"""Sends a trained model to MLflow: its weights and description, the code that reads them,
signature, input example and requirements; `mlflow.pyfunc.load_model` needs nothing else. And makes
it a version of a registered model. Part of the sending process.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import tempfile
from contextlib import suppress
from fcntl import LOCK_EX, flock
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow.pyfunc
import numpy as np
import pandas as pd
from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.models.utils import _save_example
from mlflow.types import ColSpec, Schema, TensorSpec
from mlflow.types.schema import AnyType

from headroom.base.raw_inputs import describe_inputs, is_structured, restore_raw_values
from headroom.models.checksums import write_checksums

if TYPE_CHECKING:
    from headroom.tracking.run_sender import SendingState

# All that predictor.py imports: nothing else of this project is there where the model is loaded.
CODE = (
    "__init__.py",
    "base/__init__.py",
    "base/import_paths.py",
    "base/secret_names.py",
    "models/__init__.py",
    "models/builtin.py",
    "models/checksums.py",
    "models/user_model.py",
    "models/predictor.py",
    "base/raw_inputs.py",
    "settings/__init__.py",
    "settings/model_args.py",
)
PASSED_TAG = "gate.passed"  # a tag of a version
REQUIREMENTS = ("torch", "numpy", "pandas")


def create_model(client: MlflowClient, state: SendingState, folder: Path) -> str:
    """Create an MLflow model named `model` of the run, without files yet; return its id."""
    model_type = json.loads((folder / "model" / "spec.json").read_text())["model"]
    logged = client.create_logged_model(
        state.experiment_id, name="model", source_run_id=state.run_id, model_type=model_type
    )
    model_id: str = logged.model_id
    return model_id


def send_model_files(client: MlflowClient, state: SendingState, folder: Path) -> None:
    """Send `folder`/model as the files of the model that was created."""
    spec = json.loads((folder / "model" / "spec.json").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        _write_model_folder(Path(scratch), folder / "model", spec, run_id=state.run_id)
        client.log_model_artifacts(state.model_id, scratch)
    client.finalize_logged_model(state.model_id, "READY")
    client.log_outputs(state.run_id, models=[LoggedModelOutput(state.model_id, step=0)])


def register_model(
    client: MlflowClient, state: SendingState, request: dict[str, Any], turn: Path
) -> str:
    """Make the run's model a version of a registered model, and move the aliases.

    Done once, however often it is called. Returns what was done, in words. request: the
    registered model and the run's score. turn: a file whose lock lets one process register
    at a time. Raises what MLflow raises.
    """
    name = request["name"]
    quote = '"' if "'" in name else "'"
    with turn.open("a") as lock:
        flock(lock, LOCK_EX)  # else the worse of two that end at once might stay the champion
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        versions = list(client.search_model_versions(f"name = {quote}{name}{quote}"))
        mine = next((v for v in versions if v.run_id == state.run_id), None)
        if mine is None:
            source = client.get_logged_model(state.model_id).artifact_location
            tags = {} if request["value"] is None else {request["metric"]: str(request["value"])}
            tags |= {PASSED_TAG: "yes"} if request["passed"] else {}
            mine = client.create_model_version(
                name, source, state.run_id, tags=tags, model_id=state.model_id
            )
            versions.append(mine)
        roles = ["challenger"] if request["passed"] else []
        if _choose_champion(client, versions, mine, request) is mine:
            roles.append("champion")
        for role in roles:
            client.set_registered_model_alias(name, role, mine.version)
    return " ".join([f"{name} version {mine.version}", *(f"@{role}" for role in roles)])


def _choose_champion(
    client: MlflowClient, versions: list[ModelVersion], mine: ModelVersion, request: dict[str, Any]
) -> ModelVersion:
    """Return the version with the best validation of those that passed their gate.

    It is this version or the champion. Where there is no champion, or it was deleted, all
    versions are compared, and those that failed too if no other is left.
    """

    def score(version: ModelVersion) -> float:
        value = math.nan
        with suppress(MlflowException, ValueError):
            tag = version.tags.get(request["metric"])
            if tag is not None:
                value = float(tag)
            elif version is not mine and version.run_id:  # somebody made it by hand
                value = client.get_run(version.run_id).data.metrics.get(request["metric"], value)
        return -value if request["lower"] else value

    crowned = client.get_registered_model(request["name"]).aliases.get("champion")
    holder = next((v for v in versions if str(v.version) == str(crowned)), None)
    if holder is not None:
        return mine if request["passed"] and score(mine) > score(holder) else holder
    scored = [v for v in versions if not math.isnan(score(v))]
    best = max(scored, key=lambda v: (PASSED_TAG in v.tags, score(v)), default=mine)
    client.set_registered_model_alias(request["name"], "champion", best.version)
    return best


def _write_model_folder(path: Path, trained: Path, spec: dict[str, Any], *, run_id: str) -> None:
    """Write an MLflow model's folder, of parts that MLflow documents.

    mlflow.pyfunc.save_model() would write the same, after it has read the metadata of every package
    of the environment to compare it with three requirements: 1 s at the end of each run.
    """
    for name in CODE:
        (path / "code" / "headroom" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(__file__).parent.parent / name, path / "code" / "headroom" / name)
    shutil.copytree(trained, path / "data")
    model = Model(run_id=run_id, signature=make_signature(spec))
    mlflow.pyfunc.add_to_model(
        model,
        loader_module="headroom.models.predictor",
        data="data",
        code="code",
        python_env="python_env.yaml",
    )
    _save_example(model, _make_example(trained, spec), str(path))
    requirements = [f"{name}=={version(name)}" for name in REQUIREMENTS]
    requirements += spec.get("requirements", [])  # of the user's own code
    (path / "requirements.txt").write_text("\n".join(requirements) + "\n")
    python = f"python: {platform.python_version()}\n"
    (path / "python_env.yaml").write_text(python + "dependencies: [-r requirements.txt]\n")
    model.save(str(path / "MLmodel"))
    # Not MLflow's own files, which it may write anew.
    kept = (f for part in ("data", "code") for f in sorted((path / part).rglob("*")))
    write_checksums(path / "data", [f for f in kept if f.is_file()])


def _make_example(trained: Path, spec: dict[str, Any]) -> Any:
    several = trained / "example.npz"
    if several.is_file():
        with np.load(several, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in describe_inputs(spec)}
    rows, names = np.load(trained / "example.npy"), spec["feature_names"]
    if spec["task"] == "tokens" and spec["source"] == "text":
        # A row may begin or end within a character, or be no text at all.
        return pd.DataFrame({"text": [bytes(row).decode(errors="ignore") for row in rows]})
    if spec["task"] == "tokens":
        return rows.astype("int64")
    if spec.get("columns"):
        return pd.DataFrame(restore_raw_values(rows, spec["columns"]))
    return rows if names is None else pd.DataFrame(rows.astype("float64"), columns=names)


def make_signature(spec: dict[str, Any]) -> ModelSignature:
    """Return the signature: rows in, by column name where there are names.

    A prediction for each row out. Rows of tokens may be shorter than the context.
    """
    if is_structured(spec):
        inputs: list[Any] = _make_input_specs(spec)
    elif spec["task"] == "tokens":
        return _make_token_signature(spec["source"])
    else:
        names = spec["feature_names"]
        inputs = [TensorSpec(np.dtype("float32"), (-1, *spec["input_shape"]))]
        if spec.get("columns"):
            inputs = _make_column_specs(spec)
        elif names:
            inputs = [ColSpec("double", name) for name in names]
    outputs = _make_output_specs(spec)
    schema = None if outputs is None else Schema(outputs)
    return ModelSignature(inputs=Schema(inputs), outputs=schema)


def _make_column_specs(spec: dict[str, Any]) -> list[ColSpec]:
    """Return the raw columns of a table.

    Whole numbers may come as any type: MLflow refuses int64, which is what pandas reads them
    as, where a double is asked for.
    """
    required = spec.get("missing", "fail") == "fail"
    specs = []
    for column in spec["columns"]:
        number = AnyType() if column.get("whole") else "double"
        # Dates come as text, as pandas reads them, and as what it makes of them.
        kind = {"number": number, "date": AnyType()}.get(column["kind"], "string")
        specs.append(ColSpec(kind, column["name"], required=required))
    return specs


def _make_input_specs(spec: dict[str, Any]) -> list[Any]:
    """Return the inputs of a user's own model, each an array by its name.

    Lengths may differ.
    """
    specs = []
    for name, need in describe_inputs(spec).items():
        kind = "float32" if "float" in need["dtype"] else need["dtype"]
        sizes = [-1 if kind == "int64" else size for size in need["shape"]]
        specs.append(TensorSpec(np.dtype(kind), (-1, *sizes), name=name))
    return (
        specs
        if len(specs) > 1 or specs[0].name != "x"
        else [TensorSpec(specs[0].type, specs[0].shape)]
    )


def _make_output_specs(spec: dict[str, Any]) -> list[Any] | None:
    if spec["task"] == "own" or spec.get("writes"):
        return None  # lists of any length
    if spec["task"] == "classification":
        return [ColSpec("string", "prediction"), ColSpec("float", "probability")]
    if spec["task"] == "tokens":
        return [ColSpec("long", "prediction"), ColSpec("float", "probability")]
    if spec["task"] == "multilabel":
        return [ColSpec("float", name) for name in spec["class_names"]]
    if spec["outputs"] == 1:
        return [ColSpec("double", "prediction")]
    return [ColSpec("double", f"prediction_{i}") for i in range(spec["outputs"])]


def _make_token_signature(source: str) -> ModelSignature:
    inputs: list[Any] = [TensorSpec(np.dtype("int64"), (-1, -1))]
    prediction = ColSpec("long", "prediction")
    if source == "text":
        inputs, prediction = [ColSpec("string", "text")], ColSpec("string", "prediction")
    outputs: list[Any] = [prediction, ColSpec("float", "probability")]
    return ModelSignature(inputs=Schema(inputs), outputs=Schema(outputs))
