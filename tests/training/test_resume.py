"""A training that was ended somewhere and goes on gives, bit for bit, what an undisturbed one
gives."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from headroom.base.facts import TrainFacts
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig
from headroom.training import trainer
from headroom.training.compatibility import describe_training, refuse_other_training
from headroom.training.kept_steps import list_steps
from headroom.training.loop import StopRequest
from headroom.training.plan import make_plan

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
        facts = train(folder, sections, log=log, **{"check_stop": asked, **kwargs})
        assert not facts.stopped
    except Killed:
        pass
    return series


def train(folder: Path, sections: dict[str, Any], **kwargs: Any) -> TrainFacts:
    given = {"data": {"cache": str(folder.parent / "data")}, "train": {}, **sections}
    given["data"] = {"cache": str(folder.parent / "data"), **given["data"]}
    given["train"] = {"epochs": 3, "log_every": 4, **given["train"]}
    given = {"device": {"name": "cpu"}, "checkpoint": {"every": "5steps"}, **given}
    config = RunConfig.model_validate(given)
    data = prepare_dataset(config.data, batch_size=config.train.batch_size, seed=config.train.seed)
    kwargs = {"log": lambda metrics, step: None, **kwargs}
    return trainer.train(
        make_plan(config, detect_best_device(config.device.name), data), folder=folder, **kwargs
    )


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
    "one cycle": {"optim": {"schedule": "one_cycle"}},
    "linear, warm-up in steps": {"optim": {"schedule": "linear", "warmup": 7}},
    "step": {"optim": {"schedule": "step", "schedule_args": {"step_size": 1, "gamma": 0.5}}},
    "plateau": {
        "optim": {
            "schedule": "plateau",
            "schedule_args": {"patience": 0, "factor": 0.5},
            "lr": 0.05,
        },
        "train": {"eval_every_steps": 4, "best_metric": "val/accuracy", "min_delta": 0.01},
    },
    "within an epoch": {
        "optim": {"lr": 0.1},
        "model": {"args": {"dropout": 0.3}},
        "train": {"eval_every_steps": 7, "patience": 3, "epochs": 6},
    },
    "averaged weights": {"optim": {"ema_decay": 0.9}, "train": {"eval_every_steps": 9}},
    "averaged weights, the last": {
        "optim": {"ema_decay": 0.9, "name": "RMSprop", "lr": 1e-3},
        "train": {"keep": "last"},
    },
    "parts": {
        "model": {"freeze": ["3"], "args": {"hidden": [32, 16]}},
        "optim": {"groups": {"*.weight": {"lr": 1e-3, "weight_decay": 0.3}}},
    },
    "label smoothing": {
        "train": {"loss_args": {"label_smoothing": 0.1, "class_weights": "balanced"}}
    },
    "regression": {
        "data": {"source": "synthetic", "args": {"classes": 1, "rows": 500, "features": 8}}
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_it_goes_on_to_the_same_bits_wherever_it_was_killed(tmp_path: Path, way: str) -> None:
    whole = play(tmp_path / "whole", WAYS[way])
    last = max(step for _, step in whole)
    for at in (5, 23, 29, last):
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


LOADERS = """
import torch
from torch.utils.data import DataLoader, TensorDataset

class Kept(DataLoader):
    '''A loader that can be left in the middle of an epoch.'''

    skipped = 0

    def __iter__(self):
        self.begun = self.generator.get_state()
        self.done = 0
        for batch in super().__iter__():
            self.done += 1
            if self.done > self.skipped:
                yield batch
        self.skipped = 0

    def state_dict(self):
        return {"done": self.done, "begun": self.begun}

    def load_state_dict(self, state):
        self.skipped = state["done"]
        self.generator.set_state(state["begun"])

def made(kind):
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(256, 6, generator=drawn)
    y = (x.sum(1) > 0).long()
    rows = TensorDataset(x, y)
    rows.classes = ['no', 'yes']
    order = torch.Generator().manual_seed(4)
    return kind(rows, batch_size=16, shuffle=True, generator=order), DataLoader(rows, batch_size=64)

def kept():
    return made(Kept)

def plain():
    return made(DataLoader)
"""


def _own(factory: str) -> dict[str, Any]:
    args = {"hidden": [8], "dropout": 0.2}
    return {"data": {"source": f"my_rows:{factory}"}, "model": {"args": args}}


def test_a_loader_that_keeps_its_place_goes_on_to_the_same_bits(tmp_path: Path, own: Any) -> None:
    own("my_rows", LOADERS)
    whole = play(tmp_path / "whole", _own("kept"))
    for at in (7, 16, 20, 47):
        folder = tmp_path / f"killed-{at}"
        before = play(folder, _own("kept"), at=at)
        assert {**before, **play(folder, _own("kept"), resumes=True)} == whole, at
        same_to_the_bit(tmp_path / "whole", folder)


def test_a_loader_that_does_not_begins_its_epoch_again_and_says_so(
    tmp_path: Path, own: Any, caplog: pytest.LogCaptureFixture
) -> None:
    own("my_rows", LOADERS)
    play(tmp_path / "run", _own("plain"), at=23)
    play(tmp_path / "run", _own("plain"), resumes=True)
    told = r"this loader has no state_dict: its epoch, of which \d+ batches were done, begins again"
    assert re.search(told, caplog.text)


def test_at_the_end_of_an_epoch_any_loader_goes_on_to_the_same_bits(
    tmp_path: Path, own: Any
) -> None:
    own("my_rows", LOADERS)
    sections = {**_own("plain"), "checkpoint": {"every": "16steps"}}
    whole = play(tmp_path / "whole", sections)
    before = play(tmp_path / "run", sections, at=21)
    assert {**before, **play(tmp_path / "run", sections, resumes=True)} == whole
    same_to_the_bit(tmp_path / "whole", tmp_path / "run")


MODEL = """
from torch import nn
from my_layers import layers

def make(input_shape, outputs):
    return nn.Sequential(nn.Flatten(), *layers(input_shape[0] * 64, outputs))
"""
LAYERS = """
from torch import nn

def layers(inputs, outputs):
    return nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs)
"""


def test_code_that_has_changed_since_is_told_and_goes_on(tmp_path: Path, own: Any) -> None:
    """A model of the same shapes and other code went on without a word."""
    own("my_model", MODEL)
    own("my_layers", LAYERS)
    sections = {"model": {"name": "my_model:make"}}
    play(tmp_path / "run", sections, at=9)
    same = train(tmp_path / "run", {**sections, "train": {"max_steps": 20}}, resumes=True)
    assert not [told for told in same.warnings if "changed" in told]
    own("my_layers", LAYERS.replace("ReLU", "Tanh"))
    facts = train(tmp_path / "run", sections, resumes=True)
    told = "my_layers.py has changed since the checkpoint was written: the training goes on with"
    assert [warning for warning in facts.warnings if warning.startswith(told)]


WITH_LOGIN = MODEL.replace("outputs):", "outputs, url):")


def test_a_login_in_an_argument_is_kept_as_a_salted_hash(
    tmp_path: Path, own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was kept as it is in the checkpoint's JSON, and stars were compared with it."""
    own("my_model", WITH_LOGIN)
    own("my_layers", LAYERS)

    def make(url: str) -> dict[str, Any]:
        monkeypatch.setenv("HEADROOM_SECRET_MODEL_ARGS_URL", url)
        return {"model": {"name": "my_model:make", "args": {"url": url}}}

    play(tmp_path / "run", make("postgresql://ann:Hunter@db/x"), at=9)
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert not [file for file in files if b"Hunter" in file.read_bytes()]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    whole = list_steps(tmp_path / "run" / "checkpoints")
    with pytest.raises(ConfigError, match="model.args: was .*ann:[*]{3}@db/x.* is .*ann:[*]{3}@h"):
        train(tmp_path / "run", make("postgresql://ann:Hunter@h"), resumes=True)
    assert list_steps(tmp_path / "run" / "checkpoints") == whole
    asked = {**make("postgresql://ann:Hunter@db/x"), "train": {"max_steps": 20}}
    same = train(tmp_path / "run", asked, resumes=True)
    assert "secret" not in same.tags["resumed.changed"]
    other = train(tmp_path / "run", make("postgresql://ann:other@db/x"), resumes=True)
    assert "model.args.url has another secret than it had" in other.tags["resumed.changed"]


def test_what_the_environment_hid_of_a_value_is_known_by_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable is of one night; without it the same value was refused as another."""
    config = RunConfig.model_validate({"data": {"cache": str(tmp_path / "Hunter-of-ann")}})
    plan = make_plan(config, detect_best_device("cpu"), prepare_dataset(config.data))
    monkeypatch.setenv("DBPW", "Hunter")
    was = describe_training(plan)
    was["settings"]["train"] |= {"loss": was["settings"]["data"]["cache"]}
    was["secrets"] |= {"train.loss": was["secrets"]["data.cache"]}
    assert was["settings"]["train"]["loss"].endswith("***-of-ann")
    monkeypatch.delenv("DBPW")
    now = describe_training(plan)
    now["settings"]["train"]["loss"] = config.data.cache
    assert not refuse_other_training(was, now)
    now["settings"]["train"]["loss"] = "other"
    with pytest.raises(ConfigError, match="^train.loss: was "):
        refuse_other_training(was, now)


def test_another_commit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    was = {"settings": {}, "data": "", "device": "cpu", "torch": "", "commit": "a" * 40}
    now = {**was, "commit": "b" * 40}
    assert refuse_other_training(was, now) == [f"git.commit was {'a' * 12} and is {'b' * 12}"]
    assert not refuse_other_training(was, {**now, "commit": ""}) and not refuse_other_training(
        {**was}, was
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"optim": {"lr": 0.5}}, "optim.lr: was 0.002 when the checkpoint was written and is 0.5;"),
        ({"model": {"args": {"hidden": [9]}}}, "model.args: was {} when the checkpoint"),
        ({"data": {"split_seed": 3}}, "data.source: the rows are others than those of the checkp"),
        ({"train": {"batch_size": 32}}, "train.batch_size: was 64 when"),
    ],
)
def test_another_training_is_refused_by_the_name_of_what_differs(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    play(tmp_path / "run", {}, at=9)
    kept = sorted((tmp_path / "run" / "checkpoints").iterdir())
    with pytest.raises(ConfigError) as refused:
        train(tmp_path / "run", change, resumes=True)
    assert told in str(refused.value)
    assert sorted((tmp_path / "run" / "checkpoints").iterdir()) == kept


def test_what_may_differ_is_told_and_more_epochs_are_trained(tmp_path: Path) -> None:
    play(tmp_path / "run", {})
    facts = train(tmp_path / "run", {"train": {"epochs": 5, "log_every": 7}}, resumes=True)
    assert (facts.steps, facts.epochs) == (115, 5)
    assert list_steps(tmp_path / "run" / "checkpoints") == [115], "the end is enough"
    assert facts.tags["resumed_from_step"] == "69"
    assert "train.epochs was 3 and is 5" in facts.tags["resumed.changed"]


def test_a_stop_leaves_a_checkpoint_of_that_very_step(tmp_path: Path) -> None:
    done = iter(range(1, 10**9))
    facts = train(
        tmp_path / "run",
        {"checkpoint": {"every": "1000000s"}},
        check_stop=lambda: StopRequest("somebody asked") if next(done) == 31 else None,
    )
    assert (facts.steps, facts.stopped, facts.epochs) == (31, "somebody asked", 2)
    assert facts.metrics["val/accuracy"] > 0.3  # of the one epoch that was judged
    assert list_steps(tmp_path / "run" / "checkpoints")[0] == 31


def test_where_all_checkpoints_are_damaged_it_does_not_begin_anew(tmp_path: Path) -> None:
    play(tmp_path / "run", {}, at=9)
    for file in (tmp_path / "run" / "checkpoints").glob("*.safetensors"):
        file.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="^--resume: .* was changed since it was written$"):
        train(tmp_path / "run", {}, resumes=True)
