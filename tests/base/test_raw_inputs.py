"""Raw rows at prediction become the inputs that the same rows were in training."""

import json
import logging
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from headroom.base.raw_inputs import count_inputs, make_inputs, restore_raw_values
from headroom.data.preparation import load_arrays, prepare_dataset
from headroom.models import builtin, predictor
from headroom.settings.run_config import DataConfig

COLUMNS = [
    {"name": "age", "kind": "number", "values": (), "fill": 40.5, "whole": True},
    {"name": "city", "kind": "category", "values": ("7", "Bern", "missing"), "fill": "missing"},
]
STRICT = [{**column, "fill": None} for column in COLUMNS]
CITIES = ["Bern", " Genf", "Bern", ""]
HOLES = "age,note,city,size,y\n" + "".join(
    f"{'' if i % 5 == 0 else i},n{i},{CITIES[i % 4]},{i}.5,{i % 2}\n" for i in range(60)
)


@pytest.fixture(autouse=True)
def _no_prefect_handlers(monkeypatch):
    """Prefect, once imported, warns of each line that is logged outside a flow."""
    monkeypatch.setattr(logging.getLogger("headroom"), "handlers", [])


def _prepared(tmp_path: Path, missing: str):
    path = tmp_path / "given.csv"
    path.write_text(HOLES)
    config = DataConfig(
        path=str(path), cache=str(tmp_path / "cache"), args={"missing": missing, "drop": ["note"]}
    )
    return prepare_dataset(config), pd.read_csv(path)


def _loaded(tmp_path: Path, facts, task: str = "classification"):
    model = builtin.build_model("linear", input_shape=facts.input_shape, outputs=2, args={})
    spec = {
        "model": "linear",
        "args": {},
        "task": task,
        "source": "csv",
        "input_shape": facts.input_shape,
        "outputs": 2,
        "class_names": facts.class_names,
        "feature_names": facts.feature_names,
        "offset": facts.offset,
        "scale": facts.scale,
        "columns": [asdict(column) for column in facts.columns],
        "missing": facts.missing,
    }
    predictor.save(model, spec, tmp_path / "model")
    return predictor.load(tmp_path / "model")


@pytest.mark.parametrize("missing", ["mean", "drop"])
def test_the_rows_of_the_file_give_the_outputs_of_the_prepared_rows(tmp_path, missing):
    facts, rows = _prepared(tmp_path, missing)
    loaded, arrays = _loaded(tmp_path, facts), load_arrays(facts)
    given = loaded.outputs(rows.sample(frac=1, random_state=0)[rows.columns[::-1]])
    whole = given[~np.isnan(given).any(axis=1)]
    assert len(whole) == facts.train_rows + facts.val_rows
    with torch.inference_mode():
        x = torch.from_numpy(np.concatenate([arrays.train_x, arrays.val_x]))
        expected = loaded.model[1](x).numpy()
    for mine, theirs in zip(whole.T, expected.T, strict=True):
        np.testing.assert_allclose(np.sort(mine), np.sort(theirs), atol=1e-5)


def test_a_row_with_a_hole_is_not_guessed_and_the_others_are_predicted(tmp_path):
    facts, rows = _prepared(tmp_path, "drop")
    loaded = _loaded(tmp_path, facts)
    predicted = loaded.predict(rows)
    holes = rows[["age", "city"]].isna().any(axis=1)
    assert holes.sum() and predicted["prediction"].isna().tolist() == holes.tolist()
    assert predicted["probability"].isna().tolist() == holes.tolist()
    whole = loaded.predict(rows[~holes])
    assert predicted["prediction"][~holes].tolist() == whole["prediction"].tolist()
    regression = _loaded(tmp_path / "regression", facts, "regression")
    assert regression.predict(rows).isna().any(axis=1).tolist() == holes.tolist()


def test_a_hole_is_refused_where_the_training_had_none(tmp_path):
    facts, rows = _prepared(tmp_path, "drop")
    loaded = _loaded(tmp_path, facts)
    loaded.spec["missing"] = "fail"
    with pytest.raises(ValueError, match="^rows: the column 'age' has a missing value, and the mo"):
        loaded.predict(rows)
    with pytest.raises(
        ValueError, match="^rows: the column 'city' is missing; needs .'age', 'city"
    ):
        loaded.predict(rows.drop(columns="city").dropna())


def test_what_stands_for_nothing_is_the_same_in_every_spelling():
    for nothing in (None, float("nan"), pd.NA, "", "  ", "NA", "NaN"):
        rows = pd.DataFrame({"age": [nothing, 3], "city": [nothing, "Bern"]}, dtype=object)
        filled = make_inputs(rows, COLUMNS, missing="mean")
        assert filled.x.tolist() == [[40.5, 0, 0, 1], [3, 0, 1, 0]] and filled.whole.all()
        left = make_inputs(rows, STRICT, missing="drop")
        assert left.whole.tolist() == [False, True] and left.x[0].tolist() == [0, 0, 0, 0]
    nullable = pd.DataFrame({"age": pd.array([None, 3], dtype="Int64"), "city": ["Bern", " Bern "]})
    assert make_inputs(nullable, COLUMNS, missing="mean").x[:, 0].tolist() == [40.5, 3]
    assert make_inputs(nullable[["age"]], COLUMNS, missing="mean").x[:, 3].tolist() == [1, 1]


def test_a_value_that_training_never_saw_is_none_of_the_inputs():
    rows = pd.DataFrame({"age": [True, 2], "city": ["Rom", 7.0]})
    assert make_inputs(rows, STRICT, missing="fail").x.tolist() == [[1, 0, 0, 0], [2, 1, 0, 0]]


def test_arrays_hold_the_raw_columns_in_order_or_the_inputs():
    raw = np.array([[3, "Bern"], [4, None]], dtype=object)
    inputs = make_inputs(raw, COLUMNS, missing="mean").x
    assert inputs.tolist() == [[3, 0, 1, 0], [4, 0, 0, 1]] and count_inputs(COLUMNS) == 4
    assert make_inputs(inputs, COLUMNS, missing="mean").x.tolist() == inputs.tolist()
    assert restore_raw_values(inputs, COLUMNS) == {"age": [3, 4], "city": ["Bern", None]}
    assert make_inputs(raw[:0], COLUMNS, missing="mean").x.shape == (0, 4)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"age": ["old"], "city": ["Bern"]}, "the column 'age' must hold numbers .got 'old'."),
        ({"age": [[1]], "city": ["Bern"]}, "the column 'age' must hold numbers .got list."),
        ({"age": [3e38], "city": ["Bern"]}, "the column 'age' must hold numbers of at most 1e.30"),
        ({"age": [1], "city": [[2]]}, "the column 'city' must hold text .got list."),
        ({"age": [np.arange(2)], "city": ["Bern"]}, "the column 'age' must hold numbers .got nda"),
        (np.zeros((2, 3)), r"must have the shape .rows, 2. .got .2, 3.."),
    ],
)
def test_rows_that_cannot_be_meant_are_refused_by_column(rows, words):
    rows = pd.DataFrame(rows) if isinstance(rows, dict) else rows
    with pytest.raises(ValueError, match=f"^rows: {words}"):
        make_inputs(rows, COLUMNS, missing="mean")


def test_a_column_that_is_there_twice_is_refused():
    rows = pd.DataFrame([[1, 2, "Bern"]], columns=["age", "age", "city"])
    with pytest.raises(ValueError, match="^rows: the column 'age' is there twice; keep one"):
        make_inputs(rows, COLUMNS, missing="mean")


def test_a_model_without_raw_columns_takes_inputs_as_before(tmp_path):
    facts, _ = _prepared(tmp_path, "drop")
    loaded = _loaded(tmp_path, facts)
    spec = json.loads((tmp_path / "model" / "spec.json").read_text())
    del spec["columns"], spec["missing"]
    (tmp_path / "model" / "spec.json").write_text(json.dumps(spec))
    x = np.ones((3, 4), dtype=np.float32)
    assert (predictor.load(tmp_path / "model").outputs(x) == loaded.outputs(x)).all()


def test_dates_come_back_from_their_inputs_as_they_were_written(tmp_path):
    days = pd.date_range("2019-12-28 03:30", periods=300, freq="31h")
    table = pd.DataFrame({"at": days, "day": days.normalize(), "y": np.arange(300) % 7 * 1.5})
    table.to_csv(tmp_path / "given.csv", index=False)
    config = DataConfig(path=str(tmp_path / "given.csv"), cache=str(tmp_path / "cache"))
    columns = [asdict(column) for column in prepare_dataset(config).columns]
    there_again = restore_raw_values(make_inputs(table, columns, missing="fail").x, columns)
    assert there_again["at"] == table["at"].dt.strftime("%Y-%m-%dT%H:%M").tolist()
    assert there_again["day"] == table["day"].dt.strftime("%Y-%m-%d").tolist()
