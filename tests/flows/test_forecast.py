"""What a step of somebody else's loop will take: the command, and what it refuses."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from flows.forecast import main
from headroom import account

MODELS = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))

class Computing(nn.Module):
    def __init__(self):
        super().__init__()
        self.rates = [x.item() for x in torch.linspace(0, 1, 3)]
        self.layer = nn.Linear(256, 10)
    def forward(self, x):
        return self.layer(x) * self.rates[1]

class Huge(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(65536, 65536) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def sum_of(outputs):
    return outputs.sum()

def number():
    return 3

def broken():
    raise OSError("no weights here")

made = nn.Linear(4, 2)
"""


@pytest.fixture(autouse=True)
def models(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (place / "mine.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(place))
    yield
    sys.modules.pop("mine", None)  # other tests have a module of that name


def test_the_forecast_is_what_the_tensors_take(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mine:make", "--batch", "1000x256", "--optimizer", "adamw", "--for", "t4"]) == 0
    said = capsys.readouterr().out
    sizes = {k: float(v) for k, v in re.findall(r"\u2502 +(\w+) +\u2502 ([\d.]+) MiB \u2502", said)}
    weights_mib = 4 * (256 * 512 + 512 + 512 * 10 + 10) / 2**20
    assert sizes["parameters"] == pytest.approx(weights_mib, abs=0.01)
    assert sizes["optimizer_state"] == pytest.approx(2 * weights_mib, abs=0.02)
    assert sizes["batch"] == pytest.approx(4 * 1000 * 256 / 2**20, abs=0.01)
    assert "t4" in said and "yes" in said
    assert "assumed: the loss is the cross-entropy of its outputs, 1000x10" in said


def test_what_does_not_fit_is_told_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    """The model is larger than this machine: it is built without memory."""
    words = ["mine:Huge", "--batch", "8x65536", "--optimizer", "sgd", "--for", "t4,200GiB"]
    assert main([*words, "--optimizer-arg", "momentum=0.9"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"\u2502 t4 .* none \u2502 NO ", said)
    [rows] = re.findall(r"\u2502 200gib .* ([\d,]+) \u2502 yes ", said)
    assert int(rows.replace(",", "")) > 1000
    assert main([*words[:-1], "t4"]) == 2


def test_a_gpu_that_is_required_decides_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """It was 0 where any GPU of the list was large enough."""
    words = ["mine:Huge", "--batch", "8x65536", "--optimizer", "sgd"]
    assert main([*words, "--require", "200GiB"]) == 0
    said = capsys.readouterr()
    assert "200gib" in said.out and "t4" not in said.out and not said.err
    assert main([*words, "--require", "200GiB", "--require", "T4", "--for", "300GiB"]) == 1
    said = capsys.readouterr()
    assert "300gib" in said.out
    told = r"--require: a step does not fit t4: it needs [\d.]+ GiB, and a process has 14.0 GiB "
    assert re.fullmatch(rf"{told}there\n", said.err)


@pytest.mark.parametrize("words", [["mine:Computing"], ["mine:make", "--loss", "mine:sum_of"]])
def test_constructors_that_compute_and_losses_of_ones_own_are_followed(words: list[str]) -> None:
    assert main([*words, "--batch", "64x256", "--for", "t4", "--autocast", "bf16"]) == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["mine", "--batch", "4x4"], "MODULE:NAME: is an import path"),
        (["mine:mak", "--batch", "4x4"], "mine has no mak (got mine:mak); did you mean make?"),
        (["nowhere:make", "--batch", "4x4"], "there is no module nowhere"),
        (["mine:number", "--batch", "4x4"], "mine:number: makes a int, where a model is asked"),
        (["mine:broken", "--batch", "4x4"], "mine:broken: makes no model: mine.py:32: OSError: no"),
        (["mine:make", "--batch", "4y4"], "--batch: is [NAME=]SHAPE[:DTYPE]"),
        (["mine:make", "--batch", "4x4:float9"], "--batch: is [NAME=]SHAPE[:DTYPE]"),
        (["mine:make", "--batch", "0x256"], "--batch: is [NAME=]SHAPE[:DTYPE]"),
        (["mine:make", "--batch", "4x4"], "what a step takes cannot be told beforehand"),
        (["mine:make", "--batch", "4x256", "--optimizer", "adamx"], "adamx : is none of"),
        (["mine:make", "--batch", "4x256", "--optimizer-arg", "lr"], "--optimizer: adamw lr:"),
        (["mine:make", "--batch", "4x256", "--for", "t5"], "--for t5: is neither a GPU"),
        (["mine:make", "--batch", "4x256", "--require", "t5"], "--require t5: is neither a GPU"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr()
    assert told in said.err and said.err.count("\n") == 1 and not said.out


def test_an_account_foretells_its_own_step(place: Path) -> None:
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    before = [p.clone() for p in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9)
    with account(run_name="own", model=net, optimizer=optimizer, quiet=True) as run:
        with pytest.raises(RuntimeError, match="comes after the first step"):
            run.forecast()
        net(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()
        told = run.forecast("t4")
        with pytest.raises(KeyError, match="t5"):
            run.forecast("t5")
    assert all(map(torch.equal, before, net.parameters())), "the model itself is left alone"
    weights = sum(p.nbytes for p in net.parameters())
    assert told.memory.owners["parameters"] == pytest.approx(weights, rel=0.01)
    assert told.memory.owners["optimizer_state"] == pytest.approx(weights, rel=0.01)
    assert told.memory.micro_batch == 64 and (told.gpus["t4"].batch or 0) > 64
