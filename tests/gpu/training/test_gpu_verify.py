"""A run on a GPU whose operations can't be repeated has them named, and its digests are taken on
the device."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headroom.comparison import verification
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.run_config import RunConfig
from headroom.training.plan import make_plan
from headroom.training.trainer import train as train_plan
from tests.run_folders import append_lines, make_line

if not torch.cuda.is_available() or torch.version.hip:
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
# The time stands for what a GPU does: it adds up in another order, so to another last bit.
MODEL = """
from time import perf_counter_ns
from torch import nn

class Enlarges(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.out = nn.Conv2d(1, 2, 3), nn.Linear(2 * 12 * 12, 10)
    def forward(self, x):
        x = self.net(x.reshape(-1, 1, 8, 8))
        x = nn.functional.interpolate(x, size=(12, 12), mode="bilinear")
        return self.out(x.flatten(1)) * (1 + 1e-4 * (perf_counter_ns() % 7))

def enlarges(input_shape, outputs):
    return Enlarges()
"""


def train(folder: Path, *, deterministic: bool, model: str) -> Path:
    settings: dict[str, Any] = {
        "device": {"name": "cuda"},
        "data": {"cache": str(folder.parent / "data")},
        "model": {"name": model},
        "train": {"max_steps": 8, "log_every": 2, "deterministic": deterministic, "compile": "off"},
        "checkpoint": {"every": "3steps"},
    }
    config = RunConfig.model_validate(settings)
    data = prepare_dataset(config.data, batch_size=config.train.batch_size, seed=config.train.seed)
    folder.mkdir()
    (folder / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    train_plan(
        make_plan(config, detect_best_device("cuda"), data),
        folder=folder,
        log=lambda metrics, step: append_lines(folder, make_line(metrics, step, unix_ms=1)),
    )
    return folder


def test_a_deterministic_run_is_equal_by_the_digests_of_the_device(tmp_path: Path) -> None:
    run = train(tmp_path / "run", deterministic=True, model="mlp")
    found = verification.verify_run(run, begin=0)
    assert found.difference is None and found.digest_steps == 8
    flip = verification.Flip(5, "weight/1.weight", 3, 4)
    first = verification.verify_run(run, begin=0, flip=flip).difference
    assert first is not None and (first.step, first.tensor) == (5, "weight/1.weight")


def test_operations_that_are_not_repeated_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "enlarging.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    run = train(tmp_path / "run", deterministic=False, model="enlarging:enlarges")
    first = verification.verify_run(run, begin=0).difference
    assert first is not None and first.why.startswith(verification.OTHERWISE)
    assert "upsample_bilinear2d_backward_out_cuda" in first.why
