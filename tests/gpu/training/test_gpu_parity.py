"""The same training on a GPU and on the CPU: in fp32 it gives the same numbers to float tolerance
and the same weights within 1e-4, whatever is learnt and whoever wrote the model and its data."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from headroom.base.facts import TrainFacts
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.models import predictor
from headroom.settings.run_config import RunConfig
from headroom.training import trainer, training_parts
from headroom.training.plan import make_plan

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

# The last one: not the current one, where there are several.
GPU = f"cuda:{torch.cuda.device_count() - 1}"
ROWS = 90
Own = Callable[[str, str], None]
MINE = """
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

G = torch.Generator().manual_seed(0)
X = torch.randn(90, 4, generator=G)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 1)

class Dicts(Dataset):
    def __len__(self): return 90
    def __getitem__(self, i):
        return {"a": X[i], "more": [X[i] + 1, torch.tensor(2.0)], "labels": Y[i]}

class Net(nn.Module):
    def __init__(self, outputs=3):
        super().__init__()
        self.left, self.right = nn.Linear(4, 8), nn.Linear(4, 8)
        self.norm, self.out = nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    def hidden(self, a, b):
        if self.training:
            self.seen += len(a)
        return self.out(self.norm(self.left(a).tanh() + self.right(b)))

class ByName(Net):
    def forward(self, a, more, labels=None):
        logits = self.hidden(a, more[0] * more[1].mean())
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        return {"logits": logits, "loss": loss}

class ByPlace(Net):
    def forward(self, a, b): return (self.hidden(a, b),)

class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))
    def forward(self, x): return self.body(x)

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.of, self.mix = nn.Embedding(20, 8, padding_idx=0), nn.MultiheadAttention(8, 2)
        self.out = nn.Linear(8, 2)
    def forward(self, x):
        words = self.of(x).transpose(0, 1)
        return self.out(self.mix(words, words, words)[0][-1])

def dicts(): return Dicts()
def paired(rows):
    a, b, y = (torch.stack(part) for part in zip(*rows))
    return (a, b), y
def loaders():
    order = torch.Generator().manual_seed(5)
    train = TensorDataset(X[:70], X[:70] + 1, Y[:70].int()[:, None])
    val = TensorDataset(X[70:], X[70:] + 1, Y[70:].int()[:, None])
    return (
        DataLoader(train, 16, shuffle=True, generator=order, collate_fn=paired, pin_memory=True),
        DataLoader(val, 7, collate_fn=paired),
    )
def pairs(): return X, X[:, 0] * 2 - X[:, 1]
class Words(Dataset):
    rows = torch.randint(1, 20, (90, 5), generator=torch.Generator().manual_seed(1))
    def __len__(self): return 90
    def __getitem__(self, i): return self.rows[i], int(self.rows[i, -1] > 9)
def words(): return Words()
def resident(where):
    made = [TensorDataset(x.to(where), x.to(where)[:, 0] * 2) for x in (X[:70], X[70:])]
    return DataLoader(made[0], 16), DataLoader(made[1], 16)
def labelled(where): return TensorDataset(X.to(where), Y.int().to(where))

class Huber:
    def __call__(self, outputs, targets):
        return functional.huber_loss(outputs, targets)
huber = Huber()
def worst(outputs, targets): return (outputs - targets).abs().max()
def mean(outputs, targets): return float((outputs - targets).abs().mean())
def two(outputs, targets): return 2

W = torch.ones(1)
def weighed(outputs, targets): return functional.mse_loss(outputs * W, targets)
def hosts(outputs, targets): return float((outputs.numpy() - targets.numpy()).mean())
"""


def _rows(tmp_path: Path) -> dict[str, Path]:
    """One small data set in each format."""
    drawn = np.random.default_rng(0)
    x = drawn.normal(size=(ROWS, 4)).astype(np.float32)
    words = np.array(["red", "green", "", "blue"])[drawn.integers(0, 4, ROWS)]
    rare = (x[:, 0] > 1).astype(int)
    value = x @ np.array([1.0, -2.0, 0.5, 0.0])
    table = {f"f{i}": x[:, i] for i in range(4)} | {"colour": words}
    files = {name: tmp_path / f"given.{name}" for name in ("csv", "parquet", "npz", "bin", "txt")}
    lines = zip(*table.values(), rare, strict=True)
    text = "\n".join(",".join(map(str, line)) for line in lines)
    files["csv"].write_text(f"{','.join(table)},y\n{text}\n")
    parquet.write_table(pa.table({**table, "y": value}), files["parquet"])
    np.savez(files["npz"], x=x, y=(x[:, :3] > 0.5).astype(np.int64))
    drawn.integers(0, 50, 3000).astype(np.uint16).tofile(files["bin"])
    files["txt"].write_text("the same training on another device gives the same numbers. " * 40)
    files["images"] = tmp_path / "pets"
    for i in range(40):
        image = files["images"] / f"{'cat' if i % 2 else 'dog'}" / f"{i}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(drawn.integers(0, 256 - 99 * (i % 2), (8, 8, 3), dtype=np.uint8)).save(
            image
        )
    return files


def _config(tmp_path: Path, sections: dict[str, Any]) -> RunConfig:
    data = {"cache": str(tmp_path / "cache"), **sections.get("data", {})}
    if "path" in data:
        data["path"] = str(_rows(tmp_path)[data["path"]])
    train = {"epochs": 3, "batch_size": 16, "precision": "fp32", "log_every": 4}
    train |= sections.get("train", {})
    optim = {"name": "sgd", "lr": 0.05, **sections.get("optim", {})}
    return RunConfig.model_validate({**sections, "data": data, "train": train, "optim": optim})


def _trained(
    config: RunConfig, device: str, folder: Path
) -> tuple[TrainFacts, dict[tuple[int, str], float]]:
    """The facts, and all that was logged of the learning, by its step and its name."""
    learnt: dict[tuple[int, str], float] = {}

    def log(metrics: dict[str, float], step: int) -> None:
        told = {k: v for k, v in metrics.items() if k.startswith(("val/", "train/"))}
        learnt.update({(step, name): value for name, value in told.items()})

    train = config.train
    data = prepare_dataset(config.data, batch_size=train.batch_size, seed=train.seed)
    return trainer.train(
        make_plan(config, detect_best_device(device), data), folder=folder, log=log
    ), learnt


LINEAR = """
class Line(nn.Linear):
    def __init__(self, wide): super().__init__(4, wide)
"""
MLP = {"name": "mlp", "args": {"hidden": [8], "dropout": 0.0}}
GPT = {"name": "transformer", "args": {"layers": 1, "heads": 2, "width": 8, "dropout": 0.0}}
CASES: dict[str, dict[str, Any]] = {
    "table with text, gaps and few of a class": {
        "data": {"path": "csv", "args": {"missing": "mean"}},
        "model": {"name": "linear"},
        "train": {"loss_args": {"class_weights": "balanced"}},
        "optim": {"name": "adamw", "lr": 0.01},
    },
    "regression": {"data": {"path": "parquet", "args": {"missing": "drop"}}, "model": MLP},
    "several labels": {"data": {"path": "npz"}, "model": MLP},
    "images": {
        "data": {"source": "images", "path": "images", "args": {"image_size": 8}},
        "model": {"name": "cnn", "args": {"width": 4, "dropout": 0.0}},
    },
    "text": {"data": {"path": "txt", "args": {"context": 16}}, "model": GPT},
    "tokens": {"data": {"path": "bin", "args": {"context": 16, "vocab": 64}}, "model": GPT},
    "micro-batches, clipped": {
        "data": {"path": "npz"},
        "model": MLP,
        "train": {"accumulate": 3},
        "optim": {"clip_norm": 0.1},
    },
    "deterministic": {"data": {"path": "npz"}, "model": MLP, "train": {"deterministic": True}},
    "the best epoch's weights": {
        "data": {"source": "synthetic", "args": {"rows": 60, "features": 4, "classes": 3}},
        "model": MLP,
        "train": {"patience": 2, "epochs": 40, "batch_size": 12},
        "optim": {"lr": 0.5},
    },
    "own loss and metrics": {
        "data": {"path": "parquet", "args": {"missing": "drop"}},
        "model": MLP,
        "train": {
            "loss": "mine:huber",
            "metrics": {"worst": "mine:worst", "mean": "mine:mean", "two": "mine:two"},
        },
    },
    "own dicts, with a loss": {"data": {"source": "mine:dicts"}, "model": {"name": "mine:ByName"}},
    "own loaders of tuples": {
        "data": {"source": "mine:loaders"},
        "model": {"name": "mine:ByPlace"},
        "train": {"accumulate": 2},
    },
    "own lazy model of own arrays": {
        "data": {"source": "mine:pairs"},
        "model": {"name": "mine:Lazy"},
    },
    "own words": {"data": {"source": "mine:words"}, "model": {"name": "mine:Reader"}},
}


@pytest.mark.parametrize("case", CASES)
def test_a_gpu_learns_what_the_cpu_does(own: Own, tmp_path: Path, case: str) -> None:
    own("mine", MINE)
    config = _config(tmp_path, CASES[case])
    _same(config, tmp_path)


@pytest.mark.parametrize("case", ["regression", "images", "tokens"])
def test_rows_that_are_streamed_teach_the_same(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_parts, "compute_rows_room_bytes", lambda device, **_: 0.0)
    done = _same(_config(tmp_path, CASES[case]), tmp_path)
    assert done.tags["data.residency"] == "pinned"


def _same(config: RunConfig, folder: Path) -> TrainFacts:
    """Trains on both; returns the facts of the GPU."""
    (here, on_cpu), (there, on_gpu) = (
        _trained(config, name, folder / name) for name in ("cpu", GPU)
    )
    assert (there.steps, there.epochs, there.stopped_early) == (
        here.steps,
        here.epochs,
        here.stopped_early,
    )
    assert on_gpu == pytest.approx(on_cpu, rel=1e-3, abs=1e-4)
    for name in here.metrics:
        if name.startswith("val/"):
            assert there.metrics[name] == pytest.approx(here.metrics[name], rel=1e-3, abs=1e-4)
    first, second = (
        torch.load(Path(facts.model_folder) / "weights.pt", weights_only=True)
        for facts in (here, there)
    )
    assert first.keys() == second.keys()
    for name in first:
        assert second[name].device.type == "cpu"
        torch.testing.assert_close(second[name], first[name], rtol=1e-4, atol=1e-4)
    specs = [json.loads((Path(f.model_folder) / "spec.json").read_text()) for f in (here, there)]
    assert specs[0] == specs[1]
    return there


@pytest.mark.parametrize("case", ["several labels", "images", "tokens", "own words"])
def test_a_logged_model_predicts_on_a_gpu_what_it_predicts_on_the_cpu(
    own: Own, tmp_path: Path, case: str
) -> None:
    own("mine", MINE)
    config = _config(tmp_path, CASES[case])
    facts, _ = _trained(config, GPU, tmp_path / "run")
    folder = Path(facts.model_folder)
    rows = np.load(folder / "example.npy")
    there = predictor.load(folder).to(torch.device(GPU)).outputs(rows)
    np.testing.assert_allclose(there, predictor.load(folder).outputs(rows), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("device", [GPU, "cpu"])
@pytest.mark.parametrize("source", ["resident", "labelled"])
def test_a_data_set_of_the_users_own_may_lie_on_the_gpu(
    own: Own, tmp_path: Path, source: str, device: str
) -> None:
    """Its rows can't be pinned, and its targets have to be made what a loss takes all the same."""
    own("mine", MINE + LINEAR)
    found = {}
    for where in ("cpu", GPU):
        sections = {
            "data": {"source": f"mine:{source}", "args": {"where": where}},
            "model": {"name": "mine:Line", "args": {"wide": 1 if source == "resident" else 3}},
        }
        _, found[where] = _trained(_config(tmp_path, sections), device, tmp_path / where)
    assert found[GPU] == pytest.approx(found["cpu"], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    ("train", "told"),
    [
        (
            {"loss": "mine:weighed"},
            r"^train.loss: .*: W is on cpu, outputs is on cuda:0; make it where the others are",
        ),
        ({"metrics": {"mean": "mine:hosts"}}, r"^train.metrics.mean: .*to numpy. Use Tensor.cpu"),
    ],
)
def test_a_loss_or_a_metric_for_the_cpu_alone_is_told_under_its_setting(
    own: Own, tmp_path: Path, train: dict[str, Any], told: str
) -> None:
    """The check before a run tries them on the CPU, where they do what they should."""
    own("mine", MINE)
    config = _config(tmp_path, {**CASES["regression"], "train": train})
    with pytest.raises(ValueError, match=told):
        _trained(config, GPU, tmp_path / "run")
