"""How good the model is on rows it was not trained on: loss over all rows, and the figures of the
task. Batches that do not fit in memory are judged in smaller parts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tasks.engine.base import nested
from tasks.engine.base.facts import DataFacts
from tasks.engine.batches.batches import Batches
from tasks.engine.data.run_warnings import ALIKE, UNLOGGED
from tasks.engine.distributed.ranks import Ranks
from tasks.engine.memory.memory_meter import clear_frames
from tasks.engine.models.model_call import Forward, Plain
from tasks.engine.scores import figures
from tasks.engine.scores.figures import Cells
from tasks.engine.scores.kept_rows import KeptRows, small
from tasks.engine.step.losses import Metrics
from tasks.engine.step.micro_batches import Fitting, MemoryExhausted, told_in
from tasks.engine.step.optimizer_step import Count, Loss, count_rows, scaled
from tasks.engine.step.phases import Phases

log = logging.getLogger(__name__)

MAX_LOG_PERPLEXITY = 700.0  # exp() of more is no float
EVAL_ROWS = 1024  # rows of one batch, where there is room: no gradients are kept there
# Batches summed up at a time: a small tensor kept of each lay between the freed large ones, so that
# none of these was used again and the heap of a CPU grew by all rows.
FOLDED = 8
TOP, TOP_OF = 5, 10  # how often the class is among the first 5, of more than 10 classes
EVAL_SHARE = 1 / 16  # of the room, for the inputs of one batch


def eval_rows(data: DataFacts, batch_size: int, *, room_bytes: float) -> int:
    """Rows of a batch of the evaluation, where training has batch_size and the device this room."""
    # A row of tokens has as many outputs as tokens: large enough. A loader has its own batches.
    if data.task == "tokens" or data.batch is not None:
        return batch_size
    row_bytes = max(1, data.bytes // (data.train_rows + data.val_rows + data.test_rows))
    return max(batch_size, int(min(EVAL_ROWS, EVAL_SHARE * room_bytes / row_bytes)))


@dataclass(frozen=True)
class Evaluator:
    """How outputs are judged. task: classification, multilabel, regression or tokens."""

    task: str
    loss: Loss
    autocast: Callable[[], AbstractContextManager[object]]
    micro: Fitting  # how many rows are read, and go through the model, at once
    phases: Phases
    forward: Callable[[nn.Module], Forward] = Plain
    count: Count = count_rows  # over what the loss of some rows is the mean
    metrics: Metrics = field(default_factory=dict)  # the user's own, the mean over the rows each
    # Of a regression: its numbers, (rows, targets) float64, in the units of its target; and mean
    # and median of the training rows there, which it is held against.
    to_units: Callable[[np.ndarray], np.ndarray] = np.asarray
    guess: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    cells: list[Cells] = field(default_factory=list)  # of the classification judged last; or none
    ranks: Ranks = Ranks()  # each judges its share, and all are told the same

    @property
    def told(self) -> Cells | None:
        """The cells of the evaluation that was last, of a classification."""
        return self.cells[0] if self.cells else None


@dataclass(frozen=True)
class _Sums:
    """Of one batch, on its device."""

    values: dict[str, Tensor]
    pairs: list[tuple[Tensor, Tensor]]  # outputs and targets that the figures are computed from


@torch.inference_mode()
def evaluate(
    model: nn.Module, batches: Batches, evaluator: Evaluator, *, part: str = "val"
) -> dict[str, float]:
    """val/loss over all rows, or over all that the loss counts, with the figures of the task:
    val/accuracy, val/balanced_accuracy, val/macro_f1 and, of more than TOP_OF classes,
    val/top5_accuracy for a classification; val/accuracy, val/f1, val/macro_f1 and
    val/average_precision for several labels; val/r2, val/mae and val/rmse for a regression;
    val/perplexity = exp(val/loss) for tokens. Waits for the device.

    Where a regression's target was scaled, val/loss is that of the scaled target (a mean squared
    error of 1 is as good as the mean), or of the user's own loss in the target's units, as the
    figures and the user's metrics are. part: what stands for val. The cells of a classification are
    left in evaluator.cells.

    Raises oom.MemoryExhausted.
    """
    model.eval()
    evaluator.ranks.same_buffers(model)
    while True:
        rows = min(evaluator.ranks.all_of(min(evaluator.micro.rows, len(batches))))
        try:
            with told_in("eval"):
                found = _evaluated(model, batches, evaluator, rows)
            return {k if k in UNLOGGED else f"{part}/{k}": v for k, v in found.items()}
        except MemoryExhausted as error:
            # Fewer rows that come from the host take less of the device.
            may_read_less = batches.residency in ("pinned", "host") and evaluator.ranks.is_alone
            if rows == 1 or not may_read_less:
                raise
            clear_frames(error)
        evaluator.micro.rows = -(-rows // 2)
        log.warning("short of memory in eval with %s rows read at once: going on with half", rows)


def _evaluated(
    model: nn.Module, batches: Batches, evaluator: Evaluator, rows_at_once: int
) -> dict[str, float]:
    found: list[dict[str, Tensor]] = []
    rows = 0
    kept = KeptRows(evaluator.task, len(batches))
    forward = evaluator.forward(model)
    for x, y in batches.in_order(rows_at_once):
        with evaluator.phases.counting_once("eval", (x, y)):
            batch = _summed_batch(forward, x, y, evaluator)
        values = batch.values
        if batches.weight:
            rows += nested.rows_of(y)
            for outputs, targets in batch.pairs:
                kept.add(outputs, targets)
        else:  # another rank's row, to keep the others company
            values = {name: torch.zeros_like(value) for name, value in values.items()}
        found.append(values)
        del x, y, batch  # gone before the next ones come
        if len(found) == FOLDED:
            found = [_added(found)]
    evaluator.phases.meter.phase("eval")
    sums = {name: total.item() for name, total in _added(found).items()}
    sums = evaluator.ranks.sums({**sums, "rows": rows})
    rows = int(sums["rows"])
    loss = sums["loss"] / sums["counted"] if sums["counted"] else math.nan
    own = {name: sums[f"own/{name}"] / rows for name in evaluator.metrics}
    return {"loss": loss, **_counted(evaluator.task, sums, loss), **_scored(evaluator, kept), **own}


def _counted(task: str, sums: dict[str, float], loss: float) -> dict[str, float]:
    """The figures that are sums over the rows."""
    if task == "tokens":
        return {"perplexity": math.exp(min(loss, MAX_LOG_PERPLEXITY))}
    if task == "regression":
        return {}
    found = {"accuracy": sums["hits"] / sums["answers"]}
    if "top5" in sums:
        found["top5_accuracy"] = sums["top5"] / sums["answers"]
    if task == "multilabel":
        told = 2 * sums["both"] + sums["either"]
        found["f1"] = 2 * sums["both"] / told if told else 1.0
    return found


def _scored(evaluator: Evaluator, kept: KeptRows) -> dict[str, float]:
    """The figures that need the rows; and whether all were given the same answer, of more than
    one."""
    found = _of_all(evaluator.ranks, kept.on_host())
    evaluator.cells.clear()
    if found is None:
        return {}
    outputs, targets = found
    if evaluator.task == "multilabel":
        return figures.of_labels(outputs.float().numpy(), targets.numpy())
    same = len(outputs) > 1 and bool((outputs == outputs[:1]).all())
    alike = {ALIKE: 1.0} if same else {}
    if evaluator.task == "classification":
        evaluator.cells.append(figures.Cells.of(outputs.numpy(), targets.numpy()))
        return figures.of_classes(evaluator.cells[0]) | alike
    given, so = (
        evaluator.to_units(part.double().numpy()).reshape(len(part), -1)
        for part in (outputs, targets)
    )
    return figures.of_amounts(given, so) | figures.of_guesses(given, so, evaluator.guess) | alike


def _of_all(ranks: Ranks, ours: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    """What all ranks kept, in no order of the rows."""
    if ranks.is_alone:
        return ours
    kept = [pair for pair in ranks.all_of(ours) if pair is not None]
    return (torch.cat([p[0] for p in kept]), torch.cat([p[1] for p in kept])) if kept else None


def _summed_batch(forward: Forward, x: Any, y: Any, evaluator: Evaluator) -> _Sums:
    return evaluator.micro.fit(partial(_in_parts, forward, evaluator), (x, y))


def _in_parts(forward: Forward, evaluator: Evaluator, x: Any, y: Any, rows: int) -> _Sums:
    parts = nested.split((x, y), rows, whole=nested.rows_of(y))
    found = []
    for part_x, part_y in parts:  # no comprehension, which is a closure: see oom.Fitting.fit
        found.append(_part(forward, part_x, part_y, evaluator))
    pairs = [pair for part in found for pair in part.pairs]
    return _Sums(_added([part.values for part in found]), pairs)


def _part(forward: Forward, x: Any, y: Any, evaluator: Evaluator) -> _Sums:
    rows, count = nested.rows_of(y), evaluator.count(x, y)
    copied = Tensor.clone if evaluator.micro.copies else _same
    with evaluator.autocast():
        outputs, loss = forward(x)
        if loss is None:
            loss = evaluator.loss(copied(outputs), nested.mapped(y, copied))
    values, pairs = {"loss": scaled(loss, count), "counted": torch.as_tensor(count)}, []
    if evaluator.task == "classification":
        told, classes = outputs.argmax(1), outputs.shape[1]
        values["hits"], values["answers"] = (told == y).sum(), torch.tensor(told.numel())
        if classes > TOP_OF:
            best = outputs.topk(TOP, 1).indices
            values["top5"] = (best == y.unsqueeze(1)).sum()
        pairs.append((small(told, classes), small(y, classes)))
    elif evaluator.task == "multilabel":
        is_told, is_so = outputs > 0, y > 0.5
        values["hits"], values["answers"] = (is_told == is_so).sum(), torch.tensor(y.numel())
        values["both"] = (is_told & is_so).sum()
        values["either"] = (is_told ^ is_so).sum()
        pairs.append((outputs, is_so))
    elif evaluator.task == "regression":
        pairs.append((outputs, y))
    for name, metric in evaluator.metrics.items():
        given = copied(outputs), nested.mapped(y, copied)
        values[f"own/{name}"] = torch.as_tensor(metric(*given)).float().reshape(()) * rows
    return _Sums(values, pairs)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _added(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    if len(parts) == 1:
        return parts[0]
    return {name: torch.stack([part[name] for part in parts]).sum() for name in parts[0]}
