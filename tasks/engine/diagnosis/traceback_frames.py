"""What the traceback of an error tells: the line of the user's code, whose code it was, and the
functions that did not return. It only looks, and leaves those alone that still run: looking at
their variables would keep them.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path
from traceback import FrameSummary
from types import FrameType

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


def is_plain(error: BaseException) -> bool:
    """Whether it needs no explanation: the user's own code or this project's raised it in so many
    words, or a data loader did, and no step."""
    places = traceback.extract_tb(error.__traceback__)
    if any(TORCH / "utils" / "data" in Path(one.filename).parents for one in places):
        return True
    if not places or is_installed(places[-1].filename):
        return False
    return (places[-1].line or "").startswith(("raise ", "assert "))


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


def _words(place: FrameSummary) -> str:
    file = Path(place.filename)
    here = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    source = " ".join((place.line or "").split())
    if len(source) > LONGEST:
        source = source[: LONGEST - 3] + "..."
    return f"{here}:{place.lineno}" + (f" `{source}`" if source else "")
