"""The last task of the flow: gives the device back and proves it, or names who still holds what. It
takes and returns plain facts; neither they nor its error hold a tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.engine.base.facts import Owner, ReleaseFacts
from tasks.engine.memory.leaks import release

log = logging.getLogger(__name__)
_MIB = 1024**2
_OWNERS_TOLD = 3


class LeakError(RuntimeError):
    """Memory was not given back. `facts` are what was measured."""

    def __init__(self, facts: ReleaseFacts) -> None:
        super().__init__(facts)
        self.facts = facts

    def __str__(self) -> str:
        return (
            f"memory.on_leak: {leak_in_words(self.facts)}. Let go of it there, or set "
            "memory.on_leak to warn"
        )


@task(cache_policy=NO_CACHE)
def release_memory(
    device_name: str,
    *,
    baseline_bytes: int,
    held_bytes: int = 0,
    leaks: Sequence[Owner] = (),
    on_leak: str = "warn",
) -> ReleaseFacts:
    """What was given back, of what is in use now and of `held_bytes`, in use when training ended.
    leaks: of the processes that trained, where these were others.

    Raises LeakError where something was not and on_leak is fail.
    """
    facts = release(device_name, baseline_bytes=baseline_bytes, held_bytes=held_bytes)
    if leaks:
        leaked_bytes = facts.leaked_bytes + sum(owner.bytes for owner in leaks)
        owners = (*facts.owners, *leaks)
        facts = replace(facts, ok=False, leaked_bytes=leaked_bytes, owners=owners)
    if facts.ok:
        return facts
    if facts.broken:  # by what has ended the run already
        log.warning("%s", facts.broken)
        return facts
    if on_leak == "fail":
        raise LeakError(facts)
    log.warning("memory.on_leak: %s", leak_in_words(facts))
    return facts


def release_metrics(facts: ReleaseFacts) -> dict[str, float]:
    """Under the names of the run record."""
    found = {
        "memory/baseline_mib": facts.baseline_bytes / _MIB,
        "memory/release_ok": float(facts.ok),
    }
    if facts.broken:
        return found
    found |= {
        "memory/released_mib": facts.released_bytes / _MIB,
        "memory/residual_mib": facts.residual_bytes / _MIB,
        "memory/leaked_mib": facts.leaked_bytes / _MIB,
    }
    if facts.reserved_bytes is not None:
        found["memory/reserved_residual_mib"] = facts.reserved_bytes / _MIB
    return found


def leak_in_words(facts: ReleaseFacts) -> str:
    """How much was not given back, and the largest owners."""
    if not facts.leaked_bytes:
        kept = "; ".join(f"{kept.name} {_size(kept.bytes)}" for kept in facts.kept)
        return f"{_size(facts.reserved_bytes or 0)} stay reserved ({kept or 'nobody tells why'})"
    told = [_owner_in_words(owner) for owner in facts.owners[:_OWNERS_TOLD]]
    if len(facts.owners) > _OWNERS_TOLD:
        told.append(f"and {len(facts.owners) - _OWNERS_TOLD} more")
    return f"{_size(facts.leaked_bytes)} were not given back: {'; '.join(told)}"


def _owner_in_words(owner: Owner) -> str:
    return f"{owner.kind} {owner.shape} {owner.dtype}, held by {owner.held_by}"


def _size(size_bytes: int) -> str:
    if size_bytes < _MIB // 10:
        return f"{size_bytes:,} bytes"
    return f"{size_bytes / _MIB:.1f} MiB"
