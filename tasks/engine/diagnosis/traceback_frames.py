"""What the traceback of an error tells: the line of the user's code, and what was called and did
not return. It only looks: no property of a foreign object is read, and the variables of functions
that still run are left alone, since looking at them would keep them.
"""

from __future__ import annotations

import inspect
import sys
import sysconfig
import traceback
from pathlib import Path
from traceback import FrameSummary
from types import FrameType, FunctionType
from typing import Any

import torch

from tasks.engine.base.import_paths import PACKAGES, is_installed

TORCH = Path(torch.__file__).parent
OURS = tuple(Path(__file__).parents[3] / room for room in ("tasks", "flows"))
STANDARD = Path(sysconfig.get_paths()["stdlib"])
LONGEST = 100  # characters of a source line that are shown


def own_line(error: BaseException) -> str | None:
    """File, line and source of the user's own code that raised, and of the package that it led to;
    None where none of it ran."""
    foreign = [one for one in traceback.extract_tb(error.__traceback__) if is_foreign(one.filename)]
    own = [place for place in foreign if not is_installed(place.filename)] or foreign
    if not own:
        return None
    beyond = f" (in it {_words(foreign[-1])})" if own[-1] is not foreign[-1] else ""
    return _words(own[-1]) + beyond


def is_raised_by_user(error: BaseException) -> bool:
    """Whether the user's own code raised it in so many words, which need no explanation."""
    for last in list(traceback.extract_tb(error.__traceback__))[-1:]:
        is_own = is_foreign(last.filename) and not is_installed(last.filename)
        return is_own and (last.line or "").startswith(("raise ", "assert "))
    return False


def is_foreign(file: str) -> bool:
    """Whether it is code of neither PyTorch nor this project nor Python."""
    path = Path(file)
    if file.startswith("<") or any(path.is_relative_to(one) for one in (TORCH, *OURS)):
        return False
    return any(part in PACKAGES for part in path.parts) or not path.is_relative_to(STANDARD)


def ended(error: BaseException) -> list[FrameType]:
    """The frames of the error whose functions do not run any more, the outermost first."""
    running, frame = set(), sys._getframe()
    while frame is not None:
        running.add(id(frame))  # no frame may hold itself
        frame = frame.f_back  # type: ignore[assignment]
    return [one for one, _ in traceback.walk_tb(error.__traceback__) if id(one) not in running]


def is_layers(frame: FrameType) -> bool:
    """Whether PyTorch calls a layer there."""
    code = frame.f_code
    return code.co_name == "_call_impl" and Path(code.co_filename).is_relative_to(TORCH)


def layer_call(frame: FrameType) -> tuple[Any, dict[str, Any]]:
    """The layer that is called there, and what it is given. It holds tensors: never keep it."""
    layer, args, kwargs = (frame.f_locals[name] for name in ("self", "args", "kwargs"))
    given = bound(inspect.getattr_static(type(layer), "forward", None), (layer, *args), kwargs)
    return layer, {name: one for name, one in given.items() if one is not layer}


def bound(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a function was given, by the names of its parameters or in brackets by number."""
    code = function.__code__ if isinstance(function, FunctionType) else None
    takes = code.co_varnames[: code.co_argcount] if code is not None else ()
    names = [*takes, *(f"[{at}]" for at in range(len(takes), len(args)))]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _words(place: FrameSummary) -> str:
    file = Path(place.filename)
    here = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    source = " ".join((place.line or "").split())
    if len(source) > LONGEST:
        source = source[: LONGEST - 3] + "..."
    return f"{here}:{place.lineno}" + (f" `{source}`" if source else "")
