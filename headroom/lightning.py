"""The account of a training by Lightning:

from headroom.lightning import HeadroomCallback

Trainer(callbacks=[HeadroomCallback(run_name="mine")]).fit(module, loader)
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.memory import recursive_detach
from torch import nn

from headroom.process.signals import Terminated
from headroom.run.account import Account
from headroom.run.adapter import Adapter

if TYPE_CHECKING:
    from headroom.training.step_passes import Weigh

STATE = "headroom"  # of a checkpoint: what each callback has of its run
ASKED = ("max_epochs", "max_steps", "precision", "accumulate_grad_batches", "gradient_clip_val")


class HeadroomCallback(Adapter, Callback):
    """Tells of each `fit` in a run of its own. Of several processes, that of rank 0 tells. What
    `validate` and `test` find after a `fit` belongs to its run."""

    def __init__(self, *, protect: bool = False, **arguments: Any) -> None:
        """protect: a batch for which memory runs out goes on in parts; see `Account.protect`.
        arguments: what `headroom.account` takes; params beside those of the module's `hparams` and
        the Trainer."""
        super().__init__(**arguments)
        self._protects = protect
        self._protected: ProtectedOptimization | None = None  # that of this `fit`
        self._seen: dict[str, Any] = {}  # metrics as they were logged last

    def __getstate__(self) -> dict[str, Any]:
        # Lightning gives its callbacks these methods of the module at `fit`, and again.
        kept = {k: v for k, v in super().__getstate__().items() if k not in ("log", "log_dict")}
        return {**kept, "_seen": {}, "_protected": None}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the run: the module is on its device, with its optimizers."""
        if not trainer.is_global_zero:
            return
        params = {
            **pl_module.hparams,
            "trainer": {name: getattr(trainer, name, None) for name in ASKED}
            | {"world_size": trainer.world_size},
        }
        self._seen = {}
        self._begin(
            params,
            owner=trainer,
            device=trainer.strategy.root_device,
            model=pl_module,
            optimizer=list(trainer.optimizers),
            run_name=type(pl_module).__name__,
        )
        if self._protects:
            self._protect(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the first batch."""
        self._wait()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a step, or a part of one whose gradients are accumulated."""
        if self.run is not None:
            self._end_checkpoint()
            self.run.loop.end_wait(batch)
            self.run.loop.begin_step()
            self.run.loop.stage = "forward"

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """The loss is there."""
        self._mark("forward", "backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The gradients are there."""
        self._mark("backward", "")

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """End the step, if it was one, and wait for the next batch."""
        if self.run is None:
            return
        self.run.loop.stage = ""
        if not self.run.loop.has_updated:  # gradients are accumulated
            self.run.loop.mark("other")
        else:
            self.run.loop.end_step()
            every = trainer.log_every_n_steps  # 0: none
            if every and self.run.loop.done % every == 0:
                self._log(trainer)
        self._wait()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What follows is no part of a step."""
        if self.run is not None:
            self.run.loop.begin_phase("eval")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what the validation found, and wait for the next batch."""
        if self.run is not None:
            self._end_checkpoint()
            self.run.loop.end_phase()
            self._log(trainer)
            self._wait()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what the test found, after a `fit`."""
        if self.run is not None:
            self._log(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """A checkpoint is written from here on, until the next thing begins. It names the run."""
        # No state of a callback: two of these would need two keys, which a restart may change.
        states = checkpoint.setdefault(STATE, [])
        if self.run is None:
            return states.append(None)  # as a tuner of rates does, before it tries
        states.append(self._make_state())
        if self.run.loop.stage != "checkpoint":
            self.run.loop.begin_phase("checkpoint")

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Go on with the run that the checkpoint names, by the place among callbacks like this."""
        if trainer.state.fn == TrainerFn.FITTING and trainer.is_global_zero:
            alike = [one for one in trainer.callbacks if isinstance(one, HeadroomCallback)]
            states = dict(enumerate(checkpoint.get(STATE, ())))
            self._loaded = states.get(alike.index(self), {})
            if trainer.strategy.restore_checkpoint_after_setup and self.run is not None:
                self.run.load_state_dict(self._loaded)  # it has begun by now
                self._loaded = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what the epoch found."""
        if self.run is not None:
            self._end_checkpoint()
            self._log(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the run."""
        if self.run is not None:
            self._end_checkpoint()
            self._unprotect()
            self.run.end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """End the run by this error."""
        if self.run is not None:
            self._unprotect()
            is_signal = isinstance(exception, SIGTERMException)
            self.run.end(Terminated(143) if is_signal else exception)

    def _protect(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.run is not None
        if pl_module.automatic_optimization:
            self._protected = ProtectedOptimization(self.run, trainer)
            self._protected.attach()
        else:
            self.run.warn(
                "protect: batches are taken whole, and errors are left as they come: this module "
                "goes backward itself; let it wrap that in `run.protect`"
            )

    def _unprotect(self) -> None:
        if self._protected is not None:
            self._protected.detach()
        self._protected = None

    def _wait(self) -> None:
        if self.run is not None:
            self._end_checkpoint()
            self.run.loop.begin_wait()

    def _mark(self, phase: str, then: str) -> None:
        if self.run is not None:
            self.run.loop.mark(phase)
            self.run.loop.stage = then

    def _end_checkpoint(self) -> None:
        if self.run is not None and self.run.loop.stage == "checkpoint":
            self.run.loop.end_phase()

    def _log(self, trainer: Trainer) -> None:
        """Log the metrics that are new; train_..., val_... and test_... as train/..., val/... and
        test/..., as the record names them."""
        assert self.run is not None
        try:
            logged = trainer.callback_metrics
        except Exception:  # of a metric of the user's: it comes again where Lightning reads it
            return
        new = {name: v for name, v in logged.items() if v is not self._seen.get(name)}
        self._seen |= new
        renamed = {
            re.sub("^(train|val|test)_", r"\1/", str(name)): value for name, value in new.items()
        }
        self.run.log(renamed, self.run.loop.done)


# By which Lightning knows a module, and which tell nothing of a batch.
_KNOWN_BY = frozenset(vars(LightningModule())) - frozenset(vars(nn.Module()))


class ProtectedOptimization:
    """The closures of an automatic optimization, which take parts of a batch where that does not
    fit. What a module logs is that of the batch."""

    def __init__(self, run: Account, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        self._make_closure = self._loop._make_closure
        self.step = run.protect_passes(self._take, ignored=_KNOWN_BY, begin=self._begin)
        self._closure: ProtectedClosure | None = None
        self._results: list[ClosureResult] = []  # of the parts of this attempt
        self._logged: list[list[LoggedValue]] = []  # by each of them

    def attach(self) -> None:
        """Make the closures from now on."""
        self._loop._make_closure = self._make_protected

    def detach(self) -> None:
        """Leave the closures to Lightning."""
        vars(self._loop).pop("_make_closure", None)

    def _make_protected(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Closure:
        return ProtectedClosure(self, self._make_closure(kwargs, optimizer, batch_idx), kwargs)

    def take(self, closure: ProtectedClosure) -> ClosureResult:
        """Return the result of this closure's step, gone backward from."""
        results: Any = self._trainer._results
        self._closure, log = closure, type(results).log
        results.log = self._log
        try:
            loss = self.step(closure.kwargs)
        finally:
            del results.log
            self._closure = None
        for value in join_logged(self._logged, self.step.shares):
            log(results, *value.given, **value.named)
        joined = self._results[0]
        if len(self._results) > 1:
            extras = [result.extra for result in self._results]
            joined = ClosureResult(loss, extra=join_extras(extras, self.step.shares))
        self._begin()
        return joined

    def _begin(self) -> None:
        self._results, self._logged = [], []
        if self._closure is not None:
            self._closure.is_zeroed = False

    def _take(self, kwargs: Any, weigh: Weigh) -> None:
        assert self._closure is not None
        self._logged.append([])
        result = self._loop._training_step(OrderedDict(kwargs))
        self._closure.zero_once()
        loss, result.closure_loss = result.closure_loss, None
        self._results.append(result)
        if loss is None:
            return
        self._closure.go_back(weigh(loss))

    def _log(self, fx: str, name: str, value: Any, *more: Any, **named: Any) -> None:
        if not named.get("enable_graph"):
            value = recursive_detach(value)
        if not self._logged:
            self._logged.append([])
        self._logged[-1].append(LoggedValue((fx, name, value, *more), named))


class ProtectedClosure(Closure):
    """The closure of one batch."""

    def __init__(self, optimization: ProtectedOptimization, closure: Closure, kwargs: Any) -> None:
        super().__init__(closure._step_fn, closure._backward_fn, closure._zero_grad_fn)
        self._optimization, self.kwargs = optimization, kwargs
        self.is_zeroed = False  # in this attempt

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        """Return the result of the batch."""
        return self._optimization.take(self)

    def zero_once(self) -> None:
        """Drop the gradients of the step before, unless that was done."""
        if self._zero_grad_fn is not None and not self.is_zeroed:
            self.is_zeroed = True
            self._zero_grad_fn()

    def go_back(self, loss: torch.Tensor) -> None:
        """Go backward from this loss."""
        if self._backward_fn is not None:
            self._backward_fn(loss)


class LoggedValue(NamedTuple):
    """What a module has logged: as Lightning's collection of results is given it."""

    given: tuple[Any, ...]  # where, name, value
    named: dict[str, Any]


def join_logged(parts: list[list[LoggedValue]], shares: list[float]) -> list[LoggedValue]:
    """Return what the batch logs, of what its parts have logged."""
    if len(parts) < 2:
        return [value for part in parts for value in part]
    by_name: dict[tuple[Any, ...], list[tuple[LoggedValue, float]]] = {}
    for part, share in zip(parts, shares, strict=True):
        for value in part:
            by_name.setdefault(value.given[:2], []).append((value, share))
    return [_join_values(values) for values in by_name.values()]


def _join_values(values: list[tuple[LoggedValue, float]]) -> LoggedValue:
    last, _ = values[-1]
    numbers = [value.given[2] for value, _ in values]
    named = dict(last.named)
    if named.get("batch_size") is not None:
        named["batch_size"] = sum(value.named["batch_size"] for value, _ in values)
    if not all(isinstance(number, torch.Tensor) for number in numbers):
        return LoggedValue(last.given, named)  # a metric, which has them all
    stacked, reduce = torch.stack(numbers), named.get("reduce_fx", torch.mean)
    if reduce in (torch.sum, sum):
        joined = stacked.sum()
    elif reduce in (torch.max, max, torch.min, min):
        joined = stacked.max() if reduce in (torch.max, max) else stacked.min()
    else:
        joined = _average(stacked, [share for _, share in values])
    return LoggedValue((*last.given[:2], joined, *last.given[3:]), named)


def join_extras(extras: list[dict[str, Any]], shares: list[float]) -> dict[str, Any]:
    """Return what a step returns beside its loss: rows one after another, numbers averaged."""
    joined = dict(extras[-1])
    for name in joined:
        found = [extra.get(name) for extra in extras]
        tensors = [value for value in found if isinstance(value, torch.Tensor)]
        if len(tensors) < len(found):
            continue
        if all(tensor.dim() for tensor in tensors):
            joined[name] = torch.cat(tensors)
        elif not any(tensor.dim() for tensor in tensors) and tensors[0].is_floating_point():
            joined[name] = _average(torch.stack(tensors), shares)
    return joined


def _average(numbers: torch.Tensor, shares: list[float]) -> torch.Tensor:
    weights = torch.tensor(shares, dtype=torch.float64)
    weights = (weights / weights.sum()).to(numbers.device)
    return (numbers.double() * weights).sum().to(numbers.dtype)
