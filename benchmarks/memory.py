"""How well this project foretells a training's peak of memory, and what running out of it costs a
training that recovers. Measured with the very trainings its flow runs; on a CPU the limit is one
that is counted.

`python -m benchmarks.memory [ROUNDS]` prints the tables and keeps them in benchmarks/results.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks import workloads
from benchmarks.conditions import publish
from benchmarks.turns import in_turns, spread
from headroom.base.facts import DeviceFacts, TrainFacts
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.read_settings import override_config
from headroom.settings.run_config import RunConfig
from headroom.training import trainer
from headroom.training.plan import make_plan
from headroom.training.plan_forecast import forecast_training
from headroom.watch.allocation_log import MIB

FORECAST_BARS_PCT = {"cpu": 10.0, "cuda": 15.0}
BATCHES = (16, 64, 256)
PEAK = "memory/run_peak_allocated_mib"
# So wide, of so few features, that activations hold most: smaller micro-batches then help.
STARVED: dict[str, Any] = {
    "data": {"source": "synthetic", "args": {"rows": 20_000, "features": 64}},
    "model": {"name": "mlp", "args": {"hidden": [1024, 1024]}},
    "train": {"epochs": 2, "batch_size": 4096, "log_every": 1, "compile": "off"},
}


@dataclass(frozen=True)
class Trained:
    seconds: float
    facts: TrainFacts


def main(rounds: int) -> None:
    """Measure, print, keep."""
    with tempfile.TemporaryDirectory() as scratch:
        publish("memory", "Memory", _report(rounds, Path(scratch)))


def _report(rounds: int, scratch: Path) -> Iterator[str]:
    device = detect_best_device()
    yield from _forecasts(device, scratch)
    yield from _recovery(device, rounds, scratch)


def _forecasts(device: DeviceFacts, scratch: Path) -> Iterator[str]:
    bar = FORECAST_BARS_PCT["cpu" if device.kind == "cpu" else "cuda"]
    yield from ("", f"## The forecast of the peak; bar: {bar:g} %", "")
    yield "| model | batch | forecast MiB | measured MiB | error |"
    yield "|:--|--:|--:|--:|--:|"
    rows = workloads.synthetic(1_000, 784, scratch)
    cases: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
        ("linear", {}, rows),
        ("mlp", workloads.MLP, rows),
        ("cnn", {}, workloads.images(400, scratch)),
        ("transformer", {"layers": 2, "width": 64}, workloads.tokens(400, 64, 256, scratch)),
    ]
    for name, args, data in cases:
        for batch_size in BATCHES:
            config = _config(
                {
                    "data": data,
                    "model": {"name": name, "args": args},
                    "train": {"epochs": 1, "batch_size": batch_size, "log_every": 1},
                },
                scratch,
            )
            told_mib = (
                forecast_training(
                    make_plan(config, device, prepare_dataset(config.data))
                ).peak_bytes
                / MIB
            )
            mib = _trained(_counted(config, device), device, scratch).facts.metrics[PEAK]
            error = 100 * (told_mib / mib - 1)
            yield f"| {name} | {batch_size} | {told_mib:.2f} | {mib:.2f} | {error:+.1f} % |"


def _recovery(device: DeviceFacts, rounds: int, scratch: Path) -> Iterator[str]:
    """Under a limit that a quarter of the batch fits and half of it does not."""
    config = _config(STARVED, scratch)
    batch_size = config.train.batch_size
    peaks = [
        _trained(
            override_config(config, {"train.accumulate": parts}), device, scratch
        ).facts.metrics[PEAK]
        for parts in (1, 2, 4)
    ]
    limited = override_config(config, {"memory.limit_mib": (peaks[1] + peaks[2]) / 2})
    micro_batch = int(_trained(limited, device, scratch).facts.tags["micro_batch"])
    known = override_config(limited, {"train.accumulate": ceil(batch_size / micro_batch)})
    runs = {
        "finds it": partial(_trained, limited, device, scratch),
        "knows it": partial(_trained, known, device, scratch),
    }
    found = in_turns(runs, rounds)
    yield from ("", f"## Out of memory and on: {rounds} turns", "")
    yield f"An mlp of two layers of 1024, batch {batch_size}: peaks of {peaks[0]:.1f} MiB whole,"
    yield f"{peaks[1]:.1f} in halves, {peaks[2]:.1f} in quarters; memory.limit_mib"
    yield f"{limited.memory.limit_mib:.1f}."
    yield ""
    yield "| | s | least to most | times out of memory | micro-batch | highest use MiB |"
    yield "|:--|--:|--:|--:|--:|--:|"
    for name, trained in found.items():
        facts = trained[-1].facts
        ooms = facts.metrics.get("memory/ooms_recovered", 0)
        yield (
            f"| {name} | {spread([run.seconds for run in trained], digits=2)} | {ooms:.0f} | "
            f"{facts.tags['micro_batch']} | {facts.metrics[PEAK]:.1f} |"
        )
    pairs = zip(found["finds it"], found["knows it"], strict=True)
    lost_s = median(finds.seconds - knows.seconds for finds, knows in pairs)
    steps = found["finds it"][-1].facts.steps
    yield from ("", f"Lost to finding it: {lost_s:.2f} s, once in a run (here of {steps} steps).")


def _counted(config: RunConfig, device: DeviceFacts) -> RunConfig:
    """A CPU counts all bytes of a run only where they are limited; else those of watched steps."""
    if device.kind != "cpu" or device.total_bytes is None:
        return config
    return override_config(config, {"memory.limit_mib": device.total_bytes / MIB})


def _config(sections: dict[str, Any], scratch: Path) -> RunConfig:
    data = {**sections["data"], "cache": str(scratch / "data")}
    return RunConfig.model_validate({**sections, "data": data})


def _trained(config: RunConfig, device: DeviceFacts, scratch: Path) -> Trained:
    data = prepare_dataset(config.data)
    began = perf_counter()
    facts = trainer.train(
        make_plan(config, device, data), folder=scratch / "model", log=lambda metrics, step: None
    )
    return Trained(perf_counter() - began, facts)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
