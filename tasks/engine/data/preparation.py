"""Makes of a source the arrays that training maps: checked, split, encoded, scaled, written
once. It refuses data that would train into nonsense in silence, and it never hands out an array
that differs from what its manifest says.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks.engine.base.facts import Column, DataFacts
from tasks.engine.base.field_types import is_import
from tasks.engine.base.import_paths import ends_told
from tasks.engine.base.secret_names import hidden
from tasks.engine.data import prepare_rows, token_windows
from tasks.engine.data.prepare_rows import PARTS, TEST_PARTS
from tasks.engine.data.sources import SOURCES, files, origin, synthetic_bytes
from tasks.engine.files import prepared_cache
from tasks.engine.files.fingerprint import Hashing, Origin, origin_of, refuse_changed
from tasks.engine.files.source_data import DataError, Raw, cache_folder, check_memory
from tasks.engine.files.tokens import Tokens, default_text
from tasks.engine.settings.data_config import SPLIT, TABLE_FILES, TOKEN_SOURCES, DataConfig

_OUTPUTS = {
    "classification": "classes",
    "multilabel": "labels",
    "regression": "regressed value",
    "tokens": "different tokens",
}

NOTES_SAID = 5  # in the terminal; all stand in the manifest and the run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arrays:
    """The prepared arrays, mapped from disk and read-only.

    x: (rows, *input_shape) float32, scaled; y: (rows,) int64 classes or (rows, k) float32,
    amounts scaled.
    Tokens: x and y (rows, context) uint8 or uint16, overlapping views of one text, of which y is
    one token further on.
    """

    train_x: np.ndarray
    train_y: np.ndarray
    val_x: np.ndarray
    val_y: np.ndarray
    test_x: np.ndarray | None = None
    test_y: np.ndarray | None = None


def check(data: DataConfig) -> None:
    """Raises DataError for data that cannot be prepared, as far as its head and size tell."""
    cache = cache_folder(data)
    if is_import(data.source):  # what it gives is known when it was called
        prepared_cache.check_room(cache, 0)
        return
    SOURCES[data.source].check(data)
    needed_bytes = 0
    if data.source == "synthetic" and not _folder(data, _origin(data)).is_dir():
        needed_bytes = synthetic_bytes(data)
        what = f"data.rows: synthetic of {data.rows:,} rows and {data.features:,} features"
        check_memory(needed_bytes, what, "lower data.rows or data.features")
    prepared_cache.check_room(cache, needed_bytes)


@ends_told
def prepare(data: DataConfig, *, batch_size: int = 64, seed: int = 0) -> DataFacts:
    """The facts of the prepared data, which is taken from the cache where it is there and whole.

    A changed file has another checksum and so another folder: what a run has mapped stays as it
    is. batch_size, seed: of the training, for a source of the user's own; what is known of loaders
    is told, and nothing prepared. Errors: DataError.
    """
    read: Raw | Tokens | None = None
    if is_import(data.source):
        given = _given(data, batch_size, seed)
        if isinstance(given, DataFacts):
            _refuse_split(data)
            return given
        read, found = given
    else:
        SOURCES[data.source].check(data)
        read, found = _table(data) if _is_new(data) else (None, _origin(data))
    folder = _folder(data, found)
    manifest, reused = prepared_cache.manifest_of(folder), True
    if manifest is None:
        manifest, reused = _prepared(data, found, folder, read)
    facts = _facts(data, folder, manifest, reused=reused)
    log.info(
        "data %s: %s training%s and %s validation rows of %s, %s, fingerprint %s%s",
        data.source,
        f"{facts.train_rows:,}",
        f", {facts.test_rows:,} test" if facts.test_rows else "",
        f"{facts.val_rows:,}",
        "x".join(str(n) for n in facts.input_shape),
        f"{facts.outputs:,} {_OUTPUTS[facts.task]}",
        facts.fingerprint,
        ", prepared earlier" if reused else "",
    )
    for note in facts.notes[:NOTES_SAID]:
        log.info("data: %s", note)
    for warning in facts.warnings:
        log.warning("%s", warning)
    return facts


def load(facts: DataFacts) -> Arrays:
    """The prepared arrays, mapped; raises DataError where they are no longer there."""
    names = [*PARTS, *(TEST_PARTS if facts.test_rows else ())]
    if facts.task == "tokens":
        test_parts = token_windows.TOKEN_TEST_PARTS if facts.test_rows else ()
        names = [*token_windows.TOKEN_PARTS, *test_parts]
    try:
        parts = [
            np.load(Path(facts.folder, name), mmap_mode="r", allow_pickle=False) for name in names
        ]
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"data.cache: the arrays in {facts.folder} are gone or damaged ({error}); start again"
        ) from None
    if facts.task == "tokens":
        parts = [
            view for text in parts for view in token_windows.rows_of(text, facts.input_shape[0])
        ]
    return Arrays(*parts)


def _given(data: DataConfig, batch_size: int, seed: int) -> tuple[Raw, Origin] | DataFacts:
    # Here, since these import torch, and data is checked at a desk before that is.
    from tasks.engine.data import own_arrays, own_data, own_facts

    given = own_data.made(data, own_data.Feeding(batch_size, seed))
    if isinstance(given, Raw):
        return given, Origin(sha256=own_arrays.sha256(given))
    return own_facts.facts_of(data, given)


def _refuse_split(data: DataConfig) -> None:
    for name, value in data.own_split.items():
        raise DataError(
            f"data.{name}: has no meaning for the data sets and loaders of {data.source} (got "
            f"{value!r}), whose rows are split by your code; drop it, or return arrays"
        )


def _origin(data: DataConfig) -> Origin:
    path = origin(data)
    if path is None and data.source == "text":
        text = default_text()
        return Origin(None, len(text), None, hashlib.sha256(text).hexdigest())
    if path is None:
        return Origin()
    return origin_of(path, files(data))


def _table(data: DataConfig) -> tuple[Raw | Tokens, Origin]:
    """A table that was not prepared before is read while it is hashed."""
    there = origin(data)
    assert there is not None
    hashing = Hashing(there, files(data))
    return SOURCES[data.source].read(data), hashing.result()


def _is_new(data: DataConfig) -> bool:
    """Whether nothing prepared with these settings comes from this path: if so, only the content
    could tell that it is there all the same, which is rare."""
    if data.source not in TABLE_FILES:
        return False
    wanted = (str(origin(data)), _settings(data))
    return wanted not in prepared_cache.prepared_from(cache_folder(data), data.source)


def _settings(data: DataConfig) -> dict[str, Any]:
    """What decides the prepared content, beside the content of the file."""
    unused = {"path", "cache", "memory_mib"}
    if data.source != "synthetic":
        unused |= {"rows", "features", "classes"}
    if data.source in TOKEN_SOURCES:
        unused |= {"target", "task", "split_seed", "scale", "scale_target", "target_transform"}
    else:
        unused |= {"context", "vocab"}
    # What was prepared before there were these stays as it was called.
    unused |= {*SPLIT} - {*data.own_split}
    settings = data.model_dump(exclude=unused)
    return {**settings, "args": hidden(data.args, "data.args")}  # kept, and told again


def _folder(data: DataConfig, found: Origin) -> Path:
    said = json.dumps([prepared_cache.FORMAT, _settings(data), found.sha256], sort_keys=True)
    key = hashlib.sha256(said.encode()).hexdigest()[:16]
    source = "own" if is_import(data.source) else data.source
    return cache_folder(data) / f"{source}-{key}"


def _prepared(
    data: DataConfig, found: Origin, folder: Path, read: Raw | Tokens | None
) -> tuple[dict[str, Any], bool]:
    """read: what is there already; else the source is read."""
    if read is None:
        read = SOURCES[data.source].read(data)
    draft = (
        token_windows.draft(read, data)
        if isinstance(read, Tokens)
        else prepare_rows.draft(read, data)
    )
    prepared_cache.check_room(folder.parent, draft.needed_bytes)

    def fill(temporary: Path) -> dict[str, Any]:
        manifest = draft.write(temporary)
        refuse_changed(found, lambda: files(data))
        return {**manifest, "source": vars(found), "settings": _settings(data)}

    return prepared_cache.publish(folder, fill)


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
        target_offset=tuple(meaning.get("target_offset", (0.0,))),
        target_scale=tuple(meaning.get("target_scale", (1.0,))),
        target_log=tuple(meaning.get("target_log", ())),
        target_guess=_guess(manifest),
        test_rows=meaning["rows"].get("test", 0),
        bytes=sum(entry["bytes"] for entry in files.values()),
        fingerprint=manifest["fingerprint"],
        reused=reused,
        columns=_columns(meaning),
        class_rows=_class_rows(meaning),
        missing=data.missing,
        na=None if data.na is None else tuple(data.na),
        decimal=data.decimal,
        notes=tuple(meaning.get("notes", ())),
        warnings=tuple(meaning.get("warnings", ())),
        guess=meaning.get("guess"),
    )


def _columns(meaning: dict[str, Any]) -> tuple[Column, ...] | None:
    found = meaning.get("columns")
    if found is None:
        return None
    return tuple(Column(**{**column, "values": tuple(column["values"])}) for column in found)


def _guess(manifest: dict[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    found = manifest.get("target_guess")
    return None if found is None else (tuple(found[0]), tuple(found[1]))


def _class_rows(meaning: dict[str, Any]) -> tuple[int, ...] | None:
    counted = meaning.get("class_rows")
    return None if counted is None else tuple(counted["train"])
