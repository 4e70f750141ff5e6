"""The formats of files that rows are read from, a row of one table for each: what a file holds, how
its name ends, and what opens it. Training and prediction read by it alone. What opens a file is
named here, not imported: some readers bring libraries that take their time, and settings know none.
"""

from __future__ import annotations

from dataclasses import dataclass

TABLE, ARRAYS, MATRIX, IMAGES, TEXT, TOKENS = (
    *("table", "arrays", "matrix", "images", "text", "tokens"),
)
FILES = "headroom.data"


@dataclass(frozen=True)
class FileFormat:
    """A format of files."""

    holds: str  # see above; a matrix is one array, whose last column is the target
    endings: tuple[str, ...]
    opens: str = ""  # module:function, see readers.py; of tables and arrays
    magic: tuple[bytes, ...] = ()  # what such a file begins with
    is_text: bool = False
    is_delimited: bool = False  # marks separate cells, and the first line names the columns
    may_be_folder: bool = False  # of such files, the parts of one


FORMATS = {
    "csv": FileFormat(
        TABLE, (".csv",), f"{FILES}.delimited_text:open_delimited", is_text=True, is_delimited=True
    ),
    "tsv": FileFormat(
        TABLE,
        (".tsv", ".tab"),
        f"{FILES}.delimited_text:open_delimited",
        is_text=True,
        is_delimited=True,
    ),
    "parquet": FileFormat(
        TABLE,
        (".parquet", ".pq"),
        f"{FILES}.parquet_files:open_parquet",
        magic=(b"PAR1",),
        may_be_folder=True,
    ),
    "jsonl": FileFormat(
        TABLE, (".jsonl", ".ndjson"), f"{FILES}.json_lines:open_json_lines", is_text=True
    ),
    # Any ZIP begins so; an Excel sheet is one too.
    "npz": FileFormat(
        ARRAYS, (".npz",), f"{FILES}.arrays:open_npz", magic=(b"PK\x03\x04", b"PK\x05\x06")
    ),
    "npy": FileFormat(MATRIX, (".npy",), f"{FILES}.arrays:open_npy", magic=(b"\x93NUMPY",)),
    # It begins with a length, which may look like anything.
    "safetensors": FileFormat(ARRAYS, (".safetensors",), f"{FILES}.arrays:open_safetensors"),
    "images": FileFormat(IMAGES, ()),
    "text": FileFormat(TEXT, (".txt",), is_text=True),
    "tokens": FileFormat(TOKENS, (".bin",)),
}


def list_formats(*kinds: str) -> tuple[str, ...]:
    """Return the names of the formats that hold one of these."""
    return tuple(name for name, file_format in FORMATS.items() if file_format.holds in kinds)


def list_endings(*names: str) -> dict[str, str]:
    """Return the format of each ending of these formats."""
    return {ending: name for name in names for ending in FORMATS[name].endings}
