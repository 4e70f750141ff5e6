"""Optimizers of torch.optim by the names of their classes, and optimizers and schedules of the
user's own by import paths. They are called as they are, never replayed from a graph nor forecast.
It refuses a setting that a class does not take, and a class whose steps need a closure.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tasks.engine.base import nested
from tasks.engine.base.field_types import is_import
from tasks.engine.base.import_paths import found, told_of
from tasks.engine.distributed.shards import placed
from tasks.engine.memory.memory_meter import is_oom
from tasks.engine.settings.read_settings import ConfigError
from tasks.engine.settings.run_config import FUSED, OptimConfig
from tasks.engine.step.micro_batches import Failure, MemoryExhausted, words
from tasks.engine.step.optim import Optimizer

PRESETS = OptimConfig()


class Given(Optimizer):
    """Another optimizer as the loop sees one. The rates of its groups keep their proportions."""

    # GradScaler then looks on the host whether a step is to be skipped.
    _step_supports_amp_scaling = False

    def __init__(
        self, inner: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], *, lr: float
    ) -> None:
        super().__init__(parameters, lr=lr, weight_decay=0.0)
        self._inner, self._peak = inner, lr
        self._rates = [group["lr"] for group in inner.param_groups]

    def set_lr(self, lr: float) -> None:
        super().set_lr(lr)
        for group, rate in zip(self._inner.param_groups, self._rates, strict=True):
            group["lr"] = rate * (lr / self._peak)

    def step(self) -> None:
        """Take a step whole or not at all, where memory runs out in it.

        Raises torch.OutOfMemoryError where all is as before it, and MemoryExhausted where a part of
        it is done and cannot be undone.
        """
        before = _Before(self._inner, self.params)
        failure = ""
        try:
            self._inner.step()
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            failure = words(error)
        if not failure:
            return
        if not before.restore():
            raise MemoryExhausted(
                Failure(
                    f"{failure} (a part of the step of {_name(self._inner)} was done)", "optimizer"
                )
            )
        raise torch.OutOfMemoryError(failure)

    def state_tensors(self) -> list[Tensor]:
        states = self._inner.state.values()
        return [kept for state in states for kept in state.values() if isinstance(kept, Tensor)]

    def state(self) -> Any:
        return self._inner.state_dict()

    def restore(self, state: Any) -> None:
        self._inner.load_state_dict(state)
        for p, kept in self._inner.state.items():
            kept |= {k: placed(v, p) for k, v in kept.items() if getattr(v, "shape", 0) == p.shape}


class _Before:
    """What an optimizer's step begins with, as far as it can be put back.

    Where its state is still to be made, which is when memory runs out, the weights are kept on the
    host beside a device. Later nothing is kept but how often each tensor was written to: a step
    that has written none can be taken again.
    """

    def __init__(self, inner: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
        self._inner, self._params = inner, params
        grads = [p.grad for p in params if p.grad is not None]
        self._grads = [(grad, grad._version) for grad in grads]
        kept = [tensor for state in inner.state.values() for tensor in nested.tensors(state)]
        self._written = [(t, t._version) for t in (*params, *kept)]
        self._state = {p: dict(state) for p, state in inner.state.items()}
        self._groups = [{k: v for k, v in g.items() if k != "params"} for g in inner.param_groups]
        is_first = not inner.state and params[0].device.type != "cpu"
        self._weights = [p.detach().cpu() for p in params] if is_first else None

    @torch.no_grad()
    def restore(self) -> bool:
        """Be as when this was made; whether that can be."""
        if _is_written(self._grads) or (self._weights is None and _is_written(self._written)):
            return False
        for p, weights in zip(self._params, self._weights or (), strict=False):
            p.copy_(weights)
        self._inner.state.clear()
        self._inner.state.update(self._state)
        for group, kept in zip(self._inner.param_groups, self._groups, strict=True):
            group.update(kept)
        return True


def _is_written(tensors: list[tuple[Tensor, int]]) -> bool:
    return any(tensor._version != version for tensor, version in tensors)


def _name(inner: torch.optim.Optimizer) -> str:
    return type(inner).__name__


def make(
    o: OptimConfig, parameters: Iterable[nn.Parameter], *, undecayed: Iterable[nn.Parameter] = ()
) -> Given:
    """The optimizer named by `optim.name`. Raises ConfigError."""
    own = is_import(o.name)
    factory: Callable[..., Any] = (
        found(o.name, setting="optim.name", refusal=ConfigError)
        if own
        else getattr(torch.optim, o.name, _absent)
    )
    params = [p for p in parameters if p.requires_grad]
    given = _arguments(factory, o)
    free = set(map(id, undecayed)) if "weight_decay" in given else set()
    groups: list[dict[str, Any]] = [{"params": [p for p in params if id(p) not in free]}]
    if free:
        groups.append({"params": [p for p in params if id(p) in free], "weight_decay": 0.0})
    told = ""
    try:
        inner = factory([group for group in groups if group["params"]], **given)
    except Exception as error:
        if is_oom(error):
            raise
        told = told_of(error)
    if told:
        raise ConfigError(f"optim.name: {o.name} raised: {told}; choose another, or mend it")
    _refuse_unusable(inner, o.name)
    return Given(inner, params, lr=o.lr)


def check(o: OptimConfig, *, steps: int) -> None:
    """Try the optimizer on a small matrix and a bias, and the schedule at its ends. Raises
    ConfigError."""
    if o.name not in FUSED:
        weights = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
        make(o, weights, undecayed=weights[1:])
    if is_import(o.schedule):
        rate = schedule(o, steps=steps)
        for step in (0, steps - 1):
            rate(step)


def schedule(o: OptimConfig, *, steps: int) -> Callable[[int], float]:
    """The learning rate of each step by the function at `optim.schedule`. Raises ConfigError, also
    when it is asked."""
    share = found(o.schedule, setting="optim.schedule", refusal=ConfigError)

    def at(step: int) -> float:
        try:
            rate = o.lr * float(share(step, steps))
            told = f"gave {rate / o.lr}"
        except Exception as error:
            rate, told = math.nan, f"raised: {told_of(error)}"
        if not 0 <= rate < math.inf:
            raise ConfigError(
                f"optim.schedule: {o.schedule} at step {step} of {steps} {told}; give the share of "
                "optim.lr, a number from 0 on"
            )
        return rate

    return at


def _absent(*_: Any, **__: Any) -> Any:
    raise AttributeError(f"torch {torch.__version__} has no such optimizer")


def _arguments(factory: Callable[..., Any], o: OptimConfig) -> dict[str, Any]:
    """What it has parameters for. Raises ConfigError for a setting that is not the preset and that
    it has none for."""
    takes = inspect.signature(factory).parameters
    offered = {
        "lr": (o.lr, ()),
        "weight_decay": (o.weight_decay, ("weight_decay",)),
        "momentum": (o.momentum, ("momentum",)),
        "betas": ((o.momentum, o.beta2), ("momentum", "beta2")),
    }
    heard = {s for name, (_, settings) in offered.items() if name in takes for s in settings}
    for setting in ("weight_decay", "momentum", "beta2"):
        got = getattr(o, setting)
        if setting not in heard and got != getattr(PRESETS, setting):
            raise ConfigError(f"optim.{setting}: {o.name} takes none (got {got:g}); drop it")
    return {name: value for name, (value, _) in offered.items() if name in takes}


def _refuse_unusable(inner: Any, name: str) -> None:
    if not isinstance(inner, torch.optim.Optimizer):
        got = type(inner).__name__
        raise ConfigError(f"optim.name: {name} must give a torch.optim.Optimizer (got a {got})")
    closure = inspect.signature(inner.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"optim.name: the steps of {name} need a closure that computes the loss anew, and "
            "batches here are seen once; choose another"
        )
