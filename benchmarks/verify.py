"""Whether `headroom verify` is right: honest runs that must come out equal, a fifth of them long
ones that were gone on with once; runs with one flipped bit, in the run itself or in the training
anew, whose step, tensor and bit must be named; and runs with two flipped sign bits of one tensor,
which must be found. And what the digests of steps cost a training.

`python -m benchmarks.verify [RUNS]` prints the tables and keeps them in benchmarks/results.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from torch import Tensor

from benchmarks.conditions import publish_whole
from headroom.base.event_log import LOG, make_line, read_metric_batches
from headroom.comparison.bit_differences import flip_bit
from headroom.comparison.verification import Flip, verify_run
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.read_settings import dump_yaml
from headroom.settings.run_config import RunConfig
from headroom.training import trainer
from headroom.training.loop import StopRequest
from headroom.training.plan import make_plan
from headroom.training.step_digests import StepDigests, name_tensors
from headroom.training.train_state import TrainState

RUNS = 100  # honest ones, and as many with a flipped bit
STEPS = 30  # of each at most
LONG_STEPS, LONG_EVERY = 110, 5  # each fifth honest run has so many and is interrupted once
# A rate at which the last of many evaluations is seldom the best.
LONG: dict[str, Any] = {
    "train": {"epochs": 5, "max_steps": LONG_STEPS, "log_every": 7, "eval_every_steps": 9},
    "optim": {"lr": 0.1, "schedule": "constant"},
}
PAIRS = 10  # of the flipped ones have two flipped sign bits
AT_ONCE = 1  # processes
WAYS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "dropout": {"model": {"args": {"dropout": 0.3}}},
    "cnn, running statistics": {"model": {"name": "cnn", "args": {"width": 4}}},
    "sgd, momentum, clipping": {"optim": {"name": "sgd", "lr": 0.05, "clip_norm": 0.5}},
    "RMSprop": {"optim": {"name": "RMSprop", "lr": 1e-3}},
    "accumulation": {"train": {"accumulate": 3}},
    "early stopping": {"optim": {"lr": 0.2}, "train": {"patience": 1, "epochs": 6}},
    "the last weights": {"train": {"keep": "last"}},
    "one cycle": {"optim": {"schedule": "one_cycle"}},
    "linear, warm-up": {"optim": {"schedule": "linear", "warmup": 7}},
    "plateau": {
        "optim": {"schedule": "plateau", "schedule_args": {"patience": 0, "factor": 0.5}},
        "train": {"eval_every_steps": 4},
    },
    "averaged weights": {"optim": {"ema_decay": 0.9}, "train": {"eval_every_steps": 9}},
    "frozen parts, groups": {
        "model": {"freeze": ["3"], "args": {"hidden": [32, 16]}},
        "optim": {"groups": {"*.weight": {"lr": 1e-3, "weight_decay": 0.3}}},
    },
    "label smoothing": {"train": {"loss_args": {"label_smoothing": 0.1}}},
    "regression": {
        "data": {"source": "synthetic", "args": {"classes": 1, "rows": 500, "features": 8}}
    },
    "bf16": {"train": {"precision": "bf16"}},
    "own model, own random numbers": {"model": {"name": "verified_nets:draws"}},
    "own attention": {"model": {"name": "verified_nets:attends"}},
    "own recurrent": {"model": {"name": "verified_nets:recurs"}},
    "own BatchNorm": {"model": {"name": "verified_nets:normalizes"}},
}
NETS = """
import random
import numpy as np
import torch
from torch import nn

class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 10)
    def forward(self, x):
        x = x.flatten(1)
        if self.training:
            x = x + random.gauss(0, 0.1) + np.random.normal() * 0.1 + torch.rand(1) * 0.1
        return self.net(x)

class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.out = nn.Linear(64, 10)
    def forward(self, x):
        x = x.flatten(1).view(-1, 8, 8)
        return self.out(self.attention(x, x, x)[0].flatten(1))

class Recurs(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.out = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 10)
    def forward(self, x):
        return self.out(self.net(x.flatten(1).view(-1, 8, 8))[0][:, -1])

def draws(input_shape, outputs): return Draws()
def attends(input_shape, outputs): return Attends()
def recurs(input_shape, outputs): return Recurs()
def normalizes(input_shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))
"""


def main(words: list[str]) -> None:
    """Measure, print, and keep what is whole."""
    runs = int(words[0]) if words else RUNS
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "verified_nets.py").write_text(NETS)
        sys.path.insert(0, scratch)  # of the processes that are begun, too
        lines = _measure(Path(scratch), runs)
        publish_whole("verify", "Whether `headroom verify` is right", lines, is_whole=runs >= RUNS)


def _measure(scratch: Path, runs: int) -> Iterator[str]:
    yield ""
    yield f"- {len(WAYS)} ways to train, at most {STEPS} steps, `train.deterministic`; each "
    yield f"  {LONG_EVERY}th honest run has {LONG_STEPS} steps and was gone on with once."
    yield f"- Processes at once: {AT_ONCE}; what digests cost is measured after them, each second "
    yield "  step with."
    yield "- named: step, tensor and bit are those that were planted (the element is not checked)."
    yield ""
    yield "| | runs | right | wrong |"
    yield "|:--|--:|--:|:--|"
    names = [*WAYS]
    with ProcessPoolExecutor(AT_ONCE, get_context("fork")) as pool:
        jobs = [(scratch, names[i % len(names)], i) for i in range(runs)]
        told = [*pool.map(_check_honest, *zip(*jobs, strict=True))]
        yield _make_row("honest runs that are equal", told)
        long = [scratch / f"honest-{i}" for i in range(0, runs, LONG_EVERY)]
        earlier = [folder for folder in long if _is_best_before_the_end(folder)]
        yield f"| of these: long, gone on with once | {len(long)} | | |"
        yield f"| of those: the best evaluation is not the last | {len(earlier)} | | |"
        for place in ("in the run itself", "in the training anew"):
            is_in_run = place == "in the run itself"
            singles = (runs - PAIRS) // 2
            jobs = [(scratch, names[i % len(names)], 1000 + i) for i in range(singles)]
            told = [*pool.map(partial(_plant, is_in_run=is_in_run), *zip(*jobs, strict=True))]
            yield _make_row(f"one flipped bit {place}, named", told)
        jobs = [(scratch, names[i % len(names)], 2000 + i) for i in range(PAIRS)]
        told = [*pool.map(_plant_pair, *zip(*jobs, strict=True))]
        yield _make_row("two flipped sign bits of a weight in the run itself, named", told)
    yield ""
    yield from _measure_cost(scratch)


def _make_row(what: str, told: list[str]) -> str:
    wrong = [text for text in told if text]
    return f"| {what} | {len(told)} | {len(told) - len(wrong)} | {'; '.join(wrong)} |"


def _check_honest(scratch: Path, way: str, seed: int) -> str:
    """Return what was wrong with a run that nobody touched; empty where it is equal."""
    folder = scratch / f"honest-{seed}"
    if seed % LONG_EVERY:
        _train(folder, WAYS[way], seed=seed)
    else:
        own = WAYS[way]
        chosen = {k: {**LONG.get(k, {}), **own.get(k, {})} for k in {*LONG, *own}}
        chosen["train"] = {**own.get("train", {}), **LONG["train"]}
        stops_at = random.Random(seed).randrange(20, LONG_STEPS - 20)
        _train(folder, chosen, seed=seed, stops_at=stops_at)
        _train(folder, chosen, seed=seed, resumes=True)
    found = verify_run(folder, begin=0 if seed % 2 else None)  # or from its newest checkpoint
    if found.difference is not None or not found.digest_steps:
        return f"{way}, seed {seed}: {found.difference}"
    return ""


def _is_best_before_the_end(folder: Path) -> bool:
    losses: dict[int, float] = {}
    with open(folder / LOG, "rb") as lines:
        for batch, _ in read_metric_batches(lines, 0):
            for name, value, _, step in batch:
                if name == "val/loss":
                    losses.setdefault(step, value)  # the end tells the best once more
    return min(losses, key=lambda step: losses[step]) < max(losses)


def _plant_pair(scratch: Path, way: str, seed: int) -> str:
    """Return what was wrong; empty where two flipped sign bits of one weight were found there."""
    folder = scratch / f"pair-{seed}"
    drawn = random.Random(seed)
    planted = drawn.randrange(3, 12)
    chosen: list[str] = []

    def plant(state: TrainState, step: int, loss: Tensor) -> None:
        if step != planted:
            return
        named = name_tensors(state, loss)
        large = [n for n in named if n.startswith("weight/") and named[n].numel() > 8]
        chosen.append(drawn.choice(large))
        tensor = named[chosen[0]]
        for element in drawn.sample(range(1, tensor.numel(), 2), 2):  # at the ends of their words
            flip_bit(named, chosen[0], element, 8 * tensor.element_size() - 1)

    _train(folder, WAYS[way], seed=seed, plant=plant)
    first = verify_run(folder, begin=0).difference
    if first is None or (first.step, first.tensor) != (planted, chosen[0]):
        return f"{way}, step {planted}, {chosen[0]}: {first}"
    return ""


def _plant(scratch: Path, way: str, seed: int, *, is_in_run: bool) -> str:
    """Return what was wrong; empty where the flip was named."""
    folder = scratch / f"planted-{seed}-{is_in_run}"
    drawn = random.Random(seed)
    chosen: list[Flip] = []

    def plant(state: TrainState, step: int, loss: Tensor) -> None:
        if step != drawn_step or chosen:
            return
        named = name_tensors(state, loss)
        # Each kind as often as the others, of whatever number of tensors it has.
        kinds = sorted({name.partition("/")[0] for name in named})
        kind = drawn.choice(kinds if not is_in_run else [k for k in kinds if k != "loss"])
        name = drawn.choice([n for n in named if n.partition("/")[0] == kind and named[n].numel()])
        tensor = named[name]
        bits = 8 * tensor.element_size()
        element, bit = drawn.randrange(tensor.numel()), drawn.randrange(bits)
        if kind == "random":  # of the generators' words: 32 bits, at the same place in each
            element, bit = drawn.randrange(600), drawn.randrange(32)
            if name == "random/torch":  # 624 words of 8 bytes behind the first 24
                element, bit = 24 + 8 * element + bit // 8, bit % 8
        chosen.append(Flip(step, name, element, bit))
        if is_in_run:
            flip_bit(named, name, element, bit)

    drawn_step = drawn.randrange(3, 12)
    with suppress(Exception):  # a flipped bit of an exponent may end the training
        _train(folder, WAYS[way], seed=seed, plant=plant)
    flip = chosen[0]
    found = verify_run(folder, begin=0, flip=None if is_in_run else flip)
    first = found.difference
    if first is None:
        return f"{way}, {flip} was not found"
    if (first.step, first.tensor) != (flip.step, flip.tensor):
        return f"{way}, {flip} was taken for {first}"
    if f"bit {flip.bit}" not in first.what:
        return f"{way}, {flip} was found without its bit: {first}"
    return ""


def _train(
    folder: Path,
    way: dict[str, Any],
    *,
    seed: int,
    plant: Any = None,
    stops_at: int = 0,
    resumes: bool = False,
) -> None:
    """Train a run as the command keeps it, as far as verify reads it; stops_at: only so far, and
    resumes: from there on."""
    reached = 0
    train = {"epochs": 2, "max_steps": STEPS, "log_every": 4, **way.get("train", {})}
    train |= {"deterministic": True, "seed": seed}
    sections = {**way, "train": train, "device": {"name": "cpu"}}
    sections["data"] = {"cache": str(folder.parent / "data"), **way.get("data", {})}
    sections["checkpoint"] = {"every": "10steps", "keep": 5}
    config = RunConfig.model_validate(sections)
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(dump_yaml(config.model_dump()))
    data = prepare_dataset(config.data, batch_size=config.train.batch_size, seed=seed)
    digests = StepDigests(folder)

    def end_step(state: TrainState, step: int, loss: Tensor) -> None:
        plant(state, step, loss)
        digests.end_step(state, step, loss)

    def check_stop() -> StopRequest | None:
        nonlocal reached
        reached += 1
        return StopRequest("interrupted") if reached == stops_at else None

    with open(folder / LOG, "ab", buffering=0) as log:
        try:
            trainer.train(
                make_plan(config, detect_best_device("cpu"), data),
                folder=folder,
                log=lambda metrics, step: _write(log, metrics, step),
                resumes=resumes,
                check_stop=check_stop,
                end_step=end_step if plant else None,
            )
        finally:
            digests.flush()


def _write(log: Any, metrics: dict[str, float], step: int) -> None:
    log.write(make_line(metrics, step, unix_ms=0))


def _measure_cost(scratch: Path) -> Iterator[str]:
    """Yield the table of what digests cost, taken and not taken in turns."""
    yield "| model | weights | ms a step without digests | with | bytes of digests a step |"
    yield "|:--|--:|--:|--:|--:|"
    ways: dict[str, dict[str, Any]] = {
        "mlp": {},
        "mlp, hidden 1024x1024": {"model": {"args": {"hidden": [1024, 1024]}}},
        "cnn, width 16": {"model": {"name": "cnn", "args": {"width": 16}}},
    }
    for name, way in ways.items():
        times: dict[bool, list[float]] = {True: [], False: []}
        at, weights, size = 0.0, 0, 0
        folder = scratch / f"cost-{name}"
        digests = StepDigests(folder)

        def end_step(state: TrainState, step: int, loss: Tensor) -> None:
            nonlocal at, weights
            weights = sum(p.numel() for p in state.model.parameters())
            takes = step % 2 == 0
            if takes:
                digests.end_step(state, step, loss)  # noqa: B023
            now = perf_counter()
            times[takes].append(now - at)  # noqa: B023
            at = now

        way = {**way, "train": {"epochs": 6, "max_steps": 120}}
        sections = {**way, "train": {**way["train"], "deterministic": True}}
        config = RunConfig.model_validate({**sections, "device": {"name": "cpu"}})
        data = prepare_dataset(config.data)
        trainer.train(
            make_plan(config, detect_best_device("cpu"), data),
            folder=folder,
            log=lambda metrics, step: None,
            end_step=end_step,
        )
        digests.flush()
        size = sum(file.stat().st_size for file in (folder / "digests").iterdir())
        without, with_ = (1000 * median(times[takes][5:]) for takes in (False, True))
        yield f"| {name} | {weights:,} | {without:.2f} | {with_:.2f} | {size * 2 // 120:,} |"


if __name__ == "__main__":
    main(sys.argv[1:])
