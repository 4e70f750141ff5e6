"""Finds over what a loss is the mean: over rows, over the labels that it does not skip, or over
neither, as one that compares the rows of a batch with each other. Parts of a batch add up to the
batch only where that is known. It is asked of the loss itself, on rows of the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from headroom.base import nested
from headroom.base.facts import DataFacts
from headroom.base.import_paths import describe_error, is_import_path
from headroom.base.raw_inputs import LABELS
from headroom.data.dataloaders import IGNORED
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import TrainConfig
from headroom.training.losses import load_own_loss
from headroom.training.optimizer_step import Count, count_rows
from headroom.training.state_changes import StateChanges
from headroom.watch.out_of_memory import is_oom

ROWS = 4  # that a loss is asked with: as a whole, and in halves
TOLERANCE = 3e-6  # of the loss: some thirty times what float32 rounds off
Measure = Callable[[Any, Any], Tensor | None]  # the loss of inputs and targets; None: gives none


@dataclass(frozen=True)
class Averaging:
    """Over what a loss is the mean."""

    count: Count | None = None  # as was found by asking it; None: as choose_count knows
    adds_up: bool = True  # whether the loss of a batch is that of its parts; True where not known
    breaks_on_nothing: bool = False  # rows of which nothing counts give gradients that are none


@dataclass(frozen=True)
class LabelCount:
    """Counts the labels that a loss does not skip. is_next: of a model that predicts each next
    label, so that the first of a row does not count."""

    skipped: tuple[int, ...] = (IGNORED,)
    is_next: bool = False

    def __call__(self, x: Any, y: Any) -> Any:
        if y.is_floating_point():
            return len(y)  # probabilities
        labels = y[:, 1:] if self.is_next else y
        is_counted = labels != self.skipped[0]
        for label in self.skipped[1:]:
            is_counted &= labels != label
        return is_counted.sum()


@dataclass(frozen=True)
class TargetCount:
    """Counts by the targets alone, as a `count` of the user's own does."""

    count: Callable[[Any], Any]

    def __call__(self, x: Any, y: Any) -> Any:
        return self.count(y)


def choose_count(train: TrainConfig, data: DataFacts, *, own_count: Count | None = None) -> Count:
    """Return the function that counts what the loss of some rows is the mean of.

    own_count: what find_averaging says of a loss of the user's own or of the model itself, which
    is taken where that has no attribute `count` and is none of PyTorch's.
    """
    if is_import_path(train.loss):
        return find_told_count(load_own_loss(train)) or own_count or count_rows
    if own_count is not None:
        return own_count
    # Only batches of a loader hold labels to be skipped.
    return LabelCount() if data.task == "tokens" and data.batch is not None else count_rows


def find_told_count(loss: Any) -> Count | None:
    """Return what a loss of the user's own tells itself: by its attribute `count`, a function of
    the targets; PyTorch's own need none. None where it tells nothing."""
    count = getattr(loss, "count", None)
    if callable(count):
        return TargetCount(count)
    if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) and loss.reduction == "mean":
        return TargetCount(
            partial(_sum_class_weights, skipped=loss.ignore_index, weights=loss.weight)
        )
    return LabelCount() if loss in (cross_entropy, nll_loss) else None


def _sum_class_weights(targets: Tensor, *, skipped: int, weights: Tensor | None) -> Any:
    """Return what PyTorch's mean divides by: the weights of the classes that are not skipped."""
    if targets.is_floating_point():
        return len(targets)  # probabilities
    is_told = targets != skipped
    if weights is None:
        return is_told.sum()
    return (weights.to(targets.device)[torch.where(is_told, targets, 0)] * is_told).sum()


@torch.no_grad()
def find_averaging(
    measure: Measure,
    x: Any,
    y: Any,
    *,
    own_count: Count | None = None,
    paddings: tuple[int, ...] = (),
    may_skip: bool = True,
) -> Averaging:
    """Find over what a loss is the mean: by the losses of four rows and of their halves, of labels
    as they are and with some of them skipped.

    measure: gives the loss of some rows. x, y: of four rows, as batches hold them, on the host;
    where x has labels, they are y. own_count: as the loss says itself. paddings: labels that the
    model calls so. may_skip: whether labels of the data may be -100. Of a loss that draws random
    numbers, or that cannot be had, nothing is known.
    """
    fitting = [own_count] if own_count else list(_iterate_counts(y, paddings))
    is_asked = False
    for rows in _iterate_samples(x, y, paddings, may_skip):
        halves = nested.split_batch(rows, ROWS // 2, whole=ROWS)
        losses = [_measure(measure, part) for part in (rows, *halves)]
        whole, *parts = losses
        if not math.isfinite(whole):
            continue
        fits = [count for count in fitting if _is_mean(whole, parts, count, halves)]
        if not fits and _measure(measure, rows) != whole:
            return Averaging()  # of another value each time
        fitting, is_asked = fits, True
        if not fitting:
            return Averaging(adds_up=False)
    return Averaging(count=fitting[0]) if is_asked and not own_count else Averaging()


def breaks_on_nothing(
    measure: Measure, x: Any, y: Any, count: Count | None, leaves: Sequence[Tensor]
) -> bool:
    """Return whether the loss of rows of which nothing counts has gradients that are no numbers,
    even where it is multiplied by 0: as one that divides by the labels it counts. leaves: that the
    gradients are of."""
    if count in (None, count_rows) or not _has_labels(y):
        return False
    skipped = count.skipped[-1] if isinstance(count, LabelCount) else IGNORED
    empty = torch.full_like(y, skipped)
    rows = _replace_labels(x, y, empty)
    try:
        assert count is not None
        if float(count(rows, empty)) != 0:
            return False
        with torch.enable_grad():
            loss = measure(rows, empty)
            if loss is None:
                return False
            gradients = torch.autograd.grad(loss * 0, leaves, allow_unused=True)
    except Exception as error:
        if is_oom(error):
            raise
        return False  # such rows may be none of its own
    return not all(
        bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None
    )


def check_told_count(count: Count, y: Any, loss: float, *, path: str) -> None:
    """Raise ConfigError where the `count` of the user's own loss is none. y: of some rows, whose
    loss is `loss`."""
    try:
        counted = float(count(None, y))
    except Exception as error:
        if is_oom(error):
            raise
        problem = f"count of {path}, called with targets, raised: {describe_error(error)}"
    else:
        is_nothing = counted == 0 and math.isfinite(loss) and loss != 0
        if math.isfinite(counted) and counted >= 0 and not is_nothing:
            return
        problem = f"count of {path} gives {counted:g} for rows whose loss is {loss:g}"
    raise ConfigError(
        f"train.loss: {problem}; let it return over how much the loss is the mean, as "
        "lambda targets: (targets != -100).sum()"
    )


def _measure(measure: Measure, rows: tuple[Any, Any]) -> float:
    """Return the loss of a copy of these rows; nan where it gives none, or raises."""
    try:
        loss = measure(*nested.map_tensors(rows, Tensor.clone))
        return math.nan if loss is None else float(loss)
    except Exception as error:
        if is_oom(error):
            raise
        return math.nan  # it was tried before; such rows may be none of its own


def _is_mean(whole: float, losses: list[float], count: Count, parts: list[Any]) -> bool:
    try:
        counts = [float(count(*part)) for part in parts]
    except Exception as error:
        if is_oom(error):
            raise
        return False
    counted = [(n, loss) for n, loss in zip(counts, losses, strict=True) if n]
    if not counted or not all(math.isfinite(loss) for _, loss in counted):
        return False
    expected = sum(n * loss for n, loss in counted) / sum(n for n, _ in counted)
    size = max(abs(whole), *(abs(loss) for _, loss in counted))
    return abs(expected - whole) <= TOLERANCE * size


def _has_labels(y: Any) -> bool:
    """Return whether the targets are whole numbers, of which some may be skipped."""
    return isinstance(y, Tensor) and y.dim() > 0 and not (y.is_floating_point() or y.is_complex())


def _iterate_counts(y: Any, paddings: tuple[int, ...]) -> Iterator[Count]:
    """Yield what a loss may be the mean of: labels before rows, which may be as many."""
    if _has_labels(y) and y.dtype is not torch.bool:
        for is_next in (False, True)[: y.dim()]:
            yield LabelCount((IGNORED,), is_next)
            for label in _list_paddings(y, paddings):
                yield LabelCount((IGNORED, label), is_next)
                yield LabelCount((label,), is_next)
    yield count_rows


def _list_paddings(y: Tensor, paddings: tuple[int, ...]) -> list[int]:
    """Return the labels that may stand for none, beside IGNORED: those of sequences alone."""
    if y.dim() < 2:
        return []
    candidates = {0, int(y.flatten()[-1]), *paddings}
    return sorted(candidates - {IGNORED})


def _iterate_samples(
    x: Any, y: Any, paddings: tuple[int, ...], may_skip: bool
) -> Iterator[tuple[Any, Any]]:
    """Yield the rows, then with labels skipped in the first half that the second half has: else
    the counts of both might be the same."""
    yield x, y
    if not _has_labels(y) or y.dtype is torch.bool or not y.numel():
        return
    most = int(y.max())
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randint(1, max(most, 1) + 1, y.shape, generator=draw).to(y.dtype)
    drawn = torch.where((y == IGNORED) | (y == y.clamp(max=0)), drawn, y)
    if not may_skip:
        yield _replace_labels(x, y, drawn), drawn
        return
    for label in (IGNORED, *_list_paddings(y, paddings)):
        masked = drawn.clone()
        if y.dim() < 2:
            masked[0] = label
        else:
            masked[: ROWS // 2, y.shape[1] // 3 :] = label
        yield _replace_labels(x, y, masked), masked


def _replace_labels(x: Any, y: Tensor, labels: Tensor) -> Any:
    if not isinstance(x, Mapping):
        return x
    return {
        k: labels if k in LABELS and nested.find_shapes(v) == y.shape else v for k, v in x.items()
    }


def warn_of_parts(
    train: TrainConfig,
    averaging: Averaging,
    changes: StateChanges,
    *,
    model: str,
    micro_rows: int,
    eval_rows: int | None,
) -> tuple[str, ...]:
    """Return the warnings of a loss that does not add up, and of state that moves once a pass,
    where batches were taken in parts.

    model: its name. micro_rows: of the smallest part; eval_rows: of the batches of an evaluation,
    None where it is one batch.
    """
    texts: list[str] = []
    if micro_rows < train.batch_size:
        texts += _warn_of_moves(train, changes, model=model, micro_rows=micro_rows)
    if averaging.adds_up:
        return tuple(texts)
    is_own = is_import_path(train.loss)
    who = f"train.loss: {train.loss}" if is_own else f"model.name: the loss that {model} gives"
    if micro_rows < train.batch_size:
        give = "give it an attribute `count` (docs/models.md), or " if is_own else ""
        texts.append(
            f"{who} of a batch is not the mean over its parts, so that micro-batches of "
            f"{micro_rows} rows learnt something else than whole batches would; {give}take batches "
            "that fit whole"
        )
    if eval_rows is not None:
        texts.append(
            f"{who} of all rows is not the mean over their batches: val/loss is that of batches of "
            f"{eval_rows:,} rows; compare it with runs of the same size alone"
        )
    return tuple(texts)


def _warn_of_moves(
    train: TrainConfig, changes: StateChanges, *, model: str, micro_rows: int
) -> Iterator[str]:
    """Yield a warning for the model and for the loss, where they move state in a pass."""
    of = {"": f"model.name: the forward of {model}", "train.loss": f"train.loss: {train.loss}"}
    for owner, who in of.items():
        moved = sorted(slot for slot in changes.lasting if slot[0] == owner)
        names = [".".join(filter(None, slot[1:])) for slot in moved]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        if names:
            yield (
                f"{who} changes {', '.join(names[:3])}{more} in each pass, which is once for each "
                f"micro-batch: those of {micro_rows:,} rows changed it more often than whole "
                "batches would; take batches that fit whole (train.accumulate: 1)"
            )
