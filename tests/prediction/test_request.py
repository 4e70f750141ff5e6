"""What the words of a prediction and a look at its files show is told at once, all of it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headroom.prediction.request import make_order
from headroom.settings.read_settings import ConfigError

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.csv"
    file.write_text("a,b\n1,2\n")
    return file


def _problems(rows: Path, **changes: Any) -> tuple[str, ...]:
    given = {"input": str(rows), "output": str(rows.with_name("out.csv")), **changes}
    with pytest.raises(ConfigError) as caught:
        make_order(**given)
    return caught.value.problems


def test_paths_become_absolute_and_endings_tell_the_kinds(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rows.parent)
    made = make_order(input="rows.csv", output="out.PARQUET", keep=["a"])
    assert (made.input, made.reads) == (str(rows), "csv")
    assert (made.output, made.writes) == (str(rows.with_name("out.PARQUET")), "parquet")


@pytest.mark.parametrize(
    "run",
    ["latest", "0" * 32, "models:/churn@best", "models:/my model/3", "models:/m-" + "a" * 32],
)
def test_every_form_of_a_run_is_taken(rows: Path, run: str) -> None:
    assert make_order(input=str(rows), output=str(rows.with_name("o.csv")), run=run).run == run


@pytest.mark.parametrize(
    "run",
    [
        "",
        "last",
        "0" * 31,
        "models:/",
        "models:/x",
        "models:/x@",
        "models:/x/0x3",
        "runs:/x",
        "../x",
    ],
)
def test_another_form_of_a_run_is_refused(rows: Path, run: str) -> None:
    (problem,) = _problems(rows, run=run)
    assert problem.startswith("run: must be latest, a run's id of 32 hex digits")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"input": None}, "input: is needed"),
        ({"input": "nowhere.csv"}, "nowhere.csv' does not exist; name a file, relative to"),
        ({"input": "x" * 300 + ".csv"}, "cannot be read (File name too long)"),
        ({"input": "a\0b.csv"}, "input: must not hold a NUL character"),
        ({"output": None}, "output: is needed"),
        ({"output": "x\0.csv"}, "output: must not hold a NUL character"),
        ({"output": "out.xlsx"}, "out.xlsx' does not tell what it is; name a file that ends in"),
        ({"output": "nowhere/out.csv"}, "nowhere'; make it, or name a file elsewhere"),
        ({"device": "tpu"}, "device: must be auto, gpu, cuda, cuda:INDEX"),
        ({"device": "cpu:3"}, "device: must be auto, gpu, cuda, cuda:INDEX"),
        ({"limit_mib": 0.0}, "limit_mib: must be a number above 0 (got 0.0)"),
        ({"limit_mib": float("nan")}, "limit_mib: must be a number above 0 (got nan)"),
        ({"keep": ["a", "a"]}, "keep: 'a' is named twice"),
        ({"keep": ["a", ""]}, "keep: a column's name is empty"),
        ({"keep": ["a"], "output": "out.npy"}, "keep: npy holds the predictions alone"),
    ],
)
def test_a_wrong_word_is_told(
    rows: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(rows.parent)
    (problem,) = _problems(rows, **changes)
    assert said in problem


def test_all_problems_are_told_at_once(rows: Path) -> None:
    problems = _problems(rows, run="x", input="no.csv", output="/no/where.csv", device="tpu")
    assert [problem.partition(":")[0] for problem in problems] == [
        "run",
        "device",
        "input",
        "output",
    ]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.csv", b"", "is empty"),
        ("rows.dat", b"a,b\n", "does not tell what it is"),
        ("rows.csv", b"PAR1xxxx", "ends in that of csv, but is parquet inside"),
        ("rows.npy", b"a,b\n1,2\n", "ends in that of npy, but is text inside"),
        ("rows.npz", b"\x93NUMPY\x01\x00", "ends in that of npz, but is npy inside"),
        ("rows.csv", b"\x1f\x8b\x08\x00", "is compressed with gzip; unpack it first"),
        ("rows.npy", b"\x80\x04K\x01.", "is a Python pickle, which is never loaded"),
    ],
)
def test_a_file_that_is_not_what_it_says_is_refused(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    (problem,) = _problems(tmp_path / name)
    assert problem.startswith("input: ") and said in problem


def test_what_is_no_regular_file_is_refused_without_being_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.csv")
    (problem,) = _problems(tmp_path / "rows.csv")
    assert "is not a regular file" in problem


def test_a_folder_needs_parquet_files_in_it(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (problem,) = _problems(tmp_path / "parts")
    assert "holds no *.parquet files" in problem
    (tmp_path / "parts" / "1.parquet").write_bytes(b"PAR1")
    (tmp_path / "parts" / "_metadata.parquet").write_bytes(b"PAR1")
    made = make_order(input=str(tmp_path / "parts"), output=str(tmp_path / "o.csv"))
    assert made.reads == "parquet"


def test_an_output_that_exists_needs_a_word(rows: Path) -> None:
    out = rows.with_name("out.csv")
    out.write_text("kept")
    (problem,) = _problems(rows)
    assert "exists; name another file, or overwrite it" in problem
    assert make_order(input=str(rows), output=str(out), overwrite=True).overwrite
    assert out.read_text() == "kept"


def test_the_input_is_never_the_output(rows: Path) -> None:
    problems = _problems(rows, output=str(rows), overwrite=True)
    assert problems == ("output: is the input itself; name another file",)


def test_a_folder_is_no_output(rows: Path) -> None:
    rows.with_name("out.csv").mkdir()
    (problem,) = _problems(rows, overwrite=True)
    assert "is a folder; name a file in it" in problem


def test_columns_are_kept_of_tables_only(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 2)))
    (problem,) = _problems(tmp_path / "x.npy", keep=["a"])
    assert problem.startswith("keep: npy has no columns with names")


def test_an_order_imports_nothing_slow() -> None:
    code = (
        "import sys, headroom.prediction.request\n"
        "slow = ('torch', 'prefect', 'mlflow', 'pandas', 'pyarrow')\n"
        "print([m for m in slow if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
