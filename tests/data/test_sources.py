"""The readers: what each kind of file may hold, and that every refusal names setting and remedy."""

import datetime
import decimal
import io
import logging
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from headroom.data.preparation import check_data, load_arrays, prepare_dataset
from headroom.data.source_data import DataError
from headroom.data.sources import SOURCES
from headroom.settings.run_config import DataConfig

ROWS = "".join(f"{i}.5,{i * i},{'ab'[i % 2]}\n" for i in range(20))
CSV = "width,height,label\n" + ROWS
X = np.arange(60, dtype=np.float64).reshape(20, 3)
Y = np.arange(20) % 2


@pytest.fixture(autouse=True)
def _no_prefect_handlers(monkeypatch):
    """Prefect, once imported, warns of each line that is logged outside a flow."""
    monkeypatch.setattr(logging.getLogger("headroom"), "handlers", [])


def _config(tmp_path: Path, source: str, content: bytes | str, **more) -> DataConfig:
    path = tmp_path / f"given.{source}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return DataConfig(source=source, path=str(path), cache=str(tmp_path / "cache"), **more)


def _npy(array, **more) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **more)
    return file.getvalue()


def _npz(**arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def _parquet(columns, **more) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.table(columns), file, **more)
    return file.getvalue()


def _read(config: DataConfig):
    check_data(config)
    return SOURCES[config.source].read(config)


# Files as such


def test_a_file_that_is_not_there_a_folder_a_pipe_or_empty_is_refused_by_the_check(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty.csv").touch()
    for name, words in {
        "none.csv": "does not exist; name a file",
        "../../none.csv": "does not exist; name a file",
        ".": "is a folder; name the csv file in it",
        "pipe": "is not a regular file",
        "empty.csv": "is empty; name a file with rows",
        "empty.csv/x": "cannot be read \\(Not a directory\\)",
        "n" * 300: "cannot be read \\(File name too long\\)",
    }.items():
        with pytest.raises(DataError, match=f"^data.path: .*{words}"):
            check_data(DataConfig(source="csv", path=str(tmp_path / name)))
    with pytest.raises(DataError, match="^data.path: '/dev/zero' is not a regular file"):
        check_data(DataConfig(source="csv", path="/dev/zero"))


def test_a_file_of_another_kind_is_told_apart_by_its_first_bytes(tmp_path):
    cases = [
        ("csv", _npy(X), "is of kind npy, but data.source is csv; set data.source to npy"),
        ("npy", _npz(x=X), "is of kind npz"),
        ("csv", _npz(x=X), "if it is an Excel sheet, save it as CSV"),
        ("parquet", CSV, "is not a parquet file"),
        ("npz", pickle.dumps({"x": 1}), "is a Python pickle, which is never loaded"),
        ("csv", b"\x1f\x8b\x08\0", "is compressed with gzip; unpack it first"),
        ("csv", CSV.encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
    ]
    for source, content, words in cases:
        with pytest.raises(DataError, match=f"^data.path: .*{words}"):
            check_data(_config(tmp_path, source, content))


def test_digits_are_read_without_scikit_learn_and_without_pandas():
    code = (
        "import sys; from headroom.data.sources import SOURCES; "
        "from headroom.settings.run_config import DataConfig; "
        "raw = SOURCES['digits'].read(DataConfig()); print(raw.features.shape, raw.features.max(), "
        "[m for m in ('sklearn', 'pandas', 'pyarrow', 'torch', 'prefect') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "(1797, 1, 8, 8) 16.0 []\n", done.stderr


def test_tables_are_read_without_pandas(tmp_path):
    config = _config(tmp_path, "csv", CSV)
    code = (
        "import sys; from headroom.data.sources import SOURCES; "
        "from headroom.settings.run_config import DataConfig; "
        f"SOURCES['csv'].read(DataConfig(source='csv', path={config.path!r})); "
        "print('pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


# CSV


def test_a_csv_gives_numbers_booleans_and_stripped_labels(tmp_path):
    text = "\ufeff a ,flag, label\r\n" + "1.5,true, x\r\n-2,false,y \r\n\r\n"
    raw = _read(_config(tmp_path, "csv", text))
    assert np.asarray(raw.features).tolist() == [[1.5, 1.0], [-2.0, 0.0]]
    assert raw.target.tolist() == ["x", "y"]
    assert (raw.feature_names, raw.target_name) == (("a", "flag"), "label")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "^data.target: .* has no column named target, label, class or y; set"),
        ("a,y,label\n1,2,3\n", "^data.target: .* has 'y', 'label', of which only one can be"),
        ("a,a,y\n1,2,3\n", "^data.path: .* has columns of one name: 'a'; rename one"),
        (",a,y\n0,1,2\n", "^data.path: .* column 1 has no name; .* index=False"),
        ("y\n1\n2\n", "^data.path: .* no column beside 'y' to learn from"),
        (
            "2.5,1.5,3\n1,2,3\n",
            "looks like a row, not like names .*; put the columns' names in line 1",
        ),
        ("a\0,y\n1,2\n", "^data.path: .* has unprintable names"),
        ("a,\0\0\0\0,y\n", "^data.path: .* looks like UTF-16 or binary"),
    ],
)
def test_a_csv_header_that_cannot_serve_is_refused_by_the_check(tmp_path, text, words):
    with pytest.raises(DataError, match=words):
        check_data(_config(tmp_path, "csv", text))


def test_all_that_is_wrong_with_a_header_is_told_at_once(tmp_path):
    with pytest.raises(DataError) as told:
        check_data(_config(tmp_path, "csv", "a,a,\n1,2,3\n"))
    starts = [line.split(":")[0] for line in str(told.value).splitlines()]
    assert starts == ["data.path", "data.path", "data.target"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,y\n", "^data.path: given.csv has no rows below the header"),
        ("a,y\n1,2\n1\n1,2,3\n", "row 2 below the header: has 1 cells where the header has 2"),
        ("a,y\nfour,1\n2,2\n", "row 1 below the header, column 'a': must be a number .got 'four'"),
        ("a,y\n1,1\n2x,2\n", "row 2 below the header, column 'a': must be a number .got '2x'"),
        ("a,y\n1,1\n2\0,2\n", "row 2 below the header, column 'a': must be .* .got '2.x00'"),
        ("a,y\n1,1\n,2\n", "row 2 below the header, column 'a': is missing .as in 1 rows"),
        ("a,y\nNaN,1\nNaN,2\n", "column 'a': holds no value in any row; leave the column out"),
        ("a,y\n1,1\n2,\n", "^data.target: .* row 2 .*, column 'y': is missing"),
        ("a,y\n18:30:00,1\n", "column 'a' holds times of day; write them with their dates"),
    ],
)
def test_csv_cells_that_cannot_serve_are_refused_by_row_and_column(tmp_path, text, words):
    with pytest.raises(DataError, match=words):
        _read(_config(tmp_path, "csv", text))


def test_a_csv_with_several_columns_at_fault_names_them_all(tmp_path):
    with pytest.raises(DataError) as told:
        _read(_config(tmp_path, "csv", "a,b,c,y\n7,,1,0\n7 x,2,1,1\n"))
    assert [line.split("column ")[1][:3] for line in str(told.value).splitlines()] == ["'a'", "'b'"]


def test_latin_1_is_refused_with_the_command_that_mends_it(tmp_path):
    with pytest.raises(DataError, match="line 1 is not UTF-8 .*iconv -f LATIN1 -t UTF-8"):
        check_data(_config(tmp_path, "csv", "h\xf6he,y\n1,2\n".encode("latin-1")))
    with pytest.raises(
        DataError, match="^data.path: given.csv line 2 is not UTF-8 .at b'1,gr.xfcn.n'.; save"
    ):
        _read(_config(tmp_path, "csv", "a,y\n1,gr\xfcn\n".encode("latin-1")))


def test_a_target_that_is_not_there_is_answered_with_the_nearest_name(tmp_path):
    with pytest.raises(DataError, match="^data.target: .* no 'heigth'; did you mean 'height'"):
        check_data(_config(tmp_path, "csv", CSV, target="heigth"))


# Parquet


def test_a_parquet_file_gives_what_its_columns_hold_and_hides_pandas_index(tmp_path):
    labels = pa.array(["u", "v", "u"]).dictionary_encode()
    content = _parquet(
        {
            "a": pa.array([1, 2, 3], pa.int16()),
            "b": pa.array([0.5, 1, 2], pa.float32()),
            "c": [True, False, True],
            "h": pa.array(np.array([1, 2, 3], np.float16)),
            "y": labels,
            "__index_level_0__": [7, 8, 9],
        }
    )
    raw = _read(_config(tmp_path, "parquet", content))
    assert raw.feature_names == ("a", "b", "c", "h")
    assert np.asarray(raw.features).tolist() == [[1, 0.5, 1, 1], [2, 1, 0, 2], [3, 2, 1, 3]]
    assert raw.target.tolist() == ["u", "v", "u"]


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pa.array([[1], [2]]), "column 'a' is of type 'list<"),
        (pa.array([decimal.Decimal("1.5")] * 2), "column 'a' is of type 'decimal128"),
        (pa.array([datetime.time(18, 30)] * 2), "column 'a' holds times of day"),
        (pa.array([{"b": 1}] * 2), "column 'a' is of type 'struct<"),
        (pa.array([1, None]), "row 2, column 'a': is missing"),
        (pa.array(["7", "8"]), "row 1, column 'a': must be a number .got '7'., not text; save"),
        (pa.array([None, None]), "column 'a': holds no value in any row"),
    ],
)
def test_parquet_columns_that_cannot_serve_are_refused_by_name(tmp_path, column, words):
    with pytest.raises(DataError, match=f"^data.path: given.parquet {words}"):
        _read(_config(tmp_path, "parquet", _parquet({"a": column, "y": [0, 1]})))


def test_a_parquet_without_rows_or_with_doubled_names_is_refused_by_the_check(tmp_path):
    empty = pa.table({"a": pa.array([], pa.int64()), "y": pa.array([], pa.int64())})
    with pytest.raises(DataError, match="^data.path: given.parquet has no rows"):
        check_data(_config(tmp_path, "parquet", _parquet(empty)))
    double = pa.Table.from_arrays([pa.array([1])] * 3, names=["a", "a", "y"])
    with pytest.raises(DataError, match="has columns of one name: 'a'"):
        check_data(_config(tmp_path, "parquet", _parquet(double)))


def test_a_flipped_bit_in_a_parquet_page_is_seen_where_the_file_has_checksums(tmp_path):
    columns = {"a": np.arange(1000.0), "y": np.arange(1000) % 2}
    content = bytearray(_parquet(columns, write_page_checksum=True, compression="none"))
    at = content.index(np.float64(500).tobytes())
    content[at] ^= 1
    with pytest.raises(DataError, match="^data.path: given.parquet is damaged"):
        _read(_config(tmp_path, "parquet", bytes(content)))


# NPY and NPZ


def test_an_npy_is_mapped_and_its_last_column_is_the_target(tmp_path):
    for array in (X, np.asfortranarray(X), X.astype(">f4"), X.astype(np.int16)):
        raw = _read(_config(tmp_path, "npy", _npy(array)))
        assert (raw.features == X[:, :2]).all() and (raw.target == X[:, 2]).all()


def test_a_header_that_claims_more_than_is_there_takes_no_memory(tmp_path):
    head = b"{'descr': '<f8', 'fortran_order': False, 'shape': (9000000000000, 1), }".ljust(117)
    content = b"\x93NUMPY\x01\x00" + len(head + b"\n").to_bytes(2, "little") + head + b"\n1234"
    with pytest.raises(DataError, match="claims .*GiB. but holds 4 bytes: it is cut off"):
        check_data(_config(tmp_path, "npy", content))
    inside = io.BytesIO()
    with zipfile.ZipFile(inside, "w") as archive:
        archive.writestr("x.npy", content)
    with pytest.raises(DataError, match="array 'x' claims .* but holds 4 bytes"):
        check_data(_config(tmp_path, "npz", inside.getvalue()))


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (X[:, 0], "must hold rows of features with the target as last column"),
        (X[:, :1], "must hold rows of features with the target as last column"),
        (X[:0], "must hold rows of features with the target as last column"),
        (X.astype(complex), "must hold real numbers of at most 64 bits .got complex128"),
        (X.astype(str), "must hold real numbers"),
        (np.zeros(3, "f8,i4"), "is an array of records; save plain numbers"),
        (X.astype(object), "is an array of Python objects .a pickle., which is never loaded"),
    ],
)
def test_an_npy_that_is_no_matrix_of_numbers_is_refused_by_the_check(tmp_path, array, words):
    with pytest.raises(DataError, match=f"^data.path: given.npy {words}"):
        check_data(_config(tmp_path, "npy", _npy(array)))


def test_a_target_named_for_an_npy_is_refused(tmp_path):
    with pytest.raises(DataError, match="^data.target: has no meaning for source npy"):
        check_data(_config(tmp_path, "npy", _npy(X), target="y"))


def test_images_of_any_order_become_channels_first(tmp_path):
    for given_shape, shape in {
        (20, 5): (5,),
        (20, 6, 7): (1, 6, 7),
        (20, 3, 6, 7): (3, 6, 7),
        (20, 6, 7, 3): (3, 6, 7),
        (20, 12, 6, 7): (12, 6, 7),
        (20, 1, 6, 4): (1, 6, 4),
    }.items():
        images = np.arange(np.prod(given_shape), dtype=np.float32).reshape(given_shape)
        raw = _read(_config(tmp_path, "npz", _npz(images=images, labels=Y, extra=np.ones(2))))
        assert raw.features.shape[1:] == shape and raw.target_name == "labels"
        if given_shape == (20, 6, 7, 3):
            assert raw.features[4, 2, 1, 5] == images[4, 1, 5, 2]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": X}, "^data.target: .* has no column named target"),
        ({"y": Y}, "^data.path: .* must hold one array of features beside 'y'"),
        ({"a": X, "b": X, "y": Y}, "must hold one array of features beside 'y'.* .got 'a', 'b'"),
        ({"x": X, "y": Y[:5]}, "array 'x' has 20 rows, but 'y' has 5"),
        ({"x": X[:, 0], "y": Y}, "array 'x' must be rows .n, features. or images"),
        ({"x": X, "y": X[:, :, None]}, "^data.target: .* must hold one value a row.* .got float64"),
        ({"x": X, "y": Y.astype("S1")}, "array 'y' must hold real numbers"),
        ({"x": X, "y": Y, "Y": Y}, "has 'y', 'Y', of which only one can be the target"),
        ({}, "holds no arrays"),
    ],
)
def test_an_npz_whose_arrays_do_not_fit_is_refused_by_the_check(tmp_path, arrays, words):
    with pytest.raises(DataError, match=words):
        check_data(_config(tmp_path, "npz", _npz(**arrays)))


class Payload:
    def __reduce__(self):
        return (os.mkdir, ("payload-ran",))


def test_a_pickle_in_an_npz_is_refused_by_name_and_never_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = _npz(x=np.array([Payload()] * 20, dtype=object), y=Y)
    with pytest.raises(DataError, match="^data.path: given.npz array 'x' is an array of Python"):
        prepare_dataset(_config(tmp_path, "npz", content))
    inside = io.BytesIO()
    with zipfile.ZipFile(inside, "w") as archive:
        archive.writestr("x.npy", pickle.dumps(Payload()))
    with pytest.raises(
        DataError, match="array 'x' is no array that .*a pickle is never loaded; save it"
    ):
        prepare_dataset(_config(tmp_path, "npz", inside.getvalue()))
    assert not Path("payload-ran").exists()


def test_an_npz_bomb_is_refused_before_it_is_unpacked(tmp_path):
    inside = io.BytesIO()
    with zipfile.ZipFile(inside, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", _npy(np.zeros((1 << 16, 256), np.float64)))
    with pytest.raises(DataError, match="'x' unpacks .* to 128 MiB, more than 200 times"):
        check_data(_config(tmp_path, "npz", inside.getvalue()))


def test_a_flipped_bit_in_an_npz_is_seen(tmp_path):
    content = bytearray(_npz(x=X, y=Y))
    content[content.index(np.float64(33).tobytes()) + 5] ^= 1
    with pytest.raises(DataError, match="^data.path: given.npz is damaged .*Bad CRC-32"):
        _read(_config(tmp_path, "npz", bytes(content)))


def test_an_npz_that_takes_more_than_data_memory_mib_is_refused_by_it(tmp_path):
    content = _npz(x=np.zeros((5000, 1000)), y=np.arange(5000) % 2)
    words = "^data.memory_mib: given.npz needs about 76.* MiB of memory to read .got 64.; raise it"
    with pytest.raises(DataError, match=words):
        _read(_config(tmp_path, "npz", content, memory_mib=64.0))


def test_text_labels_of_an_npz_are_read_as_text(tmp_path):
    raw = _read(_config(tmp_path, "npz", _npz(x=X, target=np.array(["b ", "a"] * 10)[:, None])))
    assert raw.target.tolist() == ["b", "a"] * 10


def test_a_file_larger_than_memory_is_refused_by_its_size(tmp_path, monkeypatch):
    config = _config(tmp_path, "npz", _npz(x=X, y=Y))
    free = type("Free", (), {"available": 100})
    monkeypatch.setattr("headroom.watch.host_memory.psutil.virtual_memory", lambda: free)
    with pytest.raises(DataError, match="^data.path: given.npz needs about .* write it as npy"):
        _read(config)


# Synthetic


def test_synthetic_rows_are_the_same_each_time_and_can_be_told_apart(tmp_path):
    config = DataConfig(source="synthetic", args={"rows": 200, "features": 1, "classes": 5})
    raw, again = _read(config), _read(config)
    assert (raw.features == again.features).all() and (raw.target == again.target).all()
    near = np.clip(np.round(raw.features[:, 0] / 6), 0, 4)
    assert (near == raw.target).mean() > 0.97


def test_synthetic_rows_that_cannot_be_made_are_refused_by_the_check():
    with pytest.raises(
        DataError, match="^data.args.rows: must be at least 2 for each of 10 classes"
    ):
        check_data(DataConfig(source="synthetic", args={"rows": 19}))
    with pytest.raises(DataError, match="^data.args.rows: synthetic .* needs about .* of memory"):
        check_data(DataConfig(source="synthetic", args={"rows": 10**9, "features": 10**6}))
    with pytest.raises(DataError, match="^data.args.classes: 1 makes a regression"):
        check_data(DataConfig(source="synthetic", task="classification", args={"classes": 1}))
    with pytest.raises(DataError, match="^data.target: has no meaning for source synthetic"):
        check_data(DataConfig(source="synthetic", target="y"))


# Whatever the bytes


SEEDS = {
    "csv": CSV.encode(),
    "npy": _npy(np.column_stack([X, Y])),
    "npz": _npz(x=X, y=Y),
    "parquet": _parquet({"a": X[:, 0], "b": X[:, 1], "y": Y}),
}


@pytest.mark.parametrize("source", SEEDS)
def test_no_bytes_end_in_anything_but_arrays_or_a_data_error(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp(source)
    whole = SEEDS[source]
    change = st.tuples(
        st.sampled_from(["set", "cut", "add", "drop"]),
        st.integers(0, len(whole) - 1),
        st.binary(min_size=1, max_size=4),
    )

    @settings(
        max_examples=60,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(change, min_size=1, max_size=3))
    def mutated(changes):
        content = bytearray(whole)
        for kind, at, new in changes:
            if kind == "set":
                content[at : at + len(new)] = new
            elif kind == "cut":
                del content[at:]
            elif kind == "add":
                content[at:at] = new
            else:
                del content[at : at + len(new)]
        config = _config(folder, source, bytes(content))
        try:
            arrays = load_arrays(prepare_dataset(config))
        except DataError as error:
            assert str(error).startswith("data.") and all(
                c.isprintable() or c == "\n" for c in str(error)
            )
        else:
            assert np.isfinite(arrays.train_x).all() and np.isfinite(arrays.val_x).all()

    mutated()
