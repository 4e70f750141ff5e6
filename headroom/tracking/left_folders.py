"""Finds the folders of runs whose log MLflow lacks a part of, though nobody trains there or sends
it any more: by the log and the locks alone, without MLflow.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headroom.base.event_log import (
    LOG,
    SENDING_LOCK,
    TRAINING_LOCK,
    is_sent,
    read_begins,
    read_end,
)
from headroom.base.file_lock import is_held
from headroom.prefect.prefect_http import is_run_alive


def find_left_folders(runs: Path) -> Iterator[Path]:
    """Yield the folders that are left, by name; each is looked at when it is asked for."""
    yield from filter(_is_left, sorted(log.parent for log in runs.glob(f"*/{LOG}")))


def has_left_folders(runs: Path) -> bool:
    """Return whether there is one."""
    return next(find_left_folders(runs), None) is not None


def _is_left(folder: Path) -> bool:
    """Return whether MLflow lacks a part of this run, which this host has to send: it has ended, or
    its process is gone. Of a log without a begin nobody but MLflow knows whose it is."""
    if is_sent(folder) or any(is_held(folder / name) for name in (TRAINING_LOCK, SENDING_LOCK)):
        return False
    tags = _read_newest_tags(folder)
    if tags is None:
        return True
    is_ours = tags.get("host") == socket.gethostname()
    return is_ours and (bool(read_end(folder)) or not is_run_alive(tags))


def is_going_on(folder: Path) -> bool:
    """Return whether the run of this folder has not ended, and its process is here and lives."""
    tags = _read_newest_tags(folder) or {}
    is_alive = tags.get("host") == socket.gethostname() and is_run_alive(tags)
    return is_alive and not read_end(folder)


def _read_newest_tags(folder: Path) -> dict[str, Any] | None:
    begins = read_begins(folder / LOG, 0)
    return dict(begins[-1][0].get("tags", {})) if begins else None
