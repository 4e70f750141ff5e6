"""Compares a trained model with what its files make, before anything is logged: it is built
and loaded again in a fresh way, and both are given the same rows. It refuses a model that
would predict something else than it was trained to, and names the attribute that was not
saved.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headroom.base import nested
from headroom.base.facts import DataFacts
from headroom.base.import_paths import describe_error, is_import_path
from headroom.data.batches import Batches
from headroom.models import predictor
from headroom.models.model_folder import save_model_folder
from headroom.models.user_model import OutputsOnly, find_labels
from headroom.settings.model_args import ModelError
from headroom.training.training_parts import make_example, read_first_rows
from headroom.watch.out_of_memory import clear_frames, is_oom
from headroom.watch.tensor_names import find_unsaved_tensors

# Of the largest output. Both are computed on one device, so that only the order of sums differs.
NEAR = 1e-3
NEAR_ENOUGH = 2e-2  # where products are rounded to 10 bits and fewer: tf32, bf16, fp16
NUMBERS = (int, float, np.ndarray, np.generic)

log = logging.getLogger(__name__)


def write_model(
    model: nn.Module,
    spec: dict[str, Any],
    data: DataFacts,
    val: Batches,
    folder: Path,
    *,
    precision: str,
) -> str:
    """Write the model to `folder`, with two rows as an example; return the warning about it,
    empty where there is none. Raises as check_reload does."""
    x = nested.map_tensors(read_first_rows(val), Tensor.clone)  # what predicts may write to it
    if spec["task"] == "own":
        spec = {**spec, "labels": find_labels(model, nested.map_tensors(x, Tensor.clone))}
    save_model_folder(model, spec, make_example(data, x), folder)
    return check_reload(model, x, folder, precision=precision)


def check_reload(model: nn.Module, x: Any, folder: Path, *, precision: str) -> str:
    """Raise ModelError where the model of `folder` gives other outputs than `model` for x.

    x: a few rows as batches hold them, where the model is. A model that gives other outputs
    each time, with the same rows and random numbers, can't be compared: returns a warning that
    says so, else nothing. Nor is it compared where memory runs out.
    """
    name = json.loads((folder / "spec.json").read_text())["model"]
    trained = OutputsOnly(model) if is_import_path(name) else model
    try:
        with _keep_import_path():
            moves, problem = _compare_reloaded(trained, x, folder, name, precision)
    except (RuntimeError, MemoryError) as error:
        if not is_oom(error):
            raise
        clear_frames(error)
        log.warning("no memory to load the model again and compare its outputs")
        return ""
    if problem:
        raise ModelError(f"model.name: {name} {problem}")
    return f"model.name: {name} {moves}" if moves else ""


def _compare_reloaded(
    trained: nn.Module, x: Any, folder: Path, name: str, precision: str
) -> tuple[str, str]:
    """Return what to doubt in the model of `folder`, and what is wrong with it; empty where nothing
    is."""
    before = _collect_numbers(trained)
    first = _compute_outputs(trained, x)
    moved = [path for path, value in _collect_numbers(trained).items() if value != before.get(path)]
    near = NEAR if precision == "fp32" else NEAR_ENOUGH
    torch.seed()  # what is drawn anew and not saved has to be other numbers than the training's
    try:
        spec = json.loads((folder / "spec.json").read_text())
        loaded = predictor.rebuild_network(spec, folder)
        if first.device.type != "cpu":
            # Its own weights have been loaded; those on the device are not held twice there.
            loaded.load_state_dict(trained.state_dict(), assign=True)
            loaded = loaded.to(first.device)
        apart = _measure_difference(first, _compute_outputs(loaded, x))
    except Exception as error:
        if is_oom(error):
            raise
        return "", (
            f"was trained, and cannot be loaded again from its files: {describe_error(error)}; "
            "let it be "
            "built from model.args alone"
        )
    again = _measure_difference(first, _compute_outputs(trained, x))
    if again > near:
        why = f", for {_format_few(moved)} changes with each" if moved else ""
        return (
            f"gives other outputs for the same rows each time it is asked, in eval mode too (up to "
            f"{100 * again:,.1f} % apart){why}: val/ metrics and the logged model's answers depend "
            "on how often it was asked; keep such a change to training mode (self.training)"
        ), ""
    if apart <= near:
        return "", ""
    lost = _find_lost_attributes(trained, loaded)
    what = f"{lost}, which it does not save" if lost else "something that it does not save"
    return "", (
        f"gives other outputs when it is loaded from its files than it did when it was trained "
        f"(up to {100 * apart:,.1f} % apart): it computes with {what}; make tensors buffers "
        "(register_buffer), weights an nn.Parameter, lists of layers an nn.ModuleList"
    )


@torch.inference_mode()
def _compute_outputs(model: nn.Module, x: Any) -> Tensor:
    torch.manual_seed(0)  # for layers that are random when they predict, too
    outputs: Tensor = model.eval()(nested.map_tensors(x, Tensor.clone))
    return outputs.detach().clone()


def _measure_difference(first: Tensor, other: Tensor) -> float:
    """Return the largest difference as a share of the largest output; infinite for other shapes."""
    if first.shape != other.shape:
        return float("inf")
    a, b = (torch.nan_to_num(part.double().cpu()) for part in (first, other))
    return float((a - b).abs().max() / a.abs().max().clamp(min=1e-12)) if a.numel() else 0.0


def _find_lost_attributes(trained: nn.Module, loaded: nn.Module) -> str:
    """Return the attributes whose values the loaded model does not have; empty where none is
    found."""
    there = {path.removeprefix("model."): t for path, t in find_unsaved_tensors(trained).items()}
    here = {path.removeprefix("model."): t for path, t in find_unsaved_tensors(loaded).items()}
    names = [path for path, tensor in there.items() if not _is_equal(tensor, here.get(path))]
    here_numbers = _collect_numbers(loaded)
    names = names or [
        k for k, v in _collect_numbers(trained).items() if v != here_numbers.get(k, v)
    ]
    return _format_few(names)


def _format_few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _is_equal(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.equal(one.detach().cpu(), other.detach().cpu())


def _collect_numbers(model: nn.Module) -> dict[str, Any]:
    """Return the numbers and arrays that are attributes of layers, as can be compared, by their
    path."""
    return {
        f"{path}.{name}".removeprefix("model.").lstrip("."): np.asarray(value).tolist()
        for path, layer in model.named_modules()
        for name, value in vars(layer).items()
        if isinstance(value, NUMBERS)
    }


@contextmanager
def _keep_import_path() -> Iterator[None]:
    """The code that lies beside the weights is for strangers: here it would hide the user's own."""
    before = list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = before
