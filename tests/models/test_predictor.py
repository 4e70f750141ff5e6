import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from headroom.models import builtin, predictor

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
    model = builtin.build_model(
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
    network = loaded.outputs(np.zeros((4, 3)))
    units = {"target_offset": [1.7e9], "target_scale": [100.0]}
    loaded.spec |= units
    np.testing.assert_array_equal(loaded.predict(np.zeros((4, 3))), network * 100 + 1.7e9)


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


TOKENS = {
    "model": "transformer",
    "args": {"layers": 1, "heads": 2, "width": 8},
    "task": "tokens",
    "source": "tokens",
    "input_shape": [6],
    "outputs": 300,
    "class_names": None,
    "feature_names": None,
    "offset": [0.0],
    "scale": [1.0],
}
TEXT = {**TOKENS, "source": "text", "outputs": 256}


def test_the_token_after_each_row_is_predicted_from_rows_up_to_the_context(tmp_path: Path) -> None:
    model, loaded = _saved(tmp_path, **TOKENS)
    rows = np.random.default_rng(0).integers(0, 300, (9000, 6))
    for tokens in (rows, rows[:5, :2].astype(np.uint16), pd.DataFrame(rows[:5])):
        with torch.inference_mode():
            logits = model(torch.tensor(np.array(tokens, dtype=np.int64)))[:, -1]
        np.testing.assert_allclose(loaded.outputs(tokens), logits, rtol=1e-4, atol=1e-6)
        predicted = loaded.predict(tokens)
        chosen = logits.gather(1, torch.tensor(predicted["prediction"].to_numpy())[:, None])[:, 0]
        torch.testing.assert_close(chosen, logits.amax(1), rtol=1e-4, atol=1e-6)  # two may tie
        np.testing.assert_allclose(predicted["probability"], logits.softmax(1).amax(1), rtol=1e-4)
    assert predicted["prediction"].dtype == np.int64


def test_the_byte_after_each_text_is_predicted_from_its_last_bytes(tmp_path: Path) -> None:
    _, loaded = _saved(tmp_path, **TEXT)
    numbers = predictor.TokenPredictor({**TEXT, "source": "tokens"}, loaded.model)
    texts = ["a", "abcdef", "what came before abcdef", "z\u00fcrich"]
    last = [list(text.encode()[-6:]) for text in texts]
    alone = np.concatenate([numbers.outputs(np.array([row])) for row in last])
    for given in (texts, np.array(texts), pd.DataFrame({"text": texts, "other": 1})):
        np.testing.assert_allclose(loaded.outputs(given), alone, rtol=1e-4, atol=1e-6)
    predicted = loaded.predict(texts)
    assert [ord(byte) for byte in predicted["prediction"]] == alone.argmax(1).tolist()
    assert len(loaded.predict([])) == 0 and len(numbers.predict(np.zeros((0, 3), dtype=int))) == 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((2, 7), dtype=int), r"whole numbers of the shape \(rows, 1 to 6\) \(got int64"),
        (np.zeros((2, 0), dtype=int), r"\(rows, 1 to 6\)"),
        (np.zeros(3, dtype=int), r"\(rows, 1 to 6\) \(got int64 \(3,\)\)"),
        (np.zeros((2, 3)), r"whole numbers .* \(got float64"),
        (np.array([[0, 300]]), r"tokens must be from 0 to below 300 \(got 300\)"),
        (np.array([[-1, 3]]), r"tokens must be from 0 to below 300 \(got -1\)"),
    ],
)
def test_what_is_no_row_of_tokens_is_refused(tmp_path: Path, rows, message: str) -> None:
    _, loaded = _saved(tmp_path, **TOKENS)
    with pytest.raises(ValueError, match=f"^rows: .*{message}"):
        loaded.predict(rows)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    _, loaded = _saved(tmp_path, **TEXT)
    with pytest.raises(ValueError, match="^rows: the column 'text' is missing"):
        loaded.predict(pd.DataFrame({"words": ["a"]}))
    for rows in ([""], ["a", None], [[1, 2]]):
        with pytest.raises(ValueError, match="^rows: must be texts of at least one character"):
            loaded.predict(rows)


def test_an_amount_that_was_learnt_as_its_logarithm_stays_a_number() -> None:
    assert np.isfinite(
        predictor.restore_units(np.array([[1e6]]), offset=0.0, scale=1.0, log=(1.0,))
    ).all()
