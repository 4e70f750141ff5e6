"""Keeps a text of tokens, to be cut into rows: each holds `context` tokens and the one after them,
so that it is input and target at once, and its last token is the next row's first. It keeps the
end of the text apart for validation: no token is in both parts.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tasks.engine.data import run_warnings
from tasks.engine.files import prepared_cache
from tasks.engine.files.source_data import DataError
from tasks.engine.files.tokens import BLOCK_TOKENS, BYTES, Tokens
from tasks.engine.settings.data_config import DataConfig

TOKEN_PARTS = ("train.npy", "val.npy")
TOKEN_TEST_PARTS = ("test.npy",)  # where the end is put aside


def draft(tokens: Tokens, data: DataConfig) -> prepared_cache.Draft:
    """The rows of both parts, ready to be written; the text holds a row for each."""
    row, count = data.context + 1, len(tokens.values)  # a part holds one row at least
    parts, left = {}, tokens.values
    for name, fraction in (("test", data.test_fraction), ("val", data.validation_fraction)):
        if fraction:
            held_out = min(max(round(count * fraction), row), len(left) - row)
            _refuse_short(held_out, row, count)
            left, parts[name] = left[:-held_out], left[-held_out:]
    parts = {"train": left, "val": parts.pop("val"), **parts}
    dtype = np.dtype("<u2" if tokens.vocabulary > BYTES else "u1")
    write = partial(
        _written, parts=parts, context=data.context, vocabulary=tokens.vocabulary, dtype=dtype
    )
    return prepared_cache.Draft(count * dtype.itemsize, write)


def _refuse_short(tokens: int, row: int, count: int) -> None:
    if tokens < row:
        raise DataError(
            f"data.context: {count:,} tokens are too few for a row of {row:,} in each part; lower "
            "it, or set data.test_fraction to 0"
        )


def rows_of(text: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a text and the same one token further on, as views: the last few tokens, fewer than a
    context, are left out."""
    count = (len(text) - 1) // context
    x, y = (text[at : at + count * context].reshape(count, context) for at in (0, 1))
    return x, y


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
        shape = values.shape
        with prepared_cache.PartWriter(
            folder / f"{name}.npy", shape=shape, dtype=dtype.str
        ) as writer:
            for start in range(0, len(values), BLOCK_TOKENS):
                writer.append(values[start : start + BLOCK_TOKENS].astype(dtype))
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
        "rows": {name: (len(values) - 1) // context for name, values in parts.items()},
        "guess": run_warnings.guess_tokens(parts["val"]),
        "tokens": {name: len(values) for name, values in parts.items()},
    }
    return prepared_cache.manifest_for(meaning, files)
