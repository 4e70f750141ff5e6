"""A small file that is large where it is read: refused, or read in bounded memory."""

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.conftest import ROOT

ROOM_BYTES = 2**31  # beyond what the imports take
# In a process of its own, which a mistake ends, and no other.
READS = f"""
import resource, sys
from pathlib import Path
from headroom.data.preparation import prepare_dataset
from headroom.data.source_data import DataError
from tests.data.configs import make_data_config
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + {ROOM_BYTES},) * 2)
path = Path(sys.argv[1])
config = make_data_config(
    source=path.suffix[1:], path=str(path), target="y", cache=str(path.parent / "cache")
)
try:
    facts = prepare_dataset(config)
    print("rows", facts.train_rows + facts.val_rows)
except DataError as error:
    print(error)
"""
LONG_ROW = "has a row of more than 16.0 MiB"
LONG_LINE = "line 2 is longer than 16.0 MiB"


def _read(path: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", READS, str(path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _write_texts(path: Path, rows: int, letters: int) -> None:
    """A text that the file holds once, and says of each row."""
    words = pa.array(["z" * letters, "short"])
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), words)
    table = pa.table({"a": np.arange(rows) % 7, "t": texts, "y": np.arange(rows) % 2})
    parquet.write_table(table, path, store_schema=False, compression="zstd")
    assert path.stat().st_size < 2**16


def test_a_text_of_a_parquet_file_that_stands_in_every_row_is_read_in_little_memory(
    tmp_path: Path,
) -> None:
    """2 KB took 100 GB: all texts of 65,536 rows were made before one was looked at."""
    _write_texts(tmp_path / "a.parquet", 4_000, 2**20)
    told = _read(tmp_path / "a.parquet")
    assert "holds 'zzz" in told and "in every row, of which nothing can be learnt" in told


def test_a_text_of_a_parquet_file_is_no_longer_than_a_row_of_other_tables(tmp_path: Path) -> None:
    _write_texts(tmp_path / "a.parquet", 100, 17 * 2**20)
    assert "column 't' holds a text of 17.0 MiB; shorten it" in _read(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("name", "begin", "told"),
    [
        ("a.csv", b"a,b,y\n" + 2_000 * b"1,2,0\n" + b"1,", LONG_ROW),
        ("a.tsv", b"a\tb\ty\n" + 2_000 * b"1\t2\t0\n" + b"1\t", LONG_ROW),
        ("a.jsonl", b'{"a":1,"y":0}\n{"a":', LONG_LINE),
    ],
    ids=["csv", "tsv", "jsonl"],
)
def test_a_row_that_does_not_end_is_refused_before_all_of_it_is_there(
    tmp_path: Path, name: str, begin: bytes, told: str
) -> None:
    """A line of a gigabyte took 3.6: it was looked through for what is not UTF-8."""
    with open(tmp_path / name, "wb") as file:
        file.write(begin)
        file.truncate(2**33)  # zeros that take no room on the disk
    assert told in _read(tmp_path / name)


@pytest.mark.parametrize("opens", ["[", '{"a":'])
def test_a_line_of_objects_in_objects_is_refused(tmp_path: Path, opens: str) -> None:
    line = '{"a":' + opens * 200_000 + "1" + {"[": "]"}.get(opens, "}") * 200_000 + "}\n"
    (tmp_path / "a.jsonl").write_text(line)
    assert "nested too deeply" in _read(tmp_path / "a.jsonl")


def test_the_limit_of_these_tests_holds() -> None:
    """Else they would pass whatever is read."""
    script = READS.partition("path =")[0] + f"bytearray({2 * ROOM_BYTES})"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and "MemoryError" in done.stderr
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
