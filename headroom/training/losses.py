"""Builds the loss of a training, by task or from a function of the user's own, and the user's
own metrics of a validation. A loss is the mean over the rows of a batch, or over what it
counts. It refuses a loss that does not fit what is learnt, and a function that does not return
what training needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    mse_loss,
)

from headroom.base import nested
from headroom.base.facts import DataFacts
from headroom.base.import_paths import describe_error, import_callable, is_import_path
from headroom.models.user_model import TakesLoss
from headroom.settings.model_args import ModelError
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import TrainConfig
from headroom.training.optimizer_step import Loss
from headroom.watch.out_of_memory import is_oom

FITTING = {
    "classification": "cross_entropy",
    "multilabel": "bce",
    "regression": "mse",
    "tokens": "cross_entropy",
    "own": "auto",  # what the model gives
}
OwnMetrics = Mapping[str, Callable[[Any, Any], Any]]


@dataclass(frozen=True)
class WeightedCrossEntropy:
    """Cross entropy in which a row counts as much as its class does; the mean over the rows.

    Not divided by the weights of the rows at hand, as PyTorch's own mean is: then the parts of a
    batch would not add up to the batch.
    """

    weights: Tensor  # (classes,), on the device
    label_smoothing: float = 0.0

    def __call__(self, logits: Tensor, classes: Tensor) -> Tensor:
        summed = cross_entropy(
            logits,
            classes,
            weight=self.weights,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        return summed / len(classes)


def make_loss(
    train: TrainConfig, data: DataFacts, device: torch.device, *, is_judged: bool = False
) -> Loss:
    """Return the loss of this training, or of its evaluations, which smooth no label. Raises
    ConfigError where it does not fit what is learnt."""
    if is_import_path(train.loss):
        return wrap_in_units(load_own_loss(train), data, device)
    args, fits = train.cross_entropy, FITTING[data.task]
    smoothing = 0.0 if is_judged else args.label_smoothing
    if smoothing and fits != "cross_entropy":
        raise ConfigError(
            f"train.loss_args.label_smoothing: is for cross_entropy (this is {fits}); drop it"
        )
    if train.loss not in ("auto", fits):
        raise ConfigError(
            f"train.loss: {train.loss} does not fit {data.task}; use "
            f"{' or '.join(dict.fromkeys(('auto', fits)))}, or a function of your own"
        )
    if args.class_weights == "balanced":
        weights = torch.tensor(_compute_balanced_weights(data), device=device)
        return WeightedCrossEntropy(weights, smoothing)
    losses: dict[str, Loss] = {
        "cross_entropy": compute_token_loss if data.task == "tokens" else cross_entropy,
        "bce": binary_cross_entropy_with_logits,
        "mse": mse_loss,
        "auto": _refuse_no_loss,
    }
    smoothed: Any = losses[fits]
    return partial(smoothed, label_smoothing=smoothing) if smoothing else losses[fits]


def load_own_loss(train: TrainConfig) -> Callable[..., Any]:
    """Return the loss of the user's own, which is called with train.loss_args. Raises
    ConfigError."""
    own = import_callable(train.loss, setting="train.loss", refusal=ConfigError)
    if not train.loss_args:
        return own
    _refuse_unknown_arguments(own, train)
    loss = partial(own, **train.loss_args)
    if hasattr(own, "count"):
        loss.count = own.count  # type: ignore[attr-defined]
    return loss


def _refuse_unknown_arguments(own: Callable[..., Any], train: TrainConfig) -> None:
    try:
        takes = inspect.signature(own).parameters
    except (ValueError, TypeError):  # of what is not Python: the call says what it takes
        return
    names = [*takes][2:]
    if any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        return
    for name in train.loss_args:
        if name not in names:
            others = f"none of this name, but {', '.join(names)}" if names else "no arguments"
            raise ConfigError(f"train.loss_args.{name}: {train.loss} takes {others}; drop it")


@dataclass(frozen=True)
class _UnscaledFunction:
    """A function of the user's own, given outputs and targets in the units of a regression's
    target, as the logged model predicts them."""

    function: Callable[[Any, Any], Any]
    offset: Tensor
    scale: Tensor
    log: Tensor | None  # units, where the logarithm is learnt; see DataFacts.target_log

    def __call__(self, outputs: Tensor, targets: Tensor) -> Any:
        return self.function(
            self._convert_to_units(outputs.float()), self._convert_to_units(targets)
        )

    def _convert_to_units(self, values: Tensor) -> Tensor:
        amounts = values * self.scale + self.offset
        # A power of e above 80 is no float32; most targets end long before.
        return amounts if self.log is None else amounts.clamp(max=80.0).expm1() * self.log


def wrap_in_units(
    function: Callable[[Any, Any], Any], data: DataFacts, device: torch.device
) -> Callable[[Any, Any], Any]:
    """Wrap the user's function so that it gets outputs and targets in the target's own units,
    whatever scaling the training uses."""
    if (set(data.target_offset), set(data.target_scale)) == ({0.0}, {1.0}) and not data.target_log:
        return function
    offset, scale, log = (
        torch.tensor(of, dtype=torch.float32, device=device)
        for of in (data.target_offset, data.target_scale, data.target_log)
    )
    return _UnscaledFunction(function, offset, scale, log if data.target_log else None)


def find_own_loss(train: TrainConfig, data: DataFacts) -> TakesLoss:
    """Return whether a loss that the model returns itself is the one that counts."""
    if train.loss != "auto" or train.cross_entropy.class_weights != "none":
        return TakesLoss.NEVER
    return TakesLoss.ALWAYS if data.task == "own" else TakesLoss.WITH_LABELS


def _refuse_no_loss(outputs: Any, targets: Any) -> Tensor:
    raise ModelError(
        "model.name: it gave no loss, where its own is the only one; return one in each call"
    )


def compute_token_loss(logits: Tensor, tokens: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Compute the cross entropy over all tokens.

    logits: (rows, context, vocabulary); tokens: (rows, context) int64.
    """
    flat = logits.flatten(0, 1), tokens.flatten()
    return cross_entropy(*flat, label_smoothing=label_smoothing)


def _compute_balanced_weights(data: DataFacts) -> list[float]:
    """rows / (classes * rows of the class), which scikit-learn calls "balanced"."""
    rule = "train.loss_args.class_weights: balanced"
    if data.task != "classification":
        raise ConfigError(f"{rule} needs a classification, and this is {data.task}; drop it")
    if data.class_rows is None or min(data.class_rows) < 1:
        raise ConfigError(
            f"{rule} needs the rows of each class, which a loader does not tell; drop it, and give "
            "a train.loss of your own or a sampler to the loader"
        )
    rows, classes = sum(data.class_rows), len(data.class_rows)
    return [rows / (classes * many) for many in data.class_rows]


def load_own_metrics(train: TrainConfig) -> OwnMetrics:
    """Return the user's own metrics by name. Raises ConfigError."""
    return {name: _OwnMetric(f"train.metrics.{name}", path) for name, path in train.metrics.items()}


def find_own_functions(train: TrainConfig) -> dict[str, Any]:
    """Return loss and metrics of the user's own, by their settings. Raises ConfigError."""
    own = {"train.loss": train.loss} if is_import_path(train.loss) else {}
    own |= {f"train.metrics.{name}": path for name, path in train.metrics.items()}
    return {
        setting: import_callable(path, setting=setting, refusal=ConfigError)
        for setting, path in own.items()
    }


class _OwnMetric:
    """A figure of the user's own; what it raises is told under its setting."""

    def __init__(self, setting: str, path: str) -> None:
        self._setting, self._path = setting, path
        self._figure = import_callable(path, setting=setting, refusal=ConfigError)

    def __call__(self, outputs: Tensor, targets: Any) -> Any:
        return _call_own(self._figure, outputs, targets, self._setting, self._path)


def check_loss(train: TrainConfig, loss: Loss, outputs: Tensor, targets: Any) -> bool:
    """Try the user's loss and metrics on the outputs of two rows; return whether one of them
    writes to these. Raises ConfigError."""
    writes = False
    if is_import_path(train.loss):
        outputs_copy = outputs.detach().requires_grad_().clone()  # no leaf, as in a training
        got = _call_own(loss, outputs_copy, targets, "train.loss", train.loss)
        writes |= outputs_copy._version > 0
        if not isinstance(got, Tensor) or got.dim() or not got.is_floating_point():
            raise ConfigError(
                f"train.loss: {train.loss} must return one number in a tensor, the mean over the "
                f"rows (got {_describe_result(got)})"
            )
        if not got.requires_grad:
            raise ConfigError(
                f"train.loss: {train.loss} returns a tensor without a gradient; compute it from "
                "the outputs, without detach(), item() or numpy"
            )
    for name, metric in load_own_metrics(train).items():
        setting, path = f"train.metrics.{name}", train.metrics[name]
        outputs_copy = outputs.detach().clone()
        got = metric(outputs_copy, targets)
        writes |= outputs_copy._version > 0
        single = isinstance(got, Tensor) and got.numel() == 1
        if isinstance(got, bool) or not (single or isinstance(got, (int, float))):
            raise ConfigError(
                f"{setting}: {path} must return one number, the mean over the rows "
                f"(got {_describe_result(got)})"
            )
    return writes


def _call_own(
    function: Callable[[Any, Any], Any], outputs: Tensor, targets: Any, setting: str, path: str
) -> Any:
    try:
        return function(outputs, targets)
    except Exception as error:
        if is_oom(error):
            raise
        problem = (
            f"{setting}: {path}, called with outputs {_describe_result(outputs)} and targets "
            f"{_describe_result(targets)}, raised: {describe_error(error)}"
        )
    raise ConfigError(problem)


def _describe_result(got: Any) -> str:
    if isinstance(got, Tensor):
        return f"a {str(got.dtype).removeprefix('torch.')} tensor of shape {tuple(got.shape)}"
    return f"a {type(got).__name__}"


RowSums = tuple[tuple[str, Tensor], ...]  # of each row, by the name of the entry


@dataclass
class WatchedLoss:
    """A loss of the user's own that keeps the sum of the outputs of each call. Nothing is kept
    while it is compiled."""

    path: str
    loss: Loss
    kept: list[tuple[str, Tensor]]

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        if isinstance(outputs, Tensor) and not torch.compiler.is_compiling():
            self.kept.append((self.path, outputs.detach().sum()))
        return self.loss(outputs, targets)


@dataclass(frozen=True)
class NanOrigin:
    """The sums of one step. rows: sums of a batch's rows; outputs: what a WatchedLoss has
    kept."""

    rows: RowSums = ()
    outputs: RowSums = ()

    def find_blame(self) -> tuple[str, str] | None:
        """Return the setting to blame and the sentence about it; None where neither is. Waits
        for the device."""
        for name, sums in self.rows:
            bad = (~sums.isfinite()).nonzero()
            if len(bad):
                return "data.source", (
                    f"{name} holds a number there that is not finite, in row {int(bad[0]) + 1} of "
                    "that step's batch: mend or drop such rows"
                )
        if self.outputs and all(bool(total.isfinite()) for _, total in self.outputs):
            return "train.loss", (
                f"{self.outputs[0][0]} gave it for outputs and targets that are finite: look there "
                "for a division by 0, a log or a root of less"
            )
        return None


NO_ORIGIN = NanOrigin()


def sum_rows(x: Any, y: Any) -> RowSums:
    """Return the sum of each row of each entry with floating-point numbers: finite where all
    are."""
    return tuple(_iterate_sums(x, "inputs")) + tuple(_iterate_sums(y, "targets"))


def _iterate_sums(part: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    for path, tensor in nested.find_named_tensors(part, name):
        if tensor.is_floating_point() and tensor.dim() and tensor.layout is torch.strided:
            wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
            yield path, tensor.detach().unsqueeze(-1).flatten(1).sum(1, dtype=wide)
