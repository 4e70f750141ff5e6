"""The causes of benchmarks/planted_causes.py that can be said in settings and code of a user's, as
trainings of Headroom's own: a data set, a loader, a model, an optimizer that is slow. Checkpoints
at each second step are none, since their files are written beside the steps, nor are threads, of
which a training takes as many as it was found to be fastest with.

`python -P -c "from benchmarks.planted_trainings import main; main()" NAME --out FILE [--without]`
trains one; FILE gets its truth and its run. The own clock is read at each pass of the model, and
around what is planted where that is in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.planted_causes import (
    OTHERS_CODE,
    Cause,
    SlowAdam,
    Truth,
    compute_in_python,
    make_cnn,
)

HERE = "benchmarks.planted_trainings"
BATCH = 16
Settings = dict[str, dict[str, Any]]


class _Clock:
    """When each pass of a training began, and what the planted code had taken until then."""

    def __init__(self) -> None:
        self.passes: list[tuple[float, float]] = []
        self.planted_s = 0.0

    def make_truth(self, rows: int) -> Truth:
        """Return what it says of a training on so many rows a step; the first tenth of the passes
        is left out, which has the checks before a training."""
        passes = self.passes[len(self.passes) // 10 :]
        if not passes:
            return Truth()
        (began_s, before_s), (ended_s, after_s) = passes[0], passes[-1]
        steps = len(passes) - 1
        return Truth(
            steps=steps,
            rows=steps * rows,
            loop_s=ended_s - began_s,
            planted_s=after_s - before_s,
        )


CLOCK = _Clock()


def _spend(*, wait_s: float = 0.0, rounds: int = 0) -> None:
    began = perf_counter()
    if wait_s:
        time.sleep(wait_s)
    if rounds:
        compute_in_python(rounds)
    CLOCK.planted_s += perf_counter() - began


class Images(Dataset[tuple[Tensor, int]]):
    """Made-up images, each of which takes its time."""

    classes = list(range(10))

    def __init__(self, count: int, wait_s: float = 0.0, rounds: int = 0) -> None:
        self._images, self._count = torch.randn(64, 3, 32, 32), count
        self._asked = {"wait_s": wait_s, "rounds": rounds}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: int) -> tuple[Tensor, int]:
        if any(self._asked.values()):
            _spend(**self._asked)  # type: ignore[arg-type]
        return self._images[at % 64], at % 10


class _SlowCollate:
    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    def __call__(self, rows: list[Any]) -> Any:
        if self._rounds:
            _spend(rounds=self._rounds)
        return torch.utils.data.default_collate(rows)


def make_loaders(
    rows: int = 800,
    held: int = 64,
    wait_ms: float = 0.0,
    rounds: int = 0,
    collate: int = 0,
    workers: int = 0,
    batch: int = BATCH,
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return the loaders of training and validation."""
    train = DataLoader(
        Images(rows, wait_ms / 1000, rounds),
        batch,
        shuffle=True,
        num_workers=workers,
        collate_fn=_SlowCollate(collate),
    )
    return train, DataLoader(Images(held), batch)


class Timed(nn.Module):
    """Notes when a pass of the training begins."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            CLOCK.passes.append((perf_counter(), CLOCK.planted_s))
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        """Return the scores of these rows."""
        raise NotImplementedError


class Layers(Timed):
    """One layer after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def compute(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return scores


class Net(Layers):
    """The net of the loops by hand."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(*make_cnn(width))


class Narrow(Layers):
    """Forty narrow layers."""

    def __init__(self) -> None:
        layers = [m for _ in range(40) for m in (nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU())]
        pool = (nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 16))
        super().__init__(*pool, *layers, nn.Linear(16, 10))


class ManyScales(Timed):
    """Hundreds of small parameters, of which a pass takes one sum."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(64)) for _ in range(300)])
        self.first, self.last = nn.Linear(3072, 64), nn.Linear(64, 10)

    def compute(self, x: Tensor) -> Tensor:
        scale = torch.stack([*self.scales]).mean(0)
        scores: Tensor = self.last(self.first(x.flatten(1)) * scale)
        return scores


def make_adam(params: Any, lr: float, is_slow: bool) -> torch.optim.Optimizer:
    """Return Adam, as a loop in Python or in one call."""
    return SlowAdam(params, lr) if is_slow else torch.optim.Adam(params, lr, fused=True)


class Keeper(Timed):
    """Keeps something of each pass, with its graph."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3072, 512), nn.Linear(512, 10)
        self.keeps, self.history = keeps, list[Tensor]()

    def compute(self, x: Tensor) -> Tensor:
        hidden = self.first(x.flatten(1))
        if self.keeps and self.training:
            self.history.append(hidden.square().mean())
        scores: Tensor = self.last(hidden.relu())
        return scores


class Walker(Timed):
    """Walks through all that it has seen, at each pass."""

    def __init__(self, grows: int) -> None:
        super().__init__()
        self.net, self.grows, self.seen = make_cnn(), grows, list[float]()

    def compute(self, x: Tensor) -> Tensor:
        if self.training:
            began = perf_counter()
            self.seen += [0.0] * self.grows
            sum(value * 0.5 for value in self.seen)
            CLOCK.planted_s += perf_counter() - began
        scores: Tensor = self.net(x)
        return scores


class Late(Timed):
    """Takes longer for its forward pass in the process of rank 1."""

    def __init__(self, wait_ms: float) -> None:
        super().__init__()
        self.net, self.wait_ms = make_cnn(), wait_ms

    def compute(self, x: Tensor) -> Tensor:
        if self.wait_ms and self.training and os.environ.get("RANK") == "1":
            time.sleep(self.wait_ms / 1000)
        scores: Tensor = self.net(x)
        return scores


@dataclass(frozen=True)
class Training:
    """Settings that are slow, and what is else in those that are not."""

    settings: Settings
    without: Settings
    cause: Cause
    steps: int = 240  # that are some seconds with the cause; without there are twice as many
    others: int = 0

    def choose(self, *, is_planted: bool) -> Settings:
        """Return the settings with the cause, or without."""
        chosen, steps = (
            (self.settings, self.steps) if is_planted else (self.without, 2 * self.steps)
        )
        return {**chosen, "train": {**chosen["train"], "max_steps": steps}}


def _settings(data: dict[str, Any] | None = None, model: str = "Net", **sections: Any) -> Settings:
    args = sections.pop("model_args", {})
    # An end by steps; at the latest one by the clock.
    train = {"end": "30s", "epochs": 1000, "batch_size": BATCH, "compile": "off"}
    return {
        "data": {"source": f"{HERE}:make_loaders", "args": data or {}},
        "model": {"name": f"{HERE}:{model}", "args": args},
        **sections,
        "train": {**train, **sections.get("train", {})},
    }


def _name_cause(words: str, says: str, of: str = "planted") -> Cause:
    return Cause(lambda play: None, tuple(words.split()), says, of)


_PLAIN = _settings()
_ADAM = {"optim": {"name": f"{HERE}:make_adam"}}
TRAININGS = {
    "slow_dataset": Training(
        _settings({"wait_ms": 1.5}), _PLAIN, _name_cause("data workers", "__getitem__|data ?set")
    ),
    "slow_collate": Training(
        _settings({"collate": 400_000}), _PLAIN, _name_cause("data workers", "collate")
    ),
    "many_workers": Training(
        _settings({"workers": 16, "rows": 384}),
        _settings({"rows": 384}),
        _name_cause("workers", "16|fewer|persistent", "gain"),
    ),
    "few_workers": Training(
        _settings({"rounds": 12_000}),
        _settings({"rounds": 12_000, "workers": 1, "rows": 4000}),
        _name_cause("workers data", "no workers?|num_workers"),
    ),
    "tiny_kernels": Training(
        _settings({"batch": 2}, "Narrow", train={"batch_size": 2}),
        _settings({"batch": 64}, "Narrow", train={"batch_size": 64}),
        _name_cause("launch", "batch|compile|graph", ""),
        steps=900,
    ),
    "evaluations": Training(
        _settings({"held": 800}, train={"eval_every_steps": 10}),
        _settings({"held": 16}),
        _name_cause("eval", "evaluat", "gain"),
    ),
    "slow_optimizer": Training(
        _settings({}, "ManyScales", optim={**_ADAM["optim"], "args": {"is_slow": True}}),
        _settings({}, "ManyScales", optim={**_ADAM["optim"], "args": {"is_slow": False}}),
        _name_cause("optimizer", "foreach|fused|tensors|loop", "gain"),
    ),
    "contention": Training(_PLAIN, _PLAIN, _name_cause("contention", "other", "gain"), others=4),
    "host_leak": Training(
        _settings(
            {"batch": 128, "rows": 6400},
            "Keeper",
            model_args={"keeps": True},
            train={"batch_size": 128},
        ),
        _settings(
            {"batch": 128, "rows": 6400},
            "Keeper",
            model_args={"keeps": False},
            train={"batch_size": 128},
        ),
        _name_cause("host_leak", "graph|grow|grew|list", ""),
        steps=900,
    ),
    "slow_rank": Training(
        _settings({}, "Late", model_args={"wait_ms": 15.0}, launch={"processes": "2"}),
        _settings({}, "Late", model_args={"wait_ms": 0.0}, launch={"processes": "2"}),
        _name_cause("slow_rank", "rank 1", ""),
    ),
    "growing_list": Training(
        _settings({}, "Walker", model_args={"grows": 1500}),
        _settings({}, "Walker", model_args={"grows": 0}),
        _name_cause("slowing python", "grow|slower"),
    ),
    "healthy": Training(
        _settings({}, model_args={"width": 32}),
        _settings({}, model_args={"width": 32}),
        _name_cause("compute", "comput", ""),
    ),
}


def main() -> None:
    """Train one and write what it says."""
    asked = argparse.ArgumentParser()
    asked.add_argument("name", choices=TRAININGS)
    asked.add_argument("--out", type=Path, required=True)
    asked.add_argument("--without", action="store_true")
    given = asked.parse_args()
    training = TRAININGS[given.name]
    if given.name != "contention":
        torch.set_num_threads(1)
    others: list[bytes] = []
    if training.others and not given.without:
        asks = [sys.executable, "-c", OTHERS_CODE, str(os.getpid()), str(training.others)]
        others = subprocess.run(asks, stdout=subprocess.PIPE, check=True).stdout.split()
    from headroom import train

    settings = training.choose(is_planted=not given.without)
    run = train(settings)
    for other in others:
        os.kill(int(other), 9)
    truth = asdict(CLOCK.make_truth(settings["train"]["batch_size"]))
    given.out.write_text(json.dumps({"truth": truth, "run": run}, default=str))
