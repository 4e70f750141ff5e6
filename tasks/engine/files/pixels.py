"""One image: what its header says, and its pixels upright, cut to the square in their middle,
resized, and on white where they are transparent. A size is believed only up to a limit and before a
pixel is decoded; what no decoder understands is told in words that follow the image's name.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, TiffImagePlugin, WebPImagePlugin

from tasks.engine.files.source_data import shorten

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
class Seen:
    """What an image's header says, or why it cannot be read."""

    problem: str = ""
    grey: bool = False
    needed_bytes: int = 0  # of memory, to decode it


def look(path: Path, side: int) -> Seen:
    """What the header says; of a PNG, which has checksums, all of the file is looked at."""
    try:
        with open(path, "rb") as file, Image.open(file, formats=FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                return Seen(_too_large(f"{width:,} x {height:,} pixels"))
            if image.mode not in GREY | COLOUR:
                return Seen(f"has pixels of the kind {image.mode}; save it as an 8-bit PNG")
            needed_bytes = _needed_bytes(image, side)
            if image.format == "PNG":
                image.verify()
            return Seen(grey=image.mode in GREY, needed_bytes=needed_bytes)
    except Image.DecompressionBombError:
        return Seen(_too_large("more pixels than Pillow opens"))
    except BROKEN as error:
        return Seen(broken(error))


def _too_large(what: str) -> str:
    return f"claims {what}, above the {MOST_PIXELS:,} of an image; shrink it, or remove it"


def broken(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read ({error.strerror}); mend that, or remove it"
    says = "it is none of " + ", ".join(FORMATS) if "identify" in str(error) else str(error)
    says = shorten(says or type(error).__name__, 120)
    return f"is damaged or no image ({says}); copy it anew, or remove it"


def _needed_bytes(image: Image.Image, side: int) -> int:
    full = image.width * image.height
    # Twice the pixels asked for, so that resizing still has something to average.
    image.draft(image.mode, (2 * side, 2 * side))
    progressive = full * PROGRESSIVE_BYTES if image.info.get("progressive") else 0
    return image.width * image.height * PIXEL_BYTES + progressive


def square(path: Path, *, side: int, grey: bool) -> np.ndarray:
    """One image as (1 or 3, side, side) uint8. Raises one of BROKEN."""
    with open(path, "rb") as file, Image.open(file, formats=FORMATS) as opened:
        if opened.width * opened.height > MOST_PIXELS:
            raise ValueError("it was changed while it was read")
        opened.draft(opened.mode, (2 * side, 2 * side))
        opened.load()
        upright = _upright(opened)
        image = _eight_bit(opened)
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


def _upright(image: Image.Image) -> Image.Transpose | None:
    """How to turn a photo. Cameras and editors write many a broken EXIF, which turns nothing."""
    try:
        orientation = image.getexif().get(ORIENTATION)
    except BROKEN:
        return None
    return UPRIGHT.get(orientation) if isinstance(orientation, int) else None


def _eight_bit(image: Image.Image) -> Image.Image:
    """The image in a mode whose values can be averaged: L, LA, RGB, RGBA, CMYK or YCbCr."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data and image.mode not in ("LA", "RGBA"):
        return image.convert("LA" if image.mode in ("1", "L", "La") else "RGBA")
    plain = {"1": "L", "P": "RGB", "RGBX": "RGB"}
    return image.convert(plain[image.mode]) if image.mode in plain else image
