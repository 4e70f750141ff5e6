"""Reads a folder of images into rows: inspects their headers and decodes them upright, cut to the
square in their middle, resized, and on white where they are transparent. A size is believed only up
to a limit and before any pixel is decoded. It refuses, all at once and by name, broken or enormous
images.
"""

from __future__ import annotations

import struct
import threading
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, TiffImagePlugin, WebPImagePlugin

from headroom.data import prepared_cache
from headroom.data.image_folders import ImageFolder, make_refusal, scan_image_folder
from headroom.data.source_data import (
    DataError,
    RawData,
    compute_allowed_bytes,
    format_size,
    resolve_cache_folder,
    shorten,
)
from headroom.settings.run_config import DataConfig

MOST_PIXELS = 1 << 26  # of one image: 64 megapixels, 8,192 x 8,192
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")
PLUGINS = (TiffImagePlugin, WebPImagePlugin)  # the others register themselves
GREY = {"1", "L", "LA", "La", "I;16", "I;16L", "I;16B"}
COLOUR = {"P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"}
ORIENTATION = 0x0112  # of EXIF
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# What a decoder and the conversions after it hold for a pixel at the most. A progressive JPEG keeps
# 6 bytes for each of its pixels, however small it is to become; others are shrunk while decoded.
PIXEL_BYTES, PROGRESSIVE_BYTES = 16, 6
BROKEN = (
    Image.DecompressionBombError,
    OSError,  # Pillow's UnidentifiedImageError is one
    SyntaxError,
    ValueError,
    EOFError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    OverflowError,
    ZeroDivisionError,
    MemoryError,
    RuntimeError,
    struct.error,
    zlib.error,
)


@dataclass(frozen=True)
class ImageHeader:
    """What an image's header says, or why it cannot be read."""

    problem: str = ""
    grey: bool = False
    needed_bytes: int = 0  # of memory, to decode it


def inspect_image(path: Path, side: int) -> ImageHeader:
    """Inspect an image's header; of a PNG, which has checksums, the whole file is checked."""
    try:
        with open(path, "rb") as file, Image.open(file, formats=FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                return ImageHeader(_describe_too_large(f"{width:,} x {height:,} pixels"))
            if image.mode not in GREY | COLOUR:
                return ImageHeader(f"has pixels of the kind {image.mode}; save it as an 8-bit PNG")
            needed_bytes = _estimate_decode_bytes(image, side)
            if image.format == "PNG":
                image.verify()
            return ImageHeader(grey=image.mode in GREY, needed_bytes=needed_bytes)
    except Image.DecompressionBombError:
        return ImageHeader(_describe_too_large("more pixels than Pillow opens"))
    except BROKEN as error:
        return ImageHeader(describe_decode_error(error))


def _describe_too_large(what: str) -> str:
    return f"claims {what}, above the {MOST_PIXELS:,} of an image; shrink it, or remove it"


def describe_decode_error(error: BaseException) -> str:
    """Describe why an image cannot be decoded, in words that follow its name."""
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read ({error.strerror}); mend that, or remove it"
    says = "it is none of " + ", ".join(FORMATS) if "identify" in str(error) else str(error)
    says = shorten(says or type(error).__name__, 120)
    return f"is damaged or no image ({says}); copy it anew, or remove it"


def _estimate_decode_bytes(image: Image.Image, side: int) -> int:
    full = image.width * image.height
    # Twice the pixels asked for, so that resizing still has something to average.
    image.draft(image.mode, (2 * side, 2 * side))
    progressive = full * PROGRESSIVE_BYTES if image.info.get("progressive") else 0
    return image.width * image.height * PIXEL_BYTES + progressive


def decode_square(path: Path, *, side: int, grey: bool) -> np.ndarray:
    """Decode one image as (1 or 3, side, side) uint8. Raises one of BROKEN."""
    with open(path, "rb") as file, Image.open(file, formats=FORMATS) as opened:
        if opened.width * opened.height > MOST_PIXELS:
            raise ValueError("it was changed while it was read")
        opened.draft(opened.mode, (2 * side, 2 * side))
        opened.load()
        upright = _find_rotation(opened)
        image = _convert_to_eight_bit(opened)
        edge = min(image.size)
        left, top = ((length - edge) / 2 for length in image.size)
        box = (left, top, left + edge, top + edge)
        image = image.resize((side, side), Image.Resampling.BILINEAR, box=box)
    if upright is not None:
        image = image.transpose(upright)
    if image.mode in ("LA", "RGBA"):
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    values = np.asarray(image.convert("L" if grey else "RGB"))
    return values[np.newaxis] if grey else np.moveaxis(values, 2, 0)


def _find_rotation(image: Image.Image) -> Image.Transpose | None:
    """How to turn a photo. Cameras and editors write many a broken EXIF, which turns nothing."""
    try:
        orientation = image.getexif().get(ORIENTATION)
    except BROKEN:
        return None
    return UPRIGHT.get(orientation) if isinstance(orientation, int) else None


def _convert_to_eight_bit(image: Image.Image) -> Image.Image:
    """The image in a mode whose values can be averaged: L, LA, RGB, RGBA, CMYK or YCbCr."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data and image.mode not in ("LA", "RGBA"):
        return image.convert("LA" if image.mode in ("1", "L", "La") else "RGBA")
    plain = {"1": "L", "P": "RGB", "RGBX": "RGB"}
    return image.convert(plain[image.mode]) if image.mode in plain else image


WORKERS = 2
SLACK_BYTES = 32 * 1024**2  # of the budget, for what comes after reading: blocks, labels, split


def read_images(data: DataConfig) -> RawData:
    """Read rows of (1 or 3, image_size, image_size) pixels, 0..255 as uint8; classes are the
    folders.

    One channel where all images are greyscale. They lie in memory where data.memory_mib has room
    for them, else in a file without a name beside data.cache, which is gone when they are.
    """
    folder = scan_image_folder(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of large images and odd metadata
        seen = _map_images(folder, lambda _, path: inspect_image(path, data.images.image_size))
        _refuse_unreadable(folder, seen)
        channels = 1 if all(image.grey for image in seen) else 3
        shape = (len(folder.files), channels, data.images.image_size, data.images.image_size)
        pixels = _decode_images(folder, seen, data=data, shape=shape)
    target = np.array([kind for kind, _ in folder.files], dtype=object)
    skipped = f"{folder.skipped:,} hidden files and notes beside the images were left out"
    return RawData(
        features=pixels,
        target=target,
        feature_names=None,
        target_name="the folder",
        label=folder.path.name,
        notes=(skipped,) if folder.skipped else (),
    )


def _refuse_unreadable(folder: ImageFolder, seen: list[ImageHeader]) -> None:
    problems = [
        f"data.path: {shorten(f'{kind}/{name}', 120)} {image.problem}"
        for (kind, name), image in zip(folder.files, seen, strict=True)
        if image.problem
    ]
    if problems:
        raise make_refusal(problems)


def _map_images(
    folder: ImageFolder, work: Callable[[int, Path], ImageHeader], workers: int = WORKERS
) -> list[ImageHeader]:
    """What `work` gives for each image, by its row. Pillow lets other threads run as it decodes."""
    results = [ImageHeader()] * len(folder.files)
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


def _decode_images(
    folder: ImageFolder, seen: list[ImageHeader], *, data: DataConfig, shape: tuple[int, ...]
) -> np.ndarray | StoredRows:
    """All images, uint8 of `shape`, decoded by as many at once as the memory allows."""
    row_bytes = int(np.prod(shape[1:]))
    budget = compute_allowed_bytes(data)
    room = budget - max(SLACK_BYTES, 32 * row_bytes)
    largest = max(range(len(seen)), key=lambda i: seen[i].needed_bytes)
    needed = seen[largest].needed_bytes
    if needed > room:
        what = shorten("/".join(folder.files[largest]), 120)
        raise DataError(
            f"data.memory_mib: {what} needs about {format_size(needed)} to decode, but "
            f"{format_size(max(room, 0))} are left of {format_size(budget)}; raise "
            "data.memory_mib, or shrink the image"
        )
    workers = max(1, min(WORKERS, room // max(needed, 1)))
    if workers * needed + len(seen) * row_bytes <= room:
        pixels = np.empty(shape, dtype=np.uint8)
        _decode_into(pixels.__setitem__, folder, workers=workers, shape=shape[1:])
        return pixels
    prepared_cache.check_disk_room(resolve_cache_folder(data), len(seen) * row_bytes)
    rows = StoredRows(resolve_cache_folder(data), shape)
    _decode_into(rows.put, folder, workers=workers, shape=shape[1:])
    return rows


class StoredRows:
    """Images in a file, read by slices of rows as an array is."""

    def __init__(self, cache: Path, shape: tuple[int, ...]) -> None:
        self.shape, self.ndim, self.size = shape, len(shape), int(np.prod(shape))
        self._row_bytes, self._file = self.size // shape[0], prepared_cache.ScratchFile(cache)

    def __len__(self) -> int:
        return self.shape[0]

    def put(self, row: int, image: np.ndarray) -> None:
        """Store one image; may be called from any thread."""
        self._file.write(image, row * self._row_bytes)

    def __getitem__(self, part: slice) -> np.ndarray:
        first, last, _ = part.indices(len(self))
        values = np.empty((max(0, last - first), *self.shape[1:]), dtype=np.uint8)
        self._file.fill(values, first * self._row_bytes)
        return values


def _decode_into(
    keep: Callable[[int, np.ndarray], None],
    folder: ImageFolder,
    *,
    workers: int,
    shape: tuple[int, ...],
) -> None:
    """Gives each image (channels, side, side) to `keep` by its row, in no order."""

    def work(row: int, path: Path) -> ImageHeader:
        try:
            image = decode_square(path, side=shape[1], grey=shape[0] == 1)
        except BROKEN as error:
            return ImageHeader(describe_decode_error(error))
        keep(row, image)
        return ImageHeader()

    _refuse_unreadable(folder, _map_images(folder, work, workers))
