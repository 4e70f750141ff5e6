"""The cache folder of prepared arrays: written beside its name and renamed, so that it is whole or
not there at all, whatever is killed or races; read only after it was verified. It refuses a full
or unwritable disk by the setting data.cache and leaves nothing of itself behind.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import uuid4

import numpy as np

from headroom.data.source_data import DataError, format_size, shorten

MANIFEST = "manifest.json"
FORMAT = 2
STALE_S = 60  # a temporary folder younger than this may not be locked yet
BLOCK_BYTES = 1 << 22  # of a file, with a checksum each: they are verified side by side
PIECE_BYTES = 1 << 18  # read at once to verify a block: preparing counts what it takes
READERS = 4

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Draft:
    """Checked data that is ready to be written: `write` puts its parts into a folder and
    returns their manifest."""

    needed_bytes: int
    write: Callable[[Path], dict[str, Any]]


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file's content; raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def compute_fingerprint(meaning: Mapping[str, Any], files: Mapping[str, Any]) -> str:
    """Return 16 hex digits that identify the prepared content and what it means, not where it
    is."""
    # The content is in by its SHA-256.
    files = {p: {k: v for k, v in entry.items() if k != "crc32"} for p, entry in files.items()}
    said = json.dumps([FORMAT, meaning, files], sort_keys=True, allow_nan=False)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def make_manifest(meaning: Mapping[str, Any], files: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest that `read_manifest` checks: the entries of the parts, and what they
    mean."""
    return {
        "format": FORMAT,
        "fingerprint": compute_fingerprint(meaning, files),
        "meaning": meaning,
        "files": files,
        "numpy": np.__version__,
    }


class PartWriter:
    """Writes one array to disk in blocks of rows, and hashes it as it is written."""

    def __init__(self, path: Path, *, shape: tuple[int, ...], dtype: str) -> None:
        self._file = open(path, "wb", opener=_open_private)  # noqa: SIM115, closed by __exit__
        self._hash = hashlib.sha256()
        self._blocks: list[int] = []
        self._hashed = 0
        self._hasher = ThreadPoolExecutor(1)
        self._hashing: Future[None] = self._hasher.submit(self._digest, b"")
        self._shape, self._dtype, self._written = shape, np.dtype(dtype), 0
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self, header)

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._hasher.shutdown()
        self._file.close()

    def write(self, data: Any) -> int:
        self._hashing.result()
        # In a thread, while the rows are written and the next ones made; not to be changed since.
        self._hashing = self._hasher.submit(self._digest, data)
        self._written += memoryview(data).nbytes
        return self._file.write(data)

    def _digest(self, data: Any) -> None:
        self._hash.update(data)
        left = memoryview(data).cast("B")
        while left:
            within = self._hashed % BLOCK_BYTES
            if not within:
                self._blocks.append(0)
            part, left = left[: BLOCK_BYTES - within], left[BLOCK_BYTES - within :]
            self._blocks[-1] = zlib.crc32(part, self._blocks[-1])
            self._hashed += len(part)

    def append(self, rows: np.ndarray) -> None:
        """Append rows of the shape and type that were announced."""
        assert rows.dtype == self._dtype and rows.shape[1:] == self._shape[1:]
        if rows.size:
            self.write(np.ascontiguousarray(rows).data.cast("B"))

    def finish(self) -> dict[str, Any]:
        """Sync the file to disk and return its entry in the manifest."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._hashing.result()
        return {
            "shape": list(self._shape),
            "dtype": self._dtype.str,
            "bytes": self._written,
            "sha256": self._hash.hexdigest(),
            "crc32": self._blocks,
        }


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a complete folder; None where there is none, or where anything
    differs. Raises DataError where it is another user's.

    It checks sizes, headers, checksums, and the manifest's own fingerprint.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        if manifest["fingerprint"] != compute_fingerprint(manifest["meaning"], files):
            raise ValueError("its manifest was changed")
        for part, entry in files.items():
            _verify_file(folder / part, entry)
    except FileNotFoundError:
        if folder.is_dir():
            log.warning("data.cache: %s lacks a file; it is prepared anew", folder)
        return None
    except PermissionError:
        raise DataError(
            f"data.cache: {folder} is another user's, who alone may read it; name another folder"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("data.cache: %s is damaged (%s); it is prepared anew", folder, error)
        return None
    return manifest


def list_prepared(cache: Path, source: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the path and the settings of each folder of a source that seems complete."""
    entries = []
    for manifest in cache.glob(f"{source}-*/{MANIFEST}"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            said = json.loads(manifest.read_text(encoding="utf-8"))
            entries.append((said["source"]["path"], said["settings"]))
    return entries


def _verify_file(path: Path, entry: Mapping[str, Any]) -> None:
    if path.stat().st_size != entry["bytes"]:
        raise ValueError(f"{path.name} has another size than it was written with")
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if list(array.shape) != entry["shape"] or array.dtype.str != entry["dtype"]:
        raise ValueError(f"{path.name} has another header than it was written with")
    if not _has_checksums(path, entry["crc32"]):
        raise ValueError(f"{path.name} has other content than it was written with")


def _has_checksums(path: Path, blocks: list[int]) -> bool:
    """True if the file's blocks have these checksums."""
    with open(path, "rb") as file, ThreadPoolExecutor(READERS) as readers:

        def crc32(number: int) -> int:
            checksum, begin = 0, number * BLOCK_BYTES
            for at in range(begin, begin + BLOCK_BYTES, PIECE_BYTES):
                checksum = zlib.crc32(os.pread(file.fileno(), PIECE_BYTES, at), checksum)
            return checksum

        return list(readers.map(crc32, range(len(blocks)))) == blocks


@contextmanager
def refuse_unwritable(cache: Path) -> Iterator[None]:
    """Turn errors of the disk under data.cache into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"data.cache: {shorten(str(cache), 300)} cannot be written ({error.strerror or error})"
            "; make room there, or name another folder"
        ) from None


def check_disk_room(cache: Path, needed_bytes: int) -> None:
    """Raises DataError where the folder cannot be made, or its disk lacks room for the arrays."""
    # Unlike pathlib's, False for any error: a name may be too long.
    there = next(p for p in (cache, *cache.parents) if os.path.exists(p))
    shown = shorten(str(cache), 300)
    if not there.is_dir():
        raise DataError(f"data.cache: {shown} lies under {there}, a file; name another folder")
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        raise DataError(
            f"data.cache: {there} lies on a file system that is mounted read-only; "
            "name another folder"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise DataError(
            f"data.cache: this user may not write in {there}; name another folder, or `chown` it"
        )
    free_bytes = shutil.disk_usage(there).free
    if needed_bytes > free_bytes:
        raise DataError(
            f"data.cache: {shown} needs {format_size(needed_bytes)} for the prepared arrays and "
            f"has {format_size(free_bytes)} free; make room there, or name another folder"
        )


def publish_folder(
    folder: Path, fill: Callable[[Path], dict[str, Any]]
) -> tuple[dict[str, Any], bool]:
    """Fill a temporary folder and rename it to `folder`; return the manifest, and whether
    another process was first.

    Two that prepare the same at once do not wait for each other: the later one uses what the
    earlier one left, which is the same.
    """
    cache = folder.parent
    with refuse_unwritable(cache):
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_stale_folders(cache)
        temporary = cache / f".{folder.name}.{uuid4().hex}.tmp"
        temporary.mkdir(mode=0o700)
        lock = os.open(temporary, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            manifest = fill(temporary)
            _write_synced(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
            os.fsync(lock)
            there = _rename_folder(temporary, folder)
            _sync_folder(cache)
        finally:
            os.close(lock)
            shutil.rmtree(temporary, ignore_errors=True)
    return (manifest, False) if there is None else (there, True)


def _rename_folder(temporary: Path, folder: Path) -> dict[str, Any] | None:
    """None when the folder got its name; the manifest of a whole one that had it already."""
    for _ in range(5):
        with suppress(OSError):
            os.rename(temporary, folder)
            return None
        there = read_manifest(folder)
        if there is not None:
            return there
        # Damaged, so out of the way under a name that is swept; who maps it keeps it.
        aside = folder.parent / f".{folder.name}.{uuid4().hex}.tmp"
        with suppress(FileNotFoundError):
            os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)
    os.rename(temporary, folder)
    return None


def fill_from_file(values: np.ndarray, file: int, at: int) -> bool:
    """Fill a contiguous array with the file's bytes from `at` on; return False where it ends
    early."""
    view = values.reshape(-1).view(np.uint8).data
    while len(view):
        got = os.preadv(file, [view], at)
        if not got:
            return False
        view, at = view[got:], at + got
    return True


class ScratchFile:
    """Values in a file that has no name, beside the cache: nothing is left of it, however the
    process ends. It is not mapped, so that what was read need not stay in memory; any thread may
    write and read it. Raises DataError where the disk fails."""

    def __init__(self, cache: Path, *, is_in_memory: bool = False) -> None:
        self._cache = cache
        with refuse_unwritable(cache):
            if is_in_memory:
                self._file = os.memfd_create("rows")
            else:
                there = next(p for p in (cache, *cache.parents) if p.exists())
                with tempfile.TemporaryFile(dir=there) as file:
                    self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)

    def write(self, values: np.ndarray, at: int) -> None:
        """Write the values' bytes from `at` on."""
        view = np.ascontiguousarray(values).data.cast("B")
        with refuse_unwritable(self._cache):
            while len(view):
                written = os.pwrite(self._file, view, at)
                view, at = view[written:], at + written

    def fill(self, values: np.ndarray, at: int) -> None:
        """Fill a contiguous array with the bytes from `at` on."""
        with refuse_unwritable(self._cache):
            if not fill_from_file(values, self._file, at):
                raise OSError("it ended early")


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb", opener=_open_private) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def remove_stale_folders(cache: Path) -> None:
    """Remove the temporary folders of writers that have ended: the kernel freed their lock."""
    for left in cache.glob(".*.tmp"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime < STALE_S:
                continue
            opened = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(opened)


@dataclass(frozen=True)
class SourceFingerprint:
    """The state of one source file, or of all files that count in a folder; all None for
    generated data."""

    path: str | None = None
    bytes: int | None = None
    mtime_ns: int | None = None  # of the file that was changed last
    sha256: str | None = None


def fingerprint_source(path: Path, files: Sequence[Path]) -> SourceFingerprint:
    """Return the size, time and content hash of the file at `path`, or of the `files` in that
    folder.

    Errors: DataError where one cannot be read.
    """
    try:
        size_bytes, mtime_ns = _stat_files(files)
        # Size and time alone would miss a file rewritten within the clock's tick, or with its
        # time restored; hashing reads about a gigabyte a second.
        if list(files) == [path]:
            return SourceFingerprint(str(path), size_bytes, mtime_ns, hash_file(path))
        total = hashlib.sha256()
        for file in files:
            name = file.relative_to(path).as_posix()
            total.update(f"{hash_file(file)} {name}\n".encode())
    except OSError as error:
        raise DataError(_describe_unreadable(path, error)) from None
    return SourceFingerprint(str(path), size_bytes, mtime_ns, total.hexdigest())


class BackgroundHash:
    """Hashes source files in a thread while they are read."""

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        try:
            self._path, self._before = path, _stat_files(files)
        except OSError as error:
            raise DataError(_describe_unreadable(path, error)) from None
        self._fingerprint: Future[SourceFingerprint] = Future()
        # A daemon: where the reading fails nobody waits for the checksum of a large file.
        Thread(target=self._hash, args=(files,), daemon=True).start()

    def result(self) -> SourceFingerprint:
        """Return what `fingerprint_source` gives. Raises DataError, also where a file was
        written since."""
        fingerprint = self._fingerprint.result()
        if (fingerprint.bytes, fingerprint.mtime_ns) != self._before:
            raise DataError(_describe_change(self._path))
        return fingerprint

    def _hash(self, files: Sequence[Path]) -> None:
        try:
            self._fingerprint.set_result(fingerprint_source(self._path, files))
        except BaseException as error:
            self._fingerprint.set_exception(error)


def _describe_unreadable(path: Path, error: OSError) -> str:
    return f"data.path: {error.filename or path} cannot be read ({error.strerror}); mend that"


def _describe_change(path: object) -> str:
    return f"data.path: {path} was changed while it was read; start again when it is whole"


def refuse_changed_files(
    fingerprint: SourceFingerprint, files: Callable[[], Sequence[Path]]
) -> None:
    """Raises DataError where one of the files was written, added or removed since `fingerprint`."""
    if fingerprint.path is None:
        return
    try:
        same = _stat_files(files()) == (fingerprint.bytes, fingerprint.mtime_ns)
    except (OSError, DataError):
        same = False
    if not same:
        raise DataError(_describe_change(fingerprint.path))


def _stat_files(files: Sequence[Path]) -> tuple[int, int]:
    states = [file.stat() for file in files]
    return sum(s.st_size for s in states), max(s.st_mtime_ns for s in states)
