"""Training on structures: micro-batches, memory that runs out, evaluation and figures are the same
for tuples and dicts of tensors as for one tensor."""

import importlib
import math
import multiprocessing.util
import re
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from headroom.base.facts import TrainFacts
from headroom.data.batch import Batch
from headroom.data.preparation import prepare_dataset
from headroom.data.source_data import DataError
from headroom.device.detection import detect_best_device
from headroom.models import predictor
from headroom.settings.model_args import ModelError
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import OptimConfig, RunConfig
from headroom.training import build, place, trainer
from headroom.training.admission import Admission
from headroom.training.averaging import choose_count
from headroom.training.check_training import check_plan
from headroom.training.evaluation import Evaluator, evaluate
from headroom.training.forecast import UnforeseeableMemory
from headroom.training.losses import make_loss
from headroom.training.micro_batches import SingleAttempt
from headroom.training.optim import make_fused_optimizer, make_schedule, make_torch_optimizer
from headroom.training.optimizer_step import Step
from headroom.training.plan import make_plan
from headroom.training.plan_forecast import forecast_training
from headroom.watch.phases import Watched
from headroom.watch.step_metrics import Diverged

Own = Callable[[str, str], None]
CPU = torch.device("cpu")
MINE = """
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

class Pairs(Dataset):
    classes = ["odd", "even", "none"]
    def __len__(self): return 60
    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.randn(4, generator=g)
        return {"a": x, "b": [x + 1, torch.tensor(2.0)]}, int(x[0] > 0)

class Net(nn.Module):
    def __init__(self, outputs, flawed=False):
        super().__init__()
        self.left, self.right = nn.Linear(4, outputs), nn.Linear(4, outputs)
        self.flawed, self.calls = flawed, 0
    def forward(self, a, b):
        self.calls += 1
        if self.flawed == "peer" and self.calls > 3:
            raise RuntimeError("[gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:59597")
        if self.flawed and self.calls > 3:
            a = a[:, :3]
        return self.left(a), self.right(b[0]) * b[1].mean()

class Several(Net):
    def forward(self, a, b):
        return (self.left(a) + self.right(b),)

class Wide(Net):
    def __init__(self, outputs):
        super().__init__(outputs)
        self.deep = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Tanh(), nn.Linear(256, outputs))
    def forward(self, a, b): return self.deep(a) + self.right(b[0])

class Peeking(Net):
    def forward(self, a, b):
        return self.left(a) if a.sum().item() > -1e9 else None

def pairs(): return Pairs()
def tuples():
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    return [(((p, p), int(p[0] > 0))) for p in x] and Tuples(x)
class Tuples(Dataset):
    classes = ["no", "yes"]
    def __init__(self, x): self.x = x
    def __len__(self): return 60
    def __getitem__(self, i): return (self.x[i], self.x[i]), int(self.x[i][0] > 0)
W = torch.tensor([1.0, 2.0])
def held(outputs, targets): return functional.cross_entropy(outputs, targets, weight=W)
def read(outputs, targets):
    return functional.cross_entropy(outputs, targets) / max(1.0, float(targets.sum()))
def plain():
    made = TensorDataset(torch.randn(60, 4), torch.arange(60) % 2)
    made.classes = ["no", "yes"]
    return made
def amounts(fed=False):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    y = 1000 + 100 * x[:, :1]
    return TensorDataset(x, y) if fed else (x, y)
def relative(outputs, targets): return ((outputs - targets) / targets).abs().mean()
class Line(nn.Linear):
    def __init__(self): super().__init__(4, 1)
def mean_of(outputs, targets): return outputs.mean()
def of_two(outputs, targets):
    if len(outputs) > 2: raise TypeError("two, but stack expects each tensor to be equal size")
    return 1
"""


def _trained(
    own: Own, tmp_path: Path, *, model: str, source: str, more: str = "", **train: Any
) -> TrainFacts:
    own("mine", MINE + more)
    config = RunConfig.model_validate(
        {
            "model": {"name": model, "args": train.pop("args", {})},
            "data": {"source": source, **train.pop("data", {})},
            "train": {"epochs": 2, "batch_size": 16, **train.pop("train", {})},
            **train,
        }
    )
    data = prepare_dataset(config.data, batch_size=config.train.batch_size)
    device = detect_best_device("cpu")
    return trainer.train(
        make_plan(config, device, data), folder=tmp_path / "run", log=lambda m, s: None
    )


@pytest.mark.parametrize(
    ("model", "source", "keys"),
    [("mine:Net", "mine:pairs", {"a"}), ("mine:Several", "mine:tuples", {"0", "1"})],
)
def test_dicts_and_tuples_train_and_predict(
    own: Own, tmp_path: Path, model: str, source: str, keys: set[str]
) -> None:
    facts = _trained(own, tmp_path, model=model, source=source)
    assert facts.tags["data.residency"] == "loader" and facts.steps == 6
    assert math.isfinite(facts.metrics["val/loss"]) and "val/accuracy" in facts.metrics
    found = predictor.load(facts.model_folder)
    with np.load(Path(facts.model_folder) / "example.npz") as example:
        assert keys <= set(example)
        if source == "mine:tuples":
            told = found.predict({name: example[name] for name in example})
            assert list(told.columns) == ["prediction", "probability"] and len(told) == 2
            assert set(told["prediction"]) <= {"no", "yes"}


def test_memory_that_runs_out_halves_a_dict_too(
    own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own("mine", MINE)
    asked = {"model": {"name": "mine:Wide"}, "data": {"source": "mine:pairs"}}
    config = RunConfig.model_validate({**asked, "train": {"batch_size": 16}})
    data, device = (
        prepare_dataset(config.data, batch_size=16),
        detect_best_device("cpu"),
    )
    most, least = (
        forecast_training(make_plan(config, device, data), micro_batch=rows).needed_bytes
        for rows in (16, 2)
    )
    limit = {"limit_mib": (most + least) / 2 / 1024**2}
    started = Admission(None, "", 16, "as if nobody had foretold it")
    monkeypatch.setattr(place, "admit_training", lambda *a, **k: started)
    limited = _trained(own, tmp_path, model="mine:Wide", source="mine:pairs", memory=limit)
    assert limited.metrics["memory/ooms_recovered"] >= 1
    assert int(limited.tags["micro_batch"]) < 16
    whole = _trained(own, tmp_path / "whole", model="mine:Wide", source="mine:pairs")
    assert limited.metrics["val/loss"] == pytest.approx(whole.metrics["val/loss"], rel=1e-4)


def test_a_forecast_draws_none_of_the_random_numbers_that_the_weights_are_made_of(
    own: Own, tmp_path: Path
) -> None:
    """It builds the model: on a GPU, or under a limit, other weights came of the same seed."""
    plain = _trained(own, tmp_path, model="mine:Net", source="mine:pairs")
    memory = {"limit_mib": 4096.0}
    limited = _trained(own, tmp_path / "b", model="mine:Net", source="mine:pairs", memory=memory)
    assert limited.metrics["val/loss"] == pytest.approx(plain.metrics["val/loss"], rel=1e-5)


def test_a_mistake_in_the_middle_is_told_by_name_and_line(own: Own, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"mine.py:\d\d") as got:
        _trained(own, tmp_path, model="mine:Net", source="mine:pairs", args={"flawed": True})
    assert "left" in str(got.value)


def test_what_a_lost_peer_leaves_behind_is_no_mistake_of_the_model(
    own: Own, tmp_path: Path
) -> None:
    """It was told as one, and the training of the others ended in place of beginning again."""
    with pytest.raises(RuntimeError, match=r"^\[gloo/pair.cc:553\] Connection closed"):
        _trained(own, tmp_path, model="mine:Net", source="mine:pairs", args={"flawed": "peer"})


@pytest.mark.parametrize(("loss", "why"), [("held", "by a dry step"), ("read", "^train.loss: ")])
def test_a_loss_that_holds_tensors_or_reads_values_is_foretold_or_says_why_not(
    own: Own, tmp_path: Path, loss: str, why: str
) -> None:
    """With a built-in model the dry step of either ended the run."""
    more = {"train": {"loss": f"mine:{loss}"}, "memory": {"limit_mib": 4096.0}}
    facts = _trained(own, tmp_path, model="linear", source="mine:plain", **more)
    assert re.search(why, facts.tags["memory.admission"]), facts.tags


@pytest.mark.parametrize("fed", [False, True])
def test_a_loss_and_metrics_of_ones_own_see_what_the_logged_model_predicts(
    own: Own, tmp_path: Path, fed: bool
) -> None:
    """In the target's units, though arrays are scaled, and data sets are fed as they are."""
    own("mine", MINE)
    figures = {"loss": "mine:relative", "metrics": {"off": "mine:relative"}, "batch_size": 16}
    config = RunConfig.model_validate(
        {
            "model": {"name": "mine:Line"},
            "data": {"source": "mine:amounts", "args": {"fed": fed}},
            "train": figures,
        }
    )
    data = prepare_dataset(config.data, batch_size=16)
    assert (data.target_scale == (1.0,)) == fed
    facts = trainer.train(
        make_plan(config, detect_best_device("cpu"), data),
        folder=tmp_path / "run",
        log=lambda m, s: None,
    )
    assert facts.metrics["val/loss"] == pytest.approx(facts.metrics["val/off"], rel=1e-5)
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    predicted = predictor.load(facts.model_folder).predict(x.numpy())["prediction"].to_numpy()
    y = 1000 + 100 * x[:, 0].numpy()
    off = np.abs(predicted / y - 1).mean()
    assert off == pytest.approx(facts.metrics["val/off"], rel=0.4)
    assert off > 0.9 if fed else off < 0.1


ENDING = """
import sys
class Odd(BaseException): ...
def late(kind):
    if kind == "exit": sys.exit(0)
    if kind == "text": raise ValueError(chr(0xd800))
    raise {"odd": Odd, "generator": GeneratorExit, "interrupt": KeyboardInterrupt}[kind]("enough")
class Ending(Net):
    def __init__(self, outputs, kind):
        super().__init__(outputs)
        self.kind = kind
    def forward(self, a, b):
        self.calls += 1
        if self.calls > 3: late(self.kind)
        return self.left(a)
class Rows(Pairs):
    def __init__(self, kind): self.kind = kind
    def __getitem__(self, i): return super().__getitem__(i) if i < 50 else late(self.kind)
def rows(kind): return DataLoader(Rows(kind), 10), DataLoader(Pairs(), 10)
def none(kind): late(kind)
"""


STOPS = """
class Stops(Pairs):
    def __getitem__(self, i):
        if i == 77: raise StopIteration
        return super().__getitem__(i)
    def __len__(self): return 100
def rows(): return Stops(), Pairs()
def loaders(): return DataLoader(Stops(), 10), DataLoader(Pairs(), 10)
def workers(): return DataLoader(Stops(), 10, num_workers=1), DataLoader(Pairs(), 10)
"""


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("source", "row"), [("rows", " at row 77"), ("loaders", " at row 77"), ("workers", "")]
)
def test_a_row_that_raises_the_end_of_the_epoch_is_told(
    own: Own, tmp_path: Path, source: str, row: str
) -> None:
    """Every epoch ended there, and nobody knew."""
    told = rf"^data.source: .*raised: mine.py:\d+: StopIteration.*{row}, which would end the epoch"
    with pytest.raises(DataError, match=told):
        _trained(own, tmp_path, model="mine:Net", source=f"mine:{source}", more=STOPS)


KILLED = """
import os
class Late(Pairs):
    def __getitem__(self, i):
        if i == 50: os.kill(os.getpid(), 9)
        return super().__getitem__(i)
def late(): return DataLoader(Late(), 10, num_workers=2), DataLoader(Pairs(), 10)
"""


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_worker_that_is_killed_is_said_and_leaves_nothing_of_its_own(
    own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each left a folder for its sockets among the temporary files."""
    there = Path(tempfile.mkdtemp())  # a socket's path is short
    monkeypatch.setattr("tempfile.tempdir", str(there))
    monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)
    with pytest.raises(
        RuntimeError,
        match="^data.source: a worker process of the loader has died .DataLoader worker",
    ):
        _trained(own, tmp_path, model="mine:Net", source="mine:late", more=KILLED)
    ours = multiprocessing.util.get_temp_dir()
    assert [str(file) for file in there.iterdir()] == [ours]
    for at_exit in list(multiprocessing.util._finalizer_registry.values()):
        if at_exit._args and at_exit._args[-1] == ours:
            at_exit()
    there.rmdir()


def test_a_metric_that_raises_is_told_under_its_setting(own: Own, tmp_path: Path) -> None:
    """It was told as one of the model, for its words are PyTorch's."""
    told = r"^train.metrics.mine: mine:of_two, .* raised: mine.py:\d+: TypeError: two, but"
    with pytest.raises(ConfigError, match=told):
        metrics = {"metrics": {"mine": "mine:of_two"}}
        _trained(own, tmp_path, model="mine:Net", source="mine:pairs", train=metrics)


NUMBERS = """
class Sick(Dataset):
    classes = ["no", "yes"]
    def __init__(self, bad): self.bad = bad
    def __len__(self): return 60
    def __getitem__(self, i):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        wide = torch.full((2, 3), float("nan") if i == self.bad else 1.0)
        return {"a": x, "b": [wide[0, :1] + x, torch.tensor(2.0)]}, int(x[0] > 0)
def sick(batch_size, bad=37):
    return DataLoader(Sick(bad), batch_size), DataLoader(Sick(-1), batch_size)
def well(batch_size): return sick(batch_size, bad=-1)
calls = []
def wrong(outputs, targets):
    if outputs.requires_grad: calls.append(1)  # the look at two rows, then the steps
    loss = functional.cross_entropy(outputs, targets)
    return loss + (len(calls) > 4) * torch.tensor(-1.0).log() if len(calls) > 4 else loss
def far(outputs, targets): return functional.cross_entropy(outputs * 1e38 * 1e38, targets)
class Far(Net):
    def forward(self, a, b):
        self.calls += 1
        return self.left(a) * (float("inf") if self.calls > 4 else 1)
"""


@pytest.mark.parametrize(
    ("source", "model", "loss", "said"),
    [
        (
            "mine:sick",
            "mine:Wide",
            "auto",
            r"^data.source: the loss became nan at step 3 \(epoch 1, .* at step 2. "
            r"inputs\['b'\]\[0\] holds a number there that is not finite, in row 6 of that step",
        ),
        (
            "mine:well",
            "mine:Net",
            "mine:wrong",
            r"^train.loss: the loss became nan at step 5 .* mine:wrong gave it for outputs and "
            "targets that are finite: look there",
        ),
        (
            "mine:well",
            "mine:Net",
            "mine:far",
            r"^train.loss: the loss became nan at step 1 .*no step was good. mine:far gave it",
        ),
        (
            "mine:well",
            "mine:Far",
            "mine:mean_of",
            r"^train.loss: became (nan|inf) at .*Lower optim",
        ),
        ("mine:well", "mine:Far", "auto", r"^train.loss: became nan at .*. Lower optim.lr"),
    ],
)
def test_a_loss_that_is_no_number_is_blamed_on_the_row_or_the_loss_that_made_it(
    own: Own, tmp_path: Path, source: str, model: str, loss: str, said: str
) -> None:
    """All of it was blamed on the learning rate."""
    with pytest.raises(Diverged, match=said):
        _trained(own, tmp_path, model=model, source=source, more=NUMBERS, train={"loss": loss})


def test_a_model_that_reads_values_is_trained_though_nothing_can_be_foretold(
    own: Own, tmp_path: Path
) -> None:
    facts = _trained(
        own,
        tmp_path,
        model="mine:Peeking",
        source="mine:tuples",
        memory={"limit_mib": 100},
    )
    assert "cannot be told beforehand" in facts.tags["memory.admission"]
    config = RunConfig.model_validate(
        {"model": {"name": "mine:Peeking"}, "data": {"source": "mine:tuples"}}
    )
    with pytest.raises(
        UnforeseeableMemory, match="^model.name: what mine:Peeking will take cannot be"
    ):
        forecast_training(
            make_plan(config, detect_best_device("cpu"), prepare_dataset(config.data))
        )


def test_a_loaders_own_batches_are_as_large_as_they_are(own: Own) -> None:
    own("mine", MINE + "def own_loader(): return DataLoader(Pairs(), batch_size=7)\n")
    config = RunConfig.model_validate(
        {"data": {"source": "mine:own_loader"}, "train": {"batch_size": 32, "accumulate": 9}}
    )
    data = prepare_dataset(config.data, batch_size=32)
    assert (data.batch_rows, data.train_rows) == (7, 48)
    train = make_plan(config, detect_best_device("cpu"), data).settings.train
    assert (train.batch_size, train.accumulate) == (7, 7)


def test_a_builtin_model_takes_loaders_of_one_tensor_that_tell_their_classes(
    own: Own, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="^model.name: linear takes one float32 tensor, .* a dict"):
        _trained(own, tmp_path, model="linear", source="mine:pairs")
    plain = "\nx = torch.randn(40, 4)\ny = torch.arange(40) % 2\n"
    for kind, words in (
        ("TensorDataset(x, y)", "give its data set an attribute `classes`"),
        ("TensorDataset(x.double(), y)", "hold float64; convert it there"),
    ):
        own("other", MINE + plain + f"def f(): return {kind}\n")
        config = RunConfig.model_validate(
            {"model": {"name": "linear"}, "data": {"source": "other:f"}}
        )
        with pytest.raises(ModelError, match=words):
            check_plan(make_plan(config, detect_best_device("cpu"), prepare_dataset(config.data)))
        __import__("sys").modules.pop("other")


class _Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)


def _loss(x: dict[str, Any], y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(x["model"](x["in"]) + x["bias"], y)


def test_micro_batches_of_a_dict_give_the_gradients_of_the_whole() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    x = {"in": torch.randn(7, 3), "bias": torch.randn(2), "model": model}
    y = torch.arange(7) % 2
    grads = []
    for rows in (7, 2):
        optimizer = make_fused_optimizer(
            "sgd", model.parameters(), lr=0.0, weight_decay=0.0, args={"momentum": 0.0}
        )
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        step = Step(
            _loss, optimizer, scaler, nullcontext, None, SingleAttempt(rows), lambda phase: None
        )
        outcome = step(Batch(x, y, len(y)), norm=True, watched=Watched.NOT)
        grads.append((outcome.loss.item(), model.weight.grad.clone()))
    assert grads[0][0] == pytest.approx(grads[1][0])
    torch.testing.assert_close(grads[0][1], grads[1][1])


def _count_rows(y: Any) -> int:
    return _count_rows(next(iter(y.values()))) if isinstance(y, dict) else len(y)


class _Kept:
    """Batches as they are."""

    def __init__(self, *batches: Any) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return sum(_count_rows(y) for _, y in self._batches)

    def iterate_in_order(self, batch_size: int):
        return (Batch(x, y, _count_rows(y)) for x, y in self._batches)


class _Unwatched:
    def __init__(self) -> None:
        self.meter = self

    def end_phase(self, name: str) -> None: ...

    def count_memory_once(self, phase: str, batch: Any) -> Any:
        return nullcontext()


def _figures(task: str, loss: Any, *batches: Any, metrics: Any = None, rows: int = 100) -> dict:
    evaluator = Evaluator(
        task, loss, nullcontext, SingleAttempt(rows), _Unwatched(), metrics=metrics or {}
    )
    return evaluate(nn.Identity(), _Kept(*batches), evaluator).metrics


@pytest.mark.parametrize("rows", [100, 1])
def test_figures_of_several_labels_are_counted_over_all_of_them(rows: int) -> None:
    outputs = torch.tensor([[3.0, -1.0], [2.0, 2.0], [-4.0, -0.1]])
    labels = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    loss = functional.binary_cross_entropy_with_logits
    got = _figures("multilabel", loss, (outputs[:2], labels[:2]), (outputs[2:], labels[2:]))
    assert got["val/accuracy"] == pytest.approx(4 / 6)
    assert got["val/f1"] == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert got["val/loss"] == pytest.approx(loss(outputs, labels).item())


@pytest.mark.parametrize("rows", [100, 2])
def test_a_users_metric_is_averaged_over_the_rows(rows: int) -> None:
    x = torch.arange(12.0).reshape(6, 2)
    batches = ((x[:4], x[:4]), (x[4:], x[4:]))
    mean = {"mean": lambda outputs, targets: outputs.mean(), "one": lambda *_: 1}
    got = _figures("regression", functional.mse_loss, *batches, metrics=mean, rows=rows)
    assert got["val/mean"] == pytest.approx(5.5) and got["val/one"] == 1 and got["val/r2"] == 1


def test_r2_and_mae_are_those_of_scikit_learn_and_r2_is_not_known_of_one_value() -> None:
    from sklearn.metrics import mean_absolute_error, r2_score

    told, so = torch.tensor([[1.0], [2.5], [4.0]]), torch.tensor([[1.5], [2.0], [5.0]])
    got = _figures("regression", functional.mse_loss, (told[:2], so[:2]), (told[2:], so[2:]))
    assert got["val/r2"] == pytest.approx(r2_score(so, told), rel=1e-6)
    assert got["val/mae"] == pytest.approx(mean_absolute_error(so, told), rel=1e-6)
    same = _figures("regression", functional.mse_loss, (told, torch.full((3, 1), 2.0)))
    assert "val/r2" not in same and same["val/mae"] == pytest.approx(3.5 / 3)


def test_balanced_classes_weigh_as_scikit_learn_weighs_them() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    from tests.training.test_own_model import ROWS

    train = RunConfig.model_validate({"train": {"loss_args": {"class_weights": "balanced"}}}).train
    loss = make_loss(train, ROWS, CPU)
    y = np.repeat([0, 1, 2], [20, 15, 5])
    expected = compute_class_weight("balanced", classes=np.arange(3), y=y)
    np.testing.assert_allclose(loss.weights, expected, rtol=1e-6)
    logits, classes = torch.randn(8, 3), torch.arange(8) % 3
    rowwise = functional.cross_entropy(logits, classes, reduction="none")
    by_hand = (rowwise * loss.weights[classes]).mean()
    torch.testing.assert_close(loss(logits, classes), by_hand)
    parts = [loss(logits[:3], classes[:3]) * 3 / 8, loss(logits[3:], classes[3:]) * 5 / 8]
    torch.testing.assert_close(sum(parts), by_hand)


def test_a_loss_of_ones_own_is_called_with_its_arguments_and_keeps_its_count(own: Own) -> None:
    own(
        "mine",
        "def loss(outputs, targets, power, weight=1.0):\n"
        "    return weight * (outputs[:, 0] - targets).abs().pow(power).mean()\n"
        "loss.count = len\n",
    )
    from tests.training.test_own_model import ROWS

    own = {"loss": "mine:loss", "loss_args": {"power": 2, "weight": 0.5}}
    train = RunConfig.model_validate({"train": own}).train
    outputs, targets = torch.randn(4, 3), torch.randn(4)
    expected = 0.5 * (outputs[:, 0] - targets).square().mean()
    torch.testing.assert_close(make_loss(train, ROWS, CPU)(outputs, targets), expected)
    assert choose_count(train, ROWS)(None, targets) == 4


NORMED = """
class Normed(nn.Module):
    def __init__(self, outputs=2):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, outputs)
    def forward(self, x): return self.out(self.norm(x))
"""


@pytest.mark.parametrize("train", [{"batch_size": 47}, {"batch_size": 16, "accumulate": 16}])
def test_a_batch_of_one_row_for_a_batch_norm_is_refused_before_the_first_step(
    own: Own, tmp_path: Path, train: dict[str, int]
) -> None:
    """It ended the first epoch, at its last batch."""
    with pytest.raises(ModelError, match="batch_size that does not leave a single row") as refused:
        _trained(own, tmp_path, model="mine:Normed", source="mine:plain", train=train, more=NORMED)
    assert "mine.py:" in str(refused.value) and not (tmp_path / "run").exists()
    kept = {"batch_size": 12}
    done = _trained(
        own, tmp_path, model="mine:Normed", source="mine:plain", train=kept, more=NORMED
    )
    assert done.steps == 8


STREAM = """
from itertools import count
from torch.utils.data import IterableDataset
class Stream(IterableDataset):
    def __init__(self, rows): self.rows = rows
    def __iter__(self):
        for i in count() if self.rows is None else range(self.rows):
            yield torch.ones(4) * (i % 3), i % 2
def endless(rows=None): return Stream(rows), Stream(9)
"""


def test_a_stream_without_a_length_trains_for_max_steps(own: Own, tmp_path: Path) -> None:
    run = {"model": "mine:Normed", "source": "mine:endless", "more": NORMED + STREAM}
    with pytest.raises(
        ConfigError, match="^train.max_steps: is needed, .* mine:endless has no len"
    ):
        _trained(own, tmp_path, **run)
    done = _trained(own, tmp_path, **run, train={"max_steps": 7, "log_every": 2})
    assert (done.steps, done.epochs) == (7, 1)
    assert done.metrics["val/accuracy"] == pytest.approx(
        round(9 * done.metrics["val/accuracy"]) / 9
    )


def test_a_forward_of_one_parameter_takes_a_dict_whole(own: Own, tmp_path: Path) -> None:
    """`forward(self, batch)` was called with batch["a"] as `a`, and said that it takes no `a`."""
    whole = """
class Whole(Net):
    def forward(self, batch): return self.left(batch["a"]) + self.right(batch["b"][0])
"""
    done = _trained(own, tmp_path, model="mine:Whole", source="mine:pairs", more=whole)
    assert done.steps == 6


OPTIM = """
from torch.optim import LBFGS, SGD
class Mine(SGD): pass
def closing(params): return LBFGS(list(params))
def none(params, lr): return None
def broken(params, lr): raise KeyError("no such group")
def stairs(step, steps): return 1.0 if step < steps / 2 else 0.1
def falling(step, steps): return 1 - step
def powers(step, steps, *, base): return base ** step
"""


@pytest.mark.parametrize("name", ["RMSprop", "Adagrad", "Adafactor", "AdamW", "mine:Mine"])
def test_any_optimizer_of_torch_trains_by_its_name_and_ones_own_by_its_path(
    own: Own, tmp_path: Path, name: str
) -> None:
    optimizing = {"name": name, "lr": 0.05, "schedule": "mine:stairs"}
    run = {"model": "mine:Several", "source": "mine:tuples", "more": OPTIM}
    done = _trained(own, tmp_path, **run, optim=optimizing, train={"epochs": 10})
    assert done.steps == 30 and done.metrics["val/loss"] < math.log(2)


@pytest.mark.parametrize(
    ("optimizing", "words"),
    [
        (
            {"name": "mine:none", "args": {"momentum": 0.5}},
            "optim.args.momentum: mine:none takes none of this name, but params, lr",
        ),
        ({"name": "mine:none", "args": {"lr": 0.5}}, "optim.args.lr: is a setting of its own"),
        (
            {"name": "mine:none", "weight_decay": 0.01},
            "optim.weight_decay: mine:none takes none .got 0.01.; drop it",
        ),
        ({"name": "mine:closing"}, "optim.name: the steps of mine:closing search along a line"),
        (
            {"name": "mine:none"},
            "optim.name: mine:none must give a torch.optim.Optimizer .got a No",
        ),
        ({"name": "mine:broken"}, "optim.name: mine:broken raised: mine.py:.*no such group"),
        ({"schedule": "mine:gone"}, "optim.schedule: mine has no gone"),
        (
            {"schedule": "mine:powers", "schedule_args": {"root": 2}},
            "optim.schedule: mine:powers at step 0 of 6 raised: .*root",
        ),
        ({"schedule": "mine:falling"}, "optim.schedule: mine:falling at step 5 of 6 gave -4"),
    ],
)
def test_what_an_optimizer_or_a_schedule_cannot_do_is_told_before_the_first_step(
    own: Own, tmp_path: Path, optimizing: dict[str, Any], words: str
) -> None:
    run = {"model": "mine:Several", "source": "mine:tuples", "more": OPTIM}
    with pytest.raises(ConfigError, match=f"^{words}"):
        _trained(own, tmp_path, **run, optim=optimizing)
    assert not (tmp_path / "run").exists()


def test_an_optimizer_and_a_schedule_of_ones_own_are_called_with_their_arguments(
    own: Own, tmp_path: Path
) -> None:
    optimizing = {
        "name": "mine:Mine",
        "args": {"momentum": 0.5, "nesterov": True},
        "schedule": "mine:powers",
        "schedule_args": {"base": 0.5},
    }
    run = {"model": "mine:Several", "source": "mine:tuples", "more": OPTIM}
    _trained(own, tmp_path, **run, optim=optimizing)
    o = OptimConfig.model_validate(optimizing)
    weight = nn.Parameter(torch.ones(2, 2))
    (group,) = make_torch_optimizer(o, [weight])._inner.param_groups
    assert (group["momentum"], group["nesterov"], group["weight_decay"]) == (0.5, True, 0.01)
    assert make_schedule(o, steps=3)(2) == o.lr / 4


def test_an_optimizer_of_torch_is_that_of_a_plain_loop_with_the_rate_of_each_step() -> None:
    config = RunConfig.model_validate({"optim": {"name": "NAdam", "lr": 0.1, "weight_decay": 0.3}})
    torch.manual_seed(0)
    mine, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(mine.state_dict())
    made = build.make_optimizer(config.optim, mine)
    with pytest.raises(
        UnforeseeableMemory, match="^optim.name: what NAdam will take cannot be told"
    ):
        forecast_training(
            make_plan(config, detect_best_device("cpu"), prepare_dataset(config.data))
        )
    groups = [{"params": [plain.weight]}, {"params": [plain.bias], "weight_decay": 0.0}]
    theirs = torch.optim.NAdam(groups, lr=0.1, betas=(0.9, 0.999), weight_decay=0.3)
    for rate in (0.1, 0.05, 0.0, 0.2):
        made.set_lr(rate)
        for group in theirs.param_groups:
            group["lr"] = rate
        for model, optimizer in ((mine, made), (plain, theirs)):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match="optim.name\n.*the steps of LBFGS search along a line"):
        RunConfig.model_validate({"optim": {"name": "LBFGS"}})


TORCH_OPTIMIZERS = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam"),
    *("RAdam", "RMSprop", "Rprop", "SGD"),
)


@pytest.mark.parametrize("name", TORCH_OPTIMIZERS)
def test_what_nobody_asked_of_an_optimizer_of_torch_is_as_torch_presets_it(name: str) -> None:
    """RMSprop had a momentum of 0.9 and, like Adam, a weight decay of 0.01."""
    asked = OptimConfig.model_validate({"name": name, "lr": 0.01})
    torch.manual_seed(0)
    mine, plain = (nn.Linear(3, 2, bias=False) for _ in range(2))
    plain.load_state_dict(mine.state_dict())
    made = build.make_optimizer(asked, mine)
    theirs = getattr(torch.optim, name)(plain.parameters(), lr=0.01)
    made.set_lr(0.01)
    for _ in range(5):
        for model, optimizer in ((mine, made), (plain, theirs)):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
    assert torch.equal(mine.weight, plain.weight)


PADDED = """
class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(30, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 3)
    def forward(self, x):
        is_padding = torch.arange(9) > 5 - 2 * (x[:, :1] % 2)
        return self.head(self.body(self.words(x), src_key_padding_mask=is_padding)[:, 0])
def padded(batch_size):
    x = torch.randint(1, 30, (32, 9), generator=torch.Generator().manual_seed(0))
    part = TensorDataset(x[:20], x[:20, 0] % 3), TensorDataset(x[20:], x[20:, 0] % 3)
    return DataLoader(part[0], batch_size), DataLoader(part[1], 12)
"""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_padded_rows_in_an_encoder_train_as_by_hand(own: Own, tmp_path: Path) -> None:
    """In an evaluation PyTorch's encoder makes a nested tensor of them, which was asked for its
    shape: the first one failed, and the user's line was blamed."""
    settings = {"name": "Adam", "lr": 0.01, "weight_decay": 0.0, "schedule": "constant"}
    facts = _trained(
        *(own, tmp_path),
        **{"model": "mine:Padded", "source": "mine:padded", "more": PADDED, "optim": settings},
        train={"batch_size": 8, "keep": "last", "deterministic": True},
    )
    theirs = importlib.import_module("mine")
    torch.manual_seed(0)
    model, (rows, val) = theirs.Padded(), theirs.padded(8)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(2):
        model.train()
        for x, y in rows:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        ((x, y),) = list(val)
        with torch.inference_mode():
            loss = functional.cross_entropy(model.eval()(x), y)
    assert facts.metrics["val/loss"] == pytest.approx(float(loss), rel=1e-6)
    found = torch.load(tmp_path / "run" / "model" / "weights.pt", weights_only=True)
    assert [k for k, v in model.state_dict().items() if not torch.equal(v, found[k])] == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_the_memory_of_padded_rows_in_an_encoder_is_forecast(own: Own, tmp_path: Path) -> None:
    """A nested tensor of the dry evaluation was asked for its shape, and there was no forecast."""
    given = {"model": "mine:Padded", "source": "mine:padded", "more": PADDED}
    facts = _trained(own, tmp_path, **given, memory={"limit_mib": 1000})
    assert "by a dry step" in facts.tags["memory.admission"]


FREE = """
class Free(nn.Module):
    def __init__(self, gives_loss=True, writes=False):
        super().__init__()
        self.body, self.gives_loss, self.writes = nn.Linear(4, 6), gives_loss, writes
    def forward(self, x, labels=None):
        if self.writes and not self.training: x.mul_(1.0)
        outputs = self.body(x).unflatten(1, (2, 3))
        loss = outputs.square().mean() if self.gives_loss else None
        return {"loss": loss, "parts": outputs}
def rows(labels):
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    given = {"maps": torch.zeros(20, 5, 5).long(), "amounts": torch.full((20, 7), 2.5)}.get(labels)
    parts = [{"x": row} if given is None else {"x": row, "labels": given[0]} for row in x]
    return DataLoader(parts, 5), DataLoader(parts, 5)
def pairs():
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    return [TensorDataset(x, torch.zeros(20, 5, 5).long())] * 2
def shrink(outputs, targets): return outputs.square().mean() + 0 * targets.float().mean()
"""


@pytest.mark.parametrize("labels", ["maps", "amounts", "none"])
def test_labels_are_free_where_the_model_gives_its_loss(
    own: Own, tmp_path: Path, labels: str
) -> None:
    """Labels of another shape than the inputs or the outputs were refused, and so were none."""
    given = {"model": "mine:Free", "source": "mine:rows", "more": FREE}
    facts = _trained(own, tmp_path, **given, data={"args": {"labels": labels}})
    assert {name for name in facts.metrics if name.startswith("val/")} == {"val/loss"}
    told = predictor.load(facts.model_folder).predict({"x": np.zeros((3, 4), "float32")})
    assert np.array(told["prediction"].tolist()).shape == (3, 2, 3)


@pytest.mark.parametrize(
    ("labels", "settings", "message"),
    [
        ("none", {}, "model.name: mine:Free gives no loss, and .*; let it return one as `loss`"),
        ("maps", {}, "model.name: mine:Free gives no loss, and .*; let it return one as `loss`"),
        ("amounts", {}, r"model.name: mine:Free must return \(2, 7\) for two rows"),
        ("none", {"data": {"task": "tokens"}}, "data.task: tokens needs targets, and the batches"),
    ],
)
def test_a_model_without_a_loss_for_such_labels_is_refused(
    own: Own, tmp_path: Path, labels: str, settings: dict[str, Any], message: str
) -> None:
    data = {"args": {"labels": labels}, **settings.get("data", {})}
    given = {"model": "mine:Free", "source": "mine:rows", "more": FREE, "data": data}
    with pytest.raises((ModelError, DataError), match=message):
        _trained(own, tmp_path, **given, args={"gives_loss": False})


def test_a_figure_that_free_outputs_do_not_have_is_refused(own: Own, tmp_path: Path) -> None:
    given = {"model": "mine:Free", "source": "mine:rows", "more": FREE}
    with pytest.raises(ConfigError, match="train.best_metric: val/r2 needs outputs of the shape"):
        _trained(
            *(own, tmp_path),
            **given,
            data={"args": {"labels": "amounts"}},
            train={"best_metric": "val/r2"},
        )


def test_targets_that_tell_no_task_train_with_a_loss_of_ones_own(own: Own, tmp_path: Path) -> None:
    """The remedy that was named, a data.task and a train.loss, was refused in its turn."""
    given = {"model": "mine:Free", "source": "mine:pairs", "more": FREE}
    with pytest.raises(DataError, match="set data.task to own, and train.loss to a function"):
        _trained(own, tmp_path, **given)
    facts = _trained(*(own, tmp_path), **given, data={"task": "own"}, train={"loss": "mine:shrink"})
    assert math.isfinite(facts.metrics["val/loss"])


def test_writing_in_an_evaluation_is_told_as_it_is(own: Own, tmp_path: Path) -> None:
    """What writes in each evaluation was said to write in some only."""
    late = """
class Late(Line):
    def forward(self, x):
        if not self.training and len(x) > 3: x.mul_(1.0)  # the trial has three rows
        return super().forward(x)
"""
    with pytest.raises(ModelError, match="given when it is evaluated, and did not in training"):
        _trained(own, tmp_path, model="mine:Late", source="mine:amounts", more=late)
