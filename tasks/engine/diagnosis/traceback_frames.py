"""What the traceback of an error tells: the line of the user's code, the tensors that meet in it by
the names they have there, and the layer whose forward raised. It only looks: no property of a
foreign object is read, nothing is called again, and the variables of functions that still run are
left alone, since looking at them would keep them.
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from tasks.engine.base.import_paths import PACKAGES, is_installed
from tasks.engine.diagnosis.expressions import tensors_at

TORCH = str(Path(torch.__file__).parent)
OURS = tuple(str(Path(__file__).parents[3] / room) for room in ("tasks", "flows"))
STANDARD = sysconfig.get_paths()["stdlib"]
LONGEST = 100  # characters of a source line that are shown
_SPOKEN = ("raise ", "assert ")
# A compiler runs the user's code without frames of its own, and tells the place in its message.
_COMPILED = re.compile(r'from user code:(?:.|\n)*File "([^"]+)", line (\d+), in ')


@dataclass(frozen=True, eq=False)
class Call:
    """A call that did not return, with what it was given. It holds tensors: never keep it."""

    name: str  # of the function, or of the layer's class
    layer: nn.Module | None
    given: dict[str, Any]  # by the names of the parameters
    takes: tuple[str, ...] = ()  # the names of the parameters


@dataclass(frozen=True, eq=False)
class Trace:
    """What a traceback tells. It holds tensors: never keep it."""

    line: str | None  # file:line and source of the user's own code
    is_backward: bool  # the gradients were being computed
    operands: dict[str, Tensor]  # that meet in the innermost line outside PyTorch
    mentioned: dict[str, Tensor]  # in that line, also where something else is made of them
    layers: list[Call]  # the outermost first; the last is the one that raised
    function: Call | None  # the innermost of torch.nn.functional


def trace(error: BaseException) -> Trace:
    """What the error's own traceback tells."""
    steps = _steps(error)
    places = [place for _, place in steps]
    deepest = _innermost(places, _is_foreign)
    still = _running()
    done = [(frame, place) for frame, place in steps if id(frame) not in still]
    operands: dict[str, Tensor] = {}
    mentioned: dict[str, Tensor] = {}
    for frame, place in done:
        if place is deepest:
            seen, others = frame.f_locals, frame.f_globals
            operands = dict(tensors_at(place, seen, others))
            mentioned = dict(tensors_at(place, seen, others, within=True))
    line = own_line(error, deeper=True)
    autograd = (str(Path(TORCH) / "autograd"),)
    is_backward = any(_is_in(place.filename, autograd) for place in places)
    return Trace(line, is_backward, operands, mentioned, _layers(done), _function(done))


def own_line(error: BaseException, *, deeper: bool = False) -> str | None:
    """File, line and source of the user's own code that raised; None where none of it ran.

    Code of an installed package counts where no other did. deeper: also name the line of the
    package that the user's code led to.
    """
    places = [place for _, place in _steps(error)]
    own = _innermost(places, _is_own) or _innermost(places, _is_foreign)
    deepest = _innermost(places, _is_foreign) if deeper else own
    if told := _COMPILED.findall(str(error)):
        file, number = told[-1]
        source = linecache.getline(file, int(number)).strip()
        own = deepest = traceback.FrameSummary(file, int(number), "", line=source)
    return _shown(own, deepest)


def is_raised_by_user(error: BaseException) -> bool:
    """Whether the user's own code raised it in so many words, which need no explanation."""
    places = [place for _, place in _steps(error)]
    return bool(places) and _is_own(places[-1]) and (places[-1].line or "").startswith(_SPOKEN)


def _steps(error: BaseException) -> list[tuple[FrameType, traceback.FrameSummary]]:
    """Frames and places, from where this project was entered: what called it is not at fault."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    steps = list(zip(frames, traceback.extract_tb(error.__traceback__), strict=False))
    entered = [at for at, (_, place) in enumerate(steps) if _is_in(place.filename, OURS)]
    return steps[entered[0] :] if entered else steps


def _running() -> set[int]:
    found, frame = set(), sys._getframe()
    while frame is not None:
        found.add(id(frame))
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _is_foreign(place: traceback.FrameSummary) -> bool:
    """Neither PyTorch's nor this project's nor Python's."""
    file = place.filename
    installed = any(part in PACKAGES for part in Path(file).parts)
    if file.startswith("<") or _is_in(file, (TORCH, *OURS)):
        return False
    return installed or not _is_in(file, (STANDARD,))


def _is_own(place: traceback.FrameSummary) -> bool:
    return _is_foreign(place) and not is_installed(place.filename)


def _is_in(file: str, folders: tuple[str, ...]) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in folders)


def _innermost(
    places: list[traceback.FrameSummary], wanted: Callable[[traceback.FrameSummary], bool]
) -> traceback.FrameSummary | None:
    return next((place for place in reversed(places) if wanted(place)), None)


def _shown(
    own: traceback.FrameSummary | None, deepest: traceback.FrameSummary | None
) -> str | None:
    if own is None:
        return None
    beyond = f" (in it {_words(deepest)})" if deepest is not None and deepest is not own else ""
    return _words(own) + beyond


def _words(place: traceback.FrameSummary) -> str:
    file = Path(place.filename)
    here = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    source = " ".join((place.line or "").split())
    if len(source) > LONGEST:
        source = source[: LONGEST - 3] + "..."
    return f"{here}:{place.lineno}" + (f" `{source}`" if source else "")


def _layers(steps: list[tuple[FrameType, traceback.FrameSummary]]) -> list[Call]:
    """The layers in whose forward it was, the outermost first."""
    found: list[Call] = []
    for frame, _ in steps:
        code = frame.f_code
        is_call = code.co_name == "_call_impl" and _is_in(code.co_filename, (TORCH,))
        if not is_call and code.co_name != "forward":
            continue
        seen = frame.f_locals
        layer = seen.get("self")
        if not isinstance(layer, nn.Module) or (found and found[-1].layer is layer):
            continue
        names = _parameters(_code_of(layer) if is_call else code)
        given = {name: seen[name] for name in names[1:] if name in seen}
        if is_call:
            positional = {
                names[at] if at < len(names) else f"args[{at - 1}]": value
                for at, value in enumerate(seen["args"], start=1)
            }
            given = {**positional, **seen["kwargs"]}
        found.append(Call(type(layer).__name__, layer, given, names[1:]))
    return found


def _code_of(layer: nn.Module) -> CodeType:
    """That of its forward; of the base class where it is not written in Python."""
    forward = inspect.getattr_static(type(layer), "forward", None)
    return forward.__code__ if isinstance(forward, FunctionType) else nn.Identity.forward.__code__


def _parameters(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _function(steps: list[tuple[FrameType, traceback.FrameSummary]]) -> Call | None:
    functional = str(Path(TORCH) / "nn" / "functional.py")
    for frame, _ in reversed(steps):
        code = frame.f_code
        if code.co_filename == functional and not code.co_name.startswith("_"):
            names, seen = _parameters(code), frame.f_locals
            return Call(code.co_name, None, {name: seen[name] for name in names if name in seen})
    return None
