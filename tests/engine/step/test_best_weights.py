"""Which epoch was best, and how long ago."""

import math

import numpy as np
from torch import nn

from tasks.engine.base.scores import ConfusionCells
from tasks.engine.step.evaluation import BestWeights


def test_epochs_are_counted_from_the_best_one() -> None:
    best, waited = BestWeights(), []
    for epoch, loss in enumerate([3.0, 2.0, 2.0, 2.5, 1.0, math.nan, math.inf, 0.5], 1):
        best.record_epoch({"val/loss": loss}, epoch)
        waited.append((best.epoch, best.waited))
    assert waited == [(1, 0), (2, 0), (2, 1), (2, 2), (5, 0), (5, 1), (5, 2), (8, 0)]


def test_only_the_weights_of_a_best_epoch_are_copied() -> None:
    best, model = BestWeights(), nn.Linear(1, 1, bias=False)
    for epoch, (loss, weight) in enumerate([(2.0, 1.0), (1.0, 2.0), (1.5, 3.0)], 1):
        nn.init.constant_(model.weight, weight)
        best.record_epoch({"val/loss": loss}, epoch)
        best.keep(model)
    found = best.restore_best(model, {"val/loss": 1.5})
    assert model.weight.item() == 2 and found == {"val/loss": 1.0, "train/best_epoch": 2.0}


def test_the_cells_of_the_best_epoch_come_back_with_its_weights() -> None:
    """Those of a checkpoint of before are not known, and no reason to refuse it."""
    best, cells = BestWeights(), [ConfusionCells(np.full((3, 1), k)) for k in range(2)]
    best.record_epoch({"val/loss": 1.0}, 1, cells=cells[0])
    best.record_epoch({"val/loss": 2.0}, 2, cells=cells[1])
    assert best.cells is cells[0]
    again = BestWeights()
    again.restore(best.state())
    assert again.cells is not None and (again.cells.table == 0).all()
    again.restore({k: v for k, v in best.state().items() if k != "cells"})
    assert again.cells is None
