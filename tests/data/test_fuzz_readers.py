"""Whatever the bytes: thousands of broken files of each kind are read in a process of their own, so
that a crash, a hang or an enormous allocation is seen; then what was found, and bombs by hand."""

import io
import os
import pickle
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from headroom.data.preparation import check_data, prepare_dataset
from headroom.data.source_data import DataError
from headroom.data.sources import SOURCES
from headroom.settings.run_config import DataConfig
from tests.data.configs import change_config

ROOT = Path(__file__).parent.parent.parent
COUNTS = {
    "csv": 900,
    "tsv": 500,
    "jsonl": 800,
    "parquet": 1200,
    "npz": 1500,
    "npy": 900,
    "safetensors": 1300,
    "images": 1000,
    "tokens": 500,
    "text": 200,
    "settings": 1200,
}


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_ten_thousand_files_are_broken_and_each_kind_of_file_is_among_them() -> None:
    assert sum(COUNTS.values()) == 10_000
    files = {name for name in SOURCES if name not in ("digits", "synthetic")}
    assert files <= set(COUNTS)


@pytest.mark.parametrize("kind", COUNTS)
def test_no_bytes_end_in_anything_but_rows_or_a_named_error(kind: str, tmp_path: Path) -> None:
    done = _python("-m", "tests.data.fuzzing", kind, str(COUNTS[kind]), str(tmp_path))
    case = (tmp_path / "case").read_text() if (tmp_path / "case").exists() else "no case"
    assert done.returncode == 0, f"{case}: {done.stderr[-3000:]}"
    cases, read = (int(word) for word in done.stdout.split() if word.isdigit())
    assert cases == COUNTS[kind]
    assert 0 < read < cases, "only what can be read at times shows that the files are worth it"


@pytest.mark.parametrize(
    ("crime", "told"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("time.sleep(60)", "Timeout"),
        ("bytearray(1 << 34)", "MemoryError"),
        ("ctypes.string_at(0)", "Segmentation fault"),
        ("f.check_words('a line without a setting', 'data.')", "AssertionError"),
    ],
)
def test_the_fuzzer_sees_what_it_looks_for(crime: str, told: str, tmp_path: Path) -> None:
    code = (
        "import ctypes, faulthandler, sys, time; from pathlib import Path; faulthandler.enable(); "
        f"import tests.data.fuzzing as f; f.LONGEST_S = 0.3; f.one = lambda *_: {crime}; "
        f"sys.exit(f.main('text', 3, Path({str(tmp_path)!r})))"
    )
    done = _python("-c", code)
    assert done.returncode != 0 and told in done.stderr


# What was found


def _config(folder: Path, source: str, content: bytes) -> DataConfig:
    path = folder / f"given.{source}"
    path.write_bytes(content)
    return DataConfig(source=source, path=str(path), cache=str(folder / "cache"))


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _npz(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


def _header(text: str) -> bytes:
    return b"\x93NUMPY\x02\x00" + len(text).to_bytes(4, "little") + text.encode()


X = np.arange(12.0).reshape(6, 2)


@pytest.mark.parametrize("order", ["<", ">"])
def test_labels_of_no_characters_are_refused(tmp_path: Path, order: str) -> None:
    # numpy raises a SystemError when such a label is read.
    labels = np.array(["a", "b"] * 3).astype(f"{order}U1")
    codes = labels.view(f"{order}u4")
    content = _npz(x=_npy(X), y=_npy(labels))
    assert SOURCES["npz"].read(_config(tmp_path, "npz", content)).target.tolist() == ["a", "b"] * 3
    codes[3] = 0x110000
    with pytest.raises(DataError, match="^data.target: .* array 'y' holds what is no text"):
        SOURCES["npz"].read(_config(tmp_path, "npz", _npz(x=_npy(X), y=_npy(labels))))


def test_a_signalling_nan_is_refused_as_any_other(tmp_path: Path) -> None:
    x = X.astype("f4")
    x.view(np.uint32)[2, 1] = 0x7F800001
    with pytest.raises(
        DataError, match="^data.path: .* row 3, column 2: must be a number .*got nan"
    ):
        prepare_dataset(_config(tmp_path, "npz", _npz(x=_npy(x), y=_npy(np.arange(6) % 2))))


@pytest.mark.parametrize("source", ["npy", "npz"])
def test_a_boolean_byte_of_2_makes_no_third_class(tmp_path: Path, source: str) -> None:
    truth = np.array([0, 1, 2, 0, 3, 1], np.uint8)
    if source == "npz":
        content = _npz(x=_npy(X), y=_npy(truth.view(bool)))
    else:
        content = _npy(np.column_stack([truth % 2, truth, truth]).view(bool))
    assert prepare_dataset(_config(tmp_path, source, content)).class_names == ("False", "True")


DAMAGED = "has a damaged header .*; write it anew"
NO_ARRAY = "is no array that numpy can read .*; save it anew with numpy.savez or numpy.save"


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("{'descr': 'i4,i4', 'fortran_order': False, 'shape': (3, 2)}", "an array of records"),
        ("{'descr': '(9,)f8', 'fortran_order': False, 'shape': (3, 2)}", "an array of records"),
        ("{'descr': '%s', 'fortran_order': False, 'shape': (3, 2)}" % ("i4," * 3000), "of records"),
        ("{'descr': '%s', 'fortran_order': False, 'shape': (3, 2)}" % ("i4," * 9000), NO_ARRAY),
        (
            "{'descr': '<f8', 'fortran_order': False, 'shape': (%s)}" % (("9" * 17 + ",") * 32),
            DAMAGED,
        ),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (%s)}" % ("9" * 5000 + ","), NO_ARRAY),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (-1, 2)}", DAMAGED),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (-1, -1)}", DAMAGED),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (0, 4611686018427387904)}", DAMAGED),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (True, 2)}", "write it anew"),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (3, 2L)}", "write it anew"),
        ("{'descr': '<U0', 'fortran_order': False, 'shape': (3, 2)}", DAMAGED),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (3, 2)}", "Python objects .a pickle."),
        ("{'descr': '<M8[ns]', 'fortran_order': False, 'shape': (0, 2)}", "must hold real numbers"),
        ("__import__('os').mkdir('ran')", NO_ARRAY),
        ("-" * 65_000 + "1", NO_ARRAY),
        ("1+" * 32_000 + "1", NO_ARRAY),
        ("[" * 65_000, NO_ARRAY),
        ("not " * 16_000 + "1", NO_ARRAY),
        ("a" + "()" * 32_000, NO_ARRAY),
        ("{'descr'}", NO_ARRAY),
        ("", NO_ARRAY),
    ],
    ids=range(22),
)
def test_a_header_is_parsed_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    content = _header(header)
    for source, given in (("npy", content), ("npz", _npz(x=content, y=_npy(np.arange(6))))):
        with pytest.raises(DataError, match=f"^data.path: .*{words}") as told:
            check_data(_config(tmp_path, source, given))
        assert len(str(told.value)) < 400
    assert not Path("ran").exists()


# Bombs, and what must not run


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, ("payload-ran",))


def _objects() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([[Payload(), 1.0]] * 6, dtype=object), allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(
    "source", ["csv", "parquet", "npz", "npy", "safetensors", "text", "tokens", "images"]
)
def test_a_pickle_under_any_name_never_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for content in (pickle.dumps(Payload()), pickle.dumps(Payload(), 0), _objects()):
        config = _config(tmp_path, source, content * 9 if source == "text" else content)
        if source == "images":
            for name in ("a/1.png", "a/2.png", "b/1.png", "b/2.png"):
                (tmp_path / "given" / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / "given" / name).write_bytes(content)
            config = DataConfig(source="images", path="given", cache="cache")
        if source == "tokens":
            (tmp_path / "given.npy").write_bytes(content)
            config = DataConfig(
                source="tokens", path="given.npy", cache="cache", args={"context": 4}
            )
        if source == "text":  # any bytes are a text
            prepare_dataset(change_config(config, context=4))
        else:
            with pytest.raises(DataError, match="^data."):
                prepare_dataset(config)
    assert not Path("payload-ran").exists()


def test_an_archive_that_unpacks_to_a_thousand_times_its_size_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.BytesIO()
    head = _npy(np.zeros((1, 2), np.float64))[:128].replace(b"(1, 2), ", b"(20971520, 2), ")[:128]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        with archive.open("x.npy", "w") as member:
            member.write(head)
            for _ in range(320):
                member.write(bytes(1 << 20))
        archive.writestr("y.npy", _npy(np.zeros(20_971_520, np.uint8)))
    content = file.getvalue()
    assert len(content) < 400_000
    config = _config(tmp_path, "npz", content)
    started = time.process_time()
    with pytest.raises(DataError, match="array 'x' unpacks .* to 320 MiB, more than 200 times"):
        prepare_dataset(config)
    assert time.process_time() - started < 0.5 and not (tmp_path / "cache").exists()


def test_an_array_that_claims_terabytes_is_refused_by_the_bytes_that_are_there(
    tmp_path: Path,
) -> None:
    text = "{'descr': '<f8', 'fortran_order': False, 'shape': (4947802324992, 2), }"
    with pytest.raises(DataError, match="claims .*.73,728 GiB. but holds 64 bytes"):
        check_data(_config(tmp_path, "npy", _header(text) + bytes(64)))
