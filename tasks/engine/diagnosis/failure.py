"""What met when a step failed, in words: PyTorch's message, the line of the user's code, the layer
and the function that raised, and the tensors by name. The step is run once more for it, watched:
the call of PyTorch that fails is given the very tensors that do not fit. No tensor outlives it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tasks.engine.base import nested
from tasks.engine.base.import_paths import ends_told, said
from tasks.engine.diagnosis.tensor_names import Names, Seen, reached
from tasks.engine.diagnosis.traceback_frames import TORCH, ended, is_foreign, is_plain, own_line
from tasks.engine.memory.memory_meter import chain, clear_frames

LONGEST = 240  # characters of PyTorch's message
RAISED = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)
CONTAINERS = nn.Sequential | nn.ModuleList | nn.ModuleDict


@dataclass(frozen=True)
class Failure:
    """What was there when PyTorch raised."""

    text: str  # PyTorch's, on one line
    place: str  # layer, function and line, as far as they are known
    setting: str  # that names the code which failed
    given: list[Seen]
    weights: list[Seen]  # of that layer
    names: Names


def failure_of(
    error: BaseException,
    model: nn.Module,
    batch: tuple[Any, Any],
    again: Callable[[], object],
) -> Failure | None:
    """The first error of its chain that PyTorch raised for what it was given, as a second run sees
    it that fails in the same words, or else as its own traceback tells.

    The run has failed for good, so that random numbers and running statistics do not matter any
    more; its tensors are let go of first, so that memory holds for the second what it did for the
    first.
    """
    names, errors = Names(model, batch), chain(error)
    mistakes = [one for one in errors if isinstance(one, RAISED) and not is_plain(one)]
    told = {str(one): _told(one, names, is_second=False) for one in mistakes}
    if not told:
        return None
    # A compiler has words of its own: it computes with shapes alone.
    is_compilers = any(type(one).__module__.startswith("torch._dynamo") for one in mistakes)
    clear_frames(error)
    is_compiling = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if is_compiling else nullcontext()
    try:
        with torch.no_grad(), warnings.catch_warnings(), eager, _Witness(names):
            warnings.simplefilter("ignore")
            ends_told(again)()
    except Exception as second:
        told |= {
            str(one): _told(one, names, is_second=True)
            for one in chain(second)
            if one not in errors and (is_compilers or str(one) in told)
        }
        clear_frames(second)
    return next(filter(None, told.values()), None)


class _Witness(TorchFunctionMode):
    """Stands in the traceback where a call of PyTorch fails, with what that was given, and tells
    the names of what is made on another device than the model's."""

    def __init__(self, names: Names) -> None:
        super().__init__()
        self._names, self._usual = names, names.usual("device")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in nested.tensors(made):
            if str(one.device) != self._usual:
                self._names.made(one, nested.tensors([*args, *(kwargs or {}).values()]))
        return made


def _told(error: BaseException, names: Names, *, is_second: bool) -> Failure | None:
    """What one traceback tells; None where it was not PyTorch that raised, as far as is known."""
    frames = ended(error)
    called = [one for one in frames if one.f_code is nn.Module._call_impl.__code__]
    watched = [one for one in frames if one.f_code is _Witness.__torch_function__.__code__]
    layer = called[-1].f_locals["self"] if called else None
    is_torchs = type(layer).__module__.startswith("torch.nn.") and not isinstance(layer, CONTAINERS)
    met, function = [], ""
    if watched or is_torchs or (called and frames[-1] is called[-1]):
        # Beside its functions, it checks what its own layers are given, and how any is called.
        if not watched and is_foreign(frames[-1].f_code.co_filename):
            return None
        call = watched[0] if watched and not is_torchs else called[-1]
        function = getattr(watched[0].f_locals["func"], "__name__", "") if watched else ""
        variables = _variables(frames[: frames.index(call)])
        args, kwargs = call.f_locals["args"], call.f_locals["kwargs"] or {}
        given = nested.tensors([*args, *kwargs.values()])
        unnamed = "the input" if is_torchs else ""
        met = [names.seen(variables.get(id(one), unnamed), one) for one in given]
    elif is_second or not called or type(error) is not RuntimeError:
        return None  # else PyTorch raised too, but only a second run would tell for what
    line, path = own_line(error), names.layers.get(id(layer))
    is_models = not line or any(id(one.f_locals["self"]) in names.layers for one in called)
    held = reached([(type(layer).__name__, layer)] if is_torchs else [], set())
    text = " ".join(said(error).split())
    where = _words(layer, path, is_torchs, is_models) if called else ""
    where = " in ".join(filter(None, ("" if is_torchs else function, where)))
    return Failure(
        text=text if len(text) <= LONGEST else text[: LONGEST - 3] + "...",
        place=", ".join(filter(None, (where, line))) or "the step",
        setting="model.name" if is_models else "train.loss",
        given=met,
        weights=[
            names.seen("" if path is not None else at, one)
            for at, one in held
            if isinstance(one, Tensor)
        ],
        names=names,
    )


def _words(layer: Any, path: str | None, is_torchs: bool, is_models: bool) -> str:
    what = type(layer).__name__ + (f"({layer.extra_repr()})" if is_torchs else "")
    if path is None:
        return f"a layer made in forward ({what})" if is_models else what
    return f"layer {path} ({what})" if path else f"the model ({what})"


def _variables(frames: list[FrameType]) -> dict[int, str]:
    """The names of tensors, by their ids, in the innermost function that is not PyTorch's."""
    for frame in reversed(frames):
        if TORCH not in Path(frame.f_code.co_filename).parents:
            shared = {id(v): n for n, v in frame.f_globals.items() if isinstance(v, Tensor)}
            return shared | {id(v): path for path, v in reached(frame.f_locals.items(), set())}
    return {}
