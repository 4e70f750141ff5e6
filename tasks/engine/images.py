"""Decodes a folder of images into rows: upright, cut to the square in their middle, resized, on
white where they are transparent. A size is believed only up to a limit and before any pixel is
decoded; a broken, enormous or strange image is refused by its name, and all of them at once.
"""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil

from tasks.engine import store
from tasks.engine.data_config import DataConfig
from tasks.engine.image_folders import ImageFolder, image_folder, refusal
from tasks.engine.pixels import BROKEN, Seen, broken, look, square
from tasks.engine.raw import DataError, Raw, shorten, size

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
) -> np.ndarray:
    """All images, uint8 of `shape`, decoded by as many at once as the memory allows."""
    row_bytes = int(np.prod(shape[1:]))
    budget = _budget(data)
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
    cache = Path(os.path.abspath(os.path.expanduser(data.cache)))
    store.check_room(cache, len(seen) * row_bytes)
    there = next(p for p in (cache, *cache.parents) if p.exists())
    with store.refusals(cache), tempfile.TemporaryFile(dir=there) as file:

        def keep(row: int, image: np.ndarray) -> None:
            _write_at(file.fileno(), image.tobytes(), row * row_bytes)

        _decode_into(keep, folder, workers=workers, shape=shape[1:])
        return np.memmap(file, np.uint8, mode="r", shape=shape)


def _budget(data: DataConfig) -> int:
    free_bytes = int(psutil.virtual_memory().available)
    if data.memory_mib is None:
        return free_bytes
    return min(free_bytes, int(data.memory_mib * 1024**2))


def _write_at(handle: int, content: bytes, at: int) -> None:
    while content:
        written = os.pwrite(handle, content, at)
        content, at = content[written:], at + written


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
