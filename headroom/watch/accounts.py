"""Accounts for a loop of optimizer steps on one device: where the time of each step goes, phase by
phase, where its memory goes, owner by owner, how fast the loop is, and what it waited for. A loop
drives one object by a few calls and logs what it gives; nothing here changes what is computed, and
nothing waits for the device between two log points.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headroom.base.names import BETWEEN, COUNTED, LOWER_BOUND, OTHER, PhaseKind, list_phases
from headroom.ranks.ranks import Ranks
from headroom.watch.allocation_log import AllocationLog
from headroom.watch.allocators import wait_for_device
from headroom.watch.core_wait import CoreWatch, count_cores
from headroom.watch.holders import find_growing_list
from headroom.watch.layers import Layers
from headroom.watch.memory_by_owner import MemoryByOwner, OwnedTensors
from headroom.watch.memory_meter import MemoryMeter
from headroom.watch.phases import (
    COUNT_EVERY,
    REFERENCE_MULTIPLY_ADDS,
    PhaseClock,
    Phases,
    Stopwatch,
    Watched,
    make_phase_clock,
)
from headroom.watch.sampled_clock import SampledClock
from headroom.watch.stack_samples import StackSampler
from headroom.watch.step_metrics import Blame, Log, StepMetrics, blame_nobody
from headroom.watch.trends import Trends, compute_growth

AFTER = "after"  # the last step, in a loop that was not over by then
# As counted: nets of linear, norm and activation layers, forward and backward (4.0 to 5.4).
OPERATIONS_A_NODE = 4
PASSES = 3  # as many products as in the forward pass, with the two of each in the backward pass
LEAST_KEPT = 30  # tensors that a loop keeps, from which on their list is looked for
HELD = "held"  # looking for what is in use at the end: known, and no part that is worth a name
# Of a training, beside its steps; those that are counted are told where there are any.
PARTS = [p.name for p in list_phases(PhaseKind.TRAINING) if p.name not in ("steps", COUNTED)]


@dataclass(frozen=True)
class LoopFacts:
    """What the accounts have to know of a loop before its first step."""

    last_step: int  # where a speed is told of the whole run, by another
    log_every: int
    learning_rate: Callable[[int], float | None]  # of step 0, 1, ...; None where nobody knows
    speeds: Callable[[float], dict[str, float]] = lambda samples_per_s: {}  # more, from samples/s
    early: tuple[int, ...] = ()  # log points beside those: a loop of an unknown length may be short
    may_count: Callable[[], bool] = lambda: True  # the memory of the step that begins, if it is due
    find_layers: Callable[[], Layers] = Layers  # of what it trains
    may_wait: bool = True  # for the device, once: after the first step, to know what that took


_newest: weakref.ref[Accounts] | None = None


def find_newest_accounts() -> Accounts | None:
    """Return the accounts of the loop that began last in this process, while there is one."""
    return None if _newest is None else _newest()


class Accounts:
    """The accounts of one loop:

    accounts.begin_training(facts)
    for epoch in ...:
        accounts.begin_epoch(epoch, step + 1)
        for x, y in ...:                       # what gives batches calls mark("data_wait")
            with accounts.count_step((x, y)):  # what takes steps calls mark(phase)
                loss, norm = ...
            accounts.end_step(step, loss, norm, rows=len(y))  # the next one begins
        accounts.end_epoch()                   # logs what is not logged yet
        accounts.lap("eval")                   # the time since then was an evaluation's
    accounts.summarize(...)
    """

    def __init__(
        self,
        device: torch.device,
        meter: MemoryMeter,
        ledger: AllocationLog,
        owned: Callable[[], OwnedTensors],
        *,
        log: Log,
        watch: Stopwatch | None = None,
        ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
        clock: PhaseClock | None = None,
    ) -> None:
        """meter: what measures the device's memory, made before anything was put there. owned: what
        belongs to whom, whenever it is asked. log: gets metrics and their step. clock: of a loop
        that does not mark each step."""
        in_use = partial(_read_in_use, meter) if device.type != "cpu" else lambda: None
        self.device, self.log, self.ranks = device, log, ranks
        self.watch, self.cores = watch or Stopwatch(), CoreWatch()
        self.phases = Phases(
            clock or make_phase_clock(device),
            meter,
            MemoryByOwner(ledger, owned, in_use),
            count_every=COUNT_EVERY if device.type == "cpu" else None,
        )
        self.mark = self.phases.mark  # a phase ends
        self.lap = self.watch.lap
        self._facts: LoopFacts | None = None
        self._is_first = True  # no step is done yet
        self.is_log_point = False  # whether the metrics of the step that has begun are logged
        self.steps: StepMetrics | None = None
        self.trends, self.looks = Trends(), StackSampler()
        self.workers: int | None = None  # processes that feed it; None where nobody tells
        self._taken = (0, 0)  # steps, and their rows
        self._passes_seen = 0  # timed steps whose passes were seen, less those whose were not
        self.first_waits_s = 0.0  # for the first batch of each pass over a loader

    @property
    def watched(self) -> Watched:
        """What is measured of the step that has begun."""
        return self.phases.watched

    def begin_training(self, facts: LoopFacts) -> StepMetrics:
        """Prepare for the first step; return the metrics of the steps, which a checkpoint keeps."""
        self._facts = facts
        self.phases.may_count = facts.may_count
        self.phases.accounts.find_layers = facts.find_layers
        self.steps = StepMetrics(
            self.device,
            phases=self.phases,
            watch=self.watch,
            rate=facts.learning_rate,
            speeds=facts.speeds,
            last_step=facts.last_step,
            log=self.log,
            trends=self.trends,
            ranks=self.ranks,
        )
        self.looks.start()
        global _newest
        _newest = weakref.ref(self)
        return self.steps

    def begin_epoch(self, epoch: int, step: int) -> None:
        """Steps of this epoch begin here with this one, after something else."""
        assert self.steps is not None
        self.begin_step(step)
        self.steps.begin(epoch)

    def begin_step(self, step: int, *, is_sampled: bool = False) -> None:
        """This step, counted from 1, begins with the wait for its batch. It need not come to its
        end. is_sampled: its phases are timed."""
        facts = self._facts
        assert facts is not None
        self.is_log_point = (
            step % facts.log_every == 0 or step == facts.last_step or step in facts.early
        )
        self.phases.begin(step, is_log_point=self.is_log_point, is_sampled=is_sampled)

    def skip_step(self) -> None:
        """The step that begins is neither timed nor counted, and no log point."""
        self.is_log_point, self.phases.watched = False, Watched.NOT

    def count_step(self, batch: Sequence[Any]) -> AbstractContextManager[None]:
        """Return what stands around a step on this batch, which counts its memory if it is due."""
        return self.phases.count_memory(batch)

    def end_step(
        self,
        step: int,
        loss: Tensor | None,
        grad_norm: Tensor | None,
        *,
        rows: int,
        blame: Blame = blame_nobody,
        begins_next: bool = True,
        is_counted: bool = False,
    ) -> None:
        """This step is done, and the next one begins. loss: None where nobody tells it. blame: what
        is to blame if its loss is no number. begins_next: no, where the caller begins those that
        are timed. is_counted: its time is in no speed. Raises Diverged."""
        steps, facts = self.steps, self._facts
        assert steps is not None and facts is not None
        steps.add(loss, rows=rows, blame=blame, is_timed=not is_counted)
        if not is_counted:
            self._taken = self._taken[0] + 1, self._taken[1] + rows
        if self._is_first:
            self._is_first = False
            if facts.may_wait:
                wait_for_device(self.device)
            self.phases.restart()
            steps.restart()
            self.lap("first_step")
        if self.is_log_point:
            steps.add_log_point(grad_norm)
        if begins_next:
            self.begin_step(step + 1)

    def add_plain_steps(self, times: Sequence[tuple[float, float]], *, rows: int) -> None:
        """These steps are done, of which nothing was measured within, and which were no log points.
        times: seconds of each, and of those how many it waited for its batch. rows: of all."""
        assert self.steps is not None
        for step_s, wait_s in times:
            self.phases.clock.add_step(step_s, wait_s)
        self.steps.add_plain_steps(len(times), rows=rows)
        self._taken = self._taken[0] + len(times), self._taken[1] + rows

    def end_epoch(self) -> None:
        """Wait for the device and log all there is. Raises Diverged."""
        assert self.steps is not None
        self.phases.clock.end_pass()
        self.steps.drain()

    def note_passes(self, *, are_seen: bool) -> None:
        """A timed step is done, whose passes were seen or not."""
        self._passes_seen += 1 if are_seen else -1

    def is_short_of_memory(self) -> bool:
        """Return whether the allocator had to free its cache at two log points running."""
        return self.phases.meter.is_thrashing()

    def measure_memory(self) -> dict[str, float]:
        """Return peaks and owners, in MiB under the names of the run record. Call it before the
        model is freed."""
        memory = self.phases.meter.summarize()
        peak_mib = memory.get("memory/run_peak_allocated_mib")
        accounts = self.phases.accounts
        if peak_mib is not None and accounts.ledger.misses_kernels:
            memory[LOWER_BOUND] = 1.0
        return {**memory, **accounts.make_metrics(peak_mib=peak_mib)}

    def describe_layers(self) -> dict[str, Any]:
        """Return the bytes by layer at the highest peak of a counted step, as JSON holds them;
        empty where no layer is known."""
        return self.phases.accounts.describe_layers()

    def summarize(
        self,
        *,
        steps: int,
        rows: int,
        replays: int = 0,
        copy_s: float | None = None,
        counted: tuple[int, int] = (0, 0),
    ) -> dict[str, float]:
        """Return the loop's time by part and its mean speed, under the names of the run record.

        steps, rows: that were taken and trained on. replays: steps that a graph replayed, whose
        phases cannot be told apart; the waits for data are then theirs, the other phases those of
        the steps taken plainly. copy_s: of a batch to the device, where that was beside the steps.
        counted: of these steps and rows, those that are no part of the speed.
        """
        assert self._facts is not None
        total_s, clock = self.watch.compute_total_s(), self.phases.clock
        spent = defaultdict(float, self.watch.seconds)
        phase_s = clock.compute_step_seconds()
        timed = max(0, steps - counted[0] - 1)
        if isinstance(clock, SampledClock) and timed:
            for part, wait_s in clock.compute_waits_s().items():
                spent[part] -= wait_s
                spent["steps"] += wait_s
            between_s = max(0.0, spent["steps"] - clock.compute_step_s()) / timed
            # Of steps that were seen from their optimizer on, what was before is no other's.
            where = OTHER if self._passes_seen < 0 else BETWEEN
            phase_s[where] = phase_s.get(where, 0.0) + between_s
        replay_s = clock.compute_step_seconds(replayed=True)
        known_s = sum(spent[part] for part in (*PARTS, HELD, COUNTED))
        steps, rows = steps - counted[0], rows - counted[1]
        known_s += sum(phase_s.values()) * max(0, steps - 1 - replays)
        known_s += sum(replay_s.values()) * replays
        phase_s |= replay_s
        loop_s = spent["first_step"] + spent["steps"]
        samples_per_s = rows / loop_s
        metrics = {
            **{
                phase.metric: 1000 * phase_s[phase.name]
                for phase in list_phases(PhaseKind.STEP)
                if phase.name in phase_s
            },
            **{f"time/{part}_s": spent[part] for part in (*PARTS, "steps")},
            "speed/steps_per_s": steps / loop_s,
        }
        if rows:
            metrics |= {"speed/samples_per_s": samples_per_s, **self._facts.speeds(samples_per_s)}
        if counted[0]:
            metrics[f"time/{COUNTED}_s"] = spent[COUNTED]
        for name, seconds in (
            ("fast_step", clock.compute_fast_step_s()),
            ("reference", clock.compute_reference_s()),
        ):
            if seconds is not None:
                metrics[f"time/{name}_ms"] = 1000 * seconds
        waited = self.cores.read_core_wait()
        if waited is not None:
            metrics["time/core_wait_pct"] = waited.others_pct
            metrics["time/core_wait_own_pct"] = waited.own_pct
        metrics |= self._summarize_work(timed)
        if copy_s is not None:
            metrics["time/h2d_ms"] = 1000 * copy_s  # beside the steps, so that no phase holds it
        if phase_s:
            # Below 0 where phases of sampled steps, times all steps, come to more than there was.
            metrics["time/unaccounted_pct"] = 100 * (total_s - known_s) / total_s
        sampled, error_pct = clock.count_sampled_steps(), clock.compute_error_pct()
        if sampled is not None:
            metrics["time/timed_steps"] = float(sampled)
        if sampled is not None and error_pct is not None:
            metrics["time/phase_error_pct"] = error_pct
        host_bound = clock.compute_host_bound_share()
        if host_bound is not None:
            metrics["time/host_bound_pct"] = 100 * host_bound
        return metrics

    def _summarize_work(self, steps: int) -> dict[str, float]:
        """Return what a step took of the processor, and of what it is made; steps: that are in the
        stopwatch's part of steps."""
        metrics = {}
        if steps:
            metrics["time/step_cpu_ms"] = 1000 * self.watch.cpu_seconds["steps"] / steps
            if self.workers:
                metrics["time/workers_cpu_ms"] = 1000 * self.cores.read_workers_s() / steps
        graph, product_s = self.phases.graph, self.phases.clock.compute_reference_s()
        operations = self.phases.operations or OPERATIONS_A_NODE * graph.nodes
        if operations:
            metrics["time/step_operations"] = float(operations)
        if graph.multiply_adds and product_s is not None:
            products = PASSES * graph.multiply_adds / REFERENCE_MULTIPLY_ADDS
            metrics["time/arithmetic_ms"] = 1000 * products * product_s
        if self.first_waits_s:
            metrics["time/first_waits_s"] = self.first_waits_s
        if self.looks.garbage_s:
            metrics["time/garbage_s"] = self.looks.garbage_s
        limited_pct = self.cores.read_limited_pct()
        if limited_pct is not None:
            metrics["time/core_limited_pct"] = limited_pct
        stalled_pct = self.cores.read_memory_wait_pct()
        if stalled_pct is not None:
            metrics["time/memory_wait_pct"] = stalled_pct
        return metrics

    def summarize_so_far(self) -> dict[str, float]:
        """Return the same while the loop goes on."""
        taken, rows = self._taken
        metrics = self.summarize(steps=taken, rows=rows) if taken > 1 else {}
        return {**metrics, "time/train_model_s": self.watch.compute_total_s()}

    def describe(self) -> dict[str, Any]:
        """Return what a verdict needs beside the metrics, as JSON can hold it: threads, cores and
        workers, the lines of the user's code that were seen, and how steps and memory changed.

        places: by what the loop said that it did, "" where it says nothing, the kind of work that
        was seen most often there, its line, and the share of the looks that saw it there.
        growing_list: where memory grows, what has a tensor of every second step or more. whole_s:
        of the loop, of which once_s, by part, belongs to its end.
        """
        looks = self.looks.summarize()
        growths = {
            "step": self.trends.compute_step_growth(),
            "step_cpu": self.trends.compute_step_growth(by_processor=True),
            "memory": self.trends.compute_memory_growth(),
            "device": self.trends.compute_memory_growth(of_device=True),
        }
        references = self.phases.clock.list_references()
        growths["reference"] = compute_growth(
            [at_s for at_s, _ in references], [seconds for _, seconds in references]
        )
        is_growing = growths["memory"] or growths["device"]
        growing_list = (
            find_growing_list(max(LEAST_KEPT, self._taken[0] // 2)) if is_growing else None
        )
        return {
            "whole_s": self.watch.compute_total_s(),
            "once_s": {"held": self.watch.seconds[HELD]},
            "growing_list": None if growing_list is None else asdict(growing_list),
            "threads": torch.get_num_threads(),
            "cores": count_cores(),
            "workers": self.workers,
            "places": looks.describe(),
            "growth": {name: growth._asdict() for name, growth in growths.items() if growth},
        }


def _read_in_use(meter: MemoryMeter) -> int | None:
    return meter.read_allocator().get("allocated")
