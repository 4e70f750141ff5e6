"""How good the model is on rows it was not trained on: loss over all rows, and the figures of the
task. Batches that do not fit in memory are judged in smaller parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from tasks.engine.batches import Batches
from tasks.engine.facts import DataFacts
from tasks.engine.oom import Fitting
from tasks.engine.phases import Phases
from tasks.engine.step import Loss

MAX_LOG_PERPLEXITY = 700.0  # exp() of more is no float
EVAL_ROWS = 1024  # rows of one batch, where there is room: no gradients are kept there
EVAL_SHARE = 1 / 16  # of the room, for the inputs of one batch


def eval_rows(data: DataFacts, batch_size: int, *, room_bytes: float) -> int:
    """Rows of a batch of the evaluation, where training has batch_size and the device this room."""
    if data.task == "tokens":  # a row has as many outputs as tokens: its batch is large enough
        return batch_size
    row_bytes = max(1, data.bytes // (data.train_rows + data.val_rows))
    return max(batch_size, int(min(EVAL_ROWS, EVAL_SHARE * room_bytes / row_bytes)))


@dataclass(frozen=True)
class Judge:
    """How outputs are judged. task: classification, regression or tokens."""

    task: str
    loss: Loss
    autocast: Callable[[], AbstractContextManager[object]]
    rows: int  # of a batch
    micro: Fitting
    phases: Phases


@dataclass(frozen=True)
class _Sums:
    """Of one batch, on its device."""

    loss: Tensor
    hits: Tensor | None
    pairs: list[tuple[Tensor, Tensor]]  # outputs and targets, for a regression


@torch.inference_mode()
def evaluate(model: nn.Module, batches: Batches, judge: Judge) -> dict[str, float]:
    """val/loss over all rows, with val/accuracy for a classification, val/r2 and val/mae for a
    regression, val/perplexity = exp(val/loss) for tokens; waits for the device.

    Raises oom.MemoryExhausted.
    """
    model.eval()
    found: list[_Sums] = []
    for x, y in batches.in_order(judge.rows):
        with judge.phases.counting_once("eval", (x, y)):
            found.append(_judged(model, x, y, judge))
    judge.phases.meter.phase("eval")
    rows = len(batches)
    loss = torch.stack([one.loss for one in found]).sum().item() / rows
    if judge.task == "classification":
        hits = torch.stack([one.hits for one in found if one.hits is not None])
        return {"val/loss": loss, "val/accuracy": hits.sum().item() / rows}
    if judge.task == "tokens":
        return {"val/loss": loss, "val/perplexity": math.exp(min(loss, MAX_LOG_PERPLEXITY))}
    return {"val/loss": loss, **_errors([pair for one in found for pair in one.pairs])}


def _judged(model: nn.Module, x: Tensor, y: Tensor, judge: Judge) -> _Sums:
    return judge.micro.fit(partial(_in_parts, model, judge), (x, y))


def _in_parts(model: nn.Module, judge: Judge, x: Tensor, y: Tensor, rows: int) -> _Sums:
    parts = zip(x.split(rows), y.split(rows), strict=True)
    return _summed([_part(model, *part, judge) for part in parts])


def _part(model: nn.Module, x: Tensor, y: Tensor, judge: Judge) -> _Sums:
    with judge.autocast():
        outputs = model(x)
        loss = judge.loss(outputs, y) * len(y)
    hits = (outputs.argmax(1) == y).sum() if judge.task == "classification" else None
    return _Sums(loss, hits, [(outputs, y)] if judge.task == "regression" else [])


def _summed(parts: list[_Sums]) -> _Sums:
    if len(parts) == 1:
        return parts[0]
    hits = [part.hits for part in parts if part.hits is not None]
    return _Sums(
        loss=torch.stack([part.loss for part in parts]).sum(),
        hits=torch.stack(hits).sum() if hits else None,
        pairs=[pair for part in parts for pair in part.pairs],
    )


def _errors(pairs: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    outputs, targets = (torch.cat(part).cpu().double() for part in zip(*pairs, strict=True))
    error = outputs - targets
    spread = (targets - targets.mean(0)).square().sum()
    return {
        "val/r2": (1 - error.square().sum() / spread).item() if spread > 0 else math.nan,
        "val/mae": error.abs().mean().item(),
    }
