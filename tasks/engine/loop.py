"""The training paragraph: batch, forward, loss, backward, step, log. It is handed everything ready
(model, batches, optimizer, clocks) and has one seam out, `log(metrics, step)`; it waits for the
device at log points only, and stops where the loss is no longer a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tasks.engine.batches import Batches, row_order
from tasks.engine.memory import Meter
from tasks.engine.optim import Optimizer
from tasks.engine.timing import PhaseClock, Stopwatch

Log = Callable[[dict[str, float], int], None]
EVAL_ROWS = 1024  # rows of one evaluation batch at least; no gradients are kept there


class Diverged(RuntimeError):
    """The loss became NaN or infinite; the text says where, and the last good values."""


@dataclass(frozen=True)
class Plan:
    """How long and how to train. batch_size in rows of one optimizer step."""

    epochs: int
    batch_size: int
    accumulate: int
    log_every: int
    patience: int
    seed: int
    clip_norm: float | None
    task: str  # classification or regression

    def total_steps(self, rows: int) -> int:
        return self.epochs * math.ceil(rows / self.batch_size)


@dataclass(frozen=True)
class Tools:
    """What the loop works with, each a null object where an option is off."""

    loss: Callable[[Tensor, Tensor], Tensor]  # mean over the rows
    optimizer: Optimizer
    rate: Callable[[int], float]
    scaler: torch.amp.GradScaler
    autocast: Callable[[], AbstractContextManager[object]]
    clock: PhaseClock
    meter: Meter
    watch: Stopwatch
    wait: Callable[[], None]  # for the device
    log: Log


@dataclass(frozen=True)
class Fitted:
    steps: int
    epochs: int
    stopped_early: bool
    metrics: dict[str, float]  # the last values, or those of the best epoch where it was kept


def fit(model: nn.Module, train: Batches, val: Batches, *, plan: Plan, tools: Tools) -> Fitted:
    """Train `model` in place and return the validation metrics reached.

    Raises Diverged for a loss that is not finite, at the latest `plan.log_every` steps after it.
    """
    t, watch = tools, tools.watch
    window = _Window(plan=plan, tools=tools)
    best = _Best(plan.patience)
    metrics: dict[str, float] = {}
    step = epoch = 0
    last_step = plan.total_steps(len(train))
    watch.lap("setup")
    for epoch in range(plan.epochs):  # noqa: B007 (its last value is a result)
        model.train()
        order = row_order(len(train), seed=plan.seed, epoch=epoch)
        window.begin(step)
        for inputs, targets in train.shuffled(plan.batch_size, order, window.mark):
            t.optimizer.lr = t.rate(step)
            t.optimizer.zero_grad()
            losses = []
            for x, y in _micro_batches(inputs, targets, plan.accumulate):
                with t.autocast():
                    loss = t.loss(model(x), y)
                if len(x) < len(inputs):
                    loss = loss * (len(x) / len(inputs))
                window.mark("forward")
                t.scaler.scale(loss).backward()
                window.mark("backward")
                losses.append(loss.detach())
            norm = window.grad_norm()
            t.scaler.step(t.optimizer)  # type: ignore[arg-type] # fused, see optim.py
            t.scaler.update()
            window.mark("optimizer")
            step += 1
            window.add(losses, rows=len(inputs))
            if step == 1:
                t.wait()
                t.clock.reset()
                watch.lap("first_step")
            if step % plan.log_every == 0 or step == last_step:
                watch.lap("steps")
                t.log(window.close(step, epoch, norm), step)
                watch.lap("log")
            window.begin(step)
        watch.lap("steps")
        window.check(step, epoch)
        metrics = evaluate(model, val, plan=plan, tools=tools)
        watch.lap("eval")
        t.log({**metrics, "train/epoch": epoch + 1.0}, step)
        watch.lap("log")
        if best.is_enough(metrics, model):
            break
    stopped_early = epoch + 1 < plan.epochs
    return Fitted(step, epoch + 1, stopped_early, best.restored(model, metrics))


@torch.inference_mode()
def evaluate(model: nn.Module, batches: Batches, *, plan: Plan, tools: Tools) -> dict[str, float]:
    """val/loss, with val/accuracy, or val/r2 and val/mae, over all rows; waits for the device."""
    model.eval()
    losses: list[Tensor] = []
    hits: list[Tensor] = []
    pairs: list[tuple[Tensor, Tensor]] = []
    for x, y in batches.in_order(max(plan.batch_size, EVAL_ROWS)):
        with tools.autocast():
            predicted = model(x)
            losses.append(tools.loss(predicted, y) * len(x))
        if plan.task == "classification":
            hits.append((predicted.argmax(1) == y).sum())
        else:
            pairs.append((predicted, y))
    tools.meter.phase("eval")
    loss = torch.stack(losses).sum().item() / len(batches)
    if plan.task == "classification":
        return {"val/loss": loss, "val/accuracy": torch.stack(hits).sum().item() / len(batches)}
    predicted, target = (torch.cat(part).cpu().double() for part in zip(*pairs, strict=True))
    error = predicted - target
    spread = (target - target.mean(0)).square().sum()
    return {
        "val/loss": loss,
        "val/r2": (1 - error.square().sum() / spread).item() if spread > 0 else math.nan,
        "val/mae": error.abs().mean().item(),
    }


def _micro_batches(x: Tensor, y: Tensor, parts: int) -> list[tuple[Tensor, Tensor]]:
    if parts == 1:
        return [(x, y)]
    rows = math.ceil(len(x) / parts)
    return list(zip(x.split(rows), y.split(rows), strict=True))


class _Window:
    """The steps since the last log point: their losses stay on the device until it is reached."""

    def __init__(self, *, plan: Plan, tools: Tools) -> None:
        self._plan, self._tools = plan, tools
        self._losses: list[Tensor] = []
        self._rows = 0
        self._steps_s = 0.0  # of the run, at the last log point
        self._last_good: tuple[int, float] | None = None
        self._sampling = False

    def begin(self, step: int) -> None:
        # The step before a log point is sampled: its events are read when the host waits anyway.
        self._sampling = (step + 1) % self._plan.log_every == 0 and step > 0
        self._tools.clock.begin(sample=self._sampling)
        if self._sampling:
            self._tools.meter.phase("between")

    def mark(self, phase: str) -> None:
        self._tools.clock.mark(phase)
        if self._sampling:
            self._tools.meter.phase(phase)

    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients, clipped where asked; otherwise on sampled steps only."""
        if self._plan.clip_norm is None and not self._sampling:
            return None
        self._tools.scaler.unscale_(self._tools.optimizer)  # type: ignore[arg-type]
        params = self._tools.optimizer.params
        if self._plan.clip_norm is None:
            return nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        return nn.utils.clip_grad_norm_(params, self._plan.clip_norm)

    def add(self, parts: list[Tensor], *, rows: int) -> None:
        self._losses.append(parts[0] if len(parts) == 1 else torch.stack(parts).sum())
        self._rows += rows

    def check(self, step: int, epoch: int) -> list[float]:
        """The losses of the window. The one wait for the device between two log points."""
        losses = torch.stack(self._losses).tolist() if self._losses else []
        for i, loss in enumerate(losses, start=step - len(losses) + 1):
            if not math.isfinite(loss):
                raise Diverged(self._diverged(i, loss, epoch))
            self._last_good = (i, loss)
        return losses

    def close(self, step: int, epoch: int, norm: Tensor | None) -> dict[str, float]:
        losses = self.check(step, epoch)
        self._tools.clock.collect()
        spent = self._tools.watch.seconds
        steps_s = spent["first_step"] + spent["steps"]
        wall_s = max(steps_s - self._steps_s, 1e-9)
        metrics = {
            "train/loss": sum(losses) / len(losses),
            "train/lr": self._tools.optimizer.lr,
            "speed/samples_per_s": self._rows / wall_s,
            "speed/steps_per_s": len(losses) / wall_s,
            **self._tools.meter.window(),
        }
        if norm is not None:
            metrics["train/grad_norm"] = norm.item()
        self._losses, self._rows, self._steps_s = [], 0, steps_s
        return metrics

    def _diverged(self, step: int, loss: float, epoch: int) -> str:
        good = "no step was good"
        if self._last_good is not None:
            good = f"the last good loss was {self._last_good[1]:.6g} at step {self._last_good[0]}"
        return (
            f"train.loss: became {loss} at step {step} (epoch {epoch + 1}, "
            f"optim.lr then {self._tools.rate(step - 1):.3g}); {good}. "
            "Lower optim.lr, set optim.clip_norm, or use train.precision fp32"
        )


class _Best:
    """Keeps the weights of the best epoch, and says when to stop. patience 0: never, keeps none."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._waited = 0
        self._metrics = {"val/loss": math.inf}
        self._weights: dict[str, Tensor] = {}

    def is_enough(self, metrics: dict[str, float], model: nn.Module) -> bool:
        if not self._patience:
            return False
        if metrics["val/loss"] < self._metrics["val/loss"]:
            self._metrics, self._waited = metrics, 0
            self._weights = {k: v.detach().cpu().clone() for k, v in model.state_dict().items()}
        else:
            self._waited += 1
        return self._waited >= self._patience

    def restored(self, model: nn.Module, metrics: dict[str, float]) -> dict[str, float]:
        if not self._weights:
            return metrics
        model.load_state_dict(self._weights)
        return self._metrics
