"""Find the process that the others wait for. Where gradients are exchanged, the slow one is that
which waits least in the backward pass, and takes as much longer for its own part of a step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

from headroom.base.names import PhaseKind, list_phases

WAITING = ("backward", "communication")  # phases in which a rank waits for the others
LEAST = 0.20  # of a step, that it waits less; on a busy machine 0.14 was seen of no cause
OWN = 0.8  # of what it waits less, that its own work takes longer
ALL_S, ASK_EVERY_S = 2.0, 0.02  # that the figures of all ranks are waited for


def select_phases(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the milliseconds of a step by phase, of the metrics of a run."""
    phases = list_phases(PhaseKind.STEP)
    return {phase.name: metrics[phase.metric] for phase in phases if phase.metric in metrics}


def find_slow_rank(by_rank: Sequence[Mapping[str, float]]) -> dict[str, Any] | None:
    """Return which rank is slow: rank, own_ms, others_ms, phase and share of a step that the others
    would win; None where none is. by_rank: milliseconds of a step by phase."""
    if len(by_rank) < 2 or not all(by_rank):
        return None
    waits = [sum(phases.get(name, 0.0) for name in WAITING) for phases in by_rank]
    own = [sum(phases.values()) - wait for phases, wait in zip(by_rank, waits, strict=True)]
    step_ms = median(wait + work for wait, work in zip(waits, own, strict=True))
    slow = max(range(len(by_rank)), key=lambda rank: own[rank])
    others = [rank for rank in range(len(by_rank)) if rank != slow]
    less_ms = median(waits[rank] for rank in others) - waits[slow]
    more_ms = own[slow] - median(own[rank] for rank in others)
    if less_ms < LEAST * step_ms or more_ms < OWN * less_ms:
        return None
    excess = {
        name: ms - median(by_rank[rank].get(name, 0.0) for rank in others)
        for name, ms in by_rank[slow].items()
        if name not in WAITING
    }
    return {
        "rank": slow,
        "own_ms": own[slow],
        "others_ms": median(own[rank] for rank in others),
        "phase": max(excess, key=lambda name: excess[name]),
        "share": min(more_ms, less_ms) / step_ms,
    }


def exchange_phases(phases: Mapping[str, float], *, turn: int) -> list[dict[str, float]]:
    """Return the phases of all ranks, if their program is one of torch.distributed and they are
    told in time; none else. It is no collective call: a rank that never comes holds nobody up for
    more than ALL_S. turn: which of its loops it is, the same on all ranks."""
    import torch.distributed as dist  # whoever judges a run needs none of it

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return []
    with suppress(Exception):  # of a store that is gone: nobody has to tell of ranks
        store = dist.distributed_c10d._get_default_store()
        keys = [f"headroom/phases/{turn}/{rank}" for rank in range(dist.get_world_size())]
        store.set(keys[dist.get_rank()], json.dumps(phases))
        until = time.monotonic() + ALL_S
        while not store.check(keys):
            if time.monotonic() > until:
                return []
            time.sleep(ASK_EVERY_S)
        return [json.loads(store.get(key)) for key in keys]
    return []
