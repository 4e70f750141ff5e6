"""Checkpoints on disk: tensors in one file (safetensors), all else in another (JSON), each with its
SHA-256. Both are written beside their place, synced and renamed, the tensors first: what lies there
under its name is whole. A file that was changed since is refused when it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tasks.engine.checkpoint.kept_steps import steps
from tasks.engine.checkpoint.nested_state import put_together

FORMAT, SHARDED = 1, 2  # of one file of tensors, and of a file for each rank


class Damaged(ValueError):
    """A checkpoint is not what was written; the text says how that shows."""


class Newer(ValueError):
    """A checkpoint of a later version of this project."""


@dataclass(frozen=True)
class Checkpoint:
    """One that was read. about: what a person and the resuming ask for; state: of the training."""

    step: int
    about: dict[str, Any]
    state: dict[str, Any]


def write(
    folder: Path,
    *,
    step: int,
    about: Mapping[str, Any],
    plain: Any,
    tensors: Mapping[str, Tensor],
) -> None:
    """A checkpoint in `folder`, whole or not at all. plain, tensors: see nested_state.

    Raises OSError. What lay there under the same step is replaced.
    """
    name, digest = put_tensors(folder, step, tensors)
    files = {"tensors": name, "sha256": digest}
    put_record(folder, step, about=about, plain=plain, files=files, format=FORMAT)
    drop_others(folder, step, keep={name})


def put_tensors(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    *,
    part: str = "",
    metadata: dict[str, str] | None = None,
) -> tuple[str, str]:
    """The name of a file with these tensors, and its SHA-256. part: which of several files of a
    step it is. metadata: what safetensors keeps beside them. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    whole = folder / f"{_stem(step)}{part}.safetensors"
    half = _half(whole)
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


def put_record(
    folder: Path,
    step: int,
    *,
    about: Mapping[str, Any],
    plain: Any,
    files: Mapping[str, Any],
    format: int,
) -> None:
    """What makes a checkpoint of files that are there already. Raises OSError."""
    record = {"format": format, "step": step, "about": dict(about), "plain": plain, **files}
    body = json.dumps(record).encode()
    _put(_record(folder, step), hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


def intact_about(folder: Path, step: int) -> dict[str, Any]:
    """What a checkpoint says of itself, which is all there as it was written. Reads each byte of
    it. Raises Damaged and Newer."""
    record = read_record(folder, step)
    for name, digest in record.get("files") or [(record["tensors"], record["sha256"])]:
        intact(folder / str(name), digest)
    about: dict[str, Any] = record["about"]
    return about


def is_sharded(folder: Path, step: int) -> bool:
    """Whether it has a file for each rank; see sharded_files. Raises Damaged and Newer."""
    return bool(read_record(folder, step)["format"] == SHARDED)


def read(folder: Path, step: int) -> Checkpoint:
    """The checkpoint of that step. Raises Damaged and Newer."""
    record = read_record(folder, step)
    path = intact(folder / str(record["tensors"]), record["sha256"])
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{path}: {error}") from None
    return Checkpoint(step, record["about"], put_together(record["plain"], tensors))


def intact(path: Path, digest: str) -> Path:
    """The file, where it is what was written. Raises Damaged."""
    try:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise Damaged(f"{path}: {error}") from None
    if found != digest:
        raise Damaged(f"{path} was changed since it was written")
    return path


def read_record(folder: Path, step: int) -> dict[str, Any]:
    """What the record of that step holds. Raises Damaged and Newer."""
    path = _record(folder, step)
    try:
        digest, _, body = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from None
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise Damaged(f"{path} was changed since it was written")
    record: dict[str, Any] = json.loads(body)
    if record["format"] > SHARDED:
        raise Newer(f"{path} was written by a newer version (format {record['format']})")
    if record["step"] != step:
        raise Damaged(f"{path} is of step {record['step']}")
    return record


def keep_only(folder: Path, wanted: set[int]) -> None:
    """Remove the checkpoints of other steps."""
    for step in set(steps(folder)) - wanted:
        with suppress(OSError):
            _record(folder, step).unlink()  # first: what has no record is no checkpoint
        drop_others(folder, step)


def drop_others(folder: Path, step: int, keep: Collection[str] = ()) -> None:
    """Remove what files of tensors this step has beside these."""
    for file in folder.glob(f"{_stem(step)}-*.safetensors"):
        if file.name not in keep:
            with suppress(OSError):
                file.unlink()


def _put(path: Path, body: bytes) -> None:
    half = _half(path)
    try:
        with open(half, "wb", opener=_private) as file:
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


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _stem(step: int) -> str:
    return f"step-{step:012d}"


def _record(folder: Path, step: int) -> Path:
    return folder / f"{_stem(step)}.json"


def _half(path: Path) -> Path:
    return path.with_name(path.name + ".new")
