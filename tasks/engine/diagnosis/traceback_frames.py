"""What the traceback of an error tells: the line of the user's code, the layer and the function of
PyTorch that it was in. It only looks: no property of a foreign object is read, and the variables
of functions that still run are left alone, since looking at them would keep them.
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from traceback import FrameSummary
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch

from tasks.engine.base.import_paths import PACKAGES, is_installed

TORCH = str(Path(torch.__file__).parent)
OURS = tuple(str(Path(__file__).parents[3] / room) for room in ("tasks", "flows"))
STANDARD = sysconfig.get_paths()["stdlib"]
LONGEST = 100  # characters of a source line that are shown
# A compiler runs the user's code without frames of its own, and tells the place in its message.
_COMPILED = re.compile(r'from user code:(?:.|\n)*File "([^"]+)", line (\d+), in ')


class Call(NamedTuple):
    """A call that did not return, with what it was given. It holds tensors: never keep it."""

    of: Any  # the layer, or the name of a function
    takes: tuple[str, ...]  # the names of the parameters
    given: dict[str, Any]  # by these names


def own_line(error: BaseException, *, deeper: bool = False) -> str | None:
    """File, line and source of the user's own code that raised; None where none of it ran.

    Code of an installed package counts where no other did. deeper: also name the line of the
    package that the user's code led to.
    """
    if told := _COMPILED.findall(str(error)):
        file, number = told[-1]
        source = linecache.getline(file, int(number)).strip()
        return _words(FrameSummary(file, int(number), "", line=source))
    foreign = [place for place in _places(error) if is_foreign(place.filename)]
    own = [place for place in foreign if not is_installed(place.filename)] or foreign
    if not own:
        return None
    beyond = f" (in it {_words(foreign[-1])})" if deeper and own[-1] is not foreign[-1] else ""
    return _words(own[-1]) + beyond


def is_raised_by_user(error: BaseException) -> bool:
    """Whether the user's own code raised it in so many words, which need no explanation."""
    places = _places(error)
    if not places or not is_foreign(places[-1].filename) or is_installed(places[-1].filename):
        return False
    return (places[-1].line or "").startswith(("raise ", "assert "))


def is_backward(error: BaseException) -> bool:
    """Whether the gradients were being computed."""
    return any(_is_in(place.filename, f"{TORCH}/autograd") for place in _places(error))


def is_foreign(file: str) -> bool:
    """Whether it is code of neither PyTorch nor this project nor Python."""
    if file.startswith("<") or _is_in(file, TORCH, *OURS):
        return False
    return any(part in PACKAGES for part in Path(file).parts) or not _is_in(file, STANDARD)


def ended(error: BaseException) -> list[FrameType]:
    """The frames of the error whose functions do not run any more, the outermost first."""
    running, frame = set(), sys._getframe()
    while frame is not None:
        running.add(id(frame))  # no frame may hold itself
        frame = frame.f_back  # type: ignore[assignment]
    return [one for one, _ in traceback.walk_tb(error.__traceback__) if id(one) not in running]


def layer_calls(frames: list[FrameType]) -> list[Call]:
    """The layers in whose forward it was, the outermost first."""
    found: list[Call] = []
    for frame in frames:
        if frame.f_code.co_name == "_call_impl" and _is_in(frame.f_code.co_filename, TORCH):
            layer, args, kwargs = (frame.f_locals[name] for name in ("self", "args", "kwargs"))
            forward = inspect.getattr_static(type(layer), "forward", None)
            takes = _parameters(forward)[1:] if isinstance(forward, FunctionType) else ()
            names = [*takes, *(f"args[{at}]" for at in range(len(takes), len(args)))]
            found.append(Call(layer, takes, {**dict(zip(names, args, strict=False)), **kwargs}))
    return found


def function_call(frames: list[FrameType]) -> Call | None:
    """The innermost function of torch.nn.functional that it was in."""
    for frame in reversed(frames):
        code, seen = frame.f_code, frame.f_locals
        if code.co_filename == f"{TORCH}/nn/functional.py" and not code.co_name.startswith("_"):
            takes = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            return Call(code.co_name, takes, {one: seen[one] for one in takes if one in seen})
    return None


def _parameters(function: FunctionType) -> tuple[str, ...]:
    return function.__code__.co_varnames[: function.__code__.co_argcount]


def _places(error: BaseException) -> list[FrameSummary]:
    """From where this project was entered: what called it is not at fault."""
    places = list(traceback.extract_tb(error.__traceback__))
    entered = [at for at, place in enumerate(places) if _is_in(place.filename, *OURS)]
    return places[entered[0] :] if entered else places


def _is_in(file: str, *folders: str) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in folders)


def _words(place: FrameSummary) -> str:
    file = Path(place.filename)
    here = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    source = " ".join((place.line or "").split())
    if len(source) > LONGEST:
        source = source[: LONGEST - 3] + "..."
    return f"{here}:{place.lineno}" + (f" `{source}`" if source else "")
