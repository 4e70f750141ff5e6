"""Rows to predict come in order, batch by batch, and what is wrong is told by file, row, column."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from headroom.base.raw_inputs import make_inputs
from headroom.data.preparation import load_arrays, prepare_dataset
from headroom.data.source_data import DataError
from headroom.prediction import input_batches
from headroom.prediction.input_batches import (
    Batch,
    Needs,
    check_rows,
    measure_amount,
    read_batches,
    read_needs,
)
from headroom.prediction.request import Order
from headroom.settings.run_config import DataConfig

AB = Needs("classification", "csv", (2,), (("a", "number"), ("b", "number")), width=2)
COLOURED = Needs("classification", "csv", (3,), (("a", "number"), ("colour", "category")))
PLAIN = Needs("classification", "digits", (1, 2, 2), None, width=4)
TEXT = Needs("tokens", "text", (8,), (("text", "text"),))
TOKENS = Needs("tokens", "tokens", (8,), None, width=8)


def _order(path: Path, *keep: str) -> Order:
    reads = "parquet" if path.is_dir() else path.suffix.removeprefix(".")
    return Order("latest", str(path), reads, str(path.with_name("o.csv")), "csv", keep=keep)


def _read(path: Path, needs: Needs, *keep: str) -> list[Batch]:
    order = _order(path, *keep)
    found = list(read_batches(order, needs))
    total = sum(len(batch.rows) for batch in found)
    assert found[-1].done == measure_amount(order, needs) or not total
    return found


def _refused(path: Path, needs: Needs, *keep: str) -> str:
    with pytest.raises(DataError) as caught:
        list(read_batches(_order(path, *keep), needs))
    return str(caught.value)


def _write(tmp_path: Path, text: str | bytes, name: str = "rows.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("spec", "columns"),
    [
        ({"feature_names": ["a", "b"]}, (("a", "number"), ("b", "number"))),
        ({"feature_names": None}, None),
        ({"task": "tokens", "source": "tokens", "feature_names": None}, None),
        ({"task": "tokens", "source": "text", "feature_names": None}, (("text", "text"),)),
        (
            {"feature_names": ["c=x"], "columns": [{"name": "c", "kind": "category"}]},
            (("c", "category"),),
        ),
    ],
)
def test_what_a_model_takes_stands_in_its_description(spec: dict[str, Any], columns: Any) -> None:
    full = {"task": "classification", "source": "csv", "input_shape": [2], **spec}
    assert read_needs(full).columns == columns


def test_a_table_is_read_in_any_order_of_columns_with_others_left_out(tmp_path: Path) -> None:
    path = _write(tmp_path, "\ufeffb, a ,junk,id\n1,2,x,007\n3,4.5,y,008\n")
    (batch,) = _read(path, AB, "id")
    assert batch.rows.to_dict("list") == {"a": [2.0, 4.5], "b": [1.0, 3.0]}
    assert batch.kept.to_pydict() == {"id": ["007", "008"]}
    assert batch.at(1) == "rows.csv row 2 below the header"


def test_numbers_that_begin_whole_may_go_on_with_fractions_and_holes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guess by a file's first block would refuse the second."""
    monkeypatch.setattr("headroom.data.delimited_text.BLOCK_BYTES", 64)
    lines = [f"{i},{i}" for i in range(40)] + ["0.5,", "1e3,2"]
    found = _read(_write(tmp_path, "a,b\n" + "\n".join(lines) + "\n"), AB)
    assert len(found) > 3
    rows = pd.concat([batch.rows for batch in found])
    assert rows["a"].tolist() == [*range(40), 0.5, 1000.0]
    assert rows["b"].isna().tolist() == [False] * 40 + [True, False]
    assert [batch.first for batch in found] == np.cumsum(
        [0, *(len(batch.rows) for batch in found[:-1])]
    ).tolist()


def test_text_and_truth_are_taken_as_the_model_knows_them(tmp_path: Path) -> None:
    path = _write(tmp_path, "colour\ta\nred\ttrue\n7\tfalse\n", "rows.tsv")
    (batch,) = _read(path, COLOURED)
    assert batch.rows["colour"].tolist() == ["red", "7"]
    assert batch.rows["a"].tolist() == [True, False]
    path = _write(tmp_path, "colour,a,b\nred,true,007\nblue,,1.5\n")
    (batch,) = _read(
        path, Needs("classification", "csv", (3,), (*COLOURED.columns, ("b", "number")))
    )
    assert batch.rows["a"].tolist() == [True, None] and batch.rows["b"].tolist() == [7.0, 1.5]


def test_a_table_for_a_model_of_arrays_gives_as_many_numbers_in_order(tmp_path: Path) -> None:
    path = _write(tmp_path, "id,w,x,y,z\n9,1,2,3,4\n")
    (batch,) = _read(path, PLAIN, "id")
    assert batch.rows.to_numpy().tolist() == [[1, 2, 3, 4]]
    assert "has 5 columns beside those to keep, and the model takes 4 numbers" in _refused(
        path, PLAIN
    )


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet", "x.npy"])
def test_no_rows_are_one_batch_of_none(tmp_path: Path, name: str) -> None:
    if name == "rows.csv":
        _write(tmp_path, "a,b\n")
    elif name == "x.npy":
        np.save(tmp_path / name, np.zeros((0, 2), np.float32))
    else:
        parquet.write_table(
            pa.table({"a": pa.array([], pa.int64()), "b": [0.0][:0]}), tmp_path / name
        )
    (batch,) = _read(tmp_path / name, AB)
    assert len(batch.rows) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,c\n1,2\n", "input: rows.csv has no column 'b'; it has 'a', 'c'"),
        ("a,bb\n1,2\n", "input: rows.csv has no column 'b'; did you mean 'bb'? it has"),
        ("a,b,b\n1,2,3\n", "input: rows.csv has columns of one name: 'b'; rename one"),
        ("a,b\n1,2\n3,x\n", "row 2 below the header, column 'b': must be a number (got 'x')"),
        ("a,b\n1,2\n3\n", "row 2 below the header: has 1 cells where the header has 2"),
        ("a,b\n1,2,3\n", "row 1 below the header: has 3 cells where the header has 2"),
        (b"a,b\n1,\xff\n", "line 2 is not UTF-8"),
    ],
)
def test_what_is_wrong_in_text_is_told_by_row_and_column(
    tmp_path: Path, text: str | bytes, said: str
) -> None:
    told = _refused(_write(tmp_path, text), AB)
    assert told.startswith("input: rows.csv") and said in told and "\n" not in told


@pytest.mark.parametrize("block_bytes", [512, 1 << 20])
def test_a_file_is_predicted_from_as_it_was_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    """Cells of each kind, in all the ways that they may be written."""
    monkeypatch.setattr("headroom.data.delimited_text.BLOCK_BYTES", block_bytes)
    numbers, truths = ("1,5", " 2", "NA", "-3e1", "nan", "+4", ""), ("True", "FALSE", "true", " ")
    days = ("2026-01-02T03:04:00+01:00", "", "2025-12-31 23:59Z", "NULL")
    words, codes = ('"a, ""b"""', " c ", "NA", "\u00fcber"), ("007", "10", "0", "99", "")
    lines = [
        f"{i};{numbers[i % 7]};{truths[i % 4]};{days[i % 4]};{words[i % 4]};{codes[i % 5]};{i % 2}"
        for i in range(300)
    ]
    path = _write(tmp_path, "\ufeffid;n;truth;day;word;code;y\r\n" + "\r\n".join(lines))
    asked = {
        "scale": False,
        "cache": str(tmp_path / "c"),
        "args": {"missing": "mean", "decimal": ","},
    }
    facts = prepare_dataset(DataConfig(path=str(path), **asked))
    kinds = ["number", "number", "number", "date", "category", "category"]
    assert [column.kind for column in facts.columns or ()] == kinds
    arrays = load_arrays(facts)
    trained = np.concatenate([arrays.train_x, arrays.val_x])
    columns = [asdict(column) for column in facts.columns or ()]
    spec = {"task": facts.task, "source": "csv", "input_shape": [1], "feature_names": []}
    needs = read_needs({**spec, "columns": columns, "decimal": facts.decimal, "na": facts.na})
    found = [make_inputs(batch.rows, columns, missing="mean").x for batch in _read(path, needs)]
    np.testing.assert_array_equal(np.concatenate(found), trained[np.argsort(trained[:, 0])])


def test_a_wrong_cell_far_down_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headroom.data.delimited_text.BLOCK_BYTES", 256)
    lines = ["1,2"] * 500 + ["1,NA", "n/a?,2"]
    told = _refused(_write(tmp_path, "a,b\n" + "\n".join(lines) + "\n"), AB)
    assert "row 502 below the header, column 'a': must be a number (got 'n/a?')" in told


def test_a_row_that_is_longer_than_a_block_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Arrow still read ahead for the reader that had failed was once lost to the next one."""
    monkeypatch.setattr("headroom.data.delimited_text.BLOCK_BYTES", 64)
    open_file, files = pa.OSFile, []

    def open_another(name: bytes) -> Any:
        files.append(open_file(name))
        return files[-1]

    monkeypatch.setattr(pa, "OSFile", open_another)
    rows = "".join(f"{i},{i},x\n\n" for i in range(40))
    path = _write(tmp_path, "a,b,note\n" + rows + "40,40," + "x" * 300 + "\n" + rows)
    found = pd.concat([batch.rows for batch in _read(path, AB)])
    assert found["a"].tolist() == [*range(41), *range(40)]
    assert len(files) == 2, "one of its own for each reading"


def test_a_row_of_more_than_16_mib_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headroom.data.delimited_text.BLOCK_BYTES", 64)
    monkeypatch.setattr("headroom.data.delimited_text.LONGEST_BYTES", 64)
    told = _refused(_write(tmp_path, "a,b,note\n1,2,x\n1,2," + "x" * 300 + "\n1,2,x\n"), AB)
    assert told.startswith("input: rows.csv has a row of more than 64 B")
    assert told.endswith("or a quote that is never closed; mend it")


def test_a_column_to_keep_must_be_there(tmp_path: Path) -> None:
    told = _refused(_write(tmp_path, "a,b,ident\n1,2,3\n"), AB, "iden")
    assert told.startswith("keep: rows.csv has no column 'iden'; did you mean 'ident'?")


def test_parts_of_a_folder_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for name, values in (("2", [3, 4]), ("1", [1, 2])):
        table = pa.table({"b": values, "a": pa.array(values, pa.int8()), "day": ["x", None]})
        parquet.write_table(table, folder / f"{name}.parquet")
    found = _read(folder, AB, "day")
    assert [batch.rows["a"].tolist() for batch in found] == [[1, 2], [3, 4]]
    assert [batch.done for batch in found] == [2, 4]
    assert found[1].kept.to_pydict() == {"day": ["x", None]}
    assert found[1].at(0) == "2.parquet row 1"


def test_parquet_columns_of_another_type_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"a": ["x"], "colour": [1]}), path)
    assert _refused(path, COLOURED).splitlines() == [
        "input: rows.parquet column 'a' is of type string; the model takes numbers there: turn it "
        "into numbers",
        "input: rows.parquet column 'colour' is of type int64; the model takes text there: turn it "
        "into text",
    ]


def test_a_damaged_part_is_told_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    parquet.write_table(pa.table({"a": [1.0], "b": [2.0]}), folder / "1.parquet")
    (folder / "2.parquet").write_bytes((folder / "1.parquet").read_bytes()[:-9])
    assert _refused(folder, AB).startswith("input: 2.parquet is damaged or no Parquet file")


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
def test_arrays_are_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, order: str
) -> None:
    monkeypatch.setattr(input_batches, "BATCH_BYTES", 4 * 8 * 3)
    x = np.asarray(np.arange(40.0).reshape(10, 1, 2, 2), order=order)
    save = np.save if name == "x.npy" else np.savez_compressed
    save(tmp_path / name, x)
    found = _read(tmp_path / name, PLAIN)
    np.testing.assert_array_equal(np.concatenate([batch.rows for batch in found]), x)
    assert len(found) == (1 if name == "x.npz" and order == "F" else 4)
    assert found[-1].at(0) == f"{name} row {1 if len(found) == 1 else 10}"


def test_of_several_arrays_x_is_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", y=np.zeros(3), x=np.ones((3, 4)))
    (batch,) = _read(tmp_path / "x.npz", PLAIN)
    assert batch.rows.shape == (3, 4)


@pytest.mark.parametrize(
    ("name", "needs", "arrays", "said"),
    [
        ("x.npy", PLAIN, np.zeros((3, 5)), "must hold numbers of the shape (rows, 1, 2, 2)"),
        ("x.npy", PLAIN, np.array(["a"]), "must hold real numbers of at most 64 bits"),
        ("x.npy", PLAIN, np.array(1.0), "is a single value; save rows"),
        ("x.npy", TOKENS, np.zeros((3, 5)), "must hold whole numbers of the shape (rows, 1 to 8)"),
        ("x.npy", TOKENS, np.zeros((3, 9), int), "whole numbers of the shape (rows, 1 to 8)"),
        ("x.npy", COLOURED, np.zeros((3, 2)), "takes text in 'colour', and an npy file holds"),
        ("x.npz", PLAIN, {"u": np.zeros(3), "v": np.zeros(3)}, "must hold one array, or one named"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, needs: Needs, arrays: Any, said: str
) -> None:
    if isinstance(arrays, dict):
        np.savez(tmp_path / name, **arrays)
    else:
        np.save(tmp_path / name, arrays)
    told = _refused(tmp_path / name, needs)
    assert told.startswith("input: ") and said in told


MASKED = {
    "kind": "dict",
    "of": {
        "ids": {"kind": "rows", "shape": [4], "dtype": "int64"},
        "mask": {"kind": "rows", "shape": [4], "dtype": "int64"},
        "labels": {"kind": "rows", "shape": [], "dtype": "int64"},
    },
}


def test_a_model_of_several_inputs_takes_arrays_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_batches, "BATCH_BYTES", 8 * 4 * 2)
    spec = {"task": "classification", "input_shape": [], "feature_names": None, "inputs": MASKED}
    needs = read_needs({**spec, "source": "own:load"})
    assert (needs.inputs, needs.width) == (("ids", "mask"), 8)
    ids, mask = np.arange(20).reshape(5, 4), np.ones((5, 4), np.int8)
    np.savez(tmp_path / "x.npz", mask=mask, ids=ids, more=ids)
    found = list(read_batches(_order(tmp_path / "x.npz"), needs))
    assert [len(batch.rows["ids"]) for batch in found] == [2, 2, 1]
    np.testing.assert_array_equal(np.concatenate([batch.rows["ids"] for batch in found]), ids)
    np.savez(tmp_path / "x.npz", mask=mask[:4], ids=ids)
    assert "must have as many rows (got {'ids': 5, 'mask': 4})" in _refused(
        tmp_path / "x.npz", needs
    )
    np.savez(tmp_path / "x.npz", ids=ids)
    assert "x.npz has no array 'mask' (got 'ids'); the model takes ids, mask" in _refused(
        tmp_path / "x.npz", needs
    )
    np.save(tmp_path / "x.npy", ids)
    assert "takes ids, mask, and an npy file holds one array" in _refused(tmp_path / "x.npy", needs)
    assert "the model takes arrays (got csv); give an npz file with ids, mask" in _refused(
        _write(tmp_path, "a,b\n1,2\n"), needs
    )


def test_an_array_of_objects_is_never_unpickled(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    np.save(tmp_path / "x.npy", np.array([Payload()], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "x.npz", x=np.array([Payload()], dtype=object))
    for name in ("x.npy", "x.npz"):
        assert "is an array of Python objects (a pickle)" in _refused(tmp_path / name, PLAIN)
    assert not (tmp_path / "ran").exists()


def test_a_cut_array_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((100, 4)))
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(whole[:-8])
    assert "it is cut off" in _refused(tmp_path / "x.npy", PLAIN)
    (tmp_path / "x.npz").write_bytes(b"PK\x03\x04" + b"\0" * 100)
    assert "is damaged or no NPZ archive" in _refused(tmp_path / "x.npz", PLAIN)


def test_a_text_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_batches, "BATCH_BYTES", 6)
    path = _write(tmp_path, "one\r\ntwo words\n\u00fcber\nlast", "rows.txt")
    found = _read(path, TEXT)
    texts = [text for batch in found for text in batch.rows["text"]]
    assert texts == ["one", "two words", "\u00fcber", "last"]
    assert len(found) > 1 and found[-1].at(1) == "rows.txt line 4"


@pytest.mark.parametrize(
    ("text", "said"),
    [(b"one\n\ntwo\n", "line 2 is blank"), (b"one\n\xe9t\xe9\n", "line 2 is not UTF-8")],
)
def test_a_line_that_is_no_text_is_told(tmp_path: Path, text: bytes, said: str) -> None:
    assert f"input: rows.txt {said}" in _refused(_write(tmp_path, text, "rows.txt"), TEXT)


@pytest.mark.parametrize(
    ("name", "needs", "said"),
    [
        ("rows.txt", AB, "the model takes the columns 'a', 'b', not a text a line (got txt)"),
        (
            "rows.csv",
            TOKENS,
            "the model takes tokens, whole numbers in an npz, npy or safetensors file",
        ),
        ("rows.csv", TEXT, "rows.csv has no column 'text'; it has 'x'"),
    ],
)
def test_a_file_of_another_kind_than_the_model_takes_is_refused(
    tmp_path: Path, name: str, needs: Needs, said: str
) -> None:
    with pytest.raises(DataError) as caught:
        check_rows(_order(_write(tmp_path, "x\n1\n", name)), needs)
    assert said in str(caught.value)


def test_prediction_reads_a_file_of_text_as_the_training_did(tmp_path):
    """The same words for missing, and the same decimal mark."""
    columns = (("a", "number"), ("c", "category"))
    needs = Needs("classification", "csv", (2,), columns, na=("?",), decimal=",")
    path = tmp_path / "rows.tsv"
    path.write_text("a\tc\n1,5\tNA\n?\t?\n")
    order = Order("latest", str(path), "tsv", str(tmp_path / "o.csv"), "csv")
    (batch,) = read_batches(order, needs)
    assert batch.rows["a"].tolist()[0] == 1.5 and np.isnan(batch.rows["a"][1])
    known = [
        {"name": "a", "kind": "number", "values": (), "fill": 9.0},
        {"name": "c", "kind": "category", "values": ("NA", "missing"), "fill": "missing"},
    ]
    x = make_inputs(batch.rows, known, missing="mean", na=needs.na).x
    assert x.tolist() == [[1.5, 1, 0], [9, 0, 1]]
    stranger = pd.DataFrame({"a": [1.5, None], "c": ["NA", None]})
    assert make_inputs(stranger, known, missing="mean", na=needs.na).x.tolist() == x.tolist()
    path.write_text("a\tc\n1.5\tNA\n")
    with pytest.raises(DataError, match="column 'a': must be a number, with a decimal comma as da"):
        list(read_batches(order, needs))
