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

import torch
from torch import Tensor, nn

from tasks.engine.base import nested
from tasks.engine.base.facts import DataFacts
from tasks.engine.batches.batches import Batches
from tasks.engine.data.run_warnings import ALIKE
from tasks.engine.memory.memory_meter import clear_frames
from tasks.engine.models.model_call import Forward, Plain
from tasks.engine.step.losses import Metrics
from tasks.engine.step.micro_batches import Fitting, MemoryExhausted, told_in
from tasks.engine.step.optimizer_step import Loss
from tasks.engine.step.phases import Phases

log = logging.getLogger(__name__)

MAX_LOG_PERPLEXITY = 700.0  # exp() of more is no float
EVAL_ROWS = 1024  # rows of one batch, where there is room: no gradients are kept there
# Batches summed up at a time: a small tensor kept of each lay between the freed large ones, so that
# none of these was used again and the heap of a CPU grew by all rows.
FOLDED = 8
EVAL_SHARE = 1 / 16  # of the room, for the inputs of one batch


def eval_rows(data: DataFacts, batch_size: int, *, room_bytes: float) -> int:
    """Rows of a batch of the evaluation, where training has batch_size and the device this room."""
    # A row of tokens has as many outputs as tokens: large enough. A loader has its own batches.
    if data.task == "tokens" or data.batch is not None:
        return batch_size
    row_bytes = max(1, data.bytes // (data.train_rows + data.val_rows))
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
    metrics: Metrics = field(default_factory=dict)  # the user's own, the mean over the rows each
    target_scale: tuple[float, ...] = (1.0,)  # a regression's error in the target's units, over it


@dataclass(frozen=True)
class _Sums:
    """Of one batch, on its device."""

    values: dict[str, Tensor]
    pairs: list[tuple[Tensor, Tensor]]  # outputs and targets, for a regression


@torch.inference_mode()
def evaluate(model: nn.Module, batches: Batches, evaluator: Evaluator) -> dict[str, float]:
    """val/loss over all rows, with val/accuracy for a classification, also val/f1 for several
    labels, val/r2 and val/mae for a regression, val/perplexity = exp(val/loss) for tokens; waits
    for the device.

    Where a regression's target was scaled, val/loss is that of the scaled target (a mean squared
    error of 1 is as good as the mean), or of the user's own loss in the target's units, as val/r2,
    val/mae and the user's metrics are.

    Raises oom.MemoryExhausted.
    """
    model.eval()
    while True:
        rows = min(evaluator.micro.rows, len(batches))
        try:
            with told_in("eval"):
                return _evaluated(model, batches, evaluator, rows)
        except MemoryExhausted as error:
            # Fewer rows that come from the host take less of the device.
            if rows == 1 or batches.residency not in ("pinned", "host"):
                raise
            clear_frames(error)
        evaluator.micro.rows = -(-rows // 2)
        log.warning("short of memory in eval with %s rows read at once: going on with half", rows)


def _evaluated(
    model: nn.Module, batches: Batches, evaluator: Evaluator, rows_at_once: int
) -> dict[str, float]:
    found: list[_Sums] = []
    forward = evaluator.forward(model)
    for x, y in batches.in_order(rows_at_once):
        with evaluator.phases.counting_once("eval", (x, y)):
            found.append(_summed_batch(forward, x, y, evaluator))
        del x, y  # gone before the next ones come
        if len(found) == FOLDED:
            found = [_summed(found)]
    evaluator.phases.meter.phase("eval")
    rows = len(batches)
    whole = _summed(found)
    sums = {name: total.item() for name, total in whole.values.items()}
    loss = sums["loss"] / rows
    own = {f"val/{name}": sums[f"own/{name}"] / rows for name in evaluator.metrics}
    figures = {"val/loss": loss, **_figures(evaluator, sums, rows, loss, whole.pairs), **own}
    return figures | ({ALIKE: 1.0} if _are_alike(sums, whole.pairs) else {})


def _are_alike(sums: dict[str, float], pairs: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether every row was given the same answer, of more than one."""
    if pairs:
        first, count = pairs[0][0][:1], sum(len(outputs) for outputs, _ in pairs)
        return count > 1 and all(bool((outputs == first).all()) for outputs, _ in pairs)
    told = sums.get("told", 0)  # of whole numbers, whose sums are exact: no variance
    return told > 1 and told * sums["told_squares"] == sums["told_sum"] ** 2


def _figures(
    evaluator: Evaluator,
    sums: dict[str, float],
    rows: int,
    loss: float,
    pairs: list[tuple[Tensor, Tensor]],
) -> dict[str, float]:
    task = evaluator.task
    if task == "classification":
        return {"val/accuracy": sums["hits"] / rows}
    if task == "multilabel":
        told = 2 * sums["both"] + sums["either"]
        return {
            "val/accuracy": sums["hits"] / sums["labels"],
            "val/f1": 2 * sums["both"] / told if told else 1.0,
        }
    if task == "tokens":
        return {"val/perplexity": math.exp(min(loss, MAX_LOG_PERPLEXITY))}
    return _errors(pairs, torch.tensor(evaluator.target_scale, dtype=torch.float64))


def _summed_batch(forward: Forward, x: Any, y: Any, evaluator: Evaluator) -> _Sums:
    return evaluator.micro.fit(partial(_in_parts, forward, evaluator), (x, y))


def _in_parts(forward: Forward, evaluator: Evaluator, x: Any, y: Any, rows: int) -> _Sums:
    parts = nested.split((x, y), rows, whole=nested.rows_of(y))
    found = []
    for part_x, part_y in parts:  # no comprehension, which is a closure: see oom.Fitting.fit
        found.append(_part(forward, part_x, part_y, evaluator))
    return _summed(found)


def _part(forward: Forward, x: Any, y: Any, evaluator: Evaluator) -> _Sums:
    rows = nested.rows_of(y)
    with evaluator.autocast():
        outputs, loss = forward(x)
        loss = (evaluator.loss(outputs, y) if loss is None else loss) * rows
    values = {"loss": loss}
    if evaluator.task == "classification":
        told = outputs.argmax(1)
        values["hits"] = (told == y).sum()
        values["told"] = torch.tensor(told.numel())
        values["told_sum"], values["told_squares"] = told.sum(), told.square().sum()
    elif evaluator.task == "multilabel":
        is_told, is_so = outputs > 0, y > 0.5
        values["hits"] = (is_told == is_so).sum()
        values["both"] = (is_told & is_so).sum()
        values["either"] = (is_told ^ is_so).sum()
        values["labels"] = torch.tensor(y.numel())
    for name, metric in evaluator.metrics.items():
        values[f"own/{name}"] = torch.as_tensor(metric(outputs, y)).float().reshape(()) * rows
    return _Sums(values, [(outputs, y)] if evaluator.task == "regression" else [])


def _summed(parts: list[_Sums]) -> _Sums:
    if len(parts) == 1:
        return parts[0]
    return _Sums(
        values={n: torch.stack([part.values[n] for part in parts]).sum() for n in parts[0].values},
        pairs=[pair for part in parts for pair in part.pairs],
    )


def _errors(pairs: list[tuple[Tensor, Tensor]], scale: Tensor) -> dict[str, float]:
    # The offset is in no difference.
    outputs, targets = (torch.cat(part).cpu() * scale for part in zip(*pairs, strict=True))
    error = outputs - targets
    spread = (targets - targets.mean(0)).square().sum()
    # Of a target that never changes r2 is not known.
    r2 = {"val/r2": (1 - error.square().sum() / spread).item()} if spread > 0 else {}
    return {**r2, "val/mae": error.abs().mean().item()}
