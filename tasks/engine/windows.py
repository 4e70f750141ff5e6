"""Cuts a text of tokens into rows: each holds `context` tokens and the one after them, so that it
is input and target at once, and its last token is the next row's first. It keeps the end of the
text apart for validation: no token is in both parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from tasks.engine import doubts, store
from tasks.engine.data_config import DataConfig
from tasks.engine.tokens import BLOCK_TOKENS, BYTES, Tokens

PARTS = ("train.npy", "val.npy")


def draft(tokens: Tokens, data: DataConfig) -> store.Draft:
    """The rows of both parts, ready to be written; the text holds a row for each."""
    row, count = data.context + 1, len(tokens.values)
    held_out = min(max(round(count * data.validation_fraction), row), count - row)
    parts = {
        "train": tokens.values[: count - held_out],
        "val": tokens.values[count - held_out :],
    }
    dtype = np.dtype("<u2" if tokens.vocabulary > BYTES else "u1")
    needed_bytes = sum(_rows(part, data.context) for part in parts.values()) * row * dtype.itemsize
    write = partial(
        _written, parts=parts, context=data.context, vocabulary=tokens.vocabulary, dtype=dtype
    )
    return store.Draft(needed_bytes, write)


def _rows(values: np.ndarray, context: int) -> int:
    """Whole rows only: the last few tokens of a part, fewer than a context, are left out."""
    return (len(values) - 1) // context


def _written(
    folder: Path,
    *,
    parts: dict[str, np.ndarray],
    context: int,
    vocabulary: int,
    dtype: np.dtype,
) -> dict[str, Any]:
    files = {}
    for name, values in parts.items():
        shape = (_rows(values, context), context + 1)
        with store.PartWriter(folder / f"{name}.npy", shape=shape, dtype=dtype.str) as writer:
            for rows in _windows(values, context):
                writer.append(rows.astype(dtype))
            files[f"{name}.npy"] = writer.finish()
    meaning = {
        "task": "tokens",
        "target": "the next token",
        "input_shape": [context],
        "outputs": vocabulary,
        "class_names": None,
        "feature_names": None,
        "offset": [0.0],
        "scale": [1.0],
        "rows": {name: _rows(values, context) for name, values in parts.items()},
        "guess": doubts.guess_tokens(parts["val"]),
        "tokens": {name: len(values) for name, values in parts.items()},
    }
    return store.manifest_for(meaning, files)


def _windows(values: np.ndarray, context: int) -> Iterator[np.ndarray]:
    """The rows (n, context + 1) in blocks, as views of the values."""
    step = max(1, BLOCK_TOKENS // context)
    total = _rows(values, context)
    for first in range(0, total, step):
        last = min(first + step, total)
        block = values[first * context : last * context + 1]
        yield sliding_window_view(block, context + 1)[::context]
