"""Writes and reads checkpoints of several ranks through torch.distributed.checkpoint: each
rank writes a file of the rows that it holds (safetensors), and the first one the record that
makes a checkpoint of them. Any number of ranks can read them again, each the rows that it
holds. No part is pickled; where one rank cannot write there is no checkpoint, and a file that
is not what was written is refused on all ranks.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, empty

from tasks.engine.base.nested import get_local_part
from tasks.engine.checkpoint.checkpoint_files import (
    SHARDED,
    Checkpoint,
    DamagedCheckpoint,
    NewerCheckpoint,
    read_record,
    remove_other_tensors,
    unflatten_state,
    verify_file,
    write_record,
    write_tensors,
)
from tasks.engine.distributed.ranks import Ranks


@dataclass(frozen=True)
class RankPart:
    """What one rank writes of a state. tensors: plain ones. offsets: of each that is a part of
    one, its first row and column in the whole."""

    tensors: dict[str, Tensor]
    offsets: dict[str, list[int]]


def select_rank_part(tensors: Mapping[str, Tensor], *, is_lead: bool) -> RankPart:
    """Return this rank's rows of sharded tensors; the other tensors are the first rank's to
    write."""
    part = RankPart({}, {})
    for name, tensor in tensors.items():
        chunks = getattr(tensor, "__create_chunk_list__", None)  # of a DTensor, for checkpoints
        if chunks is not None:
            part.tensors[name] = get_local_part(tensor)
            part.offsets[name] = list(chunks()[0].offsets)
        elif is_lead:
            part.tensors[name] = tensor
    return part


def write_sharded_checkpoint(
    folder: Path, ranks: Ranks, *, step: int, about: Mapping[str, Any], plain: Any, part: RankPart
) -> None:
    """Write a checkpoint to `folder`, whole or not at all; about and plain are those of the
    first rank. Collective. Raises OSError, on all ranks where one of them could not write."""
    kept = {n: t for n, t in part.tensors.items() if t.numel() or n not in part.offsets}
    starts = {n: {"saved_offsets": part.offsets.get(n, [0] * t.dim())} for n, t in kept.items()}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(starts)}
    written, problem = ("", ""), ""
    try:
        of = f"-{ranks.rank}of{ranks.size}"
        written = write_tensors(folder, step, kept, part=of, metadata=metadata)
    except OSError as error:
        problem = error.strerror or str(error)
    found = ranks.all_gather((written, problem))
    problem = next((problem for _, problem in found if problem), "")
    files = [file for file, _ in found]
    if ranks.is_lead and not problem:
        named = {"files": files, "sharded": sorted(part.offsets)}
        try:
            write_record(folder, step, about=about, plain=plain, files=named, format=SHARDED)
            remove_other_tensors(folder, step, keep={name for name, _ in files})
        except OSError as error:
            problem = error.strerror or str(error)
    problem = ranks.all_gather(problem)[0]
    if problem:
        raise OSError(problem)


def read_sharded_checkpoint(
    folder: Path, step: int, ranks: Ranks, *, mesh: DeviceMesh | None
) -> Checkpoint:
    """Read the checkpoint of that step, of however many ranks. What was sharded is sharded
    again over this mesh; without one it is whole. Collective. Raises DamagedCheckpoint and
    NewerCheckpoint, on all ranks alike."""
    problem: ValueError | None = None
    record: dict[str, Any] = {}
    try:
        record = read_record(folder, step)
        files = record.get("files") or [(record["tensors"], record["sha256"])]
        for name, digest in files[ranks.rank :: ranks.size]:  # each is read by somebody
            verify_file(folder / name, digest)
    except (DamagedCheckpoint, NewerCheckpoint) as error:
        problem = error
    problem = next(filter(None, ranks.all_gather(problem)), None)
    if problem is not None:
        raise problem
    reader = HuggingFaceStorageReader(str(folder))
    reader.fs = _SelectedFiles([str(folder / name) for name, _ in files])
    shared_out = set(record.get("sharded", ())) if mesh is not None else set()
    tensors: dict[str, Tensor] = {}
    for name, found in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(found, TensorStorageMetadata)
        size, dtype = found.size, found.properties.dtype
        if name in shared_out:
            tensors[name] = empty(*size, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
        else:
            tensors[name] = torch.empty(size, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a single process is one
        load(dict(tensors), storage_reader=reader, no_dist=ranks.is_alone)
    return Checkpoint(step, record["about"], unflatten_state(record["plain"], tensors))


class _SelectedFiles(FileSystem):
    """The files of one checkpoint: their folder holds others too."""

    def __init__(self, files: list[str]) -> None:
        self._files = files

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return self._files
