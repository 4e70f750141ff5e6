"""Where a training computes: its device, with the memory that it may take there, its threads,
stream, arithmetic and random numbers; all is as before when the training is over. It refuses to
begin where not even one row at a time fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from headroom.base import scores
from headroom.base.seeds import seed_everything
from headroom.device.detection import set_matmul_precision
from headroom.device.memory_limit import limit_memory
from headroom.ranks.ranks import Ranks
from headroom.training.admission import Admission, PastRuns, admit_training
from headroom.training.choose_step import set_cpu_threads
from headroom.training.cuda_graph import use_own_stream
from headroom.training.plan import Plan
from headroom.training.shared_model import is_shared_out
from headroom.watch import allocators
from headroom.watch.allocation_log import AllocationLog
from headroom.watch.allocators import release_cached_memory
from headroom.watch.memory_meter import MemoryMeter
from headroom.watch.phases import Stopwatch
from headroom.watch.throughput import PeakFlops, find_peak_flops


@dataclass(frozen=True)
class Place:
    """Where a training computes, with whom, and with what it may start there."""

    device: torch.device
    peak: PeakFlops | None
    admission: Admission
    ledger: AllocationLog
    meter: MemoryMeter
    watch: Stopwatch  # since the set-up began
    past: PastRuns
    ranks: Ranks


@contextmanager
def take_place(plan: Plan, *, past: PastRuns, ranks: Ranks) -> Iterator[Place]:
    """Set this process up for the training on its device, and put all back afterwards: arithmetic,
    threads, stream, random numbers, the memory limit. Raises DeviceError where not even one row at
    a time fits."""
    train, device, watch = plan.settings.train, plan.torch_device, Stopwatch()
    assert plan.model_check is not None, "check_plan comes first"
    if plan.data.task == "multilabel":
        scores.load_sklearn()  # not in the first epoch
    with ExitStack() as stack:
        stack.enter_context(allocators.keep_heap(device))
        stack.enter_context(set_matmul_precision(plan.precision))
        here = ranks.count_most_rows(train.batch_size)
        stack.enter_context(set_cpu_threads(here * plan.model_check.work, device))
        if plan.device.index is not None and device.type != "cpu":
            stack.enter_context(torch.accelerator.device_index(plan.device.index))
        stack.enter_context(use_own_stream(device))
        peak = find_peak_flops(plan.device, plan.precision)
        if device.type != "cpu":
            # What was cached by then is no part of the run, and escapes a limit.
            release_cached_memory(device)
        admission = admit_training(
            plan.with_batch(here),
            past_peak_bytes=past.find_peak_bytes(),
            past_reserved_bytes=past.find_reserved_bytes(),
            past_micro_batch=past.find_micro_batch(),
            is_shared_out=is_shared_out(train, ranks),
        )
        # After the forecasts, which build a model of the user's own as often as memory is short.
        stack.enter_context(seed_everything(train.seed, deterministic=train.deterministic))
        ledger, source = stack.enter_context(
            limit_memory(plan.device, plan.settings.memory.limit_mib)
        )
        meter = MemoryMeter(device, source)  # before the model and the rows: they count too
        yield Place(device, peak, admission, ledger, meter, watch, past, ranks)
