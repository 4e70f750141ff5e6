"""Trainings of the kind that the tests of frameworks are made of, each out of the ordinary in one
thing: with the account and without they come to the same weights, answers, errors and random
numbers, and the account does nothing wrong of its own."""

from __future__ import annotations

import copy
import importlib
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.run.faults import (
    break_function,
    end_open_accounts,
    find_method,
    list_points,
    send_nothing,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # what frameworks warn of is theirs
Method = Callable[..., Any]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, place: Path) -> Iterator[None]:
    """Runs that nobody sends, and whose only step is counted."""
    with send_nothing(monkeypatch):
        yield


def _make_layers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 2)
    )


def _find_rows(batch: Any) -> Tensor:
    """The first floats of a batch, of whatever kind; else the same ones for all."""
    if isinstance(batch, Tensor):
        return batch if batch.is_floating_point() else torch.ones(4, 8)
    values = batch.values() if isinstance(batch, dict) else batch
    if isinstance(values, (list, tuple)) or isinstance(batch, dict):
        return next((_find_rows(value) for value in values), torch.ones(4, 8))
    return getattr(batch, "x", torch.ones(4, 8))


class Outcome(NamedTuple):
    """What a training has come to."""

    error: str
    answer: Any  # of what was called last
    told: dict[str, Any]  # by the framework, of itself
    weights: list[Tensor]
    random: tuple[Any, ...]


def _play(do: Callable[[], Any], net: nn.Module, tell: Callable[[], dict[str, Any]]) -> Outcome:
    error, answer = "", None
    try:
        answer = do()
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    weights = [value.detach().clone() for value in net.state_dict().values()]
    drawn = (random.getstate(), torch.get_rng_state())
    return Outcome(error, answer, tell(), weights, drawn)


def _spell(value: Any) -> Any:
    """The same, of lists and words that can be compared, whatever is in it."""
    if hasattr(value, "tolist"):
        return [str(value.dtype), repr(value.tolist())]
    if isinstance(value, dict):
        return {name: _spell(one) for name, one in value.items()}
    return [_spell(one) for one in value] if isinstance(value, (list, tuple)) else repr(value)


def _compare(plain: Outcome, told: Outcome) -> None:
    for name, one, other in zip(Outcome._fields, told, plain, strict=True):
        assert _spell(one) == _spell(other), name


def _check_run(run: Any) -> None:
    """Nothing went wrong that is ours, and the run has ended."""
    if run is not None:
        run.abandon()
        assert not [text for text in run.run["warnings"] if text.startswith("account:")]
        assert run.run["status"] != "RUNNING"


# --- Lightning ---


@cache
def _import_lightning() -> Any:
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.lr = _make_layers(), 0.1

        def compute_loss(self, batch: Any) -> Tensor:
            return self.layers(_find_rows(batch)).square().mean()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.compute_loss(batch)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log_dict({"val_loss": self.compute_loss(batch), "val_f1@10": 0.5})

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.compute_loss(batch))

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layers(_find_rows(batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    return SimpleNamespace(
        pl=pl, Module=Module, tune=importlib.import_module(f"{pl.__name__}.tuner")
    )


@dataclass
class Loop:
    """A training by Lightning."""

    trainer: dict[str, Any]
    methods: dict[str, Any]  # of its module
    make_data: Callable[[], Any]
    call: Callable[[Any, Any, Any], Any]


def _make_tensors(count: int = 20) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(0)
    return DataLoader(list(torch.randn(count, 8, generator=draw)), 4, shuffle=True)


def _fit(trainer: Any, module: Any, data: Any) -> None:
    trainer.fit(module, data, _make_tensors(8))


def _play_lightning(loop: Loop, told: Any = None) -> Outcome:
    light = _import_lightning()
    torch.manual_seed(0)
    random.seed(0)
    module = type("Mine", (light.Module,), loop.methods)()
    ways = {name: way(light.pl) if callable(way) else way for name, way in loop.trainer.items()}
    asked = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, **ways}
    asked["callbacks"] = [*asked.get("callbacks", ()), *([told] if told else [])]
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = light.pl.Trainer(**{**quiet, **asked})

    def tell() -> dict[str, Any]:
        at = (trainer.global_step, trainer.current_epoch, str(trainer.state.fn))
        return {"at": at, "status": str(trainer.state.status), **trainer.callback_metrics}

    return _play(lambda: loop.call(trainer, module, loop.make_data()), module, tell)


def _check_lightning(
    trainer: dict[str, Any] | None = None,
    methods: dict[str, Any] | None = None,
    make_data: Callable[[], Any] = _make_tensors,
    call: Callable[[Any, Any, Any], Any] = _fit,
) -> Any:
    """Compare the training with and without; return the callback."""
    loop = Loop(trainer or {}, methods or {}, make_data, call)
    plain = _play_lightning(loop)
    from headroom.lightning import HeadroomCallback

    told = HeadroomCallback(quiet=True)
    _compare(plain, _play_lightning(loop, told))
    _check_run(told.run)
    assert told.run is not None or plain.error or "FITTING" not in plain.told["at"][2]
    return told


class _Odd:
    """A batch that answers no question but for its rows."""

    def __init__(self) -> None:
        self.x = torch.ones(4, 8)

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError("ambiguous")

    __bool__ = __len__ = __eq__ = __iter__ = _refuse  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class _Pair(NamedTuple):
    x: Tensor
    y: Tensor


class _Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.ones(10, 8)


class _Failing(_Stream):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.ones(6, 8)
        raise ValueError("no such row")


def _give(*batches: Any) -> DataLoader[Any]:
    """Batches as they are."""
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]


ROWS = torch.ones(4, 8)
BATCHES: dict[str, Callable[[], Any]] = {
    "tensor": _make_tensors,
    "one row each": lambda: DataLoader(list(torch.ones(3, 8)), 1),
    "tuple": lambda: _give(*[(ROWS, torch.zeros(4))] * 3),
    "named tuple": lambda: _give(*[_Pair(ROWS, torch.zeros(4))] * 3),
    "dict": lambda: _give(*[{"x": ROWS, "text": ["a"] * 4, "none": None}] * 3),
    "nested": lambda: _give(*[{"a": [{"x": ROWS}, (ROWS, ROWS)]}] * 3),
    "None": lambda: DataLoader([1, 2, 3], collate_fn=lambda _: None),
    "words": lambda: _give(*[["a", "b"]] * 3),
    "numbers": lambda: _give(1, 2, 3),
    "nothing": lambda: _give((), {}, []),
    "no answers": lambda: _give(*[_Odd()] * 3),
    "whole numbers": lambda: _give(*[torch.ones(4, dtype=torch.long)] * 3),
    "scalar": lambda: _give(*[torch.tensor(1)] * 3),
    "sparse": lambda: _give(*[(torch.eye(4, 8).to_sparse(), ROWS)] * 2),
    "a stream": lambda: DataLoader(_Stream(), 4),
    "a stream that fails": lambda: DataLoader(_Failing(), 2),
    "several loaders": lambda: {"a": _make_tensors(), "b": _make_tensors(8)},
    "no batches": lambda: DataLoader([]),
    "workers": lambda: DataLoader(list(torch.ones(8, 8)), 4, num_workers=1),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_may_be_what_they_are(kind: str) -> None:
    _check_lightning(make_data=BATCHES[kind])


def _use(name: str, *given: Any, **named: Any) -> Callable[[Any], Any]:
    """A callback of Lightning's own, made when it is there."""
    return lambda pl: [getattr(pl.callbacks, name)(*given, **named)]


TRAINERS: dict[str, dict[str, Any]] = {
    "fast_dev_run": {"fast_dev_run": True},
    "fast_dev_run of 3": {"fast_dev_run": 3},
    "max_steps": {"max_steps": 3, "max_epochs": -1},
    "no steps": {"max_steps": 0},
    "no epochs": {"max_epochs": 0},
    "no training": {"limit_train_batches": 0},
    "no validation": {"limit_val_batches": 0},
    "half of all": {"limit_train_batches": 0.5, "limit_val_batches": 0.5},
    "overfit": {"overfit_batches": 1},
    "accumulate": {"accumulate_grad_batches": 2},
    "accumulate more than there is": {"accumulate_grad_batches": 7},
    "clip the norm": {"gradient_clip_val": 0.1},
    "clip the values": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    "log never": {"log_every_n_steps": 0},
    "log always": {"log_every_n_steps": 1},
    "validate often": {"val_check_interval": 2},
    "validate by share": {"val_check_interval": 0.5},
    "validate seldom": {"check_val_every_n_epoch": 2},
    "validate by steps": {"val_check_interval": 3, "check_val_every_n_epoch": None},
    "no sanity": {"num_sanity_val_steps": 0},
    "all sanity": {"num_sanity_val_steps": -1},
    "checkpoints": {"enable_checkpointing": True},
    "checkpoints by steps": {
        "enable_checkpointing": True,
        "callbacks": _use("ModelCheckpoint", every_n_train_steps=2, save_top_k=-1),
    },
    "anomalies": {"detect_anomaly": True},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
    "no inference mode": {"inference_mode": False},
    "barebones": {"barebones": True, "logger": None, "enable_checkpointing": None},
    "max_time": {"max_time": {"hours": 1}},
    "a profiler": {"profiler": "simple"},
    "bf16": {"precision": "bf16-mixed"},
    "true bf16": {"precision": "bf16-true"},
    "double": {"precision": "64-true"},
    "stop early": {"callbacks": _use("EarlyStopping", "val_loss", stopping_threshold=1e9)},
    "stop on nothing": {"callbacks": _use("EarlyStopping", "no such metric")},
    "change accumulation": {"callbacks": _use("GradientAccumulationScheduler", {0: 1, 1: 2})},
    "a timer": {"callbacks": _use("Timer", duration={"hours": 1})},
    "stochastic weights": {
        "callbacks": _use("StochasticWeightAveraging", swa_lrs=0.1, swa_epoch_start=1)
    },
    "mean weights": {"callbacks": _use("WeightAveraging")},
    "pruning": {"callbacks": _use("ModelPruning", "l1_unstructured", amount=0.5)},
    "find a rate": {"callbacks": _use("LearningRateFinder", num_training_steps=4)},
    "log the rate": {
        "logger": lambda pl: pl.loggers.CSVLogger("logs"),
        "callbacks": _use("LearningRateMonitor"),
    },
    "summary": {"enable_model_summary": True, "callbacks": _use("ModelSummary", max_depth=2)},
    "a logger": {"logger": lambda pl: pl.loggers.CSVLogger("logs"), "log_every_n_steps": 1},
}


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_may_be_asked_for_what_there_is(name: str) -> None:
    _check_lightning(TRAINERS[name])


def _step_by_hand(self: Any, batch: Any, batch_idx: int) -> None:
    self.manual_backward(self.compute_loss(batch))
    self.optimizers().step()
    self.optimizers().zero_grad()


def _step_two(self: Any, batch: Any, batch_idx: int) -> None:
    for optimizer in self.optimizers():
        self.toggle_optimizer(optimizer)
        self.manual_backward(self.compute_loss(batch))
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)


def _make_two(self: Any) -> Any:
    first, last = self.layers[0].parameters(), self.layers[-1].parameters()
    return torch.optim.SGD(first, lr=0.1), torch.optim.Adam(last, lr=0.1)


def _make_scheduled(self: Any) -> Any:
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def _make_plateau(self: Any) -> Any:
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


def _log_oddly(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss: Tensor = self.compute_loss(batch)
    for name in ("mAP@0.5", "f1(macro)", "loss[0]", "a" * 300, "\xe4", " "):
        self.log(name, loss, on_step=True, on_epoch=True)
    return loss


def _log_no_number(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """A metric of the user's, whose error is the user's."""
    loss: Tensor = self.compute_loss(batch)
    self.metric.update(loss)
    self.log("mean", self.metric, on_step=False, on_epoch=True)
    return loss


def _add_metric(self: Any, stage: str) -> None:
    self.metric = importlib.import_module("torchmetrics").MeanMetric()
    self.metric.compute = lambda: (1, 2)


def _begin_oddly(self: Any) -> None:
    self.hparams.update({"a b@": 1, "c": {"d[0]": None}, "e": [1, 2], "f": nn.Linear})


def _forget_attention(self: Any) -> None:
    self.layers = nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 2)
    )


def _return_after(self: Any, batch: Any, batch_idx: int) -> Any:
    return -1 if batch_idx == 1 else None


BY_HAND: dict[str, Any] = {"automatic_optimization": False}
WAYS: dict[str, dict[str, Any]] = {
    "by hand": {**BY_HAND, "training_step": _step_by_hand},
    "by hand, and no step": {**BY_HAND, "training_step": lambda self, batch, batch_idx: None},
    "by hand, two optimizers": {
        **BY_HAND,
        "training_step": _step_two,
        "configure_optimizers": _make_two,
    },
    "two optimizers and no hand": {"configure_optimizers": _make_two},
    "no loss": {"training_step": lambda self, batch, batch_idx: None},
    "no loss at times": {
        "training_step": lambda self, batch, at: self.compute_loss(batch) if at % 2 else None
    },
    "a dict": {
        "training_step": lambda self, batch, at: {"loss": self.compute_loss(batch), "more": [1]}
    },
    "no tensor": {"training_step": lambda self, batch, batch_idx: "word"},
    "a loss that is no number": {
        "training_step": lambda self, batch, at: self.compute_loss(batch) * float("nan")
    },
    "a loss without gradient": {
        "training_step": lambda self, batch, at: self.compute_loss(batch).detach()
    },
    "no optimizer": {"configure_optimizers": lambda self: None},
    "no such optimizer": {"configure_optimizers": lambda self: "SGD"},
    "closure": {
        "configure_optimizers": lambda self: torch.optim.LBFGS(self.parameters(), max_iter=3)
    },
    "a schedule": {"configure_optimizers": _make_scheduled},
    "a plateau": {"configure_optimizers": _make_plateau},
    "a rate that is a tensor": {
        "configure_optimizers": lambda self: torch.optim.Adam(
            self.parameters(), lr=torch.tensor(0.1)
        )
    },
    "another backward": {"backward": lambda self, loss: loss.backward(retain_graph=True)},
    "another step": {
        "optimizer_step": lambda self, epoch, at, optimizer, closure=None: optimizer.step(closure)
    },
    "a closure without a step": {
        "optimizer_step": lambda self, epoch, at, optimizer, closure=None: closure()
    },
    "no zero_grad": {"optimizer_zero_grad": lambda self, *_: None},
    "clipped by itself": {"configure_gradient_clipping": lambda self, *_, **__: None},
    "odd names": {"training_step": _log_oddly},
    "a metric that fails": {"setup": _add_metric, "training_step": _log_no_number},
    "odd params": {"setup": lambda self, stage: _begin_oddly(self)},
    "attention": {"configure_model": _forget_attention},
    "left batches": {"on_train_batch_start": _return_after},
    "a frozen layer": {"on_fit_start": lambda self: self.layers[0].requires_grad_(False)},
    "no validation": {"validation_step": None},
}


@pytest.mark.parametrize("name", WAYS)
def test_a_module_may_be_trained_its_own_way(name: str) -> None:
    _check_lightning(methods=WAYS[name])


def _fit_again(trainer: Any, module: Any, data: Any) -> None:
    trainer.fit(module, data)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, data)


def _resume(trainer: Any, module: Any, data: Any) -> Any:
    trainer.fit(module, data)
    trainer.save_checkpoint("last.ckpt")
    light = _import_lightning()
    other = light.pl.Trainer(
        max_epochs=4,
        callbacks=[*trainer.callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    other.fit(module, data, ckpt_path="last.ckpt", weights_only=False)
    return other.global_step


def _copy_trainer(trainer: Any, module: Any, data: Any) -> Any:
    trainer.fit(module, data)
    pickle.loads(pickle.dumps(trainer.callbacks))
    again = copy.deepcopy(trainer)
    again.fit_loop.max_epochs = 3
    again.fit(again.lightning_module, data)
    return again.global_step


def _find_rate(trainer: Any, module: Any, data: Any) -> Any:
    found = _import_lightning().tune.Tuner(trainer).lr_find(module, data, num_training=5)
    trainer.fit(module, data)
    return found.results


def _find_batch_size(trainer: Any, module: Any, data: Any) -> Any:
    light = _import_lightning()
    module.batch_size = 2
    module.train_dataloader = lambda: DataLoader(list(torch.ones(32, 8)), module.batch_size)
    module.val_dataloader = _make_tensors
    found = light.tune.Tuner(trainer).scale_batch_size(module, max_trials=2, steps_per_trial=1)
    trainer.fit(module)
    return found


def _all_calls(trainer: Any, module: Any, data: Any) -> Any:
    before = trainer.validate(module, data, verbose=False)
    trainer.fit(module, data, data)
    after = trainer.validate(module, data, verbose=False)
    tested = trainer.test(module, data, verbose=False)
    return before, after, tested, trainer.predict(module, data)


CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "validate": lambda trainer, module, data: trainer.validate(module, data, verbose=False),
    "test": lambda trainer, module, data: trainer.test(module, data, verbose=False),
    "predict": lambda trainer, module, data: trainer.predict(module, data),
    "all": _all_calls,
    "fit again": _fit_again,
    "resume": _resume,
    "copy": _copy_trainer,
    "lr_find": _find_rate,
    "scale_batch_size": _find_batch_size,
    "fit without data": lambda trainer, module, data: trainer.fit(module),
    "fit no module": lambda trainer, module, data: trainer.fit(data),
    "resume from nothing": lambda trainer, module, data: trainer.fit(
        module, data, ckpt_path="no-such.ckpt"
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_trainer_may_be_called_in_any_order(name: str) -> None:
    _check_lightning(call=CALLS[name])


HOOKS = (
    *("setup", "configure_optimizers", "on_fit_start", "on_train_start"),
    *("on_train_epoch_start", "on_train_batch_start", "transfer_batch_to_device"),
    *("training_step", "on_before_backward", "backward", "on_after_backward"),
    *("on_before_optimizer_step", "optimizer_step", "lr_scheduler_step", "on_before_zero_grad"),
    *("on_train_batch_end", "on_validation_start", "validation_step", "on_validation_end"),
    *("on_train_epoch_end", "on_save_checkpoint", "on_train_end", "on_fit_end", "teardown"),
)


def _raise(error: BaseException, *_: Any, **__: Any) -> Any:
    raise error


@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_in_a_hook_of_the_module_passes_as_it_came(hook: str) -> None:
    def fail(self: Any, *given: Any, **named: Any) -> Any:
        raise ValueError(f"no such {hook}")

    more = {"configure_optimizers": _make_scheduled} if "scheduler" in hook else {}
    _check_lightning({"enable_checkpointing": True}, {**more, hook: fail})


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(3), StopIteration(), torch.OutOfMemoryError("none")]
)
def test_what_ends_a_training_of_lightning_is_not_ours_to_hold(error: BaseException) -> None:
    _check_lightning(methods={"training_step": partial(_raise, error)})


# --- transformers ---


@cache
def _import_transformers() -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _make_layers()

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            out = self.layers(x)
            if labels is None:
                return {"logits": out}
            return {"loss": nn.functional.cross_entropy(out, labels), "logits": out}

    return SimpleNamespace(transformers=transformers, Net=Net)


class _Rows(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for at in range(10):
            yield {"x": torch.full((8,), float(at)), "labels": torch.tensor(at % 2)}


def _train(trainer: Any) -> Any:
    found = trainer.train()
    return found.global_step, found.training_loss


def _call_all(trainer: Any) -> Any:
    before = _drop_times(trainer.evaluate())
    done = _train(trainer)
    predicted = trainer.predict(trainer.eval_dataset)
    after = _drop_times(trainer.evaluate(metric_key_prefix="test"))
    return before, done, after, predicted.predictions, _drop_times(predicted.metrics)


def _train_and_resume(trainer: Any) -> Any:
    _train(trainer)
    trainer.args.num_train_epochs = 3
    return trainer.train(resume_from_checkpoint=True).global_step


def _drop_times(found: dict[str, float]) -> dict[str, float]:
    ours = ("time", "per_second")
    return {name: value for name, value in found.items() if not name.endswith(ours)}


HF: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "train": ({}, _train),
    "evaluate": ({}, lambda trainer: _drop_times(trainer.evaluate())),
    "predict": ({}, lambda trainer: trainer.predict(trainer.eval_dataset).predictions),
    "all": ({}, _call_all),
    "accumulate": ({"gradient_accumulation_steps": 2}, _train),
    "no steps": ({"max_steps": 1, "logging_steps": 1}, _train),
    "evaluate each step": ({"eval_strategy": "steps", "eval_steps": 1}, _train),
    "evaluate first": ({"eval_strategy": "epoch", "eval_on_start": True}, _train),
    "save and go on": ({"save_strategy": "epoch"}, _train_and_resume),
    "the best": (
        {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True},
        _train,
    ),
    "log first": ({"logging_first_step": True, "logging_steps": 1}, _train),
    "sgd and a cosine": ({"optim": "sgd", "lr_scheduler_type": "cosine"}, _train),
    "a stream": ({"max_steps": 2, "stream": True}, _train),
    "no data": ({"no data": True}, _train),
    "twice": ({}, lambda trainer: (_train(trainer), _train(trainer))),
}
HF_METHODS = ("training_step", "compute_loss", "evaluate", "log", "create_optimizer", "_save")


def _play_transformers(
    asked: dict[str, Any],
    call: Callable[[Any], Any],
    told: Any = None,
    breaks: str = "",
    error: BaseException | None = None,
    *,
    protects: bool = False,
) -> Outcome:
    hf = _import_transformers()
    asked = dict(asked)
    rows = [*_Rows()]
    is_stream, is_empty = asked.pop("stream", False), asked.pop("no data", False)
    data: Any = _Rows() if is_stream else None if is_empty else rows
    torch.manual_seed(0)
    random.seed(0)
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    given = {"output_dir": f"hf{told is None}", "num_train_epochs": 2, **quiet, **asked}
    methods = {breaks: partial(_raise, error)} if error is not None else {}
    trainer = type("Mine", (hf.transformers.Trainer,), methods)(
        hf.Net(),
        hf.transformers.TrainingArguments(per_device_train_batch_size=4, **given),
        train_dataset=data,
        eval_dataset=rows,
        compute_metrics=lambda _: {"f1@10": 0.5, "word": "a"} if asked.get("odd") else {"f1": 0.5},
        callbacks=[told] if told else [],
    )

    def tell() -> dict[str, Any]:
        log = [_drop_times(line) for line in trainer.state.log_history]
        return {"log": [{k: v for k, v in line.items() if k != "total_flos"} for line in log]}

    if told is not None and protects:
        told.protect(trainer)
    return _play(lambda: call(trainer), trainer.model, tell)


def _check_transformers(*given: Any, **named: Any) -> Any:
    plain = _play_transformers(*given, **named)
    from headroom.transformers import HeadroomCallback

    told = HeadroomCallback(quiet=True)
    _compare(plain, _play_transformers(*given, told=told, **named))
    _check_run(told.run)
    return told


@pytest.mark.parametrize("name", HF)
def test_a_training_of_transformers_is_the_same(name: str) -> None:
    _check_transformers(*HF[name])


def test_the_state_of_a_trained_trainer_is_as_without() -> None:
    """It named the run for good: a training and the same one resumed ended in unlike states."""

    def train(trainer: Any) -> Any:
        trainer.train()
        return trainer.state.stateful_callbacks

    _check_transformers({"save_strategy": "epoch"}, train)
    assert '"headroom"' in Path("hfFalse/checkpoint-6/trainer_state.json").read_text()


@pytest.mark.parametrize("method", HF_METHODS)
@pytest.mark.parametrize("error", [ValueError("no such thing"), KeyboardInterrupt()], ids=repr)
def test_an_error_in_a_training_of_transformers_passes_as_it_came(
    method: str, error: BaseException
) -> None:
    asked = {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_steps": 1}
    _check_transformers(asked, _train, breaks=method, error=error)


# --- accelerate ---


def _loop_plainly(does: Any, *, epochs: int = 2, fails_at: int = -1, clips: bool = False) -> Any:
    net = _make_layers()
    made = torch.optim.AdamW(net.parameters(), lr=0.1)
    plan = torch.optim.lr_scheduler.StepLR(made, 1)
    net, made, plan, data = does.prepare(net, made, plan, _make_tensors())
    does.init_trackers("mine", config={"lr": 0.1, "a b@": {"c[0]": None}})
    losses, at = [], 0
    for _ in range(epochs):
        for x in data:
            with does.accumulate(net):
                loss = net(x).square().mean()
                does.backward(loss)
                if clips and does.sync_gradients:
                    does.clip_grad_norm_(net.parameters(), 0.1)
                if at == fails_at:
                    raise ValueError("no such thing")
                made.step()
                plan.step()
                made.zero_grad()
            does.log({"loss": loss, "word": "a", "none": None, "map": {"a": 1}}, step=at)
            losses.append(loss.item())
            at += 1
    does.end_training()
    does.log({"test/loss": 0.5})
    return losses, [p.detach().clone() for p in net.parameters()]


def _loop_twice(does: Any) -> Any:
    return _loop_plainly(does), _loop_plainly(does)


def _loop_and_go_on(does: Any) -> Any:
    return _loop_twice(does), _save_state(does)


def _save_state(does: Any) -> Any:
    net = does.prepare(_make_layers())
    does.init_trackers("mine")
    does.save_state("saved")
    with torch.no_grad():
        net[0].weight.zero_()
    does.load_state("saved")
    does.end_training()
    does.end_training()
    return [p.detach().clone() for p in net.parameters()]


ACCELERATE: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "a loop": ({}, _loop_plainly),
    "accumulate": ({"gradient_accumulation_steps": 3}, _loop_plainly),
    "bf16": ({"mixed_precision": "bf16"}, _loop_plainly),
    "clip": ({}, partial(_loop_plainly, clips=True)),
    "an error": ({}, partial(_loop_plainly, fails_at=3)),
    "no epochs": ({}, partial(_loop_plainly, epochs=0)),
    "twice": ({}, _loop_twice),
    "a state": ({}, _save_state),
    "nothing": ({}, lambda does: does.end_training()),
    "only a log": ({}, lambda does: does.log({"a": 1})),
}


def _play_accelerate(
    asked: dict[str, Any], call: Callable[[Any], Any], told: Any = None
) -> Outcome:
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    random.seed(0)
    accelerate.state.AcceleratorState._reset_state(True)
    does = accelerate.Accelerator(cpu=True, **({"log_with": told} if told else {}), **asked)
    if told is not None:
        told.add_to(does)
    return _play(partial(call, does), nn.Module(), lambda: {"step": does.step})


def _check_accelerate(asked: dict[str, Any], call: Callable[[Any], Any]) -> Any:
    plain = _play_accelerate(asked, call)
    from headroom.accelerate import HeadroomTracker

    told = HeadroomTracker(quiet=True)
    _compare(plain, _play_accelerate(asked, call, told))
    _check_run(told.run)
    return told


@pytest.mark.parametrize("name", ACCELERATE)
def test_a_loop_of_accelerate_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    _check_accelerate(*ACCELERATE[name])


# --- whatever an adapter does wrong ---


def _fit_and_fail(trainer: Any, module: Any, data: Any) -> Any:
    trainer.fit(module, data, data)
    trainer.save_checkpoint("kept.ckpt")
    trainer.test(module, data, verbose=False)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, DataLoader(_Failing(), 2), ckpt_path="kept.ckpt")


ADAPTERS = {
    "lightning": "HeadroomCallback",
    "transformers": "HeadroomCallback",
    "accelerate": "HeadroomTracker",
}
PLAY: dict[str, Callable[[Any], Outcome]] = {
    "lightning": lambda told: _play_lightning(
        Loop({"enable_checkpointing": True}, {}, _make_tensors, _fit_and_fail), told
    ),
    "transformers": lambda told: _play_transformers(
        {"eval_strategy": "epoch", "save_strategy": "epoch"}, _call_all, told, protects=True
    ),
    "accelerate": lambda told: _play_accelerate({}, _loop_and_go_on, told),
}


@pytest.mark.parametrize("framework", ADAPTERS)
def test_an_error_in_each_method_of_an_adapter_ends_no_training(
    framework: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("lightning.pytorch" if framework == "lightning" else framework)
    plain = PLAY[framework](None)
    assert plain.error == ("ValueError: no such row" if framework == "lightning" else "")
    module = importlib.import_module(f"headroom.{framework}")
    made = getattr(module, ADAPTERS[framework])
    points = [*list_points(made), *list_points(made, is_within=True)]
    assert len(points) >= 4
    for name in points:
        caplog.clear()
        with monkeypatch.context() as broken:
            break_function(broken, find_method(made, name))
            told = made(quiet=True, **({"protect": True} if framework == "lightning" else {}))
            _compare(plain, PLAY[framework](told))
        traces = [record for record in caplog.records if record.exc_info]
        assert any("a fault of ours" in str(record.exc_info) for record in traces), name
        end_open_accounts()


def test_an_error_in_each_method_of_the_adapter_of_yolo_ends_no_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes nothing of ultralytics, whose trainer calls these methods one after another."""
    from headroom.ultralytics import HeadroomCallback

    called: dict[str, Any] = {}
    told = HeadroomCallback(quiet=True)
    told.add_to(SimpleNamespace(add_callback=called.__setitem__))
    assert {*called} == {*list_points(HeadroomCallback, but=("add_to",))}
    for name, call in called.items():
        caplog.clear()
        with monkeypatch.context() as broken:
            break_function(broken, find_method(HeadroomCallback, name))
            call(SimpleNamespace())
        assert [record for record in caplog.records if record.exc_info], name
        call(None)  # and nothing that it expects is there
