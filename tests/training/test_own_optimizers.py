"""Optimizers as people publish them: those that write by `.data` or keep something beside their
state, those whose steps compute gradients anew, and Muon; held against loops by hand."""

import copy
import importlib
from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headroom.base.facts import TrainFacts
from headroom.data.dataset_batches import draw_row_order
from headroom.data.preparation import load_arrays, prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import OptimConfig, RunConfig
from headroom.training import optim, trainer
from headroom.training.check_training import check_plan
from headroom.training.micro_batches import MemoryExhausted
from headroom.training.optim import TorchOptimizer
from headroom.training.plan import make_plan
from headroom.watch.oom_report import OutOfMemory

CODE = """
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adam, Optimizer

def rows():
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
    return x, (x[:, :1] - x[:, 1:2] ** 2)

class Net(nn.Sequential):
    def __init__(self, input_shape, outputs, bias=True, short=0):
        width = input_shape[0]
        super().__init__(
            nn.Linear(width, 12, bias=bias), nn.Tanh(), nn.Linear(12, outputs, bias=bias))
        self.short = short
    def forward(self, x):
        x = super().forward(x)
        if self.training and 0 < self.short < len(x):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return x

FAILS_AT = []
def run_out():
    if FAILS_AT and FAILS_AT.pop():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

class Lion(Optimizer):
    def __init__(self, params, lr=1e-3): super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state: state["exp_avg"] = torch.zeros_like(p)
                update = state["exp_avg"].lerp(p.grad, 0.1).sign_()
                p.data.add_(update, alpha=-group["lr"])
                run_out()
                state["exp_avg"].data.lerp_(p.grad, 0.01)

class Lookahead(Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})
        self.optimizer = SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]
        self.counter = 0
    def step(self, closure=None):
        self.optimizer.step()
        self.counter += 1
        if self.counter % 2 == 0:
            for group, slow in zip(self.param_groups, self.slow):
                for p, s in zip(group["params"], slow):
                    s.data.add_(p.data - s.data, alpha=0.5)
                    run_out()
                    p.data.copy_(s)

class Counting(SGD):
    count = 0
    def step(self, closure=None):
        self.count += 1
        run_out()
        for group in self.param_groups: group["lr"] /= self.count
        super().step()

class SAM(Optimizer):  # Foret et al. 2021, arXiv:2010.01412; a closure is a must
    def __init__(self, params, base, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base = base(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups
    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.base.param_groups = self.param_groups
    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "it needs a closure"
        every = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            self.state[p]["before"] = p.data.clone()
            p.add_(p.grad * (0.05 / (norm + 1e-12)))
        with torch.enable_grad(): closure()
        for p in every: p.data = self.state[p]["before"]
        self.base.step()

class ScheduleFree(Optimizer):  # SGD of Defazio et al. 2024, arXiv:2405.15682
    def __init__(self, params, lr): super().__init__(params, {"lr": lr, "k": 0, "trains": False})
    def train(self): self.turn(True)
    def eval(self): self.turn(False)
    @torch.no_grad()
    def turn(self, trains):
        for group in self.param_groups:
            for p in group["params"] if group["trains"] != trains and group["k"] else ():
                p.lerp_(self.state[p]["z"], 0.1 if trains else 1 - 1 / 0.9)
            group["trains"] = trains
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["trains"], "call train() before step()"
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, 1 / group["k"])
                p.add_(p.grad, alpha=group["lr"] * (0.9 * (1 - 1 / group["k"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])

def sam(params, lr): return SAM(params, SGD, lr=lr, momentum=0.9)
def sharp(params, lr): return SAM(params, Adam, lr=lr)
class Required(SAM):
    def __init__(self, params, lr): super().__init__(params, SGD, lr=lr)
    def step(self, closure): return super().step(closure)
"""


@pytest.fixture
def mine(own: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    own("mine", CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("mine")


def config_of(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    train = {"max_steps": 6, "batch_size": 16, "precision": "fp32", "keep": "last"}
    return RunConfig.model_validate(
        {
            "model": {"name": "mine:Net", **sections.get("model", {})},
            "data": {"source": "mine:rows", "cache": str(folder.parent / "data")},
            "optim": {"lr": 0.05, "schedule": "constant", **sections["optim"]},
            "train": {**train, **sections.get("train", {})},
            "device": {"name": "cpu"},
        }
    )


def train_with(folder: Path, **sections: dict[str, Any]) -> TrainFacts:
    config = config_of(folder, **sections)
    found = prepare_dataset(config.data, batch_size=config.train.batch_size)
    return trainer.train(
        make_plan(config, detect_best_device("cpu"), found),
        folder=folder,
        log=lambda metrics, step: None,
    )


def read_weights(facts: TrainFacts) -> list[torch.Tensor]:
    return list(torch.load(Path(facts.model_folder) / "weights.pt").values())


@pytest.mark.parametrize("name", ["Lion", "Lookahead", "Counting"])
@pytest.mark.parametrize("first", [True, False])
def test_a_step_of_another_that_ran_out_of_memory_is_not_taken_again(
    mine: Any, name: str, first: bool
) -> None:
    """What it wrote by `.data`, or keeps beside its state, was there twice: Lion 5 % off."""
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    made = TorchOptimizer(getattr(mine, name)(parameters, lr=0.1), parameters, lr=0.1)
    for p in parameters:
        p.grad = torch.ones_like(p)
    if not first:
        made.step()
        made.step()
    mine.FAILS_AT[:] = [True]
    with pytest.raises(MemoryExhausted, match=f"not known what a step of {name} has done"):
        made.step()
        made.step()


def test_a_run_whose_optimizer_ran_out_of_memory_ends_in_words(mine: Any, tmp_path: Path) -> None:
    mine.FAILS_AT[:] = [True, *[False] * 9]
    with pytest.raises(OutOfMemory, match="not tried again: it is not known what a step of Lion"):
        train_with(tmp_path / "a", optim={"name": "mine:Lion"})


def train_by_hand(
    folder: Path, make: Callable[[Any], Any], model: nn.Module, *, calls_closure: bool = False
) -> list[torch.Tensor]:
    """The batches of a run in its order, in a plain loop of six steps."""
    config = config_of(folder, optim={"lr": 0.05})
    arrays = load_arrays(prepare_dataset(config.data, batch_size=16))
    x, y = torch.from_numpy(arrays.train_x.copy()), torch.from_numpy(arrays.train_y.copy())
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    epochs = (draw_row_order(len(x), seed=0, epoch=epoch).split(16) for epoch in range(6))
    for rows in islice(chain.from_iterable(epochs), 6):

        def closure(rows: torch.Tensor = rows) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x[rows]), y[rows])
            loss.backward()
            return loss

        closure()
        optimizer.step(closure) if calls_closure else optimizer.step()
    return [p.detach() for p in model.state_dict().values()]


def make_model(mine: Any, **args: Any) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = mine.Net((6,), 1, **args)
    return made


@pytest.mark.parametrize("name", ["sam", "sharp", "Required"])
def test_a_step_that_needs_its_closure_is_that_of_a_loop_by_hand(
    mine: Any, tmp_path: Path, name: str
) -> None:
    """SAM as published ended in a bare AssertionError at step 1."""
    found = read_weights(train_with(tmp_path / "a", optim={"name": f"mine:{name}"}))
    make = partial(getattr(mine, name), lr=0.05)
    wanted = train_by_hand(tmp_path / "a", make, make_model(mine), calls_closure=True)
    assert all(map(torch.equal, found, wanted)) and len(found) == len(wanted) == 4


def test_a_schedule_free_optimizer_is_judged_by_the_weights_that_it_averages(
    mine: Any, tmp_path: Path
) -> None:
    """Its train() and eval() were never called: it ended at step 1, or, where a factory had called
    train(), in weights that nobody is meant to use."""

    def make(parameters: list[nn.Parameter]) -> Any:
        optimizers.append(mine.ScheduleFree(parameters, lr=0.05))
        optimizers[0].train()
        return optimizers[0]

    facts = train_with(tmp_path / "a", optim={"name": "mine:ScheduleFree"})
    optimizers, model = list[Any](), make_model(mine)
    trained = [p.clone() for p in train_by_hand(tmp_path / "a", make, model)]
    optimizers[0].eval()
    wanted = list(model.state_dict().values())
    found = read_weights(facts)
    assert not any(map(torch.equal, trained, wanted))
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)  # judged once more on the way
    x, y = load_judged(tmp_path / "a")
    loss = nn.functional.mse_loss(model(x), y).item()
    assert facts.metrics["val/loss"] == pytest.approx(loss, rel=1e-5)


def load_judged(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = load_arrays(prepare_dataset(config_of(folder, optim={}).data, batch_size=16))
    return torch.from_numpy(arrays.val_x.copy()), torch.from_numpy(arrays.val_y.copy())


def test_a_closure_that_ran_out_of_memory_gives_the_gradients_of_the_whole_batch(
    mine: Any, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {"optim": {"name": "mine:sam"}}
    short = train_with(tmp_path / "a", model={"args": {"short": 8}}, **sections)
    spared = train_with(tmp_path / "b", train={"accumulate": 2}, **sections)
    assert short.metrics["memory/ooms_recovered"] == 1
    assert all(map(torch.equal, read_weights(short), read_weights(spared)))


def test_an_optimizer_that_goes_on_from_a_checkpoint_keeps_the_one_within(mine: Any) -> None:
    """The momentum of SAM's base began anew, the rates of Lookahead's no longer changed, and its
    slow weights and its count of steps began anew: val/loss 7 % off."""
    for make in (mine.sam, mine.Lookahead):
        weights = [[nn.Parameter(torch.ones(2, 2))] for _ in range(2)]
        one, other = (TorchOptimizer(make(w, lr=0.1), w, lr=0.1) for w in weights)

        def take(made: TorchOptimizer, p: nn.Parameter, lr: float) -> None:
            def closure() -> torch.Tensor:
                p.grad = p.detach().clone()
                return p.sum()

            made.set_lr(lr)
            closure()
            made.step(closure)

        take(one, weights[0][0], 0.1)
        weights[1][0].data.copy_(weights[0][0])
        other.restore(copy.deepcopy(one.state()))
        for made, (p,) in ((one, weights[0]), (other, weights[1])):
            take(made, p, 0.02)
        assert torch.equal(weights[0][0], weights[1][0])
        if make is mine.Lookahead:
            assert other._inner.optimizer.param_groups[0]["lr"] == 0.02  # type: ignore[attr-defined]


def test_fp16_is_refused_where_gradients_are_computed_anew(mine: Any) -> None:
    o = OptimConfig(name="mine:sam")
    with pytest.raises(
        ConfigError, match=r"train\.precision: fp16 scales gradients, and the steps"
    ):
        optim.check_optimizer(o, steps=9, epochs=1, precision="fp16")
    optim.check_optimizer(o, steps=9, epochs=1, precision="bf16")


def test_muon_trains_matrices_as_a_loop_by_hand_does(mine: Any, tmp_path: Path) -> None:
    """It was refused by its name, though optim.name takes the classes of torch.optim."""
    sections: dict[str, Any] = {"optim": {"name": "Muon"}, "model": {"args": {"bias": False}}}
    found = read_weights(train_with(tmp_path / "a", **sections))
    make = partial(torch.optim.Muon, lr=0.05)
    wanted = train_by_hand(tmp_path / "a", make, make_model(mine, bias=False))
    assert all(map(torch.equal, found, wanted)) and len(found) == 2
    frozen = {"args": {}, "freeze": ["*.bias"]}
    assert train_with(tmp_path / "b", optim={"name": "Muon"}, model=frozen).steps == 6


def test_muon_refuses_what_is_no_matrix_before_anything_is_spent(mine: Any, tmp_path: Path) -> None:
    config = config_of(tmp_path, optim={"name": "Muon"})
    plan = make_plan(config, detect_best_device("cpu"), prepare_dataset(config.data))
    words = (
        r"optim\.name: Muon trains matrices only \(got 0\.bias \(12,\), 2\.bias \(1,\)\); freeze"
    )
    with pytest.raises(ConfigError, match=words):
        check_plan(plan)
