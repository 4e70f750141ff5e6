import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from tasks.engine import models, predictor

SPEC = {
    "model": "mlp",
    "args": {"hidden": [5]},
    "task": "classification",
    "input_shape": [3],
    "outputs": 2,
    "class_names": ["cat", "dog"],
    "feature_names": ["a", "b", "c"],
    "offset": [1.0, 2.0, 3.0],
    "scale": [2.0, 2.0, 4.0],
}


def _saved(tmp_path: Path, **changes) -> tuple[torch.nn.Module, predictor.Predictor]:
    spec = {**SPEC, **changes}
    model = models.build(
        spec["model"], input_shape=spec["input_shape"], outputs=spec["outputs"], args=spec["args"]
    )
    predictor.save(model, spec, tmp_path / "model")
    return model, predictor.load(tmp_path / "model")


def test_a_loaded_model_scales_raw_rows_as_the_training_did(tmp_path: Path) -> None:
    model, loaded = _saved(tmp_path)
    raw = np.random.default_rng(0).normal(size=(9000, 3)).astype(np.float32)
    scaled = (torch.from_numpy(raw) - torch.tensor([1.0, 2, 3])) / torch.tensor([2.0, 2, 4])
    with torch.inference_mode():
        expected = model(scaled).numpy()
    np.testing.assert_allclose(loaded.outputs(raw), expected, rtol=1e-5, atol=1e-6)


def test_predictions_carry_the_names_of_the_classes(tmp_path: Path) -> None:
    _, loaded = _saved(tmp_path)
    rows = pd.DataFrame({"c": [3.0, 9.0], "x": [0, 0], "a": [1.0, -5.0], "b": [2.0, 2.0]})
    predicted = loaded.predict(rows)
    outputs = torch.from_numpy(loaded.outputs(rows[["a", "b", "c"]].to_numpy()))
    assert predicted["prediction"].tolist() == [
        SPEC["class_names"][i] for i in outputs.argmax(1).tolist()
    ]
    np.testing.assert_allclose(predicted["probability"], outputs.softmax(1).amax(1), rtol=1e-6)


def test_a_regression_returns_values(tmp_path: Path) -> None:
    _, loaded = _saved(tmp_path, task="regression", outputs=1, class_names=None)
    predicted = loaded.predict(np.zeros((4, 3)))
    assert list(predicted.columns) == ["prediction"] and len(predicted) == 4


def test_no_rows_give_no_predictions(tmp_path: Path) -> None:
    _, loaded = _saved(tmp_path)
    assert len(loaded.predict(np.zeros((0, 3)))) == 0


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    _, loaded = _saved(tmp_path)
    with pytest.raises(ValueError, match="rows: the column 'b' is missing"):
        loaded.predict(pd.DataFrame({"a": [1.0], "c": [2.0]}))
    with pytest.raises(ValueError, match=r"rows: must have the shape \(rows, 3\) \(got \(2, 4\)\)"):
        loaded.predict(np.zeros((2, 4)))


def test_a_flat_row_of_pixels_is_an_image(tmp_path: Path) -> None:
    images = {"input_shape": [1, 2, 2], "feature_names": None, "offset": [0.5], "scale": [2.0]}
    _, loaded = _saved(tmp_path, **images)
    pixels = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    np.testing.assert_array_equal(
        loaded.outputs(pixels), loaded.outputs(pixels.reshape(5, 1, 2, 2))
    )


def test_weights_that_would_execute_are_refused(tmp_path: Path) -> None:
    _saved(tmp_path)

    class Payload:
        def __reduce__(self):
            return json.dumps, ({"a": 1},)

    torch.save({"x": Payload()}, tmp_path / "model" / "weights.pt")
    with pytest.raises(Exception, match="Weights only load failed"):
        predictor.load(tmp_path / "model")
