"""The digests of a run on a GPU are taken there, and it comes out the same by them."""

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
