"""Prove that a run gave its memory back, and name who holds what it did not; and handle a device
that an error has broken for this process, such as an index out of range in a CUDA kernel: it
answers every later call with that error, and its memory is returned when the process ends.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from headroom.base.facts import Owner, ReleaseFacts, UnreturnedMemory
from headroom.watch.allocators import (
    count_pinned_bytes,
    count_pool_bytes,
    drop_cache,
    make_allocator,
    release_cached_memory,
    wait_for_device,
)
from headroom.watch.holders import (
    GRADIENT,
    SAVED,
    Holders,
    LiveTensor,
    find_live_tensors,
    find_storages,
)
from headroom.watch.memory_meter import count_allocated_bytes

# Until the process ends.
_kept_tensors: list[Tensor] = []


def is_broken(device: torch.device) -> bool:
    """Return whether the device answers every call with an error; waits for it."""
    try:
        wait_for_device(device)
    except RuntimeError:
        return True
    return False


@contextmanager
def survive_broken_device(device: torch.device) -> Iterator[None]:
    """Keep the process alive after an error inside the block that breaks the device, so that it
    can be reported.

    PyTorch frees pinned memory with an event of the device; where the device gives none, that
    fails in a destructor and ends the process at once. So the host's tensors are kept.
    """
    try:
        yield
    except Exception:
        if is_broken(device):
            # All of them: which are pinned, the device would have to tell.
            _kept_tensors.extend(live.tensor for live in find_live_tensors(torch.device("cpu")))
        raise


MIB = 1024**2
MOST_OWNERS = 10
OWNERS_TOLD = 3  # by a sentence
COLLECTIONS, PAUSE_S = 3, 0.05
NO_HOLDER = "nothing that Python can tell: a function running in another thread, or C++ code"

# The last baseline of each device in this process. Identities cannot cross a task border, where
# only the number of bytes travels; release() knows its baseline again by that number.
_baselines: dict[str, Baseline] = {}


@dataclass(frozen=True)
class TakenMemory:
    """Memory that is taken beside tensors, in bytes; None where it is unknown."""

    reserved: int | None  # by the allocator, tensors included
    pools: int  # of that, by private pools
    pinned: int | None  # of the host's memory
    driver: int | None  # of the device, as its driver counts: other processes included


@dataclass(frozen=True)
class Baseline:
    """What was in use before a run. `before`: bytes by storage address."""

    bytes: int
    taken: TakenMemory
    before: dict[int, int] = field(repr=False)
    # Weak references keep no memory, but keep its address from being given to another storage.
    refs: tuple[StorageWeakRef, ...] = field(repr=False)


def take_baseline(device: torch.device | str) -> Baseline:
    """Release caches, then record and return what is in use on the device now.

    Caches are released as in release_device_memory(), so that a workspace kept from an earlier
    run cannot hide a leak of its size in the next. Garbage not yet collected counts as in use.
    """
    device = torch.device(device)
    release_cached_memory(device)
    lives = find_live_tensors(device)
    refs = {live.key: StorageWeakRef(live.storage) for live in lives}
    baseline = Baseline(
        bytes=count_allocated_bytes(device, lives),
        taken=_measure_taken(device),
        before={live.key: live.bytes for live in lives},
        refs=tuple(refs.values()),
    )
    _baselines[str(device)] = baseline
    return baseline


def ignore_tensor(tensor: Tensor) -> None:
    """Exempt a tensor that a library keeps for as long as the process lives: it is no leak of a
    run."""
    for baseline in _baselines.values():
        baseline.before[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()


def release_device_memory(
    device: torch.device | str, *, baseline_bytes: int, held_bytes: int = 0
) -> ReleaseFacts:
    """Release all memory that nobody holds any more, and name the holders of the rest.

    held_bytes: what the run had in use at its end, most of which its own end has freed already.
    leaked: bytes of storages that were not there at the baseline and that Python can still
    reach; on a CPU and a GPU alike one byte is a leak. residual: what the allocator counts
    above that, which no Python object holds: workspaces of libraries, and rounding. Where the
    baseline was not taken by take_baseline() in this process, only its size is known, and
    leaked is at most what is in use above it. reserved: what the allocator has not returned to
    the driver; kept: by name what is taken above the baseline that no tensor holds. ok: nothing
    leaked, no private pool is left, and nothing is reserved for which there is no residual. Of
    a device that an error has broken nothing is released; `broken` says so.
    """
    device = torch.device(device)
    if is_broken(device):
        return _report_broken_device(device, baseline_bytes)
    baseline = _baselines.get(str(device))
    if baseline is not None and baseline.bytes != baseline_bytes:
        baseline = None
    before = baseline.before if baseline else {}
    found_bytes, is_clean = _check_in_use(device, before)
    before_bytes = max(found_bytes, held_bytes)
    if has_compiled():
        sys.modules["torch._dynamo"].reset()
    if not is_clean:  # garbage is seen by a look too; without any there is nothing to collect
        _collect_garbage(device, before)
    release_cached_memory(device)
    seen = is_clean and device.type == "cpu"  # which has no caches: the first look was the proof
    lives = [] if seen else find_live_tensors(device)
    after_bytes = found_bytes if seen else count_allocated_bytes(device, lives)
    above = max(0, after_bytes - baseline_bytes)
    taken = _measure_taken(device)
    reserved_bytes = _compute_growth(taken.reserved, baseline.taken.reserved) if baseline else None
    pooled_bytes = max(0, taken.pools - (baseline.taken.pools if baseline else 0))
    leaks = _find_leaks(lives, before)
    leaked_bytes = sum(leak.bytes for leak in leaks)
    if baseline is None:
        leaked_bytes = min(leaked_bytes, above)
    residual_bytes = max(0, above - leaked_bytes)
    return ReleaseFacts(
        baseline_bytes=baseline_bytes,
        before_bytes=before_bytes,
        after_bytes=after_bytes,
        released_bytes=max(0, before_bytes - after_bytes),
        residual_bytes=residual_bytes,
        leaked_bytes=leaked_bytes,
        ok=not leaked_bytes and not pooled_bytes and bool(residual_bytes or not reserved_bytes),
        owners=_describe_owners(leaks) if leaked_bytes else (),
        reserved_bytes=reserved_bytes,
        kept=_list_unreturned(taken, baseline.taken, residual_bytes, pooled_bytes)
        if baseline
        else (),
    )


def read_in_use_bytes(name: str) -> int:
    """Return what an allocator counts in use on the device; 0 where there is none that does."""
    return make_allocator(torch.device(name)).read().get("allocated", 0)


def measure_held_memory(
    device: torch.device | str, mine: Iterable[Tensor], *, baseline_bytes: int
) -> ReleaseFacts:
    """Return what the objects of somebody else's loop still hold, once caches are released: nothing
    of it is a leak. mine: tensors of the models and optimizers that are known; the largest holders
    of others are named. baseline_bytes: in use before the loop.

    released: what goes back to the driver. Compiled code and workspaces are left as they are.
    """
    device = torch.device(device)
    if is_broken(device):
        return _report_broken_device(device, baseline_bytes)
    source = make_allocator(device)
    reserved = source.read().get("reserved", 0)
    my_storages = {storage._cdata for tensor in mine for storage in find_storages(tensor)}
    in_use, mine_bytes, others = _find_held(device, my_storages)
    if in_use - mine_bytes >= MIB:  # perhaps by what a collection frees, which takes a while
        gc.collect()
        in_use, mine_bytes, others = _find_held(device, my_storages)
    others_bytes = sum(one.bytes for one in others)
    return ReleaseFacts(
        baseline_bytes=baseline_bytes,
        before_bytes=in_use,
        after_bytes=in_use,
        released_bytes=max(0, reserved - source.read().get("reserved", 0)),
        residual_bytes=max(0, in_use - mine_bytes - others_bytes),
        leaked_bytes=0,
        ok=True,
        owners=_describe_owners([one for one in others if one.bytes >= MIB][:OWNERS_TOLD]),
        reserved_bytes=source.read().get("reserved"),
        held_bytes=(mine_bytes, others_bytes),
    )


def _find_held(device: torch.device, mine: set[int]) -> tuple[int, int, list[_Leak]]:
    """Return what is in use, the part of it in these storages, and who holds the others."""
    drop_cache(device)
    lives = find_live_tensors(device)
    storages = _find_leaks(lives, {})
    others = [one for one in storages if one.ways[0].key not in mine]
    mine_bytes = sum(one.bytes for one in storages) - sum(one.bytes for one in others)
    return count_allocated_bytes(device, lives), mine_bytes, others


def _measure_taken(device: torch.device) -> TakenMemory:
    source = make_allocator(device)
    space = source.read_space()
    return TakenMemory(
        reserved=source.read().get("reserved"),
        pools=count_pool_bytes(device),
        pinned=count_pinned_bytes(device),
        driver=None
        if space is None or space.free_bytes is None
        else space.total_bytes - space.free_bytes,
    )


def _compute_growth(now: int | None, before: int | None) -> int | None:
    return None if now is None else max(0, now - (before or 0))


def _list_unreturned(
    now: TakenMemory, before: TakenMemory, residual_bytes: int, pools_bytes: int
) -> tuple[UnreturnedMemory, ...]:
    """Return by name what is above the baseline, beside tensors that somebody holds."""
    reserved_bytes = _compute_growth(now.reserved, before.reserved) or 0
    driver_bytes = _compute_growth(now.driver, before.driver) if before.driver is not None else None
    sizes = {
        "workspaces of libraries": residual_bytes,
        "private pools of graphs": pools_bytes,
        "pinned host memory": _compute_growth(now.pinned, before.pinned) or 0,
        # Kernels are loaded when they are first used; of another process nobody can tell it apart.
        "the driver's context, or other processes": (driver_bytes or 0) - reserved_bytes,
    }
    return tuple(UnreturnedMemory(name, size) for name, size in sizes.items() if size > 0)


def _report_broken_device(device: torch.device, baseline_bytes: int) -> ReleaseFacts:
    in_use = count_allocated_bytes(device)  # by PyTorch's own books
    return ReleaseFacts(
        baseline_bytes=baseline_bytes,
        before_bytes=in_use,
        after_bytes=in_use,
        released_bytes=0,
        residual_bytes=max(0, in_use - baseline_bytes),
        leaked_bytes=0,
        ok=False,
        broken=f"{device} answers nothing but errors since the one that ended the run; what this "
        "process has there is given back when it ends, and another one can use it",
    )


def has_compiled() -> bool:
    """Return whether this process compiled a model, or tried to. A forecast imports the compiler
    without using it, and its reset would then import the rest: 704 modules on a CUDA build."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"])


def _collect_garbage(device: torch.device, before: dict[int, int]) -> None:
    """Collect garbage; again where something is left, since a collection does nothing while one of
    another thread is under way (CPython, `gcstate->collecting`)."""
    for _ in range(COLLECTIONS):
        gc.collect()
        if _check_in_use(device, before)[1]:
            return
        time.sleep(PAUSE_S)


def _check_in_use(device: torch.device, before: dict[int, int]) -> tuple[int, bool]:
    """Return the bytes in use, and whether nothing new is; in a function, so that what it saw
    can be freed."""
    lives = find_live_tensors(device)
    return count_allocated_bytes(device, lives), not _find_leaks(lives, before)


@dataclass(frozen=True, eq=False, slots=True)
class _Leak:
    """One storage too many, and all ways to reach it; those with a Python holder first."""

    bytes: int
    ways: tuple[LiveTensor, ...]


def _find_leaks(lives: list[LiveTensor], before: dict[int, int]) -> list[_Leak]:
    ways: dict[int, list[LiveTensor]] = defaultdict(list)
    for live in lives:
        if live.bytes > before.get(live.key, 0):
            ways[live.key].append(live)
    leaks = [
        _Leak(group[0].bytes - before.get(key, 0), tuple(sorted(group, key=_rank_directness)))
        for key, group in ways.items()
    ]
    return sorted(leaks, key=lambda leak: -leak.bytes)


def _rank_directness(live: LiveTensor) -> int:
    return ("", GRADIENT, SAVED).index(live.relation)


def _describe_owners(leaks: list[_Leak]) -> tuple[Owner, ...]:
    holders = Holders(ours=(LiveTensor, _Leak))
    with torch._C.DisableTorchFunction():
        return tuple(_describe_owner(leak, holders) for leak in leaks[:MOST_OWNERS])


def _describe_owner(leak: _Leak, holders: Holders) -> Owner:
    for live in leak.ways:
        if (held_by := _describe_holder(live, holders)) is not None:
            return _make_owner(live.tensor, leak.bytes, held_by)
    return _make_owner(leak.ways[0].tensor, leak.bytes, NO_HOLDER)


def _describe_holder(live: LiveTensor, holders: Holders) -> str | None:
    if not live.relation:
        return holders.find_holder(live.tensor)
    above = holders.find_holder(live.of)
    if above is None:
        return None
    name = type(live.of).__name__
    what = f"{name} {_read_shape(live.of)}" if isinstance(live.of, Tensor) else name
    role = "as its gradient" if live.relation == GRADIENT else "for its backward pass"
    return f"{what} {role}, held by {above}"


def _make_owner(tensor: Tensor, size_bytes: int, held_by: str) -> Owner:
    return Owner(
        kind=type(tensor).__name__,
        shape=_read_shape(tensor),
        dtype=str(tensor.dtype).removeprefix("torch."),
        bytes=size_bytes,
        held_by=held_by,
    )


def _read_shape(tensor: Any) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in Tensor.size(tensor))
    except RuntimeError:  # a nested tensor has none
        return ()


class LeakError(RuntimeError):
    """Memory was not given back. `facts` are what was measured."""

    def __init__(self, facts: ReleaseFacts) -> None:
        super().__init__(facts)
        self.facts = facts

    def __str__(self) -> str:
        return (
            f"memory.on_leak: {describe_leak(self.facts)}. Let go of it there, or set "
            "memory.on_leak to warn"
        )


def make_release_metrics(facts: ReleaseFacts) -> dict[str, float]:
    """Return the metrics, under the names of the run record."""
    if facts.held_bytes is not None:
        return _make_held_metrics(facts, *facts.held_bytes)
    metrics = {
        "memory/baseline_mib": facts.baseline_bytes / MIB,
        "memory/release_ok": float(facts.ok),
    }
    if facts.broken:
        return metrics
    metrics |= {
        "memory/released_mib": facts.released_bytes / MIB,
        "memory/residual_mib": facts.residual_bytes / MIB,
        "memory/leaked_mib": facts.leaked_bytes / MIB,
    }
    if facts.reserved_bytes is not None:
        metrics["memory/reserved_residual_mib"] = facts.reserved_bytes / MIB
    return metrics


def _make_held_metrics(facts: ReleaseFacts, mine: int, others: int) -> dict[str, float]:
    metrics = {"memory/held_mib": mine / MIB, "memory/held_beside_mib": others / MIB}
    if facts.reserved_bytes is None:  # a device without a pool: nothing was cached, or residual
        return metrics
    return metrics | {
        "memory/baseline_mib": facts.baseline_bytes / MIB,
        "memory/released_mib": facts.released_bytes / MIB,
        "memory/residual_mib": facts.residual_bytes / MIB,
    }


def describe_leak(facts: ReleaseFacts) -> str:
    """Describe how much was not given back, and the largest owners."""
    if not facts.leaked_bytes:
        kept = "; ".join(f"{kept.name} {_format_size(kept.bytes)}" for kept in facts.kept)
        reserved = _format_size(facts.reserved_bytes or 0)
        return f"{reserved} stay reserved ({kept or 'nobody tells why'})"
    owners = [_describe_lost(owner) for owner in facts.owners[:OWNERS_TOLD]]
    if len(facts.owners) > OWNERS_TOLD:
        owners.append(f"and {len(facts.owners) - OWNERS_TOLD} more")
    return f"{_format_size(facts.leaked_bytes)} were not given back: {'; '.join(owners)}"


def _describe_lost(owner: Owner) -> str:
    return f"{owner.kind} {owner.shape} {owner.dtype}, held by {owner.held_by}"


def _format_size(size_bytes: int) -> str:
    if size_bytes < MIB // 10:
        return f"{size_bytes:,} bytes"
    return f"{size_bytes / MIB:.1f} MiB"
