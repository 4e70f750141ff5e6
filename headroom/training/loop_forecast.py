"""Forecasts the memory of a step that somebody else's loop takes: a forward pass of their model, a
backward pass and a step of their optimizer, on tensors that have shapes and no memory. What such a
step is made of is known but for its loss; where nobody tells that, one is assumed and named.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from html import escape
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer

from headroom.base import nested
from headroom.base.facts import DeviceFacts
from headroom.base.import_paths import describe_error, import_callable, is_import_path
from headroom.base.units import make_printable
from headroom.report.html_page import make_fragment, render_table
from headroom.settings.read_settings import ConfigError
from headroom.training.forecast import (
    DryRun,
    Forecast,
    UnforeseeableMemory,
    fake_model,
    find_largest_rows,
    use_fake_tensors,
)
from headroom.training.gpu_fit import (
    USUAL_GPUS,
    GpuFit,
    find_misfits,
    make_absent_gpu,
    make_gpu_table,
    make_layer_table,
    make_memory_table,
    parse_gpu_sizes,
)
from headroom.watch.allocation_log import MIB
from headroom.watch.layers import iterate_state

STEPS = 3  # the second has gradients and state of the first; the third, what those left in caches
CLOSE = 0.02  # of the largest batch: so near is told
MOST_ROWS = 1 << 32


@dataclass(frozen=True)
class LoopStep:
    """What a step is made of."""

    make_model: Callable[[], nn.Module]  # a fresh one each time
    inputs: tuple[tuple[Any, ...], dict[str, Any]]  # to its forward, of tensors without memory
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer]
    compute_loss: Callable[[Any], Tensor] | None = None  # of what the forward returns
    autocast: torch.dtype | None = None

    @property
    def rows(self) -> int:
        """Of the batch: those of its first tensor."""
        return nested.count_rows(self.inputs)

    def resize(self, rows: int) -> LoopStep:
        """Return the step on a batch of so many rows."""
        before = self.rows

        def resize(tensor: Tensor) -> Tensor:
            if not tensor.dim() or tensor.shape[0] != before:
                return tensor
            return tensor.new_empty((rows, *tensor.shape[1:]))

        return replace(self, inputs=nested.map_tensors(self.inputs, resize))


@dataclass(frozen=True)
class LoopForecast:
    """What a step takes, and on which GPUs it would fit. `print` shows it."""

    memory: Forecast
    assumed: str  # of the step, where nobody told
    gpus: Mapping[str, GpuFit]

    def __str__(self) -> str:
        """Return what the step takes by owner and phase, a line for each GPU, and what is to be
        known of both."""
        rows = self.memory.micro_batch
        notes = (f"assumed: {self.assumed}" if self.assumed else "", self.memory.note)
        console = Console(width=100, force_jupyter=False)  # which would show it in the cell
        with console.capture() as shown:
            console.print(make_memory_table(self.memory, f"a step on {rows:,} rows"))
            console.print(make_layer_table(self.memory))
            console.print(make_gpu_table(self.gpus, rows))
            console.print("\n".join(filter(None, notes)))
        return shown.get().rstrip()

    def _repr_html_(self) -> str:
        """Return the same for a notebook."""
        rows = self.memory.micro_batch
        notes = (f"assumed: {self.assumed}" if self.assumed else "", self.memory.note)
        return make_fragment(
            render_table(make_memory_table(self.memory, f"a step on {rows:,} rows")),
            render_table(make_gpu_table(self.gpus, rows)),
            *(f"<p>{escape(note)}</p>" for note in notes if note),
        )


def forecast_loop(step: LoopStep, sizes_mib: Mapping[str, float]) -> LoopForecast:
    """Return what this step takes on a GPU, and how many rows fit those of these sizes. Raises
    UnforeseeableMemory."""
    gpus = {name: make_absent_gpu(size) for name, size in sizes_mib.items()}
    largest = max(gpus.values(), key=lambda gpu: gpu.free_bytes or 0)
    memory, assumed = forecast_step(step, largest)

    @cache
    def count_needed(rows: int) -> int:
        return forecast_step(step.resize(rows), largest)[0].needed_bytes

    def fit(room_bytes: int) -> GpuFit:
        rows = find_largest_rows(
            count_needed, room_bytes, rows=step.rows, most=MOST_ROWS, factor=4, close=CLOSE
        )
        return GpuFit(room_bytes / MIB, memory.needed_bytes / MIB, rows)

    return LoopForecast(
        memory, assumed, {name: fit(gpu.free_bytes or 0) for name, gpu in gpus.items()}
    )


def forecast_step(
    step: LoopStep, device: DeviceFacts, *, is_portable: bool = False
) -> tuple[Forecast, str]:
    """Return the memory of this step, and what of it was assumed. is_portable: see DryRun. Raises
    UnforeseeableMemory."""
    dry = DryRun(device, is_portable=is_portable)
    assumed: list[str] = []
    fake = partial(use_fake_tensors, allow_real=True)
    try:
        with fake():
            model = step.make_model()
    except Exception:  # its constructor computes, so it is built with its memory
        with torch.random.fork_rng(devices=()):  # a forecast leaves random numbers as they are
            model = step.make_model()
    try:
        with fake(), dry:
            model = fake_model(model, dry.device)
            model.train()
            dry.add_model(model)
            optimizer = step.make_optimizer([p for p in model.parameters() if p.requires_grad])
            dry.end_setup()
            make_batch = partial(
                nested.map_tensors, step.inputs, partial(_make_empty, device=dry.device)
            )
            take = partial(_take_step, step, model, optimizer, dry, assumed)
            for _ in range(STEPS):
                dry.take_step(make_batch, take)
    except Exception as error:
        raise UnforeseeableMemory(
            f"what a step takes cannot be told beforehand: {describe_error(error)}"
        ) from None
    return dry.make_forecast(step.rows), assumed[0] if assumed else ""


def _take_step(
    step: LoopStep,
    model: nn.Module,
    optimizer: Optimizer,
    dry: DryRun,
    assumed: list[str],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
) -> None:
    """Forward, backward and update. assumed: hears what of the step nobody told."""
    args, kwargs = inputs
    cast = torch.autocast(dry.device.type, step.autocast) if step.autocast else nullcontext()
    with cast:
        outputs = model(*args, **kwargs)
        loss = (step.compute_loss or partial(_assume_loss, assumed=assumed))(outputs)
    del outputs
    dry.mark("forward")
    loss.backward()
    dry.own_trained(model)
    dry.mark("backward")
    optimizer.step()
    dry.own_trained(model, iterate_state([optimizer]))
    dry.mark("optimizer")
    optimizer.zero_grad()


def make_step_of(
    model: nn.Module, optimizer: Optimizer, inputs: Any, autocast: torch.dtype | None
) -> LoopStep:
    """Return the step of a loop in use: of this model and optimizer, on what it was given."""
    return LoopStep(
        partial(_copy_without_memory, model),
        inputs,
        make_optimizer_of(type(optimizer), _read_options(optimizer)),
        autocast=autocast,
    )


def _read_options(optimizer: Optimizer) -> dict[str, Any]:
    """Return the options that an optimizer was made with, as its class takes them."""
    parameters = inspect.signature(type(optimizer)).parameters
    return {k: v for k, v in optimizer.defaults.items() if k in parameters and v is not None}


def _copy_without_memory(model: nn.Module) -> nn.Module:
    """Return a copy of a model in use, whose weights and buffers have shapes only."""
    kept = (*model.parameters(), *model.buffers())
    memo: dict[int, Any] = {}
    for tensor in kept:
        empty = torch.empty_like(tensor, device="meta")
        is_weight = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_weight else empty
    return copy.deepcopy(model, memo)


def find_optimizer(name: str) -> type[Optimizer]:
    """Return the optimizer of torch.optim of this name, in any case. Raises ValueError."""
    kinds = {
        kind.__name__.lower(): kind
        for kind in vars(torch.optim).values()
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    del kinds["lbfgs"]  # it takes as many steps as it likes
    if name.lower() not in kinds:
        raise ValueError(f"is none of {', '.join(sorted(kinds))}")
    return kinds[name.lower()]


def make_optimizer_of(kind: type[Optimizer], args: Mapping[str, Any]) -> Callable[[Any], Optimizer]:
    """Return what makes this optimizer as a loop on a GPU has it: for several tensors at once,
    which is PyTorch's default there."""
    options = dict(args)
    if "foreach" in inspect.signature(kind).parameters and not options.get("fused"):
        options.setdefault("foreach", True)
    return partial(kind, **{"lr": 1e-3, **options})


def forecast_model(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    optimizer: str | type[Optimizer] | Optimizer = "adamw",
    loss: Callable[[Any], Tensor] | None = None,
    autocast: torch.dtype | None = None,
    on: str | Sequence[str] = USUAL_GPUS,
) -> LoopForecast:
    """Return the memory that a training step takes on GPUs that need not be here.

    model: a module, which is not changed, or a function that makes one. batch: what its forward
    takes: a tensor, a tuple of arguments or a dict of them by name; only shapes and types are
    looked at. optimizer: a name or class of torch.optim, or one in use, of which class and options
    count. loss: of what the forward returns; None: its `loss`, or one that is assumed and named.
    autocast: the type that torch.autocast is given. on: GPUs such as "l4", or sizes such as
    "24GiB". Raises ConfigError for a name that is not known, UnforeseeableMemory for a step that
    cannot be followed without its values.
    """
    step = make_step(model, batch, optimizer=optimizer, loss=loss, autocast=autocast)
    return forecast_loop(step, parse_gpus(on))


def peak(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    optimizer: str | type[Optimizer] | Optimizer = "adamw",
    loss: Callable[[Any], Tensor] | None = None,
    autocast: torch.dtype | None = None,
) -> Forecast:
    """Return what a training step takes at its peak on a GPU that need not be here: `peak_mib`, and
    what it is of. See forecast_model for the arguments and errors."""
    step = make_step(model, batch, optimizer=optimizer, loss=loss, autocast=autocast)
    return forecast_step(step, make_absent_gpu(0))[0]


def fits(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    on: str | Sequence[str],
    optimizer: str | type[Optimizer] | Optimizer = "adamw",
    loss: Callable[[Any], Tensor] | None = None,
    autocast: torch.dtype | None = None,
) -> bool:
    """True if a training step fits the memory of a GPU such as "l4", or of a size such as "24GiB",
    that need not be here; of several, each. See forecast_model for the arguments and errors."""
    sizes = parse_gpus(on)
    taken = peak(model, batch, optimizer=optimizer, loss=loss, autocast=autocast)
    return not find_misfits(taken.needed_bytes, sizes)


def parse_gpus(on: str | Sequence[str]) -> dict[str, float]:
    """Return the MiB of the GPUs that a call names. Raises ConfigError."""
    return parse_gpu_sizes(on if isinstance(on, str) else ",".join(on), setting="on")


def make_step(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    optimizer: str | type[Optimizer] | Optimizer,
    loss: Callable[[Any], Tensor] | None,
    autocast: torch.dtype | None,
) -> LoopStep:
    """Return the step that a call describes: see forecast_model. Raises ConfigError."""
    if not callable(model):
        shown = make_printable(repr(model), limit=60)
        raise ConfigError(f"model: is a module, or a function that makes one (got {shown})")
    if isinstance(optimizer, str):
        try:
            optimizer = find_optimizer(optimizer)
        except ValueError as error:
            shown = make_printable(optimizer, limit=60)
            raise ConfigError(f"optimizer: {shown} {error}") from None
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    options: dict[str, Any] = {}
    if isinstance(optimizer, Optimizer):
        options = _read_options(optimizer)
    if isinstance(batch, Mapping):
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), dict(batch))
    else:
        arguments = (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {})
    return LoopStep(
        partial(_copy_without_memory, model) if isinstance(model, nn.Module) else model,
        nested.map_tensors(arguments, partial(torch.empty_like, device="meta")),
        make_optimizer_of(kind, options),
        compute_loss=loss,
        autocast=autocast,
    )


_BATCH = re.compile(r"(?:(\w+)=)?(\d+(?:x\d+)*)(?::(\w+))?")


def forecast_own_step(
    model: str,
    batch: Sequence[str],
    *,
    optimizer: str,
    optimizer_args: Sequence[str],
    loss: str | None,
    autocast: str | None,
    sizes_mib: Mapping[str, float],
) -> LoopForecast:
    """Return the forecast of a step of somebody else's loop. model, loss: import paths. batch: of
    each input, as `[NAME=]SHAPE[:DTYPE]`. sizes_mib: of the GPUs. Raises ConfigError."""
    make = partial(import_callable, refusal=ConfigError)
    for name, path in (("MODULE:NAME", model), ("--loss", loss)):
        if path and not is_import_path(path):
            raise ConfigError(f"{name}: is an import path, module:attribute (got {path})")
    inputs = _parse_batch(batch)
    try:
        args = {name: ast.literal_eval(value) for name, _, value in map(_cut, optimizer_args)}
        made = make_optimizer_of(find_optimizer(optimizer), args)
        made([nn.Parameter(torch.empty(1, 1))])
    except (TypeError, ValueError, SyntaxError) as error:
        raise ConfigError(f"--optimizer: {optimizer} {' '.join(optimizer_args)}: {error}") from None
    step = LoopStep(
        partial(_make_model, make(model, setting="MODULE:NAME"), model),
        inputs,
        made,
        compute_loss=make(loss, setting="--loss") if loss else None,
        autocast={"bf16": torch.bfloat16, "fp16": torch.float16}.get(autocast or ""),
    )
    try:
        return forecast_loop(step, sizes_mib)
    except UnforeseeableMemory as error:
        raise ConfigError(f"{model}: {error}") from None


def _cut(word: str) -> tuple[str, str, str]:
    return word.partition("=")


def _make_model(factory: Callable[[], Any], path: str) -> nn.Module:
    try:
        made = factory if isinstance(factory, nn.Module) else factory()
    except Exception as error:
        raise ConfigError(f"{path}: makes no model: {describe_error(error)}") from None
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{path}: makes a {type(made).__name__}, where a model is asked for")
    return made


def _parse_batch(batch: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, named = [], {}
    for word in batch:
        match = _BATCH.fullmatch(word)
        kind = getattr(torch, match[3] or "float32", None) if match is not None else None
        if match is None or not isinstance(kind, torch.dtype) or "0" in match[2].split("x"):
            raise ConfigError(
                f"--batch: is [NAME=]SHAPE[:DTYPE], such as 64x3x224x224 or ids=8x512:int64 "
                f"(got {make_printable(word, limit=60)})"
            )
        tensor = torch.empty([*map(int, match[2].split("x"))], dtype=kind, device="meta")
        if match[1]:
            named[match[1]] = tensor
        else:
            args.append(tensor)
    return tuple(args), named


def _make_empty(tensor: Tensor, *, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _assume_loss(outputs: Any, *, assumed: list[str]) -> Tensor:
    named = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    floats = [t for t in nested.find_tensors(outputs) if t.is_floating_point()]
    first = named if named is not None else floats[0]
    shape = "x".join(map(str, first.shape))
    if first.dim() == 0:
        assumed.append("the loss that the model returns")
        return first
    if first.dim() == 2 and first.shape[1] > 1:
        assumed.append(f"the loss is the cross-entropy of its outputs, {shape}")
        target = torch.empty(len(first), dtype=torch.long, device=first.device)
        return nn.functional.cross_entropy(first, target)
    assumed.append(f"the loss is the squared error of its outputs, {shape}")
    return nn.functional.mse_loss(first, torch.empty_like(first))
