"""Gathers the columns of a table block by block: numbers and codes into a spool, the target beside
it, and what was seen of each column. What can't be learnt from is refused when all blocks have
passed, each column by its name and its first bad cell, all columns at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tasks.engine.files.number_formats import Spelling
from tasks.engine.files.source_data import MOST_SHOWN, DataError, Raw, listed, shorten
from tasks.engine.settings.data_config import DataConfig
from tasks.engine.tables.arrow_columns import (
    CATEGORY,
    EMPTY,
    NUMBER,
    TEXT,
    Cells,
    cells_of,
    refused_type,
)
from tasks.engine.tables.column_summary import MOST_CATEGORIES, Seen, absent
from tasks.engine.tables.columns_table import Table
from tasks.engine.tables.growing_array import Growing
from tasks.engine.tables.spill_file import Spool

BROKEN = (
    pa.ArrowException,
    OSError,
    ValueError,
    TypeError,
    KeyError,
    OverflowError,
    MemoryError,
    RuntimeError,
    BufferError,
)


@dataclass(frozen=True)
class Block:
    """Some columns of some rows, out of Arrow: (columns, rows) float64, and what they hold."""

    matrix: np.ndarray
    cells: tuple[Cells, ...]
    least: np.ndarray  # (columns,); NaN where some are missing
    most: np.ndarray
    target: Cells | None
    types: tuple[pa.DataType, ...]  # of the columns and the target

    @property
    def has_holes(self) -> bool:
        """Whether a number is missing."""
        in_target = self.target is not None and self.target.missing.any()
        return bool(in_target or np.isnan(self.least).any())


def block_of(
    features: Sequence[pa.Array], target: pa.Array | None, rows: int, spelling: Spelling
) -> Block:
    """Takes columns out of Arrow; for threads: it leaves Python's lock most of the time."""
    matrix = np.empty((len(features), rows))
    cells = tuple(
        cells_of(array, row, spelling=spelling) for array, row in zip(features, matrix, strict=True)
    )
    for row, of in zip(matrix, cells, strict=True):
        if of.kind in (TEXT, CATEGORY):
            row[:] = 0  # its codes are known when the blocks before it are
    least = matrix.min(axis=1, initial=np.inf)
    most = matrix.max(axis=1, initial=-np.inf)
    types = tuple(array.type for array in (*features, *([] if target is None else [target])))
    of_target = None if target is None else cells_of(target, spelling=spelling)
    return Block(matrix, cells, least, most, of_target, types)


class Gathering:
    """Holds what has passed of a table."""

    def __init__(
        self,
        names: Sequence[str],
        target: str,
        *,
        spool: Spool,
        label: str,
        note: str,
        data: DataConfig,
        look: Callable[[str, int], str] | None = None,
    ) -> None:
        """look: what stands in a cell of a column and row of a file of text."""
        self.names, self.spool = tuple(names), spool
        self._seen = [Seen(name) for name in names]
        self._target_seen = Seen(target)
        self._targets = Growing()
        self._label, self._note, self._missing = label, note, data.missing
        self._look, self._decimal, self._na = look, data.decimal if look else None, data.na

    def append(self, block: Block) -> None:
        """All columns of the next rows."""
        start = self.spool.rows
        for column in range(len(self.names)):
            self._see(block, column, column, start)
        self._add_target(block.target, start)
        self.spool.append(block.matrix)

    def put(self, block: Block, columns: Sequence[int], start: int) -> None:
        """Some columns of rows from `start` on, for which the spool has room."""
        for place, column in enumerate(columns):
            self._see(block, place, column, start)
            self.spool.put(column, start, block.matrix[place])
        self._add_target(block.target, start)

    def mixed(self) -> list[str]:
        """The columns that were numbers in some blocks and text in others: once more, as text."""
        found = [seen for seen in (*self._seen, self._target_seen) if seen.kind() == "mixed"]
        for seen in found:
            seen.__init__(seen.name)  # type: ignore[misc]
            if seen is self._target_seen:
                self._targets = Growing()
        return [seen.name for seen in found]

    def raw(self) -> Raw:
        """The whole table. Raises DataError with a line for each column at fault."""
        if not self.spool.rows:
            raise DataError(f"data.path: {self._label} has no rows{self._note}; write some")
        problems = self._target_problems()
        for seen in self._seen:
            found = seen.problem(
                target=self._target_seen.name,
                label=self._label,
                note=self._note,
                missing=self._missing,
                decimal=self._decimal,
                look=self._look,
            )
            problems += [found] if found else []
        if problems:
            more = len(problems) - MOST_SHOWN
            rest = [f"data.path: and {more} more columns like these"] if more > 0 else []
            raise DataError("\n".join(problems[:MOST_SHOWN] + rest))
        table = Table(
            names=self.names,
            words=tuple(tuple(s.words) if s.kind() == CATEGORY else None for s in self._seen),
            whole=tuple(s.kind() == NUMBER and s.whole for s in self._seen),
            holes=tuple(s.holes for s in self._seen),
            largest=tuple(s.largest for s in self._seen),
            spool=self.spool,
            missing=self._missing,
        )
        return self._raw(table)

    def _raw(self, table: Table) -> Raw:
        notes: tuple[str, ...] = tuple(
            f"{listed(sorted(s.na))} was read as missing in {shorten(s.name)} (data.na)"
            for s in self._seen
            if s.na
        )
        kept, target = None, self._target()
        if self._missing == "drop" and any(table.holes):
            kept = table.whole_rows()
            if not kept.any():
                raise DataError(
                    f"data.missing: drop would leave no row of {self._label}: each of its "
                    f"{len(kept):,} has a missing value; set it to mean, or leave columns out by "
                    "data.drop"
                )
            left_out = int((~kept).sum())
            notes += (f"{left_out:,} of {len(kept):,} rows with missing values were left out",)
            table, target = table.only(kept), target[kept]
        return Raw(
            features=table,
            target=target,
            feature_names=self.names,
            target_name=self._target_seen.name,
            label=self._label,
            row_note=self._note,
            notes=notes,
            kept=kept,
            decimal=self._decimal,
            na=self._na,
        )

    def _see(self, block: Block, place: int, column: int, start: int) -> None:
        cells, seen = block.cells[place], self._seen[column]
        if cells.kind in (TEXT, CATEGORY):
            block.matrix[place] = seen.text(cells, start, most=MOST_CATEGORIES)
        elif cells.kind == NUMBER:
            least, most = float(block.least[place]), float(block.most[place])
            seen.numbers(cells, start, least=least, most=most)
        else:
            seen.nothing(cells, start)

    def _add_target(self, cells: Cells | None, start: int) -> None:
        if cells is None:
            return
        seen = self._target_seen
        if cells.kind in (TEXT, CATEGORY):
            codes = seen.text(cells, start, most=None)
            self._targets.add(np.where(np.isnan(codes), -1, codes).astype(np.int64))
        elif cells.kind == NUMBER:
            holes = np.nan if cells.values.dtype.kind == "f" and cells.missing.any() else 0.0
            seen.numbers(cells, start, least=holes, most=holes)
            self._targets.add(cells.values)
        else:
            seen.nothing(cells, start)

    def _target_problems(self) -> list[str]:
        seen, label = self._target_seen, self._label
        if seen.kind() not in (NUMBER, CATEGORY, EMPTY):
            return [refused_type(seen.name, seen.kind(), target=seen.name, label=label)]
        if seen.holes == seen.rows:
            return [
                f"data.target: {label} column {shorten(seen.name)}: holds no value in any row; "
                "choose another target"
            ]
        if seen.holes:
            word = self._look(seen.name, seen.first_hole) if self._look else ""
            return [
                f"data.target: {label} row {seen.first_hole + 1}{self._note}, column "
                f"{shorten(seen.name)}: {absent(seen.holes, word, 'fill it in or drop the rows')}"
            ]
        return []

    def _target(self) -> np.ndarray:
        whole = self._targets.array()
        if self._target_seen.kind() == NUMBER:
            return whole
        words = np.empty(len(self._target_seen.words), dtype=object)
        words[:] = list(self._target_seen.words)
        return words[whole]

    @property
    def row_bytes(self) -> int:
        """What each row takes of memory beside its features, from its reading to the split: the
        target, its label, three masks, and text as an array of objects."""
        is_text = self._target_seen.kind() == CATEGORY
        return 2 * self._targets.value_bytes + 4 + (8 if is_text else 0)
