"""The learning rate of each step, held against PyTorch's own schedules."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import OptimConfig, RunConfig
from headroom.training import optim


def choose(best_metric: str) -> Any:
    """What weights are the best by."""
    train = {"best_metric": best_metric, "metrics": {"x": "torch:abs"}}
    return RunConfig.model_validate({"train": train}).train.best


LOSS = choose("val/loss")


def rates(steps: int, *, epoch_steps: int = 1, **settings: Any) -> list[float]:
    at = optim.make_schedule(OptimConfig(**settings), steps=steps, epoch_steps=epoch_steps)
    return [at(step) for step in range(steps)]


def rates_of_torch(
    make: Callable[[torch.optim.Optimizer], LRScheduler], lr: float, steps: int, every: int = 1
) -> list[float]:
    """Of a loop that calls the schedule after every so many steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    schedule, found = make(optimizer), []
    for step in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if (step + 1) % every == 0:
            schedule.step()
    return found


def test_the_rate_rises_then_falls_along_a_cosine() -> None:
    found = rates(110, lr=1.0, warmup=10)
    assert [found[0], found[4], found[9]] == pytest.approx([0.1, 0.5, 1.0])
    assert [found[10], found[60]] == pytest.approx([1.0, 0.5])
    assert 0 < found[109] < 0.001


@pytest.mark.parametrize("least", [0.0, 0.1])
@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_a_rate_that_falls_after_its_warm_up_is_that_of_torch(name: str, least: float) -> None:
    """Not to the bit: theirs is the product of all steps before, ours a function of the step."""

    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        rises = LinearLR(optimizer, start_factor=1 / 3, total_iters=2)
        falls: LRScheduler = CosineAnnealingLR(optimizer, 37, eta_min=0.3 * least)
        if name == "linear":
            falls = LinearLR(optimizer, start_factor=1.0, end_factor=least, total_iters=37)
        return SequentialLR(optimizer, [rises, falls], milestones=[3])

    mine = rates(40, lr=0.3, schedule=name, warmup=3, schedule_args={"min_lr_fraction": least})
    assert mine == pytest.approx(rates_of_torch(make, 0.3, 40), rel=1e-9, abs=1e-12)


def test_the_rate_of_step_is_that_of_a_steplr_called_after_each_epoch() -> None:
    mine = rates(
        60,
        epoch_steps=10,
        lr=0.3,
        schedule="step",
        warmup=0,
        schedule_args={"gamma": 0.5, "step_size": 2},
    )
    theirs = rates_of_torch(lambda o: StepLR(o, step_size=2, gamma=0.5), 0.3, 60, every=10)
    assert mine == theirs and len(set(mine)) == 3


@pytest.mark.parametrize("share", [0.25, 0.5, 0.0])
def test_the_rate_of_one_cycle_is_that_of_torch_to_the_bit(share: float) -> None:
    mine = rates(64, lr=0.3, schedule="one_cycle", warmup=share)

    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return OneCycleLR(
            optimizer, max_lr=0.3, total_steps=64, pct_start=share, cycle_momentum=False
        )

    assert mine == rates_of_torch(make, 0.3, 64)


def test_the_warm_up_of_one_cycle_is_by_itself_that_of_torch() -> None:
    mine = rates(100, lr=0.3, schedule="one_cycle")
    theirs = rates_of_torch(lambda o: OneCycleLR(o, 0.3, 100, cycle_momentum=False), 0.3, 100)
    assert mine == theirs and mine.index(max(mine)) == 29
    assert rates(10, lr=0.3, schedule="one_cycle", warmup=1)[0] == 0.3  # torch divides by 0


def test_a_warm_up_is_five_per_cent_or_as_many_steps_as_are_said() -> None:
    assert rates(100, lr=1.0, schedule="constant")[:6] == [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]
    assert rates(100, lr=1.0, schedule="constant", warmup=2)[:3] == [0.5, 1.0, 1.0]
    assert rates(100, lr=1.0, schedule="constant", warmup=0.01)[:2] == [1.0, 1.0]
    assert set(rates(100, lr=1.0, schedule="constant", warmup=0)) == {1.0}


def test_a_warm_up_of_all_steps_ends_at_the_rate() -> None:
    for name, end in (("cosine", 1.0), ("linear", 1.0), ("one_cycle", 1.0)):
        found = rates(4, lr=1.0, schedule=name, warmup=4)
        assert found[-1] == pytest.approx(end), name


@pytest.mark.parametrize("is_lower", [True, False])
def test_the_rate_of_plateau_is_that_of_torch_to_the_bit(is_lower: bool) -> None:
    drawn = torch.Generator().manual_seed(0)
    values = (5 - torch.arange(60) / 20 + torch.rand(60, generator=drawn)).tolist()
    values = [*values[:20], math.nan, *values[20:]]
    if not is_lower:
        values = [-value for value in values]
    o = OptimConfig(
        lr=0.3, schedule="plateau", warmup=4,
        schedule_args={"factor": 0.5, "patience": 2, "min_lr_fraction": 0.05},
    )  # fmt: skip
    at = optim.make_schedule(
        o, steps=300, best=choose("min:val/x" if is_lower else "max:val/x"), min_delta=0.2
    )
    assert isinstance(at, optim.Plateau)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = ReduceLROnPlateau(
        optimizer, "min" if is_lower else "max", factor=0.5, patience=2, threshold=0.2,
        threshold_mode="abs", min_lr=0.3 * 0.05,
    )  # fmt: skip
    assert [at(step) for step in range(5)] == pytest.approx([0.075, 0.15, 0.225, 0.3, 0.3])
    seen = set()
    for value in values:
        theirs.step(value)
        at.record({"val/loss": 1.0, "val/x": value})
        seen.add(at(250))
        assert at(250) == optimizer.param_groups[0]["lr"]
        kept = json.loads(json.dumps(at.state()))  # as a checkpoint has it
        at = optim.Plateau(
            o, warm_up=4, best=choose("min:val/x" if is_lower else "max:val/x"), min_delta=0.2
        )
        at.restore(kept)
    assert len(seen) > 3 and min(seen) == pytest.approx(0.3 * 0.05)


def test_a_metric_that_is_not_there_is_no_improvement() -> None:
    o = OptimConfig(lr=1.0, schedule="plateau", schedule_args={"patience": 1})
    at = optim.Plateau(o, warm_up=0, best=choose("val/r2"), min_delta=0.0)
    for _ in range(2):
        at.record({"val/loss": 1.0})
    assert at(9) == 0.1


def test_a_plateau_imports_no_compiler() -> None:
    """The constructor of an optimizer of PyTorch does: two seconds at each start."""
    code = (
        "import sys\n"
        "from headroom.settings.run_config import OptimConfig\n"
        "from headroom.training.optim import make_schedule\n"
        "make_schedule(OptimConfig(schedule='plateau'), steps=9).record({'val/loss': 1.0})\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"warmup": 100},
            r"optim\.warmup: must be below the 100 steps of the run \(got 100\); lower it",
        ),
        (
            {"schedule": "step", "schedule_args": {"step_size": 5}},
            r"optim\.schedule_args\.step_size: must be below the 5 epochs of the run, or the rate "
            r"never falls \(got 5\)",
        ),
    ],
)
def test_a_schedule_that_the_run_has_no_room_for_is_refused(
    settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        optim.check_optimizer(OptimConfig(**settings), steps=100, epochs=5)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"schedule": "own:rate", "warmup": 5}, r"warmup: is not for a schedule of your own"),
        ({"warmup": 1.5}, r"must be a share below 1, or a whole number of steps \(got 1.5\)"),
        ({"schedule": "onecycle"}, r"did you mean one_cycle\?"),
        ({"groups": {"head.*": {}}}, r"groups: 'head\.\*' must have lr, weight_decay or both"),
    ],
)
def test_settings_of_a_rate_that_contradict_each_other_are_refused(
    settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        OptimConfig(**settings)
