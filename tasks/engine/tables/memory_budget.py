"""How reading a table keeps within the memory that it may take: the size of its blocks, how much is
kept in memory before the rest goes to a file, and how many rows there is room for at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.engine.files.source_data import DataError, allowed_bytes, size
from tasks.engine.settings.data_config import DataConfig

MIB = 1024**2
SMALLEST_ROW_BYTES = 6  # a target of one byte, its label, three masks
WORK_BYTES = 24 * MIB  # blocks under way
BLOCK_BYTES = 2 * MIB  # of text; larger ones leave the processor's cache
SMALLEST_BYTES = 1 * MIB
PAGE_BYTES = 4 * MIB  # of each Parquet column that is being read: pages of 1 MiB, packed and not


@dataclass(frozen=True)
class Budget:
    """How a table is read within its memory."""

    kept_bytes: int  # of columns, before they go to a file
    block_bytes: int  # of text that is parsed at once, in each thread
    block_rows: int  # of a block whose size is chosen
    together: int  # Parquet columns that are read at once
    threads: int | None  # None: as many as there are


def budget(allowed: int, *, columns: int) -> Budget:
    """allowed: bytes of host memory for all that preparing takes."""
    block = max(SMALLEST_BYTES, min(BLOCK_BYTES, allowed // 64))
    return Budget(
        kept_bytes=allowed // 4,
        block_bytes=block,
        block_rows=max(1024, block // (8 * columns)),
        together=max(1, min(columns, allowed // 4 // PAGE_BYTES)),
        threads=None if allowed > 1024 * MIB else 2,
    )


def check_rows(rows: int, data: DataConfig, label: str, *, row_bytes: int) -> None:
    """Raises DataError where the labels and the split alone take more than there is."""
    needed, allowed = row_bytes * rows + WORK_BYTES, allowed_bytes(data)
    if needed <= allowed:
        return
    setting = "data.path" if data.memory_mib is None else "data.memory_mib"
    remedy = "take fewer" if data.memory_mib is None else f"raise it to {-(-needed // MIB):,}"
    raise DataError(
        f"{setting}: {label} has {rows:,} rows or more, whose labels and split take about "
        f"{size(needed)} of memory, and there are {size(allowed)}; {remedy}"
    )
