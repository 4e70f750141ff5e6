"""The figures of a training, against scikit-learn on what the logged model says of the rows that it
was validated on."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from headroom.base.facts import DataFacts, TrainFacts
from headroom.data.preparation import load_arrays, prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.models import predictor
from headroom.settings.run_config import RunConfig
from headroom.training import trainer
from headroom.training.loop import StopRequest
from headroom.training.plan import make_plan


def _trained(folder: Path, arrays: dict[str, np.ndarray], **sections: Any):
    np.savez(folder / "given.npz", **arrays)
    made = {"cache": str(folder / "data"), "path": str(folder / "given.npz")}
    sections = {"train": {"epochs": 4}, **sections}
    sections["data"] = {**made, **sections.get("data", {})}
    config = RunConfig.model_validate(sections)
    data = prepare_dataset(config.data)
    facts = trainer.train(
        make_plan(config, detect_best_device("cpu"), data), folder=folder, log=lambda *_: None
    )
    return facts, data


def _judged(facts: TrainFacts, data: DataFacts) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of the model as it is logged, and targets, both in the target's units."""
    arrays = load_arrays(data)
    raw = (arrays.val_x * np.array(data.scale) + np.array(data.offset)).astype(np.float32)
    outputs = predictor.load(Path(facts.model_folder)).outputs(raw)
    y = np.array(arrays.val_y)
    if data.task == "regression":
        y = y * np.array(data.target_scale) + np.array(data.target_offset)
    return np.asarray(outputs), y


def _some(rows: int, classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    y = random.integers(0, classes, rows)
    x = random.normal(size=(classes, 5))[y] + random.normal(size=(rows, 5)) * 0.7
    return x.astype(np.float32), y


@pytest.mark.parametrize("classes", [3, 12])
@pytest.mark.parametrize("keep", ["best", "last"])
def test_a_classification(tmp_path: Path, classes: int, keep: str) -> None:
    """With a rate that makes later epochs worse, so that the best is not the last."""
    x, y = _some(400, classes)
    train = {"epochs": 6, "keep": keep, "batch_size": 16}
    facts, data = _trained(tmp_path, {"x": x, "y": y}, train=train, optim={"lr": 0.5})
    outputs, so = _judged(facts, data)
    told = outputs.argmax(1)
    expected = {
        "val/accuracy": sk.accuracy_score(so, told),
        "val/balanced_accuracy": sk.balanced_accuracy_score(so, told),
        "val/macro_f1": sk.f1_score(so, told, average="macro"),
    }
    if classes > 10:
        expected["val/top5_accuracy"] = sk.top_k_accuracy_score(
            so, outputs, k=5, labels=range(classes)
        )
    assert {k: facts.metrics[k] for k in expected} == pytest.approx(expected)
    assert ("val/top5_accuracy" in facts.metrics) == (classes > 10)
    assert facts.classes["val"]["matrix"] == sk.confusion_matrix(so, told).tolist()
    with open(tmp_path / "scores" / "val_classes.csv", newline="") as file:
        f1 = [float(line["f1"]) for line in csv.DictReader(file)]
    assert f1 == pytest.approx(sk.f1_score(so, told, average=None), abs=1e-6)


def test_several_labels(tmp_path: Path) -> None:
    x, y = _some(300, 3)
    labels = np.column_stack([np.eye(3)[y], y > 0]).astype(np.int64)
    facts, data = _trained(tmp_path, {"x": x, "y": labels})
    outputs, so = _judged(facts, data)
    expected = {
        "val/f1": sk.f1_score(so, outputs > 0, average="micro"),
        "val/macro_f1": sk.f1_score(so, outputs > 0, average="macro"),
        "val/average_precision": sk.average_precision_score(so, outputs, average="macro"),
    }
    assert {k: facts.metrics[k] for k in expected} == pytest.approx(expected)
    assert not facts.classes and not (tmp_path / "scores").exists()


@pytest.mark.parametrize("targets", [1, 2])
def test_a_regression(tmp_path: Path, targets: int) -> None:
    x, _ = _some(300, 3)
    y = 1000 + 50 * x[:, :targets] * np.array([1, 20])[:targets]
    facts, data = _trained(tmp_path, {"x": x, "y": y if targets > 1 else y[:, 0]})
    outputs, so = _judged(facts, data)
    outputs = outputs.reshape(so.shape)
    expected = {
        "val/mae": sk.mean_absolute_error(so, outputs),
        "val/rmse": sk.root_mean_squared_error(so, outputs),
        "val/mape": 100 * sk.mean_absolute_percentage_error(so, outputs),
        "val/r2": sk.r2_score(so, outputs, multioutput="variance_weighted"),
    }
    assert {k: facts.metrics[k] for k in expected} == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("transform", ["auto", "raw"])
def test_a_target_of_0_leaves_no_percentage_error_however_it_was_scaled(
    tmp_path: Path, transform: str
) -> None:
    """Scaled in single precision and back it is 1e-6, of which an error is a million times more."""
    x, _ = _some(300, 3)
    y = np.where(np.arange(300) % 10, 1000 + 50 * x[:, 0], 0.0)
    facts, _ = _trained(tmp_path, {"x": x, "y": y}, data={"target_transform": transform})
    assert "val/mae" in facts.metrics and "val/mape" not in facts.metrics


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_rows_that_are_put_aside_are_judged_once_by_the_weights_that_are_logged(
    tmp_path: Path, task: str
) -> None:
    x, y = _some(400, 3)
    given = {"x": x, "y": y if task == "classification" else x[:, 0] * 20 + 7}
    np.savez(tmp_path / "given.npz", **given)
    made = {"cache": str(tmp_path / "data"), "path": str(tmp_path / "given.npz")}
    config = RunConfig.model_validate(
        {"data": {**made, "test_fraction": 0.25}, "optim": {"lr": 0.3}, "train": {"epochs": 5}}
    )
    data = prepare_dataset(config.data)
    logged: list[str] = []
    facts = trainer.train(
        make_plan(config, detect_best_device("cpu"), data),
        folder=tmp_path,
        log=lambda metrics, _: logged.extend(metrics),
    )
    arrays = load_arrays(data)
    assert arrays.test_x is not None and arrays.test_y is not None
    raw = (arrays.test_x * np.array(data.scale) + np.array(data.offset)).astype(np.float32)
    outputs = np.asarray(predictor.load(Path(facts.model_folder)).outputs(raw))
    so = np.array(arrays.test_y)
    if task == "classification":
        told = outputs.argmax(1)
        expected = {
            "test/accuracy": sk.accuracy_score(so, told),
            "test/macro_f1": sk.f1_score(so, told, average="macro"),
        }
        assert facts.classes["test"]["matrix"] == sk.confusion_matrix(so, told).tolist()
        assert (tmp_path / "scores" / "test_confusion.csv").exists()
    else:
        so = so * np.array(data.target_scale) + np.array(data.target_offset)
        expected = {
            "test/mae": sk.mean_absolute_error(so, outputs.reshape(so.shape)),
            "test/r2": sk.r2_score(so, outputs.reshape(so.shape)),
        }
    assert {k: facts.metrics[k] for k in expected} == pytest.approx(expected, rel=1e-4)
    val, test = ({k.partition("/")[2] for k in facts.metrics if k.startswith(p)} for p in PARTS)
    assert val == test and not any(name.startswith("test/") for name in logged)


PARTS = ("val/", "test/")


def test_what_is_put_aside_changes_no_weight(tmp_path: Path) -> None:
    """By time, so that the same rows are put aside whatever is in them."""
    x, y = _some(300, 3)
    weights = []
    for name, factor in (("one", 1.0), ("two", -500.0)):
        changed = x.copy()
        changed[-30:] *= factor
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / "given.npz", x=changed, y=y)
        made = {"cache": str(tmp_path / "c"), "path": str(tmp_path / name / "given.npz")}
        split = {"split": "time", "test_fraction": 0.1}
        train = {"epochs": 3, "patience": 1}
        config = RunConfig.model_validate({"data": {**made, **split}, "train": train})
        folder = tmp_path / name
        facts = trainer.train(
            make_plan(config, detect_best_device("cpu"), prepare_dataset(config.data)),
            folder=folder,
            log=lambda *_: None,
        )
        weights.append((folder / "model" / "weights.pt", facts.metrics))
    states = [torch.load(file, weights_only=True) for file, _ in weights]
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    (_, first), (_, second) = weights
    assert first["val/loss"] == second["val/loss"] and first["test/loss"] != second["test/loss"]


def test_a_training_that_ends_before_it_is_done_judges_nothing_put_aside(tmp_path: Path) -> None:
    x, y = _some(300, 3)
    np.savez(tmp_path / "given.npz", x=x, y=y)
    made = {"cache": str(tmp_path / "c"), "path": str(tmp_path / "given.npz")}
    config = RunConfig.model_validate({"data": {**made, "test_fraction": 0.2}})
    stops = iter([None, None, StopRequest("enough")])
    facts = trainer.train(
        make_plan(config, detect_best_device("cpu"), prepare_dataset(config.data)),
        folder=tmp_path,
        log=lambda *_: None,
        check_stop=lambda: next(stops),
    )
    assert facts.stopped and not any(name.startswith("test/") for name in facts.metrics)
    assert "val/loss" in facts.metrics and "test" not in facts.classes
