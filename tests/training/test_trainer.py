import gc
import json
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes
from sklearn.metrics import mean_absolute_error, r2_score

from headroom.base.facts import DataFacts, TrainFacts
from headroom.data.preparation import load_arrays, prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.models import predictor
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig
from headroom.training import place, trainer
from headroom.training.admission import Admission
from headroom.training.checkpoints import Checkpoints
from headroom.training.choose_step import set_cpu_threads
from headroom.training.loop import StopRequest
from headroom.training.plan import Schedule, make_plan
from headroom.training.train_state import TrainState
from headroom.watch import leaks
from headroom.watch.oom_report import OutOfMemory
from headroom.watch.step_metrics import Diverged

CPU = torch.device("cpu")
FEW = {"epochs": 3}


def _train(tmp_path: Path, **sections: Any) -> tuple[TrainFacts, DataFacts, list[dict]]:
    made = {"data": {"cache": str(tmp_path / "data"), **sections.pop("data", {})}, **sections}
    config = RunConfig.model_validate(made)
    logged: list[dict[str, float]] = []
    data = prepare_dataset(config.data)
    facts = trainer.train(
        make_plan(config, detect_best_device("cpu"), data),
        folder=tmp_path,
        log=lambda metrics, step: logged.append(metrics),
    )
    return facts, data, logged


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_default_run_reads_digits_well(tmp_path: Path, seed: int) -> None:
    facts, _, _ = _train(tmp_path, train={"seed": seed})
    assert facts.metrics["val/accuracy"] >= 0.97
    assert facts.steps == 460 and facts.epochs == 20


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"name": "linear"}, "optim": {"lr": 0.02}},
        {"model": {"name": "cnn", "args": {"width": 8}}, "optim": {"lr": 0.01}},
        {"model": {"name": "mlp", "args": {"hidden": [64], "dropout": 0.2}}},
        {"optim": {"name": "sgd", "lr": 0.05}},
        {"optim": {"schedule": "constant", "warmup": 0.2, "clip_norm": 1.0}},
        {
            "optim": {"schedule": "one_cycle", "ema_decay": 0.9},
            "train": {"loss_args": {"label_smoothing": 0.1}},
        },
        {"train": {"best_metric": "val/macro_f1", "eval_every_steps": 5, "epochs": 6}},
        {"train": {"precision": "bf16", "epochs": 6}},
        {"train": {"accumulate": 4, "epochs": 6}},
    ],
)
def test_every_way_of_training_learns_digits(tmp_path: Path, sections: dict[str, Any]) -> None:
    sections = {"train": {"epochs": 6}, **sections}
    facts, _, _ = _train(tmp_path, **sections)
    assert facts.metrics["val/accuracy"] > 0.9


def test_a_regression_learns_and_is_judged_in_its_units(tmp_path: Path) -> None:
    facts, data, _ = _train(
        tmp_path,
        data={"source": "synthetic", "args": {"classes": 1, "rows": 2000, "features": 8}},
        train={"epochs": 30},
    )
    assert data.task == "regression"
    assert facts.metrics["val/r2"] > 0.8 and facts.metrics["val/mae"] > 0
    assert "val/accuracy" not in facts.metrics


def _table(name: str) -> tuple[np.ndarray, np.ndarray]:
    """A regression: one that ships with scikit-learn, or one like those that one meets."""
    if name == "diabetes":
        return load_diabetes(return_X_y=True)
    random = np.random.default_rng(0)
    if name == "houses":
        area, age = random.uniform(40, 250, 400), random.uniform(0, 80, 400)
        city = random.integers(0, 4, 400)
        price = 3000 * area * (1 + 0.1 * city) - 1200 * age + random.normal(0, 30_000, 400)
        return np.column_stack([area, age, *(city == i for i in range(4))]), price
    incomes, people = random.lognormal(1.3, 0.5, 1500), random.lognormal(7, 0.8, 1500)
    north, east = random.uniform(32, 42, 1500), random.uniform(-124, -114, 1500)
    coast = np.exp(-((north - 34) ** 2 + (east + 118) ** 2) / 4)
    value = 0.4 * incomes + 1.5 * coast - 0.05 * north + random.normal(0, 0.5, 1500)
    return np.column_stack([incomes, people, north, east]), value.clip(-2, 5)


@pytest.mark.parametrize("name", ["diabetes", "houses", "california"])
def test_a_regression_with_the_defaults_learns_as_a_ridge_does(tmp_path: Path, name: str) -> None:
    """Story: the target was as its user had it; prices ended at an r2 of -2.2, run FINISHED."""
    x, y = _table(name)
    np.savez(tmp_path / "given.npz", x=x, y=y)
    facts, data, _ = _train(
        tmp_path, data={"path": str(tmp_path / "given.npz"), "task": "regression"}
    )
    arrays = load_arrays(data)
    (x, y), (val_x, val_y) = (
        (np.array(a, np.float64), np.array(b, np.float64))
        for a, b in ((arrays.train_x, arrays.train_y), (arrays.val_x, arrays.val_y))
    )
    weights = np.linalg.solve(x.T @ x + np.eye(x.shape[1]), x.T @ y)  # both are standardized
    ridge = 1 - ((val_x @ weights - val_y) ** 2).sum() / ((val_y - val_y.mean()) ** 2).sum()
    assert facts.metrics["val/r2"] >= ridge - 0.03


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_figures_and_predictions_of_a_regression_are_in_its_units(
    tmp_path: Path, precision: str
) -> None:
    random = np.random.default_rng(1)
    x = random.normal(size=(300, 3)).astype(np.float32)
    y = np.column_stack([1e6 + 5e4 * x[:, 0], np.full(300, 7.0), 1e-3 * x.sum(1)])
    np.savez(tmp_path / "given.npz", x=x, y=y)
    facts, data, _ = _train(
        tmp_path,
        data={"path": str(tmp_path / "given.npz")},
        train={"precision": precision, "epochs": 5},
    )
    arrays = load_arrays(data)
    truth = arrays.val_y * np.array(data.target_scale) + np.array(data.target_offset)
    rows = (arrays.val_x * np.array(data.scale) + np.array(data.offset)).astype(np.float32)
    predicted = predictor.load(tmp_path / "model").predict(rows).to_numpy()
    near = 1e-5 if precision == "fp32" else 2e-2
    mae = mean_absolute_error(truth, predicted)
    assert facts.metrics["val/mae"] == pytest.approx(mae, rel=near)
    r2 = r2_score(truth, predicted, multioutput="variance_weighted")
    assert facts.metrics["val/r2"] == pytest.approx(r2, rel=near) and r2 > 0.5
    assert abs(predicted[:, 1] - 7).max() < 0.5 and abs(predicted[:, 2]).max() < 0.02


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_same_seed_gives_the_same_bits_on_a_cpu(tmp_path: Path, deterministic: bool) -> None:
    weights = []
    for seed in (7, 7, 8):
        _train(
            tmp_path,
            train={**FEW, "seed": seed, "deterministic": deterministic},
            model={"name": "cnn", "args": {"width": 4, "dropout": 0.1}},
        )
        weights.append(torch.load(tmp_path / "model" / "weights.pt", weights_only=True))
    first, again, other = weights
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not all(torch.equal(first[k], other[k]) for k in first)
    assert not torch.are_deterministic_algorithms_enabled()


def test_data_that_does_not_fit_trains_as_data_that_does(tmp_path: Path, monkeypatch) -> None:
    resident, _, _ = _train(tmp_path, train=FEW)
    monkeypatch.setattr("headroom.data.dataset_batches.RESIDENT_SHARE", 0.0)
    streamed, _, _ = _train(tmp_path, train=FEW)
    assert resident.tags["data.residency"] == "device"
    assert streamed.tags["data.residency"] == "host"
    # The same rows in each batch, in another order: the same sums but for rounding.
    for key in ("val/loss", "val/accuracy"):
        assert streamed.metrics[key] == pytest.approx(resident.metrics[key], rel=1e-3)


def test_the_saved_model_predicts_on_raw_rows_what_was_measured(tmp_path: Path) -> None:
    facts, data, _ = _train(tmp_path, train=FEW)
    arrays = load_arrays(data)
    raw = arrays.val_x * np.array(data.scale) + np.array(data.offset)
    predicted = predictor.load(tmp_path / "model").outputs(raw).argmax(1)
    assert (predicted == arrays.val_y).mean() == pytest.approx(facts.metrics["val/accuracy"])


def test_what_a_phase_took_adds_up_to_the_whole(tmp_path: Path) -> None:
    facts, _, _ = _train(tmp_path)
    m = facts.metrics
    phases = ("data_wait", "h2d", "forward", "backward", "optimizer")
    steps_s = (facts.steps - 1) * sum(m.get(f"time/{p}_ms", 0) for p in phases) / 1000
    assert steps_s < facts.steps / m["speed/steps_per_s"] * 1.05
    assert m["time/unaccounted_pct"] < 25


def test_the_last_checkpoint_and_the_search_for_what_is_held_are_no_logging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """log was told to be half of a short training: 0.96 s of 1.04 s were these two."""

    def wait(kept: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def slow(*args: Any, **named: Any) -> Any:
            time.sleep(seconds)
            return kept(*args, **named)

        return slow

    finish, search = Checkpoints.finish, lambda *_: 0
    monkeypatch.setattr(Checkpoints, "finish", wait(finish, 3.0))
    counts = "headroom.watch.memory_meter.count_allocated_bytes"
    monkeypatch.setattr(counts, wait(search, 3.0))
    facts, _, _ = _train(tmp_path, train={"epochs": 1})
    assert facts.metrics["time/log_s"] < 3.0 <= facts.metrics["time/checkpoint_s"] < 6.0


@pytest.mark.parametrize("ends", [True, False])
def test_a_checkpoint_at_a_stop_is_no_wait_for_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """A training of 140 steps that ended by the clock was told to wait 27 % of it for data: the 2 s
    of its last checkpoint were both."""
    save, steps = Checkpoints.save, count(1)

    def save_slowly(*args: Any, **named: Any) -> None:
        time.sleep(3.0)
        save(*args, **named)

    monkeypatch.setattr(Checkpoints, "save", save_slowly)
    config = RunConfig.model_validate(
        {
            "data": {"cache": str(tmp_path / "data")},
            "train": {"epochs": 3},
            "checkpoint": {"every": None},
        }
    )
    stop = StopRequest("enough", ends=ends)
    facts = trainer.train(
        make_plan(config, detect_best_device("cpu"), prepare_dataset(config.data)),
        folder=tmp_path,
        log=lambda metrics, step: None,
        check_stop=lambda: stop if next(steps) == 30 else None,
    )
    assert facts.stopped == ("enough" if ends else "")
    assert facts.metrics["time/checkpoint_s"] > 3.0
    assert facts.metrics["time/data_wait_ms"] * facts.steps < 1000
    assert facts.metrics["time/unaccounted_pct"] > -5


def test_memory_by_owner_is_what_the_model_has(tmp_path: Path) -> None:
    facts, _, _ = _train(tmp_path, train=FEW)
    weights = torch.load(tmp_path / "model" / "weights.pt", weights_only=True)
    mib = sum(w.nbytes for w in weights.values()) / 2**20
    assert facts.metrics["memory/parameters_mib"] == pytest.approx(mib)
    assert facts.metrics["memory/gradients_mib"] == pytest.approx(mib)
    assert facts.metrics["memory/optimizer_state_mib"] == pytest.approx(2 * mib, rel=1e-3)
    assert facts.held_bytes > 3 * mib * 2**20


def test_memory_by_owner_knows_frozen_and_averaged_weights(tmp_path: Path) -> None:
    """Frozen ones have neither gradients nor state; an average is as large as what is trained."""
    optim = {"ema_decay": 0.9}
    facts, _, _ = _train(tmp_path, train=FEW, optim=optim, model={"freeze": ["1", "3"]})
    weights = torch.load(tmp_path / "model" / "weights.pt", weights_only=True)
    mib = sum(w.nbytes for w in weights.values()) / 2**20
    trained = sum(w.nbytes for name, w in weights.items() if name.startswith("5.")) / 2**20
    assert 0 < trained < mib / 2
    assert facts.metrics["memory/parameters_mib"] == pytest.approx(mib)
    assert facts.metrics["memory/gradients_mib"] == pytest.approx(trained)
    assert facts.metrics["memory/optimizer_state_mib"] == pytest.approx(3 * trained, rel=1e-2)


def test_the_peak_of_a_run_may_lie_before_its_first_step(tmp_path: Path) -> None:
    # The meter opened after the rows had been sent, which hold most where a model is small.
    wide = {"source": "synthetic", "args": {"rows": 1000, "features": 784}}
    sections = {"data": wide, "model": {"name": "linear"}, "train": {**FEW, "batch_size": 16}}
    facts, data, _ = _train(tmp_path, memory={"limit_mib": 500}, **sections)
    rows_mib = data.train_rows * 784 * 4 / 2**20
    told = facts.metrics["memory/predicted_peak_mib"]
    assert facts.metrics["memory/run_peak_allocated_mib"] == pytest.approx(told, rel=0.01)
    assert told > 2 * rows_mib, "a block of rows is there twice while it is sent"


@pytest.mark.parametrize("fails", [False, True])
def test_training_gives_back_what_it_took(tmp_path: Path, fails: bool) -> None:
    gc.collect()
    before = leaks.take_baseline(CPU)
    kept = None
    if fails:
        with pytest.raises(Diverged) as caught:
            _train(tmp_path, optim={"name": "sgd", "lr": 1000.0}, train=FEW)
        kept = caught.value  # as Prefect keeps it, with its traceback
        assert kept.__traceback__ is not None
    else:
        _train(tmp_path, train=FEW)
    released = leaks.release_device_memory(CPU, baseline_bytes=before.bytes)
    assert released.ok, released.owners
    assert released.after_bytes == before.bytes


@pytest.fixture
def admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every training is let in, as where somebody else takes the memory after that."""
    monkeypatch.setattr(
        place,
        "admit_training",
        lambda config, *_, **__: Admission(None, "", 64, "let in by a test"),
    )


def test_an_interrupt_keeps_nothing_that_a_closure_encloses(tmp_path: Path, monkeypatch) -> None:
    # One that arrived in the compiler kept the model: Python 3.11 keeps a cleared frame's function.
    def fit(state: TrainState, schedule: Schedule, **_: Any) -> None:
        model = state.model

        def compile_wrapper() -> None:
            assert model.training
            raise KeyboardInterrupt

        compile_wrapper()

    monkeypatch.setattr(trainer, "fit_model", fit)
    gc.collect()
    before = leaks.take_baseline(CPU)
    with pytest.raises(KeyboardInterrupt) as kept:
        _train(tmp_path)
    assert leaks.release_device_memory(CPU, baseline_bytes=before.bytes).ok
    assert kept.value.__cause__ is None


@pytest.mark.usefixtures("admitted")
def test_a_hundred_trainings_half_of_them_failing_leave_the_baseline(tmp_path: Path) -> None:
    small = {"source": "synthetic", "args": {"rows": 200, "features": 8}}
    quick = {"epochs": 1, "batch_size": 32}
    endings = [
        {},
        {"optim": {"name": "sgd", "lr": 1000.0}, "model": {"args": {"hidden": [64] * 6}}},
        {"model": {"name": "linear"}},
        {"memory": {"limit_mib": 0.02}},
    ]
    _train(tmp_path, data=small, train=quick)
    gc.collect()
    before = leaks.take_baseline(CPU)
    kept = []
    for i in range(100):
        try:
            _train(tmp_path, data=small, train=quick, **endings[i % 4])
        except (Diverged, OutOfMemory) as error:
            kept.append(error)  # as Prefect keeps them
    assert {type(error) for error in kept} == {Diverged, OutOfMemory} and len(kept) == 50
    released = leaks.release_device_memory(CPU, baseline_bytes=before.bytes)
    assert released.ok and released.after_bytes == before.bytes, released.owners


@pytest.mark.usefixtures("admitted")
def test_a_run_without_memory_says_so_and_leaves_its_evidence(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match="memory ran out on cpu .* raise memory.limit_mib"):
        _train(tmp_path, model={"name": "cnn", "args": {"width": 8}}, memory={"limit_mib": 0.04})
    told = json.loads((tmp_path / "memory" / "oom.json").read_text())
    assert told["tried"] == [64, 32, 16, 8, 4, 2, 1] and told["fitted"] is None
    assert told["holdings"] and told["phase"] == "forward"


def test_what_the_run_held_at_its_end_counts_as_given_back(tmp_path: Path) -> None:
    gc.collect()  # what earlier tests left would be given back as well
    before = leaks.take_baseline(CPU)
    facts, _, _ = _train(tmp_path, train=FEW)
    released = leaks.release_device_memory(
        CPU, baseline_bytes=before.bytes, held_bytes=facts.held_bytes
    )
    assert released.released_bytes == facts.held_bytes - before.bytes > 0
    assert released.residual_bytes == 0


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"batch_size": 2000}}, "train.batch_size: must be at most the 1438 training"),
        ({"train": {"loss": "mse"}}, "train.loss: mse does not fit classification"),
        (
            {"train": {"best_metric": "val/f1"}},
            "train.best_metric: val/f1 is not measured of this classification; choose one of val/a",
        ),
        (
            {"train": {"best_metric": "val/top5_accuracy"}},  # of ten classes
            "train.best_metric: val/top5_accuracy is not measured of this classification",
        ),
        (
            {"train": {"epochs": 1, "eval_every_steps": 23}},
            r"train.eval_every_steps: must be below the 23 steps of the run \(got 23\)",
        ),
        (
            {
                "optim": {"schedule": "plateau", "schedule_args": {"patience": 4}},
                "train": {"patience": 5},
            },
            "optim.schedule_args.patience: 4 never lowers the rate before train.patience 5 ends",
        ),
        (
            {
                "optim": {"schedule": "plateau", "schedule_args": {"patience": 1}},
                "train": {"epochs": 2},
            },
            "optim.schedule_args.patience: 1 never lowers the rate within the 2 evaluations of",
        ),
        (
            {"optim": {"schedule": "linear", "warmup": 460}},
            r"optim.warmup: must be below the 460 steps of the run",
        ),
        ({"optim": {"groups": {"head": {"lr": 1.0}}}}, "optim.groups: 'head' matches no parameter"),
        ({"model": {"freeze": ["head"]}}, "model.freeze: 'head' matches no parameter of the model"),
        (
            {"memory": {"recompute": True}, "model": {"name": "linear"}},
            "memory.recompute: the model has no gradient_checkpointing_enable",
        ),
    ],
)
def test_a_setting_that_contradicts_the_data_is_refused(
    tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _train(tmp_path, **sections)


@pytest.mark.parametrize(("work", "threads"), [(1_000_000, 1), (49_999_999, 1), (50_000_000, 2)])
def test_the_threads_follow_the_work(work: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with set_cpu_threads(work, CPU):
            assert torch.get_num_threads() == threads
        with set_cpu_threads(work, torch.device("cuda")):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
