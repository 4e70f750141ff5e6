"""Reads Parquet: a file, or all parts in a folder, some rows of some columns at once. It refuses
parts of different columns, and every file that is damaged; page checksums are verified where a
file has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from tasks.engine.files.source_data import DataError, shorten

PANDAS_INDEX = "__index_level_"
BUFFER_BYTES = 256 * 1024  # read at once of a column, instead of all of it in a row group
PYTHONS = (OSError, ValueError, TypeError, LookupError, ArithmeticError, BufferError, MemoryError)
BROKEN = (pa.ArrowException, RuntimeError, *PYTHONS)  # what Arrow raises


def open_parquet_file(path: Path) -> parquet.ParquetFile:
    """Open a Parquet file, of which nothing but its schema is read. Errors: DataError."""
    with _refuse_damaged(path):
        return parquet.ParquetFile(
            path, page_checksum_verification=True, buffer_size=BUFFER_BYTES, pre_buffer=False
        )


def read_schema(path: Path) -> tuple[list[pa.Field], int]:
    """Return the columns of a file, without those that pandas keeps its index in and hides, and
    how many rows it claims. Errors: DataError."""
    with open_parquet_file(path) as file, _refuse_damaged(path):
        fields = [f for f in file.schema_arrow if not f.name.startswith(PANDAS_INDEX)]
        return fields, file.metadata.num_rows


def read_common_schema(files: Sequence[Path]) -> tuple[list[pa.Field], list[int]]:
    """Return the columns that all parts have, and how many rows each claims.

    Errors: DataError where they differ.
    """
    found = [read_schema(path) for path in files]
    first = {field.name: _describe_type(field.type) for field in found[0][0]}
    for path, (fields, _) in zip(files, found, strict=True):
        mine = {field.name: _describe_type(field.type) for field in fields}
        for column in {**first, **mine}:
            here, there = mine.get(column, "missing"), first.get(column, "missing")
            if here != there:
                raise DataError(
                    f"data.path: {path.name} column {shorten(column)} is {here}, but in "
                    f"{files[0].name} it is {there}; write all parts alike, or move it elsewhere"
                )
    return found[0][0], [count for _, count in found]


def read_parquet_batches(
    path: Path, names: list[str], count: int, rows: int
) -> Iterator[pa.RecordBatch]:
    """Yield so many rows of these columns at once. count: of the file's rows, as it claims.

    Errors: DataError for a file that is damaged.
    """
    seen = 0
    with open_parquet_file(path) as file, _refuse_damaged(path):
        for batch in file.iter_batches(batch_size=rows, columns=names):
            batch.validate(full=True)
            seen += batch.num_rows
            if seen <= count:
                yield batch.select(names)
        if seen != count:
            raise ValueError(f"it claims {count:,} rows and holds {seen:,}")


def _describe_type(kind: pa.DataType) -> str:
    # How wide the indices of a dictionary are depends on how many values a part happens to have.
    plain = f"dictionary of {kind.value_type}" if pa.types.is_dictionary(kind) else str(kind)
    return f"of type {plain}"


@contextmanager
def _refuse_damaged(path: Path) -> Iterator[None]:
    """What Arrow says of a file is that it is damaged."""
    try:
        yield
    except BROKEN as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"data.path: {path.name} is damaged or no Parquet file "
            f"({shorten(str(error), 160)}); copy or write it anew"
        ) from None
