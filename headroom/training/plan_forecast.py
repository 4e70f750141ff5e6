"""The forecast of a training of ours, by its plan: two steps of the real model with its optimizer,
on batches as its rows will give them, one evaluation and, where steps may be replayed, a recorded
one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headroom.base import nested
from headroom.base.facts import DataFacts
from headroom.base.import_paths import describe_error, is_import_path
from headroom.base.python_state import keep_python_state
from headroom.base.scores import KeptRows, shrink_classes
from headroom.data.batch import Batch
from headroom.data.dataset_batches import (
    BLOCK_BYTES,
    RESIDENT_SHARE,
    TRAIN_SHARE,
    VAL_SHARE,
    choose_layout,
)
from headroom.data.prefetch import find_dtype
from headroom.data.preparation import load_arrays
from headroom.device.memory_limit import compute_room_bytes, compute_rows_room_bytes
from headroom.models import builtin
from headroom.models.parameter_patterns import freeze_parameters
from headroom.settings.run_config import FUSED, ModelConfig
from headroom.training import build, own_model
from headroom.training.best_weights import iterate_tensors
from headroom.training.evaluation import choose_eval_rows
from headroom.training.forecast import (
    DryRun,
    Forecast,
    UnforeseeableMemory,
    fake_model,
    find_largest_rows,
    use_fake_tensors,
)
from headroom.training.losses import find_own_functions, make_loss
from headroom.training.micro_batches import SingleAttempt
from headroom.training.optimizer_step import Step
from headroom.training.plan import Plan
from headroom.watch.memory_by_owner import BEST_WEIGHTS
from headroom.watch.phases import Watched
from headroom.watch.pinned_memory import PINNING


def forecast_training(plan: Plan, *, micro_batch: int | None = None) -> Forecast:
    """Return the memory of this training. micro_batch: rows; as train.accumulate says where None.

    Where this PyTorch can't use a device of that kind, the CPU's operations stand in for its own.
    """
    config, data = plan.settings, plan.data
    if config.optim.name not in FUSED:
        raise UnforeseeableMemory(
            f"optim.name: what {config.optim.name} will take cannot be told beforehand"
        )
    # Built outside, where its constructor may compute; a tensor that it keeps beside its parameters
    # is a real one.
    own = (
        own_model.build_model_on_host(config.model, data)
        if is_import_path(config.model.name)
        else None
    )
    # A loss of the user's own may hold real ones too, such as weights of the classes.
    setting, theirs = ("train.loss", config.train.loss)
    if own is not None:
        setting, theirs = ("model.name", config.model.name)
    try:
        with (
            use_fake_tensors(allow_real=is_import_path(theirs)),
            keep_python_state(find_own_functions(config.train).values()),
            DryRun(plan.device) as dry,
        ):
            return _run_training(plan, micro_batch or plan.micro_batch, own, dry)
    except Exception as error:
        if not is_import_path(theirs):
            raise
        why = describe_error(error)
    raise UnforeseeableMemory(
        f"{setting}: what {theirs} will take cannot be told beforehand ({why}); "
        "it needs more than the shapes of its inputs"
    )


def find_largest_micro_batch(plan: Plan, room_bytes: float) -> int | None:
    """Return the largest of batch_size and its halves that fits; None where not even a row does."""

    def count_needed(rows: int) -> int:
        return forecast_training(plan, micro_batch=rows).needed_bytes

    rows = plan.settings.train.batch_size
    return find_largest_rows(count_needed, room_bytes, rows=rows, most=rows)


def _run_training(plan: Plan, micro_batch: int, own: nn.Module | None, dry: DryRun) -> Forecast:
    """Run a training without bytes. own: the model, where it is the user's; else it is built."""
    settings, data, facts, device = plan.settings, plan.data, plan.device, dry.device
    model = _build_model(settings.model, data, device) if own is None else fake_model(own, device)
    dry.add_model(model)
    channels_last = build.takes_channels_last(settings.model.name, model)
    train, val = make_empty_rows(plan, device=device, channels_last=channels_last)
    dry.own("data", (*train.list_tensors(), *val.list_tensors()))
    # On a CPU the weights of the best epoch are kept where the others are.
    keeps_best = plan.keeps_best and facts.kind == "cpu"
    best = [t.clone() for _, t in iterate_tensors(model)] if keeps_best else []
    dry.own(BEST_WEIGHTS, best)
    dry.end_setup()
    step = build.make_step(
        plan,
        model,
        build.make_optimizer(settings.optim, model),
        device=device,
        micro=SingleAttempt(micro_batch),
        mark=dry.mark,
    )
    room = compute_room_bytes(settings.memory.limit_mib, facts.free_bytes or 0)
    eval_rows = choose_eval_rows(data, settings.train.batch_size, room_bytes=room)

    def run_epoch() -> None:
        _train_steps(plan, model, step, train, dry)
        with dry.count_evaluation():
            _evaluate_batches(plan, model, step, val, min(eval_rows, data.val_rows))

    run_epoch()
    forecast = dry.make_forecast(micro_batch)
    if plan.may_replay:
        batch = train.make_train_batch(settings.train.batch_size)
        graph = _record_step(model, step, batch, dry)
        run_epoch()  # taken plainly in between
        forecast = replace(forecast, graphed=dry.make_forecast(micro_batch))
        del graph
    del best  # a training holds it to its end
    return forecast


def _train_steps(
    plan: Plan, model: nn.Module, step: Step, rows: DryRows | DryLoader, dry: DryRun
) -> None:
    """Two whole batches, the second of which has the first one's gradients and optimizer state; and
    the last of an epoch, which may have fewer rows, whose tensors lie among the small ones."""

    def take(size: int, batch: Batch) -> None:
        # The second micro-batch finds gradients there; those after it find nothing new.
        first = min(2 * step.micro.rows, size)
        x, y = nested.take_first_rows((batch.x, batch.y), first)
        step(Batch(x, y, first), norm=True, watched=Watched.NOT)
        dry.own_trained(model, step.optimizer.iterate_state())

    model.train()
    train_rows = plan.data.train_rows
    whole = min(plan.settings.train.batch_size, train_rows)
    for size in filter(None, (whole, whole, train_rows % whole)):
        dry.take_step(partial(rows.make_train_batch, size), partial(take, size))
    rows.let_go()


def _record_step(model: nn.Module, step: Step, batch: Batch, dry: DryRun) -> Any:
    """Record a step; return what the graph keeps."""
    model.train()
    step.optimizer.zero_grad()
    with dry.record_graph():
        outcome = step.make_recordable()(batch, norm=False, watched=Watched.NOT)
    grads = [p.grad for p in step.optimizer.params if p.grad is not None]
    dry.own("graph", [*grads, outcome.loss])
    dry.mark("recording")
    dry.settle()
    return batch, grads, outcome


def _build_model(settings: ModelConfig, data: DataFacts, device: torch.device) -> nn.Module:
    """Return the model of the training, none of whose weights is ever drawn."""
    with device:
        model = builtin.build_model(
            settings.name,
            input_shape=data.input_shape,
            outputs=data.outputs,
            args=settings.args,
            times=None if data.times is None else asdict(data.times),
        )
    freeze_parameters(model, settings.freeze)
    if build.takes_channels_last(settings.name, model):
        # Not by model.to(), which can't convert such tensors.
        for weight in (p for p in model.parameters() if p.dim() == 4):
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    return model


@torch.no_grad()  # in inference mode operations that are made of others would be seen as one
def _evaluate_batches(
    plan: Plan,
    model: nn.Module,
    step: Step,
    rows: DryRows | DryLoader,
    most: int,
) -> None:
    """Two of the largest batches of an evaluation, the second beside what the first has left in the
    caches, then the last one, which may have fewer rows; what a regression keeps of all."""
    data, train = plan.data, plan.settings.train
    forward = build.choose_forward(plan.settings.model.name, train, data)(model)
    model.eval()
    kept = KeptRows(data.task, data.val_rows)
    whole, rest = divmod(data.val_rows, most)
    for size in (*[most] * min(2, whole), *([rest] if rest else [])):
        x, y, *_ = rows.make_val_batch(size)
        with step.autocast():
            outputs, loss = forward(x)
            if loss is None:
                make_loss(train, data, outputs.device, is_judged=True)(outputs, y)
        if data.task == "classification":
            predicted = outputs.argmax(1)
            _ = predicted == y
            kept.add(shrink_classes(predicted, data.outputs), shrink_classes(y, data.outputs))
        elif data.task == "multilabel":
            kept.add(outputs, y > 0.5)
        elif data.task == "regression":
            kept.add(outputs, y)
        del x, y, outputs, loss  # gone before the next ones come


@dataclass(frozen=True)
class _StoredArray:
    """One kept array: inputs, targets, or both in one."""

    rows: int
    shape: tuple[int, ...]  # of a row; of a text's tokens ()
    dtype: torch.dtype
    bytes: int
    channels_last: bool

    def make_empty(self, rows: int, device: torch.device) -> Tensor:
        return torch.empty(
            (rows, *self.shape),
            dtype=self.dtype,
            device=device,
            memory_format=torch.channels_last if self.channels_last else torch.contiguous_format,
        )


class DryRows:
    """Batches of prepared rows in a dry run. kind: of the device meant; device: of the
    tensors."""

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        *,
        kind: str,
        device: torch.device,
        room_bytes: float,
        channels_last: bool,
        is_shuffled: bool,
    ) -> None:
        arrays, self._layout = choose_layout(x, y, channels_last=channels_last)
        is_resident = sum(array.nbytes for array in arrays) <= RESIDENT_SHARE * room_bytes
        # Streamed ones are converted on the way.
        images = self._layout.channels_last and is_resident
        self._parts = [
            _StoredArray(len(a), a.shape[1:], find_dtype(a), a.nbytes, images and a.ndim == 4)
            for a in arrays
        ]
        self._device = device
        self._in_place = is_resident and kind == "cuda"
        self._reads_ahead = not is_resident and kind in PINNING
        self._batch: list[Tensor] = []  # where batches are gathered in place
        self._next: list[Tensor] = []  # what was sent ahead
        self._whole = [self._send(part) for part in self._parts] if is_resident else []
        self._order: list[Tensor] = []
        if is_shuffled and (is_resident or kind == "cpu"):  # where it is gathered
            self._order = [torch.empty(len(x), dtype=torch.int64, device=device)]

    def list_tensors(self) -> list[Tensor]:
        """Return the tensors that hold rows, and their order, on the device for the whole
        run."""
        return [*self._whole, *self._order]

    def make_train_batch(self, rows: int) -> Batch:
        """Return a batch to train on."""
        if self._in_place:
            self._batch = self._batch or self._make_parts(rows)
            return self._layout.open(self._batch)
        parts, self._next = self._next or self._make_parts(rows), []
        if self._reads_ahead:
            self._next = self._make_parts(rows)
        return self._layout.open(parts)

    def make_val_batch(self, rows: int) -> Batch:
        """Return a batch to validate on."""
        whole = [self._layout.view_rows(part)[:rows] for part in self._whole]
        return self._layout.open(whole or self._make_parts(rows))

    def let_go(self) -> None:
        """End an epoch: no batch is left but the memory that all of them come in."""
        self._next = []

    def _make_parts(self, rows: int) -> list[Tensor]:
        if self._layout.context is None:
            return [part.make_empty(rows, self._device) for part in self._parts]
        shape = (rows, self._layout.context + 1)
        if self._whole:  # where each token of the rows lies
            torch.empty(shape, dtype=torch.int64, device=self._device)
        text = self._parts[0].dtype
        return [torch.empty(shape, dtype=text, device=self._device)]

    def _send(self, part: _StoredArray) -> Tensor:
        whole = part.make_empty(part.rows, self._device)
        # In blocks, each of which is there twice while it is copied.
        torch.empty(min(part.bytes, BLOCK_BYTES), dtype=torch.uint8, device=self._device)
        return whole


class DryLoader:
    """Batches of a loader of the user's own in a dry run: each is made anew, and may be any
    structure."""

    def __init__(self, description: Any, device: torch.device) -> None:
        self._description, self._device = description, device

    def list_tensors(self) -> list[Tensor]:
        return []

    def make_train_batch(self, rows: int) -> Batch:
        x, y = nested.make_zeros(self._description, rows, device=self._device)
        return Batch(x, y, rows)

    def let_go(self) -> None:
        pass

    make_val_batch = make_train_batch


def make_empty_rows(
    plan: Plan, *, device: torch.device, channels_last: bool
) -> tuple[DryRows, DryRows] | tuple[DryLoader, DryLoader]:
    """Return the rows to train on and those to validate on, with the room that a training gives
    each. device: of the tensors."""
    if plan.data.batch is not None:
        return DryLoader(plan.data.batch, device), DryLoader(plan.data.batch, device)
    arrays, settings = load_arrays(plan.data), plan.settings
    room = compute_rows_room_bytes(
        plan.device, limit_mib=settings.memory.limit_mib, rows_mib=settings.data.memory_mib
    )

    def make_rows(x: np.ndarray, y: np.ndarray, *, share: float, is_shuffled: bool) -> DryRows:
        return DryRows(
            x,
            y,
            kind=plan.torch_device.type,
            device=device,
            room_bytes=share * room,
            channels_last=channels_last,
            is_shuffled=is_shuffled,
        )

    return (
        make_rows(arrays.train_x, arrays.train_y, share=TRAIN_SHARE, is_shuffled=True),
        make_rows(arrays.val_x, arrays.val_y, share=VAL_SHARE, is_shuffled=False),
    )
