"""A model is loaded as a stranger would load it before it is logged, and gives what it gave."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headroom.base.facts import TrainFacts
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.model_args import ModelError
from headroom.settings.run_config import RunConfig
from headroom.training import trainer
from headroom.training.plan import make_plan

Own = Callable[[str, str], None]
MINE = """
import numpy as np, torch
from torch import nn
RANDOM = np.random.default_rng(0)

class Net(nn.Module):
    def __init__(self, outputs, hidden=4):
        super().__init__()
        self.first, self.last = nn.Linear(3, hidden), nn.Linear(hidden, outputs)
        {made}
    def forward(self, x):
        {used}
        return self.last(x)

def rows():
    x = np.random.default_rng(1).standard_normal((64, 3)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64)
"""


def _trained(
    own: Own, tmp_path: Path, made: str, used: str, device: str = "cpu", **sections: Any
) -> TrainFacts:
    own("mine", MINE.format(made=made, used=used))
    asked = {
        "model": {"name": "mine:Net"},
        "data": {"source": "mine:rows"},
        "train": {"epochs": 1, "batch_size": 16},
        "optim": {"lr": 0.05},
    }
    config = RunConfig.model_validate(asked | sections)
    data = prepare_dataset(config.data, batch_size=16)
    return trainer.train(
        make_plan(config, detect_best_device(device), data),
        folder=tmp_path / "run",
        log=lambda m, s: None,
    )


@pytest.mark.parametrize(
    ("made", "used", "lost"),
    [
        ("self.wave = torch.randn(3, 3)", "x = self.first((x @ self.wave).cos())", "wave"),
        ("self.layers = {'a': [nn.Linear(3, 3).requires_grad_(False)]}",
         "x = self.first(self.layers['a'][0](x))", "layers['a'][0].weight, layers['a'][0].bias"),
        ("self.mean = torch.zeros(3)",
         "self.mean = x.mean(0) + 1 if self.training else self.mean; x = self.first(x - self.mean)",
         "mean"),
        ("self.register_buffer('far', torch.randn(3), persistent=False)",
         "x = self.first(x * self.far)", "far"),
        ("self.size = 1.0",
         "self.size += self.training; x = self.first(x * self.size)", "size"),
        ("self.shift = np.zeros(3, np.float32)",
         "self.shift = self.shift + np.float32(self.training); "
         "x = self.first(x + torch.from_numpy(self.shift))", "shift"),
    ],
)  # fmt: skip
def test_a_model_that_predicts_otherwise_when_it_is_loaded_is_refused_by_the_attribute(
    own: Own, tmp_path: Path, made: str, used: str, lost: str
) -> None:
    with pytest.raises(ModelError, match=r"^model.name: mine:Net gives other outputs") as got:
        _trained(own, tmp_path, made, used)
    assert f"% apart): it computes with {lost}, which it does not save" in str(got.value)


@pytest.mark.parametrize(
    ("made", "used"),
    [
        ("pass", "x = nn.functional.dropout(self.first(x), 0.5)"),  # random when it predicts, too
        ("self.norm = nn.BatchNorm1d(3); self.drop = nn.Dropout()",
         "x = self.first(self.drop(self.norm(x)))"),
        ("self.calls = 0", "self.calls += 1; x = self.first(x)"),
        ("self.mask = None",
         "self.mask = self.mask if self.mask is not None else torch.ones(3); "
         "x = self.first(x * self.mask)"),
        ("self.wave = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))",
         "x = self.first(x @ self.wave)"),
    ],
)  # fmt: skip
def test_a_model_that_gives_what_it_gave_is_kept(
    own: Own, tmp_path: Path, made: str, used: str
) -> None:
    assert (Path(_trained(own, tmp_path, made, used).model_folder) / "weights.pt").is_file()
    copies = [place for place in sys.path if place.startswith(str(tmp_path / "run"))]
    assert not copies, "the copy of the user's code would hide what is mended in it"


@pytest.mark.parametrize(
    ("made", "used", "why"),
    [
        ("pass", "x = self.first(x + torch.from_numpy(RANDOM.standard_normal(3)).float())", ""),
        ("self.calls = 0", "self.calls += 1; x = self.first(x) * self.calls", "calls"),
    ],
)
def test_a_model_that_gives_other_outputs_each_time_is_doubted_by_the_number_that_changes(
    own: Own, tmp_path: Path, made: str, used: str, why: str
) -> None:
    """It was a line of the log."""
    (said,) = (w for w in _trained(own, tmp_path, made, used).warnings if "mine:Net" in w)
    assert "mine:Net gives other outputs for the same rows each time it is asked" in said
    assert (f"for {why} changes with each" in said) == bool(why)


@pytest.mark.parametrize(
    ("made", "used"),
    [
        ("pass",
         "hasattr(self, 'seen') or self.register_buffer('seen', x.mean(0)); x = self.first(x)"),
        ("self.register_buffer('seen', None)",
         "self.seen = x.mean(0) if self.seen is None else self.seen; x = self.first(x)"),
    ],
)  # fmt: skip
def test_a_buffer_that_the_first_forward_makes_is_told_before_the_first_step(
    own: Own, tmp_path: Path, made: str, used: str
) -> None:
    """All epochs were trained, and the model could not be loaded."""
    with pytest.raises(ModelError, match="makes or drops seen in its first forward pass"):
        _trained(own, tmp_path, made, used)
    assert not (tmp_path / "run" / "model").exists()


def test_a_model_that_can_not_be_built_again_is_refused(own: Own, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="^model.name: mine:Net was trained, and cannot be loaded"):
        _trained(
            own, tmp_path, "self.more = nn.Linear(3, RANDOM.integers(2, 999))", "x = self.first(x)"
        )


def test_what_finds_no_memory_for_the_comparison_is_kept_with_a_warning(
    own: Own, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:

    def rebuilt(spec: Any, folder: Path) -> Any:
        raise MemoryError("none left")

    monkeypatch.setattr("headroom.models.predictor.rebuild_network", rebuilt)
    _trained(own, tmp_path, "pass", "x = self.first(x)")
    assert "no memory to load the model again" in caplog.text
