"""Reads Parquet, block by block: the schema says what its columns are, and how many rows there are.
It refuses a file that is damaged, or holds other rows than it claims.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyarrow import compute, parquet

from headroom.data.source_data import DataError, format_size, shorten

PANDAS_INDEX = "__index_level_"
BUFFER_BYTES = 256 * 1024  # read at once of a column, instead of all of it in a row group
PYTHONS = (OSError, ValueError, TypeError, LookupError, ArithmeticError, BufferError, MemoryError)
BROKEN = (pa.ArrowException, RuntimeError, *PYTHONS)  # what Arrow raises
BLOCK_BYTES = 4 << 20  # of numbers; smaller blocks take longer, for what each of them costs
MOST_ROWS = 65_536  # of a block: of few columns, whose texts may be long
VALUE_BYTES = 8
TEXT_BYTES = 64 << 20  # of a column's texts that are read at once
LONGEST_BYTES = 16 << 20  # of a text, as of a row of the other tables


@dataclass(frozen=True)
class ParquetFile:
    """A Parquet file, of which the schema was read."""

    path: Path
    names: tuple[str, ...]  # of the columns, without those that pandas keeps its index in and hides
    types: tuple[pa.DataType, ...]
    rows: int  # as it claims
    block_bytes: int
    is_written = False
    note = ""
    column_bytes = 4 << 20  # pages of 1 MiB, packed and not

    @property
    def amount(self) -> int:
        return self.rows

    def count_most_cells(self, columns: int) -> int:
        """Return the cells of so many columns."""
        return self.rows * columns

    def read(self, places: Sequence[int]) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield the rows. Errors: DataError for a file that is damaged."""
        names, seen = [self.names[i] for i in places], 0
        many = max(1024, min(MOST_ROWS, self.block_bytes // (VALUE_BYTES * max(1, len(names)))))
        texts = [self.names[i] for i in places if is_text(self.types[i])]
        many = _limit_rows(self.path, texts, many)
        with _open_file(self.path) as file, _refuse_damaged(self.path):
            for batch in file.iter_batches(batch_size=many, columns=names):
                batch.validate(full=True)
                seen += batch.num_rows
                if seen <= self.rows:
                    yield batch.select(names), seen
            if seen != self.rows:
                raise ValueError(f"it claims {self.rows:,} rows and holds {seen:,}")


def open_parquet(path: Path, source: str, *, allowed_bytes: int, skips_late: bool) -> ParquetFile:
    """Open a Parquet file by its schema. allowed_bytes: what reading it may take. Errors:
    DataError."""
    with _open_file(path) as file, _refuse_damaged(path):
        fields = [f for f in file.schema_arrow if not f.name.startswith(PANDAS_INDEX)]
        return ParquetFile(
            path,
            tuple(field.name for field in fields),
            tuple(field.type for field in fields),
            file.metadata.num_rows,
            min(BLOCK_BYTES, allowed_bytes // 128),
        )


def is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _limit_rows(path: Path, texts: Sequence[str], many: int) -> int:
    """Return how many rows may be read at once, at most `many`: a text that a file holds once may
    stand in each of them. Errors: DataError for a damaged file and for a text that is too long."""
    with _open_file(path, dictionaries=texts) as file, _refuse_damaged(path):
        metadata = file.metadata
        for group in range(metadata.num_row_groups if texts else 0):
            columns = map(metadata.row_group(group).column, range(metadata.num_columns))
            for column in (c for c in columns if c.path_in_schema in texts):
                if not column.has_dictionary_page:
                    continue
                name = column.path_in_schema
                # One row of it brings the dictionary, and what is told of its size may be wrong.
                one = next(file.iter_batches(batch_size=1, row_groups=[group], columns=[name]))
                longest = compute.max(compute.binary_length(one.column(0).dictionary)).as_py() or 1
                if longest > LONGEST_BYTES:
                    raise DataError(
                        f"data.path: {path.name} column {name!r} holds a text of "
                        f"{format_size(longest)}; shorten it, or leave the column out by "
                        "data.args.drop"
                    )
                many = min(many, max(1, TEXT_BYTES // longest))
    return many


def _open_file(path: Path, dictionaries: Sequence[str] = ()) -> parquet.ParquetFile:
    """Of which nothing but its schema is read. dictionaries: the columns of which each text is to
    be held once."""
    with _refuse_damaged(path):
        return parquet.ParquetFile(
            path,
            page_checksum_verification=True,
            buffer_size=BUFFER_BYTES,
            pre_buffer=False,
            read_dictionary=list(dictionaries) or None,
        )


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
