"""What a user's own code changes, and what its loss is the mean of, makes no difference to the
numbers of a run: rows to validate on stay as they are, a batch that ran out of memory is as new
when it is taken again, and parts of a batch add up to the batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headroom.base.facts import TrainFacts
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.run_config import RunConfig
from headroom.training import trainer
from headroom.training.micro_batches import MemoryExhausted
from headroom.training.optim import TorchOptimizer
from headroom.training.plan import make_plan
from headroom.watch.oom_report import OutOfMemory

Own = Callable[[str, str], None]
CODE = """
import random
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import Dataset

def rows():
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
    return x, (x[:, :1] - x[:, 1:2] ** 2)

class Net(nn.Module):
    def __init__(self, input_shape, outputs, kind="", short=0):
        super().__init__()
        hidden = nn.Linear(input_shape[0], 12)
        self.hidden = spectral_norm(hidden) if kind == "spectral" else hidden
        self.last = nn.Linear(12, outputs)
        self.register_buffer("mean", torch.zeros(input_shape[0]))
        self.kind, self.short, self.calls = kind, short, 0
        self.seen, self.spared = 0, 0

    def forward(self, x):
        if self.kind == "inputs": x.mul_(1.5).sub_(0.1)
        if self.kind == "outside": x = x * 1.5 - 0.1
        if self.training:
            self.calls += self.kind == "number"
            if self.kind == "written": self.mean.mul_(0.9).add_(0.1 * x.mean(0))
            if self.kind == "data": self.mean.data.mul_(0.9).add_(0.1 * x.mean(0) + 0.01)
            if self.kind == "replaced": self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            if self.kind == "python": x = x * (1 + 0.2 * random.random())
            if self.kind == "numpy": x = x * (1 + 0.2 * np.random.rand())
        x = self.last(torch.tanh(self.hidden(x + self.mean * (1 + 0.01 * self.calls))))
        self.seen += 1
        if self.training and 0 < self.short < len(x) and self.seen > self.spared:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return x

class Normed(Net):
    def __init__(self, input_shape, outputs, short=0):
        super().__init__(input_shape, outputs, short=short)
        self.hidden = nn.Sequential(nn.Linear(input_shape[0], 12), nn.BatchNorm1d(12))
        self.spared = 1  # the first look at two rows

class Rectified(Net):
    def __init__(self, input_shape, outputs):
        super().__init__(input_shape, outputs)
        self.hidden = nn.Sequential(nn.ReLU(inplace=True), self.hidden)

class Copied(Rectified):
    def forward(self, x): return super().forward(x.clone())

def loss(outputs, targets): return functional.mse_loss(outputs, targets)
def writing_loss(outputs, targets):
    targets.mul_(0.5)
    outputs.mul_(0.5)
    return functional.mse_loss(outputs, targets)
def half_loss(outputs, targets): return functional.mse_loss(outputs * 0.5, targets * 0.5)
def ranked(outputs, targets): return functional.mse_loss(outputs - outputs.mean(), targets)
def off(outputs, targets): return (outputs - targets).abs().mean()
def writing_off(outputs, targets): return outputs.sub_(targets).abs_().mean()

class Sentences(Dataset):
    classes = list("abcdefg")
    def __init__(self, name="labels", skipped=-100): self.name, self.skipped = name, skipped
    def __len__(self): return 64
    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        tokens = torch.randint(1, 7, (10,), generator=g)
        labels = tokens.roll(-1)
        labels[int(torch.randint(1, 10, (), generator=g)):] = self.skipped
        if self.name == "labels": return {"ids": tokens, "labels": labels}
        return tokens, labels

class Words(nn.Module):
    def __init__(self, tells="logits"):
        super().__init__()
        self.inner = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7))
        self.tells = tells
    def forward(self, ids, labels=None):
        logits = self.inner(ids)
        if labels is None or self.tells == "logits": return {"logits": logits}
        told, labels = (logits[:, :-1], labels[:, 1:]) if self.tells == "next" else (logits, labels)
        return {"logits": logits, "loss": functional.cross_entropy(told.transpose(1, 2), labels)}

def sentences(name="labels", skipped=-100): return Sentences(name, skipped)
def padded(outputs, targets):
    return functional.cross_entropy(outputs.transpose(1, 2), targets, ignore_index=0)
padded.count = lambda targets: (targets != 0).sum()
class Weighed(nn.CrossEntropyLoss):
    def forward(self, outputs, targets): return super().forward(outputs.transpose(1, 2), targets)
weighed = Weighed(torch.arange(1.0, 8.0), ignore_index=0)
"""


def train_own(
    own: Own,
    folder: Path,
    *,
    device: str = "cpu",
    model: str = "mine:Net",
    args: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    **train: Any,
) -> TrainFacts:
    own("mine", CODE)
    config = RunConfig.model_validate(
        {
            "model": {"name": model, "args": args or {}},
            "data": {"source": "mine:rows", "cache": str(folder.parent / "data"), **(data or {})},
            "optim": {"lr": 0.01, **(optim or {})},
            "train": {"epochs": 3, "batch_size": 16, "precision": "fp32", "keep": "last", **train},
            "device": {"name": device},
        }
    )
    found = prepare_dataset(config.data, batch_size=config.train.batch_size)
    return trainer.train(
        make_plan(config, detect_best_device(device), found),
        folder=folder,
        log=lambda metrics, step: None,
    )


def weights(facts: TrainFacts) -> dict[str, torch.Tensor]:
    kept: dict[str, torch.Tensor] = torch.load(Path(facts.model_folder) / "weights.pt")
    return kept


@pytest.mark.parametrize(
    ("writes", "copies"),
    [
        ({"args": {"kind": "inputs"}}, {"args": {"kind": "outside"}}),
        ({"model": "mine:Rectified"}, {"model": "mine:Copied"}),
        ({"loss": "mine:writing_loss"}, {"loss": "mine:half_loss"}),
        ({"metrics": {"off": "mine:writing_off"}}, {"metrics": {"off": "mine:off"}}),
        (
            {"model": "mlp", "loss": "mine:writing_loss"},
            {"model": "mlp", "loss": "mine:half_loss"},
        ),
    ],
)
def test_rows_that_own_code_writes_to_are_there_for_the_next_epoch(
    own: Own, tmp_path: Path, writes: dict[str, Any], copies: dict[str, Any]
) -> None:
    """x.mul_(1.5) in a forward changed the rows to validate on for good: a loss of 2.5e-08 where it
    was 0.0292."""
    one = train_own(own, tmp_path / "one", **writes)
    other = train_own(own, tmp_path / "other", **copies)
    names = {"val/loss", "val/r2", "val/mae"} | {n for n in one.metrics if n.startswith("val/off")}
    assert {n: one.metrics[n] for n in names} == {n: other.metrics[n] for n in names}


@pytest.mark.parametrize(
    "kind", ["", "inputs", "written", "data", "replaced", "spectral", "python", "numpy", "number"]
)
def test_a_batch_that_ran_out_of_memory_is_taken_again_as_it_was(
    own: Own, tmp_path: Path, kind: str
) -> None:
    """Buffers had 9 updates for 8, inputs were changed twice, and random numbers were others."""
    args: dict[str, Any] = {"kind": kind}
    short = train_own(own, tmp_path / "a", args={**args, "short": 8}, max_steps=6)
    spared = train_own(own, tmp_path / "b", args=args, accumulate=2, max_steps=6)
    assert short.metrics["memory/ooms_recovered"] == 1 and short.tags["micro_batch"] == "8"
    for a, b in zip(weights(short).values(), weights(spared).values(), strict=True):
        assert torch.equal(a, b)
    assert short.metrics["val/loss"] == spared.metrics["val/loss"]


def test_a_batch_norm_is_short_of_memory_and_not_of_rows(own: Own, tmp_path: Path) -> None:
    """Halving ended at one row, and told to choose another train.batch_size."""
    fits = train_own(own, tmp_path / "a", model="mine:Normed", args={"short": 3}, batch_size=15)
    assert fits.tags["micro_batch"] == "2"  # and three rows last, since one would be left
    with pytest.raises(OutOfMemory, match="memory") as got:
        train_own(own, tmp_path / "b", model="mine:Normed", args={"short": 1}, batch_size=8)
    assert "a single row over" not in str(got.value), "what to do about too few rows"


TOKENS: dict[str, Any] = {"task": "tokens"}


@pytest.mark.parametrize(
    ("model", "source", "loss"),
    [
        ({}, {}, "auto"),
        ({"tells": "these"}, {}, "auto"),
        ({"tells": "next"}, {}, "auto"),
        ({}, {"skipped": 0}, "mine:padded"),
        ({}, {"skipped": 0, "name": "pair"}, "mine:weighed"),
    ],
)
def test_parts_of_a_batch_weigh_what_their_loss_is_the_mean_of(
    own: Own, tmp_path: Path, model: dict[str, Any], source: dict[str, Any], loss: str
) -> None:
    """Labels that are skipped were counted: train.accumulate 4 moved val/loss by 0.0066."""
    shared: dict[str, Any] = {
        "model": "mine:Words",
        "args": model,
        "data": {"source": "mine:sentences", "args": source, **TOKENS},
        "optim": {"name": "SGD", "lr": 0.5, "args": {"momentum": 0.0}},
        "loss": loss,
    }
    whole = train_own(own, tmp_path / "whole", **shared)
    parts = train_own(own, tmp_path / "parts", accumulate=4, **shared)
    for a, b in zip(weights(whole).values(), weights(parts).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert parts.metrics["val/loss"] == pytest.approx(whole.metrics["val/loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "accumulate", "is_told"),
    [("ranked", 4, True), ("ranked", 1, False), ("loss", 4, False), ("writing_loss", 4, False)],
)
def test_a_loss_that_is_no_mean_over_rows_is_told_where_batches_are_taken_in_parts(
    own: Own, tmp_path: Path, loss: str, accumulate: int, is_told: bool
) -> None:
    facts = train_own(
        own, tmp_path / "run", model="linear", loss=f"mine:{loss}", accumulate=accumulate
    )
    told = [line for line in facts.warnings if "is not the mean over its parts" in line]
    assert bool(told) == is_told and ("micro-batches of 4 rows" in str(told)) == is_told


class _Half(torch.optim.SGD):
    """Runs out of memory after the first of its weights, at some of its steps."""

    failing: tuple[int, ...] = ()
    calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        weights = self.param_groups[0]["params"]
        for i, p in enumerate(weights):
            if i and self.calls in self.failing:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
            p.data.sub_(0.1 * p.grad)
            p.add_(0)  # as other optimizers write: .data counts nothing


def _take(inner: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.grad = torch.ones_like(p)
    TorchOptimizer(inner, parameters, lr=0.1).step()


@torch.no_grad()
def test_half_a_step_is_not_taken_twice() -> None:
    """Weights that were changed before memory ran out were changed again: Adam's loss 11 % off."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    inner = _Half(parameters, lr=0.1)
    inner.failing = (2,)
    _take(inner, parameters)
    with pytest.raises(MemoryExhausted, match="not known what a step of _Half has done"):
        _take(inner, parameters)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "NAdam", "Adagrad"])
def test_state_that_was_half_made_is_made_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare KeyError: 'exp_avg_sq' came of the second attempt."""
    torch.manual_seed(0)
    starts = [torch.randn(3, 2), torch.randn(4)]
    pairs = [[nn.Parameter(start.clone()) for start in starts] for _ in range(2)]
    spared, short = (getattr(torch.optim, name)(parameters, lr=0.1) for parameters in pairs)
    for _ in range(2):
        _take(spared, pairs[0])
    real, calls = torch.zeros_like, []

    def once(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return real(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros_like", once)
        try:
            _take(short, pairs[1])
        except torch.OutOfMemoryError:
            _take(short, pairs[1])
    _take(short, pairs[1])
    for a, b in zip(*pairs, strict=True):
        assert torch.equal(a, b)
