"""The step of this project's training against the loops that a user would pick instead, each with
the same model, rows, optimizer and precision, in one process and in turns.

`python -m benchmarks.throughput [ROUNDS] [--results FOLDER]` prints the tables and keeps them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch

from benchmarks import workloads
from benchmarks.conditions import RESULTS, publish
from benchmarks.floor import floor
from benchmarks.headroom import NO_TRACKER, Tracker, headroom, tracking
from benchmarks.peers import loops
from benchmarks.trial import Reading, Trial, ready
from benchmarks.turns import in_turns, median_ratio, spread
from benchmarks.workloads import Workload
from headroom.device.detection import detect_best_device
from headroom.watch.throughput import find_peak_flops

Run = Callable[[], Reading]
FRAMEWORKS = ("lightning", "accelerate")
GRAPH = "tuned, cuda graph"
ONE_THREAD = ", one thread"
NOTES = """
- The time of a step is that of a whole epoch after a warm-up, validation left out, over its steps.
- ratio: its step over that of the first row, the median of the ratios turn by turn; above 1 the
  first row is faster.
- Threads are what each takes by itself: this project chooses them for its step, all others take
  PyTorch's number, except for the rows that say "one thread".
- tutorial: DataLoader, AdamW and `loss.item()` each step, `mlflow.log_metric` every 10 steps.
  tuned: rows on the device, fused AdamW, images channels last, no wait for the device, no tracking.
  lightning, accelerate: with their MLflow loggers, every 10 steps. headroom: with its tracking.
- floor: the convolutions and matrix products alone.
- Where other programs are at work, a loop on several threads waits for the slowest of them: then
  compare rows of the same number of threads.
"""


@dataclass(frozen=True)
class Bench:
    """Where everything of one benchmark goes."""

    tracker: Tracker
    scratch: Path

    def ours(self, trial: Trial, *, tracked: bool = True) -> Reading:
        tracker = self.tracker if tracked else NO_TRACKER
        return headroom(trial, tracker, self.scratch / "model")


def main(rounds: int, results: Path) -> None:
    """Measure, print, keep."""
    results = results.resolve()
    with tempfile.TemporaryDirectory() as scratch, chdir(scratch):
        publish("throughput", "Throughput", _report(rounds, Path(scratch)), results)


def _report(rounds: int, scratch: Path) -> Iterator[str]:
    yield NOTES.rstrip()
    device = detect_best_device()
    # Two databases: what this project sends late must not lock another's.
    ours, theirs = (f"sqlite:///{scratch}/{name}.db" for name in ("ours", "theirs"))
    can_track = find_spec("mlflow") is not None
    if not can_track:
        yield "- MLflow is not installed: nobody tracks."
    for name in FRAMEWORKS:
        if find_spec(name) is None:
            yield f"- {name} is not installed: its rows are left out."
    with tracking(ours if can_track else None, scratch) as tracker:
        bench = Bench(tracker, scratch)
        chosen = workloads.cpu() if device.kind == "cpu" else workloads.gpu()
        for workload in chosen:
            trial = ready(
                workload,
                device,
                scratch=scratch,
                tracking_uri=theirs if can_track else None,
            )
            if workload is chosen[0]:
                # Imports, and what PyTorch sets up at its first use; each run warms up besides.
                in_turns(_contenders(workload, trial, bench), 0)
            yield from _against_others(workload, trial, bench, min(rounds, workload.rounds))
    yield ""
    yield f"Load at the end: {os.getloadavg()[0]:.1f}"


def _against_others(workload: Workload, trial: Trial, bench: Bench, rounds: int) -> Iterator[str]:
    found = in_turns(_contenders(workload, trial, bench), rounds, warm_up=False)
    yield from _table(workload.name, trial, found, workload.bars)
    top = find_peak_flops(trial.device, trial.precision)
    if workload.mfu_bar is not None and top is not None:
        step_s = median(reading.step_s for reading in found["headroom"])
        mfu = 6 * trial.work / step_s / top.flops_per_s
        yield ""
        yield f"headroom: MFU {mfu:.2f} of {top.flops_per_s / 1e12:.4g} TFLOPS ({top.source}); "
        yield f"bar >= {workload.mfu_bar}."


def _contenders(workload: Workload, trial: Trial, bench: Bench) -> dict[str, Run]:
    runs: dict[str, Run] = {"headroom": partial(bench.ours, trial)}
    absent = {name for name in FRAMEWORKS if find_spec(name) is None}
    if trial.target.type != "cuda":
        absent.add(GRAPH)
    for name in workload.contenders:
        if name not in absent:
            runs[name] = _contender(name, workload, trial, bench)
    return runs


def _contender(name: str, workload: Workload, trial: Trial, bench: Bench) -> Run:
    if name == "lightning":
        from benchmarks.peers.lightning_loop import lightning  # some seconds, and not everywhere

        return partial(lightning, trial)
    if name == "accelerate":
        from benchmarks.peers.accelerate_loop import accelerate

        return partial(accelerate, trial)
    if name == workloads.UNTRACKED:
        return partial(bench.ours, trial, tracked=False)
    if name == "headroom on the CPU":
        few = replace(workload, data=partial(workloads.images, 1_280))
        on_cpu = ready(few, detect_best_device("cpu"), scratch=bench.scratch, tracking_uri=None)
        return partial(bench.ours, on_cpu, tracked=False)
    if name.endswith(ONE_THREAD):
        run = _contender(name.removesuffix(ONE_THREAD), workload, trial, bench)
        return partial(_on_one_thread, run)
    named: Mapping[str, Callable[[Trial], Reading]] = {
        "tutorial": loops.tutorial,
        "tuned": loops.tuned,
        GRAPH: loops.graphed,
        "floor": partial(floor, layout=torch.contiguous_format),
        "floor, channels last": partial(floor, layout=torch.channels_last),
    }
    return partial(named[name], trial)


def _on_one_thread(run: Run) -> Reading:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run()
    finally:
        torch.set_num_threads(before)


def _table(
    title: str, trial: Trial, found: Mapping[str, list[Reading]], bars: Mapping[str, float]
) -> Iterator[str]:
    step_ms = {name: [1000 * r.step_s for r in readings] for name, readings in found.items()}
    first = next(iter(step_ms.values()))
    yield ""
    yield f"## {title}"
    yield ""
    yield f"{len(first)} turns of {trial.steps} steps, {trial.precision}."
    yield ""
    yield "| | ran with | median ms a step | least to most | ratio | bar |"
    yield "|:--|:--|--:|--:|--:|:--|"
    for name, readings in found.items():
        ratio = median_ratio(step_ms[name], first)
        bar = bars.get(name)
        verdict = "" if bar is None else f">= {bar}" + (" **missed**" if ratio < bar else "")
        cells = f"{readings[-1].how} | {spread(step_ms[name], digits=3)} | {ratio:.3f} | {verdict}"
        yield f"| {name} | {cells} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput")
    parser.add_argument("rounds", nargs="?", type=int, default=5, help="turns that count")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to keep them in")
    asked = parser.parse_args()
    main(asked.rounds, asked.results.absolute())
