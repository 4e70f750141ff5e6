"""What a model is trained to make small, by task or by a function of the user's own: the mean over
the rows of a batch, or over what it says; and the user's own figures of a validation. It refuses a
loss that does not fit what is learnt, and a function that does not give what training needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    mse_loss,
    nll_loss,
)

from tasks.engine.base import nested
from tasks.engine.base.facts import DataFacts
from tasks.engine.base.field_types import is_import
from tasks.engine.base.import_paths import found, told_of
from tasks.engine.batches.loader_targets import IGNORED
from tasks.engine.memory.memory_meter import is_oom
from tasks.engine.models.model_call import Forward
from tasks.engine.settings.read_settings import ConfigError
from tasks.engine.settings.run_config import TrainConfig
from tasks.engine.step.optimizer_step import Count, Loss, count_rows

FITTING = {
    "classification": "cross_entropy",
    "multilabel": "bce",
    "regression": "mse",
    "tokens": "cross_entropy",
}
FIGURES = ("loss", "accuracy", "f1", "r2", "mae", "perplexity")  # val/... of the tasks themselves
Metrics = Mapping[str, Callable[[Any, Any], Any]]


@dataclass(frozen=True)
class Weighted:
    """Cross entropy in which a row counts as much as its class does; the mean over the rows.

    Not divided by the weights of the rows at hand, as PyTorch's own mean is: then the parts of a
    batch would not add up to the batch.
    """

    weights: Tensor  # (classes,), on the device

    def __call__(self, logits: Tensor, classes: Tensor) -> Tensor:
        return cross_entropy(logits, classes, weight=self.weights, reduction="sum") / len(classes)


def loss_of(train: TrainConfig, data: DataFacts, device: torch.device) -> Loss:
    """The loss of this training. Raises ConfigError where it does not fit what is learnt."""
    if is_import(train.loss):
        if train.class_weights != "none":
            raise ConfigError(
                f"train.class_weights: has no meaning with a loss of your own ({train.loss}); drop "
                "it, and weigh the classes there"
            )
        own = found(train.loss, setting="train.loss", refusal=ConfigError)
        return in_units(own, data, device)
    fits = FITTING[data.task]
    if train.loss not in ("auto", fits):
        raise ConfigError(
            f"train.loss: {train.loss} does not fit {data.task}; use auto or {fits}, or a function "
            "of your own"
        )
    if train.class_weights == "balanced":
        return Weighted(torch.tensor(_balanced(data), device=device))
    losses: dict[str, Loss] = {
        "cross_entropy": next_token if data.task == "tokens" else cross_entropy,
        "bce": binary_cross_entropy_with_logits,
        "mse": mse_loss,
    }
    return losses[fits]


def count_of(train: TrainConfig, data: DataFacts, *, of_labels: Count | None = None) -> Count:
    """Over what the loss of some rows is the mean. of_labels: the same of a loss that the model
    gives itself; see find_label_count."""
    if is_import(train.loss):
        own = found(train.loss, setting="train.loss", refusal=ConfigError)
        return _count_of_own(own)
    if gives_own_loss(train) and of_labels is not None:
        return of_labels
    # Only batches of a loader hold labels to be skipped.
    return count_labels if data.task == "tokens" and data.batch is not None else count_rows


def _count_of_own(loss: Any) -> Count:
    """By its attribute `count`, a function of the targets; PyTorch's own need none."""
    count = getattr(loss, "count", None)
    if callable(count):
        return _OfTargets(count)
    if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) and loss.reduction == "mean":
        return _OfTargets(partial(_weigh, skipped=loss.ignore_index, weights=loss.weight))
    return count_labels if loss in (cross_entropy, nll_loss) else count_rows


@dataclass(frozen=True)
class _OfTargets:
    """Counts by the targets alone."""

    count: Callable[[Any], Any]

    def __call__(self, x: Any, y: Any) -> Any:
        return self.count(y)


def _weigh(targets: Tensor, *, skipped: int, weights: Tensor | None) -> Any:
    """What PyTorch's mean divides by: the weights of the classes that are not skipped."""
    if targets.is_floating_point():
        return len(targets)  # probabilities
    is_told = targets != skipped
    if weights is None:
        return is_told.sum()
    return (weights.to(targets.device)[torch.where(is_told, targets, 0)] * is_told).sum()


def count_labels(x: Any, y: Any) -> Any:
    """Labels that are not skipped."""
    return (y != IGNORED).sum() if not y.is_floating_point() else len(y)


def count_next_labels(x: Any, y: Any) -> Any:
    """The same of a model that predicts each next label, so that the first of a row is not told."""
    return (y[:, 1:] != IGNORED).sum()


@torch.no_grad()
def find_label_count(forward: Forward, x: Any, y: Any) -> Count | None:
    """Over what a model's own loss is the mean, found by the losses of two rows with labels that
    are skipped: together, and one by one. None where it gives none, or where no rule fits.

    x, y: two rows as batches hold them, labels in x, on the host. Evaluates the model.
    """
    if not (isinstance(y, Tensor) and y.dim() == 2 and y.shape[1] > 3 and not _is_real(y)):
        return None
    labels = torch.zeros_like(y)
    labels[1] = 1
    labels[1, : y.shape[1] // 2] = IGNORED
    batch = {**x, "labels": labels}
    parts = nested.split((batch, labels), 1, whole=2)
    losses = [forward(part)[1] for part, _ in ((batch, labels), *parts)]
    if any(loss is None for loss in losses):
        return None
    whole, one, other = (float(loss) for loss in losses if loss is not None)
    if abs(one - other) < 1e-5 * abs(whole):
        return None
    for count in (count_rows, count_labels, count_next_labels):
        a, b = (float(count(*part)) for part in parts)
        if abs((a * one + b * other) / (a + b) - whole) <= 1e-5 * abs(whole):
            return count
    return None


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@dataclass(frozen=True)
class _InUnits:
    """A function of the user's own, given outputs and targets in the units of a regression's
    target, as the logged model predicts them."""

    function: Callable[[Any, Any], Any]
    offset: Tensor
    scale: Tensor
    log: Tensor | None  # units, where the logarithm is learnt; see DataFacts.target_log

    def __call__(self, outputs: Tensor, targets: Tensor) -> Any:
        return self.function(self._in_units(outputs.float()), self._in_units(targets))

    def _in_units(self, values: Tensor) -> Tensor:
        amounts = values * self.scale + self.offset
        # A power of e above 80 is no float32; most targets end long before.
        return amounts if self.log is None else amounts.clamp(max=80.0).expm1() * self.log


def in_units(
    function: Callable[[Any, Any], Any], data: DataFacts, device: torch.device
) -> Callable[[Any, Any], Any]:
    """The user's function, which sees nothing of how the target was scaled for the training."""
    if (set(data.target_offset), set(data.target_scale)) == ({0.0}, {1.0}) and not data.target_log:
        return function
    offset, scale, log = (
        torch.tensor(of, dtype=torch.float32, device=device)
        for of in (data.target_offset, data.target_scale, data.target_log)
    )
    return _InUnits(function, offset, scale, log if data.target_log else None)


def gives_own_loss(train: TrainConfig) -> bool:
    """Whether a loss that the model returns itself is the one that counts."""
    return train.loss == "auto" and train.class_weights == "none"


def next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross entropy over all tokens.

    logits: (rows, context, vocabulary); tokens: (rows, context) int64.
    """
    return cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _balanced(data: DataFacts) -> list[float]:
    """rows / (classes * rows of the class), which scikit-learn calls "balanced"."""
    rule = "train.class_weights: balanced"
    if data.task != "classification":
        raise ConfigError(f"{rule} needs a classification, and this is {data.task}; drop it")
    if data.class_rows is None or min(data.class_rows) < 1:
        raise ConfigError(
            f"{rule} needs the rows of each class, which a loader does not tell; drop it, and give "
            "a train.loss of your own or a sampler to the loader"
        )
    rows, classes = sum(data.class_rows), len(data.class_rows)
    return [rows / (classes * many) for many in data.class_rows]


def metrics_of(train: TrainConfig) -> Metrics:
    """The user's own figures by name. Raises ConfigError."""
    for name in train.metrics:
        if name in FIGURES:
            raise ConfigError(
                f"train.metrics: {name!r} is the name of a figure of the task itself; give yours "
                "another"
            )
    return {name: _Own(f"train.metrics.{name}", path) for name, path in train.metrics.items()}


class _Own:
    """A figure of the user's own; what it raises is told under its setting."""

    def __init__(self, setting: str, path: str) -> None:
        self._setting, self._path = setting, path
        self._figure = found(path, setting=setting, refusal=ConfigError)

    def __call__(self, outputs: Tensor, targets: Any) -> Any:
        return _tried(self._figure, outputs, targets, self._setting, self._path)


def check_loss(train: TrainConfig, loss: Loss, outputs: Tensor, targets: Any) -> bool:
    """Try the user's loss and metrics on the outputs of two rows; whether one of them writes to
    these. Raises ConfigError."""
    writes = False
    if is_import(train.loss):
        given = outputs.detach().requires_grad_().clone()  # no leaf, as in a training
        got = _tried(loss, given, targets, "train.loss", train.loss)
        writes |= given._version > 0
        if not isinstance(got, Tensor) or got.dim() or not got.is_floating_point():
            raise ConfigError(
                f"train.loss: {train.loss} must return one number in a tensor, the mean over the "
                f"rows (got {_shown(got)})"
            )
        if not got.requires_grad:
            raise ConfigError(
                f"train.loss: {train.loss} returns a tensor without a gradient; compute it from "
                "the outputs, without detach(), item() or numpy"
            )
    for name, metric in metrics_of(train).items():
        setting, path = f"train.metrics.{name}", train.metrics[name]
        given = outputs.detach().clone()
        got = metric(given, targets)
        writes |= given._version > 0
        single = isinstance(got, Tensor) and got.numel() == 1
        if isinstance(got, bool) or not (single or isinstance(got, (int, float))):
            raise ConfigError(
                f"{setting}: {path} must return one number, the mean over the rows "
                f"(got {_shown(got)})"
            )
    return writes


@torch.no_grad()
def adds_up(train: TrainConfig, loss: Loss, count: Count, outputs: Tensor, targets: Any) -> bool:
    """Whether the user's loss of four rows is what those of their halves make, each weighed by what
    it is the mean of; also where that can't be told, as of a loss that draws random numbers.

    outputs, targets: of two rows; numbers are drawn in their shapes.
    """
    if not is_import(train.loss):
        return True
    draw = torch.Generator().manual_seed(0)

    def drawn(tensor: Tensor) -> Tensor:
        shape = (4, *tensor.shape[1:])
        if tensor.is_floating_point():
            return torch.rand(shape, generator=draw, dtype=tensor.dtype)
        return torch.randint(min(2, outputs.shape[-1]), shape, generator=draw).to(tensor.dtype)

    rows = drawn(outputs.cpu()), nested.mapped(targets, drawn)
    halves = nested.split(rows, 2, whole=4)
    try:
        whole, again, *parts = (
            float(loss(nested.mapped(x, Tensor.clone), nested.mapped(y, Tensor.clone)))
            for x, y in (rows, rows, *halves)
        )
        counts = [float(count(None, y)) for _, y in halves]
        expected = sum(n * part for n, part in zip(counts, parts, strict=True)) / sum(counts)
    except Exception as error:
        if is_oom(error):
            raise
        return True  # it was tried on two rows before; numbers like these may be none of its own
    is_known = whole == again and math.isfinite(whole) and math.isfinite(expected)
    return not is_known or abs(expected - whole) <= 1e-3 * max(abs(whole), 1e-3)


def warn_of_parts(train: TrainConfig, *, is_sum: bool, micro_rows: int) -> tuple[str, ...]:
    """What to doubt where batches were taken in parts. is_sum: see adds_up; micro_rows: of the
    smallest part."""
    if is_sum or micro_rows >= train.batch_size:
        return ()
    return (
        f"train.loss: {train.loss} of a batch is not the mean over its parts, so that "
        f"micro-batches of {micro_rows} rows learnt something else than whole batches would; give "
        "it an attribute `count` (docs/models.md), or take batches that fit whole",
    )


def _tried(
    function: Callable[[Any, Any], Any], outputs: Tensor, targets: Any, setting: str, path: str
) -> Any:
    try:
        return function(outputs, targets)
    except Exception as error:
        if is_oom(error):
            raise
        told = f"{setting}: {path}, called with outputs and targets, raised: {told_of(error)}"
    raise ConfigError(told)


def _shown(got: Any) -> str:
    if isinstance(got, Tensor):
        return f"a {str(got.dtype).removeprefix('torch.')} tensor of shape {tuple(got.shape)}"
    return f"a {type(got).__name__}"
