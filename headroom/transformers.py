"""The account of a training by the Trainer of Hugging Face's transformers:

from headroom.transformers import HeadroomCallback

with HeadroomCallback(run_name="mine") as told:
    Trainer(..., callbacks=[told]).train()
"""

from __future__ import annotations

import re
from typing import Any, Self

from transformers import TrainerCallback

from headroom.run.adapter import Adapter

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
    `evaluate` and `predict` find after a `train` belongs to its run.

    The Trainer has no hook for errors: as a context, this ends the run by the one that leaves it.
    Without, the run of a failed training ends when the next one begins, or with its program.
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
        """End the run."""
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
