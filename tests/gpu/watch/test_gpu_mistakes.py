"""Mistakes with devices, dtypes and shapes on a real GPU, each in the words CUDA has for it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from headroom.watch.failed_step import describe_own_line, explain_failure

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

ROOT = Path(__file__).parents[3]


class _Does(nn.Module):
    def __init__(self, does: Callable[[Any, Any], Any], **held: Any) -> None:
        super().__init__()
        self.does = does
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Any) -> Any:
        return self.does(self, x)


def _make_a_mask(self: Any, x: Tensor) -> Tensor:
    mask = torch.zeros(2, 3)
    return self.fc(x) + mask


def _fc() -> nn.Linear:
    return nn.Linear(3, 3)


X, Y = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
CASES: dict[str, tuple[nn.Module, Any, Any, list[str]]] = {
    "plain tensor": (
        _Does(lambda self, x: self.fc(x) * self.scale, fc=_fc(), scale=torch.ones(3)),
        X.cuda(),
        Y.cuda(),
        ["self.scale (plain tensor scale) is on cpu, a tensor made there is on cuda:0; a plain"],
    ),
    "product with a plain tensor": (
        _Does(lambda self, x: x @ self.w, fc=_fc(), w=torch.ones(3, 3)),
        X.cuda(),
        Y.cuda(),
        ["self.w (plain tensor w) is on cpu, x (the batch's inputs) is on cuda:0"],
    ),
    "layers in a list": (
        _Does(lambda self, x: self.blocks[0](x), fc=_fc(), blocks=[_fc()]),
        X.cuda(),
        Y.cuda(),
        ["layer blocks[0] (Linear(", "unregistered blocks[0].weight is on cpu", "nn.ModuleList"],
    ),
    "made in forward": (
        _Does(_make_a_mask, fc=_fc()),
        X.cuda(),
        Y.cuda(),
        ["`return self.fc(x) + mask`", "mask is on cpu", "device=x.device"],
    ),
    "batch": (
        _Does(lambda self, x: self.fc(x["a"]), fc=_fc()),
        {"a": X},
        Y.cuda(),
        ["data.source: ", "the batch's inputs['a']) is on cpu"],
    ),
    "convolution": (
        nn.Sequential(nn.Conv2d(1, 2, 3)),
        torch.zeros(2, 1, 8, 8),
        Y.cuda(),
        ["data.source: ", "layer 0 (Conv2d(1, 2, ", "is on cpu"],
    ),
    "embedding": (
        nn.Sequential(nn.Embedding(5, 3)),
        Y,
        Y.cuda(),
        ["data.source: ", "layer 0 (Embedding(5, 3))", "is on cpu"],
    ),
    "lstm": (nn.Sequential(nn.LSTM(3, 3)), X, Y.cuda(), ["layer 0 (LSTM(3, 3))", "is on cpu"]),
    "norm": (nn.Sequential(nn.BatchNorm1d(3)), X, Y.cuda(), ["layer 0 (BatchNorm1d(3, "]),
    "index": (
        _Does(lambda self, x: self.table[x], fc=_fc(), table=torch.ones(5, 3)),
        Y.cuda(),
        Y.cuda(),
        ["self.table (plain tensor table) is on cpu"],
    ),
    "numpy": (
        _Does(lambda self, x: x.numpy(), fc=_fc()),
        X.cuda(),
        Y.cuda(),
        ["in numpy in the model", "numpy leaves"],
    ),
    "targets": (nn.Linear(3, 2), X.cuda(), Y, ["data.source: ", "(the batch's targets) is on cpu"]),
    "float64": (
        nn.Sequential(nn.Linear(3, 2)),
        X.cuda().double(),
        Y.cuda(),
        ["data.source: PyTorch refused x (the batch's inputs) float64", "is float32: make"],
    ),
    "half convolution": (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3).half()),
        torch.zeros(2, 1, 8, 8).cuda(),
        Y.cuda(),
        ["model.name: PyTorch refused the input float32", "make parameter 2.weight so"],
    ),
    "float labels": (
        nn.Linear(3, 2),
        X.cuda(),
        Y.cuda().float(),
        ["data.source: PyTorch refused ", "targets) float32 (2,) in cross_entropy", "are int64"],
    ),
    "shape": (
        nn.Sequential(nn.Linear(4, 2)),
        X.cuda(),
        Y.cuda(),
        ["model.name: PyTorch refused ", "(2, 3) in layer 0 (Linear(in_features=4"],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_mistake_on_cuda_is_told_by_the_names_of_its_tensors(
    case: tuple[nn.Module, Any, Any, list[str]],
) -> None:
    model, x, y, said = case
    model.cuda()
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        functional.cross_entropy(model(x), y)
    told = explain_failure(
        caught.value, model, (x, y), lambda: functional.cross_entropy(model(x), y)
    )
    assert told is not None, str(caught.value)
    for words in said:
        assert words in told, told
    assert "test_gpu_mistakes.py:" in (describe_own_line(caught.value) or "")


ASSERTED = """
import torch
from torch import nn
from headroom.watch.failed_step import explain_failure
model = nn.Sequential(nn.Embedding(5, 3)).cuda()
x, y = torch.full((2,), 7).cuda(), torch.zeros(2, dtype=torch.int64).cuda()
try:
    model(x).sum().item()
except RuntimeError as error:
    print(explain_failure(error, model, (x, y), lambda: model(x)))
"""


def test_a_device_side_assert_is_explained_without_asking_the_device() -> None:
    # In a process of its own, since the device is lost to the one that it happens in.
    done = subprocess.run(
        [sys.executable, "-c", ASSERTED], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert "model.name: an index or a label is out of range on the GPU" in done.stdout, done.stderr
    assert len(done.stdout.splitlines()) == 1
