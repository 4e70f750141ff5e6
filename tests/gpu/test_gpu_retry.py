"""A poisoned context on a CUDA device: no later call of the process survives it. The next process
does, and goes on from the checkpoint."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.flows.cli.test_train_command import _ask

if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

pytestmark = pytest.mark.gpu
Desk = Callable[..., subprocess.Popen[str]]
# On a GPU a kernel that writes far outside; the stand-in has no kernels, and is told.
SICK = """
import ctypes
from pathlib import Path
import torch

def poison(x):
    maps = Path("/proc/self/maps").read_text().split()
    runtime = ctypes.CDLL(next(path for path in maps if "libcudart" in path))
    if hasattr(runtime, "fake_break"):
        runtime.fake_break(700)
    else:
        source = 'extern "C" __global__ void far(float* x) { x[1ll << 45] = 1; }'
        torch.cuda._compile_kernel(source, "far")(args=[x])

class Net(torch.nn.Sequential):
    def __init__(self, input_shape, outputs):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, outputs))

    def forward(self, x):
        kept = any(Path(".headroom/runs").glob("*/checkpoints/*.json"))
        if self.training and kept and not Path("failed").exists():
            Path("failed").touch()
            poison(x)
        return super().forward(x)
"""


def test_a_poisoned_context_is_left_behind_with_its_process(desk: Desk, place: Path) -> None:
    (place / "sick.py").write_text(SICK)
    words = ("--model.name", "sick:Net", "--device.name", "cuda", "--train.epochs", "20")
    process = desk(*words, "--checkpoint.every", "20steps")
    _, err = process.communicate(timeout=230)
    assert process.returncode == 0, err
    assert "answers nothing but errors" in err and "retry 1 of 2 begins in 30.0 s, from step" in err
    assert _ask(place, "SELECT status FROM runs") == [("FINISHED",)]
    tags = dict(_ask(place, "SELECT key, value FROM tags"))
    assert tags["retries"] == "1 of 2 after device_lost" and tags["device"] == "cuda:0"
    assert int(tags["resumed_from_step"]) > 0 and os.path.exists(place / "failed")
