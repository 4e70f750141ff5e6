"""The account of a training by Lightning:

from headroom.lightning import HeadroomCallback

Trainer(callbacks=[HeadroomCallback(run_name="mine")]).fit(module, loader)
"""

from __future__ import annotations

import re
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from headroom.process.signals import Terminated
from headroom.run.adapter import Adapter

STATE = "headroom"  # of a checkpoint: what each callback has of its run
ASKED = ("max_epochs", "max_steps", "precision", "accumulate_grad_batches", "gradient_clip_val")


class HeadroomCallback(Adapter, Callback):
    """Tells of each `fit` in a run of its own. Of several processes, that of rank 0 tells. What
    `validate` and `test` find after a `fit` belongs to its run."""

    def __init__(self, **arguments: Any) -> None:
        """arguments: what `headroom.account` takes; params beside those of the module's `hparams`
        and the Trainer."""
        super().__init__(**arguments)
        self._seen: dict[str, Any] = {}  # metrics as they were logged last

    def __getstate__(self) -> dict[str, Any]:
        # Lightning gives its callbacks these methods of the module at `fit`, and again.
        kept = {k: v for k, v in super().__getstate__().items() if k not in ("log", "log_dict")}
        return {**kept, "_seen": {}}

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
        if self.run is None:
            return
        # No state of a callback: two of these would need two keys, which a restart may change.
        checkpoint.setdefault(STATE, []).append(self._make_state())
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
            self.run.end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """End the run by this error."""
        if self.run is not None:
            is_signal = isinstance(exception, SIGTERMException)
            self.run.end(Terminated(143) if is_signal else exception)

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
