"""What users do wrong, as one table: each mistake is refused before a device is touched and before
a run exists, in lines that begin with the setting at fault, and leaves nothing behind.
"""

import io
import json
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from flows.cli.flags import parse_training
from headroom.data.preparation import prepare_dataset
from headroom.data.source_data import DataError
from headroom.device.detection import detect_best_device
from headroom.run.preflight import BAD_INPUT, check_fit, resolve_and_check
from headroom.training.plan import make_plan

TABLE = "x,label\n" + "1,0\n2,1\n3,0\n4,1\n"


class Row(NamedTuple):
    """A mistake. make: writes what it needs into the folder that the command runs in."""

    name: str
    make: Callable[[Path], object] | None
    words: str  # of the command line
    said: str  # what the message begins with, and after "...", what it holds


def csv(content: str | bytes) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda place: (place / "rows.csv").write_bytes(data)


def npz(**arrays: np.ndarray) -> Callable[[Path], object]:
    return lambda place: np.savez(place / "rows.npz", **arrays)


def table(**columns: pa.Array) -> Callable[[Path], object]:
    return lambda place: parquet.write_table(pa.table(columns), place / "rows.parquet")


def module(code: str) -> Callable[[Path], object]:
    return lambda place: (place / "mine.py").write_text(
        "import torch\nfrom torch import nn\n" + code
    )


def _truncated_npz(place: Path) -> None:
    file = io.BytesIO()
    np.savez(file, x=np.ones((50, 3)), y=np.arange(50) % 2)
    (place / "rows.npz").write_bytes(file.getvalue()[:-90])


def _bomb(place: Path) -> None:
    with zipfile.ZipFile(place / "rows.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            head, {"descr": "<f8", "fortran_order": False, "shape": (10**12, 4)}
        )
        archive.writestr("x.npy", head.getvalue() + bytes(1000))
        archive.writestr("y.npy", head.getvalue() + bytes(1000))


def _claims_72_tib(place: Path) -> None:
    with open(place / "rows.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f8", "fortran_order": False, "shape": (10**12, 9)}
        )


def _flipped_parquet(place: Path) -> None:
    table(x=pa.array([1.0, 2.0] * 50), label=pa.array([0, 1] * 50))(place)
    content = bytearray((place / "rows.parquet").read_bytes())
    content[-6:-4] = b"\xff\xff"  # the length of its footer
    (place / "rows.parquet").write_bytes(bytes(content))


def _header_longer_than_file(place: Path) -> None:
    (place / "rows.safetensors").write_bytes(struct.pack("<Q", 10**15) + b"{}")


def _tensor_beyond_the_file(place: Path) -> None:
    about = {"x": {"dtype": "F32", "shape": [10**6, 10], "data_offsets": [0, 4 * 10**7]}}
    head = json.dumps(about).encode()
    (place / "rows.safetensors").write_bytes(struct.pack("<Q", len(head)) + head)


CSV = "--data.path rows.csv"
NPZ = "--data.path rows.npz"
PARQUET = "--data.path rows.parquet"
TENSORS = "--data.path rows.safetensors"

DATA = [
    Row("missing", None, CSV, "data.path: ...rows.csv' does not exist; name a file"),
    Row("a folder", lambda p: (p / "rows.csv").mkdir(), CSV, "data.path: ...is a folder"),
    Row("a long name", None, f"--data.path {'a' * 300}.csv", "data.path: ...File name too long"),
    Row("a long table", None, f"--data.path {'a' * 300}.parquet", "data.path: ...name too long"),
    Row("a long cache", None, f"--data.cache {'a' * 300}", "data.cache: ...File name too long"),
    Row("empty", csv(""), CSV, "data.path: ...is empty; name a file with rows"),
    Row("header only", csv("x,label\n"), CSV, "data.path: rows.csv has no rows"),
    Row("one row", csv("x,label\n1,0\n"), CSV, "data.path: rows.csv has 1 row; a split needs"),
    Row("no label", csv("x,z\n1,2\n3,4\n"), CSV, "data.target: rows.csv has no column named"),
    Row("a typo", csv(TABLE), f"{CSV} --data.target labl", "data.target: ...did you mean 'label'"),
    Row("twice a column", csv("x,x,label\n1,2,0\n3,4,1\n"), CSV, "data.path: ...of one name: 'x'"),
    Row("a long first row", csv("x,label\n1,0,9\n2,1\n"), CSV, "data.path: rows.csv row 1 below"),
    Row(
        "a short row", csv(TABLE + "5\n"), CSV, "data.path: rows.csv row 5 below the header: has 1"
    ),
    Row("a long row", csv(TABLE + "5,1,7\n"), CSV, "data.path: rows.csv row 5 below the header: h"),
    Row("a missing label", csv(TABLE + "5,\n"), CSV, "data.target: rows.csv row 5 below the head"),
    Row("a label NaN", csv(TABLE + "5,nan\n"), CSV, "data.target: rows.csv row 5"),
    Row("a label -100", csv(TABLE + "5,-100\n6,-100\n"), CSV, "data.target: ...-100 is the label"),
    Row("one class", csv("x,label\n1,0\n2,0\n3,0\n"), CSV, "data.target: rows.csv has one class"),
    Row("a class of one row", csv(TABLE + "5,2\n"), CSV, "data.target: ...classes of one row"),
    Row(
        "mixed types", csv(TABLE + "six,1\n"), CSV, "data.path: rows.csv row 5 below the header, c"
    ),
    Row(
        "a hole",
        csv("x,w,label\n1,2,0\n,3,1\n3,4,0\n4,5,1\n"),
        CSV,
        "data.path: ...row 2...missing",
    ),
    Row("a huge value", csv(TABLE + "1e38,1\n"), CSV, "data.path: rows.csv row 5"),
    Row("infinity", csv(TABLE + "inf,1\n"), CSV, "data.path: rows.csv row 5"),
    Row("an empty column", csv("x,w,label\n1,,0\n2,,1\n3,,0\n4,,1\n"), CSV, "data.path: ...'w'"),
    Row("UTF-16", csv(TABLE.encode("utf-16")), CSV, "data.path: ...is UTF-16 text; save it as"),
    Row(
        "latin-1", csv(b"x,label\n1,caf\xe9\n2,b\n"), CSV, "data.path: rows.csv line 2 is not UTF-8"
    ),
    Row("two marks", csv("a;b,label\n1;2;3\n"), CSV, "data.path: ...has 1 cells where the header"),
    Row("not a number of the drop", csv(TABLE), f"{CSV} --data.args.drop [z]", "data.args.drop: "),
    Row(
        "all dropped",
        csv(TABLE),
        f"{CSV} --data.args.drop [x]",
        "data.path: rows.csv has no column",
    ),
    Row(
        "the target dropped",
        csv(TABLE),
        f"{CSV} --data.target label --data.args.drop [label]",
        "data.args.drop: ",
    ),
    Row("gzip", csv(b"\x1f\x8b\x08\x00rest"), CSV, "data.path: ...is compressed with gzip; unpack"),
    Row(
        "NUL in a path",
        None,
        "--data.source csv --data.path a\0b",
        "data.path: must not hold a NUL",
    ),
    Row("../..", None, "--data.path ../../no/rows.csv", "data.path: ...does not exist"),
    Row("an unknown ending", None, "--data.path rows.xls", "data.source: the ending of 'rows.xls'"),
    Row(
        "a pickle",
        csv(b"\x80\x04\x95rest"),
        CSV,
        "data.path: ...is a Python pickle, which is never",
    ),
    Row(
        "an object array",
        npz(x=np.array([{}, 1], dtype=object), y=np.arange(2)),
        NPZ,
        "data.path: rows.npz...x",
    ),
    Row("lengths differ", npz(x=np.ones((4, 2)), y=np.arange(3)), NPZ, "data.path: rows.npz"),
    Row("no target in npz", npz(x=np.ones((4, 2))), NPZ, "data.target: rows.npz has no"),
    Row("an npz cut short", _truncated_npz, NPZ, "data.path: rows.npz"),
    Row("an npz bomb", _bomb, NPZ, "data.path: rows.npz"),
    Row("72 TiB", _claims_72_tib, "--data.path rows.npy", "data.path: rows.npy"),
    Row(
        "0..1 targets out of range",
        npz(x=np.ones((4, 2)), y=np.array([[0, 1], [1, 0], [2, 1], [1, 1]])),
        f"{NPZ} --data.task multilabel",
        "data.target: rows.npz",
    ),
    Row(
        "times of day",
        table(x=pa.array([1, 2], pa.time32("s")), label=pa.array([0, 1])),
        PARQUET,
        "data.path",
    ),
    Row(
        "nested",
        table(x=pa.array([[1], [2]]), label=pa.array([0, 1])),
        PARQUET,
        "data.path: rows.p",
    ),
    Row(
        "no rows",
        table(x=pa.array([], pa.float32()), label=pa.array([], pa.int8())),
        PARQUET,
        "data",
    ),
    Row("a flipped footer", _flipped_parquet, PARQUET, "data.path: rows.parquet"),
    Row(
        "a CSV by another name",
        csv(TABLE),
        "--data.source parquet --data.path rows.csv",
        "data.path",
    ),
    Row(
        "a header of a petabyte",
        _header_longer_than_file,
        TENSORS,
        "data.path: ...is not a safetensors",
    ),
    Row(
        "a tensor beyond its file", _tensor_beyond_the_file, TENSORS, "data.path: rows.safetensors"
    ),
    Row(
        "no images",
        lambda p: (p / "pets").mkdir(),
        "--data.source images --data.path pets",
        "data.p",
    ),
    Row(
        "too few rows",
        csv(TABLE),
        f"{CSV} --train.batch_size 64",
        "train.batch_size: must be at mo",
    ),
    Row(
        "rows that no memory holds",
        None,
        "--data.source synthetic --data.args.rows 1000000000",
        "data.args.rows: synthetic of",
    ),
    Row(
        "a target for digits", None, "--data.target y", "data.target: has no meaning for source dig"
    ),
]


NET = """
class Net(nn.Module):
    def __init__(self, input_shape, outputs, width=8):
        super().__init__()
        self.layer = nn.Linear(64, outputs)

    def forward(self, x):
        return self.layer(x.flatten(1))
"""


def net(*changes: tuple[str, str]) -> Callable[[Path], object]:
    code = NET
    for before, after in changes:
        assert before in code
        code = code.replace(before, after)
    return module(code)


RETURNS = "return self.layer(x.flatten(1))"
MINE = "--model.name mine:Net"
OWN = "--data.source mine:load --model.name linear"


def load(body: str) -> Callable[[Path], object]:
    return module(f"def load():\n    {body}\n")


MODEL = [
    Row("no such module", None, "--model.name nowhere:Net", "model.name: "),
    Row("no such attribute", net(), "--model.name mine:Nett", "model.name: ...did you mean"),
    Row("the system", None, "--model.name os:system", "model.name: "),
    Row("eval", None, "--model.name builtins:eval", "model.name: "),
    Row("no module", module("def Net():\n    return 3\n"), MINE, "model.name: "),
    Row("no callable", module("Net = 3\n"), MINE, "model.name: "),
    Row(
        "an import that raises", module("1 / 0\n"), MINE, "model.name: ...mine.py:3...ZeroDivision"
    ),
    Row("an import that exits", module("raise SystemExit(3)\n"), MINE, "model.name: ...mine.py:3"),
    Row("an import with a typo", module("def Net(:\n"), MINE, "model.name: ...mine.py:3"),
    Row("an unknown argument", net(), f"{MINE} --model.args.wide 3", "model.args: ...wide"),
    Row("a bad argument", net(("width=8", "*, width")), MINE, "model.args: ...width"),
    Row("a constructor that raises", net(("nn.Linear(64", "nn.Linear('64'")), MINE, "model."),
    Row(
        "super() forgotten",
        net(("        super().__init__()\n", "")),
        MINE,
        "model.name: ...__init__",
    ),
    Row(
        "no parameters",
        net(
            ("self.layer = nn.Linear(64, outputs)", "self.n = outputs"),
            (RETURNS, "return x.flatten(1)[:, : self.n]"),
        ),
        MINE,
        "model.name: ...parameter",
    ),
    Row(
        "all frozen", net(("(64, outputs)", "(64, outputs).requires_grad_(False)")), MINE, "model."
    ),
    Row(
        "forward raises", net((RETURNS, "raise ValueError('no')")), MINE, "model.name: ...mine.py:"
    ),
    Row(
        "forward returns None",
        net((RETURNS, "self.layer(x.flatten(1))")),
        MINE,
        "model.name: ...None",
    ),
    Row("a wrong width", net(("(64, outputs)", "(64, 3)")), MINE, "model.name: ...(2, 3)"),
    Row("a wrong input", net(("nn.Linear(64", "nn.Linear(60")), MINE, "model.name: ...60"),
    Row(
        "NaN at the start",
        net(
            ("outputs)\n", "outputs)\n        nn.init.constant_(self.layer.weight, float('nan'))\n")
        ),
        MINE,
        "model.name: ...layer.weight",
    ),
    Row(
        "rows for a transformer", None, "--model.name transformer", "model.name: transformer learns"
    ),
    Row("tokens for an mlp", None, "--data.source text", "model.name: mlp learns from rows"),
    Row(
        "a table for a cnn",
        csv(TABLE),
        f"{CSV} --model.name cnn --train.batch_size 2",
        "model.name: cnn",
    ),
    Row(
        "an mlp of no width",
        None,
        "--model.args.hidden [0]",
        "model.args: hidden must be a list of whole numbers from 1 to ",
    ),
    Row(
        "an unknown argument of an mlp",
        None,
        "--model.args.hiden [8]",
        "model.args: 'hiden' is unk",
    ),
    Row(
        "a loss for amounts",
        None,
        "--train.loss mse",
        "train.loss: mse does not fit classification",
    ),
    Row("a loss of one's own is missing", None, "--train.loss mine:loss", "train.loss: "),
    Row(
        "a metric of one's own is missing",
        None,
        "--train.metrics.own mine:f1",
        "train.metrics.own: ",
    ),
    Row(
        "a source that raises",
        load("return 1 / 0"),
        OWN,
        "data.source: ...mine.py:4...ZeroDivision",
    ),
    Row("a source of nothing", load("return None"), OWN, "data.source: ...None"),
    Row("a source of one tensor", load("return torch.ones(8, 3)"), OWN, "data.source: "),
    Row(
        "a source of unlike lengths", load("return torch.ones(8, 3), torch.arange(7)"), OWN, "data."
    ),
    Row(
        "a source of NaN",
        load("return torch.full((8, 3), torch.nan), torch.arange(8) % 2"),
        OWN,
        "data.",
    ),
    Row("a source of no rows", load("return torch.ones(0, 3), torch.arange(0)"), OWN, "data."),
    Row("arguments that it has not", load("return 1"), f"{OWN} --data.args.n 3", "data.args: ...n"),
]


def _words(row: Row) -> list[str]:
    return [word.replace("~", " ") for word in row.words.split(" ")]


def _check(words: list[str]) -> None:
    """All that stands before a run, in the order of the command and its flow."""
    config = resolve_and_check(parse_training(words).config, None)
    device = detect_best_device(config.device.name)
    check_fit(make_plan(config, device, prepare_dataset(config.data)))


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each row's own module `mine` is found, and forgotten again."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("mine", None)


def test_no_row_of_the_table_was_lost() -> None:
    assert (len(DATA), len(MODEL)) == (53, 35)


@pytest.mark.parametrize("row", [*DATA, *MODEL], ids=lambda row: row.name)
@pytest.mark.usefixtures("own_module")
def test_a_mistake_is_told_and_leaves_nothing(row: Row, place: Path) -> None:
    if row.make is not None:
        row.make(place)
    with pytest.raises(BAD_INPUT) as caught:
        _check(_words(row))
    lines = str(caught.value).splitlines()
    assert lines and all(line.isprintable() and ": " in line for line in lines)
    begins, *holds = row.said.split("...")
    assert str(caught.value).startswith(begins), caught.value
    assert all(part in str(caught.value) for part in holds), caught.value
    assert not (place / "mlflow.db").exists()
    if isinstance(caught.value, DataError):
        assert not list((place / ".headroom").rglob("*.npy")), "prepared data of a refused source"
    assert not list((place / ".headroom").rglob("*.tmp"))
