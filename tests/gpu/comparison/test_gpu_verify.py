"""The digests of a run on a GPU are taken there, and it comes out the same by them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headroom.comparison import verification
from tests.comparison.recorded_runs import record_training

if not torch.cuda.is_available() or torch.version.hip:
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu

NETS = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.net, self.operation = nn.Linear(64, 10), operation

    def forward(self, x):
        x = self.net(x.flatten(1))
        match self.operation:
            case "adds":
                places = torch.arange(10, device=x.device) // 2
                return torch.zeros_like(x).index_add(1, places, x)
            case "resizes":
                wide = F.interpolate(x[:, None, None], size=(1, 20), mode="bilinear")
                return wide[:, 0, 0, ::2]
            case "pools":
                return F.adaptive_avg_pool2d(x.view(-1, 1, 2, 5), (5, 2)).flatten(1)
        x = x.clone()
        x[x > 100] = 0
        return x

def adds(input_shape, outputs): return Net("adds")
def resizes(input_shape, outputs): return Net("resizes")
def pools(input_shape, outputs): return Net("pools")
def masks(input_shape, outputs): return Net("masks")
"""


def train(folder: Path, *, deterministic: bool, model: str) -> Path:
    return record_training(
        folder,
        "cuda",
        model={"name": model},
        train={"max_steps": 8, "log_every": 2, "deterministic": deterministic, "compile": "off"},
        checkpoint={"every": "3steps"},
    )


def test_a_deterministic_run_is_equal_by_the_digests_of_the_device(tmp_path: Path) -> None:
    run = train(tmp_path / "run", deterministic=True, model="mlp")
    found = verification.verify_run(run, begin=0)
    assert found.difference is None and found.digest_steps == 8
    flip = verification.Flip(5, "weight/1.weight", 3, 4)
    first = verification.verify_run(run, begin=0, flip=flip).difference
    assert first is not None and (first.step, first.tensor) == (5, "weight/1.weight")


@pytest.mark.parametrize(
    ("net", "operation"),
    [
        ("adds", "index_add"),
        ("resizes", "upsample_bilinear2d_backward"),
        ("pools", "adaptive_avg_pool2d_backward_cuda"),
    ],
)
def test_an_operation_that_is_not_deterministic_is_named_and_no_fault(
    tmp_path: Path, own: Callable[[str, str], None], net: str, operation: str
) -> None:
    own("verified_gpu_nets", NETS)
    run = train(tmp_path / "run", deterministic=False, model=f"verified_gpu_nets:{net}")
    flip = verification.Flip(3, "weight/net.weight", 3, 28)
    found = verification.verify_run(run, begin=0, flip=flip)
    assert found.difference is not None and operation in found.operations
    assert not torch.are_deterministic_algorithms_enabled()
    honest = verification.verify_run(run, begin=0)
    assert honest.difference is None or operation in honest.operations


def test_without_such_operations_a_difference_is_one(
    tmp_path: Path, own: Callable[[str, str], None]
) -> None:
    own("verified_gpu_nets", NETS)
    run = train(tmp_path / "run", deterministic=False, model="verified_gpu_nets:masks")
    assert verification.verify_run(run, begin=0).difference is None
    flip = verification.Flip(3, "weight/net.weight", 3, 28)
    found = verification.verify_run(run, begin=0, flip=flip)
    assert found.difference is not None and not found.operations
    assert found.difference.why == verification.AS_RECORDED
