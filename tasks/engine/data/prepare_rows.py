"""Makes of a table, or of images, the arrays that training maps: labels encoded, rows split,
features and amounts scaled, written in blocks. What cannot be learnt from is refused by
`target_encoding.py` and `scaling.py`, before anything is written or while it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np

from tasks.engine.base.facts import Column
from tasks.engine.data import run_warnings
from tasks.engine.data.target_transform import choose_transform
from tasks.engine.files import prepared_cache
from tasks.engine.files.row_parts import RowParts, parted
from tasks.engine.files.scaling import Scaling, measure, scaled
from tasks.engine.files.source_data import DataError, Raw
from tasks.engine.files.target_encoding import (
    LARGEST_TARGET,
    Labels,
    blocks_of,
    class_counts,
    encode,
)
from tasks.engine.settings.data_config import DataConfig
from tasks.engine.tables.columns_table import Table
from tasks.engine.tables.encoding import Moments, fit, moments_of, standard

PARTS = ("train_x.npy", "train_y.npy", "val_x.npy", "val_y.npy")
TEST_PARTS = ("test_x.npy", "test_y.npy")  # where rows are put aside


def draft(raw: Raw, data: DataConfig) -> prepared_cache.Draft:
    """The labels and the split of the rows, ready to be written. Errors: DataError."""
    task = data.task
    if data.source == "synthetic" and task == "auto":
        task = "classification" if data.classes > 1 else "regression"  # however many classes
    labels = encode(raw, task)
    parts = parted(raw, labels, data)
    table = raw.features if isinstance(raw.features, Table) else None
    inputs = raw.features.size if table is None else len(table) * table.inputs
    write = partial(_written, raw=raw, labels=labels, parts=parts, data=data)
    return prepared_cache.Draft(4 * inputs + 8 * len(labels.values) * labels.values[:1].size, write)


@dataclass(frozen=True)
class _Inputs:
    """The features on their way to the model."""

    shape: tuple[int, ...]  # of a row
    names: tuple[str, ...] | None
    scaling: Scaling
    columns: tuple[Column, ...] | None
    notes: tuple[str, ...]
    blocks: Iterator[tuple[slice, np.ndarray]]  # scaled, float32


def _inputs(raw: Raw, *, for_training: np.ndarray, scale: bool) -> _Inputs:
    if isinstance(raw.features, Table):
        made = fit(raw, for_training=for_training, scale=scale)
        shape = (len(made.scaling.offset),)
        return _Inputs(shape, made.names, made.scaling, made.columns, made.notes, made.blocks())
    scaling = measure(raw, for_training=for_training, scale=scale)
    shape = raw.features.shape[1:]
    return _Inputs(shape, raw.feature_names, scaling, None, (), scaled(raw, scaling))


def _written(
    folder: Path, *, raw: Raw, labels: Labels, parts: RowParts, data: DataConfig
) -> dict[str, Any]:
    """Writes the arrays of each part; the manifest of what they are."""
    rows, training = parts.by_name(), parts.training
    inputs = _inputs(raw, for_training=training, scale=data.scale)
    width = int(np.prod(inputs.shape)) + labels.values[:1].size
    keys = run_warnings.Keys(len(training), width)
    files = _write_inputs(folder, inputs=inputs, labels=labels, rows=rows, keys=keys)
    transform = choose_transform(raw, labels, rows, data, folder)
    amounts = replace(labels, values=transform.apply(labels.values))
    target = _target_scaling(amounts, for_training=training, scale=data.scale_target)
    files |= _write_targets(folder, amounts, _scaled_targets(raw, amounts, target), rows)
    class_rows = _class_rows(labels, rows)
    columns = None if inputs.columns is None else [_described(c) for c in inputs.columns]
    meaning = {
        "task": labels.task,
        "target": raw.target_name,
        "input_shape": list(inputs.shape),
        "outputs": labels.outputs,
        "class_names": labels.class_names,
        "feature_names": inputs.names,
        "offset": inputs.scaling.offset.tolist(),
        "scale": inputs.scaling.scale.tolist(),
        "target_offset": target.offset.tolist(),
        "target_scale": target.scale.tolist(),
        "rows": {name: int(chosen.sum()) for name, chosen in rows.items()},
        "class_rows": class_rows,
        "columns": columns,
        "notes": list(raw.notes + labels.notes + inputs.notes + transform.notes),
        "guess": run_warnings.guess(class_rows),
        "warnings": list(run_warnings.of_data(raw, labels, rows, keys)),
    }
    if transform.log:
        meaning["target_log"] = list(transform.log)
    # Beside what the data is known by, which it does not change.
    guess = _guess_amounts(labels, training)
    return {**prepared_cache.manifest_for(meaning, files), "target_guess": guess}


def _guess_amounts(labels: Labels, training: np.ndarray) -> list[list[float]] | None:
    """Mean and median of the training rows of a regression, of each of its targets."""
    if labels.task != "regression":
        return None
    values = np.asarray(labels.values[training], dtype=np.float64)
    return [values.mean(0).tolist(), np.median(values, axis=0).tolist()]


def _target_scaling(labels: Labels, *, for_training: np.ndarray, scale: bool) -> Scaling:
    """Mean and deviation of each column of a regression's target; what changes nothing of others.
    Constant columns get scale 1."""
    if labels.task != "regression" or not scale:
        return Scaling(np.zeros(1), np.ones(1))
    found = (
        moments_of(
            labels.values[part].T.astype(np.float64),
            for_training[part].astype(np.float64),
            holes=False,
        )
        for part in blocks_of(len(labels.values))
    )
    return Scaling(*standard(reduce(Moments.plus, found), int(for_training.sum())))


def _scaled_targets(
    raw: Raw, labels: Labels, scaling: Scaling
) -> Iterator[tuple[slice, np.ndarray]]:
    """The targets in blocks of rows, scaled.

    Errors: DataError where one lies so far from the training rows that its square is no number.
    """
    for part in blocks_of(len(labels.values)):
        with np.errstate(over="ignore"):  # of tiny deviations, looked for right below
            y = (labels.values[part] - scaling.offset) / scaling.scale
        far = np.argwhere(~(np.abs(y) <= LARGEST_TARGET))
        if len(far):
            raise DataError(
                f"data.target: {raw.label_at(part.start + int(far[0][0]))}: lies more than "
                f"{LARGEST_TARGET:g} deviations from the training rows; mend or drop the row"
            )
        yield part, y


def _write_inputs(
    folder: Path,
    *,
    inputs: _Inputs,
    labels: Labels,
    rows: Mapping[str, np.ndarray],
    keys: run_warnings.Keys,
) -> dict[str, Any]:
    with ExitStack() as stack:
        parts = _writers(stack, folder, "x", inputs.shape, "<f4", rows)
        for part, x in inputs.blocks:
            keys.add(part, x, labels.values[part])
            for name, chosen in rows.items():
                parts[f"{name}_x.npy"].append(x[chosen[part]])
        return {file: writer.finish() for file, writer in parts.items()}


def _write_targets(
    folder: Path,
    labels: Labels,
    targets: Iterator[tuple[slice, np.ndarray]],
    rows: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    kind = "<i8" if labels.task == "classification" else "<f4"
    with ExitStack() as stack:
        parts = _writers(stack, folder, "y", labels.values.shape[1:], kind, rows)
        for part, y in targets:
            for name, chosen in rows.items():
                parts[f"{name}_y.npy"].append(y[chosen[part]].astype(kind))
        return {file: writer.finish() for file, writer in parts.items()}


def _writers(
    stack: ExitStack,
    folder: Path,
    axis: str,
    shape: tuple[int, ...],
    dtype: str,
    rows: Mapping[str, np.ndarray],
) -> dict[str, prepared_cache.PartWriter]:
    return {
        f"{name}_{axis}.npy": stack.enter_context(
            prepared_cache.PartWriter(
                folder / f"{name}_{axis}.npy", shape=(int(chosen.sum()), *shape), dtype=dtype
            )
        )
        for name, chosen in rows.items()
    }


def _described(column: Column) -> dict[str, Any]:
    """As the manifest and the model keep it."""
    found = asdict(column)
    if column.rest is None:  # so that what was prepared before this was there is found again
        del found["rest"]
    return found


def _class_rows(labels: Labels, rows: Mapping[str, np.ndarray]) -> dict[str, list[int]] | None:
    if labels.task != "classification":
        return None
    return {name: class_counts(labels, chosen).tolist() for name, chosen in rows.items()}
