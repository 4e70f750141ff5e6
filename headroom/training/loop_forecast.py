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
from difflib import get_close_matches
from functools import cache, partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from headroom.base import nested
from headroom.base.facts import DeviceFacts
from headroom.base.import_paths import describe_error, import_callable, is_import_path
from headroom.base.units import format_mebibytes, make_printable
from headroom.device.detection import detect_best_device
from headroom.settings.read_settings import ConfigError
from headroom.training.forecast import (
    CUDNN,
    Forecast,
    UnforeseeableMemory,
    choose_device,
    fake_model,
    make_forecast,
    make_peaks,
    prepare_fake_tensors,
)
from headroom.watch.allocation_log import MIB

# MiB in all as nvidia-smi tells them: https://github.com/modal-labs/modal-client/pull/2797
SIZES_MIB = {
    "t4": 15360,
    "a10": 23028,
    "a10g": 23028,
    "l4": 23034,
    "l40s": 46068,
    "a100-40": 40960,
    "a100-80": 81920,
    "h100": 81559,
}
# What the driver keeps (some 430 to 570 MiB: PyTorch told 14.58 GiB of a T4 and 79.10 of an H100)
# and the context of a process takes.
TAKEN_MIB = 1024
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|mib)", re.IGNORECASE)
USUAL_GPUS = ("t4", "l4", "a100-40", "a100-80", "h100")
STEPS = 3  # the second has gradients and state of the first; the third, what those left in caches
CLOSE = 0.02  # of the largest batch: so near is told
MOST_ROWS = 1 << 32


@dataclass(frozen=True)
class LoopStep:
    """What a step is made of."""

    make_model: Callable[[], nn.Module]  # a fresh one each time
    given: tuple[tuple[Any, ...], dict[str, Any]]  # to its forward, of tensors without memory
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer]
    compute_loss: Callable[[Any], Tensor] | None = None  # of what the forward returns
    autocast: torch.dtype | None = None

    @property
    def rows(self) -> int:
        """Of the batch: those of its first tensor."""
        return nested.count_rows(self.given)

    def resize(self, rows: int) -> LoopStep:
        """Return the step on a batch of so many rows."""
        before = self.rows

        def resize(tensor: Tensor) -> Tensor:
            if not tensor.dim() or tensor.shape[0] != before:
                return tensor
            return tensor.new_empty((rows, *tensor.shape[1:]))

        return replace(self, given=nested.map_tensors(self.given, resize))


@dataclass(frozen=True)
class LoopForecast:
    """What a step takes, and on which GPUs it would fit. `print` shows it."""

    told: Forecast
    assumed: str  # of the step, where nobody told
    needed_mib: float
    rooms_mib: Mapping[str, float]  # by GPU
    largest: Mapping[str, int]  # rows that fit each; 0: not even one

    def __str__(self) -> str:
        """Return both tables as text."""
        console = Console(width=100)
        with console.capture() as shown:
            console.print(*self.make_tables(), sep="\n")
        return shown.get().rstrip()

    def make_tables(self) -> tuple[Table, Table, str]:
        """Return what the step takes by owner and phase, a line for each GPU, and what is to be
        known of both."""
        told, rows = self.told, f"{self.told.micro_batch:,} rows"
        memory = Table("", "", title=f"a step on {rows}", title_justify="left", show_header=False)
        memory.columns[1].justify = "right"
        peak = format_mebibytes(told.peak_bytes / MIB)
        memory.add_row(f"predicted peak, in {told.phase}", peak, style="bold")
        for owner, size in sorted(told.owners.items(), key=lambda item: -item[1]):
            memory.add_row(f"  {owner}", format_mebibytes(size / MIB))
        memory.add_section()
        for phase, most in told.phases.items():
            if phase not in ("setup", "data_wait"):
                memory.add_row(f"peak of {phase}", format_mebibytes(most / MIB))
        notes = (f"assumed: {self.assumed}" if self.assumed else "", told.note)
        gpus = Table("", title=f"{rows} on GPUs", title_justify="left")
        for name in ("room", "takes", "largest batch"):
            gpus.add_column(name, justify="right")
        gpus.add_column("fits")
        for name, room_mib in self.rooms_mib.items():
            gpus.add_row(
                name,
                format_mebibytes(room_mib),
                format_mebibytes(self.needed_mib),
                f"{self.largest[name]:,}" if self.largest[name] else "none",
                "yes" if self.needed_mib <= room_mib else "NO",
            )
        return memory, gpus, "\n".join(filter(None, notes))


def make_absent_gpu(here: DeviceFacts, room_bytes: int) -> DeviceFacts:
    """Return the facts of a CUDA GPU that is not here, with so much room."""
    return replace(
        here,
        name="cuda:0",
        kind="cuda",
        index=0,
        total_bytes=room_bytes,
        free_bytes=room_bytes,
        bf16=True,
    )


def forecast_loop(step: LoopStep, sizes_mib: Mapping[str, float]) -> LoopForecast:
    """Return what this step takes on a GPU, and how many rows fit those of these sizes. Raises
    UnforeseeableMemory."""
    rooms = {name: max(0, int((size - TAKEN_MIB) * MIB)) for name, size in sizes_mib.items()}
    device = make_absent_gpu(detect_best_device("cpu"), max(rooms.values()))
    forecast, assumed = forecast_step(step, device)
    largest = find_largest_batches(step, device, rooms)
    rooms_mib = {name: room / MIB for name, room in rooms.items()}
    return LoopForecast(forecast, assumed, forecast.needed_bytes / MIB, rooms_mib, largest)


def make_step_of(
    model: nn.Module, optimizer: Optimizer, given: Any, autocast: torch.dtype | None
) -> LoopStep:
    """Return the step of a loop in use: of this model and optimizer, on what it was given."""
    return LoopStep(
        partial(_copy_without_memory, model),
        given,
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


def forecast_step(step: LoopStep, device: DeviceFacts) -> tuple[Forecast, str]:
    """Return the memory of this step, and what of it was assumed. Raises UnforeseeableMemory."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # imports the compiler

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with prepare_fake_tensors(), mode:
            model = step.make_model()
    except Exception:  # its constructor computes, so it is built with its memory
        model = step.make_model()
    assumed: list[str] = []
    here = choose_device(torch.device(device.name))
    peaks = make_peaks(here, device)
    ledger = peaks.ledger
    try:
        with prepare_fake_tensors(), mode, ledger:
            model = fake_model(model, here)
            model.train()
            ledger.own("parameters", model.parameters())
            ledger.own("buffers", model.buffers())
            parameter_bytes = ledger.allocated_bytes
            optimizer = step.make_optimizer([p for p in model.parameters() if p.requires_grad])
            peaks.mark("setup")
            peaks.settle()
            for _ in range(STEPS):
                args, kwargs = nested.map_tensors(step.given, partial(_make_empty, device=here))
                ledger.own("batch", nested.find_tensors((args, kwargs)))
                peaks.mark("data_wait")
                cast = torch.autocast(here.type, step.autocast) if step.autocast else nullcontext()
                with cast:
                    outputs = model(*args, **kwargs)
                    loss = (step.compute_loss or partial(_assume_loss, told=assumed))(outputs)
                del outputs
                peaks.mark("forward")
                loss.backward()
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                ledger.own("gradients", grads)
                peaks.mark("backward")
                optimizer.step()
                state = nested.find_tensors([*optimizer.state.values()])
                ledger.own("optimizer_state", state)
                peaks.mark("optimizer")
                optimizer.zero_grad()
                peaks.settle()
                del args, kwargs, loss, grads, state
            peaks.training = len(peaks.events)
    except Exception as error:
        raise UnforeseeableMemory(
            f"what a step takes cannot be told beforehand: {describe_error(error)}"
        ) from None
    forecast = make_forecast(peaks, parameter_bytes, device, step.rows)
    if any(isinstance(module, _ConvNd) for module in model.modules()):
        forecast = replace(forecast, note="; ".join(filter(None, (forecast.note, CUDNN))))
    return forecast, assumed[0] if assumed else ""


def find_largest_batches(
    step: LoopStep, device: DeviceFacts, rooms_bytes: Mapping[str, int]
) -> dict[str, int]:
    """Return the most rows whose step fits each of these rooms, within two in a hundred; 0 where
    not even one does."""

    @cache
    def needed(rows: int) -> int:
        return forecast_step(step.resize(rows), device)[0].needed_bytes

    largest = {}
    for name, room in rooms_bytes.items():
        fits, over = 0, step.rows
        while needed(over) <= room and over < MOST_ROWS:
            fits, over = over, 4 * over
        while not fits and over > 1:
            if needed(over // 2) <= room:
                fits = over // 2
            else:
                over //= 2
        while fits and over - fits > max(1, CLOSE * fits):
            share = (room - needed(fits)) / max(1, needed(over) - needed(fits))
            guess = fits + int(share * (over - fits))  # what takes memory is mostly the rows
            rows = min(max(guess, fits + 1, int(fits * (1 + CLOSE / 2))), over - 1)
            fits, over = (rows, over) if needed(rows) <= room else (fits, rows)
        largest[name] = fits
    return largest


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


def parse_gpu_sizes(text: str) -> dict[str, float]:
    """Return the MiB of each GPU that was named: names of SIZES_MIB, or sizes such as 24GiB.

    Raises ConfigError.
    """
    found, problems = {}, []
    for name in (word.strip().lower() for word in text.split(",")):
        size = _SIZE.fullmatch(name)
        if name in SIZES_MIB:
            found[name] = float(SIZES_MIB[name])
        elif size is not None and float(size[1]) > 0:
            found[name] = float(size[1]) * (1024 if size[2] == "gib" else 1)
        else:
            near = get_close_matches(name, SIZES_MIB, 1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(SIZES_MIB)}"
            shown = make_printable(name, limit=60)
            problems.append(f"--for {shown}: is neither a GPU that is known nor 24GiB; {hint}")
    if problems:
        raise ConfigError(*problems)
    return found


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
    if isinstance(optimizer, str):
        optimizer = find_optimizer(optimizer)
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    options: dict[str, Any] = {}
    if isinstance(optimizer, Optimizer):
        options = _read_options(optimizer)
    if isinstance(batch, Mapping):
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), dict(batch))
    else:
        arguments = (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {})
    step = LoopStep(
        partial(_copy_without_memory, model) if isinstance(model, nn.Module) else model,
        nested.map_tensors(arguments, partial(torch.empty_like, device="meta")),
        make_optimizer_of(kind, options),
        compute_loss=loss,
        autocast=autocast,
    )
    return forecast_loop(step, parse_gpu_sizes(on if isinstance(on, str) else ",".join(on)))


def fits(
    model: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    on: str,
    optimizer: str | type[Optimizer] | Optimizer = "adamw",
    loss: Callable[[Any], Tensor] | None = None,
    autocast: torch.dtype | None = None,
) -> bool:
    """True if a training step fits the memory of a GPU such as "l4", or of a size such as "24GiB",
    that need not be here. See forecast_model for the arguments and errors."""
    forecast = forecast_model(
        model, batch, optimizer=optimizer, loss=loss, autocast=autocast, on=on
    )
    return all(forecast.needed_mib <= room for room in forecast.rooms_mib.values())


_BATCH = re.compile(r"(?:(\w+)=)?(\d+(?:x\d+)*)(?::(\w+))?")


def forecast_own_step(
    model: str,
    batch: Sequence[str],
    *,
    optimizer: str,
    optimizer_args: Sequence[str],
    loss: str | None,
    autocast: str | None,
    gpus: str,
) -> LoopForecast:
    """Return the forecast of a step of somebody else's loop. model, loss: import paths. batch: of
    each input, as `[NAME=]SHAPE[:DTYPE]`. Raises ConfigError."""
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
        return forecast_loop(step, parse_gpu_sizes(gpus))
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


def _assume_loss(outputs: Any, *, told: list[str]) -> Tensor:
    named = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    floats = [t for t in nested.find_tensors(outputs) if t.is_floating_point()]
    first = named if named is not None else floats[0]
    shape = "x".join(map(str, first.shape))
    if first.dim() == 0:
        told.append("the loss that the model returns")
        return first
    if first.dim() == 2 and first.shape[1] > 1:
        told.append(f"the loss is the cross-entropy of its outputs, {shape}")
        target = torch.empty(len(first), dtype=torch.long, device=first.device)
        return nn.functional.cross_entropy(first, target)
    told.append(f"the loss is the squared error of its outputs, {shape}")
    return nn.functional.mse_loss(first, torch.empty_like(first))
