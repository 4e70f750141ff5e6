"""AdamW and SGD over PyTorch's fused kernels, and the learning rate of every step. The kernels are
those that torch.optim calls with fused=True; they are called directly, since the first step of a
torch.optim optimizer imports the compiler, which costs about two seconds at every start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tasks.engine.distributed.shards import local, placed


class Optimizer:
    """Parameters, their gradients and their state; GradScaler's contract for fused optimizers."""

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
        self._is_plain = all(local(p) is p and not p.is_complex() for p in self.params)
        self._applied = 0  # calls of the kernel that a step made before one of them failed

    def set_lr(self, lr: float) -> None:
        """The rate of the next steps; in place where steps are replayed, which read a tensor."""
        if isinstance(self.lr, Tensor):
            self.lr.fill_(lr)
        else:
            self.lr = lr

    def forget_scale(self) -> None:
        """Drop what a GradScaler has set for one step."""
        self.__dict__.pop("grad_scale", None)
        self.__dict__.pop("found_inf", None)

    def zero_grad(self) -> None:
        """A step begins anew."""
        self._applied = 0
        for p in self.params:
            p.grad = None

    def step(self) -> None:
        raise NotImplementedError

    def state_tensors(self) -> list[Tensor]:
        raise NotImplementedError

    def state(self) -> Any:
        """What the next step depends on beside parameters and rate; empty before the first step."""
        raise NotImplementedError

    def restore(self, state: Any) -> None:
        """Be as when `state` was taken."""
        raise NotImplementedError

    def _local(self, tensors: list[Tensor]) -> list[Tensor]:
        """What the kernels work on: each element by itself, so that a rank's own part will do, and
        of a complex number the real and the imaginary part, as torch.optim does."""
        if self._is_plain:
            return tensors
        parts = [local(tensor) for tensor in tensors]
        return [torch.view_as_real(p.resolve_conj()) if p.is_complex() else p for p in parts]

    def _with_grads(self) -> list[int]:
        return [i for i, p in enumerate(self.params) if p.grad is not None]

    def _by_decay(self, which: list[int]) -> Iterator[tuple[float, list[int]]]:
        """The same parameters, those of one weight decay at a time, for a call of the kernel each.

        Where a call runs out of memory, the step is tried again: it begins at that call.
        """
        for decay in sorted({self.decays[i] for i in which})[self._applied :]:
            yield decay, [i for i in which if self.decays[i] == decay]
            self._applied += 1
        self._applied = 0


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
            self.means, self.squares = means, squares
        which = self._with_grads()
        if len(which) < len(self.params) and len(set(map(id, self.steps))) == 1:
            self.steps = [count.clone() for count in self.steps]
        counts = list({id(self.steps[i]): self.steps[i] for i in which}.values())
        # A step that is skipped for infinite gradients does not count.
        found_inf = getattr(self, "found_inf", None)
        taken = [1.0 if found_inf is None else 1.0 - found_inf] * len(counts)
        torch._foreach_add_(counts, taken)
        try:
            for weight_decay, part in self._by_decay(which):
                torch._fused_adamw_(
                    self._local([self.params[i] for i in part]),
                    self._local([_gradient(self.params[i]) for i in part]),
                    self._local([self.means[i] for i in part]),
                    self._local([self.squares[i] for i in part]),
                    [],
                    [self.steps[i] for i in part],
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
        except RuntimeError:
            # Where memory runs out it is tried again: even the loading of a kernel takes some.
            torch._foreach_sub_(counts, taken)
            raise

    def state_tensors(self) -> list[Tensor]:
        return [*self.means, *self.squares, *{id(count): count for count in self.steps}.values()]

    def state(self) -> Any:
        # One count for all parameters stays one.
        shared = len({id(count) for count in self.steps}) == 1
        steps = self.steps[:1] if shared else self.steps
        return {"means": list(self.means), "squares": list(self.squares), "steps": list(steps)}

    def restore(self, state: Any) -> None:
        self.means = _like(self.params, state["means"])
        self.squares = _like(self.params, state["squares"])
        counts = [count.to(self.params[0].device) for count in state["steps"]]
        self.steps = counts * len(self.params) if len(counts) == 1 else counts


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
            self.momenta = [torch.zeros_like(p) for p in self.params]
        for weight_decay, part in self._by_decay(self._with_grads()):
            torch._fused_sgd_(
                self._local([self.params[i] for i in part]),
                self._local([_gradient(self.params[i]) for i in part]),
                self._local([self.momenta[i] for i in part]) if self.momentum else [],
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

    def state_tensors(self) -> list[Tensor]:
        return list(self.momenta)

    def state(self) -> Any:
        return {"momenta": list(self.momenta)}

    def restore(self, state: Any) -> None:
        self.momenta = _like(self.params, state["momenta"])


def _like(parameters: list[nn.Parameter], kept: list[Tensor]) -> list[Tensor]:
    """The same numbers in tensors laid out as the parameters are; none where none were kept."""
    if not kept:
        return []
    return [
        torch.empty_like(p, requires_grad=False).copy_(placed(tensor, p))
        for p, tensor in zip(parameters, kept, strict=True)
    ]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def make(
    name: str,
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
    beta2: float,
    undecayed: Iterable[nn.Parameter] = (),
) -> Optimizer:
    """The optimizer called `adamw` or `sgd`."""
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


def undecayed(model: nn.Module) -> list[nn.Parameter]:
    """Norms, biases and embeddings: the parameters of which small values are no simpler model."""
    whole = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)
    kept = [
        p for module in model.modules() if isinstance(module, whole) for p in module.parameters()
    ]
    return kept + [p for p in model.parameters() if p.dim() < 2]


def schedule(
    name: str,
    *,
    lr: float,
    total_steps: int,
    warmup_fraction: float,
    min_fraction: float = 0.0,
) -> Callable[[int], float]:
    """The learning rate of step 0, 1, ..., total_steps - 1.

    It rises linearly to `lr` over the warm-up, then stays, or falls to `min_fraction` of it along
    half a cosine (SGDR, Loshchilov & Hutter 2017, arXiv:1608.03983, one period, no restart).
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
