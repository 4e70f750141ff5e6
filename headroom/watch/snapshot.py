"""Record the history of a device's allocator, and write it to memory/snapshot.pickle on request and
when memory ran out. A device that keeps no history leaves no file; neither a full disk nor a broken
device ends a run because of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from headroom.watch.out_of_memory import is_oom

SNAPSHOT_FILE = Path("memory", "snapshot.pickle")
# Of the allocator's history: some steps of a large model; each entry holds its Python frames.
HISTORY_ENTRIES = 20_000

log = logging.getLogger(__name__)


class History(Protocol):
    """Records what an allocator does from start() on, and the Python lines that asked for it."""

    can_record: bool

    def start(self) -> None: ...

    def write(self, file: Path) -> None:
        """Write a pickle that https://pytorch.org/memory_viz opens; allocations from before
        start() have no lines there."""

    def stop(self) -> None:
        """Forget what was recorded, if anything."""


class NoHistory:
    """The history of devices whose allocators keep none."""

    can_record = False

    def start(self) -> None:
        pass

    def write(self, file: Path) -> None:
        pass

    def stop(self) -> None:
        pass


class CudaHistory:
    """The history of CUDA and ROCm. Recording costs some microseconds an allocation."""

    can_record = True

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=HISTORY_ENTRIES
        )

    def write(self, file: Path) -> None:
        torch.cuda.memory._dump_snapshot(str(file))

    def stop(self) -> None:
        torch.cuda.memory._record_memory_history(None)


def make_history(device: torch.device) -> History:
    """Return the history of this device's allocator."""
    return CudaHistory() if device.type == "cuda" else NoHistory()


class Recorder:
    """Records from start() on, and writes what the memory looks like at write()."""

    def __init__(self, source: History, file: Path) -> None:
        self._source, self._file = source, file
        self.is_recording = False
        self.is_written = False

    def start(self) -> None:
        """Record from here on; nothing changes where it records already."""
        if not self.is_recording and self._source.can_record:
            self.is_recording = True
            self._source.start()

    def write(self) -> None:
        """Write the file, in place of one that was written before."""
        if not self._source.can_record:
            return
        partial = self._file.with_suffix(".partial")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._source.write(partial)
            partial.replace(self._file)
            self.is_written = True
        except (OSError, RuntimeError) as error:  # no room; or the device answers nothing any more
            log.warning("memory.snapshot: %s could not be written: %s", self._file, error)
            _remove(partial)

    def stop(self) -> None:
        if self.is_recording:
            self.is_recording = False
            self._source.stop()


@contextmanager
def record_history(
    device: torch.device, *, folder: Path, on: bool, source: History | None = None
) -> Iterator[Recorder]:
    """Record the memory history of a training inside the block.

    on: record from the start, and write the file at the end, however the block ends. Otherwise the
    file is written where an out-of-memory error leaves the block, unless write() was called before;
    it contains more if start() was called. source: the history; that of the device if None.
    """
    history = source or make_history(device)
    recorder = Recorder(history, folder / SNAPSHOT_FILE)
    if on:
        if not history.can_record:
            log.info(
                "memory.snapshot: %s keeps no history of its memory: no %s", device, SNAPSHOT_FILE
            )
        recorder.start()
    try:
        yield recorder
    except BaseException as error:
        if not recorder.is_written and (on or is_oom(error)):
            recorder.write()
        raise
    else:
        if on:
            recorder.write()
    finally:
        recorder.stop()


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        log.warning("memory.snapshot: %s could not be removed: %s", file, error)
