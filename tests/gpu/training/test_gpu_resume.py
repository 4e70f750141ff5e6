"""Going on from a checkpoint on CUDA: the same bits in deterministic mode, whatever of the state
lies on the device, and no wait of the training's stream for its copies."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headroom.training.stateful import HostCopies
from tests.training.test_resume import play, same_to_the_bit

pytestmark = pytest.mark.gpu
WAYS: dict[str, dict[str, Any]] = {
    "dropout": {"model": {"args": {"dropout": 0.3}}},
    "fp16": {"train": {"precision": "fp16"}},
    "bf16, channels last": {
        "model": {"name": "cnn", "args": {"width": 4}},
        "train": {"precision": "bf16", "epochs": 2},
    },
    "torch.optim": {"optim": {"name": "Adam", "lr": 1e-3}},
    "accumulation": {"train": {"accumulate": 3}},
    "averaged, parts, within an epoch": {
        "model": {"args": {"hidden": [32, 16]}, "freeze": ["1"]},
        "optim": {
            "ema_decay": 0.9,
            "groups": {"5": {"lr": 1e-3}},
            "schedule": "plateau",
            "schedule_args": {"patience": 0},
        },
        "train": {
            "eval_every_steps": 7,
            "loss_args": {"label_smoothing": 0.1},
            "best_metric": "val/accuracy",
        },
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_it_goes_on_to_the_same_bits(tmp_path: Path, way: str) -> None:
    given = WAYS[way]
    train = {"deterministic": True, **given.get("train", {})}
    sections = {**given, "device": {"name": "cuda:0"}, "train": train}
    whole = play(tmp_path / "whole", sections)
    last = max(step for _, step in whole)
    for at in (8, 23, 31, last - 1):
        folder = tmp_path / f"killed-{at}"
        before = play(folder, sections, at=at)
        after = play(folder, sections, resumes=True)
        assert all(after.get(point, value) == value for point, value in before.items())
        assert {**before, **after} == whole, at
        same_to_the_bit(tmp_path / "whole", folder)


def test_copies_are_of_the_moment_they_were_taken_at_and_wait_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What trains goes on at once, and changes its weights only when they are copied."""
    device = torch.device("cuda:0")
    tensors = {str(i): torch.full((1 << 18,), float(i), device=device) for i in range(8)}
    copies = HostCopies(device)
    copies.take(tensors)  # the memory on the host is made once

    def waited(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the host waited for the device")

    with monkeypatch.context() as patch:
        for owner in (torch.cuda.Event, torch.cuda.Stream, torch.cuda):
            patch.setattr(owner, "synchronize", waited)
        taken = copies.take(tensors)
        copies.let_go_on()
        for tensor in tensors.values():
            tensor.fill_(-1.0)
    copies.wait()
    assert all(tensor.is_pinned() for tensor in taken.values())
    assert all((taken[str(i)] == i).all() for i in range(8))
