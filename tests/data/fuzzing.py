"""A program that breaks small whole files in seeded ways and reads them: `python -m
tests.data.fuzzing KIND COUNT FOLDER`. Each reading must end in arrays or in a DataError
(of settings: a ConfigError) whose lines start with a dotted setting (a file), within 5 s and 1
GiB of address space; else the program says which case it was and ends with 1, or by what the
case did."""

import faulthandler
import io
import json
import os
import random
import resource
import struct
import sys
import traceback
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from headroom.data.preparation import load_arrays, prepare_dataset
from headroom.data.source_data import DataError
from headroom.settings.read_settings import ConfigError, resolve_config
from headroom.settings.run_config import DataConfig, RunConfig
from tests.data.configs import change_config, make_data_config

LONGEST_S = 5
TABLES = ("csv", "tsv", "jsonl", "parquet")
MOST_BYTES = 1 << 30  # of address space beyond what reading the whole files took
NUMBERS = np.random.default_rng(1).normal(size=(24, 3))
LABELS = np.arange(24) % 3
HUGE = [0, 1, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1]
PIECES = [
    b'"',
    b",",
    b"\n",
    b"\r\n",
    b"\0",
    b"nan",
    b"1e999",
    b"-",
    b"\xff\xfe",
    b"\xc3",
    b"{}",
    b"[",
]


def seeds(kind: str) -> list[tuple[str, bytes]]:
    """Whole files of a kind, each with its name."""
    return {
        "csv": _csv,
        "tsv": lambda: [
            (name.replace("csv", "tsv"), content.replace(b",", b"\t"))
            for name, content in _csv()[::2]
        ],
        "jsonl": _json_lines,
        "parquet": _parquet,
        "npz": _npz,
        "npy": lambda: [("a.npy", _npy(np.column_stack([NUMBERS, LABELS])))],
        "safetensors": _safetensors,
        "images": _images,
        "tokens": _tokens,
        "text": lambda: [("a.txt", b"To be, or not to be: that is the question. " * 20)],
        "settings": lambda: [("a.yaml", SETTINGS.encode())],
    }[kind]()


def _csv() -> list[tuple[str, bytes]]:
    lines = [f"{a:.4f},{b:.3e},{c > 0}" for a, b, c in NUMBERS]
    rows = [f"{line},{'xyz'[y]}" for line, y in zip(lines, LABELS, strict=True)]
    plain = "\n".join(["a,b,flag,label", *rows, ""])
    quoted = '\ufeff"a","b, c",y\r\n' + "".join(f'"{i}",-{i}.5,{i % 2}\r\n' for i in range(20))
    colours = [f"{'' if i % 5 else i},{('red', 'green', '')[i % 3]},{i / 7}" for i in range(24)]
    holes = "\n".join(["a,b,target", *colours, ""])
    return [("a.csv", plain.encode()), ("b.csv", quoted.encode()), ("c.csv", holes.encode())]


def _json_lines() -> list[tuple[str, bytes]]:
    rows = [
        {"a": float(a), "b": f"{b:.3e}", "flag": bool(c > 0), "label": "xyz"[y]}
        for (a, b, c), y in zip(NUMBERS, LABELS, strict=True)
    ]
    plain = "\n".join([*map(json.dumps, rows), ""])
    holes = [
        {k: v for k, v in {"a": i if i % 5 else None, "b": ("r\u00f6t", 'gr"n', "")[i % 3]}.items()}
        | ({"c": float("nan") if i % 7 == 0 else i / 7} if i % 4 else {})
        | {"target": i % 2}
        for i in range(24)
    ]
    odd = "\ufeff" + "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in holes)
    spaced = "\n\n".join(
        f' {{ "a" : {i}e-1 , "{i % 3}" : "\\u00fc{i % 2}" , "y" : {i % 2}}} \r' for i in range(20)
    )
    return [("a.jsonl", plain.encode()), ("b.ndjson", odd.encode()), ("c.jsonl", spaced.encode())]


def _parquet() -> list[tuple[str, bytes]]:
    import pyarrow as pa
    from pyarrow import parquet

    columns = {
        "a": pa.array(NUMBERS[:, 0], mask=NUMBERS[:, 0] < -1),
        "b": NUMBERS[:, 1].astype(np.float32),
        "n": LABELS.astype(np.int16),
        "flag": NUMBERS[:, 2] > 0,
        "colour": ["red", "green", "blue"] * 8,
        "y": pa.array([["x", "y", "z"][i] for i in LABELS]).dictionary_encode(),
    }
    files = []
    for i, more in enumerate(
        [
            {"compression": "none"},
            {"compression": "snappy", "row_group_size": 10, "write_page_checksum": True},
            {"compression": "zstd", "data_page_version": "2.0", "use_dictionary": False},
            {
                "compression": "gzip",
                "column_encoding": "BYTE_STREAM_SPLIT",
                "use_dictionary": False,
            },
        ]
    ):
        table = pa.table(columns if i < 3 else {"a": columns["a"], "y": NUMBERS[:, 1]})
        file = io.BytesIO()
        parquet.write_table(table, file, **more)
        files.append((f"{i}.parquet", file.getvalue()))
    return files


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _npz() -> list[tuple[str, bytes]]:
    files = []
    for i, save in enumerate((np.savez, np.savez_compressed)):
        file = io.BytesIO()
        save(file, x=NUMBERS.astype(np.float32), y=np.array(["a", "b", "c"])[LABELS])
        files.append((f"{i}.npz", file.getvalue()))
    return files


def _safetensors() -> list[tuple[str, bytes]]:
    from safetensors.numpy import save

    half = {"x": NUMBERS.astype(np.float16), "y": LABELS.astype(np.uint8), "more": np.ones(3)}
    wide = json.dumps(
        {
            "images": {"dtype": "BF16", "shape": [6, 1, 4, 4], "data_offsets": [0, 192]},
            "labels": {"dtype": "BOOL", "shape": [6, 1], "data_offsets": [192, 198]},
        }
    ).encode()
    values = np.arange(96, dtype=np.uint16).tobytes() + bytes([0, 1] * 3)
    return [
        ("a.safetensors", save(half, metadata={"made": "by a test"})),
        ("b.safetensors", struct.pack("<Q", len(wide)) + wide + values),
    ]


def _images() -> list[tuple[str, bytes]]:
    from PIL import Image

    image = Image.fromarray(np.arange(20 * 12 * 3, dtype=np.uint8).reshape(12, 20, 3))
    exif = Image.Exif()
    exif[0x0112] = 6
    files = []
    for ending, mode, more in [
        ("png", "RGBA", {}),
        ("png", "P", {"transparency": 3, "exif": exif}),
        ("png", "I;16", {}),
        ("jpg", "RGB", {"exif": exif}),
        ("jpg", "L", {"progressive": True}),
        ("gif", "P", {}),
        ("bmp", "RGB", {}),
        ("webp", "RGB", {"lossless": True, "exif": exif}),
        ("webp", "RGBA", {}),
        ("tif", "RGB", {"compression": "tiff_lzw"}),
        ("tif", "L", {"compression": "tiff_adobe_deflate"}),
        ("tif", "RGB", {"compression": "jpeg"}),
        ("tif", "1", {"compression": "group4"}),
    ]:
        file = io.BytesIO()
        wide = Image.fromarray(np.arange(240, dtype=np.uint16).reshape(12, 20) * 250)
        (wide if mode == "I;16" else image.convert(mode)).save(
            file, {"jpg": "jpeg", "tif": "tiff"}.get(ending, ending), **more
        )
        files.append((f"{len(files)}.{ending}", file.getvalue()))
    return files


def _tokens() -> list[tuple[str, bytes]]:
    return [
        ("a.npy", _npy(np.arange(600, dtype=np.uint16) % 300)),
        ("b.npy", _npy(np.arange(600) % 50)),
        ("c.bin", (np.arange(600, dtype="<u2") % 999).tobytes()),
    ]


SETTINGS = """\
device: {name: cpu}
data: {source: csv, path: rows.csv, target: y, args: {drop: [id, "a b"], missing: mean}}
model: {name: "my.models:Net", args: {hidden: [64, 32], p: 1e-3, more: {deep: [1, [2]]}}}
optim:
  lr: 1e-3     # a comment
  name: sgd
train: {epochs: 5, batch_size: 64, metrics: {f1: "my.metrics:f1"}}
run.name: |
  a text
memory: {}
"""


def mutated(content: bytes, chance: random.Random) -> bytes:
    """The content with one to four changes, half of them near its ends, where headers are."""
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        size = len(changed)
        if not size:
            break
        at = chance.randrange(size)
        if chance.random() < 0.5:
            at = min(at, 200) if chance.random() < 0.5 else max(0, size - 1 - chance.randrange(300))
            at = min(chance.randrange(at + 1), size - 1) if at <= 200 else at
        _change(changed, at, chance)
    return bytes(changed)


def _change(changed: bytearray, at: int, chance: random.Random) -> None:
    match chance.randrange(8):
        case 0:
            changed[at] ^= 1 << chance.randrange(8)
        case 1:
            changed[at] = chance.randrange(256)
        case 2:
            width = chance.choice((1, 2, 4, 8))
            number = chance.choice(HUGE) % 2 ** (8 * width)
            changed[at : at + width] = number.to_bytes(width, chance.choice(("little", "big")))
        case 3:
            del changed[at:]
        case 4:
            del changed[at : at + chance.randrange(1, 9)]
        case 5:
            changed[at:at] = chance.randbytes(chance.randrange(1, 9))
        case 6:
            changed[at:at] = chance.choice(PIECES)
        case 7:
            other = chance.randrange(len(changed))
            changed[at:at] = changed[other : other + chance.randrange(1, 64)]


def mended(name: str, content: bytes) -> bytes:
    """The content with its checksums made right again, so that what lies behind them is read."""
    if name.endswith(".png"):
        return _mended_png(content)
    return content


def _mended_png(content: bytes) -> bytes:
    out, at = bytearray(content[:8]), 8
    while at + 12 <= len(content):
        end = at + 8 + int.from_bytes(content[at : at + 4], "big")
        if end + 4 > len(content):
            break
        out += content[at:end] + zlib.crc32(content[at + 4 : end]).to_bytes(4, "big")
        at = end + 4
    return bytes(out + content[at:])


def broken(kind: str, name: str, content: bytes, chance: random.Random) -> bytes:
    """A mutation of the file, at times of what lies within it."""
    if kind == "npz" and chance.random() < 0.5:
        return _within_npz(content, chance)
    changed = mutated(content, chance)
    return mended(name, changed) if chance.random() < 0.7 else changed


def _within_npz(content: bytes, chance: random.Random) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w") as new:
        for member in old.infolist():
            inside = old.read(member)
            if chance.random() < 0.6:
                inside = mutated(inside, chance)
            new.writestr(member.filename, inside, compress_type=member.compress_type)
    return file.getvalue()


def place(
    kind: str, name: str, content: bytes, folder: Path, chance: random.Random | None = None
) -> DataConfig:
    """Writes the file where its source looks for it, which takes it with some settings or other."""
    more: dict[str, Any] = {"context": 8} if kind in ("text", "tokens") else {}
    path = folder / name
    if kind == "images":
        more, path = {"image_size": 8}, folder / "images"
        for plain in ("a/0.png", "a/1.png", "b/0.png", "b/1.png"):
            if not (path / plain).exists():
                (path / plain).parent.mkdir(parents=True, exist_ok=True)
                (path / plain).write_bytes(_images()[0][1])
        for left in (path / "a").glob("x.*"):
            left.unlink()
        (path / "a" / f"x.{name.split('.')[1]}").write_bytes(content)
    elif kind == "parquet" and chance and chance.random() < 0.2:
        path = folder / f"parts {name}"
        path.mkdir(exist_ok=True)
        (path / "1.parquet").write_bytes(content)
        (path / "2.parquet").write_bytes(dict(seeds(kind))[name])
    else:
        path.write_bytes(content)
    if kind in TABLES and chance:
        more["missing"] = chance.choice(("fail", "drop", "mean"))
        more["drop"] = chance.choice(([], [], ["b"]))
    return make_data_config(source=kind, path=str(path), cache=str(folder / "cache"), **more)


def read(data: DataConfig) -> None:
    """Prepares and loads all rows."""
    arrays = load_arrays(prepare_dataset(data))
    assert len(arrays.train_x) and len(arrays.val_x)
    assert np.isfinite(arrays.train_x).all() and np.isfinite(arrays.val_x).all()


def check_words(text: str, start: str) -> None:
    """One line for each problem, which starts with a setting and can be printed."""
    for line in text.split("\n"):
        assert line.startswith(start) and line.isprintable() and len(line) < 2100, repr(text)
        assert ":" in line and "Traceback" not in line, repr(text)


def one(kind: str, case: int, folder: Path, files: list[tuple[str, bytes]]) -> bool:
    """Whether this case was read without an error."""
    chance = random.Random(f"{kind} {case}")
    name, content = chance.choice(files)
    content = broken(kind, name, content, chance)
    try:
        if kind == "settings":
            (folder / name).write_bytes(content)
            assert isinstance(resolve_config(str(folder / name), {}), RunConfig)
        else:
            read(place(kind, name, content, folder, chance))
    except DataError as error:
        check_words(str(error), "data.")
        return False
    except ConfigError as error:
        assert error.problems
        check_words(str(error), str(folder / name))
        return False
    return True


def address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def main(kind: str, count: int, folder: Path, first: int = 0) -> int:
    warnings.simplefilter("error")
    os.fsync = lambda _: None  # type: ignore[assignment]  # most of the time otherwise
    files = seeds(kind)
    if kind != "settings":
        for name, content in files:
            data = place(kind, name, content, folder)
            read(change_config(data, missing="mean") if data.source in TABLES else data)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + MOST_BYTES,) * 2)
    good = 0
    for case in range(first, first + count):
        faulthandler.dump_traceback_later(LONGEST_S, exit=True)
        (folder / "case").write_text(f"{kind} {case}")
        try:
            good += one(kind, case, folder, files)
        except BaseException:
            print(f"case {kind} {case}:", traceback.format_exc(), file=sys.stderr)
            return 1
    faulthandler.cancel_dump_traceback_later()
    print(f"{count} cases, {good} read")
    return 0


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:])))
