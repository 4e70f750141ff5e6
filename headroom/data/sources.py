"""The sources of data by their names, each with a check that costs next to nothing and a reader of
all rows; digits and synthetic rows are made here. Digits are read from scikit-learn's folder
without importing it, which would cost 1.7 s.
"""

from __future__ import annotations

import gzip
import importlib.util
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headroom.data import array_sources, tokens
from headroom.data.image_folders import scan_image_folder
from headroom.data.source_data import (
    DataError,
    RawData,
    find_source_files,
    refuse_target,
    resolve_source_path,
)
from headroom.settings.file_formats import ARRAYS, FORMATS, IMAGES, MATRIX, TABLE, TEXT, TOKENS
from headroom.settings.run_config import DataConfig

DIGITS_VALUES = 1797 * 65
SYNTHETIC_SEED = 20_240_607  # its own: another split must not make other rows


@dataclass(frozen=True)
class Source:
    """A data source: check raises DataError early and cheaply; read returns all rows, or
    raises it too."""

    check: Callable[[DataConfig], None]
    read: Callable[[DataConfig], RawData | tokens.Tokens]


def find_origin(data: DataConfig) -> Path | None:
    """Return the file or folder that the data comes from; None where it is generated, or comes
    with Python."""
    if data.source == "digits":
        return _find_digits_file()
    if data.source == "images":
        return scan_image_folder(data).path
    return None if data.path is None else resolve_source_path(data)


def list_source_files(data: DataConfig) -> Sequence[Path]:
    """Return the files in `find_origin`, in the order of their rows."""
    if data.source == "images":
        return list(scan_image_folder(data).paths())
    if data.path is not None:
        return find_source_files(data)
    path = find_origin(data)
    return [] if path is None else [path]


def _find_digits_file() -> Path:
    spec = importlib.util.find_spec("sklearn")
    origin = spec.origin if spec is not None else None
    if origin is None:
        raise DataError(
            "data.source: digits come with scikit-learn, which is not installed; pip install "
            "scikit-learn, or choose another source"
        )
    path = Path(origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise DataError(
            f"data.source: the digits that come with scikit-learn are not at {path}; install it "
            "anew, or choose another source"
        )
    return path


def _check_digits(data: DataConfig) -> None:
    refuse_target(data)
    _find_digits_file()


def _read_digits(data: DataConfig) -> RawData:
    """1,797 images of 8 x 8 pixels, 0..16, with the digit that each shows."""
    path = _find_digits_file()
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            values = np.array(file.read().replace("\n", ",").rstrip(",").split(","), np.float32)
    except (OSError, EOFError, zlib.error, ValueError):
        values = np.empty(0, dtype=np.float32)
    if values.size != DIGITS_VALUES:
        raise DataError(
            f"data.source: the digits at {path} are damaged; install scikit-learn anew, or choose "
            "another source"
        )
    table = values.reshape(-1, 65)
    return RawData(
        features=table[:, :64].reshape(-1, 1, 8, 8),
        target=table[:, 64].astype(np.int64),
        feature_names=None,
        target_name="digit",
        label="digits",
    )


def _check_synthetic(data: DataConfig) -> None:
    refuse_target(data)
    made = data.synthetic
    if made.classes > 1 and made.rows < 2 * made.classes:
        raise DataError(
            f"data.args.rows: must be at least 2 for each of {made.classes:,} classes "
            f"(got {made.rows:,}); raise it or lower data.args.classes"
        )
    if made.classes == 1 and data.task == "classification":
        raise DataError(
            "data.args.classes: 1 makes a regression, but data.task is classification; set "
            "data.args.classes to at least 2, or drop data.task"
        )


def estimate_synthetic_bytes(data: DataConfig) -> int:
    """Estimate the bytes of the rows in memory, about the same as on disk."""
    made = data.synthetic
    return 4 * made.features * (made.rows + 2 * made.classes) + 24 * made.rows


def _read_synthetic(data: DataConfig) -> RawData:
    """Clusters around one centre a class, evenly many rows each; or a noisy linear target."""
    made = data.synthetic
    random = np.random.default_rng([SYNTHETIC_SEED, made.rows, made.features, made.classes])
    x = random.standard_normal((made.rows, made.features), dtype=np.float32)
    if made.classes == 1:
        weights = random.standard_normal(made.features) / np.sqrt(made.features)
        y = x @ weights.astype(np.float32) + random.normal(0, 0.1, made.rows)
    else:
        y = random.permutation(np.arange(made.rows, dtype=np.int64) % made.classes)
        middle = random.standard_normal((made.classes, made.features), dtype=np.float32) * 2
        middle[:, 0] = 6 * np.arange(made.classes)  # apart even where there is one feature only
        for start in range(0, made.rows, 4096):
            part = slice(start, start + 4096)
            x[part] += middle[y[part]]
    return RawData(
        features=x, target=y, feature_names=None, target_name="class", label="synthetic rows"
    )


def _check_table(data: DataConfig) -> None:
    from headroom.data import tables  # 0.1 s for pyarrow, and most runs read no table

    tables.check_table(data)


def _read_table(data: DataConfig) -> RawData:
    from headroom.data import tables

    return tables.read_table(data)


def _check_images(data: DataConfig) -> None:
    scan_image_folder(data)  # without Pillow, which takes 0.1 s


def _read_images(data: DataConfig) -> RawData:
    from headroom.data import images

    return images.read_images(data)


BY_CONTENT = {
    TABLE: Source(_check_table, _read_table),
    ARRAYS: Source(array_sources.check_arrays, array_sources.read_arrays),
    MATRIX: Source(array_sources.check_matrix, array_sources.read_matrix),
    IMAGES: Source(_check_images, _read_images),
    TEXT: Source(tokens.check_text_file, tokens.read_text_file),
    TOKENS: Source(tokens.check_token_file, tokens.read_token_file),
}
SOURCES = {
    "digits": Source(_check_digits, _read_digits),
    **{name: BY_CONTENT[file_format.holds] for name, file_format in FORMATS.items()},
    "synthetic": Source(_check_synthetic, _read_synthetic),
}
