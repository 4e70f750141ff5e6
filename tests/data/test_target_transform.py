"""A skewed target is learned in its logarithm where that scores better, and told in its units."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import mean_absolute_error, r2_score

from headroom.base.facts import DataFacts, TrainFacts
from headroom.data.preparation import load_arrays, prepare_dataset
from headroom.data.source_data import DataError
from headroom.device.detection import detect_best_device
from headroom.models import predictor
from headroom.settings.run_config import RunConfig
from headroom.training.plan import make_plan
from headroom.training.trainer import train

ROWS = 600
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS, 5))
SIGNAL = X[:, 0] + X[:, 1] * X[:, 2]
HEAVY = np.exp(1.5 * SIGNAL + 0.1 * RANDOM.normal(size=ROWS))
ZEROS = np.where(X[:, 3] > 0, 0, np.exp(SIGNAL))
EVEN = SIGNAL + 0.1 * RANDOM.normal(size=ROWS)
NOISE = RANDOM.gamma(0.5, 2, size=ROWS)  # skewed, of which X knows nothing


def _config(folder: Path, y: np.ndarray, *, train: dict | None = None, **data: str) -> RunConfig:
    np.savez(folder / "given.npz", x=X, y=y)
    made = {"path": str(folder / "given.npz"), "cache": str(folder / "cache"), **data}
    return RunConfig.model_validate({"data": made, "train": {"epochs": 20, **(train or {})}})


def _prepared(folder: Path, y: np.ndarray, **data: str) -> DataFacts:
    return prepare_dataset(_config(folder, y, **data).data)


def _trained(folder: Path, config: RunConfig) -> TrainFacts:
    return train(
        make_plan(config, detect_best_device("cpu"), prepare_dataset(config.data)),
        folder=folder,
        log=lambda *_: None,
    )


@pytest.mark.parametrize(("y", "chosen"), [(HEAVY, True), (ZEROS, True), (EVEN**2, False)])
def test_the_logarithm_is_learned_where_it_scores_better(
    tmp_path: Path, y: np.ndarray, chosen: bool
) -> None:
    facts = _prepared(tmp_path, y)
    assert bool(facts.target_log) == chosen
    assert ("is learnt" in "".join(facts.notes)) == chosen


@pytest.mark.parametrize("y", [EVEN, -HEAVY, np.stack([HEAVY, ZEROS], 1)])
def test_it_is_not_where_a_target_is_not_skewed_or_below_0_or_not_alone(
    tmp_path: Path, y: np.ndarray
) -> None:
    facts = _prepared(tmp_path, y)
    assert facts.target_log == () and facts.task == "regression"


def test_prepared_amounts_are_their_logarithm_and_come_back(tmp_path: Path) -> None:
    auto, log, scaled = (
        _prepared(tmp_path, ZEROS, target_transform=choice) for choice in ("auto", "log", "scale")
    )
    assert auto.target_log == log.target_log and not scaled.target_log
    assert len({facts.folder for facts in (auto, log, scaled)}) == 3
    assert auto.fingerprint != scaled.fingerprint
    kept, plain = load_arrays(auto), load_arrays(scaled)
    assert abs(float(kept.train_y.mean())) < 1e-5 and abs(float(kept.train_y.std()) - 1) < 1e-5
    for found, so in ((kept.train_y, plain.train_y), (kept.val_y, plain.val_y)):
        so = so * np.array(scaled.target_scale) + np.array(scaled.target_offset)
        logs = np.asarray(found, np.float64) * auto.target_scale + auto.target_offset
        back = np.expm1(logs) * auto.target_log
        np.testing.assert_allclose(back, so, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("y", "said"),
    [
        (
            EVEN,
            r"log needs targets from 0 on \(got -\d.* in given.npz row \d+, target 'y'\); set",
        ),
        (np.arange(ROWS) % 3, "log is for a regression"),
    ],
)
def test_a_logarithm_that_is_asked_for_and_cannot_be_is_refused(
    tmp_path: Path, y: np.ndarray, said: str
) -> None:
    with pytest.raises(DataError, match=f"data.target_transform: {said}"):
        _prepared(tmp_path, y, target_transform="log")


def absolute(outputs, targets):  # train.metrics.mine
    return (outputs - targets).abs().mean()


def test_metrics_and_predictions_are_in_the_targets_units_and_better_than_without(
    tmp_path: Path,
) -> None:
    """Against scikit-learn's figures of what the logged model predicts on the validation rows."""
    found = {}
    for choice in ("scale", "auto"):
        (folder := tmp_path / choice).mkdir()
        metrics = {"metrics": {"mine": f"{__name__}:absolute"}}
        config = _config(folder, HEAVY, train=metrics, target_transform=choice)
        found[choice] = _trained(folder, config)
        data = prepare_dataset(config.data)
        held = np.asarray(load_arrays(data).val_x) * np.array(data.scale) + np.array(data.offset)
        rows = np.array([np.abs(X - row).sum(1).argmin() for row in held])
        told = predictor.load(folder / "model").predict(held)["prediction"]
        for name, figure in (("val/mae", mean_absolute_error), ("val/r2", r2_score)):
            expected = figure(HEAVY[rows], told)
            assert found[choice].metrics[name] == pytest.approx(expected, rel=1e-3)
        assert found[choice].metrics["val/mine"] == pytest.approx(
            found[choice].metrics["val/mae"], rel=1e-3
        )
    assert found["auto"].metrics["val/mae"] < 0.7 * found["scale"].metrics["val/mae"]
    assert found["auto"].warnings == ()


def test_a_score_that_is_as_good_as_a_guess_is_doubted_however_it_is_learned(
    tmp_path: Path,
) -> None:
    for choice in ("auto", "log"):
        (folder := tmp_path / choice).mkdir()
        facts = _trained(folder, _config(folder, NOISE, target_transform=choice))
        (said,) = facts.warnings
        assert "as good" in said or "the better answer" in said or "no better beyond chance" in said
        assert not any(name.startswith("as the") for name in facts.metrics)
