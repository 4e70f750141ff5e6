"""An output is whole or not there, whatever kind it is and whatever happens to its writer."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from headroom.prediction.output_files import OutputError, open_output
from headroom.prediction.request import Order

ROOT = Path(__file__).parent.parent.parent
FIRST = pa.table({"prediction": ["cat", None], "probability": pa.array([0.5, None], pa.float32())})
SECOND = pa.table({"prediction": ["dog"], "probability": pa.array([0.25], pa.float32())})


def _order(path: Path, *, overwrite: bool = False) -> Order:
    writes = path.suffix.removeprefix(".")
    return Order("latest", "in.csv", "csv", str(path), writes, overwrite=overwrite)


def _written(path: Path, *tables: pa.Table) -> Path:
    with open_output(_order(path), text_width=3) as output:
        assert not path.exists()
        for table in tables:
            output.write(table)
    assert [f.name for f in path.parent.iterdir()] == [path.name]
    return path


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_text_has_a_header_and_empty_cells_for_what_is_missing(tmp_path: Path, ending: str) -> None:
    text = _written(tmp_path / f"o.{ending}", FIRST, SECOND).read_text()
    mark = "," if ending == "csv" else "\t"
    lines = ["prediction,probability", "cat,0.5", ",", "dog,0.25", ""]
    assert text == "\n".join(lines).replace(",", mark)


@pytest.mark.parametrize("name", ['a"b', "a,b", "a\nb", ""])
def test_a_cell_that_needs_quotes_is_read_back_as_it_was(tmp_path: Path, name: str) -> None:
    table = pa.table({"the, name": [name], "prediction": ["x"]})
    path = _written(tmp_path / "o.csv", table)
    read = pd.read_csv(path, keep_default_na=False)
    assert read.to_dict("list") == {"the, name": [name], "prediction": ["x"]}


def test_parquet_keeps_types_and_what_is_missing(tmp_path: Path) -> None:
    from pyarrow import parquet

    read = parquet.read_table(_written(tmp_path / "o.parquet", FIRST, SECOND))
    assert read.equals(pa.concat_tables([FIRST, SECOND]))


def test_npy_is_an_array_of_records_that_needs_no_pickle(tmp_path: Path) -> None:
    read = np.load(_written(tmp_path / "o.npy", FIRST, SECOND), allow_pickle=False)
    assert read["prediction"].tolist() == ["cat", "", "dog"]
    np.testing.assert_array_equal(read["probability"], np.float32([0.5, np.nan, 0.25]))


def test_jsonl_is_an_object_a_line_with_null_for_what_is_missing(tmp_path: Path) -> None:
    lines = _written(tmp_path / "o.jsonl", FIRST, SECOND).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"prediction": "cat", "probability": 0.5},
        {"prediction": None, "probability": None},
        {"prediction": "dog", "probability": 0.25},
    ]


@pytest.mark.parametrize("ending", ["csv", "parquet", "npy", "jsonl"])
def test_no_rows_make_an_output_without_rows(tmp_path: Path, ending: str) -> None:
    path = _written(tmp_path / f"o.{ending}", FIRST.slice(0, 0))
    if ending == "csv":
        assert path.read_text() == "prediction,probability\n"
    elif ending == "npy":
        assert np.load(path).shape == (0,)
    elif ending == "jsonl":
        assert path.read_text() == ""
    else:
        assert pd.read_parquet(path).shape == (0, 2)


@pytest.mark.parametrize("error", [ValueError("bad row"), KeyboardInterrupt(), SystemExit(143)])
@pytest.mark.parametrize("ending", ["csv", "parquet", "npy", "jsonl"])
def test_a_failure_leaves_nothing_and_an_older_output_as_it_was(
    tmp_path: Path, ending: str, error: BaseException
) -> None:
    path = tmp_path / f"o.{ending}"
    path.write_text("older")
    with (
        pytest.raises(type(error)),
        open_output(_order(path, overwrite=True), text_width=3) as output,
    ):
        output.write(FIRST)
        raise error
    assert {f.name: f.read_text() for f in tmp_path.iterdir()} == {path.name: "older"}


def test_an_output_that_came_to_exist_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "o.csv"
    with (
        pytest.raises(OutputError, match="has come to exist meanwhile"),
        open_output(_order(path), text_width=3) as output,
    ):
        output.write(FIRST)
        path.write_text("somebody's")
    assert path.read_text() == "somebody's" and len(list(tmp_path.iterdir())) == 1


def test_two_predictions_do_not_write_into_one_output(tmp_path: Path) -> None:
    with open_output(_order(tmp_path / "o.csv"), text_width=3) as output:
        output.write(FIRST)
        with (
            pytest.raises(OutputError, match=r"another prediction is writing o\.csv"),
            open_output(_order(tmp_path / "o.csv"), text_width=3),
        ):
            pass
    assert (tmp_path / "o.csv").read_text().startswith("prediction")


def test_what_a_hard_kill_left_is_used_again(tmp_path: Path) -> None:
    (tmp_path / ".o.csv.part").write_text("half of a longer file, from before")
    assert _written(tmp_path / "o.csv", SECOND).read_text().endswith("probability\ndog,0.25\n")


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match=r"output: .*o\.csv cannot be written \(No such file"),
        open_output(_order(tmp_path / "gone" / "o.csv"), text_width=3),
    ):
        pass


@pytest.mark.parametrize("ending", ["csv", "parquet", "npy", "jsonl"])
def test_a_disk_that_fills_up_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, ending: str
) -> None:
    """A limit of file size stands for the disk: the same call fails in the same place."""
    code = f"""
import resource, sys
import numpy as np, pyarrow as pa
from headroom.prediction.request import Order
from headroom.prediction.output_files import OutputError, open_output
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
order = Order("latest", "in.csv", "csv", {str(tmp_path / ("o." + ending))!r}, {ending!r})
try:
    with open_output(order, text_width=3) as output:
        for seed in range(100):
            output.write(pa.table({{"x": np.random.default_rng(seed).random(10_000)}}))
except OutputError as error:
    print(error)
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert f"o.{ending} cannot be written (File too large); make room there" in done.stdout, (
        done.stderr
    )
    assert not list(tmp_path.iterdir())


def test_lists_are_written_as_such_or_as_json(tmp_path: Path) -> None:
    """A model that gives its loss itself may predict anything: csv and npy knew no lists."""
    table = pa.table({"prediction": [[[1.5, 2.0]], [[3.0, 4.0]]]})
    for name in ("csv", "jsonl", "npy"):
        (tmp_path / name).mkdir()
    text = _written(tmp_path / "csv" / "o.csv", table).read_text()
    assert text.splitlines() == ["prediction", '"[[1.5,2.0]]"', '"[[3.0,4.0]]"']
    lines = _written(tmp_path / "jsonl" / "o.jsonl", table).read_text().splitlines()
    assert json.loads(lines[0]) == {"prediction": [[1.5, 2.0]]}
    with pytest.raises(OutputError, match="^output: each prediction is a list"):
        _written(tmp_path / "npy" / "o.npy", table)
