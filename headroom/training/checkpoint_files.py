"""Writes and reads checkpoints on disk: tensors in one file (safetensors), all else in another
(JSON), each with its SHA-256. A state of any structure is split into tensors with names and
plain JSON: dicts with keys of any plain type, lists, tuples, numbers, text and bytes. Files
are written beside their place, synced and renamed, the tensors first, so that a checkpoint is
complete or absent. It refuses what could only be kept by pickling, and a file that was changed
since it was written.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headroom.training.kept_steps import list_steps

PLAIN = (str, int, float, bool, type(None))


class UnsavableState(TypeError):
    """A state holds something that is neither a tensor nor plain."""


def flatten_state(state: Any, tensors: dict[str, Tensor], name: str = "") -> Any:
    """Return the state as JSON can hold it. Its tensors go to `tensors`, named by where they
    are in the state.

    Raises UnsavableState.
    """
    if isinstance(state, Tensor):
        tensors[name] = state.detach()
        return {"tensor": name}
    if isinstance(state, np.ndarray | np.generic) and state.dtype.kind in "bifu":
        tensors[name] = torch.from_numpy(np.array(state))
        return {"array": name}
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    if isinstance(state, PLAIN):
        return state
    if isinstance(state, dict):
        pairs = [
            [k, flatten_state(v, tensors, f"{name}/{_describe_key(k)}")] for k, v in state.items()
        ]
        if all(isinstance(key, PLAIN) for key, _ in pairs):
            return {"dict": pairs}
    elif isinstance(state, list | tuple):
        parts = [flatten_state(v, tensors, f"{name}/{i}") for i, v in enumerate(state)]
        return parts if isinstance(state, list) else {"tuple": parts}
    raise UnsavableState(f"{name or 'the state'} is a {type(state).__name__}")


def _describe_key(key: Any) -> str:
    """A key in a name: no two of them are the same."""
    return key.replace("/", "//") if isinstance(key, str) else repr(key)


def unflatten_state(plain: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the state that flatten_state was given."""
    if isinstance(plain, list):
        return [unflatten_state(part, tensors) for part in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, value),) = plain.items()
    match kind:
        case "tensor":
            return tensors[value]
        case "array":
            array = tensors[value].numpy()
            return array if array.ndim else array[()]
        case "bytes":
            return base64.b64decode(value)
        case "tuple":
            return tuple(unflatten_state(part, tensors) for part in value)
    return {key: unflatten_state(part, tensors) for key, part in value}


FORMAT, SHARDED = 1, 2  # of one file of tensors, and of a file for each rank


class DamagedCheckpoint(ValueError):
    """A checkpoint is not what was written; the text says how that shows."""


class NewerCheckpoint(ValueError):
    """A checkpoint of a later version of this project."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read. about: its description, for a person and for resuming;
    state: of the training."""

    step: int
    about: dict[str, Any]
    state: dict[str, Any]


def write_checkpoint(
    folder: Path,
    *,
    step: int,
    about: Mapping[str, Any],
    plain: Any,
    tensors: Mapping[str, Tensor],
) -> None:
    """Write a checkpoint to `folder`, whole or not at all. plain, tensors: see flatten_state.

    Raises OSError. What was there under the same step is replaced.
    """
    name, digest = write_tensors(folder, step, tensors)
    files = {"tensors": name, "sha256": digest}
    write_record(folder, step, about=about, plain=plain, files=files, format=FORMAT)
    remove_other_tensors(folder, step, keep={name})


def write_tensors(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    *,
    part: str = "",
    metadata: dict[str, str] | None = None,
) -> tuple[str, str]:
    """Write these tensors to a file; return its name and its SHA-256. part: which of several
    files of a step it is. metadata: what safetensors keeps beside them. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    whole = folder / f"{_make_stem(step)}{part}.safetensors"
    half = _make_temporary_path(whole)
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, half, metadata)
        with open(half, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fchmod(file.fileno(), 0o600)
            os.fsync(file.fileno())
        # A name of its own for each writing: one of the same step stays whole until it is replaced.
        named = whole.with_name(f"{whole.stem}-{digest[:16]}.safetensors")
        os.rename(half, named)
    except SafetensorError as error:  # how it tells of a full disk
        raise OSError(str(error)) from None
    finally:
        half.unlink(missing_ok=True)
    return named.name, digest


def write_record(
    folder: Path,
    step: int,
    *,
    about: Mapping[str, Any],
    plain: Any,
    files: Mapping[str, Any],
    format: int,
) -> None:
    """Write the record that makes a checkpoint of files that are there already. Raises OSError."""
    record = {"format": format, "step": step, "about": dict(about), "plain": plain, **files}
    body = json.dumps(record).encode()
    _write_file(
        _make_record_path(folder, step), hashlib.sha256(body).hexdigest().encode() + b"\n" + body
    )


def verify_checkpoint(folder: Path, step: int) -> dict[str, Any]:
    """Return what a checkpoint says of itself, which is all there as it was written. Reads each
    byte of it. Raises DamagedCheckpoint and NewerCheckpoint."""
    record = read_record(folder, step)
    for name, digest in record.get("files") or [(record["tensors"], record["sha256"])]:
        verify_file(folder / str(name), digest)
    about: dict[str, Any] = record["about"]
    return about


def is_sharded(folder: Path, step: int) -> bool:
    """Return whether it has a file for each rank; see sharded_reader. Raises DamagedCheckpoint
    and NewerCheckpoint."""
    return bool(read_record(folder, step)["format"] == SHARDED)


def read_checkpoint(folder: Path, step: int) -> Checkpoint:
    """Read the checkpoint of that step. Raises DamagedCheckpoint and NewerCheckpoint."""
    record = read_record(folder, step)
    path = verify_file(folder / str(record["tensors"]), record["sha256"])
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DamagedCheckpoint(f"{path}: {error}") from None
    return Checkpoint(step, record["about"], unflatten_state(record["plain"], tensors))


def verify_file(path: Path, digest: str) -> Path:
    """Return the path of a file whose SHA-256 is as it was written. Raises DamagedCheckpoint."""
    try:
        with open(path, "rb") as file:
            content_digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: {error}") from None
    if content_digest != digest:
        raise DamagedCheckpoint(f"{path} was changed since it was written")
    return path


def read_record(folder: Path, step: int) -> dict[str, Any]:
    """Read the record of that step. Raises DamagedCheckpoint and NewerCheckpoint."""
    path = _make_record_path(folder, step)
    try:
        digest, _, body = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: {error.strerror}") from None
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise DamagedCheckpoint(f"{path} was changed since it was written")
    record: dict[str, Any] = json.loads(body)
    if record["format"] > SHARDED:
        raise NewerCheckpoint(f"{path} was written by a newer version (format {record['format']})")
    if record["step"] != step:
        raise DamagedCheckpoint(f"{path} is of step {record['step']}")
    return record


def remove_other_steps(folder: Path, wanted: set[int]) -> None:
    """Remove the checkpoints of other steps."""
    for step in set(list_steps(folder)) - wanted:
        with suppress(OSError):
            _make_record_path(folder, step).unlink()  # first: what has no record is no checkpoint
        remove_other_tensors(folder, step)


def remove_other_tensors(folder: Path, step: int, keep: Collection[str] = ()) -> None:
    """Remove the tensor files of this step other than those to keep."""
    for file in folder.glob(f"{_make_stem(step)}-*.safetensors"):
        if file.name not in keep:
            with suppress(OSError):
                file.unlink()


def _write_file(path: Path, body: bytes) -> None:
    half = _make_temporary_path(path)
    try:
        with open(half, "wb", opener=_open_private) as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.rename(half, path)
    finally:
        half.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the names too
    finally:
        os.close(folder)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _make_stem(step: int) -> str:
    return f"step-{step:012d}"


def _make_record_path(folder: Path, step: int) -> Path:
    return folder / f"{_make_stem(step)}.json"


def _make_temporary_path(path: Path) -> Path:
    return path.with_name(path.name + ".new")
