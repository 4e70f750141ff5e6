"""The digests of a run on a GPU are taken there, and it comes out the same by them."""

from pathlib import Path

import pytest
import torch

from headroom.comparison import verification
from tests.comparison.recorded_runs import record_training

if not torch.cuda.is_available() or torch.version.hip:
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu


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
