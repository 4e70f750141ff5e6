"""Forecast against measured, in a table: what tensors hold and the allocator reserves on a GPU,
for the built-in models, three batch sizes, two precisions, two optimizers, with and without a
recorded step; and for models as users write them (nets.py), in two precisions.
`python -m benchmarks.forecast [MODEL ...]` prints the table and keeps it.
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.conditions import publish
from benchmarks.nets import NETS
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.run_config import RunConfig
from headroom.training import choose_step
from headroom.training.plan import make_plan
from headroom.training.plan_forecast import forecast_training
from headroom.training.trainer import train
from headroom.watch.leaks import release_device_memory, take_baseline
from headroom.watch.memory_meter import MIB

STEPS = 130  # after which a graph was tried


@dataclass(frozen=True)
class Case:
    """A model on some data."""

    data: dict[str, Any]
    args: dict[str, Any]
    batch_sizes: tuple[int, ...]
    ways: tuple[tuple[str, str, str], ...] = tuple(  # precision, optimizer, train.compile
        (precision, optimizer, mode)
        for precision, optimizer, mode in itertools.product(
            ("fp32", "fp16"), ("adamw", "sgd"), ("off", "auto")
        )
        if (precision, mode) != ("fp16", "auto")  # never recorded: a scaler decides on the host
    )


PLAIN = (("fp32", "adamw", "off"), ("bf16", "adamw", "off"))
TABLE = {"source": "synthetic", "args": {"rows": 6000, "features": 64}}
CASES = {
    "linear": Case(
        {"source": "synthetic", "args": {"rows": 6000, "features": 300}}, {}, (64, 512, 2048)
    ),
    "mlp": Case(
        {"source": "synthetic", "args": {"rows": 6000, "features": 128}},
        {"hidden": [512, 512]},
        (64, 512, 2048),
    ),
    "cnn": Case({"source": "digits"}, {"width": 16}, (64, 128, 256)),
    "transformer": Case(
        {"source": "text", "args": {"context": 32}}, {"width": 64, "layers": 2}, (8, 32, 64)
    ),
    "transformer 256": Case(
        {"source": "text", "args": {"context": 256}}, {"width": 128, "layers": 3}, (16,), PLAIN
    ),
    "mlp 12 deep": Case(TABLE, {"hidden": [512] * 12}, (512,), PLAIN),
    **{f"benchmarks.nets:{name}": Case(TABLE, {}, (512,), PLAIN) for name in NETS},
}


def main(models: list[str]) -> int:
    """Measure, print, keep; 1 where a figure is further off than 5 % (held) or 10 % (reserved)."""
    if not torch.cuda.is_available():
        print("benchmarks.forecast: left out, it needs a CUDA device")
        return 0
    choose_step.GRAPH_BELOW_S = math.inf  # also where this machine is slow
    worst = {"held": 0.0, "reserved": 0.0}
    publish("forecast", "Forecast against measured", _table(models or list(CASES), worst))
    return int(worst["held"] > 0.05 or worst["reserved"] > 0.1)


def _table(models: list[str], worst: dict[str, float]) -> Iterator[str]:
    yield from ("", "In MiB, forecast / measured; bars: 5 % of what is held, 10 % of what is")
    yield from (
        "reserved.",
        "",
        "| model | batch | precision | optimizer | graph | held | | reserved | |",
        "|---|--:|---|---|---|--:|--:|--:|--:|",
    )
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            for line, off in _rows(model, CASES[model], Path(folder)):
                yield line
                worst |= {name: max(worst[name], off[name]) for name in worst}
    yield from ("", f"furthest off: held {worst['held']:.1%}, reserved {worst['reserved']:.1%}")


def _rows(model: str, case: Case, folder: Path) -> Iterator[tuple[str, dict[str, float]]]:
    source = dict(case.data)
    if source["source"] == "text":
        text = folder / "text.txt"
        text.write_text("a text of some length, to be learnt by heart. " * 1500)
        source["path"] = str(text)
    for size, (precision, optimizer, mode) in itertools.product(case.batch_sizes, case.ways):
        config = RunConfig.model_validate(
            {
                "device": {"name": "cuda"},
                "data": {**source, "cache": str(folder / "data")},
                "model": {"name": model.split()[0], "args": case.args},
                "optim": {"name": optimizer},
                "train": {"batch_size": size, "precision": precision, "compile": mode},
            }
        )
        yield _row(model, config, folder)


def _row(model: str, config: RunConfig, folder: Path) -> tuple[str, dict[str, float]]:
    device, data = detect_best_device("cuda"), prepare_dataset(config.data)
    a_whole = math.ceil(data.train_rows / config.train.batch_size)
    epochs = math.ceil(STEPS / a_whole) if config.train.compile == "auto" else 1
    config = config.model_copy(update={"train": config.train.model_copy(update={"epochs": epochs})})
    before = take_baseline(device.name)
    told = forecast_training(make_plan(config, device, data))
    facts = train(make_plan(config, device, data), folder=folder, log=lambda metrics, step: None)
    release_device_memory(device.name, baseline_bytes=before.bytes)
    told = told.graphed if told.graphed is not None else told
    assert told.reserved_bytes is not None
    pairs = {
        "held": (told.peak_bytes, facts.metrics["memory/run_peak_allocated_mib"]),
        "reserved": (told.reserved_bytes, facts.metrics["memory/run_peak_reserved_mib"]),
    }
    cells = [
        model.removeprefix("benchmarks.nets:"),
        str(config.train.batch_size),
        config.train.precision,
        config.optim.name,
        "yes" if config.train.compile == "auto" and told.phases.get("recording") else "no",
    ]
    off = {}
    for name, (forecast_bytes, measured_mib) in pairs.items():
        forecast_mib = forecast_bytes / MIB
        off[name] = abs(forecast_mib / measured_mib - 1)
        cells += [f"{forecast_mib:.1f} / {measured_mib:.1f}", f"{off[name]:.1%}"]
    return f"| {' | '.join(cells)} |", off


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
