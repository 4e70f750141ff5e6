"""Keeps the weights of the best epoch, on the host, copied only where another epoch follows a
better one. Where no epoch had a loss that is finite, the last weights stay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headroom.base.nested import get_local_part, shard_like
from headroom.base.scores import ConfusionCells, Evaluation
from headroom.settings.run_config import BestMetric


def iterate_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that an epoch leaves in a model, each once, with its name: parameters
    and buffers, so also the running statistics of a normalization."""
    return itertools.chain(model.named_parameters(), model.named_buffers())


# Fewer evaluations tell no trend; a quarter of them that gains less, of the value and of all that
# was gained, is near the end of it.
LEAST_EVALUATIONS, WORTH, SCATTERS = 8, 0.02, 2.0


class BestWeights:
    """Follows a metric over the evaluations, and keeps the weights of the best."""

    def __init__(
        self,
        *,
        keeps: bool = True,
        metric: BestMetric = BestMetric("val/loss", True),  # noqa: B008 (a tuple)
        min_delta: float = 0.0,
    ) -> None:
        """keeps: whether the weights are wanted; else the metric alone is followed. min_delta: how
        much better it has to get, for `waited` to begin anew."""
        self.keeps, self._metric, self._min_delta = keeps, metric, min_delta
        self.waited = 0  # evaluations since one that was better by min_delta
        self.epoch = 0.0  # from 1, or a part of one; 0: none yet
        self._evaluation = Evaluation()  # of the best epoch
        # What min_delta counts from; of a metric that is to be high, its negative.
        self._reached = math.inf
        self._kept: dict[str, Tensor] = {}
        self.is_now = False  # the best weights are those of now, and not copied yet
        self.values: list[float] = []  # of all evaluations; less is better

    def is_improving(self) -> bool:
        """Return whether the last evaluation is the best, and those of the last quarter have gained
        on what was reached before by more than chance and by a share that is worth going on."""
        last = max(2, len(self.values) // 4)
        if len(self.values) < LEAST_EVALUATIONS or not np.isfinite(self.values).all():
            return False
        before, now = self.values[:-last], self.values[-last:]
        # How much three that follow each other are off a line, of which a curve has little.
        scatter = float(np.abs(np.diff(self.values[-last - 2 :], 2)).mean())
        gained = min(before) - now[-1]
        worth = WORTH * min(abs(now[-1]), max(self.values) - now[-1])
        return now[-1] == min(self.values) and gained > max(worth, SCATTERS * scatter)

    @property
    def has_weights(self) -> bool:
        """Return whether `restore_best` gives the evaluation of an earlier, better epoch."""
        return self.keeps and self.epoch > 0

    def record(self, evaluation: Evaluation, epoch: float) -> None:
        """Record an evaluation. epoch: how many had ended by then, or a part of one."""
        self.waited += 1
        value = self._read(evaluation.metrics)
        self.is_now = value < self._read(self._evaluation.metrics)
        self.values.append(value)
        if self.is_now:
            self._evaluation, self.epoch = evaluation, epoch
        if value < self._reached - self._min_delta:
            self._reached, self.waited = value, 0

    def _read(self, metrics: dict[str, float]) -> float:
        """Return the value, or its negative where more is better; infinite where it is no number or
        absent."""
        value = metrics.get(self._metric.name, math.inf)
        if not math.isfinite(value):
            return math.inf
        return value if self._metric.is_lower else -value

    @torch.inference_mode()
    def keep(self, model: nn.Module) -> None:
        """Copy the weights, where the current ones are the best; call it where training goes
        on."""
        if not self.keeps or not self.is_now:
            return
        self.is_now = False
        for name, tensor in iterate_tensors(model):
            kept = self._kept.get(name)
            is_other = kept is None or (get_local_part(kept) is kept) != (
                get_local_part(tensor) is tensor
            )
            if kept is None or is_other or kept.shape != tensor.shape:
                self._kept[name] = kept = torch.empty_like(tensor, device="cpu")
            kept.copy_(tensor)

    @torch.inference_mode()
    def restore_best(self, model: nn.Module, evaluation: Evaluation) -> Evaluation:
        """Load the best weights into the model and return their evaluation. evaluation: of the
        current weights."""
        if not self.has_weights:
            return evaluation
        for name, tensor in () if self.is_now else iterate_tensors(model):
            kept = self._kept.get(name, tensor)
            if kept.shape == tensor.shape:
                tensor.copy_(shard_like(kept, tensor))
            else:  # a buffer that has grown since
                tensor.data = kept.to(tensor.device)
        metrics = {**self._evaluation.metrics, "train/best_epoch": float(self.epoch)}
        return replace(self._evaluation, metrics=metrics)

    def state(self) -> dict[str, Any]:
        """Return the best result so far; without its weights where those are the model's
        current ones."""
        kept = {} if self.is_now else dict(self._kept)
        cells = self._evaluation.cells
        table = None if cells is None else cells.table
        return {
            "evaluation": {**asdict(replace(self._evaluation, cells=None)), "cells": table},
            "epoch": self.epoch,
            "waited": self.waited,
            "kept": kept,
            "is_now": self.is_now,
            "reached": self._reached,
            "values": list(self.values),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to where `state` was taken."""
        evaluation = dict(state["evaluation"])
        table = evaluation.pop("cells")
        cells = None if table is None else ConfusionCells(table)
        self._evaluation, self.epoch = Evaluation(**evaluation, cells=cells), state["epoch"]
        self.waited, self._kept, self.is_now = state["waited"], state["kept"], state["is_now"]
        self._reached = state["reached"]
        self.values = list(state["values"])

    def iterate_kept(self) -> Iterator[Tensor]:
        """Yield the tensors that are kept."""
        yield from self._kept.values()
