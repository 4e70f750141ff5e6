"""The forecast of a step of somebody else's loop is the peak that the loop has on a GPU."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headroom import account
from headroom.device.detection import detect_best_device
from headroom.training.loop_forecast import LoopStep, forecast_step, make_optimizer_of

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")


@dataclass
class Case:
    """A model, its inputs and its optimizer."""

    make: Callable[[], nn.Module]
    given: Callable[[str], dict[str, torch.Tensor]]
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    args: tuple[tuple[str, Any], ...] = ()
    autocast: torch.dtype | None = None


class Named(nn.Module):
    """A sequence of layers whose input has a name, and whose loss is its own."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def _mlp() -> nn.Module:
    """Small products, since a stand-in's processor may have to multiply bf16 number by number."""
    layers = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU()]
    return Named(*layers, nn.Linear(256, 10))


def _convolutions() -> nn.Module:
    def block(of: int, to: int) -> list[nn.Module]:
        return [nn.Conv2d(of, to, 3, padding=1, bias=False), nn.BatchNorm2d(to), nn.ReLU()]

    pooled = [nn.MaxPool2d(2), *block(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Named(*block(3, 32), *pooled, nn.Linear(64, 10))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(n_layer=3, n_head=4, n_embd=256, vocab_size=2000, n_positions=128)
    )
    return model


def _rows(*shape: int) -> Callable[[str], dict[str, torch.Tensor]]:
    return lambda device: {
        "x": torch.zeros(shape, device=device),
        "labels": torch.zeros(shape[0], dtype=torch.long, device=device),
    }


def _tokens(device: str) -> dict[str, torch.Tensor]:
    ids = torch.zeros(8, 128, dtype=torch.long, device=device)
    return {"input_ids": ids, "labels": ids.clone()}


CASES = {
    "mlp, AdamW": Case(_mlp, _rows(4096, 64)),
    "mlp, AdamW, bf16": Case(_mlp, _rows(4096, 64), autocast=torch.bfloat16),
    "convolutions, SGD": Case(
        _convolutions, _rows(64, 3, 64, 64), torch.optim.SGD, (("momentum", 0.9),)
    ),
    "gpt2, AdamW": Case(_gpt2, _tokens),
}


def _train(case: Case, run: Any = None) -> int:
    """Take a few steps; return the peak of the device, in bytes."""
    model = case.make().to(GPU)
    optimizer = case.optimizer(model.parameters(), lr=1e-3, **dict(case.args))
    if run is not None:
        run.watch(model, optimizer)
    torch.cuda.reset_peak_memory_stats(GPU)
    for _ in range(4):
        batch = case.given("cuda:0")
        with torch.autocast("cuda", case.autocast, enabled=case.autocast is not None):
            loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del batch, loss
    return torch.cuda.max_memory_allocated(GPU)


def _measure(case: Case) -> int:
    """The bytes that a loop takes, with what libraries keep from its first product on."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(GPU)
    return _train(case) - before


@pytest.mark.parametrize("name", CASES)
def test_the_forecast_is_the_peak_of_the_loop(name: str) -> None:
    case = CASES[name]
    made = make_optimizer_of(case.optimizer, dict(case.args))
    step = LoopStep(case.make, ((), case.given("meta")), made, autocast=case.autocast)
    told, assumed = forecast_step(step, detect_best_device("cuda:0"))
    assert assumed == "the loss that the model returns"
    peak = _measure(case)
    print(name, told.peak_bytes, peak)
    assert told.peak_bytes == pytest.approx(peak, rel=0.02)


def test_an_account_foretells_what_its_loop_will_take(place: Path) -> None:
    case = CASES["mlp, AdamW, bf16"]
    with account(run_name="own", device=GPU, quiet=True) as run:
        with pytest.raises(RuntimeError, match="one model and one optimizer"):
            run.forecast()
        _train(case, run)
        told = run.forecast("t4", "l4")
    peak = _measure(case)
    assert told.memory.peak_bytes == pytest.approx(peak, rel=0.02)
    t4, l4 = (told.gpus[name].batch or 0 for name in ("t4", "l4"))
    assert {"t4", "l4"} == set(told.gpus) and l4 > t4 > 4096
    assert "predicted peak, in " in str(told) and "NO" not in str(told)


PORTABLE = """
import torch
from headroom.training.gpu_fit import make_absent_gpu
from headroom.training.loop_forecast import LoopStep, forecast_step, make_optimizer_of
inputs = ((torch.empty(16, 20, 32, device="meta"),), {})
step = LoopStep(lambda: torch.nn.LSTM(32, 64), inputs, make_optimizer_of(torch.optim.AdamW, {}))
told, _ = forecast_step(step, make_absent_gpu(0), is_portable=PORTABLE)
print(torch.cuda.is_available(), told.peak_bytes, sorted(told.owners.items()))
"""


def test_a_portable_forecast_is_the_same_with_and_without_a_gpu() -> None:
    """Snapshots of a test were written beside a GPU, and asked for in a CI that has none."""

    def tell(*, is_portable: bool, devices: dict[str, str]) -> tuple[str, str]:
        code = PORTABLE.replace("PORTABLE", str(is_portable))
        environment = {**os.environ, **devices}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        is_here, _, told = done.stdout.partition(" ")
        return is_here, told

    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    here, told_here = tell(is_portable=True, devices={})
    away, told_away = tell(is_portable=True, devices=hidden)
    assert (here, away) == ("True", "False") and told_here == told_away
    assert tell(is_portable=False, devices={})[1] != told_here, "cuDNN keeps more of an LSTM"
