"""Accelerate's documented loop with its MLflow tracker. Trains a trial and returns its reading.

https://huggingface.co/docs/accelerate/basic_tutorials/migration
"""

from __future__ import annotations

import importlib

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.trial import Reading, Span, Trial, loss

PRECISIONS = {"fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16"}


def accelerate(trial: Trial) -> Reading:
    """The loss is logged, and so waited for, as often as by everybody."""
    span = Span(trial)
    batch, log_every = trial.config.train.batch_size, trial.config.train.log_every
    tracking = trial.tracking_uri is not None
    accelerator = Accelerator(
        cpu=trial.target.type == "cpu",
        mixed_precision=PRECISIONS[trial.precision],
        log_with="mlflow" if tracking else None,
    )
    if tracking:
        mlflow = importlib.import_module("mlflow")  # absent where nobody tracks
        mlflow.set_tracking_uri(trial.tracking_uri)
        accelerator.init_trackers("accelerate")
    model = trial.module()
    optimizer = torch.optim.AdamW(model.parameters(), **trial.adamw)
    loader = DataLoader(TensorDataset(*trial.rows()), batch_size=batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for step, (inputs, labels) in enumerate(span.timed(lambda: loader), start=1):
        optimizer.zero_grad()
        with accelerator.autocast():
            error = loss(model(inputs), labels)
        accelerator.backward(error)
        optimizer.step()
        if step % log_every == 0:
            accelerator.log({"train/loss": error.item()}, step=step)
    if tracking:
        accelerator.end_training()
    return span.reading()
