"""Optimizers and the learning rate of every step. AdamW and SGD call PyTorch's fused kernels,
those of torch.optim with fused=True, directly, since the first step of a torch.optim optimizer
imports the compiler, which costs about two seconds at every start. Other classes of
torch.optim, and optimizers and schedules of the user's own, are called as they are, never
replayed from a graph nor forecast. One whose steps compute gradients anew, as SAM's, is given a
closure that does. It refuses a setting that a class does not take.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import get_ema_multi_avg_fn

from headroom.base import nested
from headroom.base.import_paths import describe_error, import_callable, is_import_path
from headroom.base.nested import get_local_part, shard_like
from headroom.models.parameter_patterns import find_parameters
from headroom.settings.arguments import BetasArgs, FallingArgs, MomentumArgs, PlateauArgs, StepArgs
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import FUSED, BestMetric, GroupConfig, OptimConfig
from headroom.training.micro_batches import MemoryExhausted, extract_message
from headroom.watch.out_of_memory import MemoryFailure, is_oom

Closure = Callable[[], Tensor]


class Optimizer:
    """Holds parameters, their gradients and their state; keeps GradScaler's contract for fused
    optimizers."""

    # GradScaler then sets .grad_scale and .found_inf before step() and deletes them after it, so
    # that a step with infinite gradients is skipped by the kernel, without a wait of the host.
    _step_supports_amp_scaling = True
    needs_closure = False  # whether a step computes gradients anew, as SAM's does

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
        self._free = [id(p) in free for p in self.params]
        self.decays = [0.0 if is_free else weight_decay for is_free in self._free]
        self.shares = [1.0] * len(self.params)  # of the rate
        self._average: Callable[..., None] | None = None
        self.averages: list[Tensor] = []  # of the parameters, where they are wanted
        self._is_taken = False  # a step whose average is still to be computed
        self._is_plain = all(get_local_part(p) is p and not p.is_complex() for p in self.params)
        self._applied = 0  # calls of the kernel that a step made before one of them failed
        # What these calls are given, once the state is made: see _list_calls.
        self._groups: list[tuple[_Rates, list[nn.Parameter], list[list[Tensor]]]] | None = None

    def set_groups(self, groups: Mapping[int, GroupConfig], *, lr: float) -> None:
        """Give parameters, by their ids, a rate and a weight decay of their own; those without
        decay stay so. lr: the peak for all others."""
        for i, p in enumerate(self.params):
            group = groups.get(id(p), GroupConfig())
            if group.lr is not None:
                self.shares[i] = group.lr / lr
            if group.weight_decay is not None and not self._free[i]:
                self.decays[i] = group.weight_decay

    def keep_average(self, decay: float) -> None:
        """Keep an exponential moving average of the parameters, from the first step on."""
        self._average = get_ema_multi_avg_fn(decay)

    @contextmanager
    def use_averages(self) -> Iterator[None]:
        """Return a context in which the parameters are their averages, where these are kept."""
        self.swap_averages()
        try:
            yield
        finally:
            self.swap_averages()

    @torch.no_grad()
    def swap_averages(self) -> None:
        """Exchange parameters and averages in place: a recorded step finds them where they were."""
        for p, average in zip(self.params, self.averages, strict=False):
            kept = p.clone()
            p.copy_(average)
            average.copy_(kept)

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

    def step(self, closure: Closure | None = None) -> None:
        """Take a step. One whose average found no memory is not taken again. closure: computes
        gradients and loss of the batch anew; for those that need it."""
        if not self._is_taken:
            self._take_step(closure)
        if self._average is not None:
            self._is_taken = True
            self._update_averages(self._average)
            self._is_taken = False

    @torch.no_grad()
    def _update_averages(self, average: Callable[..., None]) -> None:
        if self.averages:
            average(self._list_local(self.averages), self._list_local([*self.params]), None)
        else:  # the first are the parameters themselves, as AveragedModel has it
            self.averages = [p.detach().clone() for p in self.params]

    def _take_step(self, closure: Closure | None) -> None:
        raise NotImplementedError

    def list_state_tensors(self) -> list[Tensor]:
        """Return the tensors of the state, on their device."""
        return list({id(tensor): tensor for _, tensor in self.iterate_state()}.values())

    def iterate_state(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the tensors of the state, each with its parameter: one that several share, with
        each of them."""
        for kept in (*self._list_kept(), self.averages):
            yield from zip(self.params, kept, strict=False)  # none where none are made yet

    def _list_kept(self) -> tuple[list[Tensor], ...]:
        """Return the lists of the state that have a tensor for each parameter."""
        return ()

    def state(self) -> Any:
        """Return what the next step depends on beside parameters and rate; empty before the
        first step."""
        raise NotImplementedError

    def restore(self, state: Any) -> None:
        """Go back to where `state` was taken."""
        raise NotImplementedError

    def _keep_averages(self) -> dict[str, list[Tensor]]:
        return {"averages": list(self.averages)} if self.averages else {}

    def _restore_averages(self, state: Any) -> None:
        self.averages = _lay_out_like(self.params, state.get("averages", []))

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
    ) -> list[tuple[float, float | Tensor, list[list[Tensor]]]]:
        """Return the calls of the kernel that a step on these parameters takes, one for each weight
        decay and rate: both, and the lists of parameters, gradients and of each `state`.

        Where a call runs out of memory, the step is tried again: it begins at that call. The lists
        are those of the step before where every parameter has a gradient again, as nearly always.
        """
        is_whole = len(which) == len(self.params)
        groups = self._groups if is_whole else None
        if groups is None:
            groups = []
            rates = [(self.decays[i], self.shares[i]) for i in which]
            for rate in sorted({*rates}):
                part = [i for i, own in zip(which, rates, strict=True) if own == rate]
                kept: list[Sequence[Tensor]] = [self.params, *state]
                lists = [self._list_local([tensors[i] for i in part]) for tensors in kept]
                groups.append((rate, [self.params[i] for i in part], lists))
            if self._is_plain and is_whole:
                self._groups = groups
        calls = []
        for (decay, share), parameters, (local, *others) in groups[self._applied :]:
            gradients: list[Any] = [p.grad for p in parameters]
            # Of a tensor a product is made on the device, also in a recording.
            lr = self.lr if share == 1.0 else self.lr * share
            calls.append((decay, lr, [local, self._list_local(gradients), *others]))
        return calls


_Rates = tuple[float, float]  # weight decay, and the share of the learning rate


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
    def _take_step(self, closure: Closure | None) -> None:
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
            for weight_decay, lr, lists in self._list_calls(
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
                    lr=lr,
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

    def _list_kept(self) -> tuple[list[Tensor], ...]:
        return self.means, self.squares, self.steps

    def state(self) -> Any:
        # One count for all parameters stays one.
        shared = len({id(count) for count in self.steps}) == 1
        steps = self.steps[:1] if shared else self.steps
        kept = {"means": list(self.means), "squares": list(self.squares), "steps": list(steps)}
        return kept | self._keep_averages()

    def restore(self, state: Any) -> None:
        self._restore_averages(state)
        self.means = _lay_out_like(self.params, state["means"])
        self.squares = _lay_out_like(self.params, state["squares"])
        counts = [count.to(self.params[0].device) for count in state["steps"]]
        self.steps = counts * len(self.params) if len(counts) == 1 else counts
        self._groups = None


class Sgd(Optimizer):
    """SGD with momentum and L2 weight decay, as torch.optim.SGD."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        nesterov: bool = True,
        undecayed: Iterable[nn.Parameter] = (),
    ) -> None:
        super().__init__(parameters, lr=lr, weight_decay=weight_decay, undecayed=undecayed)
        self.momentum, self.nesterov = momentum, nesterov and momentum > 0
        self.momenta: list[Tensor] = []

    @torch.no_grad()
    def _take_step(self, closure: Closure | None) -> None:
        if self.momentum and not self.momenta:
            # From zeros the first step gives momentum * 0 + gradient: what torch.optim starts with.
            self.momenta, self._groups = [torch.zeros_like(p) for p in self.params], None
        which, state = self._find_with_grads(), [self.momenta] if self.momentum else []
        for weight_decay, lr, lists in self._list_calls(which, *state):
            params, gradients, *momenta = lists
            torch._fused_sgd_(
                params,
                gradients,
                momenta[0] if momenta else [],
                weight_decay=weight_decay,
                momentum=self.momentum,
                lr=lr,
                dampening=0.0,
                nesterov=self.nesterov,
                maximize=False,
                is_first_step=False,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
            )
            self._applied += 1
        self._applied = 0

    def _list_kept(self) -> tuple[list[Tensor], ...]:
        return (self.momenta,)

    def state(self) -> Any:
        return {"momenta": list(self.momenta), **self._keep_averages()}

    def restore(self, state: Any) -> None:
        self._restore_averages(state)
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
    args: Mapping[str, Any] | None = None,
    undecayed: Iterable[nn.Parameter] = (),
) -> Optimizer:
    """Return the optimizer called `adamw` or `sgd`. args: as `optim.args` has them."""
    if name == "sgd":
        of_sgd = MomentumArgs(**(args or {}))
        return Sgd(
            parameters,
            lr=lr,
            weight_decay=weight_decay,
            momentum=of_sgd.momentum,
            nesterov=of_sgd.nesterov,
            undecayed=undecayed,
        )
    of_adamw = BetasArgs(**(args or {}))
    beta1, beta2 = of_adamw.betas
    return AdamW(
        parameters,
        lr=lr,
        weight_decay=weight_decay,
        beta1=beta1,
        beta2=beta2,
        eps=of_adamw.eps,
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


def find_groups(o: OptimConfig, model: nn.Module) -> dict[int, GroupConfig]:
    """Return what parameters have for themselves, by their ids. Raises ConfigError for a pattern
    that no parameter is left for."""
    groups: dict[int, GroupConfig] = {}
    for pattern, group in o.groups.items():
        meant = find_parameters(model, pattern, setting="optim.groups")
        new = {id(p): group for p in meant if p.requires_grad and id(p) not in groups}
        if not new:
            raise ConfigError(
                f"optim.groups: {pattern[:80]!r} has no parameter of its own: those it matches are "
                "frozen or of an earlier pattern; drop it, or put it first"
            )
        groups |= new
    return groups


class Plateau:
    """The learning rate of PyTorch's ReduceLROnPlateau, after a linear warm-up. Its state is what
    the evaluations so far have come to."""

    def __init__(self, o: OptimConfig, *, warm_up: int, best: BestMetric, min_delta: float) -> None:
        self._warm_up, self._metric = warm_up, best.name
        self._group: dict[str, Any] = {"lr": o.lr}
        args = PlateauArgs(**o.schedule_args)
        self._inner = ReduceLROnPlateau(
            _HeldRate(self._group),
            mode="min" if best.is_lower else "max",
            factor=args.factor,
            patience=args.patience,
            threshold=min_delta,
            threshold_mode="abs",
            min_lr=o.lr * args.min_lr_fraction,
        )

    def __call__(self, step: int) -> float:
        lr: float = self._group["lr"]
        return lr * (step + 1) / self._warm_up if step < self._warm_up else lr

    def record(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of an evaluation."""
        self._inner.step(metrics.get(self._metric, math.nan))

    def state(self) -> dict[str, Any]:
        """Return what the next rates depend on."""
        return {"lr": self._group["lr"], "plateau": dict(self._inner.state_dict())}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to where `state` was taken."""
        self._group["lr"] = state["lr"]
        self._inner.load_state_dict(state["plateau"])


class _HeldRate(torch.optim.Optimizer):
    """A rate where PyTorch's schedules look for it. Not made as an optimizer of its own is, which
    imports the compiler."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.param_groups = [group]


def make_schedule(
    o: OptimConfig,
    *,
    steps: int,
    epoch_steps: int = 1,
    best: BestMetric = BestMetric("val/loss", True),  # noqa: B008 (a tuple)
    min_delta: float = 0.0,
) -> Callable[[int], float]:
    """Return the function that gives the learning rate of step 0, 1, ..., steps - 1.

    It rises linearly to optim.lr over the warm-up. Then it stays; falls to min_lr_fraction of it
    along half a cosine (SGDR, Loshchilov & Hutter 2017, arXiv:1608.03983, one period, no restart)
    or a line; or falls as StepLR, which counts the epochs of `epoch_steps` from the first step on,
    OneCycleLR and ReduceLROnPlateau of torch.optim.lr_scheduler do. A function of the step needs
    nothing of a checkpoint; Plateau, which follows `best`, has a state.
    """
    if is_import_path(o.schedule):
        return _make_own_schedule(o, steps=steps)
    if o.schedule == "one_cycle":
        return _make_one_cycle(o.lr, steps=steps, warm_up=_count_warm_up(o, steps))
    warm_up = round(_count_warm_up(o, steps))
    if o.schedule == "plateau":
        return Plateau(o, warm_up=warm_up, best=best, min_delta=min_delta)
    lr, is_cosine, least = o.lr, o.schedule == "cosine", 1.0
    falls = StepArgs(**o.schedule_args) if o.schedule == "step" else None
    if o.schedule in ("cosine", "linear"):
        least = FallingArgs(**o.schedule_args).min_lr_fraction

    def at(step: int) -> float:
        if step < warm_up:
            return lr * (step + 1) / warm_up
        if falls is not None:
            return lr * falls.gamma ** (step // (falls.step_size * epoch_steps))
        done = (step - warm_up) / max(1, steps - warm_up)
        left = 0.5 * (1 + math.cos(math.pi * done)) if is_cosine else 1 - done
        return lr * (least + (1 - least) * left)

    return at


def _count_warm_up(o: OptimConfig, steps: int) -> float:
    """Return the steps in which the rate rises. A part of a step is what OneCycleLR knows too."""
    preset = PCT_START if o.schedule == "one_cycle" else 0.05
    warmup = preset if o.warmup is None else o.warmup
    return warmup * steps if warmup < 1 else warmup


PCT_START, DIV_FACTOR, FINAL_DIV_FACTOR = 0.3, 25.0, 1e4  # what OneCycleLR itself presets


def _make_one_cycle(lr: float, *, steps: int, warm_up: float) -> Callable[[int], float]:
    """The formula of OneCycleLR.get_lr."""
    first, top = lr / DIV_FACTOR, warm_up - 1

    def at(step: int) -> float:
        if step <= top:
            start, end, share = first, lr, step / top if top else 1.0
        else:
            start, end, share = lr, first / FINAL_DIV_FACTOR, (step - top) / (steps - 1 - top)
        return end + (start - end) / 2.0 * (math.cos(math.pi * share) + 1)

    return at


class TorchOptimizer(Optimizer):
    """Wraps an optimizer of torch.optim for the training loop. The rates of its groups keep
    their proportions."""

    # GradScaler then looks on the host whether a step is to be skipped.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        needs_closure: bool = False,
    ) -> None:
        super().__init__(parameters, lr=lr, weight_decay=0.0)
        self._inner, self._peak, self.needs_closure = inner, lr, needs_closure
        self._is_judging = False  # while the parameters are what is judged and logged
        self._set_mode("train")
        self._is_torchs = type(inner).__module__.startswith("torch.optim.")
        self._rates = [group["lr"] for group in inner.param_groups]

    def swap_averages(self) -> None:
        """Exchange parameters and averages; also those of an optimizer that keeps its own."""
        if not self._is_judging:
            self._set_mode("eval")
        super().swap_averages()
        if self._is_judging:
            self._set_mode("train")
        self._is_judging = not self._is_judging

    def _set_mode(self, mode: str) -> None:
        """Call `train` or `eval` of the optimizer, where it has both, as schedule-free ones do: the
        weights that it trains are not those to be judged and logged."""
        methods = {name: getattr(self._inner, name, None) for name in ("train", "eval")}
        if all(map(callable, methods.values())):
            cast(Any, methods[mode])()

    def set_lr(self, lr: float) -> None:
        super().set_lr(lr)
        for group, rate in zip(self._inner.param_groups, self._rates, strict=True):
            group["lr"] = rate * (lr / self._peak)

    def _take_step(self, closure: Closure | None) -> None:
        """Take a step whole or not at all, where memory runs out in it.

        Raises torch.OutOfMemoryError where all is as before it, and MemoryExhausted where a part of
        it is done and cannot be undone. What a step of another's writes by `.data` or keeps beside
        its state is not seen, so that it is never taken again.
        """
        before = _StepBackup(self._inner, self.params) if self._is_torchs else None
        failure = ""
        try:
            self._inner.step() if closure is None else self._inner.step(cast(Any, closure))
        except MemoryExhausted:
            raise  # within the closure, which tells more
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            failure = extract_message(error)
        if not failure:
            return
        if before is not None and before.restore():
            raise torch.OutOfMemoryError(failure)
        done = "a part of the step of" if before is not None else "it is not known what a step of"
        verb = "was done" if before is not None else "has done by then"
        why = f"it was not tried again: {done} {_get_class_name(self._inner)} {verb}"
        raise MemoryExhausted(MemoryFailure(failure, "optimizer", unrepeated=why))

    def _find_within(self) -> dict[str, torch.optim.Optimizer]:
        """Return the optimizers that this one is made of, as SAM and Lookahead are, by name."""
        held = vars(self._inner).items()
        return {name: o for name, o in held if isinstance(o, torch.optim.Optimizer)}

    def iterate_state(self) -> Iterator[tuple[Tensor, Tensor]]:
        for one in (self._inner, *self._find_within().values()):
            for parameter, state in one.state.items():
                for tensor in state.values():
                    if isinstance(tensor, Tensor):
                        yield parameter, tensor
        yield from super().iterate_state()

    def state(self) -> Any:
        within = {name: other.state_dict() for name, other in self._find_within().items()}
        kept = {"within": within} if within else {}
        numbers, tensors = self._find_beside()
        kept |= {"beside": {"numbers": numbers, "tensors": tensors}} if numbers or tensors else {}
        return self._inner.state_dict() | kept | self._keep_averages()

    def _find_beside(self) -> tuple[dict[str, Any], dict[str, list[Tensor]]]:
        """Return the numbers and the lists of tensors that an optimizer of another keeps in
        attributes beside its state, as a count of steps or slow weights."""
        if self._is_torchs:
            return {}, {}
        usual = {"param_groups", "state", "defaults"}
        held = {n: v for n, v in vars(self._inner).items() if n not in usual and n[0] != "_"}
        numbers = {n: v for n, v in held.items() if isinstance(v, (int, float))}
        lists = {
            n: list(nested.find_tensors(v))
            for n, v in held.items()
            if isinstance(v, (Tensor, list, tuple))
        }
        trained = set(map(id, self.params))
        return numbers, {n: v for n, v in lists.items() if v and trained.isdisjoint(map(id, v))}

    @torch.no_grad()
    def _restore_beside(self, kept: Any) -> None:
        vars(self._inner).update(kept["numbers"])
        _, tensors_by_name = self._find_beside()
        for name, tensors in kept["tensors"].items():
            for tensor, values in zip(tensors_by_name.get(name, ()), tensors, strict=False):
                tensor.copy_(shard_like(values, tensor))

    def restore(self, state: Any) -> None:
        self._restore_averages(state)
        if "beside" in state:
            self._restore_beside(state["beside"])
        within = self._find_within()
        shares = [o for o in within.values() if o.param_groups is self._inner.param_groups]
        for name, kept in state.get("within", {}).items():
            within[name].load_state_dict(kept)
        self._inner.load_state_dict(state)
        for other in shares:  # the rates of one are those of the other
            other.param_groups = self._inner.param_groups
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
    o: OptimConfig,
    parameters: Iterable[nn.Parameter],
    *,
    undecayed: Iterable[nn.Parameter] = (),
    groups: Mapping[int, GroupConfig] | None = None,
) -> TorchOptimizer:
    """Return the optimizer named by `optim.name`. groups: what parameters have for themselves, by
    their ids. Raises ConfigError."""
    own = is_import_path(o.name)
    factory: Callable[..., Any] = (
        import_callable(o.name, setting="optim.name", refusal=ConfigError)
        if own
        else getattr(torch.optim, o.name, _raise_absent)
    )
    params = [p for p in parameters if p.requires_grad]
    arguments = _collect_arguments(factory, o)
    free = set(map(id, undecayed)) if "weight_decay" in arguments else set()
    made: dict[str, dict[str, Any]] = {"{}": {"params": []}}  # the first is that of most
    for p in params:
        options = (groups or {}).get(id(p), GroupConfig()).model_dump(exclude_none=True)
        for name in options.keys() - arguments.keys():
            raise ConfigError(f"optim.groups: {o.name} takes no {name}; drop it")
        options |= {"weight_decay": 0.0} if id(p) in free else {}
        made.setdefault(str(options), {"params": [], **options})["params"].append(p)
    problem = ""
    try:
        inner = factory([group for group in made.values() if group["params"]], **arguments)
    except Exception as error:
        if is_oom(error):
            raise
        problem = describe_error(error)
    if problem:
        raise ConfigError(f"optim.name: {o.name} raised: {problem}; choose another, or mend it")
    _refuse_unusable(inner, o.name)
    return TorchOptimizer(
        inner, params, lr=o.lr, needs_closure=own and _needs_closure(factory, arguments)
    )


def check_optimizer(o: OptimConfig, *, steps: int, epochs: int, precision: str = "fp32") -> None:
    """Try the optimizer on a small matrix and a bias, and the schedule at its ends. Raises
    ConfigError, also for a schedule that a run of so many steps and epochs has no room for."""
    if o.name not in FUSED:
        for group in (GroupConfig(), *o.groups.values()):
            weights = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
            taken = weights[:1] if o.name in MATRICES_ONLY else weights
            own = {id(weights[0]): group}
            made = make_torch_optimizer(o, taken, undecayed=weights[1:], groups=own)
        if made.needs_closure and precision == "fp16":
            raise ConfigError(
                f"train.precision: fp16 scales gradients, and the steps of {o.name} compute them "
                "anew, unscaled; choose bf16 or fp32"
            )
    if is_import_path(o.schedule):
        rate = make_schedule(o, steps=steps)
        for step in (0, steps - 1):
            rate(step)
    elif o.warmup is not None and o.warmup >= steps:
        raise ConfigError(
            f"optim.warmup: must be below the {steps:,} steps of the run "
            f"(got {o.warmup:,.0f}); lower it, or raise train.epochs"
        )
    if o.schedule == "step" and (period := StepArgs(**o.schedule_args).step_size) >= epochs:
        raise ConfigError(
            f"optim.schedule_args.step_size: must be below the {epochs:,} epochs of the run, or "
            f"the rate never falls (got {period:,}); lower it"
        )


def _make_own_schedule(o: OptimConfig, *, steps: int) -> Callable[[int], float]:
    """Return the learning rate of each step by the function at `optim.schedule`. Raises
    ConfigError, also when it is called."""
    function = import_callable(o.schedule, setting="optim.schedule", refusal=ConfigError)
    share = partial(function, **o.schedule_args)

    def at(step: int) -> float:
        try:
            rate = o.lr * float(share(step, steps))
            problem = f"gave {rate / o.lr}"
        except Exception as error:
            rate, problem = math.nan, f"raised: {describe_error(error)}"
        if not 0 <= rate < math.inf:
            raise ConfigError(
                f"optim.schedule: {o.schedule} at step {step} of {steps} {problem}; give the share "
                "of optim.lr, a number from 0 on"
            )
        return rate

    return at


def _raise_absent(*_: Any, **__: Any) -> Any:
    raise AttributeError(f"torch {torch.__version__} has no such optimizer")


def _collect_arguments(factory: Callable[..., Any], o: OptimConfig) -> dict[str, Any]:
    """Return what the optimizer is called with beside the parameters. Raises ConfigError for an
    argument of `optim.args`, or a weight decay, that it has no parameter for."""
    takes = inspect.signature(factory).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    preset = {"lr": o.lr, "weight_decay": o.decay}
    for name in o.args:
        if name in preset:
            raise ConfigError(f"optim.args.{name}: is a setting of its own; give optim.{name}")
        if name not in takes and not takes_any:
            raise ConfigError(
                f"optim.args.{name}: {o.name} takes none of this name, but {', '.join(takes)}"
            )
    if o.weight_decay is not None and "weight_decay" not in takes:
        raise ConfigError(
            f"optim.weight_decay: {o.name} takes none (got {o.weight_decay:g}); drop it"
        )
    return {name: value for name, value in preset.items() if name in takes} | {
        name: tuple(value) if isinstance(value, list) else value for name, value in o.args.items()
    }


def _refuse_unusable(inner: Any, name: str) -> None:
    if not isinstance(inner, torch.optim.Optimizer):
        got = type(inner).__name__
        raise ConfigError(f"optim.name: {name} must give a torch.optim.Optimizer (got a {got})")
    if isinstance(inner, torch.optim.LBFGS):
        raise ConfigError(
            f"optim.name: the steps of {name} search along a line of the loss of all rows, and "
            "batches here are other ones each time; choose another"
        )


def _needs_closure(factory: Callable[..., Any], arguments: Mapping[str, Any]) -> bool:
    """Return whether a step on a small matrix and a bias fails without a closure that computes the
    gradients anew, and not with one, as those of SAM do."""

    def can_step(*, with_closure: bool) -> bool:
        weights = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]

        def compute_gradients() -> Tensor:
            for p in weights:
                p.grad = None
            loss = torch.stack([p.square().sum() for p in weights]).sum()
            loss.backward()
            return loss

        compute_gradients()
        try:
            inner = factory([{"params": weights}], **arguments)
            inner.step(compute_gradients) if with_closure else inner.step()
        except Exception:  # what it lacks it says in many ways; a real step tells all others
            return False
        return True

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return not can_step(with_closure=False) and can_step(with_closure=True)


MATRICES_ONLY = ("Muon",)


def refuse_parameters(o: OptimConfig, model: nn.Module) -> None:
    """Raises ConfigError where the optimizer takes matrices only, and the model trains others."""
    if o.name not in MATRICES_ONLY:
        return
    others = [
        f"{name} {tuple(p.shape)}"
        for name, p in model.named_parameters()
        if p.requires_grad and p.dim() != 2
    ]
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise ConfigError(
            f"optim.name: {o.name} trains matrices only (got {', '.join(others[:3])}{more}); "
            "freeze these by model.freeze, or name an optimizer of your own that gives them to "
            "another"
        )
