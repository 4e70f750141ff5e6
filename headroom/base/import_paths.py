"""Find and call a user's own code by its import path `package.module:attribute`, from the
working directory, as `python -m` finds it. What is not a user's code (Python's own modules and
this project's) is refused before it is imported, and so is every import path where
HEADROOM_ALLOW_IMPORTS forbids them. A factory is called with the arguments of the settings,
checked against its signature first, so that a wrong one is reported by name. This file travels
with logged models, so it imports nothing of this project.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
T = TypeVar("T")
ALLOW = "HEADROOM_ALLOW_IMPORTS"
YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
OWN = ("headroom", "flows", "tasks")  # this project's
_IN_TEXT = re.compile(r'File "([^"]+)", line (\d+)')
PACKAGES = ("site-packages", "dist-packages")
_STANDARD = os.path.realpath(sysconfig.get_path("stdlib"))


def find_import_problem(setting: str, path: str) -> str | None:
    """Return why this import path can't be used, as far as that is known without running any of
    it; None where nothing is wrong."""
    allowed = os.environ.get(ALLOW, "1")
    if allowed.strip().lower() in NO:
        return (
            f"{setting}: import paths are forbidden here by {ALLOW}={allowed} (got {path}); choose "
            "a built-in one, or lift that"
        )
    if (problem := find_allow_problem()) is not None:
        return problem
    module = path.partition(":")[0]
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in OWN:
        whose = "Python's own" if top in sys.stdlib_module_names else "this project's"
        return (
            f"{setting}: {top} is {whose}, no code of yours (got {path}); name a module of your "
            "own, under another name"
        )
    if find_module_spec(module) is None:
        return (
            f"{setting}: there is no module {module} (got {path}); it is looked for in "
            f"{os.getcwd()} and among the installed packages"
        )
    return None


def find_allow_problem() -> str | None:
    """Return why the value of HEADROOM_ALLOW_IMPORTS is not understood, or None: a misspelt
    guard must not allow anything."""
    word = os.environ.get(ALLOW, "1")
    if word.strip().lower() in (*YES, *NO):
        return None
    return f"{ALLOW}: must be one of {', '.join((*YES, *NO[:-1]))}, or empty (got {word[:80]!r})"


def find_module_spec(module: str) -> ModuleSpec | None:
    """Return the spec of a module, or None where there is no such module. Unlike importlib's
    find_spec, this imports no parent package."""
    importlib.invalidate_caches()  # a file may be younger than what was listed before
    places: list[str] | None = [os.getcwd(), *sys.path]
    spec = None
    for depth, part in enumerate(module.split(".")):
        if places is None:
            return None
        # By its own name: with the names of its parents these would have to be imported.
        spec = PathFinder.find_spec(part, places)
        if spec is None and depth == 0:
            spec = _find_editable_spec(part)
        if spec is None:
            return None
        inside = spec.submodule_search_locations
        places = None if inside is None else list(inside)
    return spec


def _find_editable_spec(name: str) -> ModuleSpec | None:
    """Return the spec of an editable install, which has a finder of its own; top level only."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def is_installed(file: str) -> bool:
    """Return whether this is a file of Python's own or of an installed package, and not a
    user's code.

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


def import_callable(path: str, *, setting: str, refusal: type[ValueError]) -> Callable[..., Any]:
    """Import the module of this path and return its attribute, which is callable; what the
    import prints goes to stderr.

    Raises `refusal`, with the file and line where the import itself raised or exited.
    """
    problem = find_import_problem(setting, path)
    if problem is not None:
        raise refusal(problem)
    module, _, attribute = path.partition(":")
    owner = _import_module(module, setting=setting, refusal=refusal)
    thing: Any = owner
    for name in attribute.split("."):
        if isinstance(thing, ModuleType) and thing is not owner:
            raise refusal(
                f"{setting}: {path} goes through another module; name the module where it is made"
            )
        if not hasattr(thing, name):
            near = get_close_matches(name, [n for n in dir(thing) if not n.startswith("_")], 1)
            hint = f"; did you mean {near[0]}?" if near else "; define it there"
            raise refusal(f"{setting}: {module} has no {attribute} (got {path}){hint}")
        thing = getattr(thing, name)
    if not callable(thing):
        raise refusal(
            f"{setting}: {path} must be a class or a function (got a {type(thing).__name__})"
        )
    if _is_from_python(thing):
        raise refusal(f"{setting}: {path} is Python's own, no code of yours; name a function of it")
    return thing


def _is_from_python(thing: Any) -> bool:
    if not isinstance(thing, (type, FunctionType, BuiltinFunctionType)):
        return False
    return str(thing.__module__).partition(".")[0] in sys.stdlib_module_names


def _import_module(module: str, *, setting: str, refusal: type[ValueError]) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with redirect_stdout(sys.stderr):
            return importlib.import_module(module)
    except BaseException as error:
        if is_requested_exit(error):
            raise
        problem = f"{setting}: {module} cannot be imported: {describe_error(error)}"
    raise refusal(problem)


def forbid_exit(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function that runs a user's code, so that a call which would end the process
    raises RuntimeError instead.

    The message holds only characters that a file can take (no half of a surrogate pair).
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            error.args = tuple(
                _escape_surrogates(one) if isinstance(one, str) else one for one in error.args
            )
            raise
        except BaseException as error:
            if is_requested_exit(error):
                raise
            description = describe_error(error)
        raise RuntimeError(description)

    return call


def is_requested_exit(error: BaseException) -> bool:
    """Return whether this is an exit that a signal or Prefect requested; a user's own
    `sys.exit()` is not.

    A handler of this project raises a class of its own. Python's, which knows Ctrl-C alone, can't
    be told from a user's KeyboardInterrupt.
    """
    if isinstance(error, Exception):
        return False
    if type(error).__module__.partition(".")[0] in ("prefect", "headroom"):
        return True
    is_interrupt = isinstance(error, KeyboardInterrupt)
    return is_interrupt and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _escape_surrogates(said: str) -> str:
    """Return the text with each half of a surrogate pair escaped, so that a file can take it."""
    return said.encode(errors="backslashreplace").decode()


def get_error_message(error: BaseException) -> str:
    """Return the error's message; empty where reading it raises another error."""
    try:
        return _escape_surrogates(str(error))
    except Exception:
        return ""


def describe_error(error: BaseException) -> str:
    """Describe where in the user's code the error was raised, and what it was: "model.py:12:
    ValueError: no such layer".

    The error's frames are released: they may hold a model.
    """
    place = _find_place(error)
    text = " ".join(get_error_message(error).split())
    if text.startswith("Caught ") and " in DataLoader worker" in text:
        # A worker sends the whole traceback as text, of which the last line is the error.
        last = get_error_message(error).strip().splitlines()[-1]
        return f"{_find_place_in_text(get_error_message(error))}{last}"[:500]
    if isinstance(error, SyntaxError):
        text = error.msg
    if isinstance(error, SystemExit):
        what = f"it exits with {error.code!r}; keep that under `if __name__ == '__main__':`"
    else:
        what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    traceback.clear_frames(error.__traceback__)
    return f"{place}: {what[:500]}" if place else what[:500]


def _find_place(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shorten_path(error.filename)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    project = str(Path(__file__).parent.parent)
    theirs = [
        frame
        for frame in frames
        if not frame.filename.startswith(("<", project)) and not is_installed(frame.filename)
    ]
    return f"{_shorten_path(theirs[-1].filename)}:{theirs[-1].lineno}" if theirs else ""


def _find_place_in_text(traceback_text: str) -> str:
    """Return the last place that a traceback's text names."""
    places = _IN_TEXT.findall(traceback_text)
    theirs = [(f, line) for f, line in places if not is_installed(f)]
    return f"{_shorten_path(theirs[-1][0])}:{theirs[-1][1]}: " if theirs else ""


def _shorten_path(file: str) -> str:
    """Return the file's path as a person finds it: relative to the working directory where it
    lies there."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here)


MOST_SHOWN = 12
_NO_MEMORY = re.compile(r"out of memory|not enough memory|can't allocate memory", re.IGNORECASE)


def bind_arguments(
    factory: Callable[..., Any],
    args: Mapping[str, Any],
    offered: Mapping[str, Any],
    *,
    setting: str,
    refusal: type[ValueError],
) -> dict[str, Any]:
    """Return the arguments to call the factory with: `args`, and of `offered` what it has
    parameters for.

    setting: that holds the arguments, such as model.args. Raises `refusal` where they don't fit.
    """
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some built in C don't tell
        return dict(args)
    takes = {
        name: p
        for name, p in signature.parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    bound = {name: value for name, value in offered.items() if name in takes} | dict(args)
    name = getattr(factory, "__name__", type(factory).__name__)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for unknown in [] if takes_any else sorted(set(bound) - set(takes)):
        near = get_close_matches(unknown, takes, 1)
        hint = (
            f"; did you mean {near[0]}?"
            if near
            else f"; {name} {_describe_parameters(list(takes))}"
        )
        raise refusal(f"{setting}: {unknown!r} is unknown{hint}")
    missing = [n for n, p in takes.items() if p.default is p.empty and n not in bound]
    if missing:
        raise refusal(
            f"{setting}: {missing[0]!r} is missing; {name} {_describe_parameters(list(takes))}, "
            "and this one has no default"
        )
    try:
        signature.bind(**bound)
    except TypeError as error:  # a parameter by position only
        raise refusal(f"{setting}: {name} cannot be called by name ({error})") from None
    return bound


def call_factory(
    factory: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    setting: str,
    path: str,
    refusal: type[ValueError],
) -> Any:
    """Call the factory and return its result; what it prints goes to stderr.

    Raises `refusal` with the line of the user's code that raised or exited. An error which says
    that memory ran out is raised as it is.
    """
    try:
        with redirect_stdout(sys.stderr):
            return factory(**arguments)
    except MemoryError:
        raise
    except BaseException as error:
        if is_requested_exit(error) or (
            isinstance(error, RuntimeError) and _NO_MEMORY.search(get_error_message(error))
        ):
            raise
        problem = f"{setting}: {path} raised: {describe_error(error)}"
    raise refusal(problem)


def _describe_parameters(names: list[str]) -> str:
    if not names:
        return "takes no arguments"
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return f"takes {', '.join(names[:MOST_SHOWN])}{more}"


def is_import_path(name: str) -> bool:
    """Return whether the name is an import path, package.module:attribute, to a user's own code."""
    return ":" in name
