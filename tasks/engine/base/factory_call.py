"""How a factory of the user's own is called: with the arguments of the settings, and with what is
offered where it has parameters of these names. Arguments are held against its signature first, so
that a wrong one is told by its name and not by a traceback. It travels with logged models.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from difflib import get_close_matches
from typing import Any

from tasks.engine.base.import_paths import is_asked, said, told_of

MOST_SHOWN = 12
_NO_MEMORY = re.compile(r"out of memory|not enough memory|can't allocate memory", re.IGNORECASE)


def arguments(
    factory: Callable[..., Any],
    args: Mapping[str, Any],
    offered: Mapping[str, Any],
    *,
    setting: str,
    refusal: type[ValueError],
) -> dict[str, Any]:
    """What to call the factory with: `args`, and of `offered` what it has parameters for.

    setting: of the arguments, as in model.args. Raises `refusal` where they don't fit.
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
    given = {name: value for name, value in offered.items() if name in takes} | dict(args)
    name = getattr(factory, "__name__", type(factory).__name__)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for unknown in [] if takes_any else sorted(set(given) - set(takes)):
        near = get_close_matches(unknown, takes, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; {name} {_taken(list(takes))}"
        raise refusal(f"{setting}: {unknown!r} is unknown{hint}")
    missing = [n for n, p in takes.items() if p.default is p.empty and n not in given]
    if missing:
        raise refusal(
            f"{setting}: {missing[0]!r} is missing; {name} {_taken(list(takes))}, and this one has "
            "no default"
        )
    try:
        signature.bind(**given)
    except TypeError as error:  # a parameter by position only
        raise refusal(f"{setting}: {name} cannot be called by name ({error})") from None
    return given


def called(
    factory: Callable[..., Any],
    given: Mapping[str, Any],
    *,
    setting: str,
    path: str,
    refusal: type[ValueError],
) -> Any:
    """What the factory returns; what it prints goes to stderr.

    Raises `refusal` with the line of the user's code that raised or exited. What says that memory
    ran out is raised as it is.
    """
    try:
        with redirect_stdout(sys.stderr):
            return factory(**given)
    except MemoryError:
        raise
    except BaseException as error:
        if is_asked(error) or (isinstance(error, RuntimeError) and _NO_MEMORY.search(said(error))):
            raise
        told = f"{setting}: {path} raised: {told_of(error)}"
    raise refusal(told)


def _taken(names: list[str]) -> str:
    if not names:
        return "takes no arguments"
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return f"takes {', '.join(names[:MOST_SHOWN])}{more}"
