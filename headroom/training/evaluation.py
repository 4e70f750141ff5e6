"""Evaluates the model on rows that it was not trained on: the loss over all rows, and the metrics
of the task. Batches that do not fit in memory are evaluated in smaller parts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headroom.base import nested, scores
from headroom.base.facts import DataFacts
from headroom.base.names import TOP_OF
from headroom.base.scores import ConfusionCells, Evaluation, KeptRows, shrink_classes
from headroom.data.batch import Batch
from headroom.data.batches import Batches
from headroom.models.user_model import BuiltinForward, Forward
from headroom.ranks.ranks import Ranks
from headroom.training.losses import OwnMetrics
from headroom.training.micro_batches import MemoryExhausted, MicroBatching, name_oom_phase
from headroom.training.optimizer_step import Count, Loss, count_rows, scale_loss
from headroom.watch.out_of_memory import clear_frames
from headroom.watch.phases import Phases

log = logging.getLogger(__name__)

MAX_LOG_PERPLEXITY = 700.0  # exp() of more is no float
EVAL_ROWS = 1024  # rows of one batch, where there is room: no gradients are kept there
# Batches summed up at a time: a small tensor kept of each lay between the freed large ones, so that
# none of these was used again and the heap of a CPU grew by all rows.
FOLDED = 8
TOP = 5  # how often the class is among the first of these, of more than TOP_OF classes
EVAL_SHARE = 1 / 16  # of the room, for the inputs of one batch


def choose_eval_rows(data: DataFacts, batch_size: int, *, room_bytes: float) -> int:
    """Choose the rows of an evaluation batch, where training has batch_size and the device
    this room."""
    # A row of tokens has as many outputs as tokens: large enough. A loader has its own batches.
    if data.batch is not None:
        return max(batch_size, data.val_batch_rows)
    if data.task == "tokens":
        return batch_size
    row_bytes = max(1, data.bytes // (data.train_rows + data.val_rows + data.test_rows))
    return max(batch_size, int(min(EVAL_ROWS, EVAL_SHARE * room_bytes / row_bytes)))


@dataclass
class Evaluator:
    """How outputs are evaluated. task: classification, multilabel, regression, tokens, or own: by
    the loss and the user's own metrics alone."""

    task: str
    loss: Loss
    autocast: Callable[[], AbstractContextManager[object]]
    micro: MicroBatching  # how many rows are read, and go through the model, at once
    phases: Phases
    forward: Callable[[nn.Module], Forward] = BuiltinForward
    count: Count = count_rows  # over what the loss of some rows is the mean
    metrics: OwnMetrics = field(default_factory=dict)  # the user's own, the mean over the rows each
    # Of a regression: its numbers, (rows, targets) float64, in the units of its target; and mean
    # and median of the training rows there, which it is held against.
    to_units: Callable[[np.ndarray], np.ndarray] = np.asarray
    guess: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    ranks: Ranks = Ranks()  # each judges its share, and all are told the same
    batch: Batch | None = None  # that is evaluated now, or was when that failed


@dataclass(frozen=True)
class _BatchSums:
    """Of one batch, on its device."""

    values: dict[str, Tensor]
    pairs: list[tuple[Tensor, Tensor]]  # outputs and targets that the figures are computed from


@torch.inference_mode()
def evaluate(
    model: nn.Module, batches: Batches, evaluator: Evaluator, *, part: str = "val"
) -> Evaluation:
    """Return val/loss over all rows, or over all that the loss counts, with the figures of the
    task (see names.METRICS; of more than TOP_OF classes also the share of rows whose class
    is among the first TOP). Waits for the device.

    Where a regression's target was scaled, val/loss is that of the scaled target (a mean
    squared error of 1 is as good as the mean), or of the user's own loss in the target's
    units, as the task's and the user's metrics are. part: what stands for val.

    Raises MemoryExhausted.
    """
    model.eval()
    evaluator.ranks.broadcast_buffers(model)
    while True:
        rows = min(evaluator.ranks.all_gather(min(evaluator.micro.rows, len(batches))))
        try:
            with name_oom_phase("eval"):
                evaluation = _evaluate_rows(model, batches, evaluator, rows)
            metrics = {f"{part}/{name}": value for name, value in evaluation.metrics.items()}
            return replace(evaluation, metrics=metrics)
        except MemoryExhausted as error:
            # Fewer rows that come from the host take less of the device.
            may_read_less = batches.residency in ("pinned", "host") and evaluator.ranks.is_alone
            if rows == 1 or not may_read_less:
                raise
            clear_frames(error)
        evaluator.batch = None
        evaluator.micro.rows = -(-rows // 2)
        log.warning("short of memory in eval with %s rows read at once: going on with half", rows)


def _evaluate_rows(
    model: nn.Module, batches: Batches, evaluator: Evaluator, rows_at_once: int
) -> Evaluation:
    """Return the evaluation, its metrics by the last parts of their names."""
    parts: list[dict[str, Tensor]] = []
    rows = 0
    kept = KeptRows(evaluator.task, len(batches))
    forward = evaluator.forward(model)
    for batch in batches.iterate_in_order(rows_at_once):
        evaluator.batch = batch
        with evaluator.phases.count_memory_once("eval", batch):
            sums_of_batch = _sum_batch(forward, batch, evaluator)
        values = sums_of_batch.values
        if batch.weight:
            rows += nested.count_rows(batch.y)
            for outputs, targets in sums_of_batch.pairs:
                kept.add(outputs, targets)
        else:  # another rank's row, to keep the others company
            values = {name: torch.zeros_like(value) for name, value in values.items()}
        parts.append(values)
        del batch, sums_of_batch
        evaluator.batch = None  # gone before the next one comes
        if len(parts) == FOLDED:
            parts = [_add_sums(parts)]
    evaluator.phases.meter.end_phase("eval")
    sums = {name: total.item() for name, total in _add_sums(parts).items()}
    sums = evaluator.ranks.sum_over_ranks({**sums, "rows": rows})
    rows = int(sums["rows"])
    loss = sums["loss"] / sums["counted"] if sums["counted"] else math.nan
    own = {name: sums[f"own/{name}"] / rows for name in evaluator.metrics}
    of_rows = _compute_scores(evaluator, kept)
    metrics = {
        "loss": loss,
        **_compute_counted_figures(evaluator.task, sums, loss),
        **of_rows.metrics,
        **own,
    }
    return replace(of_rows, metrics=metrics)


def _compute_counted_figures(task: str, sums: dict[str, float], loss: float) -> dict[str, float]:
    """Return the figures that are sums over the rows."""
    if task == "tokens":
        return {"perplexity": math.exp(min(loss, MAX_LOG_PERPLEXITY))}
    if task in ("regression", "own"):
        return {}
    figures = {"accuracy": sums["hits"] / sums["answers"]}
    if "top5" in sums:
        figures["top5_accuracy"] = sums["top5"] / sums["answers"]
    if task == "multilabel":
        count = 2 * sums["both"] + sums["either"]
        figures["f1"] = 2 * sums["both"] / count if count else 1.0
    return figures


def _compute_scores(evaluator: Evaluator, kept: KeptRows) -> Evaluation:
    """Return what needs the rows."""
    kept_rows = _gather_all_ranks(evaluator.ranks, kept.on_host())
    if kept_rows is None:
        return Evaluation()
    outputs, targets = kept_rows
    if evaluator.task == "multilabel":
        return Evaluation(scores.compute_label_scores(outputs.float().numpy(), targets.numpy()))
    is_constant = len(outputs) > 1 and bool((outputs == outputs[:1]).all())
    if evaluator.task == "classification":
        cells = ConfusionCells.of(outputs.numpy(), targets.numpy())
        return Evaluation(
            scores.compute_class_scores(cells),
            cells=cells,
            is_constant=is_constant,
            is_by_chance=scores.is_by_chance(cells),
        )
    predictions, so = (
        evaluator.to_units(part.double().numpy()).reshape(len(part), -1)
        for part in (outputs, targets)
    )
    mean_rmse, median_mae = scores.compute_constant_baseline(predictions, so, evaluator.guess)
    return Evaluation(
        scores.compute_regression_scores(predictions, so),
        is_constant=is_constant,
        r2_error=scores.compute_r2_error(predictions, so),
        mean_rmse=mean_rmse,
        median_mae=median_mae,
    )


def _gather_all_ranks(
    ranks: Ranks, ours: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor] | None:
    """Return what all ranks kept, in no order of the rows."""
    if ranks.is_alone:
        return ours
    kept = [pair for pair in ranks.all_gather(ours) if pair is not None]
    return (torch.cat([p[0] for p in kept]), torch.cat([p[1] for p in kept])) if kept else None


def _sum_batch(forward: Forward, batch: Batch, evaluator: Evaluator) -> _BatchSums:
    return evaluator.micro.fit(partial(_sum_in_parts, forward, evaluator), batch)


def _sum_in_parts(forward: Forward, evaluator: Evaluator, batch: Batch, rows: int) -> _BatchSums:
    x, y = batch.x, batch.y
    parts = nested.split_batch((x, y), rows, whole=nested.count_rows(y))
    sums = []
    # No comprehension, which is a closure: see micro_batches.MicroBatching.fit.
    for part_x, part_y in parts:
        sums.append(_sum_part(forward, part_x, part_y, evaluator))
    pairs = [pair for part in sums for pair in part.pairs]
    return _BatchSums(_add_sums([part.values for part in sums]), pairs)


def _sum_part(forward: Forward, x: Any, y: Any, evaluator: Evaluator) -> _BatchSums:
    rows, count = nested.count_rows(y), evaluator.count(x, y)
    copied = Tensor.clone if evaluator.micro.copies else _return_unchanged
    with evaluator.autocast():
        outputs, loss = forward(x)
        if loss is None:
            loss = evaluator.loss(copied(outputs), nested.map_tensors(y, copied))
    values, pairs = {"loss": scale_loss(loss, count), "counted": torch.as_tensor(count)}, []
    if evaluator.task == "classification":
        answers, classes = outputs.argmax(1), outputs.shape[1]
        values["hits"], values["answers"] = (answers == y).sum(), torch.tensor(answers.numel())
        if classes > TOP_OF:
            best = outputs.topk(TOP, 1).indices
            values["top5"] = (best == y.unsqueeze(1)).sum()
        pairs.append((shrink_classes(answers, classes), shrink_classes(y, classes)))
    elif evaluator.task == "multilabel":
        is_told, is_so = outputs > 0, y > 0.5
        values["hits"], values["answers"] = (is_told == is_so).sum(), torch.tensor(y.numel())
        values["both"] = (is_told & is_so).sum()
        values["either"] = (is_told ^ is_so).sum()
        pairs.append((outputs, is_so))
    elif evaluator.task == "regression":
        pairs.append((outputs, y))
    for name, metric in evaluator.metrics.items():
        arguments = copied(outputs), nested.map_tensors(y, copied)
        values[f"own/{name}"] = torch.as_tensor(metric(*arguments)).float().reshape(()) * rows
    return _BatchSums(values, pairs)


def _return_unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _add_sums(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    if len(parts) == 1:
        return parts[0]
    return {name: torch.stack([part[name] for part in parts]).sum() for name in parts[0]}
