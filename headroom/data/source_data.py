"""What a data source hands over before anything is prepared, and the checks that every file must
pass: it is there, it is a regular file, and it is of the kind that `data.source` says. It refuses
in one sentence that names the setting, the value and the remedy; a library's own error never
leaves the readers.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headroom.base.units import format_mebibytes
from headroom.settings.file_formats import FORMATS, TEXT
from headroom.settings.run_config import TOKEN_SOURCES, DataConfig
from headroom.watch import host_memory

TARGET_NAMES = ("target", "label", "class", "y")
MAGIC = {magic: name for name, file_format in FORMATS.items() for magic in file_format.magic}
FOREIGN = {
    b"\x1f\x8b": "is compressed with gzip; unpack it first",
    b"\xfd7zXZ": "is compressed with xz; unpack it first",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd; unpack it first",
    b"\xff\xfe": "is UTF-16 text; save it as UTF-8 (iconv -f UTF-16 -t UTF-8)",
    b"\xfe\xff": "is UTF-16 text; save it as UTF-8 (iconv -f UTF-16 -t UTF-8)",
    b"\x89HDF": "is an HDF5 file; save it as parquet, npz or csv",
    b"\x80\x02": "is a Python pickle, which is never loaded; save it with numpy.savez",
    b"\x80\x03": "is a Python pickle, which is never loaded; save it with numpy.savez",
    b"\x80\x04": "is a Python pickle, which is never loaded; save it with numpy.savez",
    b"\x80\x05": "is a Python pickle, which is never loaded; save it with numpy.savez",
}
ADDRESS = re.compile(r"(?:^|/)(https?|ftp|s3|gs|gcs|abfss?|hdfs|dbfs|file):/+")
FETCHED_BY = {"http": "curl -LO", "https": "curl -LO", "s3": "aws s3 cp", "gs": "gcloud storage cp"}
MOST_SHOWN = 5


class DataError(ValueError):
    """Data that cannot be used; each line starts with the setting at fault."""


@dataclass(frozen=True)
class RawData:
    """Rows as they were read, features finite or not, in their own units.

    features: (n, columns), or (n, channels, height, width) for images; numbers or booleans,
    possibly mapped from the file; or a table.Table, which holds text and missing values too.
    target: (n,) numbers, booleans, or `str` in an object array; or (n, k) numbers. validation: (n,)
    booleans where the source brought a split of its own. split_keys: (n,) times that sort, or
    groups, of the column that data.split names. kept: which rows of the file these are, (rows of
    the file,) booleans; None: all. decimal: data.args.decimal of a file of text; None for others.
    na: data.args.na.
    """

    features: Any
    target: np.ndarray
    feature_names: tuple[str, ...] | None
    target_name: str
    label: str  # the file's name, or the source's
    row_note: str = ""  # how rows are counted, always from 1: " below the header" for a CSV
    notes: tuple[str, ...] = ()
    validation: np.ndarray | None = None
    kept: np.ndarray | None = None
    split_keys: np.ndarray | None = None
    decimal: str | None = None
    na: Sequence[str] | None = None

    def row(self, row: int) -> str:
        """Describe a row, from 0, as it is counted in the file."""
        in_file = row if self.kept is None else int(np.flatnonzero(self.kept)[row])
        return f"{self.label} row {in_file + 1}{self.row_note}"

    def cell(self, row: int, index: Sequence[int]) -> str:
        """Describe where a value is, so that a person finds it again; row and index from 0."""
        where = self.row(row)
        if self.feature_names is not None:
            return f"{where}, column {self.feature_names[index[0]]!r}"
        if len(index) == 1:
            return f"{where}, column {index[0] + 1}"
        return f"{where}, pixel {tuple(int(i) for i in index)}"

    def label_at(self, row: int) -> str:
        """Describe where the target of a row is."""
        return f"{self.row(row)}, target {self.target_name!r}"


def shorten(value: object, most: int = 60) -> str:
    """Return a value as it may be printed: quoted, on one line, at most about `most` characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def format_list(values: Sequence[object], most: int = MOST_SHOWN) -> str:
    """Join the first few values, and say how many more there are."""
    shown = ", ".join(shorten(v) for v in values[:most])
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"


def describe_missing_name(name: str, names: Sequence[str], what: str = "") -> str:
    """Say that a file has no column or array of this name, which one may be meant, and those
    it has."""
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"has no {what}{shorten(name)}; {hint}it has {format_list(names, 12)}"


def format_size(size_bytes: int) -> str:
    """Format a size in bytes for a person."""
    return format_mebibytes(size_bytes / 1024**2)


def find_source_file(data: DataConfig) -> Path:
    """Return the file at data.path as an absolute path; it exists, is regular, readable and
    not empty.

    Errors: DataError, also where the first bytes belong to another format.
    """
    return check_regular_file(resolve_source_path(data), data.source)


def find_source_files(data: DataConfig) -> tuple[Path, ...]:
    """Return the file at data.path, or the parts in the folder there; each is checked as by
    find_source_file."""
    path = resolve_source_path(data)
    # Unlike pathlib's, False for any error.
    if not FORMATS[data.source].may_be_folder or not os.path.isdir(path):
        return (find_source_file(data),)
    shown = shorten(str(path), 300)
    try:
        parts = list_parts(path, data.source)
    except OSError as error:
        raise DataError(
            f"data.path: {shown} cannot be read ({error.strerror}); mend that or name another "
            "folder"
        ) from None
    if not parts:
        raise DataError(
            f"data.path: the folder {shown} holds no *.{data.source} file; name another"
        )
    return tuple(check_regular_file(part, data.source) for part in parts)


def list_parts(path: Path, source: str) -> list[Path]:
    """Return the files of a format in a folder, hidden ones left out, in the order of their names.
    Errors: OSError."""
    ending = FORMATS[source].endings[0]
    names = sorted(name for name in os.listdir(path) if name.endswith(ending))
    return [path / name for name in names if not name.startswith((".", "_"))]


def resolve_source_path(data: DataConfig) -> Path:
    """Return data.path as an absolute path, whether it exists or not."""
    return Path(os.path.abspath(os.path.expanduser(data.path or "")))


def check_regular_file(path: Path, source: str) -> Path:
    """Check that a file of the kind `source` can be read, and return its path. Errors:
    DataError."""
    head = read_first_bytes(path, source)
    if source not in TOKEN_SOURCES:  # any bytes may be a text or the first of tokens
        _check_file_kind(source, head, shorten(str(path), 300))
    return path


def read_first_bytes(path: Path, source: str) -> bytes:
    """Read the first bytes of a regular file that is readable and not empty. Errors: DataError."""
    shown = shorten(str(path), 300)
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise DataError(f"data.path: {shown} is a folder; name the {source} file in it")
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"data.path: {shown} is not a regular file; copy its content to one")
        if status.st_size == 0:
            raise DataError(f"data.path: {shown} is empty; name a file with rows")
        with open(path, "rb") as file:
            return file.read(9)
    except FileNotFoundError:
        raise make_missing_error(path, "file") from None
    except OSError as error:
        raise DataError(
            f"data.path: {shown} cannot be read ({error.strerror}); mend that or name another file"
        ) from None


def make_missing_error(path: Path, what: str) -> DataError:
    """Return the error for a path where nothing is, with what to do. what: file or folder."""
    shown = shorten(str(path), 300)
    if address := ADDRESS.search(str(path)):
        fetched = f"fetch it first ({FETCHED_BY.get(address[1], 'with its own tool')})"
        shown = shorten(f"{address[1]}://{str(path)[address.end() :]}", 300)
        problem = (
            f"is an address, and data is read from this machine: {fetched} and name the {what}"
        )
    elif any(mark in path.name for mark in "*?["):
        problem = f"is a pattern: name one {what} (of Parquet it may be a folder of parts)"
    else:
        problem = f"does not exist; name a {what}, relative to {os.getcwd()!r} or in full"
    return DataError(f"data.path: {shown} {problem}")


def detect_file_kind(head: bytes, shown: str) -> str:
    """Detect the format of a file by its first bytes; TEXT stands for all that are text. Raises
    DataError for kinds that are never read."""
    # Looked for first: its first bytes are a length, below 16 MiB, and may look like anything.
    if head[3:] == b"\0\0\0\0\0{":
        return "safetensors"
    for magic, words in FOREIGN.items():
        if head.startswith(magic):
            raise DataError(f"data.path: {shown} {words}")
    return next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), TEXT)


def _check_file_kind(source: str, head: bytes, shown: str) -> None:
    kind = detect_file_kind(head, shown)
    if kind == source or (kind == TEXT and FORMATS[source].is_text):
        return
    if kind == TEXT:
        raise DataError(
            f"data.path: {shown} is not a {source} file (it starts with {head!r}); "
            f"set data.source to what it is, or write it anew"
        )
    sheet = " (if it is an Excel sheet, save it as CSV)" if kind == "npz" else ""
    raise DataError(
        f"data.path: {shown} is of kind {kind}, but data.source is {source}; "
        f"set data.source to {kind}{sheet}"
    )


def refuse_target(data: DataConfig) -> None:
    """Raises DataError where data.target is set for a source that has its own."""
    if data.target is not None:
        raise DataError(
            f"data.target: has no meaning for source {data.source} (got {data.target!r}); drop it, "
            "or name a file and its source"
        )


def pick_target(names: Sequence[str], wanted: str | None, label: str) -> str:
    """Return the name to predict: data.target, else the one called target, label, class or y.

    Errors: DataError where it is not there, or where more than one would do.
    """
    if wanted is not None:
        if wanted in names:
            return wanted
        raise DataError(f"data.target: {label} {describe_missing_name(wanted, names)}")
    usual = [name for name in names if name.lower() in TARGET_NAMES]
    if len(usual) == 1:
        return usual[0]
    if usual:
        raise DataError(
            f"data.target: {label} has {format_list(usual)}, of which only one can be the target; "
            "set data.target to it, and drop the other from the file"
        )
    raise DataError(
        f"data.target: {label} has no column named target, label, class or y; "
        f"set data.target to one of {format_list(names, 12)}"
    )


def resolve_cache_folder(data: DataConfig) -> Path:
    """Return data.cache as an absolute path, which may not exist yet. Errors: DataError."""
    if not data.cache.strip():
        raise DataError(f"data.cache: must name a folder (got {data.cache!r}); name one")
    return Path(os.path.abspath(os.path.expanduser(data.cache)))


def compute_allowed_bytes(data: DataConfig) -> int:
    """Return how much host memory preparing may take: data.memory_mib, else what is free."""
    if data.memory_mib is not None:
        return int(data.memory_mib * 1024**2)
    return host_memory.read_free_bytes()


def check_memory(
    needed_bytes: int, what: str, remedy: str, *, memory_mib: float | None = None
) -> None:
    """Raises DataError where reading would take more than the host's free memory, or than
    memory_mib, which is data.memory_mib."""
    if memory_mib is not None and needed_bytes > int(memory_mib * 1024**2):
        raise DataError(
            f"data.memory_mib: {what.removeprefix('data.path: ')} needs about "
            f"{format_size(needed_bytes)} "
            f"of memory to read (got {memory_mib:g}); raise it, or {remedy}"
        )
    free_bytes = host_memory.read_free_bytes()
    if needed_bytes > free_bytes:
        raise DataError(
            f"{what} needs about {format_size(needed_bytes)} of memory to read, "
            f"and {format_size(free_bytes)} are free{host_memory.describe_limit()}; {remedy}"
        )
