"""What the figures of an evaluation cost a training: the same training with them and with a loss
alone, in turns in one process.

`python -m benchmarks.evaluation [ROUNDS]` prints the table and keeps it in benchmarks/results.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.conditions import publish
from benchmarks.turns import in_turns, median_ratio
from headroom.base import scores
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.run_config import RunConfig
from headroom.training import trainer
from headroom.training.plan import make_plan

WORKLOADS: dict[str, dict[str, Any]] = {
    "digits, 1,438 rows": {"data": {}, "train": {"epochs": 20}},
    "regression, 100,000 rows": {
        "data": {"source": "synthetic", "args": {"classes": 1, "rows": 100_000}},
        "train": {"epochs": 3, "batch_size": 256},
    },
    "12 classes, 100,000 rows": {
        "data": {"source": "synthetic", "args": {"classes": 12, "rows": 100_000}},
        "train": {"epochs": 3, "batch_size": 256},
    },
}
NOTES = """
- An epoch is all of its time: steps, evaluation, log. without: none of the figures that need rows
  is computed; the rows are kept all the same.
- ratio: an epoch with them over one without, the median over the turns.
"""


def main(rounds: int) -> None:
    """Measure, print, keep."""
    with tempfile.TemporaryDirectory() as scratch:
        publish("evaluation", "What the figures of an evaluation cost", _rows(rounds, scratch))


def _rows(rounds: int, scratch: str) -> Iterator[str]:
    yield NOTES.rstrip()
    yield ""
    yield "| | turns | ms of an evaluation with | without | ms of an epoch with | without | ratio |"
    yield "|:--|--:|--:|--:|--:|--:|--:|"
    for name, sections in WORKLOADS.items():
        data = {**sections["data"], "cache": f"{scratch}/data"}
        config = RunConfig.model_validate({**sections, "data": data})
        runs = {on: partial(_epoch, config, Path(scratch), figured=on) for on in (True, False)}
        found = in_turns(runs, rounds)
        epochs = {on: [epoch for _, epoch in turns] for on, turns in found.items()}
        evals = [median(part for part, _ in found[on]) for on in (True, False)]
        whole = [median(epochs[on]) for on in (True, False)]
        cells = " | ".join(f"{1000 * s:.1f}" for s in (*evals, *whole))
        ratio = median_ratio(epochs[True], epochs[False])
        yield f"| {name} | {rounds} | {cells} | {ratio:.3f} |"


def _epoch(config: RunConfig, folder: Path, *, figured: bool) -> tuple[float, float]:
    """Seconds of an evaluation, and of an epoch with it."""
    none: dict[str, Any] = dict.fromkeys(("of_classes", "of_amounts"), lambda *_: {})
    with nullcontext() if figured else patch.multiple(scores, **none):
        facts = trainer.train(
            make_plan(config, detect_best_device("cpu"), prepare_dataset(config.data)),
            folder=folder,
            log=lambda *_: None,
        )
    took = facts.metrics
    steps_s = facts.steps / took["speed/steps_per_s"]
    eval_s, log_s = took["time/eval_s"], took["time/log_s"]
    return eval_s / facts.epochs, (steps_s + eval_s + log_s) / facts.epochs


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
