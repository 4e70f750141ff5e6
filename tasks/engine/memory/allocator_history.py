"""The history of a device's memory as a file, memory/snapshot.pickle, written when it is asked for
and when memory ran out. It is written and never read here. A device that keeps no history leaves no
file, and neither a full disk nor a broken device ends a run on its account.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tasks.engine.memory.allocator_stats import History, history
from tasks.engine.memory.memory_meter import is_oom

log = logging.getLogger(__name__)
FILE = Path("memory", "snapshot.pickle")


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
def recording(
    device: torch.device, *, folder: Path, on: bool, source: History | None = None
) -> Iterator[Recorder]:
    """Around a training. on: record it, and write the file at its end, however it ends.

    Otherwise the file is written where an error of memory leaves the block, unless write() was
    called before; it tells more where start() was. source: the history, of the device if None.
    """
    found = source or history(device)
    recorder = Recorder(found, folder / FILE)
    if on:
        if not found.can_record:
            log.info("memory.snapshot: %s keeps no history of its memory: no %s", device, FILE)
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
