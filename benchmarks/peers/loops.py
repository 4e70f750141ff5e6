"""The loops that a user writes by hand: the tutorial's, the one that a careful user tunes, and the
same with its whole step captured as a CUDA graph. Each trains a trial and returns its reading.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.trial import Reading, Span, Trial, loss, tracked
from headroom.base.seeds import seed_everything


def tutorial(trial: Trial) -> Reading:
    """DataLoader and AdamW as they come, the loss read each step and logged every few."""
    device, span, autocast = trial.target, Span(trial), trial.autocast()
    batch, log_every = trial.config.train.batch_size, trial.config.train.log_every
    loader = DataLoader(TensorDataset(*trial.rows()), batch_size=batch, shuffle=True)
    model = trial.module()
    optimizer = torch.optim.AdamW(model.parameters(), **trial.adamw)
    running = 0.0
    with tracked(trial.tracking_uri) as log_metric:
        for step, (inputs, labels) in enumerate(span.timed(lambda: loader), start=1):
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            with autocast():
                error = loss(model(inputs), labels)
            error.backward()
            optimizer.step()
            running += error.item()
            if step % log_every == 0:
                log_metric("train/loss", running / log_every, step)
                running = 0.0
    return span.reading()


def tuned(trial: Trial) -> Reading:
    """Rows on the device, batches taken there, the fused optimizer, no wait and no tracking; model
    and loss compiled together where the settings ask for it."""
    span, autocast = Span(trial), trial.autocast()
    x, y, model = _on_device(trial)
    is_compiled = trial.config.train.compile == "default"

    def compute(inputs: Tensor, targets: Tensor) -> Tensor:
        return loss(model(inputs), targets)

    objective = torch.compile(compute) if is_compiled else compute
    optimizer = torch.optim.AdamW(model.parameters(), **trial.adamw, fused=True)
    with seed_everything(trial.config.train.seed, deterministic=False):
        for chosen in span.timed(lambda: _shuffled(x, trial)):
            optimizer.zero_grad(set_to_none=True)
            with autocast():
                error = objective(x[chosen], y[chosen])
            error.backward()
            optimizer.step()
    reading = span.reading()
    return replace(reading, how=f"{reading.how}, compiled") if is_compiled else reading


def graphed(trial: Trial) -> Reading:
    """The tuned loop, each step one replay of a CUDA graph. All batches must be of one size.

    Warm-up on a side stream and capture: https://docs.pytorch.org/docs/stable/notes/cuda.html
    """
    span, autocast = Span(trial), trial.autocast()
    x, y, model = _on_device(trial)
    optimizer = torch.optim.AdamW(model.parameters(), **trial.adamw, fused=True, capturable=True)
    batch = trial.config.train.batch_size
    inputs, targets = x[:batch].clone(), y[:batch].clone()

    def take_step() -> None:
        with autocast():
            error = loss(model(inputs), targets)
        error.backward()
        optimizer.step()

    with seed_everything(trial.config.train.seed, deterministic=False):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                optimizer.zero_grad(set_to_none=True)
                take_step()
        torch.cuda.current_stream().wait_stream(side)
        optimizer.zero_grad(set_to_none=True)  # the graph keeps its gradients in its own memory
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            take_step()
        for chosen in span.timed(lambda: _shuffled(x, trial)):
            torch.index_select(x, 0, chosen, out=inputs)
            torch.index_select(y, 0, chosen, out=targets)
            graph.replay()
    return span.reading()


def _on_device(trial: Trial) -> tuple[Tensor, Tensor, nn.Module]:
    x, y = (part.to(trial.target) for part in trial.rows())
    model = trial.module()
    if x.ndim < 4:
        return x, y, model
    # Images channels last: what convolutions are fastest on, on a CPU and on tensor cores.
    last = torch.channels_last
    return x.to(memory_format=last), y, model.to(memory_format=last)  # type: ignore[call-overload]


def _shuffled(x: Tensor, trial: Trial) -> Iterable[Tensor]:
    return torch.randperm(len(x), device=x.device).split(trial.config.train.batch_size)
