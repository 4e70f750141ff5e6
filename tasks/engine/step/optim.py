"""Optimizers and the learning rate of every step. AdamW and SGD call PyTorch's fused kernels,
those of torch.optim with fused=True, directly, since the first step of a torch.optim optimizer
imports the compiler, which costs about two seconds at every start. Other classes of
torch.optim, and optimizers and schedules of the user's own, are called as they are, never
replayed from a graph nor forecast. It refuses a setting that a class does not take, and a
class whose steps need a closure.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tasks.engine.base import nested
from tasks.engine.base.import_paths import describe_error, import_callable, is_import_path
from tasks.engine.base.nested import get_local_part, shard_like
from tasks.engine.memory.out_of_memory import is_oom
from tasks.engine.settings.read_settings import ConfigError
from tasks.engine.settings.run_config import FUSED, OptimConfig
from tasks.engine.step.micro_batches import MemoryExhausted, MemoryFailure, extract_message


class Optimizer:
    """Holds parameters, their gradients and their state; keeps GradScaler's contract for fused
    optimizers."""

    # GradScaler then sets .grad_scale and .found_inf before step() and deletes them after it, so
    # that a step with infinite gradients is skipped by the kernel, without a wait of the host.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        undecayed: Iterable[nn.Parameter] = (),
    ) -> None:
        """undecayed: those of the parameters that have no weight decay."""
        self.params = [p for p in parameters if p.requires_grad]
        self.param_groups = [{"params": self.params}]
        self.lr: float | Tensor = lr
        free = set(map(id, undecayed))
        self.decays = [0.0 if id(p) in free else weight_decay for p in self.params]
        self._is_plain = all(get_local_part(p) is p and not p.is_complex() for p in self.params)
        self._applied = 0  # calls of the kernel that a step made before one of them failed
        # What these calls are given, once the state is made: see _calls.
        self._groups: list[tuple[float, list[nn.Parameter], list[list[Tensor]]]] | None = None

    def set_lr(self, lr: float) -> None:
        """Set the rate of the next steps; in place where steps are replayed, which read a
        tensor."""
        if isinstance(self.lr, Tensor):
            self.lr.fill_(lr)
        else:
            self.lr = lr

    def forget_scale(self) -> None:
        """Drop what a GradScaler has set for one step."""
        self.__dict__.pop("grad_scale", None)
        self.__dict__.pop("found_inf", None)

    def zero_grad(self) -> None:
        """Drop the gradients before a new step."""
        self._applied = 0
        for p in self.params:
            p.grad = None

    def step(self) -> None:
        raise NotImplementedError

    def list_state_tensors(self) -> list[Tensor]:
        raise NotImplementedError

    def state(self) -> Any:
        """Return what the next step depends on beside parameters and rate; empty before the
        first step."""
        raise NotImplementedError

    def restore(self, state: Any) -> None:
        """Go back to where `state` was taken."""
        raise NotImplementedError

    def _list_local(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return what the kernels work on: each element by itself, so that a rank's own part will
        do, and of a complex number the real and the imaginary part, as torch.optim does."""
        if self._is_plain:
            return tensors
        parts = [get_local_part(tensor) for tensor in tensors]
        return [torch.view_as_real(p.resolve_conj()) if p.is_complex() else p for p in parts]

    def _find_with_grads(self) -> list[int]:
        return [i for i, p in enumerate(self.params) if p.grad is not None]

    def _list_calls(
        self, which: list[int], *state: list[Tensor]
    ) -> list[tuple[float, list[list[Tensor]]]]:
        """Return the calls of the kernel that a step on these parameters takes, one for each weight
        decay: the decay, and the lists of parameters, gradients and of each `state`.

        Where a call runs out of memory, the step is tried again: it begins at that call. The lists
        are those of the step before where every parameter has a gradient again, as nearly always.
        """
        is_whole = len(which) == len(self.params)
        groups = self._groups if is_whole else None
        if groups is not None and not self._applied:
            made: list[Any] = [
                (decay, [local, [p.grad for p in parameters], *others])
                for decay, parameters, (local, *others) in groups
            ]
            return made
        if groups is None:
            groups = []
            for decay in sorted({self.decays[i] for i in which}):
                part = [i for i in which if self.decays[i] == decay]
                kept: list[Sequence[Tensor]] = [self.params, *state]
                lists = [self._list_local([tensors[i] for i in part]) for tensors in kept]
                groups.append((decay, [self.params[i] for i in part], lists))
            if self._is_plain and is_whole:
                self._groups = groups
        calls = []
        for decay, parameters, (local, *others) in groups[self._applied :]:
            gradients: list[Any] = [p.grad for p in parameters]
            calls.append((decay, [local, self._list_local(gradients), *others]))
        return calls


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101)."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        beta1: float,
        beta2: float,
        eps: float = 1e-8,
        undecayed: Iterable[nn.Parameter] = (),
    ) -> None:
        super().__init__(parameters, lr=lr, weight_decay=weight_decay, undecayed=undecayed)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.means: list[Tensor] = []
        self.squares: list[Tensor] = []
        self.steps: list[Tensor] = []

    @torch.no_grad()
    def step(self) -> None:
        if not self.means:
            # Made at the first step, when the activations are gone: the peak is lower by as much.
            means = [torch.zeros_like(p) for p in self.params]
            squares = [torch.zeros_like(p) for p in self.params]
            # Counted once for all of them, while each gets a gradient in each step.
            count = torch.zeros((), dtype=torch.float32, device=self.params[0].device)
            self.steps = [count] * len(self.params)
            # All or nothing: where memory runs out in between, the step can be tried again.
            self.means, self.squares, self._groups = means, squares, None
        which = self._find_with_grads()
        is_one = self.steps[0] is self.steps[-1]  # count for all of them, else each has its own
        if is_one and len(which) < len(self.params):
            self.steps, self._groups = [count.clone() for count in self.steps], None
            is_one = False
        counts = self.steps[:1] if is_one else [self.steps[i] for i in which]
        # A step that is skipped for infinite gradients does not count.
        found_inf = getattr(self, "found_inf", None)
        taken = [1.0 if found_inf is None else 1.0 - found_inf] * len(counts)
        if is_one:  # a third of the time, which a small step feels
            counts[0].add_(taken[0])
        else:
            torch._foreach_add_(counts, taken)
        try:
            for weight_decay, lists in self._list_calls(
                which, self.means, self.squares, self.steps
            ):
                params, gradients, means, squares, steps = lists
                torch._fused_adamw_(
                    params,
                    gradients,
                    means,
                    squares,
                    [],
                    steps,
                    lr=self.lr,
                    beta1=self.beta1,
                    beta2=self.beta2,
                    weight_decay=weight_decay,
                    eps=self.eps,
                    amsgrad=False,
                    maximize=False,
                    grad_scale=getattr(self, "grad_scale", None),
                    found_inf=found_inf,
                )
                self._applied += 1
            self._applied = 0
        except RuntimeError:
            # Where memory runs out it is tried again: even the loading of a kernel takes some.
            torch._foreach_sub_(counts, taken)
            raise

    def list_state_tensors(self) -> list[Tensor]:
        return [*self.means, *self.squares, *{id(count): count for count in self.steps}.values()]

    def state(self) -> Any:
        # One count for all parameters stays one.
        shared = len({id(count) for count in self.steps}) == 1
        steps = self.steps[:1] if shared else self.steps
        return {"means": list(self.means), "squares": list(self.squares), "steps": list(steps)}

    def restore(self, state: Any) -> None:
        self.means = _lay_out_like(self.params, state["means"])
        self.squares = _lay_out_like(self.params, state["squares"])
        counts = [count.to(self.params[0].device) for count in state["steps"]]
        self.steps = counts * len(self.params) if len(counts) == 1 else counts
        self._groups = None


class Sgd(Optimizer):
    """SGD with Nesterov momentum and L2 weight decay, as torch.optim.SGD(nesterov=True)."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        undecayed: Iterable[nn.Parameter] = (),
    ) -> None:
        super().__init__(parameters, lr=lr, weight_decay=weight_decay, undecayed=undecayed)
        self.momentum = momentum
        self.momenta: list[Tensor] = []

    @torch.no_grad()
    def step(self) -> None:
        if self.momentum and not self.momenta:
            # From zeros the first step gives momentum * 0 + gradient: what torch.optim starts with.
            self.momenta, self._groups = [torch.zeros_like(p) for p in self.params], None
        which, state = self._find_with_grads(), [self.momenta] if self.momentum else []
        for weight_decay, lists in self._list_calls(which, *state):
            params, gradients, *momenta = lists
            torch._fused_sgd_(
                params,
                gradients,
                momenta[0] if momenta else [],
                weight_decay=weight_decay,
                momentum=self.momentum,
                lr=self.lr,
                dampening=0.0,
                nesterov=self.momentum > 0,
                maximize=False,
                is_first_step=False,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
            )
            self._applied += 1
        self._applied = 0

    def list_state_tensors(self) -> list[Tensor]:
        return list(self.momenta)

    def state(self) -> Any:
        return {"momenta": list(self.momenta)}

    def restore(self, state: Any) -> None:
        self.momenta, self._groups = _lay_out_like(self.params, state["momenta"]), None


def _lay_out_like(parameters: list[nn.Parameter], kept: list[Tensor]) -> list[Tensor]:
    """Return the same numbers in tensors laid out as the parameters are; none where none were
    kept."""
    if not kept:
        return []
    return [
        torch.empty_like(p, requires_grad=False).copy_(shard_like(tensor, p))
        for p, tensor in zip(parameters, kept, strict=True)
    ]


def make_fused_optimizer(
    name: str,
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
    beta2: float,
    undecayed: Iterable[nn.Parameter] = (),
) -> Optimizer:
    """Return the optimizer called `adamw` or `sgd`."""
    if name == "sgd":
        return Sgd(
            parameters, lr=lr, weight_decay=weight_decay, momentum=momentum, undecayed=undecayed
        )
    return AdamW(
        parameters,
        lr=lr,
        weight_decay=weight_decay,
        beta1=momentum,
        beta2=beta2,
        undecayed=undecayed,
    )


def list_undecayed(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters without weight decay: norms, biases and embeddings, of which small
    values are no simpler model."""
    whole = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)
    kept = [
        p for module in model.modules() if isinstance(module, whole) for p in module.parameters()
    ]
    return kept + [p for p in model.parameters() if p.dim() < 2]


def make_schedule(
    name: str,
    *,
    lr: float,
    total_steps: int,
    warmup_fraction: float,
    min_fraction: float = 0.0,
) -> Callable[[int], float]:
    """Return the function that gives the learning rate of step 0, 1, ..., total_steps - 1.

    It rises linearly to `lr` over the warm-up, then stays, or falls to `min_fraction` of it
    along half a cosine (SGDR, Loshchilov & Hutter 2017, arXiv:1608.03983, one period, no
    restart).
    """
    warmup = round(warmup_fraction * total_steps)

    def at(step: int) -> float:
        if step < warmup:
            return lr * (step + 1) / warmup
        if name == "constant":
            return lr
        done = (step - warmup) / max(1, total_steps - warmup)
        return lr * (min_fraction + (1 - min_fraction) * 0.5 * (1 + math.cos(math.pi * done)))

    return at


PRESETS = OptimConfig()


class TorchOptimizer(Optimizer):
    """Wraps an optimizer of torch.optim for the training loop. The rates of its groups keep
    their proportions."""

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
        before = _StepBackup(self._inner, self.params)
        failure = ""
        try:
            self._inner.step()
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            failure = extract_message(error)
        if not failure:
            return
        if not before.restore():
            raise MemoryExhausted(
                MemoryFailure(
                    f"{failure} (a part of the step of {_get_class_name(self._inner)} was done)",
                    "optimizer",
                )
            )
        raise torch.OutOfMemoryError(failure)

    def list_state_tensors(self) -> list[Tensor]:
        states = self._inner.state.values()
        return [kept for state in states for kept in state.values() if isinstance(kept, Tensor)]

    def state(self) -> Any:
        return self._inner.state_dict()

    def restore(self, state: Any) -> None:
        self._inner.load_state_dict(state)
        for p, kept in self._inner.state.items():
            kept |= {
                k: shard_like(v, p) for k, v in kept.items() if getattr(v, "shape", 0) == p.shape
            }


class _StepBackup:
    """What an optimizer's step begins with, as far as it can be put back.

    Where its state is still to be made, which is when memory runs out, the weights are kept on the
    host beside a device. Later nothing is kept but how often each tensor was written to: a step
    that has written none can be taken again.
    """

    def __init__(self, inner: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
        self._inner, self._params = inner, params
        grads = [p.grad for p in params if p.grad is not None]
        self._grads = [(grad, grad._version) for grad in grads]
        kept = [tensor for state in inner.state.values() for tensor in nested.find_tensors(state)]
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


def _get_class_name(inner: torch.optim.Optimizer) -> str:
    return type(inner).__name__


def make_torch_optimizer(
    o: OptimConfig, parameters: Iterable[nn.Parameter], *, undecayed: Iterable[nn.Parameter] = ()
) -> TorchOptimizer:
    """Return the optimizer named by `optim.name`. Raises ConfigError."""
    own = is_import_path(o.name)
    factory: Callable[..., Any] = (
        import_callable(o.name, setting="optim.name", refusal=ConfigError)
        if own
        else getattr(torch.optim, o.name, _raise_absent)
    )
    params = [p for p in parameters if p.requires_grad]
    given = _collect_arguments(factory, o)
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
        told = describe_error(error)
    if told:
        raise ConfigError(f"optim.name: {o.name} raised: {told}; choose another, or mend it")
    _refuse_unusable(inner, o.name)
    return TorchOptimizer(inner, params, lr=o.lr)


def check_optimizer(o: OptimConfig, *, steps: int) -> None:
    """Try the optimizer on a small matrix and a bias, and the schedule at its ends. Raises
    ConfigError."""
    if o.name not in FUSED:
        weights = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
        make_torch_optimizer(o, weights, undecayed=weights[1:])
    if is_import_path(o.schedule):
        rate = make_own_schedule(o, steps=steps)
        for step in (0, steps - 1):
            rate(step)


def make_own_schedule(o: OptimConfig, *, steps: int) -> Callable[[int], float]:
    """Return the learning rate of each step by the function at `optim.schedule`. Raises
    ConfigError, also when it is called."""
    share = import_callable(o.schedule, setting="optim.schedule", refusal=ConfigError)

    def at(step: int) -> float:
        try:
            rate = o.lr * float(share(step, steps))
            told = f"gave {rate / o.lr}"
        except Exception as error:
            rate, told = math.nan, f"raised: {describe_error(error)}"
        if not 0 <= rate < math.inf:
            raise ConfigError(
                f"optim.schedule: {o.schedule} at step {step} of {steps} {told}; give the share of "
                "optim.lr, a number from 0 on"
            )
        return rate

    return at


def _raise_absent(*_: Any, **__: Any) -> Any:
    raise AttributeError(f"torch {torch.__version__} has no such optimizer")


def _collect_arguments(factory: Callable[..., Any], o: OptimConfig) -> dict[str, Any]:
    """Return what it has parameters for. Raises ConfigError for a setting that is not the preset
    and that it has none for."""
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
