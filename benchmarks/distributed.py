"""How much faster several processes train one model than one does, on this machine: in turns, each
training in processes of its own, by the speed of its steps after the first epoch.

`python -m benchmarks.distributed [ROUNDS]`
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.conditions import publish
from benchmarks.turns import in_turns
from benchmarks.workloads import images
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.launch.placement import count_processes
from headroom.launch.processes import train_in_processes
from headroom.launch.rank import Job
from headroom.settings.read_settings import make_config
from headroom.settings.run_config import LaunchConfig
from headroom.training import trainer
from headroom.training.admission import PastRuns
from headroom.training.plan import make_plan

ROUNDS = 5
PROCESSES = 2  # on a CPU; else as many as there are GPUs
TRAININGS: dict[str, dict[str, Any]] = {
    "cnn on digits, batch 64": {"model": {"name": "cnn"}, "train": {"epochs": 12}},
    "cnn on digits, batch 256": {
        "model": {"name": "cnn"},
        "train": {"epochs": 20, "batch_size": 256},
    },
    "mlp on digits, batch 64": {"train": {"epochs": 60}},
    "cnn on 3 x 32 x 32 images, batch 64": {
        "model": {"name": "cnn"},
        "train": {"epochs": 3},
    },
    "cnn on 3 x 32 x 32 images, batch 256": {
        "model": {"name": "cnn"},
        "train": {"epochs": 3, "batch_size": 256},
    },
    "mlp of 2 x 1024, batch 512": {
        "model": {"args": {"hidden": [1024, 1024]}},
        "train": {"epochs": 30, "batch_size": 512},
    },
}


def main(rounds: int) -> None:
    """Train in turns, print, keep."""
    publish("distributed", "Several processes that train one model", _lines(rounds))


def _lines(rounds: int) -> Iterator[str]:
    first = detect_best_device()
    count = count_processes(LaunchConfig(processes="auto"), first)
    count = count if first.kind != "cpu" else PROCESSES
    yield f"""
- Samples a second over the steps after the first epoch, median of {rounds} rounds in turns; times
  faster: the median of the rounds' ratios, and the least and the most of them.
- One process takes the threads that it finds fastest, or one. Several share the cores; all batches
  are the same. waits: the share of a step that is left for communication after the backward pass,
  on the first rank.

| training | 1 process | one thread | {count} processes | times faster | than one thread | waits |
|:--|--:|--:|--:|--:|--:|--:|"""
    ways = {"1": (1, False), "1 thread": (1, True), "several": (count, False)}
    with tempfile.TemporaryDirectory() as folder:
        drawn = images(4_000, Path(folder))
        for name, sections in TRAININGS.items():
            sections = {**sections, "data": drawn if "images" in name else {"source": "digits"}}
            yield _row(name, sections, ways, rounds, first.name)


def _row(
    name: str,
    sections: dict[str, Any],
    ways: Mapping[str, tuple[int, bool]],
    rounds: int,
    device: str,
) -> str:
    runs = {way: partial(_in_a_child, sections, *asked, device) for way, asked in ways.items()}
    found = in_turns(runs, rounds, warm_up=False)
    speeds = {way: [run["speed"] for run in runs] for way, runs in found.items()}
    share = median(run["communication"] for run in found["several"])
    shown = " | ".join(f"{median(of):,.0f}" for of in speeds.values())
    ratios = " | ".join(_ratio(speeds["several"], speeds[way]) for way in ("1", "1 thread"))
    return f"| {name} | {shown} | {ratios} | {share:.0%} of a step |"


def _ratio(ours: list[float], theirs: list[float]) -> str:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _in_a_child(
    sections: dict[str, Any], processes: int, is_single: bool, device: str
) -> dict[str, float]:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        with os.fdopen(write, "w") as pipe:
            if is_single:
                torch.set_num_threads(1)
            json.dump(_train(sections, processes, device), pipe)
            pipe.flush()
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    found: dict[str, float] = json.loads(said)
    return found


def _train(sections: dict[str, Any], processes: int, device: str) -> dict[str, float]:
    config = make_config(sections)
    data = prepare_dataset(config.data, batch_size=config.train.batch_size, seed=config.train.seed)
    speeds: list[tuple[float, float]] = []
    first_epoch = -(-data.train_rows // config.train.batch_size)

    def log(metrics: dict[str, float], step: int) -> None:
        if step > first_epoch and "speed/samples_per_s" in metrics:
            speeds.append((metrics["speed/samples_per_s"], metrics["speed/steps_per_s"]))

    with tempfile.TemporaryDirectory() as name:
        facts, folder = detect_best_device(device), Path(name)
        if processes == 1:
            trained = trainer.train(make_plan(config, facts, data), folder=folder, log=log)
        else:
            job = Job(config, data, PastRuns(), folder, resumes=False)
            trained = train_in_processes(job, facts, processes=processes, restarts=0, log=log)
    speed, steps = (median(values) for values in zip(*speeds, strict=True))
    communication_ms = trained.metrics.get("time/communication_ms", 0.0)
    return {"speed": speed, "communication": communication_ms * steps / 1000}


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
