"""Code of the user's own, found by its import path `package.module:attribute` from the working
directory, as `python -m` finds it. It refuses what is no code of a user (Python's own modules and
this project's) before that is touched, and every import path where HEADROOM_ALLOW_IMPORTS says no.
It travels with logged models, so it imports nothing of this project.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
ALLOW = "HEADROOM_ALLOW_IMPORTS"
YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
OWN = ("flows", "tasks")  # this project's
_IN_TEXT = re.compile(r'File "([^"]+)", line (\d+)')
PACKAGES = ("site-packages", "dist-packages")
_STANDARD = os.path.realpath(sysconfig.get_path("stdlib"))


def problem(setting: str, path: str) -> str | None:
    """Why this import path can't be used, as far as can be told without running any of it."""
    allowed = os.environ.get(ALLOW, "1")
    if allowed.strip().lower() in NO:
        return (
            f"{setting}: import paths are forbidden here by {ALLOW}={allowed} (got {path}); choose "
            "a built-in one, or lift that"
        )
    if (told := unknown_word()) is not None:
        return told
    module = path.partition(":")[0]
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in OWN:
        whose = "Python's own" if top in sys.stdlib_module_names else "this project's"
        return (
            f"{setting}: {top} is {whose}, no code of yours (got {path}); name a module of your "
            "own, under another name"
        )
    if spec_of(module) is None:
        return (
            f"{setting}: there is no module {module} (got {path}); it is looked for in "
            f"{os.getcwd()} and among the installed packages"
        )
    return None


def unknown_word() -> str | None:
    """Why HEADROOM_ALLOW_IMPORTS isn't understood: a guard that is misspelt must not stand open."""
    word = os.environ.get(ALLOW, "1")
    if word.strip().lower() in (*YES, *NO):
        return None
    return f"{ALLOW}: must be one of {', '.join((*YES, *NO[:-1]))}, or empty (got {word[:80]!r})"


def spec_of(module: str) -> ModuleSpec | None:
    """Where a module lies; None where there is none. Unlike importlib's, it imports no parent."""
    importlib.invalidate_caches()  # a file may be younger than what was listed before
    places: list[str] | None = [os.getcwd(), *sys.path]
    spec = None
    for depth, part in enumerate(module.split(".")):
        if places is None:
            return None
        # By its own name: with the names of its parents these would have to be imported.
        spec = PathFinder.find_spec(part, places)
        if spec is None and depth == 0:
            spec = _by_other_finders(part)
        if spec is None:
            return None
        inside = spec.submodule_search_locations
        places = None if inside is None else list(inside)
    return spec


def _by_other_finders(name: str) -> ModuleSpec | None:
    """Of packages installed to be edited, which have finders of their own; top level only."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def is_installed(file: str) -> bool:
    """Whether this is a file of Python's own or of an installed package, and no code of a user's.

    Packages lie in more places than this environment's: the system's and the user's ones, which
    bring torch to many GPU machines, and any folder on the path that pip has filled.
    """
    whole = Path(os.path.realpath(file))
    if whole.is_relative_to(_STANDARD) or set(PACKAGES) & set(whole.parts):
        return True
    places = (Path(os.path.realpath(place)) for place in sys.path if place)
    return any(
        whole.is_relative_to(place) and any(place.glob("*.dist-info"))
        for place in places
        if place != Path.cwd()
    )


def found(path: str, *, setting: str, refusal: type[ValueError]) -> Callable[..., Any]:
    """The attribute of that module, which is callable; what its import prints goes to stderr.

    Raises `refusal`, with the file and line where the import itself raised or exited.
    """
    told = problem(setting, path)
    if told is not None:
        raise refusal(told)
    module, _, attribute = path.partition(":")
    owner = _imported(module, setting=setting, refusal=refusal)
    found: Any = owner
    for name in attribute.split("."):
        if isinstance(found, ModuleType) and found is not owner:
            raise refusal(
                f"{setting}: {path} goes through another module; name the module where it is made"
            )
        if not hasattr(found, name):
            near = get_close_matches(name, [n for n in dir(found) if not n.startswith("_")], 1)
            hint = f"; did you mean {near[0]}?" if near else "; define it there"
            raise refusal(f"{setting}: {module} has no {attribute} (got {path}){hint}")
        found = getattr(found, name)
    if not callable(found):
        raise refusal(
            f"{setting}: {path} must be a class or a function (got a {type(found).__name__})"
        )
    if _is_pythons(found):
        raise refusal(f"{setting}: {path} is Python's own, no code of yours; name a function of it")
    return found


def _is_pythons(found: Any) -> bool:
    if not isinstance(found, (type, FunctionType, BuiltinFunctionType)):
        return False
    return str(found.__module__).partition(".")[0] in sys.stdlib_module_names


def _imported(module: str, *, setting: str, refusal: type[ValueError]) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with redirect_stdout(sys.stderr):
            return importlib.import_module(module)
    except BaseException as error:
        if is_asked(error):
            raise
        told = f"{setting}: {module} cannot be imported: {told_of(error)}"
    raise refusal(told)


def ends_told(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which raises RuntimeError where a user's code would have ended the process.

    What is raised says nothing that no file takes (half of a surrogate pair).
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            error.args = tuple(_text(one) if isinstance(one, str) else one for one in error.args)
            raise
        except BaseException as error:
            if is_asked(error):
                raise
            told = told_of(error)
        raise RuntimeError(told)

    return call


def is_asked(error: BaseException) -> bool:
    """Whether it is the end that a signal or Prefect asked for; a user's own `sys.exit()` is not.

    A handler of this project raises in its own file. Python's own, which knows Ctrl-C alone, can't
    be told from a user's KeyboardInterrupt.
    """
    if isinstance(error, Exception):
        return False
    if type(error).__module__.partition(".")[0] == "prefect":
        return True
    if isinstance(error, KeyboardInterrupt):
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            return True
    elif not isinstance(error, SystemExit):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    here = str(Path(__file__).parent.parent.parent.parent) + os.sep
    inner = frames[-1].filename if frames else ""
    return inner.startswith(tuple(here + name + os.sep for name in OWN))


def _text(said: str) -> str:
    """What a file takes: half of a surrogate pair as its escape."""
    return said.encode(errors="backslashreplace").decode()


def said(error: BaseException) -> str:
    """What the error says; empty where asking it raises another one."""
    try:
        return _text(str(error))
    except Exception:
        return ""


def told_of(error: BaseException) -> str:
    """Where in the user's code it was raised, and what: "model.py:12: ValueError: no such layer".

    Its frames are let go of: they may hold a model.
    """
    place = _place(error)
    text = " ".join(said(error).split())
    if text.startswith("Caught ") and " in DataLoader worker" in text:
        # A worker sends the whole traceback as text, of which the last line is the error.
        last = said(error).strip().splitlines()[-1]
        return f"{_in_text(said(error))}{last}"[:500]
    if isinstance(error, SyntaxError):
        text = error.msg
    if isinstance(error, SystemExit):
        what = f"it exits with {error.code!r}; keep that under `if __name__ == '__main__':`"
    else:
        what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    traceback.clear_frames(error.__traceback__)
    return f"{place}: {what[:500]}" if place else what[:500]


def _place(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    project = str(Path(__file__).parent.parent)
    theirs = [
        frame
        for frame in frames
        if not frame.filename.startswith(("<", project)) and not is_installed(frame.filename)
    ]
    return f"{_shown(theirs[-1].filename)}:{theirs[-1].lineno}" if theirs else ""


def _in_text(traceback_text: str) -> str:
    """The place that a traceback's text tells last."""
    found = _IN_TEXT.findall(traceback_text)
    theirs = [(f, line) for f, line in found if not is_installed(f)]
    return f"{_shown(theirs[-1][0])}:{theirs[-1][1]}: " if theirs else ""


def _shown(file: str) -> str:
    """A file as a person finds it: relative to the working directory where it lies there."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here)
