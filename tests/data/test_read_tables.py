"""Tables as a team has them: text, holes, columns left out, parts in a folder, more than memory."""

import calendar
import io
import json
import logging
import math
import resource
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import csv, parquet
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from headroom.base.facts import Column
from headroom.base.raw_inputs import make_inputs
from headroom.data import delimited_text, parquet_files, preparation, tables
from headroom.data.parquet_files import ParquetFile
from headroom.data.readers import open_table
from headroom.data.source_data import DataError
from headroom.settings.run_config import DataConfig
from tests.data.configs import change_config, make_data_config

PEOPLE = "age,city,id,y\n" + "".join(
    f"{20 + i % 7},{('Bern', 'Genf', ' Chur ')[i % 3]},p{i},{i % 2}\n" for i in range(60)
)


@pytest.fixture(autouse=True)
def _no_prefect_handlers(monkeypatch):
    """Prefect, once imported, warns of each line that is logged outside a flow."""
    monkeypatch.setattr(logging.getLogger("headroom"), "handlers", [])


def _config(tmp_path: Path, text: str, source: str = "csv", **more) -> DataConfig:
    path = tmp_path / f"given.{source}"
    path.write_text(text)
    return make_data_config(source=source, path=str(path), cache=str(tmp_path / "cache"), **more)


def _rows(facts):
    """The raw inputs of all rows, in no order, and their targets."""
    arrays = preparation.load_arrays(facts)
    x = np.concatenate([arrays.train_x, arrays.val_x]) * facts.scale + facts.offset
    return x, np.concatenate([arrays.train_y, arrays.val_y])


def _notes(facts) -> list[str]:
    return json.loads(Path(facts.folder, "manifest.json").read_text())["meaning"]["notes"]


# Separated by tabs


def test_a_tsv_is_read_as_a_csv_is_with_tabs(tmp_path):
    text = "a\tb, c\ty\n" + "1.5\t2\tx\n3\t4\t y\n" * 5
    facts = preparation.prepare_dataset(_config(tmp_path, text, "tsv"))
    assert (facts.source, facts.feature_names, facts.class_names) == (
        "tsv",
        ("a", "b, c"),
        ("x", "y"),
    )
    assert sorted(set(map(tuple, _rows(facts)[0].tolist()))) == [(1.5, 2), (3, 4)]


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
@pytest.mark.parametrize("source", ["csv", "tsv"])
def test_the_first_line_tells_what_separates_the_cells(tmp_path, source, mark):
    frame = pd.DataFrame({"a, b": [1.5, 2.5] * 5, "c;d": ["u", "v|w"] * 5, "y": [0.0, 1.0] * 5})
    decimal = "," if mark == ";" else "."
    text = frame.to_csv(index=False, sep=mark, decimal=decimal)
    facts = preparation.prepare_dataset(_config(tmp_path, text, source, decimal=decimal))
    assert facts.feature_names == ("a, b", "c;d=u", "c;d=v|w")
    assert sorted(set(map(tuple, _rows(facts)[0].tolist()))) == [(1.5, 1, 0), (2.5, 0, 1)]


@pytest.mark.parametrize("mark", [",", ";"])
def test_the_first_row_tells_where_names_hold_other_marks(tmp_path, mark):
    text = f"u|v|w{mark}x;1{mark}y\n" if mark == "," else "u, v, w, x;z;y\n"
    facts = preparation.prepare_dataset(
        _config(tmp_path, text + f"1{mark}2{mark}3.5\n2{mark}3{mark}4.5\n" * 5)
    )
    assert len(facts.feature_names) == 2


def test_a_header_with_a_quote_that_is_never_closed_is_refused(tmp_path):
    words = "^data.path: given.csv .*header with unbalanced quotes; mend line 1"
    with pytest.raises(DataError, match=words):
        preparation.check_data(_config(tmp_path, 'a,"b,y\n1,2,3\n', "csv"))


# Columns left out


def test_columns_are_left_out_before_anything_is_judged(tmp_path):
    text = "a,,a,when,label,y\n" + "1,0,x,2024-01-01,u,0\n2,1,x,2024-01-02,v,1\n" * 5
    config = _config(tmp_path, text.replace("a,,a", "a,,b"), drop=["", "b", "when", "label"])
    facts = preparation.prepare_dataset(config)
    assert facts.feature_names == ("a",)
    assert _notes(facts)[0] == "left out by data.args.drop: '', 'b', 'when', 'label'"
    assert facts.notes == tuple(_notes(facts))


@pytest.mark.parametrize(
    ("drop", "target", "words"),
    [
        (
            ["agee"],
            None,
            "^data.args.drop: given.csv has no 'agee'; did you mean 'age'. it has 'age',",
        ),
        (["y"], "y", "^data.args.drop: holds 'y', which is data.target; take it out of one"),
        (["y"], None, "^data.target: given.csv has no column named target"),
        (
            ["age", "city", "id", "y"],
            None,
            "^data.args.drop: leaves no column of given.csv; keep the",
        ),
        (["age", "city", "id"], None, "^data.path: .* no column that is not left out beside 'y'"),
    ],
)
def test_a_drop_that_cannot_be_meant_is_refused_by_the_check(tmp_path, drop, target, words):
    with pytest.raises(DataError, match=words):
        preparation.check_data(_config(tmp_path, PEOPLE, drop=drop, target=target))


# Categories


def test_text_becomes_one_input_for_each_value_sorted_and_not_scaled(tmp_path):
    facts = preparation.prepare_dataset(_config(tmp_path, PEOPLE, drop=["id"]))
    assert facts.feature_names == ("age", "city=Bern", "city=Chur", "city=Genf")
    assert (facts.offset[1:], facts.scale[1:]) == ((0, 0, 0), (1, 1, 1))
    assert facts.columns == (
        Column("age", "number", whole=True),
        Column("city", "category", ("Bern", "Chur", "Genf")),
    )
    assert facts.class_rows == (24, 24)
    arrays = preparation.load_arrays(facts)
    for x in (arrays.train_x, arrays.val_x):
        assert (x[:, 1:].sum(axis=1) == 1).all() and set(np.unique(x[:, 1:])) == {0, 1}
    x, y = _rows(facts)
    given = {(20 + i % 7, i % 3, i % 2) for i in range(60)}
    place = {0: 0, 1: 2, 2: 1}  # Bern, Genf, Chur among the sorted
    assert {(round(r[0]), int(np.argmax(r[1:])), int(c)) for r, c in zip(x, y, strict=True)} == {
        (age, place[city], c) for age, city, c in given
    }


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (["red"] * 40, "column 'a': holds 'red' in every row, of which nothing can be learnt"),
        (
            [f"id{i}" for i in range(1001)],
            "column 'a': has 1,001 different texts in 1,001 rows, su",
        ),
        (["1", "2", "x", "4"] * 10, "row 3 .*'a': must be a number .got 'x'., as 30 of its 40 cel"),
        (["1", "x"] * 10, "row 2 .*, column 'a': must be a number .got 'x'."),
        (
            [""] * 10,
            "column 'a': holds no value in any row; leave the column out by data.args.drop",
        ),
    ],
)
def test_a_text_column_of_no_use_is_refused_by_name(tmp_path, cells, words):
    text = "a,b,y\n" + "".join(f"{cell},1,{i % 2}\n" for i, cell in enumerate(cells))
    with pytest.raises(DataError, match=f"^data.path: given.csv {words}"):
        preparation.prepare_dataset(_config(tmp_path, text))


def test_a_thousand_values_and_text_with_few_numerals_are_categories(tmp_path):
    cells = [f"id{i}" for i in range(1000)] + ["7", "8.5"]
    text = "a,y\n" + "".join(f"{cell},{i % 2}\n" for i, cell in enumerate(cells[2:] * 2))
    facts = preparation.prepare_dataset(_config(tmp_path, text))
    assert facts.input_shape == (1000,) and facts.feature_names[:2] == ("a=7", "a=8.5")


def test_a_column_that_becomes_text_in_a_later_block_is_judged_as_a_whole(tmp_path, monkeypatch):
    """Story: numbers of the first block must keep their spelling once the column is a category."""
    monkeypatch.setattr(delimited_text, "BLOCK_BYTES", 64)
    cells = ["007"] * 8 + ["x"] * 20
    text = "a,b,y\n" + "".join(f"{c},{i}.5,{i % 2}\n" for i, c in enumerate(cells))
    config = _config(tmp_path, text)
    assert len(list(open_table(Path(config.path), "csv").read([0]))) > 3
    facts = preparation.prepare_dataset(config)
    assert facts.feature_names == ("a=007", "a=x", "b")
    assert _rows(facts)[0][:, 0].sum() == 8
    broken = text.replace("x,", "1.5,").replace("1.5,27.5", "x,27.5")
    with pytest.raises(DataError, match="row 28 .*, column 'a': must be a number .got 'x'., as 27"):
        preparation.prepare_dataset(_config(tmp_path, broken))


def test_words_for_missing_are_known_among_numbers_that_had_none_so_far(tmp_path, monkeypatch):
    """Story: where the first block holds only numbers, cells are no longer compared with them."""
    monkeypatch.setattr(delimited_text, "BLOCK_BYTES", 64)
    lines = [f"{i}.5,{i % 7},{i % 2}\n" for i in range(60)]
    words = csv.ConvertOptions().null_values
    assert {"", "NA", "NaN", "-1.#IND"} <= set(words)
    for word in words:
        holes = [*lines[:40], f"{word},1,0\n", f"3.5,{word},1\n", *lines[42:]]
        facts = preparation.prepare_dataset(
            _config(tmp_path, "a,b,y\n" + "".join(holes), missing="mean")
        )
        assert [note.split()[:5] for note in facts.notes[:2]] == [
            ["1", "missing", "values", "of", f"'{name}'"] for name in "ab"
        ]
        assert [column.whole for column in facts.columns] == [False, True]
    broken = "a,b,y\n" + "".join([*lines[:40], "1.5,2,NA\n", *lines[41:]])
    with pytest.raises(DataError, match="row 41 below the header, column 'y': is missing .as in 1"):
        preparation.prepare_dataset(_config(tmp_path, broken))


def test_a_target_that_becomes_text_in_a_later_block_keeps_its_spelling(tmp_path, monkeypatch):
    monkeypatch.setattr(delimited_text, "BLOCK_BYTES", 64)
    text = "a,y\n" + "".join(f"{i}.5,{'01' if i < 20 else 'no'}\n" for i in range(40))
    facts = preparation.prepare_dataset(_config(tmp_path, text))
    assert facts.class_names == ("01", "no") and facts.class_rows == (16, 16)


@pytest.mark.parametrize("block_bytes", [64, 1 << 20])
def test_rows_are_the_same_however_they_are_cut_into_blocks(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(delimited_text, "BLOCK_BYTES", block_bytes)
    lines = "".join(f'{i},"two\nlines, ""{i % 3}""",{i % 2}\r\n' for i in range(50))
    facts = preparation.prepare_dataset(_config(tmp_path, "a,b,y\r\n" + lines))
    assert facts.feature_names == ("a", *(f'b=two\nlines, "{i}"' for i in range(3)))
    assert facts.offset == pytest.approx((26.05, 0, 0, 0)) and facts.scale[0] == pytest.approx(
        13.9283
    )
    ragged = "a,b,y\n" + "1,2,0\n" * 40 + "1,2\n" + "1,2,1\n" * 9
    with pytest.raises(DataError, match="row 41 below the header: has 2 cells where the header"):
        preparation.prepare_dataset(_config(tmp_path, ragged))
    with pytest.raises(DataError, match="line 43 is not UTF-8"):
        config = _config(tmp_path, "a,b,y\n" + "1,2,0\n" * 50)
        text = Path(config.path).read_bytes().splitlines(keepends=True)
        text[42] = b"1,\xff,0\n"
        Path(config.path).write_bytes(b"".join(text))
        preparation.prepare_dataset(config)


def test_a_bad_row_is_told_by_its_number_however_many_threads_arrow_has(tmp_path, monkeypatch):
    """It was row None with more than one."""
    monkeypatch.setattr(delimited_text, "BLOCK_BYTES", 64)
    before = pa.cpu_count()
    pa.set_cpu_count(2)
    try:
        with pytest.raises(DataError) as told:
            text = "a,b,y\n" + "1,2,0\n" * 40 + "1,2\n" + "1,2,1\n" * 90 + "3,4,5,6\n"
            preparation.prepare_dataset(_config(tmp_path, text))
    finally:
        pa.set_cpu_count(before)
    assert str(told.value).startswith("data.path: given.csv row 41 below the header: has 2 cells")


def test_codes_stay_codes_where_a_word_for_missing_is_among_them(tmp_path):
    """A cell NaN made fractions of a block, and 007 became 7."""
    text = "zip,y\n" + "007,0\n010,1\nNaN,0\n123,1\n" * 6
    facts = preparation.prepare_dataset(_config(tmp_path, text, missing="drop"))
    assert facts.columns == (Column("zip", "category", ("007", "010", "123")),)


def test_parquet_dictionaries_are_categories_even_of_numerals(tmp_path):
    zips = pa.array(["8001", "3000", "8001", None] * 5).dictionary_encode()
    table = pa.table({"zip": zips, "y": [0, 1] * 10})
    parquet.write_table(table, tmp_path / "t.parquet")
    config = DataConfig(
        path=str(tmp_path / "t.parquet"), cache=str(tmp_path), args={"missing": "mean"}
    )
    facts = preparation.prepare_dataset(config)
    assert facts.feature_names == ("zip=3000", "zip=8001", "zip=missing")
    assert facts.columns[0].fill == "missing"


@pytest.mark.parametrize("source", ["csv", "tsv", "parquet"])
@pytest.mark.parametrize("block_bytes", [256, 1 << 21])
def test_a_table_becomes_what_pandas_and_scikit_learn_make_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, block_bytes: int
) -> None:
    """Types that later blocks widen, words for missing, quotes and booleans among them."""
    monkeypatch.setattr(delimited_text, "BLOCK_BYTES", block_bytes)
    random, rows = np.random.default_rng(5), 300
    frame = pd.DataFrame(
        {
            "row": range(rows),
            "late": [1.0] * 250 + random.normal(size=50).round(3).tolist(),
            "holes": np.where(random.random(rows) < 0.2, np.nan, random.normal(9, 1e-3, rows)),
            "flag": random.random(rows) < 0.5,
            "text": random.choice(["Z\u00fcrich", 'a "quoted", one', "two\nlines"], rows),
            "some": np.where(random.random(rows) < 0.2, None, random.choice(["u", "v"], rows)),
            "code": ["7"] * 200 + ["007"] * 100,
            "y": random.normal(size=rows),
        }
    )
    path = tmp_path / f"given.{source}"
    if source == "parquet":
        frame.to_parquet(path, row_group_size=70)
    else:
        frame.to_csv(path, index=False, sep=delimited_text.MARKS[source])
    facts = preparation.prepare_dataset(
        DataConfig(path=str(path), cache=str(tmp_path / "cache"), args={"missing": "mean"})
    )
    arrays = preparation.load_arrays(facts)
    x = np.concatenate([arrays.train_x, arrays.val_x])
    order = np.rint(x[:, 0] * facts.scale[0] + facts.offset[0]).astype(int)
    assert sorted(order) == list(range(rows))

    train, frame = order[: len(arrays.train_x)], frame.fillna({"some": "missing"})
    numbers = frame[["row", "late", "holes", "flag"]].astype(float)
    scaling = make_pipeline(SimpleImputer(), StandardScaler()).fit(numbers.iloc[train])
    words = frame[["text", "some", "code"]]
    texts = OneHotEncoder(sparse_output=False).fit(words)
    expected = np.hstack([scaling.transform(numbers), texts.transform(words)])
    named = [f"{n}={v}" for n, vs in zip(words, texts.categories_, strict=True) for v in vs]
    assert facts.feature_names == (*numbers, *named)
    np.testing.assert_allclose(x, expected[order], rtol=1e-5, atol=1e-5)
    y = np.concatenate([arrays.train_y, arrays.val_y])[:, 0]
    y = y * facts.target_scale[0] + facts.target_offset[0]
    np.testing.assert_allclose(y, frame["y"].to_numpy()[order], rtol=1e-5, atol=1e-5)


# Missing values

HOLES = "a,b,y\n" + "".join(
    f"{'' if i % 5 == 0 else i},{'' if i % 10 == 1 else 'uv'[i % 2]},{i % 2}\n" for i in range(50)
)


def test_missing_values_fail_unless_something_else_is_asked_for(tmp_path):
    with pytest.raises(DataError) as told:
        preparation.prepare_dataset(_config(tmp_path, HOLES))
    assert str(told.value).splitlines() == [
        "data.path: given.csv row 1 below the header, column 'a': is missing (as in 10 rows); fill "
        "it in, or set data.args.missing to drop or mean",
        "data.path: given.csv row 2 below the header, column 'b': is missing (as in 5 rows); fill "
        "it in, or set data.args.missing to drop or mean",
    ]


def test_rows_with_holes_are_left_out_and_counted(tmp_path):
    facts = preparation.prepare_dataset(_config(tmp_path, HOLES, missing="drop"))
    assert facts.train_rows + facts.val_rows == 35
    assert _notes(facts)[0] == "15 of 50 rows with missing values were left out"
    x, _ = _rows(facts)
    kept = [i for i in range(50) if i % 5 and i % 10 != 1]
    np.testing.assert_allclose(sorted(x[:, 0]), kept, atol=1e-5)
    assert facts.columns[1] == Column("b", "category", ("u", "v")) and facts.missing == "drop"


def test_what_only_left_out_rows_hold_is_no_category(tmp_path):
    text = "a,b,y\n" + ",rare,0\n" + "1,u,0\n2,v,1\n" * 5
    assert preparation.prepare_dataset(_config(tmp_path, text, missing="drop")).columns[
        1
    ].values == (
        "u",
        "v",
    )
    constant = "a,b,y\n" + ",rare,0\n" + "1,u,0\n2,u,1\n" * 5
    with pytest.raises(DataError, match="column 'b': holds 'u' in every row that is left"):
        preparation.prepare_dataset(_config(tmp_path, constant, missing="drop"))


def test_a_row_is_told_as_the_file_counts_it_though_rows_were_left_out(tmp_path):
    text = "a,y\n" + ",0\n" * 3 + "1,0\n2,1\n" * 5 + "3,-100\n"
    with pytest.raises(DataError, match="^data.target: given.csv row 14 below the header, target"):
        preparation.prepare_dataset(_config(tmp_path, text, missing="drop"))


def test_leaving_out_every_row_is_refused(tmp_path):
    with pytest.raises(DataError, match="^data.args.missing: drop would leave no row of given.csv"):
        preparation.prepare_dataset(
            _config(tmp_path, "a,b,y\n" + ",1,0\n2,,1\n" * 5, missing="drop")
        )


def test_holes_are_filled_with_the_mean_of_the_training_rows(tmp_path):
    facts = preparation.prepare_dataset(_config(tmp_path, HOLES, missing="mean"))
    assert facts.train_rows + facts.val_rows == 50
    assert facts.feature_names == ("a", "b=missing", "b=u", "b=v")
    fill = facts.columns[0].fill
    assert facts.columns[1].fill == "missing" and facts.offset[0] == fill
    arrays = preparation.load_arrays(facts)
    raw = arrays.train_x[:, 0] * facts.scale[0] + fill
    given = raw[np.abs(raw - fill) > 1e-3]
    assert len(given) < len(raw)  # some were filled
    np.testing.assert_allclose(given.mean(), fill, rtol=1e-6)
    np.testing.assert_allclose(arrays.train_x[:, 0].std(), 1, rtol=1e-5)
    assert _notes(facts)[0].startswith("10 missing values of 'a' became ")
    assert _rows(facts)[0][:, 1].sum() == 5
    plain = preparation.prepare_dataset(_config(tmp_path, HOLES, missing="mean", scale=False))
    assert plain.columns[0].fill == fill and plain.offset[0] == 0
    assert np.isclose(_rows(plain)[0][:, 0], fill).sum() == 10


@pytest.mark.parametrize("missing", ["drop", "mean"])
def test_a_missing_target_and_an_empty_column_fail_whatever_is_asked_for(tmp_path, missing):
    with pytest.raises(DataError, match="^data.target: given.csv row 2 .*, column 'y': is missing"):
        preparation.prepare_dataset(_config(tmp_path, "a,y\n1,0\n2,\n3,1\n", missing=missing))
    with pytest.raises(DataError, match="^data.path: .* column 'a': holds no value in any row"):
        preparation.prepare_dataset(_config(tmp_path, "a,b,y\n,1,0\n,2,1\n", missing=missing))


def test_a_column_without_a_number_among_the_training_rows_has_no_mean(tmp_path):
    text = "a,b,y\n" + "".join(f"{7 if i == 0 else ''},{i}.5,{i}.5\n" for i in range(5))
    with pytest.raises(DataError, match="column 'a': has no value in any training row, of which"):
        for seed in range(20):
            preparation.prepare_dataset(_config(tmp_path, text, missing="mean", split_seed=seed))


def test_a_nan_in_parquet_is_a_missing_value_like_a_null(tmp_path):
    table = pa.table({"a": pa.array([1.0, float("nan"), None, 4.0] * 5), "y": [0, 1] * 10})
    parquet.write_table(table, tmp_path / "t.parquet")
    config = DataConfig(path=str(tmp_path / "t.parquet"), cache=str(tmp_path / "cache"))
    with pytest.raises(DataError, match="row 2, column 'a': is missing .as in 10 rows"):
        preparation.prepare_dataset(config)
    kept = preparation.prepare_dataset(change_config(config, missing="drop"))
    assert kept.train_rows + kept.val_rows == 10


# Folders of parts


def _parts(folder: Path, *tables, **more) -> DataConfig:
    folder.mkdir()
    for i, table in enumerate(tables):
        parquet.write_table(pa.table(table), folder / f"part-{i}.parquet")
    return make_data_config(
        source="parquet", path=str(folder), cache=str(folder.parent / "cache"), **more
    )


def test_a_folder_of_parquet_is_read_as_one_table_in_the_order_of_names(tmp_path):
    parts = [{"a": np.arange(10.0) + 10 * i, "y": np.arange(10) % 2} for i in range(3)]
    config = _parts(tmp_path / "rows", *parts)
    (tmp_path / "rows" / "_SUCCESS").touch()
    facts = preparation.prepare_dataset(config)
    one = {name: np.concatenate([part[name] for part in parts]) for name in ("a", "y")}
    parquet.write_table(pa.table(one), tmp_path / "one.parquet")
    alone = preparation.prepare_dataset(
        config.model_copy(update={"path": str(tmp_path / "one.parquet")})
    )
    assert facts.fingerprint == alone.fingerprint
    assert preparation.prepare_dataset(config).reused
    parquet.write_table(pa.table(parts[0]), tmp_path / "rows" / "part-3.parquet")
    more = preparation.prepare_dataset(config)
    assert not more.reused and more.train_rows + more.val_rows == 40


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"y": [0]},
            "part-1.parquet column 'a' is missing, but in part-0.parquet it is of type double",
        ),
        (
            {"a": [1.0], "b": [1], "y": [0]},
            "part-1.parquet column 'b' is of type int64, but in part-0.parquet it is missing",
        ),
        (
            {"a": ["x"], "y": [0]},
            "part-1.parquet column 'a' is of type string, but in part-0.parquet it is of",
        ),
    ],
)
def test_parts_of_different_columns_are_refused_by_name_and_file(tmp_path, other, words):
    config = _parts(tmp_path / "rows", {"a": [1.0, 2.0], "y": [0, 1]}, other)
    with pytest.raises(DataError, match=f"^data.path: {words}"):
        preparation.check_data(config)


def test_a_folder_without_parquet_is_refused(tmp_path):
    with pytest.raises(DataError, match="^data.path: the folder .* holds no .*parquet file; name"):
        preparation.check_data(_parts(tmp_path / "rows"))


# Several labels


def test_several_columns_of_0_and_1_in_an_npz_are_prepared_as_labels(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 3))
    y = (x[:, :2] > 0).astype(np.int64)
    np.savez(tmp_path / "t.npz", x=x, y=y)
    config = DataConfig(path=str(tmp_path / "t.npz"), cache=str(tmp_path / "cache"))
    facts = preparation.prepare_dataset(config)
    assert (facts.task, facts.outputs, facts.class_names) == ("multilabel", 2, ("0", "1"))
    rows, targets = _rows(facts)
    assert targets.dtype == np.float32 and ((rows[:, :2] > 0) == targets).all()
    amounts = preparation.prepare_dataset(config.model_copy(update={"task": "regression"}))
    assert (amounts.task, amounts.outputs, amounts.class_names) == ("regression", 2, None)


# Memory


def test_columns_of_parquet_that_are_read_in_turns_are_those_of_a_csv(tmp_path, monkeypatch):
    """However they are kept; and nothing is left of the file."""
    monkeypatch.setattr(tables, "KEPT", 1 << 60)
    text = "a,b,c,y\n" + "".join(f"{i},{i % 3},{'uv'[i % 2]},{i % 2}\n" for i in range(5000))
    config = _config(tmp_path, text)
    plain = preparation.prepare_dataset(config)
    monkeypatch.undo()
    other = config.model_copy(update={"cache": str(tmp_path / "in memory")})
    assert preparation.prepare_dataset(other).fingerprint == plain.fingerprint
    columns = {"a": range(5000), "b": [i % 3 for i in range(5000)], "c": ["u", "v"] * 2500}
    table = pa.table({**columns, "y": [0, 1] * 2500})
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=1700)
    monkeypatch.setattr(tables, "KEPT", 1 << 60)
    monkeypatch.setattr(ParquetFile, "column_bytes", 1 << 60)  # one column at a time
    monkeypatch.setattr(tables, "BLOCK_BYTES", 1)
    monkeypatch.setattr(parquet_files, "BLOCK_BYTES", 1)
    stored = preparation.prepare_dataset(
        DataConfig(path=str(tmp_path / "t.parquet"), cache=str(tmp_path / "cache"))
    )
    assert stored.feature_names == plain.feature_names
    for mine, theirs in zip(_rows(plain), _rows(stored), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-3)
    folders = {Path(facts.folder).name for facts in (plain, stored)}
    assert {path.name for path in (tmp_path / "cache").iterdir()} == folders


def test_features_for_which_the_disk_has_no_room_are_told_by_data_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "KEPT", 1 << 60)
    config = _config(tmp_path, "a,y\n" + "".join(f"{i}.5,{i % 2}\n" for i in range(9000)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(DataError, match="^data.cache: .* cannot be written .File too large"):
            preparation.prepare_dataset(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "cache").exists(), "a file without a name leaves nothing"


def test_rows_for_whose_labels_alone_there_is_no_room_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables.TableBuilder, "row_bytes", 1024**2)
    text = "a,y\n" + "".join(f"{i}.5,{i % 2}\n" for i in range(50))
    words = "^data.memory_mib: given.csv has 50 rows or more, .* about 74.0 MiB .* raise it to 74"
    with pytest.raises(DataError, match=words):
        preparation.prepare_dataset(_config(tmp_path, text, memory_mib=64.0))


PEAK = """
import sys
from pathlib import Path
from headroom.data import preparation as data
from headroom.settings.run_config import DataConfig
config = DataConfig(path=sys.argv[1], cache=sys.argv[2], memory_mib=float(sys.argv[3]) or None)
facts = data.prepare_dataset(config)
if sys.argv[4]:
    from headroom.device import detection as device
    from headroom.training import trainer as training
    from headroom.settings.run_config import RunConfig
    from headroom.training.plan import make_plan
    plan = {"epochs": 1, "batch_size": int(sys.argv[4]), "compile": "off"}
    asked = RunConfig.model_validate({"data": config.model_dump(), "train": plan})
    folder = Path(sys.argv[2])
    here = device.detect_best_device("cpu")
    trained = training.train(
        make_plan(asked, here, facts), folder=folder, log=lambda metrics, step: None
    )
    assert trained.tags["data.residency"] == ("host" if config.memory_mib else "device")
# Not getrusage, which remembers what the process was before it became this one.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(facts.train_rows + facts.val_rows, peak.split()[1])
"""


def _peak(path: Path, cache: Path, limit_mib: float = 0, batch: str = "") -> tuple[int, float]:
    command = [sys.executable, "-c", PEAK, str(path), str(cache), str(limit_mib), batch]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows, kib = done.stdout.split()
    return int(rows), int(kib) / 1024


@pytest.mark.parametrize("source", ["parquet", "csv"])
def test_five_times_the_allowed_memory_is_prepared_within_it(tmp_path, source):
    rows, columns, limit_mib = 80_000, 100, 64
    folder = tmp_path / "rows.parquet"
    folder.mkdir()
    random, whole = np.random.default_rng(0), rows * columns * 8 / 1024**2
    parts = round(5 * limit_mib / whole)
    x = random.normal(size=(rows, columns)).round(3)
    y = random.integers(0, 3, rows)
    table = pa.table({**{f"c{i}": x[:, i] for i in range(columns)}, "y": y})
    tiny = tmp_path / f"tiny.{source}"
    if source == "parquet":
        parquet.write_table(table, folder / "0.parquet", compression="none")
        for i in range(1, parts):
            shutil.copyfile(folder / "0.parquet", folder / f"{i}.parquet")
        parquet.write_table(table.slice(0, 100), tiny)
        assert sum(f.stat().st_size for f in folder.iterdir()) < 5 * limit_mib * 1024**2
    else:
        folder = tmp_path / "rows.csv"
        written = io.BytesIO()
        csv.write_csv(table, written)
        head, _, rest = written.getvalue().partition(b"\n")
        folder.write_bytes(head + b"\n" + rest * parts)
        csv.write_csv(table.slice(0, 100), tiny)
    _, alone = _peak(tiny, tmp_path / "cache")
    read, peak = _peak(folder, tmp_path / "cache", limit_mib)
    assert read == parts * rows and peak - alone < limit_mib


def test_five_times_the_allowed_memory_is_trained_on_within_it(tmp_path):
    # Mapped rows stayed in the process's memory until all of the file was there.
    rows, columns, limit_mib = 20_000, 400, 64  # many columns are few steps
    folder = tmp_path / "rows.parquet"
    folder.mkdir()
    random = np.random.default_rng(0)
    names = [f"c{i}" for i in range(columns)]
    x = random.normal(size=(rows, columns)).astype(np.float32)
    table = pa.table({**dict(zip(names, x.T, strict=True)), "y": random.integers(0, 3, rows)})
    parts = math.ceil(5 * limit_mib / (x.nbytes / 1024**2))
    parquet.write_table(table, folder / "0.parquet", compression="none", use_dictionary=False)
    for i in range(1, parts):
        shutil.copyfile(folder / "0.parquet", folder / f"{i}.parquet")
    tiny = tmp_path / "tiny.parquet"
    parquet.write_table(table.slice(0, 1000), tiny)
    _, alone = _peak(tiny, tmp_path / "cache", batch="512")
    read, peak = _peak(folder, tmp_path / "cache", limit_mib, batch="512")
    assert read == parts * rows and peak - alone < limit_mib


# White space, dates, many texts


@pytest.mark.parametrize("blank", [" ", "   ", "\t", "\u00a0", "\u00a0\u00a0"])
def test_white_space_alone_is_a_missing_cell_of_its_own_row(tmp_path, blank):
    """The sound first row was told to be no number."""
    cells = [str(i / 7) for i in range(80)]
    cells[60] = blank
    text = "a,y\n" + "".join(f"{cell},{i % 2}\n" for i, cell in enumerate(cells))
    with pytest.raises(DataError, match=r"row 61 below the header, column 'a': is missing"):
        preparation.prepare_dataset(_config(tmp_path, text))
    facts = preparation.prepare_dataset(_config(tmp_path, text, missing="mean"))
    assert facts.columns == (Column("a", "number", fill=facts.columns[0].fill),)


def _dated(rows: int = 300) -> pd.DataFrame:
    days = pd.date_range("2019-12-28 03:30", periods=rows, freq="31h")
    return pd.DataFrame({"at": days, "day": days.normalize(), "y": np.arange(rows) % 7 * 1.5})


def _dates_of_pandas(times: pd.Series) -> np.ndarray:
    days = (times - pd.Timestamp("1970-01-01")) / pd.Timedelta(days=1)
    hours = times.dt.hour + times.dt.minute / 60
    of = times.dt
    year, day = 2 * np.pi * (of.day_of_year - 1) / 365.2425, 2 * np.pi * hours / 24
    weekdays = [of.day_name() == day_of for day_of in calendar.day_name]
    of_year, of_day = (np.sin(year), np.cos(year)), (hours, np.sin(day), np.cos(day))
    found = [days, of.year, of.month, *of_year, *weekdays, *of_day]
    return np.stack(found, axis=1).astype(float)


@pytest.mark.parametrize("source", ["csv", "parquet"])
def test_dates_become_numbers_in_training_and_in_raw_rows(tmp_path, source):
    """They were refused as a type. Held against pandas."""
    table = _dated()
    config = _config(tmp_path, table.to_csv(index=False), source=source, missing="mean")
    if source == "parquet":
        table.to_parquet(config.path)
    facts = preparation.prepare_dataset(config)
    parts = ("days", "year", "month", "year_sin", "year_cos")
    parts += tuple(name.lower() for name in calendar.day_name) + ("hour", "day_sin", "day_cos")
    assert [column.values for column in facts.columns] == [parts, parts[:-3]]
    assert facts.feature_names == (*(f"at.{p}" for p in parts), *(f"day.{p}" for p in parts[:-3]))
    expected = np.hstack([_dates_of_pandas(table["at"]), _dates_of_pandas(table["day"])[:, :-3]])
    rows, _ = _rows(facts)
    rows = rows[np.argsort(rows[:, 0])]
    np.testing.assert_allclose(rows, expected, rtol=1e-6, atol=2e-5)
    columns = json.loads(Path(facts.folder, "manifest.json").read_text())["meaning"]["columns"]
    texts = table.astype(str)
    texts.loc[3, "at"] = " "
    for raw in (
        table,
        texts,
        table.astype(object),
        table.assign(at=table["at"].dt.tz_localize("UTC")),
    ):
        found = make_inputs(raw, columns, missing="mean")
        assert found.whole.all()
        others = np.arange(len(table)) != 3
        np.testing.assert_allclose(found.x[others], expected[others], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        make_inputs(texts, columns, missing="mean").x[3, :15], columns[0]["fill"]
    )
    with pytest.raises(ValueError, match=r"column 'at' must hold dates, such as .* \(got 'soon'\)"):
        make_inputs(texts.assign(at="soon"), columns, missing="mean")
    assert "data.split time:COLUMN" in " ".join(_notes(facts))


def test_a_stray_cell_among_dates_is_told_and_not_the_dates(tmp_path):
    table = _dated().assign(at="2026-11-22")
    table.loc[7, "at"] = "soon"
    with pytest.raises(
        DataError, match=r"column 'at': holds dates such as '2026-11-22', and 'soon'"
    ):
        preparation.prepare_dataset(_config(tmp_path, table.to_csv(index=False)))
    clock = "at,y\n" + "".join(f"{i % 24:02d}:30:00,{i % 2}\n" for i in range(90))
    with pytest.raises(DataError, match=r"'at' holds times of day; write them with their dates"):
        preparation.prepare_dataset(_config(tmp_path, clock))
    with pytest.raises(DataError, match=r"'at' is of type 'time of day'; a target must be numbers"):
        preparation.prepare_dataset(_config(tmp_path, clock, target="at"))
    with pytest.raises(DataError, match=r"a target must be numbers, booleans or text"):
        preparation.prepare_dataset(_config(tmp_path, _dated().to_csv(index=False), target="day"))


def test_of_too_many_texts_the_frequent_ones_get_inputs_and_one_is_for_the_rest(tmp_path):
    """3,000 of them were refused."""
    words = [f"w{i:04d}" for i in range(3000)]
    often = [words[i] for i in range(40)] * 50
    cells = [w for w in words for _ in range(1 + (w < "w0100") * 7)] + often
    text = "a,b,y\n" + "".join(f"{w},{i},{i % 2}\n" for i, w in enumerate(cells))
    facts = preparation.prepare_dataset(_config(tmp_path, text))
    column = facts.columns[0]
    assert column.values == ("other", *words[:100]) and column.rest == "other"
    rows, _ = _rows(facts)
    assert (rows[:, :101].sum(axis=1) == 1).all() and rows[:, 0].sum() == 2900
    assert rows[:, 1].sum() == 58
    raw = pd.DataFrame({"a": ["w0001", "w2999", "unseen"], "b": [1, 2, 3]})
    found = make_inputs(raw, [asdict(c) for c in facts.columns], missing="fail").x
    assert found[:, :101].argmax(axis=1).tolist() == [2, 0, 0]
    assert "101 inputs, one for each frequent text, other for the rest" in " ".join(_notes(facts))
    sparse = "a,y\n" + "".join(f"t{i // 3},{i % 2}\n" for i in range(4500))
    with pytest.raises(DataError, match="none of them in 5 rows: too many for a category"):
        preparation.prepare_dataset(_config(tmp_path, sparse))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("https://example.com/a.csv", r"is an address, .* fetch it first \(curl -LO\)"),
        ("s3://bucket/a.csv", r"is an address, .* fetch it first \(aws s3 cp\)"),
        ("parts/*.csv", r"is a pattern: name one file"),
        ("nowhere.csv", r"does not exist; name a file"),
    ],
)
def test_a_path_of_nothing_is_told_for_what_it_is(tmp_path, monkeypatch, path, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=words):
        preparation.prepare_dataset(DataConfig(source="csv", path=path))
