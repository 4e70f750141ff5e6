"""Makes of a source the four arrays that training maps: checked, split, encoded, scaled, written
once. It refuses data that would train into nonsense in silence, and it never hands out an array
that differs from what its manifest says.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks.engine import store
from tasks.engine.config import DataConfig
from tasks.engine.facts import DataFacts
from tasks.engine.labels import Labels, encode, validation_rows
from tasks.engine.raw import DataError, Raw, check_memory
from tasks.engine.scaling import Scaling, measure, scaled
from tasks.engine.sources import SOURCES, origin, synthetic_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arrays:
    """The prepared arrays, mapped from disk and read-only.

    x: (rows, *input_shape) float32, scaled; y: (rows,) int64 classes or (rows, 1) float32.
    """

    train_x: np.ndarray
    train_y: np.ndarray
    val_x: np.ndarray
    val_y: np.ndarray


@dataclass(frozen=True)
class Origin:
    """The file that the rows come from, as it was when its content was hashed."""

    path: str | None
    bytes: int | None
    mtime_ns: int | None
    sha256: str | None


def check(data: DataConfig) -> None:
    """Raises DataError for data that cannot be prepared, as far as its head and size tell."""
    cache = _cache(data)
    SOURCES[data.source].check(data)
    needed_bytes = 0
    if data.source == "synthetic" and not _folder(data, _origin(data)).is_dir():
        needed_bytes = synthetic_bytes(data)
        what = f"data.rows: synthetic of {data.rows:,} rows and {data.features:,} features"
        check_memory(needed_bytes, what, "lower data.rows or data.features")
    store.check_room(cache, needed_bytes)


def prepare(data: DataConfig) -> DataFacts:
    """The facts of the prepared data, which is taken from the cache where it is there and whole.

    A changed file has another checksum and so another folder: what a run has mapped stays as it
    is. Errors: DataError.
    """
    SOURCES[data.source].check(data)
    found = _origin(data)
    folder = _folder(data, found)
    manifest, reused = store.manifest_of(folder), True
    if manifest is None:
        manifest, reused = _prepared(data, found, folder)
    facts = _facts(data, folder, manifest, reused=reused)
    log.info(
        "data %s: %s training and %s validation rows of %s, %s, fingerprint %s%s",
        data.source,
        f"{facts.train_rows:,}",
        f"{facts.val_rows:,}",
        "x".join(str(n) for n in facts.input_shape),
        f"{facts.outputs} classes" if facts.class_names else "regression",
        facts.fingerprint,
        ", prepared earlier" if reused else "",
    )
    return facts


def load(facts: DataFacts) -> Arrays:
    """The prepared arrays, mapped; raises DataError where they are no longer there."""
    try:
        parts = (
            np.load(Path(facts.folder, part), mmap_mode="r", allow_pickle=False)
            for part in store.PARTS
        )
        return Arrays(*parts)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"data.cache: the arrays in {facts.folder} are gone or damaged ({error}); start again"
        ) from None


def _cache(data: DataConfig) -> Path:
    if not data.cache.strip():
        raise DataError(f"data.cache: must name a folder (got {data.cache!r}); name one")
    return Path(os.path.abspath(os.path.expanduser(data.cache)))


def _origin(data: DataConfig) -> Origin:
    path = origin(data)
    if path is None:
        return Origin(None, None, None, None)
    try:
        before = path.stat()
        # Size and time alone would miss a file rewritten within the clock's tick, or with its
        # time restored; hashing reads about a gigabyte a second.
        return Origin(str(path), before.st_size, before.st_mtime_ns, store.file_sha256(path))
    except OSError as error:
        raise DataError(f"data.path: {path} cannot be read ({error.strerror}); mend that") from None


def _settings(data: DataConfig) -> dict[str, Any]:
    """What decides the prepared content, beside the content of the file."""
    unused = {"path", "cache"}
    if data.source != "synthetic":
        unused |= {"rows", "features", "classes"}
    return data.model_dump(exclude=unused)


def _folder(data: DataConfig, found: Origin) -> Path:
    said = json.dumps([store.FORMAT, _settings(data), found.sha256], sort_keys=True)
    key = hashlib.sha256(said.encode()).hexdigest()[:16]
    return _cache(data) / f"{data.source}-{key}"


def _prepared(data: DataConfig, found: Origin, folder: Path) -> tuple[dict[str, Any], bool]:
    raw = SOURCES[data.source].read(data)
    task = data.task
    if data.source == "synthetic" and task == "auto":
        task = "classification" if data.classes > 1 else "regression"  # however many classes
    labels = encode(raw, task)
    validation = validation_rows(
        raw, labels, fraction=data.validation_fraction, seed=data.split_seed
    )
    store.check_room(folder.parent, 4 * raw.features.size + labels.values.nbytes)

    def fill(temporary: Path) -> dict[str, Any]:
        manifest = _written(data, temporary, raw=raw, labels=labels, validation=validation)
        _refuse_changed(found)
        return {**manifest, "source": vars(found), "settings": _settings(data)}

    return store.publish(folder, fill)


def _written(
    data: DataConfig, folder: Path, *, raw: Raw, labels: Labels, validation: np.ndarray
) -> dict[str, Any]:
    """Writes the four arrays; the manifest of what they are."""
    scaling = measure(raw, for_training=~validation, scale=data.scale)
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
    return {
        "format": store.FORMAT,
        "fingerprint": store.fingerprint(meaning, files),
        "meaning": meaning,
        "files": files,
        "numpy": np.__version__,
    }


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
    if labels.class_names is None:
        return None
    parts = {"train": ~validation, "val": validation}
    return {
        name: np.bincount(labels.values[rows], minlength=labels.outputs).tolist()
        for name, rows in parts.items()
    }


def _refuse_changed(found: Origin) -> None:
    if found.path is None:
        return
    try:
        now = os.stat(found.path)
        same = (now.st_size, now.st_mtime_ns) == (found.bytes, found.mtime_ns)
    except OSError:
        same = False
    if not same:
        raise DataError(
            f"data.path: {found.path} was changed while it was read; start again when it is whole"
        )


def _facts(data: DataConfig, folder: Path, manifest: dict[str, Any], *, reused: bool) -> DataFacts:
    meaning, files = manifest["meaning"], manifest["files"]
    names, features = meaning["class_names"], meaning["feature_names"]
    return DataFacts(
        folder=str(folder),
        source=data.source,
        task=meaning["task"],
        train_rows=meaning["rows"]["train"],
        val_rows=meaning["rows"]["val"],
        input_shape=tuple(meaning["input_shape"]),
        outputs=meaning["outputs"],
        class_names=None if names is None else tuple(names),
        feature_names=None if features is None else tuple(features),
        offset=tuple(meaning["offset"]),
        scale=tuple(meaning["scale"]),
        bytes=sum(files[part]["bytes"] for part in store.PARTS),
        fingerprint=manifest["fingerprint"],
        reused=reused,
    )
