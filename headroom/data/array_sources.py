"""Takes features and target out of a file of arrays, or out of one matrix. It refuses a file in
which they are not to be told apart, by the headers alone.
"""

from __future__ import annotations

import numpy as np

from headroom.data.arrays import (
    check_numeric_type,
    choose_arrays,
    convert_text,
    move_channels_first,
    normalize_booleans,
)
from headroom.data.readers import ArrayFile, open_arrays
from headroom.data.source_data import DataError, RawData, find_source_file, shorten
from headroom.settings.run_config import DataConfig


def check_matrix(data: DataConfig) -> None:
    """Raises DataError for a file that is not a whole matrix of numbers."""
    _open_matrix(data)


def read_matrix(data: DataConfig) -> RawData:
    """Map the matrix (n, columns + 1) of the file; its last column is the target."""
    file, label = _open_matrix(data)
    (matrix,) = file.load([""], data.memory_mib)
    return RawData(
        features=matrix[:, :-1],
        target=normalize_booleans(np.array(matrix[:, -1])),
        feature_names=None,
        target_name="the last column",
        label=label,
    )


def _open_matrix(data: DataConfig) -> tuple[ArrayFile, str]:
    path = find_source_file(data)
    if data.target is not None:
        raise DataError(
            f"data.target: has no meaning for source {data.source} (got {shorten(data.target)}), "
            "whose last column is the target; drop it, or use an npz file"
        )
    file = open_arrays(path, data.source)
    header = file.headers[""]
    check_numeric_type(header, path.name)
    if len(header.shape) != 2 or header.shape[1] < 2 or header.shape[0] < 1:
        raise DataError(
            f"data.path: {path.name} must hold rows of features with the target as last column, "
            f"shape (rows, features + 1) (got {header.shape}); save it so, or use an npz file"
        )
    return file, path.name


def check_arrays(data: DataConfig) -> None:
    """Raises DataError for a file without one array of features and one of labels."""
    path = find_source_file(data)
    choose_arrays(open_arrays(path, data.source).headers, data.target, path.name)


def read_arrays(data: DataConfig) -> RawData:
    """Read features and target of a file; images (n, h, w) and (n, h, w, c) become (n, c, h, w).

    A four-dimensional array is taken as channels first, unless only its last axis is 1, 3 or
    4.
    """
    path = find_source_file(data)
    file = open_arrays(path, data.source)
    x_name, y_name = choose_arrays(file.headers, data.target, path.name)
    features, target = file.load([x_name, y_name], data.memory_mib)
    if target.dtype.kind == "U":
        target = convert_text(target, f"data.target: {path.name} array {y_name!r}")
    return RawData(
        features=move_channels_first(features),
        target=normalize_booleans(np.array(target[:, 0] if target.shape[1:] == (1,) else target)),
        feature_names=None,
        target_name=y_name,
        label=path.name,
    )
