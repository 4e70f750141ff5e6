"""Makes of a source the arrays that training maps: checked, split, encoded, scaled, written
once. It refuses data that would train into nonsense in silence, and it never hands out an array
that differs from what its manifest says.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks.engine import rows, store, windows
from tasks.engine.data_config import TOKEN_SOURCES, DataConfig
from tasks.engine.facts import DataFacts
from tasks.engine.origins import Origin, origin_of, refuse_changed
from tasks.engine.raw import DataError, check_memory
from tasks.engine.sources import SOURCES, files, origin, synthetic_bytes
from tasks.engine.tokens import Tokens, default_text

_OUTPUTS = {
    "classification": "classes",
    "multilabel": "labels",
    "regression": "regressed value",
    "tokens": "different tokens",
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arrays:
    """The prepared arrays, mapped from disk and read-only.

    x: (rows, *input_shape) float32, scaled; y: (rows,) int64 classes or (rows, 1) float32.
    Tokens: x and y (rows, context) uint8 or uint16, overlapping views of one array, of which y is
    one token further on.
    """

    train_x: np.ndarray
    train_y: np.ndarray
    val_x: np.ndarray
    val_y: np.ndarray


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
        f"{facts.outputs:,} {_OUTPUTS[facts.task]}",
        facts.fingerprint,
        ", prepared earlier" if reused else "",
    )
    return facts


def load(facts: DataFacts) -> Arrays:
    """The prepared arrays, mapped; raises DataError where they are no longer there."""
    names = windows.PARTS if facts.task == "tokens" else rows.PARTS
    try:
        parts = [
            np.load(Path(facts.folder, name), mmap_mode="r", allow_pickle=False) for name in names
        ]
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"data.cache: the arrays in {facts.folder} are gone or damaged ({error}); start again"
        ) from None
    if facts.task == "tokens":
        parts = [view for part in parts for view in (part[:, :-1], part[:, 1:])]
    return Arrays(*parts)


def _cache(data: DataConfig) -> Path:
    if not data.cache.strip():
        raise DataError(f"data.cache: must name a folder (got {data.cache!r}); name one")
    return Path(os.path.abspath(os.path.expanduser(data.cache)))


def _origin(data: DataConfig) -> Origin:
    path = origin(data)
    if path is None and data.source == "text":
        text = default_text()
        return Origin(None, len(text), None, hashlib.sha256(text).hexdigest())
    if path is None:
        return Origin()
    return origin_of(path, files(data))


def _settings(data: DataConfig) -> dict[str, Any]:
    """What decides the prepared content, beside the content of the file."""
    unused = {"path", "cache"}
    if data.source != "synthetic":
        unused |= {"rows", "features", "classes"}
    if data.source in TOKEN_SOURCES:
        unused |= {"target", "task", "split_seed", "scale"}
    else:
        unused |= {"context", "vocab"}
    return data.model_dump(exclude=unused)


def _folder(data: DataConfig, found: Origin) -> Path:
    said = json.dumps([store.FORMAT, _settings(data), found.sha256], sort_keys=True)
    key = hashlib.sha256(said.encode()).hexdigest()[:16]
    return _cache(data) / f"{data.source}-{key}"


def _prepared(data: DataConfig, found: Origin, folder: Path) -> tuple[dict[str, Any], bool]:
    read = SOURCES[data.source].read(data)
    draft = windows.draft(read, data) if isinstance(read, Tokens) else rows.draft(read, data)
    store.check_room(folder.parent, draft.needed_bytes)

    def fill(temporary: Path) -> dict[str, Any]:
        manifest = draft.write(temporary)
        refuse_changed(found, lambda: files(data))
        return {**manifest, "source": vars(found), "settings": _settings(data)}

    return store.publish(folder, fill)


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
        bytes=sum(entry["bytes"] for entry in files.values()),
        fingerprint=manifest["fingerprint"],
        reused=reused,
        class_rows=_class_rows(meaning),
    )


def _class_rows(meaning: dict[str, Any]) -> tuple[int, ...] | None:
    counted = meaning.get("class_rows")
    return None if counted is None else tuple(counted["train"])
