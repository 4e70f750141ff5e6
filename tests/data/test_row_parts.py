"""Which rows are in which part, followed by a number that each row carries as its feature, and held
against pandas."""

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet
from pydantic import ValidationError

from headroom.base.facts import DataFacts
from headroom.data.preparation import load_arrays, prepare_dataset
from headroom.data.source_data import DataError
from headroom.settings.run_config import DataConfig
from tests.data.configs import make_data_config

ROWS = 240
RANDOM = np.random.default_rng(5)
GROUPS = np.array([f"who-{k}" for k in RANDOM.integers(0, 40, ROWS)])
TIMES = RANDOM.permutation(ROWS) // 3  # three rows at each
DAYS = np.datetime64("2024-02-20") + TIMES


def _table(**columns: Any) -> pd.DataFrame:
    made = {"id": np.arange(ROWS, dtype=float), **columns, "target": np.arange(ROWS) * 0.25}
    return pd.DataFrame(made)


def _facts(folder: Path, table: pd.DataFrame, kind: str = "csv", **data: Any) -> DataFacts:
    path = folder / f"rows.{kind}"
    if kind == "csv":
        table.to_csv(path, index=False)
    else:
        table.to_parquet(path, index=False)
    config = make_data_config(path=str(path), cache=str(folder / "cache"), scale=False, **data)
    return prepare_dataset(config)


def _ids(facts: DataFacts) -> list[np.ndarray]:
    """The rows of each part: train, val and, where it is there, test."""
    arrays = load_arrays(facts)
    parts = [arrays.train_x, arrays.val_x, *([arrays.test_x] if facts.test_rows else [])]
    found = [np.sort(part[:, 0].round().astype(int)) for part in parts if part is not None]
    assert np.concatenate(found).size == np.unique(np.concatenate(found)).size
    return found


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("test", [0.0, 0.25])
@pytest.mark.parametrize("groups", ["text", "numbers", "categories"])
def test_no_group_is_in_two_parts(tmp_path: Path, kind: str, test: float, groups: str) -> None:
    """The properties of scikit-learn's GroupShuffleSplit, with shares of the rows."""
    column = pd.Series(GROUPS)
    if groups == "numbers":
        column = column.str.removeprefix("who-").astype(int)
    elif groups == "categories":
        column = column.astype("category")
    table = _table(who=column)
    asked = {"split": "group:who", "test_fraction": test}
    facts = _facts(tmp_path, table, kind, **asked)
    parts = _ids(facts)
    assert sum(map(len, parts)) == ROWS and facts.input_shape == (1,)
    seen = [set(GROUPS[part]) for part in parts]
    assert sum(map(len, seen)) == len(set(GROUPS)), "a group is in two parts"
    largest = np.unique(GROUPS, return_counts=True)[1].max()
    assert abs(len(parts[1]) - 0.2 * ROWS) <= largest
    assert not test or abs(len(parts[2]) - test * ROWS) <= largest
    other = _facts(tmp_path, table, kind, **asked, split_seed=1)
    assert set(GROUPS[_ids(other)[1]]) != seen[1] and other.fingerprint != facts.fingerprint


def _iso(day: np.datetime64) -> str:
    return f"{day}T00:00:00+00:00"


TOLD: dict[str, Callable[[], Any]] = {
    "whole numbers": lambda: TIMES,
    "numbers": lambda: TIMES / 7 - 3,
    "days": lambda: DAYS.astype(str),
    "times": lambda: (DAYS.astype("datetime64[s]") + np.timedelta64(5, "h")).astype(str),
    "times of a zone": lambda: [_iso(day) for day in DAYS],
}


@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize("test", [0.0, 0.1])
def test_the_latest_rows_are_validated_and_the_very_latest_tested(
    tmp_path: Path, told: str, test: float
) -> None:
    table = _table(when=TOLD[told]())
    asked = {"split": "time:when", "test_fraction": test}
    parts = _ids(_facts(tmp_path, table, **asked))
    assert sum(map(len, parts)) == ROWS
    for earlier, later in zip(parts, parts[1:], strict=False):
        assert TIMES[earlier].max() < TIMES[later].min()
    assert [len(part) for part in parts[1:]] == [48, 24][: len(parts) - 1]
    latest = table.assign(at=TIMES).sort_values("at").id.astype(int)
    assert set(np.concatenate(parts[1:])) == set(latest.iloc[-48 - round(ROWS * test) :])


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("ns"), pa.timestamp("s", "UTC")])
def test_times_of_parquet_are_taken_as_they_are(tmp_path: Path, kind: pa.DataType) -> None:
    days = pa.array([dt.date(2024, 1, 1) + dt.timedelta(int(k)) for k in TIMES]).cast(kind)
    table = pa.table({"id": np.arange(float(ROWS)), "when": days, "target": np.arange(ROWS) / 4})
    parquet.write_table(table, tmp_path / "rows.parquet")
    config = DataConfig(
        path=str(tmp_path / "rows.parquet"),
        cache=str(tmp_path / "cache"),
        scale=False,
        split="time:when",
    )
    train, val = _ids(prepare_dataset(config))
    assert TIMES[train].max() < TIMES[val].min() and len(val) == 48


def test_rows_of_one_time_are_in_one_part(tmp_path: Path) -> None:
    """The parts then begin at the nearest change."""
    when = np.repeat([1, 2, 3, 4], [100, 60, 70, 10])
    asked = {"split": "time:when"}
    parts = _ids(_facts(tmp_path, _table(when=when), **asked, validation_fraction=0.25))
    assert [len(part) for part in parts] == [160, 80]
    parts = _ids(_facts(tmp_path, _table(when=when), **asked, test_fraction=0.2))
    assert [len(part) for part in parts] == [160, 70, 10]


@pytest.mark.parametrize("test", [0.0, 0.1])
def test_rows_without_a_column_are_split_in_their_order(tmp_path: Path, test: float) -> None:
    x = np.column_stack([np.arange(100.0), np.ones(100)])
    np.savez(tmp_path / "rows.npz", x=x, y=np.arange(100) / 8)
    made = {"path": str(tmp_path / "rows.npz"), "cache": str(tmp_path / "c"), "scale": False}
    parts = _ids(prepare_dataset(DataConfig(**made, split="time", test_fraction=test)))
    assert [part.tolist() for part in parts] == [
        list(range(70 if test else 80)),
        list(range(70 if test else 80, 90 if test else 100)),
        *([list(range(90, 100))] if test else []),
    ]


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_rows_that_are_put_aside_by_chance_are_of_each_class(tmp_path: Path, task: str) -> None:
    table = _table()
    if task == "classification":
        table.target = np.repeat(["a", "b", "c"], [180, 50, 10])
    facts = _facts(tmp_path, table, test_fraction=0.2, validation_fraction=0.1)
    train, val, test = _ids(facts)
    assert abs(len(test) - 48) <= 1 and abs(len(val) - 24) <= 1 and facts.test_rows == len(test)
    if task == "classification":
        for part, share in ((train, 0.7), (val, 0.1), (test, 0.2)):
            counts = table.target[part].value_counts()
            rows = {"a": 180, "b": 50, "c": 10}
            assert all(abs(counts[c] - share * n) <= 1 for c, n in rows.items())


def test_scaling_knows_the_training_rows_only(tmp_path: Path) -> None:
    table = _table(when=np.arange(ROWS))
    table.loc[150:, "id"] = 1e6  # of the later parts
    table.loc[200:, "target"] = 1e9
    table.to_csv(tmp_path / "rows.csv", index=False)
    asked = {"split": "time:when", "test_fraction": 0.2}
    config = DataConfig(
        path=str(tmp_path / "rows.csv"),
        cache=str(tmp_path / "c"),
        validation_fraction=0.3,
        target_transform="scale",
        **asked,
    )
    facts = prepare_dataset(config)
    assert facts.train_rows == 120
    known = table.iloc[:120]
    assert facts.offset[0] == pytest.approx(known.id.mean())
    assert facts.scale[0] == pytest.approx(known.id.std(ddof=0))
    assert facts.target_offset[0] == pytest.approx(known.target.mean())


def test_rows_that_miss_a_feature_take_their_group_with_them(tmp_path: Path) -> None:
    table = _table(who=GROUPS)
    table.loc[::7, "id"] = np.nan
    parts = _ids(_facts(tmp_path, table, split="group:who", missing="drop"))
    assert sum(map(len, parts)) == table.id.notna().sum()
    assert not set(GROUPS[parts[0]]) & set(GROUPS[parts[1]])


def test_a_text_is_judged_by_its_end(tmp_path: Path) -> None:
    (tmp_path / "given.txt").write_bytes(bytes(range(200)))
    made = {
        "path": str(tmp_path / "given.txt"),
        "cache": str(tmp_path / "c"),
        "args": {"context": 4},
    }
    facts = prepare_dataset(DataConfig(**made, validation_fraction=0.2, test_fraction=0.1))
    arrays = load_arrays(facts)
    assert arrays.test_x is not None and arrays.test_y is not None
    assert (arrays.train_x.max(), arrays.val_x.min(), arrays.test_x.min()) == (135, 140, 180)
    assert facts.test_rows == len(arrays.test_x) == 4
    with pytest.raises(
        DataError, match="^data.args.context: 200 tokens are too few for a row of 81"
    ):
        prepare_dataset(make_data_config(**made, context=80, test_fraction=0.1))


# The names are of the settings of today; the content is of before there were these settings, but
# for tables, which may hold dates: these became other inputs since.
KEPT = {
    "t.csv": ("csv-ba40cab5a3902585", "53e39f64ac2ba683"),
    "t.npz": ("npz-7abc9d1b11dc245a", "68cd31b8931c5e44"),
    "t.txt": ("text-caba1cc45b4b210a", "0a1ce6e46fb8f934"),
}


@pytest.mark.parametrize("name", KEPT)
def test_the_defaults_prepare_what_they_prepared_before(tmp_path: Path, name: str) -> None:
    rows = "".join(f"{k % 7},{k * k % 11},{'xyz'[k % 3]}\n" for k in range(40))
    (tmp_path / "t.csv").write_text("a,b,label\n" + rows)
    (tmp_path / "t.txt").write_bytes(bytes(range(256)) * 8)
    np.savez(tmp_path / "t.npz", x=np.arange(80.0).reshape(40, 2) % 13, y=np.arange(40) * 0.5)
    made = {"path": str(tmp_path / name), "cache": str(tmp_path / "c"), "args": {"context": 16}}
    if name != "t.txt":
        del made["args"]
    facts = prepare_dataset(DataConfig(**made))
    folder, fingerprint = Path(facts.folder).name, facts.fingerprint
    assert (folder.partition("-")[0], fingerprint) == (
        KEPT[name][0].partition("-")[0],
        KEPT[name][1],
    )
    if name != "t.npz":  # whose bytes hold the time of day
        assert folder == KEPT[name][0]
    other = prepare_dataset(DataConfig(**made, test_fraction=0.25))
    assert other.folder != facts.folder and other.fingerprint != fingerprint


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"validation_fraction": 0.5, "test_fraction": 0.5}, "leave no row to train on"),
        ({"split": "group"}, "must be random, time, time:COLUMN or group:COLUMN .got 'group'"),
        ({"split": "random:who"}, "must be random, time, time:COLUMN or group:COLUMN"),
        ({"path": "a.npz", "split": "group:t"}, "split: group needs a column of csv, tsv, parquet"),
        ({"path": "a.npz", "split": "time:t"}, "split: time needs a column of csv, tsv, parquet"),
        ({"path": None, "split": "time"}, "split: time needs rows that have an order"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        DataConfig(**{"path": "a.csv", **asked})


@pytest.mark.parametrize(
    ("asked", "column", "said"),
    [
        ({"split": "group:whom"}, GROUPS, "rows.csv has no 'whom'; did you mean 'who'"),
        ({"split": "group:target", "target": "target"}, GROUPS, "is 'target', the target"),
        (
            {"split": "group:who"},
            ["one"] * ROWS,
            "has 1 different value, and each of 2 parts needs",
        ),
        (
            {"split": "group:who", "test_fraction": 0.1},
            ["one", "two"] * (ROWS // 2),
            "column 'who' has 2 different values, and each of 3 parts needs one",
        ),
        ({"split": "time:who"}, [7] * ROWS, "has 1 different value"),
        (
            {"split": "time:who"},
            ["2024-01-01"] * 5 + ["soon"] + ["2024-01-02"] * (ROWS - 6),
            "column 'who': holds dates such as '2024-01-01', and 'soon'; write all alike",
        ),
        ({"split": "time:who"}, ["1", "2024-01-02"] * (ROWS // 2), "write all alike"),
        (
            {"split": "group:who"},
            ["a", "b", ""] * (ROWS // 3),
            "row 3 below the header, column 'who': is missing .as in 80 rows.; fill it in",
        ),
        ({"split": "time:who"}, [1, 2, "NA"] * (ROWS // 3), "is missing .as in 80 rows."),
    ],
)
def test_a_column_that_splits_nothing_is_refused(
    tmp_path: Path, asked: dict[str, Any], column: Any, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        _facts(tmp_path, _table(who=column), **{"split": "group:who", **asked})


OWN = """
import numpy as np, torch
from torch.utils.data import TensorDataset
def arrays(): return np.arange(60.0).reshape(20, 3), np.arange(20) / 4
def both(): return arrays(), arrays()
def sets(): return TensorDataset(torch.ones(20, 3), torch.arange(20) % 2)
"""


def test_data_of_ones_own_is_split_where_it_is_arrays(
    own: Callable[[str, str], None], tmp_path: Path
) -> None:
    own("mine", OWN)
    made = {"cache": str(tmp_path / "c"), "test_fraction": 0.2}
    facts = prepare_dataset(DataConfig(source="mine:arrays", split="time", scale=False, **made))
    assert [part[-1] for part in _ids(facts)] == [33, 45, 57]
    with pytest.raises(DataError, match="test_fraction: has no meaning where mine:both gives"):
        prepare_dataset(DataConfig(source="mine:both", **made))
    with pytest.raises(DataError, match="test_fraction: has no meaning for the data sets and load"):
        prepare_dataset(DataConfig(source="mine:sets", **made))
