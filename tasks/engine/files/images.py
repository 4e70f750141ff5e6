"""Decodes a folder of images into rows: upright, cut to the square in their middle, resized, on
white where they are transparent. A size is believed only up to a limit and before any pixel is
decoded; a broken, enormous or strange image is refused by its name, and all of them at once.
"""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tasks.engine.files import prepared_cache
from tasks.engine.files.image_folders import ImageFolder, image_folder, refusal
from tasks.engine.files.pixels import BROKEN, Seen, broken, look, square
from tasks.engine.files.source_data import (
    DataError,
    Raw,
    allowed_bytes,
    cache_folder,
    shorten,
    size,
)
from tasks.engine.settings.data_config import DataConfig

WORKERS = 2
SLACK_BYTES = 32 * 1024**2  # of the budget, for what comes after reading: blocks, labels, split


def read_images(data: DataConfig) -> Raw:
    """Rows of (1 or 3, image_size, image_size) pixels, 0..255 as uint8; classes are the folders.

    One channel where all images are greyscale. They lie in memory where data.memory_mib has room
    for them, else in a file without a name beside data.cache, which is gone when they are.
    """
    folder = image_folder(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of large images and odd metadata
        seen = _each(folder, lambda _, path: look(path, data.image_size))
        _refuse(folder, seen)
        channels = 1 if all(image.grey for image in seen) else 3
        shape = (len(folder.files), channels, data.image_size, data.image_size)
        pixels = _decoded(folder, seen, data=data, shape=shape)
    target = np.array([kind for kind, _ in folder.files], dtype=object)
    skipped = f"{folder.skipped:,} hidden files and notes beside the images were left out"
    return Raw(
        features=pixels,
        target=target,
        feature_names=None,
        target_name="the folder",
        label=folder.path.name,
        notes=(skipped,) if folder.skipped else (),
    )


def _refuse(folder: ImageFolder, seen: list[Seen]) -> None:
    problems = [
        f"data.path: {shorten(f'{kind}/{name}', 120)} {image.problem}"
        for (kind, name), image in zip(folder.files, seen, strict=True)
        if image.problem
    ]
    if problems:
        raise refusal(problems)


def _each(
    folder: ImageFolder, work: Callable[[int, Path], Seen], workers: int = WORKERS
) -> list[Seen]:
    """What `work` gives for each image, by its row. Pillow lets other threads run as it decodes."""
    results = [Seen()] * len(folder.files)
    stop = threading.Event()  # else an interrupt would wait for all that is left

    def share(first: int) -> None:
        for i, path in enumerate(folder.paths()):
            if i % workers == first and not stop.is_set():
                results[i] = work(i, path)

    with ThreadPoolExecutor(workers) as pool:
        try:
            list(pool.map(share, range(workers)))
        finally:
            stop.set()
    return results


def _decoded(
    folder: ImageFolder, seen: list[Seen], *, data: DataConfig, shape: tuple[int, ...]
) -> np.ndarray | StoredRows:
    """All images, uint8 of `shape`, decoded by as many at once as the memory allows."""
    row_bytes = int(np.prod(shape[1:]))
    budget = allowed_bytes(data)
    room = budget - max(SLACK_BYTES, 32 * row_bytes)
    largest = max(range(len(seen)), key=lambda i: seen[i].needed_bytes)
    needed = seen[largest].needed_bytes
    if needed > room:
        what = shorten("/".join(folder.files[largest]), 120)
        raise DataError(
            f"data.memory_mib: {what} needs about {size(needed)} to decode, but "
            f"{size(max(room, 0))} are left of {size(budget)}; raise data.memory_mib, or shrink "
            "the image"
        )
    workers = max(1, min(WORKERS, room // max(needed, 1)))
    if workers * needed + len(seen) * row_bytes <= room:
        pixels = np.empty(shape, dtype=np.uint8)
        _decode_into(pixels.__setitem__, folder, workers=workers, shape=shape[1:])
        return pixels
    prepared_cache.check_room(cache_folder(data), len(seen) * row_bytes)
    rows = StoredRows(cache_folder(data), shape)
    _decode_into(rows.put, folder, workers=workers, shape=shape[1:])
    return rows


class StoredRows:
    """Images in a file that has no name, so that nothing is left of it whatever ends the process.
    Read by slices of rows, as an array is, but not mapped: what was read need not stay in memory.
    """

    def __init__(self, cache: Path, shape: tuple[int, ...]) -> None:
        self.shape, self.ndim, self.size = shape, len(shape), int(np.prod(shape))
        self._row_bytes, self._cache = self.size // shape[0], cache
        there = next(p for p in (cache, *cache.parents) if p.exists())
        with prepared_cache.refusals(cache):
            self._file, name = tempfile.mkstemp(prefix=".images.", suffix=".tmp", dir=there)
            os.unlink(name)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return self.shape[0]

    def put(self, row: int, image: np.ndarray) -> None:
        """Keeps one image; from any thread."""
        view, at = memoryview(image.tobytes()), row * self._row_bytes
        with prepared_cache.refusals(self._cache):
            while len(view):
                written = os.pwrite(self._file, view, at)
                view, at = view[written:], at + written

    def __getitem__(self, part: slice) -> np.ndarray:
        first, last, _ = part.indices(len(self))
        values = np.empty((max(0, last - first), *self.shape[1:]), dtype=np.uint8)
        with prepared_cache.refusals(self._cache):
            if not prepared_cache.filled(values, self._file, first * self._row_bytes):
                raise OSError("it ended early")
        return values


def _decode_into(
    keep: Callable[[int, np.ndarray], None],
    folder: ImageFolder,
    *,
    workers: int,
    shape: tuple[int, ...],
) -> None:
    """Gives each image (channels, side, side) to `keep` by its row, in no order."""

    def work(row: int, path: Path) -> Seen:
        try:
            image = square(path, side=shape[1], grey=shape[0] == 1)
        except BROKEN as error:
            return Seen(broken(error))
        keep(row, image)
        return Seen()

    _refuse(folder, _each(folder, work, workers))
