"""Rows to predict that are lines of JSON come as those of a CSV do."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from headroom.data.source_data import DataError
from headroom.prediction.input_batches import Batch, Needs, measure_amount, read_batches
from headroom.prediction.request import make_order
from tests.data.json_rows import ROWS, dump_lines, write_csv, write_lines

AB = Needs("classification", "csv", (2,), (("a", "number"), ("b", "category")), width=2)


def _predict(path: Path, needs: Needs, *keep: str) -> list[Batch]:
    order = make_order(input=str(path), output=str(path.with_name("o.jsonl")), keep=keep)
    found = list(read_batches(order, needs))
    assert found[-1].done == measure_amount(order, needs)
    return found


def test_rows_to_predict_come_as_those_of_a_csv_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headroom.data.json_lines.BLOCK_BYTES", 256)
    rows = [
        {"b": row["colour"], "a": row["holes"], "id": i, "more": [i]} for i, row in enumerate(ROWS)
    ]
    found = _predict(write_lines(tmp_path, *dump_lines(rows)), AB, "id")
    assert len(found) > 3 and found[1].at(0) == f"rows.jsonl row {len(found[0].rows) + 1}"
    (plain,) = _predict(write_csv(tmp_path / "rows.csv", rows), AB, "id")
    given = pd.concat([batch.rows for batch in found], ignore_index=True)
    np.testing.assert_array_equal(given["a"].to_numpy(float), plain.rows["a"].to_numpy(float))
    assert given["b"].fillna("").tolist() == plain.rows["b"].fillna("").tolist()
    kept = [text for batch in found for text in batch.kept["id"].to_pylist()]
    assert kept == [str(i) for i in range(120)]


def test_a_model_with_a_decimal_comma_takes_the_numbers_of_json(tmp_path: Path) -> None:
    """data.args.decimal says how a CSV is written; JSON has a point whatever the training had."""
    needs = Needs("regression", "csv", (1,), (("a", "number"),), decimal=",")
    (batch,) = _predict(write_lines(tmp_path, '{"a": 1.5}', '{"a": null}', '{"a": 2}'), needs)
    assert batch.rows["a"].fillna(-1).tolist() == [1.5, -1, 2]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"a": "x", "b": "u"}', "row 2, column 'a': must be a number (got 'x'); mend the cell"),
        ('{"a": {"c": 1}, "b": "u"}', "line 2, key 'a': holds an object; give each of its values"),
        ('{"a": 1, "a": 1}', "line 2 has the key 'a' twice; keep one"),
        ("1", "line 2 is no object ('1'); write each row as an object"),
    ],
)
def test_rows_that_cannot_be_predicted_are_told_by_line_and_key(
    tmp_path: Path, line: str, said: str
) -> None:
    path = write_lines(tmp_path, '{"a": 1, "b": "u"}', line)
    with pytest.raises(DataError) as told:
        _predict(path, AB)
    assert str(told.value).startswith(f"input: rows.jsonl {said}"), told.value
    with pytest.raises(DataError, match="^input: rows.jsonl has no column 'b'; it has 'a'"):
        _predict(write_lines(tmp_path, '{"a": 1}'), AB)


def test_a_key_that_comes_up_late_is_left_out_of_a_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headroom.data.json_lines.HEAD_BYTES", 200)
    rows = [{"a": i, "b": "uv"[i % 2]} for i in range(40)]
    rows[30]["c"] = 1
    (batch,) = _predict(write_lines(tmp_path, *dump_lines(rows)), AB)
    assert batch.rows["a"].tolist() == [*range(40)]
