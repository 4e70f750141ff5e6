"""Keeps the weights of the best epoch on the host while the training goes on: they are copied
only where another epoch follows a better one, into the same memory each time, so that a device
holds nothing more and an epoch pays for reading its weights once. A loss that is no finite
number is not compared: where no epoch had one, the last weights stay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tasks.engine.data.scores import Cells
from tasks.engine.distributed.shards import get_local_part, shard_like


def iterate_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that an epoch leaves in a model, each once, with its name: parameters
    and buffers, so also the running statistics of a normalization."""
    return itertools.chain(model.named_parameters(), model.named_buffers())


class BestWeights:
    """Follows val/loss over the epochs, and keeps the weights of the lowest."""

    def __init__(self, *, keeps: bool = True) -> None:
        """keeps: whether the weights are wanted; else the losses alone are followed."""
        self.keeps = keeps
        self.waited = 0  # epochs since the best
        self.epoch = 0  # from 1; 0: none yet
        self._metrics = {"val/loss": math.inf}
        self.cells: Cells | None = None  # of the best epoch of a classification
        self._kept: dict[str, Tensor] = {}
        self._is_now = False  # the best weights are those of now, and not copied yet

    @property
    def has_weights(self) -> bool:
        """Return whether `restore_best` gives the metrics of an earlier, better epoch."""
        return self.keeps and self.epoch > 0

    def record_epoch(
        self, metrics: dict[str, float], epoch: int, *, cells: Cells | None = None
    ) -> None:
        """Record that this epoch, counted from 1, has ended with these metrics."""
        self.waited += 1
        if math.isfinite(metrics["val/loss"]) and metrics["val/loss"] < self._metrics["val/loss"]:
            self._metrics, self.epoch, self.waited = metrics, epoch, 0
            self.cells = cells
        self._is_now = self.waited == 0

    @torch.inference_mode()
    def keep(self, model: nn.Module) -> None:
        """Copy the weights, where the current ones are the best; call it where training goes
        on."""
        if not self.keeps or not self._is_now:
            return
        self._is_now = False
        for name, tensor in iterate_tensors(model):
            kept = self._kept.get(name)
            is_other = kept is None or (get_local_part(kept) is kept) != (
                get_local_part(tensor) is tensor
            )
            if kept is None or is_other or kept.shape != tensor.shape:
                self._kept[name] = kept = torch.empty_like(tensor, device="cpu")
            kept.copy_(tensor)

    @torch.inference_mode()
    def restore_best(self, model: nn.Module, metrics: dict[str, float]) -> dict[str, float]:
        """Load the best weights into the model and return their metrics. metrics: of the
        current weights."""
        if not self.has_weights:
            return metrics
        for name, tensor in iterate_tensors(model) if self.waited else ():
            kept = self._kept.get(name, tensor)
            if kept.shape == tensor.shape:
                tensor.copy_(shard_like(kept, tensor))
            else:  # a buffer that has grown since
                tensor.data = kept.to(tensor.device)
        return {**self._metrics, "train/best_epoch": float(self.epoch)}

    def state(self) -> dict[str, Any]:
        """Return the best result so far; without its weights where those are the model's
        current ones."""
        kept = {} if self._is_now else dict(self._kept)
        best = {"metrics": dict(self._metrics), "epoch": self.epoch, "waited": self.waited}
        cells = None if self.cells is None else self.cells.table
        return {**best, "kept": kept, "is_now": self._is_now, "cells": cells}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to where `state` was taken."""
        self._metrics, self.epoch = state["metrics"], state["epoch"]
        self.waited, self._kept, self._is_now = state["waited"], state["kept"], state["is_now"]
        cells = state.get("cells")  # which checkpoints of before do not have
        self.cells = None if cells is None else Cells(cells)

    def iterate_kept(self) -> Iterator[Tensor]:
        """Yield the tensors that are kept."""
        yield from self._kept.values()
