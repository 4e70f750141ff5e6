"""safetensors files: what they give, and that a header is believed only where it fits the file."""

import json
import logging
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from headroom.data.arrays import normalize_booleans
from headroom.data.preparation import check_data, load_arrays, prepare_dataset
from headroom.data.source_data import DataError, RawData
from headroom.data.sources import SOURCES
from headroom.settings.run_config import DataConfig

X = np.arange(60, dtype=np.float32).reshape(20, 3)
Y = np.arange(20) % 2


@pytest.fixture(autouse=True)
def _no_prefect_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect, once imported, warns of each line that is logged outside a flow."""
    monkeypatch.setattr(logging.getLogger("headroom"), "handlers", [])


def _config(folder: Path, content: bytes, **more: Any) -> DataConfig:
    path = folder / "given.safetensors"
    path.write_bytes(content)
    return DataConfig(path=str(path), cache=str(folder / "cache"), **more)


def _read(config: DataConfig) -> RawData:
    check_data(config)
    read = SOURCES[config.source].read(config)
    assert isinstance(read, RawData)
    return read


def _file(header: bytes | dict[str, Any], values: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + values


def _entry(kind: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


WHOLE = {"x": _entry("F32", [4, 2], 0, 32), "y": _entry("U8", [4], 32, 36)}


def test_features_and_labels_are_read_by_name_and_mapped(tmp_path: Path) -> None:
    raw = _read(_config(tmp_path, save({"x": X, "labels": Y}, metadata={"by": "a test"})))
    assert isinstance(raw.features, np.memmap) and (raw.features == X).all()
    assert (raw.target == Y).all() and raw.target_name == "labels"
    facts = prepare_dataset(_config(tmp_path, save({"a": X, "b": Y}), target="b"))
    assert (facts.task, facts.train_rows, facts.input_shape) == ("classification", 16, (3,))
    assert load_arrays(facts).train_x.dtype == np.float32


@pytest.mark.parametrize("kind", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
def test_every_type_of_numbers_is_read_as_it_was_written(tmp_path: Path, kind: str) -> None:
    raw = _read(_config(tmp_path, save({"x": X.astype(kind), "y": Y.astype(kind)})))
    assert raw.features.dtype == np.dtype(kind)
    assert (raw.features == X).all() and (raw.target == Y).all()


def test_bf16_is_read_as_the_float32_it_was_cut_from(tmp_path: Path) -> None:
    numbers = np.array([[1.5, -2.0], [3.140625, 1e30], [0.0, -0.0], [2.0**-126, 7.0]], np.float32)
    upper = (numbers.view(np.uint32) >> 16).astype("<u2")
    content = _file(
        {"x": _entry("BF16", [4, 2], 0, 16), "y": _entry("BF16", [4], 16, 24)},
        upper.tobytes() + upper[:, 0].tobytes(),
    )
    raw = _read(_config(tmp_path, content, task="regression"))
    cut = (upper.astype(np.uint32) << 16).view(np.float32)
    assert raw.features.dtype == np.float32 and (raw.features == cut).all()
    assert (raw.target == cut[:, 0]).all()


def test_images_become_channels_first(tmp_path: Path) -> None:
    images = np.arange(20 * 6 * 7 * 3, dtype=np.uint8).reshape(20, 6, 7, 3)
    raw = _read(_config(tmp_path, save({"images": images, "y": Y})))
    assert raw.features.shape == (20, 3, 6, 7)
    assert (raw.features[4, 2] == images[4, :, :, 2]).all()


def test_a_byte_that_is_no_boolean_makes_no_third_class(tmp_path: Path) -> None:
    # Found by a fuzzer: numpy counted three classes where there are two names.
    values = np.zeros(32, np.uint8).tobytes() + bytes([0, 1, 2, 0])
    header = {"x": _entry("F32", [4, 2], 0, 32), "y": _entry("BOOL", [4], 32, 36)}
    assert _read(_config(tmp_path, _file(header, values))).target.tolist() == [0, 1, 1, 0]
    assert np.unique(normalize_booleans(np.frombuffer(bytes([0, 2, 1]), bool))).tolist() == [
        False,
        True,
    ]


def _two(first: bytes, second: bytes) -> bytes:
    entry = b'{"dtype": "U8", "shape": [4], "data_offsets": [%s]}'
    return b'{"x": %s, "x": %s}' % (entry % first, entry % second)


@pytest.mark.parametrize(
    "content",
    [
        _file(WHOLE, b"1" * 36)[:30],
        _file(WHOLE, length=900),
        _file(WHOLE, b"1" * 20),
        _file(WHOLE, b"1" * 40),
        _file(b'{"\xff": 1}'),
        _file(b"{1: 2}"),
        _file(b'{"a":' * 3000),
        _file(b'{"x": {"dtype": "F32", "shape": [1' + b"0" * 5000 + b"]}}"),
        _file(b'{"x": {"dtype": "F32", "shape": [], "shape": [1], "data_offsets": [0, 4]}}'),
        _file(_two(b"0, 4", b"4, 8"), b"12345678"),
        _file(_two(b"4, 8", b"0, 4"), b"12345678"),
        _file({"x": 3}),
        _file({"x": _entry("F32", [-1], 0, 4)}),
        _file({"x": _entry("F32", [1.0], 0, 4)}),
        _file({"x": _entry("F32", [True], 0, 4)}),
        _file({"x": _entry("F32", [2**63], 0, 4)}),
        _file({"x": _entry("F32", [2**40, 2**20], 0, 4)}, b"1234"),
        _file({**WHOLE, "y": _entry("U8", [4], 30, 34)}, b"1" * 36),
        _file({**WHOLE, "y": _entry("U8", [4], 33, 37)}, b"1" * 37),
        _file({"__metadata__": 3, **WHOLE}, b"1" * 36),
        _file({"x": _entry("no type", [4], 0, 4)}, b"1234"),
    ],
    ids=range(21),
)
def test_a_file_that_is_not_whole_is_refused_by_the_check(tmp_path: Path, content: bytes) -> None:
    words = "^data.path: given.safetensors is damaged or no safetensors file .*; copy or write it"
    with pytest.raises(DataError, match=words) as told:
        check_data(_config(tmp_path, content))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (_file({"x": _entry("F8_E4M3", [4], 0, 4)}, b"1234"), "of type F8_E4M3, but only BOOL"),
        (_file({"x": _entry("C64", [1], 0, 8)}, b"12345678"), "of type C64, but only .*; save it"),
        (_file({"__metadata__": {}}), "holds no arrays"),
        (save({"x": X[:0], "y": Y[:0]}), "array 'x' has no rows; write some"),
        (save({"x": X, "y": Y[:5]}), "array 'x' has 20 rows, but 'y' has 5"),
        (b"a,b,y\n1,2,3\n", "is not a safetensors file"),
    ],
)
def test_arrays_that_cannot_serve_are_refused_by_the_check(
    tmp_path: Path, content: bytes, words: str
) -> None:
    with pytest.raises(DataError, match=f"^data.path: .*{words}") as told:
        check_data(_config(tmp_path, content))
    assert "\n" not in str(told.value)


def test_arrays_are_read_from_where_they_lie_in_whatever_order_they_are_named(
    tmp_path: Path,
) -> None:
    """Their places follow from the sizes of those before them, of no values among these."""
    header = {
        "y": _entry("U8", [4], 33, 37),
        "none": _entry("F32", [0, 9], 1, 1),
        "x": _entry("F32", [4, 2], 1, 33),
        "first": _entry("BOOL", [1], 0, 1),
    }
    x = np.arange(8, dtype=np.float32)
    raw = _read(_config(tmp_path, _file(header, b"\1" + x.tobytes() + bytes([0, 1, 2, 1]))))
    assert raw.features.ravel().tolist() == x.tolist() and raw.target.tolist() == [0, 1, 2, 1]


def test_an_enormous_header_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "given.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 2**24 - 100) + b"{")
        file.truncate(2**25)
    config = DataConfig(path=str(path))
    with pytest.raises(DataError, match="^data.path: given.safetensors is damaged"):
        check_data(config)
    with open(path, "r+b") as file:
        file.write(struct.pack("<Q", 2**24 + 1))
    with pytest.raises(DataError, match="^data.path: .* is not a safetensors file"):
        check_data(config)


def test_a_length_that_looks_like_a_pickle_is_none(tmp_path: Path) -> None:
    # A header of 640 bytes begins with 80 02, as pickles of protocol 2 do.
    header = json.dumps(WHOLE).encode()
    content = _file(header.ljust(640), b"1" * 36)
    assert content[:2] == b"\x80\x02"
    assert _read(_config(tmp_path, content)).features.shape == (4, 2)
