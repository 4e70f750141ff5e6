"""Refuses a run whose record and model would not fit on the disks they go to, before it is trained:
a night's training is lost where its weights find no room.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from tasks.engine.base.units import mebibytes
from tasks.tracking.where import TrackingError, Where

MIB = 1024**2
# Bytes that a run of digits with a log point each step left behind, for each, rounded up.
JOURNAL_BYTES, DATABASE_BYTES = 200, 1000
# What it left beside these: report, plots and example, their copy, a new database.
RECORD_BYTES, COPY_BYTES, NEW_BYTES = 1 * MIB, 1 * MIB, 2 * MIB


def _refuse_read_only(folder: Path) -> None:
    there = next((p for p in (folder, *folder.parents) if p.exists()), None)
    if there is not None and not os.access(there, os.W_OK | os.X_OK):
        raise TrackingError(
            f"artifacts: {there} can't be written, and the run's files and its model go to "
            f"{folder}; make it writable, or name another folder in mlflow.yaml"
        )


def check(where: Where, *, weights_bytes: int, log_points: int) -> None:
    """Raises TrackingError where a disk lacks room for record and weights, or takes none."""
    journal = log_points * JOURNAL_BYTES
    needs = {"runs": (Path(where.runs), weights_bytes + journal + RECORD_BYTES)}
    if where.database is not None:
        needs["tracking_uri"] = where.database, log_points * DATABASE_BYTES + NEW_BYTES
    if where.keeps_files:
        needs["artifacts"] = Path(where.artifacts), weights_bytes + journal + COPY_BYTES
    # The weights lie there while they are sent.
    needs["the temporary folder"] = Path(tempfile.gettempdir()), weights_bytes
    disks: dict[int, list[tuple[str, Path, int]]] = {}
    for name, (path, needed) in needs.items():
        there = next((p for p in (path, *path.parents) if p.exists()), None)
        if there is not None:
            disks.setdefault(os.stat(there).st_dev, []).append((name, there, needed))
    if where.keeps_files:
        _refuse_read_only(Path(where.artifacts))
    for found in disks.values():
        needed = sum(needed for *_, needed in found)
        free = shutil.disk_usage(found[0][1]).free
        if needed > free:
            names = ", ".join(name for name, *_ in found)
            raise TrackingError(
                f"{names}: the disk of {found[0][1]} has {mebibytes(free / MIB)} free, and the run "
                f"may need {mebibytes(needed / MIB)} there for its record and its model; make room"
            )
