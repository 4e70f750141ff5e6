"""Texts that are numbers, codes or words: what a column is taken for, and what is said of it."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from headroom.base.raw_inputs import make_inputs
from headroom.data import delimited_text, preparation
from headroom.data.columns import TEXT_TYPE, describe_remedy, find_form
from headroom.data.source_data import DataError
from headroom.settings.read_settings import resolve_config
from headroom.settings.run_config import DataConfig
from tests.data.configs import change_config, make_data_config

NUMBERS_AS_TEXT = {
    "0,1234": "set data.args.decimal to ','",
    "-3,5": "set data.args.decimal to ','",
    "1,234": "write it as 1234, or set data.args.decimal to ',' where it is no thousands",
    "1,234,567": "write it as 1234567",
    "1,234.50": "write it as 1234.50",
    "1.234,50": "write it as 1234.50",
    "1'234": "write it as 1234",
    "1\u2019234.5": "write it as 1234.5",
    "1_000": "write it as 1000",
    "1 234": "write it as 1234",
    "1\xa0234,5": "write it as 1234.5",
    "1\u202f234": "write it as 1234",
    "\u22125": "write it as -5",
    "$1.20": "write it as 1.20",
    "-$1.20": "write it as -1.20",
    "\u20ac 1,20": "write it as 1.20",
    "1,20 EUR": "write it as 1.20",
    "CHF 1'000": "write it as 1000",
    "12.30%": "write it as 12.30",
    "5 %": "write it as 5",
    "1,5e3": "set data.args.decimal to ','",
    "01/31/2024": "write dates as 2026-11-22",
    "1/2/24": "write dates as 2026-11-22",
    "31.12.2024": "write dates as 2026-11-22",
    "2024/1/5 10:30": "write dates as 2026-11-22",
}
CATEGORIES = [
    "1-2 years",
    "18-25",
    "0-100",
    "<5",
    "65+",
    "A1",
    "1st",
    "10k",
    "5 kg",
    "3.5L",
    "1/2",
    "1:2",
    "1.2.3",
    "1_2",
    "12:30",
    "#5",
    "$$",
    "%",
    "Q1 2024",
    "2020-21",
    "1,2,3",
    "1, 2",
    "192.168.0.1",
    "0x1F",
    "BMW 320",
    "123-45-6789",
    "-",
    "?",
    "inf",
    "Bern",
]


def _of(tmp_path, cells, *, targets=(0, 1), source="csv", **more) -> DataConfig:
    path, rows = tmp_path / f"given.{source}", list(cells) * 6
    y = [targets[i // len(cells) % len(targets)] for i in range(len(rows))]
    if source == "parquet":
        parquet.write_table(pa.table({"a": rows, "b": range(len(rows)), "y": y}), path)
    else:
        quoted = "".join(f'"{a}"\t{i}\t{t}\n' for i, (a, t) in enumerate(zip(rows, y, strict=True)))
        path = path.with_suffix(".tsv")
        path.write_text("a\tb\ty\n" + quoted)
    return make_data_config(path=str(path), cache=str(tmp_path / "cache"), **more)


@pytest.mark.parametrize("source", ["csv", "parquet"])
@pytest.mark.parametrize("text", NUMBERS_AS_TEXT)
def test_a_number_that_came_as_text_is_refused_by_its_cell_with_what_to_do(tmp_path, text, source):
    """Story: each became hundreds of inputs of 0 and 1, and the run was FINISHED."""
    config = _of(tmp_path, [text, "none", text], source=source)
    with pytest.raises(DataError) as told:
        preparation.prepare_dataset(config)
    (line,) = str(told.value).splitlines()
    assert "row 1" in line and f"column 'a': must be a number (got {text!r})" in line
    said = NUMBERS_AS_TEXT[text] if source == "csv" else describe_remedy(text, None)
    assert f"; {said}" in line and line.endswith("or leave the column out by data.args.drop")


@pytest.mark.parametrize("text", CATEGORIES)
def test_ordinary_categories_are_none_of_them(tmp_path, text):
    assert find_form(text, ".") == find_form(text, ",") == TEXT_TYPE
    facts = preparation.prepare_dataset(_of(tmp_path, [text, f"{text}x", "7"]))
    assert f"a={text}" in facts.feature_names


def _csv(tmp_path: Path, text: str, **more) -> DataConfig:
    path = tmp_path / "given.csv"
    path.write_text(text)
    return make_data_config(path=str(path), cache=str(tmp_path / "cache"), **more)


def _refused(config: DataConfig) -> str:
    with pytest.raises(DataError) as told:
        preparation.prepare_dataset(config)
    return str(told.value)


def test_a_text_of_its_own_in_nearly_each_row_is_an_id_and_no_category(tmp_path):
    """Story: 900 different ids in 900 rows became 900 inputs."""
    lines = "".join(f"p{i},{i % 7},{i % 2}\n" for i in range(900))
    said = _refused(_csv(tmp_path, "id,b,y\n" + lines))
    assert "column 'id': has 900 different texts in 900 rows, such as 'p0'" in said
    assert said.endswith("leave the column out by data.args.drop")
    twice = "".join(f"p{i // 2},{i % 7},{i % 2}\n" for i in range(900))
    assert preparation.prepare_dataset(_csv(tmp_path, "id,b,y\n" + twice)).input_shape == (451,)


# A decimal comma

COMMAS = "a\tb\ty\n" + "".join(f"{i // 10},{i % 10}\t{i}\t{i},25\n" for i in range(60))


def test_the_advice_for_a_target_with_decimal_commas_works(tmp_path):
    """Story: `set data.task to regression` was answered by `set data.task to classification`."""
    (tmp_path / "given.tsv").write_text(COMMAS)
    config = DataConfig(path=str(tmp_path / "given.tsv"), cache=str(tmp_path), args={"drop": ["a"]})
    for task in ("auto", "regression"):
        said = _refused(config.model_copy(update={"task": task}))
        assert said.startswith("data.target: given.tsv row 1 below the header, target 'y': a regre")
        assert (
            "(got '0,25'); set data.args.decimal to ',', or set data.task to classification" in said
        )
    facts = preparation.prepare_dataset(change_config(config, args={"decimal": ","}))
    arrays = preparation.load_arrays(facts)
    assert facts.task == "regression" and facts.decimal == ","
    x = np.concatenate([arrays.train_x, arrays.val_x]) * facts.scale + facts.offset
    np.testing.assert_allclose(x[:, 0] * 10, x[:, 1], atol=1e-4)
    few = "".join(f'{i},"{i % 2},5"\n' for i in range(60))
    assert "needs numbers (got '0,5')" in _refused(_csv(tmp_path, "a,y\n" + few))
    classes = preparation.prepare_dataset(_csv(tmp_path, "a,y\n" + few, task="classification"))
    assert classes.class_names == ("0,5", "1,5")


def test_text_in_most_of_a_target_gets_no_advice_that_goes_in_a_circle(tmp_path):
    names = "".join(f"{i},n{i}\n" for i in range(60))
    said = _refused(_csv(tmp_path, "a,y\n" + names))
    assert "classes of one row" in said and "regression" not in said
    amounts = "".join(f"{i},{'?' if i == 7 else i}\n" for i in range(150))
    said = _refused(_csv(tmp_path, "a,y\n" + amounts))
    assert "row 8 below the header, target 'y': a regression needs numbers (got '?'); mend" in said


def test_a_point_is_refused_where_the_comma_was_asked_for(tmp_path):
    text = "a\ty\n" + "1.5\t0\n2.25\t1\n" * 9
    (tmp_path / "given.tsv").write_text(text)
    config = DataConfig(
        path=str(tmp_path / "given.tsv"), cache=str(tmp_path), args={"decimal": ","}
    )
    assert "(got '1.5'); set data.args.decimal to '.'" in _refused(config)


@pytest.mark.parametrize(("source", "more"), [("parquet", {"decimal": ","}), ("npz", {"na": []})])
def test_a_setting_of_text_is_refused_for_a_source_without(source, more):
    with pytest.raises(ValueError, match=f"{source} takes .*no"):
        make_data_config(source=source, path="x", **more)


# Words that mean missing

GRADES = "country,grade,y\n" + "".join(
    f"{('NA', 'CH', 'DE')[i % 3]},{('-999', 'A', '?', 'B')[i % 4]},{i % 2}\n" for i in range(60)
)


def test_a_word_that_was_read_as_missing_is_said_and_data_na_is_the_way_out(tmp_path):
    """Story: NA, the code of Namibia, was missing without a word, and nothing could be done."""
    said = _refused(_csv(tmp_path, GRADES)).splitlines()
    assert said == [
        "data.path: given.csv row 1 below the header, column 'country': is missing (as in 20 rows),"
        " as 'NA' is read; fill it in, or set data.args.missing to drop or mean, or list the words "
        "that mean missing in data.args.na"
    ]
    for missing in ("drop", "mean"):
        facts = preparation.prepare_dataset(_csv(tmp_path, GRADES, missing=missing))
        assert facts.notes[0] == "'NA' was read as missing in 'country' (data.args.na)"
    facts = preparation.prepare_dataset(_csv(tmp_path, GRADES, na=[]))
    assert facts.columns[0].values == ("CH", "DE", "NA") and facts.na == ()
    facts = preparation.prepare_dataset(_csv(tmp_path, GRADES, na=["?", "-999"], missing="mean"))
    assert facts.columns[1].values == ("A", "B", "missing")
    assert facts.notes[0] == "'-999', '?' was read as missing in 'grade' (data.args.na)"


def test_a_missing_target_names_its_word_and_data_na_makes_a_class_of_it(tmp_path):
    text = "a,y\n" + "1,NA\n2,none\n3,A\n" * 9
    said = _refused(_csv(tmp_path, text))
    assert "'y': is missing (as in 9 rows), as 'NA' is read; fill it in or drop the rows" in said
    assert "data.args.na" in _refused(_csv(tmp_path, text.replace("NA", "B")))  # of `none`
    assert preparation.prepare_dataset(_csv(tmp_path, text, na=[])).class_names == (
        "A",
        "NA",
        "none",
    )


@pytest.mark.parametrize("source", ["csv", "parquet"])
def test_a_number_may_mean_missing(tmp_path, source):
    table = {"a": [1.5, -999.0, 2.5] * 9, "n": [-999, 5, 7] * 9, "y": [0, 1, 1] * 9}
    frame, path = pd.DataFrame(table), tmp_path / f"given.{source}"
    getattr(frame, f"to_{source}")(path, index=False)
    config = DataConfig(
        path=str(path), cache=str(tmp_path), args={"na": ["-999"], "missing": "mean"}
    )
    facts = preparation.prepare_dataset(config)
    assert [column.fill for column in facts.columns] == pytest.approx([2, 6], abs=0.3)
    rows = make_inputs(frame, [asdict(c) for c in facts.columns], missing="mean", na=facts.na)
    assert rows.x[1, 0] == np.float32(facts.columns[0].fill)


def test_a_fraction_among_classes_is_said_to_have_made_a_regression(tmp_path):
    text = "a,y\n" + "".join(f"{i},{0.5 if i == 41 else i % 2}\n" for i in range(60))
    facts = preparation.prepare_dataset(_csv(tmp_path, text))
    assert facts.task == "regression" and facts.notes == (
        "learnt as a regression, since given.csv row 42 below the header, target 'y' holds 0.5 (of "
        "60, 1 are fractions); if these are classes, mend it",
    )
    amounts = "a,y\n" + "".join(f"{i},{i / 4}\n" for i in range(60))
    assert preparation.prepare_dataset(_csv(tmp_path, amounts)).notes == ()


# Codes, and numbers that lose digits


@pytest.mark.parametrize("block_bytes", [64, 1 << 20])
@pytest.mark.parametrize("code", ["02139", '"02139"', " 02139", "00"])
def test_whole_numbers_are_text_where_one_begins_with_a_zero(
    tmp_path, monkeypatch, code, block_bytes
):
    """Story: the zip code 02139 became the number 2139, and 007 became 7."""
    monkeypatch.setattr(delimited_text, "BLOCK_BYTES", block_bytes)
    codes = ["10001", "94103"] * 20 + [code, "10001"] * 2
    lines = [f"{c},{i % 9},{i}.0{i % 7},{i % 2}\n" for i, c in enumerate(codes)]
    facts = preparation.prepare_dataset(_csv(tmp_path, "zip,n,f,y\n" + "".join(lines)))
    assert facts.columns[0].values == tuple(sorted(["10001", "94103", code.strip('" ')]))
    assert [(c.kind, c.whole) for c in facts.columns[1:]] == [("number", True), ("number", False)]
    of_target = "a,y\n" + "".join(f"{i},{c}\n" for i, c in enumerate(["01", "10", "7"] * 9))
    assert preparation.prepare_dataset(_csv(tmp_path, of_target)).class_names == ("01", "10", "7")


def test_codes_of_parquet_are_categories_too(tmp_path):
    table = pa.table({"zip": ["02139", "10001"] * 9, "y": [0, 1, 1] * 6})
    parquet.write_table(table, tmp_path / "given.parquet")
    facts = preparation.prepare_dataset(
        DataConfig(path=str(tmp_path / "given.parquet"), cache=str(tmp_path))
    )
    assert facts.columns[0].values == ("02139", "10001")


@pytest.mark.parametrize("value", [2**53 + 1, -(2**53) - 1, 2**63 + 1, 10**20 + 1])
@pytest.mark.parametrize("source", ["csv", "parquet"])
@pytest.mark.parametrize("column", ["a", "y"])
def test_whole_numbers_that_lose_digits_are_refused(tmp_path, value, source, column):
    if source == "parquet" and not -(2**63) <= value < 2**64:
        pytest.skip("no integer of Parquet")
    table = {"a": [1, 2, 3] * 9, "b": [1.5, 2.5, 1e20] * 9, "y": [0, 1, 1] * 9}
    table[column] = [0, 1, value] * 9
    path = tmp_path / f"given.{source}"
    getattr(pd.DataFrame(table), f"to_{source}")(path, index=False)
    said = _refused(DataConfig(path=str(path), cache=str(tmp_path)))
    if column == "y":
        assert said.startswith(f"data.target: {path.name} row 3") and "at most 1e+15" in said
    else:
        assert f"row 3{' below the header' if source == 'csv' else ''}, column 'a': must be" in said
        assert "below 2**53 in size" in said and "\n" not in said
        assert source == "parquet" or f"(got {value})" in said


# A first line that holds no names


@pytest.mark.parametrize(
    "text",
    [
        "5.1,3.5,0.2,setosa\n4.9,3.0,0.2,setosa\n7.0,3.2,1.4,virginica\n",
        "0,5,13,9\n0,0,12,4\n",
        "red,1,1\nblue,0,1\nred,1,0\n",
        "Allen,22,7.25,0\nBob,38,71.3,1\n",
    ],
)
def test_a_first_line_like_the_rows_below_is_no_header(tmp_path, text):
    with pytest.raises(
        DataError, match="^data.path: given.csv line 1 looks like a row, not like n"
    ):
        preparation.check_data(_csv(tmp_path, text * 3, target=text.split("\n")[0].split(",")[-1]))


@pytest.mark.parametrize(
    "text",
    [
        "0,1,2,3\n5.5,1,2,0\n5.1,3,2,1\n",
        "2019,2020,2021\n1,2,3\n4,5,6\n",
        "y,2021,2020,2019,city\n1,2,3,4,Bern\n",
        "city,2019,2020,y\nBern,5,6,0\nGenf,7,8,1\n",
        "400.5,401.5,label\n0.1,0.2,a\n0.3,0.2,b\n",
        "a,b,y\n1,2,0\na,b,y\n3,4,1\n",
        "x,o,y\nx,o,1\no,o,0\n",
        "a,b\n",
    ],
)
def test_names_may_be_numbers_or_words_of_the_rows(tmp_path, text):
    preparation.check_data(_csv(tmp_path, text, target=text.split("\n")[0].split(",")[-1]))


def test_no_word_for_missing_can_be_asked_for_at_the_command_line():
    """Story: `--data.args.na []` was told that data.args.na must be a list."""
    asked = resolve_config(
        None, {"data.path": "a.csv", "data.args.na": "[]", "data.args.decimal": ","}
    )
    assert (asked.data.table.na, asked.data.table.decimal) == ([], ",")
    assert resolve_config(
        None, {"data.path": "a.csv", "data.args.na": "[NA, '-999']"}
    ).data.table.na == [
        "NA",
        "-999",
    ]
    assert (
        resolve_config(None, {"data.path": "a.csv", "data.args.na": "null"}).data.table.na is None
    )
