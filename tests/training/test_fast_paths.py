"""Each way of being fast against the loop that every tutorial teaches, on the same rows in the same
order: the same losses to float tolerance, and the accuracy reached with them."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headroom.data.dataset_batches import draw_row_order
from headroom.data.preparation import load_arrays, prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.models import builtin
from headroom.settings.run_config import RunConfig
from headroom.training import trainer
from headroom.training.plan import make_plan

EPOCHS, BATCH, LR = 3, 64, 2e-3
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"hidden": [32]},
    "cnn": {"width": 8},
}


def _config(tmp_path: Path, name: str, **sections: Any) -> RunConfig:
    train = {"epochs": EPOCHS, "batch_size": BATCH, "log_every": 1, **sections.pop("train", {})}
    return RunConfig.model_validate(
        {
            "data": {"cache": str(tmp_path / "data")},
            "model": {"name": name, "args": MODELS[name]},
            "optim": {"lr": LR, "schedule": "constant", "warmup": 0.0},
            "train": train,
            **sections,
        }
    )


def _plain_loop(config: RunConfig) -> tuple[list[float], float]:
    """The loss of every step, and the accuracy at the end."""
    data = prepare_dataset(config.data)
    arrays = load_arrays(data)
    torch.manual_seed(config.train.seed)
    model = builtin.build_model(
        config.model.name,
        input_shape=data.input_shape,
        outputs=data.outputs,
        args=config.model.args,
    )
    matrices, biases = (
        [p for p in model.parameters() if (p.dim() > 1) is decays] for decays in (True, False)
    )
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=0.01)
    x, y = torch.tensor(arrays.train_x), torch.tensor(arrays.train_y)
    losses = []
    for epoch in range(EPOCHS):
        model.train()
        for rows in draw_row_order(len(x), seed=0, epoch=epoch).split(BATCH):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        hits = model(torch.tensor(arrays.val_x)).argmax(1) == torch.tensor(arrays.val_y)
    return losses, hits.float().mean().item()


def _ours(config: RunConfig, tmp_path: Path) -> tuple[list[float], dict[str, float], dict]:
    losses = []

    def log(metrics: dict[str, float], step: int) -> None:
        if "train/loss" in metrics:
            losses.append(metrics["train/loss"])

    facts = trainer.train(
        make_plan(config, detect_best_device("cpu"), prepare_dataset(config.data)),
        folder=tmp_path,
        log=log,
    )
    return losses, facts.metrics, facts.tags


@pytest.fixture(scope="module")
def plain(tmp_path_factory: Any) -> dict[str, tuple[list[float], float]]:
    folder = tmp_path_factory.mktemp("plain")
    return {name: _plain_loop(_config(folder, name)) for name in MODELS}


@pytest.mark.parametrize(
    ("name", "path"),  # the cnn is kept channels last, and its activations are most of its memory
    [*product(MODELS, ["resident", "streamed", "micro-batches", "bf16"]), ("cnn", "limited")],
)
def test_a_fast_path_trains_as_the_plain_loop(
    name: str, path: str, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, accuracy = plain[name]
    sections: dict[str, Any] = {}
    if path == "streamed":
        monkeypatch.setattr("headroom.data.dataset_batches.RESIDENT_SHARE", 0.0)
    elif path == "micro-batches":
        sections["train"] = {"accumulate": 3}
    elif path == "limited":
        sections["memory"] = {"limit_mib": 0.3}
    elif path == "bf16":
        sections["train"] = {"precision": "bf16"}
    losses, metrics, tags = _ours(_config(tmp_path, name, **sections), tmp_path)
    tolerance = 0.05 if path == "bf16" else 1e-3
    assert losses == pytest.approx(expected, rel=tolerance, abs=tolerance)
    assert metrics["val/accuracy"] == pytest.approx(accuracy, abs=0.01)
    assert tags["data.residency"] == ("host" if path == "streamed" else tags["data.residency"])
    if path == "limited":
        assert metrics["memory/ooms_recovered"] > 0


@pytest.mark.filterwarnings("ignore:.*script_method.* is deprecated:DeprecationWarning")
def test_compiling_from_the_first_step_trains_as_the_plain_loop(plain: Any, tmp_path: Path) -> None:
    expected, accuracy = plain["mlp"]
    config = _config(tmp_path, "mlp", train={"compile": "default"})
    losses, metrics, tags = _ours(config, tmp_path)
    assert tags["compiled"] == "default" and metrics["time/compile_s"] > 0
    assert losses == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert metrics["val/accuracy"] == pytest.approx(accuracy, abs=0.01)
