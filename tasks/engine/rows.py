"""Makes of a table, or of images, the four arrays that training maps: labels encoded, rows split,
features scaled, written in blocks. What cannot be learnt from is refused by `labels.py` and
`scaling.py`, before anything is written or while it is.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tasks.engine import store
from tasks.engine.data_config import DataConfig
from tasks.engine.labels import Labels, encode, validation_rows
from tasks.engine.raw import Raw
from tasks.engine.scaling import Scaling, measure, scaled

PARTS = ("train_x.npy", "train_y.npy", "val_x.npy", "val_y.npy")


def draft(raw: Raw, data: DataConfig) -> store.Draft:
    """The labels and the split of the rows, ready to be written. Errors: DataError."""
    task = data.task
    if data.source == "synthetic" and task == "auto":
        task = "classification" if data.classes > 1 else "regression"  # however many classes
    labels = encode(raw, task)
    validation = validation_rows(
        raw, labels, fraction=data.validation_fraction, seed=data.split_seed
    )
    needed_bytes = 4 * raw.features.size + labels.values.nbytes
    write = partial(_written, raw=raw, labels=labels, validation=validation, scale=data.scale)
    return store.Draft(needed_bytes, write)


def _written(
    folder: Path, *, raw: Raw, labels: Labels, validation: np.ndarray, scale: bool
) -> dict[str, Any]:
    """Writes the four arrays; the manifest of what they are."""
    scaling = measure(raw, for_training=~validation, scale=scale)
    files = _write_parts(folder, raw=raw, labels=labels, validation=validation, scaling=scaling)
    meaning = {
        "task": labels.task,
        "target": raw.target_name,
        "input_shape": list(raw.features.shape[1:]),
        "outputs": labels.outputs,
        "class_names": labels.class_names,
        "feature_names": raw.feature_names,
        "offset": scaling.offset.tolist(),
        "scale": scaling.scale.tolist(),
        "rows": {"train": int((~validation).sum()), "val": int(validation.sum())},
        "class_rows": _class_rows(labels, validation),
        "notes": list(raw.notes + labels.notes),
    }
    return store.manifest_for(meaning, files)


def _write_parts(
    folder: Path, *, raw: Raw, labels: Labels, validation: np.ndarray, scaling: Scaling
) -> dict[str, Any]:
    rows = {"train": ~validation, "val": validation}
    with ExitStack() as stack:
        parts = {}
        for name, chosen in rows.items():
            count = int(chosen.sum())
            for axis, values, dtype in (
                ("x", raw.features, "<f4"),
                ("y", labels.values, labels.values.dtype.str),
            ):
                file = f"{name}_{axis}.npy"
                shape = (count, *values.shape[1:])
                writer = store.PartWriter(folder / file, shape=shape, dtype=dtype)
                parts[file] = stack.enter_context(writer)
            parts[f"{name}_y.npy"].append(labels.values[chosen])
        for part, x in scaled(raw, scaling):
            for name, chosen in rows.items():
                parts[f"{name}_x.npy"].append(x[chosen[part]])
        return {file: writer.finish() for file, writer in parts.items()}


def _class_rows(labels: Labels, validation: np.ndarray) -> dict[str, list[int]] | None:
    if labels.task != "classification":
        return None
    parts = {"train": ~validation, "val": validation}
    return {
        name: np.bincount(labels.values[rows], minlength=labels.outputs).tolist()
        for name, rows in parts.items()
    }
