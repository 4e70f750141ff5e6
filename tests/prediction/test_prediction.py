"""A prediction gives what the model gives, in order, whatever memory does meanwhile."""

import logging
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from headroom.base.facts import DeviceFacts, ModelFacts, PredictFacts
from headroom.data.source_data import DataError
from headroom.device.detection import detect_best_device
from headroom.models import builtin, predictor
from headroom.prediction import prediction
from headroom.prediction.input_batches import read_needs
from headroom.prediction.prediction import NoRoom, choose_rows_at_once
from headroom.prediction.request import Order, make_order
from headroom.settings.model_args import ModelError
from headroom.watch.leaks import release_device_memory, take_baseline

SPEC: dict[str, Any] = {
    "model": "mlp",
    "args": {"hidden": [16]},
    "task": "classification",
    "source": "csv",
    "input_shape": [3],
    "outputs": 2,
    "class_names": ["cat", "a dog"],
    "feature_names": ["a", "b", "c"],
    "offset": [1.0, 2.0, 3.0],
    "scale": [2.0, 2.0, 4.0],
}
IMAGES = {
    **SPEC,
    "model": "cnn",
    "args": {"width": 8},
    "input_shape": [1, 8, 8],
    "feature_names": None,
    "offset": [0.0],
    "scale": [1.0],
}
TEXT = {
    **SPEC,
    "model": "transformer",
    "args": {"layers": 1, "heads": 2, "width": 8},
    "task": "tokens",
    "source": "text",
    "input_shape": [5],
    "outputs": 256,
    "class_names": None,
    "feature_names": None,
    "offset": [0.0],
    "scale": [1.0],
}


@pytest.fixture(scope="module")
def cpu() -> DeviceFacts:
    return detect_best_device("cpu")


def _model(folder: Path, spec: dict[str, Any]) -> ModelFacts:
    torch.manual_seed(0)
    model = builtin.build_model(
        spec["model"], input_shape=spec["input_shape"], outputs=spec["outputs"], args=spec["args"]
    )
    predictor.save(model, spec, folder / "model")
    return ModelFacts(str(folder / "model"), "0" * 32, "m-" + "1" * 32)


def _order(path: Path, **changes: Any) -> Order:
    return make_order(input=str(path), output=str(path.with_name("out.csv")), **changes)


def _predict(wanted: Order, model: ModelFacts, device: DeviceFacts) -> PredictFacts:
    return prediction.predict(wanted, device, model, show_progress=lambda rows, done: None)


def _rows(count: int = 10_000) -> pd.DataFrame:
    values = np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)
    return pd.DataFrame(values, columns=["a", "b", "c"])


def test_each_row_gets_what_the_model_gives_it_beside_the_columns_kept(
    tmp_path: Path, cpu: DeviceFacts
) -> None:
    model, rows = _model(tmp_path, SPEC), _rows()
    rows.assign(id=range(len(rows))).sample(frac=1, random_state=1).to_csv(
        tmp_path / "rows.csv", index=False
    )
    done = _predict(_order(tmp_path / "rows.csv", keep=["id"]), model, cpu)
    read = pd.read_csv(tmp_path / "out.csv").sort_values("id")
    expected = predictor.load(model.folder).predict(rows)
    assert read.columns.tolist() == ["id", "prediction", "probability"]
    assert read["prediction"].tolist() == expected["prediction"].tolist()
    np.testing.assert_allclose(read["probability"], expected["probability"], rtol=1e-4)
    assert (done.rows, done.recovered, done.output) == (10_000, 0, str(tmp_path / "out.csv"))


STORES = {
    **SPEC,
    "input_shape": [3],
    "columns": [
        {"name": "store", "kind": "category", "values": ["Bern", "Zug"], "fill": None},
        {"name": "size", "kind": "number", "values": [], "fill": None},
    ],
}


@pytest.mark.parametrize(
    ("stores", "said"),
    [
        (["Bern", "Zug"], None),
        (
            ["Lugano", "Zug"],
            "1 of 2 rows has texts that training never saw: store=Lugano (row 1)",
        ),
        (["Lugano"], "1 of 1 row has texts that training never saw: store=Lugano (row 1)"),
        (
            ["Bern", *"abacde"],
            "6 of 7 rows have texts that training never saw: store=a (row 2), store=b (row 3), "
            "store=c (row 5) and 2 more",
        ),
    ],
)
def test_texts_that_training_never_saw_are_told(
    tmp_path: Path, cpu: DeviceFacts, stores: list[str], said: str | None
) -> None:
    """Story: a prediction for a store that no training row had said nothing of it."""
    model = _model(tmp_path, STORES)
    table = pd.DataFrame({"store": stores, "size": np.arange(float(len(stores)))})
    for kind in ("csv", "parquet"):
        path = tmp_path / f"rows.{kind}"
        table.to_csv(path, index=False) if kind == "csv" else table.to_parquet(path, index=False)
        done = _predict(_order(path, overwrite=True), model, cpu)
        assert done.warnings == ((said,) if said else ())


def test_how_far_it_is_is_told_until_the_end(tmp_path: Path, cpu: DeviceFacts) -> None:
    model = _model(tmp_path, SPEC)
    np.save(tmp_path / "x.npy", _rows().to_numpy())
    told: list[tuple[int, int]] = []
    prediction.predict(
        _order(tmp_path / "x.npy"),
        cpu,
        model,
        show_progress=lambda rows, done: told.append((rows, done)),
    )
    assert [rows for rows, _ in told] == [4096, 8192, 10_000]
    assert told[-1] == (10_000, 10_000)


def test_texts_are_continued(tmp_path: Path, cpu: DeviceFacts) -> None:
    model, texts = _model(tmp_path, TEXT), ["Hello", "wor", "l"] * 50
    (tmp_path / "rows.txt").write_text("\n".join(texts))
    wanted = replace(_order(tmp_path / "rows.txt"), writes="jsonl")
    _predict(wanted, model, cpu)
    read = pd.read_json(tmp_path / "out.csv", lines=True)
    expected = predictor.load(model.folder).predict(texts)
    assert read["prediction"].astype(str).tolist() == expected["prediction"].tolist()


def test_out_of_memory_halves_the_rows_and_gives_the_same_predictions(
    tmp_path: Path, cpu: DeviceFacts, caplog: pytest.LogCaptureFixture
) -> None:
    model = _model(tmp_path, IMAGES)
    x = np.random.default_rng(0).normal(size=(3000, 1, 8, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    with caplog.at_level(logging.WARNING):
        done = _predict(_order(tmp_path / "x.npy", limit_mib=4.0), model, cpu)
    assert done.recovered >= 2 and done.rows_at_once <= 1024
    read = pd.read_csv(tmp_path / "out.csv")
    expected = predictor.load(model.folder).predict(x)
    assert read["prediction"].tolist() == expected["prediction"].tolist()
    np.testing.assert_allclose(read["probability"], expected["probability"], rtol=1e-4)
    assert f"going on with {done.rows_at_once} (" in caplog.messages[-1]


def test_memory_that_does_not_do_for_one_row_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, cpu: DeviceFacts
) -> None:
    model = _model(tmp_path, {**IMAGES, "input_shape": [1, 32, 32]})
    np.save(tmp_path / "x.npy", np.zeros((64, 1, 32, 32), np.float32))
    before = take_baseline("cpu")
    with pytest.raises(NoRoom) as caught:
        _predict(_order(tmp_path / "x.npy", limit_mib=0.05), model, cpu)
    said = str(caught.value)
    assert said.startswith("memory: cpu has no room within the limit of 0.05 MiB for one row")
    assert "raise limit_mib" in said and "\n" not in said
    assert not (tmp_path / "out.csv").exists() and not (tmp_path / ".out.csv.part").exists()
    assert release_device_memory("cpu", baseline_bytes=before.bytes).leaked_bytes == 0


def test_a_model_that_does_not_fit_is_told_as_such(tmp_path: Path, cpu: DeviceFacts) -> None:
    model = _model(tmp_path, IMAGES)
    np.save(tmp_path / "x.npy", np.zeros((64, 1, 8, 8), np.float32))
    with pytest.raises(NoRoom, match="has no room within the limit of 0.001 MiB for the model"):
        _predict(_order(tmp_path / "x.npy", limit_mib=0.001), model, cpu)


def test_the_row_that_the_model_refuses_is_found_and_nothing_is_left(
    tmp_path: Path, cpu: DeviceFacts
) -> None:
    model = _model(tmp_path, {**TEXT, "source": "tokens", "outputs": 50})
    x = np.ones((300, 5), np.int64)
    x[211, 3] = 50
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(DataError, match=r"^input: x\.npy row 212: tokens must be from 0 to below"):
        _predict(_order(tmp_path / "x.npy"), model, cpu)
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_number_that_is_missing_is_no_guess(
    tmp_path: Path, cpu: DeviceFacts, value: float
) -> None:
    """Story: NaN went through the network, and argmax of NaN is a class like any other."""
    model = _model(tmp_path, IMAGES)
    x = np.zeros((5000, 1, 8, 8), np.float32)
    x[4321, 0, 3, 3] = value
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(DataError, match=r"^input: x\.npy row 4322: holds a missing or infinite"):
        _predict(_order(tmp_path / "x.npy"), model, cpu)


@pytest.mark.parametrize("value", [3e38, -2e30])
@pytest.mark.parametrize("kind", ["csv", "npy"])
def test_a_number_beyond_the_bound_of_training_is_refused_with_its_row_and_column(
    tmp_path: Path, cpu: DeviceFacts, kind: str, value: float
) -> None:
    """Its prediction was empty, and the exit code 0."""
    model, rows = _model(tmp_path, SPEC), _rows(5000)
    rows.loc[4321, "b"] = value
    rows.to_csv(tmp_path / "x.csv", index=False)
    np.save(tmp_path / "x.npy", rows.to_numpy(np.float32))
    said = r"row 4322.*: the column 'b' must hold numbers of at most 1e\+30 in size \(got "
    with pytest.raises(DataError, match=rf"^input: x\.{kind} {said}"):
        _predict(_order(tmp_path / f"x.{kind}"), model, cpu)


def test_a_row_for_which_the_model_gives_no_number_is_refused(
    tmp_path: Path, cpu: DeviceFacts
) -> None:
    """Within the bound of a number, and 1e32 deviations from the rows of the training."""
    model = _model(tmp_path, {**SPEC, "scale": [1e-20, 2.0, 4.0]})
    rows = _rows(50)
    rows["a"] = 1.0
    rows.loc[41, "a"] = 1e25
    rows.to_csv(tmp_path / "x.csv", index=False)
    said = r"row 42.*: the model gives no number for a row that misses none; "
    with pytest.raises(DataError, match=rf"^input: x\.csv {said}"):
        _predict(_order(tmp_path / "x.csv"), model, cpu)


def test_a_kept_column_must_not_hide_a_prediction(tmp_path: Path, cpu: DeviceFacts) -> None:
    model = _model(tmp_path, SPEC)
    _rows(3).assign(prediction=1).to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(DataError, match="^keep: 'prediction' is also a column of the predictions"):
        _predict(_order(tmp_path / "rows.csv", keep=["prediction"]), model, cpu)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("spec.json", b"{", "has no description that can be read"),
        ("spec.json", b"[]", "has no description that can be read"),
        ("weights.pt", b"\x80\x02K\x01.", "cannot be loaded"),
        ("weights.pt", b"", "cannot be loaded"),
    ],
)
def test_a_model_that_is_damaged_is_one_sentence(
    tmp_path: Path, cpu: DeviceFacts, file: str, content: bytes, said: str
) -> None:
    model = _model(tmp_path, SPEC)
    (Path(model.folder) / file).write_bytes(content)
    _rows(3).to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(ModelError) as caught:
        _predict(_order(tmp_path / "rows.csv"), model, cpu)
    assert str(caught.value).startswith("run: the model of 00000") and said in str(caught.value)


def test_an_error_keeps_no_tensor(tmp_path: Path, cpu: DeviceFacts) -> None:
    """Story: Prefect keeps the exception of a failed task, and so whatever its frames hold."""
    model = _model(tmp_path, SPEC)
    rows = _rows(3).astype(object)
    rows.loc[2, "b"] = "x"
    rows.to_csv(tmp_path / "rows.csv", index=False)
    before = take_baseline("cpu")
    with pytest.raises(DataError) as caught:
        _predict(_order(tmp_path / "rows.csv"), model, cpu)
    assert "row 3 below the header, column 'b': must be a number (got 'x')" in str(caught.value)
    assert release_device_memory("cpu", baseline_bytes=before.bytes).leaked_bytes == 0


def test_large_rows_go_through_by_few_and_small_ones_by_many() -> None:
    assert choose_rows_at_once(read_needs(SPEC)) == 4096
    assert choose_rows_at_once(read_needs({**IMAGES, "input_shape": [3, 224, 224]})) == 27
    assert choose_rows_at_once(read_needs({**IMAGES, "input_shape": [3, 4096, 4096]})) == 1
    assert choose_rows_at_once(read_needs({**TEXT, "input_shape": [1024]})) == 16


def test_a_description_of_a_model_that_was_changed_is_refused_before_its_weights_are_read(
    tmp_path: Path,
) -> None:
    predictor.save(nn.Linear(2, 3), SPEC, tmp_path)
    spec = (tmp_path / "spec.json").read_bytes()
    (tmp_path / "SHA256SUMS").write_text(f"{sha256(spec).hexdigest()}  spec.json\n")
    model = ModelFacts(str(tmp_path), "0" * 32, "m-" + "1" * 32)
    assert prediction.read_spec(model)["task"] == SPEC["task"]
    (tmp_path / "spec.json").write_bytes(spec.replace(b"2", b"3", 1))
    with pytest.raises(ModelError, match="damaged or changed: spec.json is not as it was logged"):
        prediction.read_spec(model)
