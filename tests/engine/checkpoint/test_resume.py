"""A training that was ended somewhere and goes on gives, bit for bit, what an undisturbed one
gives."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.engine.base.facts import TrainFacts
from tasks.engine.data.preparation import prepare
from tasks.engine.device.detection import detect
from tasks.engine.settings.run_config import RunConfig
from tasks.engine.training import trainer

Series = dict[tuple[str, int], float]
SAME = ("train/loss", "train/lr", "train/grad_norm", "train/epoch", "val/")


class Killed(Exception):
    """The training ends here, and nothing is told to it."""


def play(folder: Path, sections: dict[str, Any], *, at: int = 0, **kwargs: Any) -> Series:
    """Train in `folder`; the series that an undisturbed run must have too. at: the step after which
    it is killed."""
    series: Series = {}
    done = iter(range(1, 10**9))

    def log(metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            if name.startswith(SAME):
                assert series.setdefault((name, step), value) == value

    def asked() -> None:
        if next(done) == at:
            raise Killed

    try:
        facts = train(folder, sections, log=log, **{"asked": asked, **kwargs})
        assert not facts.stopped
    except Killed:
        pass
    return series


def train(folder: Path, sections: dict[str, Any], **kwargs: Any) -> TrainFacts:
    given = {"data": {"cache": str(folder.parent / "data")}, "train": {}, **sections}
    given["data"] = {"cache": str(folder.parent / "data"), **given["data"]}
    given["train"] = {"epochs": 3, "log_every": 4, **given["train"]}
    given = {"device": {"name": "cpu"}, "checkpoint": {"every_steps": 5}, **given}
    config = RunConfig.model_validate(given)
    data = prepare(config.data, batch_size=config.train.batch_size, seed=config.train.seed)
    kwargs = {"log": lambda metrics, step: None, **kwargs}
    return trainer.train(config, detect(config.device.name), data, folder=folder, **kwargs)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / "model" / "weights.pt")
    return found


def same_to_the_bit(one: Path, other: Path) -> None:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


WAYS: dict[str, dict[str, Any]] = {
    "mlp with dropout": {"model": {"args": {"dropout": 0.3}}},
    "running statistics": {"model": {"name": "cnn", "args": {"width": 4}}, "train": {"epochs": 1}},
    "momentum, clipping": {"optim": {"name": "sgd", "lr": 0.05, "clip_norm": 0.5}},
    "torch.optim": {"optim": {"name": "RMSprop", "lr": 1e-3}},
    "accumulation": {"train": {"accumulate": 3}},
    "early stopping": {"optim": {"lr": 0.2}, "train": {"patience": 1, "epochs": 6}},
    "the last weights": {"train": {"keep": "last"}},
    "half an epoch": {"train": {"max_steps": 30}},
    "regression": {"data": {"source": "synthetic", "classes": 1, "rows": 500, "features": 8}},
}


@pytest.mark.parametrize("way", WAYS)
def test_it_goes_on_to_the_same_bits_wherever_it_was_killed(tmp_path: Path, way: str) -> None:
    whole = play(tmp_path / "whole", WAYS[way])
    last = max(step for _, step in whole)
    for at in (3, 5, 23, 24, last - 1, last):
        folder = tmp_path / f"killed-{at}"
        before = play(folder, WAYS[way], at=at)
        after = play(folder, WAYS[way], resumes=True)
        assert all(after.get(point, value) == value for point, value in before.items())
        assert {**before, **after} == whole, at
        same_to_the_bit(tmp_path / "whole", folder)


def test_it_is_killed_and_goes_on_again_and_again(tmp_path: Path) -> None:
    sections = {"model": {"args": {"dropout": 0.3}}}
    whole = play(tmp_path / "whole", sections)
    series = play(tmp_path / "often", sections, at=7)
    for _ in range(20):
        series |= play(tmp_path / "often", sections, at=7, resumes=True)
    assert series == whole
    same_to_the_bit(tmp_path / "whole", tmp_path / "often")
