"""Reads checkpoints of several ranks through torch.distributed.checkpoint, whose import costs a
second that no training of one process spends. Any number of ranks can read them, each the rows
that it holds; a file that is not what was written is refused on all ranks.
"""

from __future__ import annotations

import os
import warnings
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

from headroom.ranks.ranks import Ranks
from headroom.training.checkpoint_files import (
    Checkpoint,
    DamagedCheckpoint,
    NewerCheckpoint,
    read_record,
    unflatten_state,
    verify_file,
)


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
    for name, metadata in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(metadata, TensorStorageMetadata)
        size, dtype = metadata.size, metadata.properties.dtype
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
