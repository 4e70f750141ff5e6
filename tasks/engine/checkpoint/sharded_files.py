"""Checkpoints of several ranks: each rank writes a file of the rows that it holds (safetensors, as
torch.distributed.checkpoint lays them out), and the first one the record that makes a checkpoint of
them. No part of it is pickled, and where one rank cannot write there is none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tasks.engine.checkpoint.checkpoint_files import SHARDED, drop_others, put_record, put_tensors
from tasks.engine.distributed.ranks import Ranks
from tasks.engine.distributed.shards import local


@dataclass(frozen=True)
class Part:
    """What one rank writes of a state. tensors: plain ones. offsets: of each that is a part of
    one, its first row and column in the whole."""

    tensors: dict[str, Tensor]
    offsets: dict[str, list[int]]


def part_of(tensors: Mapping[str, Tensor], *, is_lead: bool) -> Part:
    """Of tensors that are shared out this rank's rows; the others are the first rank's to write."""
    part = Part({}, {})
    for name, tensor in tensors.items():
        chunks = getattr(tensor, "__create_chunk_list__", None)  # of a DTensor, for checkpoints
        if chunks is not None:
            part.tensors[name] = local(tensor)
            part.offsets[name] = list(chunks()[0].offsets)
        elif is_lead:
            part.tensors[name] = tensor
    return part


def write_parts(
    folder: Path, ranks: Ranks, *, step: int, about: Mapping[str, Any], plain: Any, part: Part
) -> None:
    """A checkpoint in `folder`, whole or not at all; about and plain are those of the first rank.
    Collective. Raises OSError, on all ranks where one of them could not write."""
    kept = {n: t for n, t in part.tensors.items() if t.numel() or n not in part.offsets}
    starts = {n: {"saved_offsets": part.offsets.get(n, [0] * t.dim())} for n, t in kept.items()}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(starts)}
    written, problem = ("", ""), ""
    try:
        of = f"-{ranks.rank}of{ranks.size}"
        written = put_tensors(folder, step, kept, part=of, metadata=metadata)
    except OSError as error:
        problem = error.strerror or str(error)
    found = ranks.all_of((written, problem))
    problem = next((problem for _, problem in found if problem), "")
    files = [file for file, _ in found]
    if ranks.is_lead and not problem:
        named = {"files": files, "sharded": sorted(part.offsets)}
        try:
            put_record(folder, step, about=about, plain=plain, files=named, format=SHARDED)
            drop_others(folder, step, keep={name for name, _ in files})
        except OSError as error:
            problem = error.strerror or str(error)
    problem = ranks.all_of(problem)[0]
    if problem:
        raise OSError(problem)
