"""What MLflow is told of the data: its name, its fingerprint, its columns as the user has them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from headroom.base.facts import Column
from headroom.data.preparation import prepare_dataset
from headroom.run.findings import SCHEMA_LIMIT, make_data_inputs
from headroom.settings.run_config import DataConfig


def test_a_table_is_told_by_its_file_and_its_own_columns(place: Path) -> None:
    rows = "".join(f"{i}.5,{'north' if i % 3 else 'south'},{i % 2}\n" for i in range(60))
    (place / "houses.csv").write_text("area,side,target\n" + rows)
    data = DataConfig(path="houses.csv")
    facts = prepare_dataset(data)
    trained, judged = make_data_inputs(data, facts)
    assert (trained["name"], judged["name"]) == ("houses.csv", "houses.csv (val)")
    assert json.loads(trained["source"]) == {"uri": str(place / "houses.csv")}
    assert trained["digest"] == judged["digest"] == facts.fingerprint
    columns = json.loads(trained["schema"])["mlflow_colspec"]
    assert [(c["name"], c["type"]) for c in columns] == [("area", "double"), ("side", "string")]
    rows_of = [json.loads(told["profile"])["num_rows"] for told in (trained, judged)]
    assert rows_of == [facts.train_rows, facts.val_rows]


def test_a_schema_that_mlflow_would_refuse_is_left_out_and_so_is_data_without_a_fingerprint(
    place: Path,
) -> None:
    data = DataConfig()
    facts = prepare_dataset(data)
    wide = replace(facts, columns=(Column("x" * SCHEMA_LIMIT, "number"),))
    assert all("schema" not in told for told in make_data_inputs(data, wide))
    assert make_data_inputs(data, replace(facts, fingerprint="")) == []


def test_rows_that_are_put_aside_are_told_as_those_of_the_test(place: Path) -> None:
    rows = "".join(f"{i}.5,{i % 2}\n" for i in range(60))
    (place / "rows.csv").write_text("area,target\n" + rows)
    data = DataConfig(path="rows.csv", test_fraction=0.2)
    told = make_data_inputs(data, prepare_dataset(data))
    assert [one["context"] for one in told] == ["training", "validation", "test"]
    assert told[2]["name"] == "rows.csv (test)"
