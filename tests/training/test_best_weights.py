"""Which epoch was best, and how long ago."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn

from headroom.base.scores import Evaluation
from headroom.settings.run_config import RunConfig
from headroom.training.best_weights import BestWeights


def _choose(best_metric: str) -> Any:
    train = {"best_metric": best_metric, "metrics": {"x": "torch:abs"}}
    return RunConfig.model_validate({"train": train}).train.best


def test_epochs_are_counted_from_the_best_one() -> None:
    best, waited = BestWeights(), []
    for epoch, loss in enumerate([3.0, 2.0, 2.0, 2.5, 1.0, math.nan, math.inf, 0.5], 1):
        best.record(Evaluation({"val/loss": loss}), epoch)
        waited.append((best.epoch, best.waited))
    assert waited == [(1, 0), (2, 0), (2, 1), (2, 2), (5, 0), (5, 1), (5, 2), (8, 0)]


def test_only_the_weights_of_a_best_epoch_are_copied() -> None:
    best, model = BestWeights(), nn.Linear(1, 1, bias=False)
    for epoch, (loss, weight) in enumerate([(2.0, 1.0), (1.0, 2.0), (1.5, 3.0)], 1):
        nn.init.constant_(model.weight, weight)
        best.record(Evaluation({"val/loss": loss}), epoch)
        best.keep(model)
    found = best.restore_best(model, Evaluation({"val/loss": 1.5}))
    assert model.weight.item() == 2
    assert found.metrics == {"val/loss": 1.0, "train/best_epoch": 2.0}


def test_all_of_the_best_evaluation_comes_back_with_its_weights() -> None:
    """Also from a checkpoint: warnings are made of more than its metrics."""
    best, cells = BestWeights(), SimpleNamespace(table=np.zeros((3, 1), np.int64))
    found = Evaluation({"val/loss": 1.0}, cells, is_constant=True, r2_error=0.5, mean_rmse=2.0)
    best.record(found, 1)
    best.record(Evaluation({"val/loss": 2.0}), 2)
    again, model = BestWeights(), nn.Linear(1, 1)
    again.restore(best.state())
    for one in (best, again):
        restored = one.restore_best(model, Evaluation())
        assert restored.cells is not None and (restored.cells.table == 0).all()
        metrics = {"val/loss": 1.0, "train/best_epoch": 1.0}
        assert replace(restored, cells=cells) == replace(found, metrics=metrics)


def test_the_best_may_be_the_highest_of_another_metric() -> None:
    best, found = BestWeights(metric=_choose("max:val/accuracy")), []
    for epoch, value in enumerate([0.5, 0.7, 0.7, 0.6, math.nan, 0.8], 1):
        best.record(Evaluation({"val/loss": float(epoch), "val/accuracy": value}), epoch)
        found.append((best.epoch, best.waited))
    assert found == [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (6, 0)]
    best.record(Evaluation({"val/loss": 0.0}), 7)  # not measured this time
    assert (best.epoch, best.waited) == (6, 1)


@pytest.mark.parametrize("is_lower", [True, False])
def test_patience_wants_an_improvement_by_min_delta_and_the_best_is_the_best(
    is_lower: bool,
) -> None:
    """As in other trainers: what is too little to go on for is good enough to be logged. It counts
    from the last improvement that was enough, also after a checkpoint."""
    metric = _choose("min:val/x" if is_lower else "max:val/x")
    best, found = BestWeights(metric=metric, min_delta=0.25), []
    for epoch, value in enumerate([2.0, 1.875, 1.75, 1.625, 1.5, 1.625], 1):
        best.record(Evaluation({"val/x": value if is_lower else -value}), epoch)
        found.append((best.epoch, best.waited))
        state = best.state()
        best = BestWeights(metric=metric, min_delta=0.25)
        best.restore(state)
    assert found == [(1, 0), (2, 1), (3, 2), (4, 0), (5, 1), (5, 2)]


def _is_improving(values: list[float]) -> bool:
    best = BestWeights()
    for epoch, value in enumerate(values, 1):
        again = BestWeights()
        again.restore(best.state())  # as a training does that goes on
        best = again
        best.record(Evaluation({"val/loss": value}), epoch)
    return best.is_improving()


def test_a_training_that_still_gains_is_known_from_one_that_has_ended() -> None:
    """Story: wine's best epoch was the last of 20, and nothing was said."""
    at = np.arange(20)
    falling = 1 / (1 + 0.1 * at)
    assert _is_improving(falling.tolist()) and not _is_improving(falling[:5].tolist())
    assert not _is_improving([*falling, 1.0])  # the last is not the best
    assert not _is_improving((0.1 + np.exp(-at)).tolist())  # falls still, by nothing
    assert not _is_improving([*falling[:-1], math.nan]) and not _is_improving([0.5])
    random = np.random.default_rng(0)
    ended = 0.1 + np.exp(-at) + 0.02 * random.normal(size=(1000, 20))
    told = sum(_is_improving(values.tolist()) for values in ended)
    assert told <= 10  # of a thousand that only scatter
