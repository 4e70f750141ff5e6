"""JSON lines are a table as a CSV of the same rows is, and what is no such table is refused by line
and key."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from headroom.base.facts import DataFacts
from headroom.data import json_lines
from headroom.data.preparation import check_data, prepare_dataset
from headroom.data.readers import open_table
from headroom.data.source_data import DataError
from headroom.settings.run_config import DataConfig
from tests.data.configs import make_data_config
from tests.data.json_rows import ROWS, dump_lines, write_csv, write_lines


def _prepare(path: Path, **more: Any) -> DataFacts:
    given = {"path": str(path), "cache": str(path.with_name(f"cache {path.name}")), **more}
    return prepare_dataset(make_data_config(**given))


@pytest.mark.parametrize("block_bytes", [64, 1 << 19])
@pytest.mark.parametrize(
    "more",
    [
        {"missing": "mean"},
        {"missing": "drop", "drop": ["colour"]},
        {
            "target": "amount",
            "args": {"missing": "mean", "na": ["NaN", "b"], "drop": ["amount "][:0]},
        },
        {"split": "time:day", "args": {"missing": "mean"}},
        {"split": "group:zip", "args": {"missing": "mean"}},
    ],
)
def test_json_lines_are_prepared_as_a_csv_of_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], block_bytes: int
) -> None:
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", block_bytes)
    rows = [{**row, "amount": 1.5 + i} for i, row in enumerate(ROWS)] if "target" in more else ROWS
    plain = _prepare(write_csv(tmp_path / "rows.csv", rows), **more)
    found = _prepare(write_lines(tmp_path, *dump_lines(rows), name="rows.ndjson"), **more)
    assert (found.source, found.decimal) == ("jsonl", ".")
    assert found.fingerprint == plain.fingerprint
    assert found.columns == plain.columns and found.notes == plain.notes


def test_a_key_that_a_line_lacks_is_missing_there_and_keys_may_come_in_any_order(
    tmp_path: Path,
) -> None:
    whole = [{"a": i, "b": i / 4 if i % 3 else None, "y": i % 2} for i in range(40)]
    some = [dict(reversed([(k, v) for k, v in row.items() if v is not None])) for row in whole]
    some[1] = whole[1]
    found = _prepare(
        write_lines(tmp_path, *dump_lines(some), "", " \t", name="some.jsonl"), missing="mean"
    )
    plain = _prepare(write_lines(tmp_path, *dump_lines(whole)), missing="mean")
    assert sorted(found.feature_names or ()) == sorted(plain.feature_names or ()) == ["a", "b"]
    assert found.notes == plain.notes and "14 missing values of 'b'" in found.notes[0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"a": 1, "y": 0', "line 3 is no JSON (Expecting ',' delimiter at character 16: "),
        ("a,y", "line 3 is no JSON (Expecting value at character 1: 'a,y'); write an object a li"),
        ("{'a': 1}", "line 3 is no JSON (Expecting property name enclosed in double quotes at"),
        ("[1, 0]", "line 3 is no object ('[1, 0]'); write each row as an object on a line of"),
        ('"text"', "line 3 is no object ("),
        ("null", "line 3 is no object ("),
        ('{"a": 1, "y": 0} {"a": 2}', "line 3 holds more than an object (at character 17: ' {"),
        ('{"a": 1, "y": 0},', "line 3 holds more than an object (at character 17: ','); write an"),
        ('{"a": 1, "y": 0, "a": 1}', "line 3 has the key 'a' twice; keep one"),
        ('{"a": [1, 2], "y": 0}', "line 3, key 'a': holds a list; give each of its values a key"),
        ('{"a": {"b": 2}, "y": 0}', "line 3, key 'a': holds an object; give each of its values"),
        ('{"a": {}, "y": 0}', "line 3, key 'a': holds an object; give each of its values"),
        ('{"a": "\\ud800", "y": 0}', "line 3, key 'a': holds half a character (a lone surrogate)"),
        ('{"a": "\t", "y": 0}', "line 3 is no JSON (Invalid control character at"),
        ("[" * 100_000, "line 3 is nested too deeply; write an object a line"),
        (b'{"a": "\xff", "y": 0}', 'line 3 is not UTF-8 (at b\'\\n{"a": "\\xff", "y":\'); save'),
        ('{"a": Infinity, "y": 0}', "row 2, column 'a': must be a number of at most 1e+30 in si"),
        ('{"a": "x", "y": 0}', "row 2, column 'a': must be a number (got 'x'), as 19 of its 20"),
        ('{"a": "1,5", "y": 0}', "row 2, column 'a': must be a number (got '1,5'); save it as n"),
        ('{"a": null, "y": 0}', "row 2, column 'a': is missing (as in 1 rows); fill it in, or"),
        ('{"a": NaN, "y": 0}', "row 2, column 'a': is missing (as in 1 rows), as 'NaN' is read"),
        ('{"y": 0}', "row 2, column 'a': is missing (as in 1 rows); fill it in, or"),
    ],
)
def test_what_is_wrong_is_told_by_line_and_key(
    tmp_path: Path, line: str | bytes, said: str
) -> None:
    rows = [f'{{"a": {i}.5, "y": {i % 2}}}' for i in range(19)]
    path = write_lines(tmp_path, rows[0], "", line, *rows[1:])
    with pytest.raises(DataError) as told:
        _prepare(path)
    assert str(told.value).startswith(f"data.path: rows.jsonl {said}"), told.value
    assert "\n" not in str(told.value)


def test_nested_values_that_are_left_out_are_no_trouble(tmp_path: Path) -> None:
    rows = [{"a": i, "tags": [i, {"b": i}], "y": i % 2} for i in range(20)]
    assert _prepare(write_lines(tmp_path, *dump_lines(rows)), drop=["tags"]).feature_names == ("a",)


def test_a_key_that_comes_up_late_is_refused_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns are decided before all rows are read; what was not seen would go unsaid."""
    monkeypatch.setattr(json_lines, "HEAD_BYTES", 200)
    rows: list[dict[str, Any]] = [{"a": i, "b": "uv"[i % 2], "y": i % 2} for i in range(40)]
    rows[30]["c"] = 1
    path = write_lines(tmp_path, *dump_lines(rows))
    check_data(DataConfig(path=str(path), cache=str(tmp_path)))
    with pytest.raises(DataError, match="rows.jsonl line 31 has the key 'c', which no line in the"):
        _prepare(path)


@pytest.mark.parametrize("content", ["\n\n", "{}\n{}\n", " "])
def test_a_file_without_values_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(DataError, match="^data.path: rows.jsonl has no values in its first lines"):
        check_data(DataConfig(path=str(write_lines(tmp_path, content)), cache=str(tmp_path)))


def test_a_line_of_more_than_16_mib_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "HEAD_BYTES", 16)
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 16)
    monkeypatch.setattr(json_lines, "LONGEST_BYTES", 64)
    rows = ['{"a": 1, "y": 0}'] * 5
    path = write_lines(tmp_path, *rows, '{"a": "' + "x" * 200 + '", "y": 1}', *rows)
    with pytest.raises(DataError, match="rows.jsonl line 6 is longer than 64 B; mend it, or write"):
        _prepare(path)


def test_keys_that_are_values_do_not_become_a_million_columns(tmp_path: Path) -> None:
    """A table next to empty: of each MiB of file it would take gigabytes."""
    path = write_lines(tmp_path, *(f'{{"id{i}":1}}' for i in range(90_000)))
    with pytest.raises(DataError, match=r"line 1 to .* values, of [0-9,]+ different keys, each of"):
        check_data(DataConfig(path=str(path), target="id1", cache=str(tmp_path)))
    names = [f"c{i}" for i in range(5000)]
    path = write_lines(tmp_path, json.dumps({n: 1 for n in names}), *["{}"] * 200_000)
    with pytest.raises(DataError, match="values, of 5,000 different keys, each of which is a colu"):
        _prepare(path, target="c1", missing="mean")


TOKENS = (
    *("0", "-0", "12", "-3.50", "1e5", "2E-3", "7.0", "NaN", "Infinity", "-Infinity", "true"),
    *("false", "null", '""', '"null"', '"true"', '" a b "', '"gr\u00fcn"', '"1,5"', '"{}"', '"}"'),
    *('"a\\"b"', '"\\u00fc"', '"\u2028"', '"\x7f"'),
)


@pytest.mark.parametrize("escaped", [False, True])
def test_lines_that_are_alike_are_read_as_each_line_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, escaped: bool
) -> None:
    """The one is a pattern for all lines of a block, the other the decoder of Python."""
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 300)
    taken = TOKENS if escaped else TOKENS[:-4]
    chance = random.Random(5)
    lines = [
        f'{{"a": {chance.choice(taken)},"b" :{chance.choice(taken)}, "\u00fc": 1}}' + "\r" * (i % 2)
        for i in range(400)
    ]
    path = write_lines(tmp_path, *lines, "")
    found = [list(open_table(path, "jsonl").read([1, 0]))]
    monkeypatch.setattr(json_lines, "MOST_GROUPS", 0)
    found.append(list(open_table(path, "jsonl").read([1, 0])))
    assert found[0] == found[1] and len(found[0]) > 20
    written = [cell for rows, _ in found[0] for cell in rows.column(1).to_pylist()]
    decoded = [
        dict(json.loads(line, parse_int=str, parse_float=str, parse_constant=str)) for line in lines
    ]
    assert written == [{True: "true", False: "false"}.get(row["a"], row["a"]) for row in decoded]


@pytest.mark.parametrize(
    "line",
    [
        *('{"a":01,"b":1}', '{"a":1.,"b":1}', '{"a":.5,"b":1}', '{"a":+1,"b":1}', '{"a":1e,"b":1}'),
        *(
            '{"a":-,"b":1}',
            '{"a":nan,"b":1}',
            '{"a":True,"b":1}',
            '{"a":"x,"b":1}',
            '{"a":1 "b":1}',
        ),
        *('{"a":1,"b":1}x', 'x{"a":1,"b":1}', '{"a":1,"b":1},', '{"a":1,"b":1,}', '{"a":1,"b":1'),
        *('{"a":1,"b":1}{"a":1,"b":1}', '{"a":0x1,"b":1}', '{"a":1_0,"b":1}', '{"a":"\t","b":1}'),
    ],
)
def test_what_is_no_json_is_refused_among_lines_that_are_alike(tmp_path: Path, line: str) -> None:
    path = write_lines(tmp_path, '{"a":1,"b":1}', line, '{"a":1,"b":1}')
    with pytest.raises(DataError, match="rows.jsonl line 2 (is no JSON|holds more than an object)"):
        open_table(path, "jsonl")
    path = write_lines(tmp_path, '{"a":1,"b":1}', '{"a":1,"b":1}', '{"a":1,"b":1}')
    table = open_table(path, "jsonl")
    write_lines(tmp_path, '{"a":1,"b":1}', line, '{"a":1,"b":1}')
    with pytest.raises(DataError, match="rows.jsonl line 2 (is no JSON|holds more than an object)"):
        list(table.read([0]))
