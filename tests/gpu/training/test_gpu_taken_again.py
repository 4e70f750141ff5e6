"""What own code changes and what a loss is the mean of makes no difference on a GPU either, held
against the CPU's results; and what a recorded step keeps is given up where memory is short."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headroom.training.optim import TorchOptimizer
from tests.training.test_taken_again import train_own, weights

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
Own = Callable[[str, str], None]
COUNTED = """
from torch.nn import functional
CALLS = []
def loss(outputs, targets):
    CALLS.append(1)
    return functional.mse_loss(outputs, targets)
"""


@pytest.mark.parametrize(
    "case",
    [
        {"args": {"kind": "inputs"}},
        {"model": "mine:Rectified"},
        {"loss": "mine:writing_loss"},
    ],
)
def test_rows_that_own_code_writes_to_are_there_for_the_next_epoch(
    own: Own, tmp_path: Path, case: dict[str, Any]
) -> None:
    found = train_own(own, tmp_path / "gpu", device="cuda", **case).metrics
    expected = train_own(own, tmp_path / "cpu", **case).metrics
    for name in ("val/loss", "val/r2", "val/mae"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4)


@pytest.mark.parametrize("kind", ["inputs", "written", "data", "replaced", "spectral", "python"])
def test_a_batch_that_ran_out_of_memory_is_taken_again_as_it_was(
    own: Own, tmp_path: Path, kind: str
) -> None:
    args: dict[str, Any] = {"kind": kind}
    there: dict[str, Any] = {"device": "cuda", "max_steps": 6}
    short = train_own(own, tmp_path / "a", args={**args, "short": 8}, **there)
    spared = train_own(own, tmp_path / "b", args=args, accumulate=2, **there)
    assert short.metrics["memory/ooms_recovered"] == 1
    for a, b in zip(weights(short).values(), weights(spared).values(), strict=True):
        assert torch.equal(a, b)


def test_a_loss_of_ones_own_is_never_replayed(own: Own, tmp_path: Path) -> None:
    """What Python decided in it was frozen: 26 calls for 243, a loss of 0.013 for 1.058."""
    own("counting", COUNTED)
    long: dict[str, Any] = {"model": "mlp", "loss": "counting:loss", "epochs": 60}
    facts = train_own(own, tmp_path / "gpu", device="cuda", **long)
    assert "graph" not in facts.tags["compiled"]
    assert len(sys.modules["counting"].CALLS) >= facts.steps == 240


@pytest.mark.parametrize("name", ["Adam", "RMSprop"])
def test_the_first_step_that_ran_out_half_way_is_undone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is made there, which is when memory runs out; some weights were written by then."""
    torch.manual_seed(0)
    starts = [torch.randn(5, 3, device=GPU), torch.randn(3, device=GPU)]
    pairs = [[nn.Parameter(start.clone()) for start in starts] for _ in range(2)]
    made = [TorchOptimizer(getattr(torch.optim, name)(ps, lr=0.1), ps, lr=0.1) for ps in pairs]
    for parameters in pairs:
        for p in parameters:
            p.grad = torch.full_like(p, 0.3)
    made[0].step()
    real, calls = torch._foreach_addcdiv_, []

    def late(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        calls.append(1)
        if len(calls) == 1:
            torch.empty(2**46, dtype=torch.uint8, device=GPU)

    monkeypatch.setattr(torch, "_foreach_addcdiv_", late)
    with pytest.raises(torch.OutOfMemoryError):
        made[1].step()
    made[1].step()
    for a, b in zip(*pairs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("model", "tells"), [("these", 1), ("next", 1)])
def test_parts_of_a_batch_weigh_what_their_loss_is_the_mean_of(
    own: Own, tmp_path: Path, model: str, tells: int
) -> None:
    shared: dict[str, Any] = {
        "device": "cuda",
        "model": "mine:Words",
        "args": {"tells": model},
        "data": {"source": "mine:sentences", "task": "tokens"},
        "optim": {"name": "SGD", "lr": 0.5, "args": {"momentum": 0.0}},
    }
    whole = train_own(own, tmp_path / "whole", **shared)
    parts = train_own(own, tmp_path / "parts", accumulate=4, **shared)
    for a, b in zip(weights(whole).values(), weights(parts).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert parts.metrics["val/loss"] == pytest.approx(whole.metrics["val/loss"], rel=1e-6)
