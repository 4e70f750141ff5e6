"""Writes predictions as they come, to a hidden file beside the output that takes its name when it
is whole: nobody ever sees half of it, and a failure or a signal leaves nothing. The hidden file is
locked: two predictions into one output are refused, and one left by a hard kill is used again.
"""

from __future__ import annotations

import csv
import fcntl
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import orjson
import pyarrow as pa
from pyarrow import compute
from pyarrow import csv as pa_csv
from pyarrow import parquet as pa_parquet

from headroom.prediction.request import Order

DELIMITERS = {"csv": ",", "tsv": "\t"}


class OutputError(RuntimeError):
    """The output could not be written to its end."""


class TableWriter(Protocol):
    """Writes tables of one schema; the first may be empty, but there must be one."""

    def write(self, table: pa.Table) -> None: ...

    def finish(self) -> None: ...


@contextmanager
def open_output(order: Order, *, text_width: int) -> Iterator[TableWriter]:
    """Open the output for writing; the file is in its place when the block has ended well.

    text_width: characters of the longest text that can be predicted. Raises OutputError.
    """
    path = Path(order.output)
    part = path.with_name(f".{path.name}.part")
    with _explain_errors(path):
        file = _open_locked(part)
    try:
        writer = _GuardedWriter(_make_writer(order, file, text_width), path)
        yield writer
        writer.finish()
        with _explain_errors(path):
            file.flush()
            os.fsync(file.fileno())
            _move_into_place(part, path, order)
    except BaseException:
        part.unlink(missing_ok=True)  # before the lock is let go
        raise
    finally:
        with suppress(OSError):  # what was not written yet still cannot be: that was told
            file.close()


def _move_into_place(part: Path, path: Path, order: Order) -> None:
    if not order.overwrite and os.path.lexists(path):
        raise OutputError(f"output: {path} has come to exist meanwhile; name another file")
    os.replace(part, path)


class _GuardedWriter:
    """A writer whose troubles with the file are told in one sentence."""

    def __init__(self, writer: TableWriter, path: Path) -> None:
        self._writer, self._path = writer, path

    def write(self, table: pa.Table) -> None:
        with _explain_errors(self._path):
            self._writer.write(table)

    def finish(self) -> None:
        with _explain_errors(self._path):
            self._writer.finish()


@contextmanager
def _explain_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"output: {path} cannot be written ({error.strerror or error}); make room there, or "
            "name a file elsewhere"
        ) from None


def _open_locked(part: Path) -> IO[bytes]:
    """The hidden file, empty, and ours until it is closed."""
    while True:
        opened = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        file = os.fdopen(opened, "r+b")
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it before may have given it its name meanwhile, or removed it.
            if os.path.samestat(os.fstat(opened), os.stat(part)):
                file.truncate(0)
                return file
        except FileNotFoundError:
            pass
        except BlockingIOError:
            file.close()
            name = part.name.removeprefix(".").removesuffix(".part")
            raise OutputError(
                f"output: another prediction is writing {name}; wait for it, or name another file"
            ) from None
        file.close()


def _make_writer(order: Order, file: IO[bytes], text_width: int) -> TableWriter:
    if order.writes == "parquet":
        return _ParquetWriter(file)
    if order.writes == "npy":
        return _NpyWriter(file, text_width)
    if order.writes == "jsonl":
        return _JsonlWriter(file)
    return _CsvWriter(file, DELIMITERS[order.writes])


class _CsvWriter:
    """Text with a header; a missing value is an empty cell, a list is written as JSON."""

    def __init__(self, file: IO[bytes], delimiter: str) -> None:
        self._file, self._begun = file, False
        self._delimiter = delimiter

    def write(self, table: pa.Table) -> None:
        for i, field in enumerate(table.schema):
            if pa.types.is_list(field.type):
                texts = [orjson.dumps(value).decode() for value in table[i].to_pylist()]
                table = table.set_column(i, field.name, pa.array(texts, pa.string()))
        if not self._begun:
            # By hand: pyarrow puts every name in quotes.
            header = io.StringIO()
            lines = csv.writer(header, delimiter=self._delimiter, lineterminator="\n")
            lines.writerow(table.column_names)
            self._file.write(header.getvalue().encode())
            self._begun = True
        pa_csv.write_csv(
            table,
            self._file,
            pa_csv.WriteOptions(
                include_header=False,
                delimiter=self._delimiter,
                quoting_style="needed" if self._quoted(table) else "none",
            ),
        )

    def _quoted(self, table: pa.Table) -> bool:
        """True if a cell needs quotes: pyarrow puts them around every text, or around none."""
        pattern = f'[{self._delimiter}"\r\n]|^$'
        texts = [c for c in table.columns if pa.types.is_string(c.type)]
        return any(compute.any(compute.match_substring_regex(c, pattern)).as_py() for c in texts)

    def finish(self) -> None:
        pass


class _ParquetWriter:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._writer: Any = None

    def write(self, table: pa.Table) -> None:
        if self._writer is None:
            self._writer = pa_parquet.ParquetWriter(
                self._file, table.schema, write_page_checksum=True
            )
        self._writer.write_table(table)

    def finish(self) -> None:
        self._writer.close()


class _NpyWriter:
    """An array of records, a field for each column; its header is written again at the end, when
    the number of rows is known: numpy leaves room in it for 20 digits."""

    def __init__(self, file: IO[bytes], text_width: int) -> None:
        self._file, self._width = file, max(1, text_width)
        self._dtype: np.dtype | None = None
        self._rows = 0

    def write(self, table: pa.Table) -> None:
        columns = {name: self._values(table[name]) for name in table.column_names}
        if self._dtype is None:
            self._dtype = np.dtype([(name, values.dtype) for name, values in columns.items()])
            self._head()
        records = np.empty(len(table), self._dtype)
        for name, values in columns.items():
            records[name] = values
        self._file.write(records.tobytes())
        self._rows += len(table)

    def finish(self) -> None:
        end = self._file.tell()
        self._file.seek(0)
        self._head()
        self._file.seek(end)

    def _head(self) -> None:
        assert self._dtype is not None, "finish() before write()"
        said = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._rows,),
        }
        np.lib.format.write_array_header_1_0(self._file, said)

    def _values(self, column: pa.ChunkedArray) -> np.ndarray:
        if pa.types.is_list(column.type):
            raise OutputError(
                "output: each prediction is a list, which an npy file has no room for; name a "
                "parquet, jsonl or csv file"
            )
        if pa.types.is_string(column.type):
            texts = [text or "" for text in column.to_pylist()]
            return np.array(texts, dtype=f"<U{self._width}")
        return column.to_numpy()


class _JsonlWriter:
    """An object a line; what is missing or not finite is null."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, table: pa.Table) -> None:
        option = orjson.OPT_APPEND_NEWLINE
        lines = [orjson.dumps(row, default=str, option=option) for row in table.to_pylist()]
        self._file.write(b"".join(lines))

    def finish(self) -> None:
        pass
