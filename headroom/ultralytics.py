"""The account of a training by ultralytics' YOLO:

from headroom.ultralytics import HeadroomCallback

model = YOLO("yolo11n.pt")
HeadroomCallback(run_name="mine").add_to(model)
model.train(data="coco8.yaml")
"""

from __future__ import annotations

import json
import sys
from typing import Any

from headroom.base.event_log import read_json
from headroom.run.adapter import Adapter

STATE = "headroom.json"  # beside last.pt: what a resumed training has of its run
ASKED = (
    "model",
    "data",
    "epochs",
    "batch",
    "imgsz",
    "optimizer",
    "lr0",
    "lrf",
    "momentum",
    "weight_decay",
    "warmup_epochs",
    "nbs",
    "amp",
    "seed",
)


class HeadroomCallback(Adapter):
    """Tells of each `train` in a run of its own, on one device: where ultralytics starts processes
    for several, it takes no callbacks along."""

    def __init__(self, **arguments: Any) -> None:
        """arguments: what `headroom.account` takes; params beside those of the trainer."""
        super().__init__(**arguments)
        self._is_done = False

    def add_to(self, model: Any) -> None:
        """Let this model, of `ultralytics.YOLO` or the like, call back."""
        for name in dir(self):
            if name.startswith("on_") or name == "teardown":
                model.add_callback(name, getattr(self, name))

    def on_train_start(self, trainer: Any) -> None:
        """Begin the run: the model is on its device, with its optimizer."""
        params = {name: getattr(trainer.args, name, None) for name in ASKED}
        self._is_done = False
        if trainer.resume:
            self._loaded = read_json(trainer.wdir / STATE)
        run = self._begin(
            params,
            device=trainer.device,
            model=trainer.model,
            optimizer=trainer.optimizer,
            run_name=trainer.args.name,
        )
        run.loop.count_rows_of(trainer.model)

    def on_train_epoch_start(self, trainer: Any) -> None:
        """Wait for the first batch."""
        if self.run is not None:
            self.run.loop.drop_step()  # of a batch that found no memory, and is made smaller now
            self.run.loop.begin_wait()

    def on_train_batch_start(self, trainer: Any) -> None:
        """Begin a step, or a part of one whose gradients are accumulated."""
        if self.run is not None:
            self.run.loop.end_wait(rows=0)
            self.run.loop.begin_step()

    def on_train_batch_end(self, trainer: Any) -> None:
        """End the step, if it was one, and wait for the next batch."""
        if self.run is not None:
            if self.run.loop.has_updated:
                self.run.loop.end_step()
            self.run.loop.begin_wait()

    def on_train_epoch_end(self, trainer: Any) -> None:
        """A validation follows."""
        self._follow("eval")

    def on_val_start(self, validator: Any) -> None:
        """That, or one after the last epoch."""
        self._follow("eval")

    def on_val_end(self, validator: Any) -> None:
        """A checkpoint is written next."""
        self._follow("checkpoint")

    def on_model_save(self, trainer: Any) -> None:
        """Keep beside the checkpoint which run it is of."""
        if self.run is not None:
            (trainer.wdir / STATE).write_text(json.dumps(self._make_state()))

    def on_fit_epoch_end(self, trainer: Any) -> None:
        """Log what the epoch found, as the record names it: train/... and val/... are its own."""
        self._follow("")
        if self.run is not None:
            losses = trainer.label_loss_items(trainer.tloss, prefix="train")
            metrics = {**losses, **trainer.metrics}
            renamed = {name.translate({40: None, 41: None}): v for name, v in metrics.items()}
            self.run.log(renamed, self.run.loop.done)

    def on_train_end(self, trainer: Any) -> None:
        """The training came to its end."""
        self._is_done = True

    def teardown(self, trainer: Any) -> None:
        """End the run: by the error that ends the training, if one does."""
        if self.run is not None:
            self.run.end(None if self._is_done else sys.exc_info()[1])

    def _follow(self, phase: str) -> None:
        if self.run is None or self._is_done:
            return
        if self.run.loop.stage in ("eval", "checkpoint"):
            self.run.loop.end_phase()
        if phase:
            self.run.loop.begin_phase(phase)
