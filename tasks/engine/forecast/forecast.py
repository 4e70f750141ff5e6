"""How much device memory a training will take, told before it takes any: of a dry run, what its
tensors hold, and what a caching allocator reserves for them by its rules; see dry_run.py,
caching_allocator.py. It refuses nothing; of what libraries take for themselves it knows cuBLAS's
workspaces alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from tasks.engine.base.facts import DeviceFacts
from tasks.engine.base.field_types import is_import
from tasks.engine.base.import_paths import told_of
from tasks.engine.forecast.dry_run import EVALUATION, SETUP, Peaks, dry_run, workspaces_of
from tasks.engine.memory.allocation_log import LIBRARIES
from tasks.engine.memory.caching_allocator import SMALL_SEGMENT_BYTES, Pool, least_room, rules
from tasks.engine.settings.run_config import FUSED
from tasks.engine.step import own_model
from tasks.engine.step.plan import Plan

POOLED = ("cuda", "rocm", "xpu")  # whose allocators cache as caching_allocator.py tells
# What lies among the small tensors and in no dry run, such as losses that wait to be read: an mlp
# and a transformer took one segment more than their dry runs, and no more.
SPARE_BYTES = SMALL_SEGMENT_BYTES
CUDNN = "without what cuDNN takes for a moment, which it chooses when it runs"
WIDER = (
    1.25  # room where the allocator's settings are not all followed: a margin, of no measurement
)


@dataclass(frozen=True)
class Forecast:
    """Bytes that tensors will take on the device where a training holds most."""

    peak_bytes: int
    reserved_bytes: int | None  # the most that the allocator will hold; None where there is none
    # What has to fit: all but the evaluation, which takes its batches in smaller parts. Below
    # reserved_bytes, since an allocator that runs into a limit gives back what it caches.
    needed_bytes: int
    phase: str  # where the peak lies
    owners: Mapping[str, int]  # bytes there
    phases: Mapping[str, int]  # the most of each
    parameter_bytes: int
    micro_batch: int  # rows
    note: str = ""  # what the forecast could not follow
    graphed: Forecast | None = None  # the same with steps replayed from a graph, where they may be


class Unforeseeable(ValueError):
    """A model or a loss of the user's own that can't run without the bytes of its tensors, or an
    optimizer whose state is not known."""


def forecast(plan: Plan, *, micro_batch: int | None = None) -> Forecast:
    """Return the memory of this training. micro_batch: rows; as train.accumulate says where None.

    Where this PyTorch can't use a device of that kind, the CPU's operations stand in for its own.
    """
    # Here, since entering it imports the compiler: 2 s, once in a process.
    from torch._subclasses.fake_tensor import FakeTensorMode

    config, data, device = plan.settings, plan.data, plan.device
    if config.optim.name not in FUSED:
        raise Unforeseeable(
            f"optim.name: what {config.optim.name} will take cannot be told beforehand"
        )
    rows = micro_batch or plan.micro_batch
    # Built outside, where its constructor may compute; a tensor that it keeps beside its parameters
    # is a real one.
    own = own_model.build(config.model, data) if is_import(config.model.name) else None
    # A loss of the user's own may hold real ones too, such as weights of the classes.
    setting, theirs = ("train.loss", config.train.loss)
    if own is not None:
        setting, theirs = ("model.name", config.model.name)
    untold = None
    try:
        with FakeTensorMode(allow_non_fake_inputs=is_import(theirs)):
            dry = dry_run(plan, rows, own)
    except Exception as error:
        if not is_import(theirs):
            raise
        untold = told_of(error)
    if untold is not None:
        raise Unforeseeable(
            f"{setting}: what {theirs} will take cannot be told beforehand ({untold}); "
            "it needs the values of its inputs"
        )
    told = _told(dry.plain, dry.parameter_bytes, device, rows)
    if dry.convolves and device.kind == "cuda" and torch.backends.cudnn.enabled:
        told = replace(told, note="; ".join(filter(None, (told.note, CUDNN))))
    if dry.graphed is None:
        return told
    return replace(told, graphed=_told(dry.graphed, dry.parameter_bytes, device, rows))


def _told(peaks: Peaks, parameter_bytes: int, device: DeviceFacts, rows: int) -> Forecast:
    libraries_bytes = sum(map(sum, workspaces_of(device).values()))
    phases = {
        phase: most + (0 if phase == SETUP else libraries_bytes)
        for phase, most in peaks.phases.items()
    }
    phase = max(phases, key=lambda name: phases[name])
    owners = dict(peaks.owners)
    if libraries_bytes:
        owners[LIBRARIES] = owners.get(LIBRARIES, 0) + libraries_bytes
    needed_bytes = max(most for phase, most in phases.items() if phase != EVALUATION)
    reserved_bytes = None
    if device.kind in POOLED:
        reserved_bytes = Pool().follow(peaks.events).peak_reserved
        without = peaks.events[: peaks.training]
        needed_bytes = least_room(without, up_to=Pool().follow(without).peak_reserved) + SPARE_BYTES
    note = ""
    if device.kind in POOLED and (unfollowed := rules().unfollowed):
        needed_bytes = int(needed_bytes * WIDER)
        note = (
            f"PYTORCH_ALLOC_CONF: {', '.join(unfollowed)} is not followed: {WIDER:g} times the room"
        )
    return Forecast(
        phases[phase],
        reserved_bytes,
        needed_bytes,
        phase,
        owners,
        phases,
        parameter_bytes,
        rows,
        note,
    )


def largest_micro_batch(plan: Plan, room_bytes: float) -> int | None:
    """Return the largest of batch_size and its halves that fits; None where not even a row does."""
    rows = plan.settings.train.batch_size
    while forecast(plan, micro_batch=rows).needed_bytes > room_bytes:
        if rows == 1:
            return None
        rows = math.ceil(rows / 2)
    return rows
