"""Prepares a data set for a training and returns its facts. Where the cache has none of these
settings and rows, the source is read and becomes the arrays that training maps: labels encoded,
rows split, features and amounts scaled, or a text cut into tokens, written in blocks. What cannot
be learnt from is refused by `targets.py`, `encoding.py` and the file of its source, before anything
is written or while it is.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np

from headroom.base.facts import Column, DataFacts, TimeInputs
from headroom.base.import_paths import forbid_exit, is_import_path
from headroom.base.secret_texts import hide_in_text, hide_secrets
from headroom.data import prepared_cache, run_warnings
from headroom.data.encoding import (
    Moments,
    Scaling,
    compute_mean_deviation,
    compute_moments,
    fit_encoding,
    measure_scaling,
    scale_features,
)
from headroom.data.prepared_cache import (
    BackgroundHash,
    SourceFingerprint,
    fingerprint_source,
    refuse_changed_files,
)
from headroom.data.row_parts import RowParts, split_rows
from headroom.data.source_data import DataError, RawData, check_memory, resolve_cache_folder
from headroom.data.sources import (
    SOURCES,
    estimate_synthetic_bytes,
    find_origin,
    list_source_files,
)
from headroom.data.table_store import Table
from headroom.data.targets import (
    LARGEST_TARGET,
    NO_LINE,
    Labels,
    choose_transform,
    count_class_rows,
    encode_target,
    iterate_row_blocks,
)
from headroom.data.time_trend import choose_line, make_judge, measure_time_range
from headroom.data.tokens import BLOCK_TOKENS, BYTES, Tokens, build_default_text
from headroom.settings.arguments import SOURCE_ARGS
from headroom.settings.run_config import TABLE_FILES, TOKEN_SOURCES, DataConfig

ENCODING = 2  # of the columns of a table as inputs: counted up where they become others
PARTS = ("train_x.npy", "train_y.npy", "val_x.npy", "val_y.npy")
TEST_PARTS = ("test_x.npy", "test_y.npy")  # where rows are put aside


def draft_arrays(raw: RawData, data: DataConfig) -> prepared_cache.Draft:
    """Encode the labels and split the rows, ready to be written. Errors: DataError."""
    task = data.task
    if data.source == "synthetic" and task == "auto":
        is_classes = data.synthetic.classes > 1  # however many
        task = "classification" if is_classes else "regression"
    labels = encode_target(raw, task)
    parts = split_rows(raw, labels, data)
    table = raw.features if isinstance(raw.features, Table) else None
    inputs = raw.features.size if table is None else len(table) * table.inputs
    write = partial(_write_arrays, raw=raw, labels=labels, parts=parts, data=data)
    return prepared_cache.Draft(4 * inputs + 8 * len(labels.values) * labels.values[:1].size, write)


@dataclass(frozen=True)
class _ModelInputs:
    """The features on their way to the model."""

    shape: tuple[int, ...]  # of a row
    names: tuple[str, ...] | None
    scaling: Scaling
    columns: tuple[Column, ...] | None
    notes: tuple[str, ...]
    blocks: Iterator[tuple[slice, np.ndarray]]  # scaled, float32


def _encode_inputs(raw: RawData, *, for_training: np.ndarray, scale: bool) -> _ModelInputs:
    if isinstance(raw.features, Table):
        made = fit_encoding(raw, for_training=for_training, scale=scale)
        shape = (len(made.scaling.offset),)
        return _ModelInputs(
            shape, made.names, made.scaling, made.columns, made.notes, made.blocks()
        )
    scaling = measure_scaling(raw, for_training=for_training, scale=scale)
    shape = raw.features.shape[1:]
    return _ModelInputs(shape, raw.feature_names, scaling, None, (), scale_features(raw, scaling))


def _write_arrays(
    folder: Path, *, raw: RawData, labels: Labels, parts: RowParts, data: DataConfig
) -> dict[str, Any]:
    """Writes the arrays of each part; the manifest of what they are."""
    rows, training = parts.by_name(), parts.training
    inputs = _encode_inputs(raw, for_training=training, scale=data.scale)
    width = int(np.prod(inputs.shape)) + labels.values[:1].size
    keys = run_warnings.RowKeys(len(training), width)
    files = _write_inputs(folder, inputs=inputs, labels=labels, rows=rows, keys=keys)
    times = measure_time_range(inputs.columns, inputs.scaling, data, folder)
    draw_judge = partial(make_judge, labels, rows, folder, is_timed=times is not None)
    line = NO_LINE if times is None else times.line
    transform = choose_transform(raw, labels, rows, data, draw_judge, line=line)
    amounts = replace(labels, values=transform.apply(labels.values))
    is_scaled = data.target_transform != "raw"
    target = _measure_target_scaling(amounts, for_training=training, scale=is_scaled)
    files |= _write_targets(folder, amounts, _scale_targets(raw, amounts, target), rows)
    class_rows = _count_class_rows(labels, rows)
    columns = None if inputs.columns is None else [_describe_column(c) for c in inputs.columns]
    going_on: TimeInputs | None = None
    notes: tuple[str, ...] = ()
    if times is not None:
        going_on, notes = choose_line(times, draw_judge(), transform, target)
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
        "notes": list(raw.notes + labels.notes + inputs.notes + transform.notes + notes),
        "guess": run_warnings.compute_guess_accuracy(class_rows),
        "warnings": list(run_warnings.warn_of_data(raw, labels, rows, keys)),
    }
    if transform.log:
        meaning["target_log"] = list(transform.log)
    if going_on is not None:
        meaning["times"] = asdict(going_on)
    # Beside what the data is known by, which it does not change.
    guess = _guess_amounts(labels, training)
    return {**prepared_cache.make_manifest(meaning, files), "target_guess": guess}


def _guess_amounts(labels: Labels, training: np.ndarray) -> list[list[float]] | None:
    """Mean and median of the training rows of a regression, of each of its targets."""
    if labels.task != "regression":
        return None
    values = np.asarray(labels.values[training], dtype=np.float64)
    return [values.mean(0).tolist(), np.median(values, axis=0).tolist()]


def _measure_target_scaling(labels: Labels, *, for_training: np.ndarray, scale: bool) -> Scaling:
    """Mean and deviation of each column of a regression's target; what changes nothing of others.
    Constant columns get scale 1."""
    if labels.task != "regression" or not scale:
        return Scaling(np.zeros(1), np.ones(1))
    scaling = (
        compute_moments(
            labels.values[part].T.astype(np.float64),
            for_training[part].astype(np.float64),
            holes=False,
        )
        for part in iterate_row_blocks(len(labels.values))
    )
    return Scaling(*compute_mean_deviation(reduce(Moments.plus, scaling), int(for_training.sum())))


def _scale_targets(
    raw: RawData, labels: Labels, scaling: Scaling
) -> Iterator[tuple[slice, np.ndarray]]:
    """The targets in blocks of rows, scaled.

    Errors: DataError where one lies so far from the training rows that its square is no number.
    """
    for part in iterate_row_blocks(len(labels.values)):
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
    inputs: _ModelInputs,
    labels: Labels,
    rows: Mapping[str, np.ndarray],
    keys: run_warnings.RowKeys,
) -> dict[str, Any]:
    with ExitStack() as stack:
        parts = _open_writers(stack, folder, "x", inputs.shape, "<f4", rows)
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
        parts = _open_writers(stack, folder, "y", labels.values.shape[1:], kind, rows)
        for part, y in targets:
            for name, chosen in rows.items():
                parts[f"{name}_y.npy"].append(y[chosen[part]].astype(kind))
        return {file: writer.finish() for file, writer in parts.items()}


def _open_writers(
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


def _describe_column(column: Column) -> dict[str, Any]:
    """As the manifest and the model keep it."""
    description = asdict(column)
    if column.rest is None:  # so that what was prepared before this was there is found again
        del description["rest"]
    return description


def _count_class_rows(
    labels: Labels, rows: Mapping[str, np.ndarray]
) -> dict[str, list[int]] | None:
    if labels.task != "classification":
        return None
    return {name: count_class_rows(labels, chosen).tolist() for name, chosen in rows.items()}


TOKEN_PARTS = ("train.npy", "val.npy")
TOKEN_TEST_PARTS = ("test.npy",)  # where the end is put aside


def draft_tokens(tokens: Tokens, data: DataConfig) -> prepared_cache.Draft:
    """Prepare the rows of all parts for writing; the text must hold a row for each."""
    row, count = data.tokens.context + 1, len(tokens.values)  # a part holds one row at least
    parts, left = {}, tokens.values
    for name, fraction in (("test", data.test_fraction), ("val", data.validation_fraction)):
        if fraction:
            held_out = min(max(round(count * fraction), row), len(left) - row)
            _refuse_short(held_out, row, count)
            left, parts[name] = left[:-held_out], left[-held_out:]
    parts = {"train": left, "val": parts.pop("val"), **parts}
    dtype = np.dtype("<u2" if tokens.vocabulary > BYTES else "u1")
    write = partial(
        _write_parts,
        parts=parts,
        context=data.tokens.context,
        vocabulary=tokens.vocabulary,
        dtype=dtype,
    )
    return prepared_cache.Draft(count * dtype.itemsize, write)


def _refuse_short(tokens: int, row: int, count: int) -> None:
    if tokens < row:
        raise DataError(
            f"data.args.context: {count:,} tokens are too few for a row of {row:,} in each part; "
            "lower it, or set data.test_fraction to 0"
        )


def view_token_rows(text: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of a text, and the same one token further on, as views; the last few
    tokens, fewer than a context, are left out."""
    count = (len(text) - 1) // context
    x, y = (text[at : at + count * context].reshape(count, context) for at in (0, 1))
    return x, y


def _write_parts(
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
        "guess": run_warnings.compute_guess_loss(parts["val"]),
        "tokens": {name: len(values) for name, values in parts.items()},
    }
    return prepared_cache.make_manifest(meaning, files)


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

    x: (rows, *input_shape) float32, scaled; y: (rows,) int64 classes or (rows, k) float32, amounts
    scaled. Tokens: x and y (rows, context) uint8 or uint16, overlapping views of one text, of which
    y is one token further on.
    """

    train_x: np.ndarray
    train_y: np.ndarray
    val_x: np.ndarray
    val_y: np.ndarray
    test_x: np.ndarray | None = None
    test_y: np.ndarray | None = None


def check_data(data: DataConfig) -> None:
    """Raise DataError for data that cannot be prepared, as far as its head and size show."""
    cache = resolve_cache_folder(data)
    if is_import_path(data.source):  # what it gives is known when it was called
        prepared_cache.check_disk_room(cache, 0)
        return
    SOURCES[data.source].check(data)
    needed_bytes = 0
    if data.source == "synthetic" and not _name_folder(data, _fingerprint_data(data)).is_dir():
        needed_bytes = estimate_synthetic_bytes(data)
        made = data.synthetic
        what = f"data.args.rows: synthetic of {made.rows:,} rows and {made.features:,} features"
        check_memory(needed_bytes, what, "lower data.args.rows or data.args.features")
    prepared_cache.check_disk_room(cache, needed_bytes)


@forbid_exit
def prepare_dataset(data: DataConfig, *, batch_size: int = 64, seed: int = 0) -> DataFacts:
    """Prepare the data and return its facts; arrays come from the cache where they are there
    and intact.

    A changed file has another checksum and so another folder: what a run has mapped stays as
    it is. batch_size, seed: of the training, for a source of the user's own; loaders are only
    described, and nothing is prepared. Errors: DataError.
    """
    read: RawData | Tokens | None = None
    if is_import_path(data.source):
        own = _read_own_data(data, batch_size, seed)
        if isinstance(own, DataFacts):
            _refuse_split(data)
            return own
        read, fingerprint = own
    else:
        SOURCES[data.source].check(data)
        read, fingerprint = (
            _read_while_hashing(data) if _is_new(data) else (None, _fingerprint_data(data))
        )
    folder = _name_folder(data, fingerprint)
    manifest, reused = prepared_cache.read_manifest(folder), True
    if manifest is None:
        manifest, reused = _write_prepared(data, fingerprint, folder, read)
    facts = _make_facts(data, folder, manifest, reused=reused)
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


def load_arrays(facts: DataFacts) -> Arrays:
    """Map the prepared arrays; raises DataError where they are no longer there."""
    names = [*PARTS, *(TEST_PARTS if facts.test_rows else ())]
    if facts.task == "tokens":
        test_parts = TOKEN_TEST_PARTS if facts.test_rows else ()
        names = [*TOKEN_PARTS, *test_parts]
    try:
        parts = [
            np.load(Path(facts.folder, name), mmap_mode="r", allow_pickle=False) for name in names
        ]
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"data.cache: the arrays in {facts.folder} are gone or damaged ({error}); start again"
        ) from None
    if facts.task == "tokens":
        parts = [view for text in parts for view in view_token_rows(text, facts.input_shape[0])]
    return Arrays(*parts)


def _read_own_data(
    data: DataConfig, batch_size: int, seed: int
) -> tuple[RawData, SourceFingerprint] | DataFacts:
    # Here, since these import torch, and data is checked at a desk before that is.
    from headroom.data import own_data

    result = own_data.call_data_factory(data, own_data.LoaderOptions(batch_size, seed))
    if isinstance(result, RawData):
        return result, SourceFingerprint(sha256=own_data.hash_arrays(result))
    return own_data.describe_loaders(data, result)


def _refuse_split(data: DataConfig) -> None:
    for name, value in data.own_split.items():
        raise DataError(
            f"data.{name}: has no meaning for the data sets and loaders of {data.source} (got "
            f"{value!r}), whose rows are split by your code; drop it, or return arrays"
        )


def _fingerprint_data(data: DataConfig) -> SourceFingerprint:
    path = find_origin(data)
    if path is None and data.source == "text":
        text = build_default_text()
        return SourceFingerprint(None, len(text), None, hashlib.sha256(text).hexdigest())
    if path is None:
        return SourceFingerprint()
    return fingerprint_source(path, list_source_files(data))


def _read_while_hashing(data: DataConfig) -> tuple[RawData | Tokens, SourceFingerprint]:
    """A table that was not prepared before is read while it is hashed."""
    there = find_origin(data)
    assert there is not None
    hashing = BackgroundHash(there, list_source_files(data))
    return SOURCES[data.source].read(data), hashing.result()


def _is_new(data: DataConfig) -> bool:
    """True if nothing prepared with these settings comes from this path: if so, only the content
    could tell that it is there all the same, which is rare."""
    if data.source not in TABLE_FILES:
        return False
    wanted = (hide_in_text(str(find_origin(data))), _collect_settings(data))
    return wanted not in prepared_cache.list_prepared(resolve_cache_folder(data), data.source)


def _collect_settings(data: DataConfig) -> dict[str, Any]:
    """What decides the prepared content, beside the content of the file."""
    unused = {"path", "cache", "memory_mib"}
    if data.source in TOKEN_SOURCES:
        unused |= {"target", "task", "split_seed", "scale", "target_transform"}
    settings = data.model_dump(exclude=unused)
    if data.source in SOURCE_ARGS:  # with the defaults of what was not given
        settings["args"] = SOURCE_ARGS[data.source](**data.args).model_dump()
    if data.source in TABLE_FILES:
        settings["encoding"] = ENCODING
    # It is kept, and told again; what another login gives is known by its content.
    return {n: hide_secrets(v, f"data.{n}", by_name=n == "args") for n, v in settings.items()}


def _name_folder(data: DataConfig, fingerprint: SourceFingerprint) -> Path:
    said = json.dumps(
        [prepared_cache.FORMAT, _collect_settings(data), fingerprint.sha256], sort_keys=True
    )
    key = hashlib.sha256(said.encode()).hexdigest()[:16]
    source = "own" if is_import_path(data.source) else data.source
    return resolve_cache_folder(data) / f"{source}-{key}"


def _write_prepared(
    data: DataConfig, fingerprint: SourceFingerprint, folder: Path, read: RawData | Tokens | None
) -> tuple[dict[str, Any], bool]:
    """read: what is there already; else the source is read."""
    if read is None:
        read = SOURCES[data.source].read(data)
    draft = draft_tokens(read, data) if isinstance(read, Tokens) else draft_arrays(read, data)
    prepared_cache.check_disk_room(folder.parent, draft.needed_bytes)

    def fill(temporary: Path) -> dict[str, Any]:
        manifest = draft.write(temporary)
        refuse_changed_files(fingerprint, lambda: list_source_files(data))
        path = None if fingerprint.path is None else hide_in_text(fingerprint.path)
        source = {**vars(fingerprint), "path": path}
        return {**manifest, "source": source, "settings": _collect_settings(data)}

    return prepared_cache.publish_folder(folder, fill)


def _make_facts(
    data: DataConfig, folder: Path, manifest: dict[str, Any], *, reused: bool
) -> DataFacts:
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
        target_guess=_restore_guess(manifest),
        test_rows=meaning["rows"].get("test", 0),
        bytes=sum(entry["bytes"] for entry in files.values()),
        fingerprint=manifest["fingerprint"],
        reused=reused,
        columns=_restore_columns(meaning),
        times=_restore_times(meaning),
        class_rows=_restore_class_rows(meaning),
        missing=data.table.missing,
        na=None if data.table.na is None else tuple(data.table.na),
        decimal=data.table.decimal,
        notes=tuple(meaning.get("notes", ())),
        warnings=tuple(meaning.get("warnings", ())),
        guess=meaning.get("guess"),
    )


def _restore_columns(meaning: dict[str, Any]) -> tuple[Column, ...] | None:
    columns = meaning.get("columns")
    if columns is None:
        return None
    return tuple(Column(**{**column, "values": tuple(column["values"])}) for column in columns)


def _restore_times(meaning: dict[str, Any]) -> TimeInputs | None:
    times = meaning.get("times")
    if times is None:
        return None
    lists = {name: tuple(times[name]) for name in ("places", "low", "high", "slope")}
    return TimeInputs(**lists, intercept=times["intercept"])


def _restore_guess(manifest: dict[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    guess = manifest.get("target_guess")
    return None if guess is None else (tuple(guess[0]), tuple(guess[1]))


def _restore_class_rows(meaning: dict[str, Any]) -> tuple[int, ...] | None:
    counted = meaning.get("class_rows")
    return None if counted is None else tuple(counted["train"])
