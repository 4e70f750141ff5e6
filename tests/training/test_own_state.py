"""A batch that ran out of memory is taken again as it was, whatever the user's model or loss keeps:
held against a run that never ran out. What cannot be put back ends the training in words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headroom.base.facts import TrainFacts
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.run_config import RunConfig
from headroom.training import trainer
from headroom.training.plan import make_plan
from headroom.watch.oom_report import OutOfMemory

Own = Callable[[str, str], None]
CODE = """
import copy, random
from collections import deque
import numpy as np
import torch
from torch import nn
from torch.nn import functional

def rows():
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
    return x, (x[:, :1] - x[:, 1:2] ** 2)

def run_out(rows, short):
    if 0 < short < rows:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

class Averages:  # a helper of the user's own
    def __init__(self, model): self.shadow = {n: p.detach().clone() for n, p in model.items()}
    def update(self, model):
        for name, p in model.items(): self.shadow[name].data.lerp_(p.detach().cpu(), 0.1)

class Net(nn.Module):
    def __init__(self, input_shape, outputs, kind="", short=0, judged=0):
        super().__init__()
        width = input_shape[0]
        self.online, self.last = nn.Linear(width, 12), nn.Linear(12, outputs)
        self.teacher = copy.deepcopy(self.online).requires_grad_(False)
        self.hidden_teacher = [copy.deepcopy(self.teacher)]
        self.register_buffer("queue", torch.zeros(8, 12))
        self.plain, self.shifted = torch.zeros(12), None
        self.kind, self.short, self.judged, self.calls = kind, short, judged, 0
        self.seen, self.told, self.recent = [], {"mean": 0.0}, deque(maxlen=3)
        self.numpy, self.python = np.random.default_rng(3), random.Random(3)
        self.old_numpy, self.torch = np.random.RandomState(3), torch.Generator().manual_seed(3)
        self.averages = Averages(dict(self.online.named_parameters()))
        self.features = ()

    def move_teacher(self):
        pairs = list(zip(self.teacher.parameters(), self.online.parameters()))
        for t, o in pairs:
            if self.kind == "byol": t.data = t.data * 0.9 + o.data * 0.1
            if self.kind == "moco": t.data.mul_(0.9).add_(o.data, alpha=0.1)
            if self.kind == "dino": t.data.lerp_(o.data, 0.1)
            if self.kind == "counted":
                with torch.no_grad(): t.mul_(0.9).add_(0.1 * o)
            if self.kind == "late" and self.calls > 3:
                with torch.no_grad(): t.mul_(0.9).add_(0.1 * o)

    def forward(self, x):
        kind, extra = self.kind, 0.0
        if kind == "x.data": x.data.mul_(1.5)
        if self.training and torch.is_grad_enabled():
            self.calls += 1
            self.move_teacher()
            mean = 1 + float(x.detach().mean())
            if kind == "clamp":
                for p in self.parameters(): p.data.clamp_(-0.3, 0.3)
            if kind == "scale":
                with torch.no_grad(): self.last.weight.mul_(0.999)
            if kind == "list": self.seen.append(mean); extra = sum(self.seen) / len(self.seen)
            if kind == "dict":
                self.told["mean"] = 0.9 * self.told["mean"] + mean; extra = self.told["mean"]
            if kind == "deque": self.recent.append(x.detach().mean()); extra = sum(self.recent)
            if kind == "numpy": extra = 0.1 * self.numpy.normal()
            if kind == "old numpy": extra = 0.1 * self.old_numpy.normal()
            if kind == "random": extra = 0.1 * self.python.random()
            if kind == "torch": extra = 0.1 * torch.randn(1, generator=self.torch).to(x.device)
            if kind == "object": self.averages.update(dict(self.online.named_parameters()))
            if kind == "hidden":
                for t, o in zip(self.hidden_teacher[0].parameters(), self.online.parameters()):
                    t.data.lerp_(o.data.cpu(), 0.1)
                extra = self.hidden_teacher[0].weight.mean().to(x.device)
            if kind == "object": extra = self.averages.shadow["bias"].mean().to(x.device)
        h = torch.tanh(self.online(x)) + extra
        if self.training and torch.is_grad_enabled():
            told = h.detach()
            if kind == "queue":
                self.queue.data.copy_(torch.cat([told.mean(0, keepdim=True), self.queue[:-1]]))
            if kind == "plain": self.plain.data.mul_(0.9).add_(0.1 * told.mean(0).cpu())
            if kind == "rebound": self.plain = 0.9 * self.plain.to(x.device) + 0.1 * told.mean(0)
            if kind == "lazy":
                if self.shifted is None: self.shifted = torch.zeros(12, device=x.device)
                self.shifted.data.lerp_(told.mean(0), 0.1)
            if kind == "features": self.features = [h, told]
        h = h + 0.1 * torch.tanh(self.teacher(x)) + self.queue.mean(0)
        if self.training:  # else it could not be loaded as it is
            h = h + self.plain.to(x.device) + (0 if self.shifted is None else self.shifted)
        if self.training and (kind != "late" or self.calls > 4): run_out(len(x), self.short)
        elif kind == "judged list": self.seen.append(1)
        if not self.training: run_out(len(x), self.judged)
        return self.last(h)

class Normed(nn.Sequential):
    def __init__(self, input_shape, outputs):
        super().__init__(nn.Linear(*input_shape, 12), nn.BatchNorm1d(12), nn.Linear(12, outputs))

class Wild(nn.Module):  # a loss that keeps something, and runs out of memory after it did
    def __init__(self, kind, short=0):
        super().__init__()
        self.kind, self.short = kind, short
        self.register_buffer("center", torch.zeros(1))
        self.steps, self.history = 0, []
    def forward(self, outputs, targets):
        if outputs.requires_grad:
            told = outputs.detach().mean().to(self.center.device)
            if self.kind == "center": self.center.mul_(0.9).add_(0.1 * told)
            if self.kind == "rebound": self.center = 0.9 * self.center + 0.1 * told
            if self.kind == "steps": self.steps += 1
            if self.kind == "history": self.history.append(float(told))
            run_out(len(outputs), self.short)
        off = self.center + 0.01 * self.steps + sum(self.history[-1:])
        return functional.mse_loss(outputs - off.to(outputs.device), targets)

center, short_center = Wild("center"), Wild("center", 8)
rebound, short_rebound = Wild("rebound"), Wild("rebound", 8)
steps, short_steps = Wild("steps"), Wild("steps", 8)
short_history = Wild("history", 8)

class Called:  # no nn.Module
    def __init__(self, short=0): self.short, self.mean = short, 0.0
    def __call__(self, outputs, targets):
        if outputs.requires_grad:
            self.mean = 0.9 * self.mean + 0.1 * float(outputs.detach().mean())
            run_out(len(outputs), self.short)
        return functional.mse_loss(outputs - self.mean, targets)
called, short_called = Called(), Called(8)
def hungry(outputs, targets):
    if len(outputs) > 8: raise MemoryError
    return functional.mse_loss(outputs, targets)
"""


def train_keeping(
    own: Own,
    folder: Path,
    args: dict[str, Any] | None = None,
    *,
    device: str = "cpu",
    name: str = "mine:Net",
    **train: Any,
) -> TrainFacts:
    own("mine", CODE)
    torch.manual_seed(0)  # of the weights that two rows go through before
    config = RunConfig.model_validate(
        {
            "model": {"name": name, "args": args or {}},
            "data": {"source": "mine:rows", "cache": str(folder.parent / "data")},
            "optim": {"lr": 0.01},
            "train": {
                **{"max_steps": 6, "batch_size": 16, "precision": "fp32", "keep": "last"},
                **train,
            },
            "device": {"name": device},
        }
    )
    found = prepare_dataset(config.data, batch_size=config.train.batch_size)
    return trainer.train(
        make_plan(config, detect_best_device(device), found),
        folder=folder,
        log=lambda metrics, step: None,
    )


def read_weights(facts: TrainFacts) -> dict[str, torch.Tensor]:
    kept: dict[str, torch.Tensor] = torch.load(Path(facts.model_folder) / "weights.pt")
    return kept


RESTORED = [
    *("byol", "moco", "dino", "counted", "queue", "plain", "rebound", "lazy", "x.data"),
    "features",
]
LOST = {
    "clamp": "last.bias|last.weight|online.bias|online.weight",
    "scale": "last.weight",
    "list": "seen",
    "dict": "told",
    "deque": "recent",
    "numpy": "numpy",
    "old numpy": "old_numpy",
    "random": "python",
    "torch": "torch",
    "object": "averages",
    "hidden": "hidden_teacher",
    "late": "teacher.weight",
}


@pytest.mark.parametrize("kind", RESTORED)
def test_what_a_model_keeps_is_put_back_before_a_batch_is_taken_again(
    own: Own, tmp_path: Path, kind: str
) -> None:
    """A teacher that a forward moves was moved twice: weights 0.089 off."""
    short = train_keeping(own, tmp_path / "a", {"kind": kind, "short": 8})
    spared = train_keeping(own, tmp_path / "b", {"kind": kind}, accumulate=2)
    assert short.metrics["memory/ooms_recovered"] == 1 and short.tags["micro_batch"] == "8"
    for a, b in zip(read_weights(short).values(), read_weights(spared).values(), strict=True):
        assert torch.equal(a, b)
    assert short.metrics["val/loss"] == spared.metrics["val/loss"]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("byol", "calls, teacher.bias, teacher.weight"),
        ("queue", "calls, queue"),
        ("features", "calls"),
        ("", "calls"),
    ],
)
def test_state_that_moves_once_a_micro_batch_is_told(
    own: Own, tmp_path: Path, kind: str, names: str
) -> None:
    """A teacher moved eight times a step in place of once, without a word."""
    whole = train_keeping(own, tmp_path / "whole", {"kind": kind})
    assert not [told for told in whole.warnings if "micro-batch" in told]
    parts = train_keeping(own, tmp_path / "parts", {"kind": kind}, accumulate=8)
    (told,) = [told for told in parts.warnings if "once for each micro-batch" in told]
    assert told.startswith(f"model.name: the forward of mine:Net changes {names} in each pass")


def test_norms_and_layers_that_move_nothing_are_not_told(own: Own, tmp_path: Path) -> None:
    """The running means of a norm are those of micro-batches in every loop."""
    parts = train_keeping(own, tmp_path / "parts", name="mine:Normed", accumulate=2)
    assert not [told for told in parts.warnings if "once for each micro-batch" in told]


def test_state_of_a_loss_that_moves_once_a_micro_batch_is_told(own: Own, tmp_path: Path) -> None:
    facts = train_keeping(own, tmp_path / "run", loss="mine:center", accumulate=2)
    assert [told for told in facts.warnings if "train.loss: mine:center changes center in" in told]


@pytest.mark.parametrize("name", ["center", "rebound", "steps", "called"])
def test_what_a_loss_keeps_is_put_back_too(own: Own, tmp_path: Path, name: str) -> None:
    """The centre of DINO's loss, a buffer of an nn.Module, had an update more."""
    short = train_keeping(own, tmp_path / "a", loss=f"mine:short_{name}")
    spared = train_keeping(own, tmp_path / "b", loss=f"mine:{name}", accumulate=2)
    assert short.metrics["memory/ooms_recovered"] == 1
    for a, b in zip(read_weights(short).values(), read_weights(spared).values(), strict=True):
        assert torch.equal(a, b)
    assert short.metrics["val/loss"] == spared.metrics["val/loss"]


@pytest.mark.parametrize("kind", LOST)
def test_what_cannot_be_put_back_ends_the_training_in_words(
    own: Own, tmp_path: Path, kind: str
) -> None:
    """A list had an entry more, a generator had drawn, weights were clamped before the others."""
    args = {"kind": kind, "short": 8}
    words = f"was not taken again: the attempt had changed ({LOST[kind]})\\b"
    with pytest.raises(OutOfMemory, match=words) as got:
        train_keeping(own, tmp_path / "a", args)
    assert "set train.accumulate to 2" in str(got.value)
    assert train_keeping(own, tmp_path / "b", {"kind": kind}, accumulate=2).steps == 6


def test_what_a_loss_keeps_in_a_list_ends_the_training_in_words(own: Own, tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match=r"the attempt had changed train\.loss\.history"):
        train_keeping(own, tmp_path / "a", loss="mine:short_history")


@pytest.mark.parametrize("kind", ["list", "deque", "clamp"])
def test_an_evaluation_is_judged_again_where_it_changes_nothing(
    own: Own, tmp_path: Path, kind: str
) -> None:
    """What a training step changes is no reason to end an evaluation."""
    short = train_keeping(own, tmp_path / "a", {"kind": kind, "judged": 8})
    spared = train_keeping(own, tmp_path / "b", {"kind": kind})
    assert short.metrics["memory/ooms_recovered"] > 0
    assert short.metrics["val/loss"] == pytest.approx(spared.metrics["val/loss"], rel=1e-6)


def test_an_evaluation_that_changed_a_list_is_not_made_again(own: Own, tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match="evaluation.*the attempt had changed seen"):
        train_keeping(own, tmp_path / "a", {"kind": "judged list", "judged": 8})


def test_what_a_loss_of_ones_own_asked_of_the_host_teaches_no_later_run(
    own: Own, tmp_path: Path
) -> None:
    """A MemoryError of the user's loss made the next run begin with the smaller micro-batch."""
    hungry = train_keeping(own, tmp_path / "a", loss="mine:hungry")
    assert hungry.tags["micro_batch"] == "8" and "memory/micro_batch" not in hungry.metrics
    short = train_keeping(own, tmp_path / "b", {"short": 8})
    assert short.tags["micro_batch"] == "8" and short.metrics["memory/micro_batch"] == 8
