"""Rows that are read and not mapped are those of the array."""

from pathlib import Path

import numpy as np
import pytest

from headroom.data.prefetch import FileRows


def _mapped(tmp_path: Path, values: np.ndarray) -> np.ndarray:
    np.save(tmp_path / "rows.npy", values)
    return np.load(tmp_path / "rows.npy", mmap_mode="r")


@pytest.mark.parametrize("shape", [(50,), (50, 3), (50, 2, 4, 4)])
@pytest.mark.parametrize("dtype", ["f4", "i8", "u1"])
def test_rows_are_those_of_the_array(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    values = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    rows = FileRows(np.asarray(_mapped(tmp_path, values)))
    assert (len(rows), rows.shape, rows.dtype) == (50, shape, values.dtype)
    chosen = np.array([0, 7, 7, 49])
    np.testing.assert_array_equal(rows.take(chosen), values[chosen])
    out = np.zeros((4, *shape[1:]), dtype)
    assert rows.take(chosen, axis=0, out=out, mode="clip") is out
    np.testing.assert_array_equal(out, values[chosen])
    np.testing.assert_array_equal(rows[40:60], values[40:])


def test_a_part_of_a_map_begins_where_it_lies(tmp_path: Path) -> None:
    values = np.arange(60, dtype="f4").reshape(20, 3)
    rows = FileRows(np.asarray(_mapped(tmp_path, values))[5:])
    np.testing.assert_array_equal(rows.take(np.array([0, 14])), values[[5, 19]])


def test_a_file_cut_short_is_told(tmp_path: Path) -> None:
    mapped = _mapped(tmp_path, np.ones((1000, 8)))
    rows = FileRows(np.asarray(mapped))
    with open(tmp_path / "rows.npy", "r+b") as file:
        file.truncate(200)
    with pytest.raises(EOFError, match="^data.cache: prepared rows ended early; start again"):
        rows[900:910]
