"""Writes checkpoints of several ranks in the form of torch.distributed.checkpoint: each rank
writes a file of the rows that it holds (safetensors), and the first one the record that makes a
checkpoint of them; sharded_reader.py reads it. No part is pickled; where one rank cannot write
there is no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from headroom.base.nested import get_local_part
from headroom.ranks.ranks import Ranks
from headroom.training.checkpoint_files import (
    SHARDED,
    remove_other_tensors,
    write_record,
    write_tensors,
)


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
    outcomes = ranks.all_gather((written, problem))
    problem = next((problem for _, problem in outcomes if problem), "")
    files = [file for file, _ in outcomes]
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
