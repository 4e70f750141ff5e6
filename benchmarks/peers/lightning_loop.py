"""Lightning's Trainer with its MLFlowLogger, everything that it could leave out left out: progress
bar, checkpoints, model summary. Trains a trial and returns its reading.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import MLFlowLogger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.trial import Reading, Span, Trial, loss

PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class _Module(LightningModule):
    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self.model = trial.module()
        self._trial = trial

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        # -1 ends the epoch: the first one is for warm-up.
        return -1 if self.current_epoch == 0 and batch_idx == self._trial.warm_up else None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        error = loss(self.model(inputs), labels)
        self.log("train/loss", error)
        return error

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **self._trial.adamw)


class _Clock(Callback):
    """Marks the begin and the end of the second epoch."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            self._span.mark()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            self._span.mark()


def lightning(trial: Trial) -> Reading:
    """One fit of two epochs, the first cut short."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    span = Span(trial)
    is_tracked = trial.tracking_uri is not None
    trainer = Trainer(
        accelerator=trial.target.type,
        devices=1,
        precision=PRECISIONS[trial.precision],
        max_epochs=2,
        logger=is_tracked and MLFlowLogger("lightning", tracking_uri=trial.tracking_uri),
        log_every_n_steps=trial.config.train.log_every,
        callbacks=[_Clock(span)],
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    batch = trial.config.train.batch_size
    loader = DataLoader(TensorDataset(*trial.rows()), batch_size=batch, shuffle=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on workers, which pay for larger rows only
        trainer.fit(_Module(trial), loader)
    return span.reading()
