"""The account of a training by the Trainer of Hugging Face's transformers:

from headroom.transformers import HeadroomCallback

with HeadroomCallback(run_name="mine") as told:
    Trainer(..., callbacks=[told]).train()
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from transformers import TrainerCallback

from headroom.run.account import Account
from headroom.run.adapter import Adapter

if TYPE_CHECKING:
    from headroom.training.protected_step import ProtectedStep
    from headroom.training.step_passes import Weigh

ASKED = (
    "learning_rate",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "optim",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "seed",
    "bf16",
    "fp16",
    "gradient_checkpointing",
    "world_size",
)
STATE = "headroom"  # of a checkpoint: what it has of the run
OURS = ("train_", "total_", "learning_rate", "epoch")  # of the logs: the account measures them


class HeadroomCallback(Adapter, TrainerCallback):
    """Tells of each `train` in a run of its own. Of several processes, that of rank 0 tells. What
    `evaluate` and `predict` find after a `train` belongs to its run. A callback does not know its
    trainer: `protect` is given it.

    The Trainer has no hook for errors: as a context, this ends the run by the one that leaves it.
    Without, the run of a failed training ends with its cell in a notebook, else when the next one
    begins, or with its program.
    """

    def __init__(self, **arguments: Any) -> None:
        """arguments: what `headroom.account` takes; params beside those of the Trainer."""
        super().__init__(**arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.run is not None:
            self.run.end(error)
            self.run.send_added()

    def protect(self, trainer: Any) -> None:
        """Let a batch of this trainer for which memory runs out go on in parts; see
        `Account.protect`."""
        if not isinstance(getattr(trainer, "training_step", None), _ProtectedTraining):
            trainer.training_step = _ProtectedTraining(self, trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the run: the model is on its device."""
        if not state.is_world_process_zero:
            return
        model = kwargs["model"]
        if state.global_step:  # a checkpoint is gone on from
            named = state.stateful_callbacks.get(STATE)
            self._loaded = {**named, "step": state.global_step} if named else {}
        params = {name: getattr(args, name, None) for name in ASKED}
        params["model"] = getattr(getattr(model, "config", None), "model_type", "")
        run = self._begin(
            params,
            device=args.device,
            model=model,
            optimizer=kwargs["optimizer"],
            run_name=args.run_name or type(model).__name__,
        )
        run.loop.count_rows_of(model)
        self._keep_state(state)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the first batches."""
        if self.run is not None:
            self.run.loop.begin_wait()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a step; its batches are there."""
        if self.run is not None:
            self.run.loop.end_wait(rows=0)
            self.run.loop.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the step; what follows is an evaluation, a checkpoint, or the next wait."""
        if self.run is not None:
            self.run.loop.end_step()
            if control.should_save:
                self._keep_state(state)
            self._follow(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An evaluation and a checkpoint may follow."""
        if control.should_save:
            self._keep_state(state)
        self._follow(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The evaluation is done."""
        if self.run is not None and self.run.loop.stage == "eval":
            self.run.loop.end_phase()
            self._follow(control, is_evaluated=True)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The checkpoint is written."""
        if self.run is not None and self.run.loop.stage == "checkpoint":
            self.run.loop.end_phase()
            self.run.loop.begin_wait()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log what the Trainer logs, as the record names it: eval_loss is val/loss."""
        if self.run is not None:
            logs = {k: v for k, v in kwargs["logs"].items() if not str(k).startswith(OURS)}
            self._log(logs)
            if control.should_save:
                self._keep_state(state)

    def on_predict(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log what a prediction after a `train` has measured: test_loss is test/loss."""
        if self.run is not None:
            self._log(kwargs["metrics"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the run. The state of a training that has ended is the Trainer's alone."""
        state.stateful_callbacks.pop(STATE, None)
        if self.run is not None:
            self.run.end()

    def _keep_state(self, state: Any) -> None:
        """Let the checkpoint that comes name the run, with all before it logged.

        From an `ExportableState` the Trainer makes another callback of its own accord, and one that
        a checkpoint of before lacks ends it by a KeyError.
        """
        if self.run is not None:
            state.stateful_callbacks[STATE] = self._make_state()

    def _follow(self, control: Any, *, is_evaluated: bool = False) -> None:
        if self.run is None or self.run.loop.stage in ("eval", "checkpoint"):
            return
        if control.should_evaluate and not is_evaluated:
            self.run.loop.begin_phase("eval")
        elif control.should_save:
            self.run.loop.begin_phase("checkpoint")
        else:
            self.run.loop.begin_wait()

    def _log(self, metrics: dict[str, Any]) -> None:
        assert self.run is not None
        renamed = {re.sub("^(eval|test)_", _rename, str(k)): v for k, v in metrics.items()}
        renamed = {name if "/" in name else f"train/{name}": v for name, v in renamed.items()}
        self.run.log(renamed, self.run.loop.done)


def _rename(match: re.Match[str]) -> str:
    return "val/" if match[1] == "eval" else "test/"


class _ProtectedTraining:
    """The `training_step` of a trainer, which takes parts of a batch where that does not fit."""

    def __init__(self, callback: HeadroomCallback, trainer: Any) -> None:
        self._callback, self._trainer = callback, trainer
        self._take_step = trainer.training_step
        self._run: Account | None = None  # whose steps are protected
        self._step: ProtectedStep | None = None
        self._given: tuple[Any, ...] = ()
        self._losses: list[Any] = []  # as its own `training_step` has returned them

    def __call__(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        run = self._callback.run
        if run is None or run.run or not run.loop.models:
            return self._take_step(model, inputs, *more, **named)
        if self._step is None or run is not self._run:
            self._run, self._step = run, run.protect_passes(self._take, begin=self._losses.clear)
        self._given = model, more, named
        try:
            self._step(inputs)
            loss = self._losses[0] if len(self._losses) == 1 else sum(self._losses)
            return loss * self._step.factor if self._step.factor != 1.0 else loss
        finally:
            self._given = ()
            self._losses.clear()

    def _take(self, inputs: Any, weigh: Weigh) -> None:
        model, more, named = self._given
        trainer, compute = self._trainer, self._trainer.compute_loss
        own = vars(trainer).get("compute_loss")
        trainer.compute_loss = partial(_weigh_loss, compute, weigh)
        try:
            self._losses.append(self._take_step(model, inputs, *more, **named))
        finally:
            if own is None:
                del trainer.compute_loss
            else:
                trainer.compute_loss = own


def _weigh_loss(compute: Any, weigh: Weigh, *given: Any, **named: Any) -> Any:
    found = compute(*given, **named)
    return (weigh(found[0]), *found[1:]) if isinstance(found, tuple) else weigh(found)
