"""The files that data comes from, as they were when their content was hashed: what decides whether
prepared arrays can be reused, and whether somebody wrote to the files while they were read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from tasks.engine.files import prepared_cache
from tasks.engine.files.source_data import DataError


@dataclass(frozen=True)
class Origin:
    """One file, or all that count in a folder; nothing where the data is made up."""

    path: str | None = None
    bytes: int | None = None
    mtime_ns: int | None = None  # of the file that was changed last
    sha256: str | None = None


def origin_of(path: Path, files: Sequence[Path]) -> Origin:
    """Size, time and content of the file at `path`, or of the `files` in that folder.

    Errors: DataError where one cannot be read.
    """
    try:
        size_bytes, mtime_ns = _state(files)
        # Size and time alone would miss a file rewritten within the clock's tick, or with its
        # time restored; hashing reads about a gigabyte a second.
        if list(files) == [path]:
            return Origin(str(path), size_bytes, mtime_ns, prepared_cache.file_sha256(path))
        total = hashlib.sha256()
        for file in files:
            name = file.relative_to(path).as_posix()
            total.update(f"{prepared_cache.file_sha256(file)} {name}\n".encode())
    except OSError as error:
        raise DataError(_unreadable(path, error)) from None
    return Origin(str(path), size_bytes, mtime_ns, total.hexdigest())


class Hashing:
    """Hashes in a thread what is read meanwhile."""

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        try:
            self._path, self._before = path, _state(files)
        except OSError as error:
            raise DataError(_unreadable(path, error)) from None
        self._found: Future[Origin] = Future()
        # A daemon: where the reading fails nobody waits for the checksum of a large file.
        Thread(target=self._hash, args=(files,), daemon=True).start()

    def result(self) -> Origin:
        """What `origin_of` gives. Raises DataError, also where a file was written since."""
        found = self._found.result()
        if (found.bytes, found.mtime_ns) != self._before:
            raise DataError(_changed(self._path))
        return found

    def _hash(self, files: Sequence[Path]) -> None:
        try:
            self._found.set_result(origin_of(self._path, files))
        except BaseException as error:
            self._found.set_exception(error)


def _unreadable(path: Path, error: OSError) -> str:
    return f"data.path: {error.filename or path} cannot be read ({error.strerror}); mend that"


def _changed(path: object) -> str:
    return f"data.path: {path} was changed while it was read; start again when it is whole"


def refuse_changed(found: Origin, files: Callable[[], Sequence[Path]]) -> None:
    """Raises DataError where one of the files was written, added or removed since `found`."""
    if found.path is None:
        return
    try:
        same = _state(files()) == (found.bytes, found.mtime_ns)
    except (OSError, DataError):
        same = False
    if not same:
        raise DataError(_changed(found.path))


def _state(files: Sequence[Path]) -> tuple[int, int]:
    states = [file.stat() for file in files]
    return sum(s.st_size for s in states), max(s.st_mtime_ns for s in states)
