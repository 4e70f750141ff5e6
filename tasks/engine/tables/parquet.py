"""Reads Parquet, one file or a folder of parts, a few columns and rows at a time, so that the
memory it takes depends on neither. It refuses files whose columns differ from the first one's, and
types of no use, by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from tasks.engine.files.source_data import DataError, shorten
from tasks.engine.settings.data_config import DataConfig
from tasks.engine.tables.columns import DATE, OF_USE, TEXT, kind_of, refused_type
from tasks.engine.tables.csv_blocks import BROKEN
from tasks.engine.tables.table_header import Chosen, choose

PANDAS_INDEX = "__index_level_"
BUFFER_BYTES = 256 * 1024  # read at once of a column, instead of all of it in a row group


@dataclass(frozen=True)
class Parts:
    """Parquet files of one schema."""

    files: tuple[Path, ...]
    counts: tuple[int, ...]  # rows of each, as it claims
    label: str
    chosen: Chosen

    @property
    def rows(self) -> int:
        return sum(self.counts)

    def batches(self, *, together: int, rows: int) -> Iterator[tuple[list[int], pa.RecordBatch]]:
        """So many rows of so many columns at once, the target first: their places among the
        features (the target's is after the last), and what they hold. All rows pass before the next
        columns. Errors: DataError for a file that is damaged."""
        features = self.chosen.features
        places = [len(features), *range(len(features))]
        for at in range(0, len(places), together):
            group = sorted(places[at : at + together])
            wanted = [self.chosen.names[(*features, self.chosen.target)[place]] for place in group]
            for path, count in zip(self.files, self.counts, strict=True):
                yield from ((group, batch) for batch in batches(path, wanted, count, rows))

    def column(self, name: str, *, rows: int) -> Iterator[pa.Array]:
        """A column of all files, so many rows at once. Errors: DataError as `batches`."""
        for path, count in zip(self.files, self.counts, strict=True):
            yield from (batch.column(0) for batch in batches(path, [name], count, rows))


def batches(path: Path, names: list[str], count: int, rows: int) -> Iterator[pa.RecordBatch]:
    """So many rows of these columns at once. count: of the file's rows, as it claims.

    Errors: DataError for a file that is damaged.
    """
    seen = 0
    with open_file(path) as file, _whole(path):
        for batch in file.iter_batches(batch_size=rows, columns=names):
            batch.validate(full=True)
            seen += batch.num_rows
            if seen <= count:
                yield batch.select(names)
        if seen != count:
            raise ValueError(f"it claims {count:,} rows and holds {seen:,}")


def opened(files: Sequence[Path], data: DataConfig) -> Parts:
    """The files, as far as their schemas tell.

    Errors: DataError where they differ, hold no rows, or have columns of no use.
    """
    first: list[pa.Field] = []
    counts = []
    label = files[0].name if len(files) == 1 else files[0].parent.name
    for path in files:
        with open_file(path) as file, _whole(path):
            fields = fields_of(file.schema_arrow)
            counts.append(file.metadata.num_rows)
        first = first or fields
        _refuse_other(first, fields, files[0].name, path.name)
    chosen = choose([field.name for field in first], data, label)
    judged = [first[i] for i in (*chosen.features, chosen.target)]
    problems = []
    if sum(counts) <= 0 or min(counts) < 0:
        problems.append(f"data.path: {label} has no rows; write some")
    problems += [
        refused_type(field.name, str(field.type), target=chosen.target_name, label=label)
        for field in judged
        if (kind := kind_of(field.type)) not in (*OF_USE, TEXT)
        or (kind == DATE and field.name == chosen.target_name)
    ]
    if problems:
        raise DataError("\n".join(problems))
    return Parts(tuple(files), tuple(counts), label, chosen)


def fields_of(schema: pa.Schema) -> list[pa.Field]:
    """The columns of a table. What pandas keeps its index in is none, and pandas hides it."""
    return [field for field in schema if not field.name.startswith(PANDAS_INDEX)]


def _refuse_other(
    first: Sequence[pa.Field], fields: Sequence[pa.Field], name: str, other: str
) -> None:
    mine, theirs = ({field.name: _told(field.type) for field in of} for of in (first, fields))
    for column in {**mine, **theirs}:
        here, there = theirs.get(column, "missing"), mine.get(column, "missing")
        if here != there:
            raise DataError(
                f"data.path: {other} column {shorten(column)} is {here}, but in {name} it is "
                f"{there}; write all parts alike, or move it elsewhere"
            )


def _told(kind: pa.DataType) -> str:
    # How wide the indices of a dictionary are depends on how many values a part happens to have.
    plain = f"dictionary of {kind.value_type}" if pa.types.is_dictionary(kind) else str(kind)
    return f"of type {plain}"


def open_file(path: Path) -> parquet.ParquetFile:
    """The file, of which nothing but its schema was read. Errors: DataError."""
    with _whole(path):
        return parquet.ParquetFile(
            path, page_checksum_verification=True, buffer_size=BUFFER_BYTES, pre_buffer=False
        )


@contextmanager
def _whole(path: Path) -> Iterator[None]:
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
