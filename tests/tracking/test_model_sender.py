"""The logged model is whole: it loads and predicts where nothing of this project is installed."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headroom.models import builtin, predictor
from headroom.settings.model_args import ModelError
from headroom.tracking import model_sender

ROOT = Path(__file__).parent.parent.parent
SPECS = {
    "rows": {
        "model": "mlp",
        "args": {"hidden": [4]},
        "task": "classification",
        "source": "csv",
        "input_shape": [2],
        "outputs": 3,
        "class_names": ["x", "y", "z"],
        "feature_names": ["a", "b"],
        "offset": [1.0, 2.0],
        "scale": [3.0, 4.0],
    },
    "tokens": {
        "model": "transformer",
        "args": {"layers": 1, "heads": 2, "width": 8},
        "task": "tokens",
        "source": "tokens",
        "input_shape": [5],
        "outputs": 600,
        "class_names": None,
        "feature_names": None,
        "offset": [0.0],
        "scale": [1.0],
    },
}
SPECS["table"] = {
    **SPECS["rows"],
    "input_shape": [5],
    "feature_names": ["age", "size", "city=Bern", "city=Genf", "city=missing"],
    "offset": [1.0, 2.0, 0.0, 0.0, 0.0],
    "scale": [3.0, 4.0, 1.0, 1.0, 1.0],
    "columns": [
        {"name": "age", "kind": "number", "values": [], "fill": 30.5, "whole": True},
        {"name": "size", "kind": "number", "values": [], "fill": 2.5, "whole": False},
        {
            "name": "city",
            "kind": "category",
            "values": ["Bern", "Genf", "missing"],
            "fill": "missing",
            "whole": False,
        },
    ],
    "missing": "mean",
}
SPECS["text"] = {**SPECS["tokens"], "source": "text", "outputs": 256}
EXAMPLES = {
    "rows": np.array([[1.0, 2.0], [3.0, 4.0]], dtype=np.float32),
    "table": np.array([[31, 2.5, 0, 1, 0], [40, 3, 0, 0, 1]], dtype=np.float32),
    "tokens": np.array([[1, 2, 3, 4, 599], [5, 6, 7, 8, 9]], dtype=np.uint16),
    # The second row begins within a character.
    "text": np.frombuffer(
        "Hello\u00fcber".encode()[:5] + "\u00fcber".encode()[1:] + b"!", np.uint8
    ),
}
LOADS = """
import json, sys, warnings
warnings.simplefilter("ignore")
import mlflow.pyfunc
told = {}
for folder in sys.argv[1:]:
    model = mlflow.pyfunc.load_model(folder)
    example = model.input_example
    predicted = model.predict(example)
    told[folder] = {
        "example": example.values.tolist() if hasattr(example, "values") else example.tolist(),
        "columns": [[name, str(kind)] for name, kind in predicted.dtypes.items()],
        "predicted": predicted["prediction"].tolist(),
        "probability": predicted["probability"].tolist(),
        "code": sys.modules["headroom.models.predictor"].__file__,
    }
    for name in [n for n in sys.modules if n.partition(".")[0] == "headroom"]:
        del sys.modules[name]
print(json.dumps(told))
"""


def _written(path: Path, name: str) -> Any:
    spec, trained = SPECS[name], path / "trained"
    model = builtin.build_model(
        spec["model"], input_shape=spec["input_shape"], outputs=spec["outputs"], args=spec["args"]
    )
    predictor.save(model, spec, trained)
    np.save(trained / "example.npy", EXAMPLES[name].reshape(2, -1))
    (path / "logged").mkdir()
    model_sender._write_model_folder(path / "logged", trained, spec, run_id="0" * 32)
    return predictor.load(trained)


def _as_given(name: str, example: list) -> Any:
    if name == "text":
        return example
    return np.array(example, dtype=object if name == "table" else None)


@pytest.mark.filterwarnings("ignore:Operation with range")  # mlflow's own, with pandas 3
def test_every_kind_of_model_loads_and_predicts_from_its_folder_alone(tmp_path: Path) -> None:
    own, folders = {}, {}
    for name in SPECS:
        (tmp_path / name).mkdir()
        own[name] = _written(tmp_path / name, name)
        folders[name] = str(tmp_path / name / "logged")
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADS, *folders.values()],
        env={**os.environ, "TESTS_WARM_KIND": "models"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    told = {name: json.loads(done.stdout)[folder] for name, folder in folders.items()}
    assert told["text"]["example"] == [["Hello"], ["ber!"]]
    assert str(told["table"]["example"]) == "[[31.0, 2.5, 'Genf'], [40.0, 3.0, nan]]"
    assert told["tokens"]["example"] == EXAMPLES["tokens"].tolist()
    for name, folder in folders.items():
        assert told[name]["code"].startswith(folder)
        given = told[name]["example"]
        expected = own[name].predict(_as_given(name, given))
        assert told[name]["predicted"] == expected["prediction"].tolist()
        np.testing.assert_allclose(told[name]["probability"], expected["probability"], rtol=1e-5)
    assert told["tokens"]["columns"][0] == ["prediction", "int64"]


@pytest.mark.filterwarnings("ignore:Operation with range")  # mlflow's own, with pandas 3
@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("weights.pt", "weights.pt is not as it was logged"),
        ("spec.json", "spec.json is not as it was logged"),
        ("example.npy", "example.npy is not as it was logged"),
        ("../code/headroom/models/builtin.py", "builtin.py is not as it was logged"),
        ("SHA256SUMS", " is (gone|not as it was logged)"),
    ],
)
def test_a_flipped_bit_in_any_file_of_a_logged_model_is_refused(
    tmp_path: Path, file: str, said: str
) -> None:
    """Damaged weights predicted "0,1" for every row, and the exit code was 0."""
    _written(tmp_path, "rows")
    data = tmp_path / "logged" / "data"
    assert predictor.load(data)
    whole = bytearray((data / file).read_bytes())
    whole[len(whole) // 2] ^= 1
    (data / file).write_bytes(whole)
    with pytest.raises(ModelError, match=f"^run: the model in .* damaged or changed: .*{said}"):
        predictor.load(data)
    (data / file).write_bytes(b"")
    with pytest.raises(ModelError, match="^run: the model in .* damaged or changed: "):
        predictor.load(data)


@pytest.mark.filterwarnings("ignore:Operation with range")  # mlflow's own, with pandas 3
def test_the_checksums_of_a_logged_model_are_those_of_sha256sum(tmp_path: Path) -> None:
    _written(tmp_path, "rows")
    data = tmp_path / "logged" / "data"
    checked = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(checked, capture_output=True, text=True, cwd=data)
    assert done.returncode == 0 and "weights.pt: OK" in done.stdout, done.stderr
    (data / "weights.pt").unlink()
    with pytest.raises(ModelError, match="weights.pt is gone"):
        predictor.load(data)


@pytest.mark.parametrize(
    ("name", "inputs", "outputs"),
    [
        ("rows", "['a': double (required), 'b': double (required)]", "string"),
        (
            "table",
            "['age': Any (optional), 'size': double (optional), 'city': string (optional)]",
            "string",
        ),
        ("tokens", "[Tensor('int64', (-1, -1))]", "long"),
        ("text", "['text': string (required)]", "string"),
    ],
)
def test_the_signature_tells_what_goes_in_and_comes_out(
    name: str, inputs: str, outputs: str
) -> None:
    signature = model_sender.make_signature(SPECS[name])
    assert repr(signature.inputs) == inputs
    assert repr(signature.outputs) == (
        f"['prediction': {outputs} (required), 'probability': float (required)]"
    )


RAW = """
import sys, warnings
warnings.simplefilter("ignore")
import mlflow.pyfunc, pandas as pd
model = mlflow.pyfunc.load_model(sys.argv[1])
rows = pd.DataFrame(
    {"note": ["n"] * 3, "city": ["Genf", None, "Rom"], "size": [1.5, None, 2], "age": [31, 40, 50]}
)
print(model.predict(rows)["probability"].round(5).tolist())
rows = rows.drop(columns="size").astype({"age": float})
rows.loc[0, "age"] = None
print(model.predict(rows)["probability"].round(5).tolist())
"""


@pytest.mark.filterwarnings("ignore:Operation with range")
def test_a_logged_model_predicts_on_the_raw_rows_of_a_table(tmp_path: Path) -> None:
    """Story: MLflow refuses int64, which pandas reads whole numbers as, for a double."""
    own = _written(tmp_path, "table")
    command = [sys.executable, "-P", "-c", RAW, str(tmp_path / "logged")]
    warm = {**os.environ, "TESTS_WARM_KIND": "models"}
    done = subprocess.run(command, env=warm, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    inputs = [
        [[31, 1.5, 0, 1, 0], [40, 2.5, 0, 0, 1], [50, 2, 0, 0, 0]],
        [[30.5, 2.5, 0, 1, 0], [40, 2.5, 0, 0, 1], [50, 2.5, 0, 0, 0]],
    ]
    for told, x in zip(done.stdout.splitlines(), inputs, strict=True):
        expected = own.predict(np.array(x))["probability"]
        np.testing.assert_allclose(json.loads(told), expected, atol=2e-5)


def test_what_travels_with_a_model_imports_nothing_that_stays_behind() -> None:
    """Story: builtin.py imported memory_meter.py: no logged model loaded elsewhere."""
    there = {Path(name).stem for name in model_sender.CODE}
    for name in model_sender.CODE:
        tree = ast.parse((ROOT / "headroom" / name).read_text())
        for node in tree.body:  # what runs at the import
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headroom"):
                assert node.module.rpartition(".")[2] in there, f"{name} imports {node.module}"
