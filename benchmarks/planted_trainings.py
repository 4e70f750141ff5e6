"""The causes of benchmarks/planted_causes.py that can be said in settings and code of a user's, as
trainings of Headroom's own: a data set, a loader, a model, an optimizer that is slow.

`python -P -c "from benchmarks.planted_trainings import main; main()" NAME --out FILE [--without]`
trains one; FILE gets its truth and its run. The own clock is from the first to the last step of the
optimizer, and around what is planted where that is in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
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
BATCH, SECONDS = 16, 8.0
Settings = dict[str, dict[str, Any]]


class _Clock:
    """From the first to the last step; planted_s: what the planted code took."""

    def __init__(self) -> None:
        self.steps, self.first_s, self.last_s, self.planted_s = 0, 0.0, 0.0, 0.0

    def note_step(self, *_: object) -> None:
        self.last_s = perf_counter()
        self.first_s = self.first_s or self.last_s
        self.steps += 1

    def make_truth(self) -> Truth:
        loop_s, steps = self.last_s - self.first_s, max(0, self.steps - 1)
        return Truth(steps=steps, rows=steps, loop_s=loop_s, planted_s=self.planted_s)


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


def make_net(width: int = 16) -> nn.Module:
    """Return the net of the loops by hand."""
    return make_cnn(width)


class Narrow(nn.Sequential):
    """Forty narrow layers."""

    def __init__(self) -> None:
        layers = [m for _ in range(40) for m in (nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU())]
        pool = (nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 16))
        super().__init__(*pool, *layers, nn.Linear(16, 10))


class Wide(nn.Sequential):
    """A large first layer, whose checkpoints are large."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(3072, 512), nn.ReLU(), nn.Linear(512, 10))


class ManyScales(nn.Module):
    """Hundreds of small parameters, of which a pass takes one sum."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(64)) for _ in range(300)])
        self.first, self.last = nn.Linear(3072, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.stack([*self.scales]).mean(0)
        scores: Tensor = self.last(self.first(x.flatten(1)) * scale)
        return scores


def make_adam(params: Any, lr: float, is_slow: bool) -> torch.optim.Optimizer:
    """Return Adam, as a loop in Python or in one call."""
    return SlowAdam(params, lr) if is_slow else torch.optim.Adam(params, lr, fused=True)


class Keeper(nn.Module):
    """Keeps something of each pass, with its graph."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3072, 512), nn.Linear(512, 10)
        self.keeps, self.history = keeps, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.flatten(1))
        if self.keeps and self.training:
            self.history.append(hidden.square().mean())
        scores: Tensor = self.last(hidden.relu())
        return scores


class Walker(nn.Module):
    """Walks through all that it has seen, at each pass."""

    def __init__(self, grows: int) -> None:
        super().__init__()
        self.net, self.grows, self.seen = make_cnn(), grows, list[float]()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            began = perf_counter()
            self.seen += [0.0] * self.grows
            sum(value * 0.5 for value in self.seen)
            CLOCK.planted_s += perf_counter() - began
        scores: Tensor = self.net(x)
        return scores


class Late(nn.Module):
    """Takes longer for its forward pass in the process of rank 1."""

    def __init__(self, wait_ms: float) -> None:
        super().__init__()
        self.net, self.wait_ms = make_cnn(), wait_ms

    def forward(self, x: Tensor) -> Tensor:
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
    env: dict[str, str] = field(default_factory=dict)
    others: int = 0


def _settings(
    data: dict[str, Any] | None = None, model: str = "make_net", **sections: Any
) -> Settings:
    args = sections.pop("model_args", {})
    train = {"max_s": SECONDS + 3.0, "epochs": 1000, "batch_size": BATCH, "compile": "off"}
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
    ),
    "checkpoints": Training(
        _settings({"batch": 64}, "Wide", checkpoint={"every_steps": 2}),
        _settings({"batch": 64}, "Wide"),
        _name_cause("checkpoint", "checkpoint", "gain"),
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
    "many_threads": Training(
        _PLAIN,
        _PLAIN,
        _name_cause("threads", "threads", "gain"),
        env={"OMP_NUM_THREADS": "8"},
    ),
    "contention": Training(_PLAIN, _PLAIN, _name_cause("contention", "other", "gain"), others=4),
    "host_leak": Training(
        _settings({"batch": 128, "rows": 6400}, "Keeper", model_args={"keeps": True}),
        _settings({"batch": 128, "rows": 6400}, "Keeper", model_args={"keeps": False}),
        _name_cause("host_leak", "graph|grow|grew|list", ""),
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
    if given.name not in ("many_threads", "contention"):
        torch.set_num_threads(1)
    others: list[bytes] = []
    if training.others and not given.without:
        asks = [sys.executable, "-c", OTHERS_CODE, str(os.getpid()), str(training.others)]
        others = subprocess.run(asks, stdout=subprocess.PIPE, check=True).stdout.split()
    register_optimizer_step_post_hook(CLOCK.note_step)
    from headroom import train

    run = train(training.without if given.without else training.settings)
    for other in others:
        os.kill(int(other), 9)
    given.out.write_text(json.dumps({"truth": asdict(CLOCK.make_truth()), "run": run}, default=str))
