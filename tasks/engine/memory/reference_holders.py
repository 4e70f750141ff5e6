"""Who holds an object, in words a person can act on: "list in module my_hooks, name 'kept'". Climbs
from the object to something with a name: a module, a local of a running function, a kept traceback,
a class. It reads dictionaries, frames and closures only, runs no code of the objects it meets and
keeps no reference to them; a key is quoted only if it is a short text or a number.
"""

from __future__ import annotations

import gc
import inspect
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

MOST_CLIMBS = 24  # each costs a pass over all Python objects, some 0.05 s
MOST_STEPS = 6  # that are put in words
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")  # of an nn.Module: not worth a word


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One holder in words. rank: the more telling, the lower; above: whose holder comes next."""

    words: str
    rank: int
    above: Any = None  # None: has a name, climb no further


class Holders:
    """Looks through the process once and names holders; forget it at once, since ids are reused."""

    def __init__(self, ours: Iterable[type] = ()) -> None:
        # `ours`: classes of the caller's own records, which hold the object only to look at it.
        self._ours = (*ours, Step)
        self._locals = _running_locals()
        self._known: dict[int, list[Step]] = {}

    def of(self, thing: Any) -> str | None:
        """Who holds `thing`, from near to far; None where no Python object does."""
        words: list[str] = []
        for step in self._climb(thing, {id(thing)}):
            _join(words, step.words)
        if len(words) > MOST_STEPS:
            words[MOST_STEPS - 2 : -1] = ["..."]
        return " in ".join(words) or None

    def _climb(self, thing: Any, seen: set[int]) -> list[Step]:
        """The way up to something with a name; the first one tried, where none gets there."""
        first: list[Step] = []
        for step in self._steps(thing):
            if step.above is None:
                return [step]
            if id(step.above) in seen or len(seen) > MOST_CLIMBS:
                continue
            seen.add(id(step.above))
            way = [step, *self._climb(step.above, seen)]
            if way[-1].above is None:
                return way
            first = first or way
        return first

    def _steps(self, thing: Any) -> list[Step]:
        """The holders, the most telling first; remembered, since the parts of a model share them
        from the second on."""
        if id(thing) not in self._known:
            found = []
            # A plain loop: a comprehension would hold `thing` in a closure of ours, and find it.
            for holder in gc.get_referrers(thing):
                if type(holder) not in self._ours:
                    found.append(_describe(holder, thing))
            if id(thing) in self._locals:
                found.append(Step(self._locals[id(thing)], rank=2))
            steps = [step for step in found if step is not None]
            self._known[id(thing)] = sorted(steps, key=lambda step: step.rank)
        return self._known[id(thing)]


def _describe(holder: Any, thing: Any) -> Step | None:
    cls = type(holder)
    for kind, describe in _KINDS:
        if kind in cls.__mro__:
            return describe(holder, thing)
    return _object(holder, thing)


def _dict(holder: dict[Any, Any], thing: Any) -> Step | None:
    keys = [key for key, value in list(dict.items(holder)) if value is thing]
    if not keys:
        return Step("the keys of a dict", rank=5, above=holder)
    module = dict.get(holder, "__name__") if type(holder) is dict else None
    if type(module) is str and "__spec__" in holder and "__loader__" in holder:
        return Step(f"module {module}, name {_quoted(keys[0])}", rank=0)
    return Step(f"dict, key {_quoted(keys[0])}", rank=5, above=holder)


def _module(holder: types.ModuleType, thing: Any) -> Step | None:
    return None  # its names are a dict, and named there


def _frame(holder: types.FrameType, thing: Any) -> Step | None:
    if holder.f_code.co_filename == __file__:
        return None
    names = [name for name, value in _locals_of(holder).items() if value is thing]
    if not names:  # the frame that it called, or its globals
        return None
    error = _error_with(holder)
    kept = f"exception {error}'s traceback" if error else "something that keeps it"
    place = _place(holder.f_code, holder.f_lineno)
    return Step(f"{kept}, frame {place}, local {_quoted(names[0])}", rank=1)


def _cell(holder: types.CellType, thing: Any) -> Step | None:
    for closure in gc.get_referrers(holder):
        if type(closure) is not tuple:
            continue
        for function in gc.get_referrers(closure):
            if type(function) is types.FunctionType and function.__closure__ is closure:
                names = function.__code__.co_freevars
                name = next((n for n, c in zip(names, closure, strict=False) if c is holder), None)
                place = _place(function.__code__, function.__code__.co_firstlineno)
                return Step(f"cell {_quoted(name)} of closure {place}", rank=3, above=function)
    return None  # of a running function: its locals tell


def _function(holder: types.FunctionType, thing: Any) -> Step | None:
    if holder.__code__.co_filename == __file__ or thing is holder.__globals__:
        return None
    place = _place(holder.__code__, holder.__code__.co_firstlineno)
    if thing is holder.__dict__:
        return Step(f"attributes of function {place}", rank=4, above=holder)
    return Step(f"default argument of function {place}", rank=4, above=holder)


def _generator(holder: Any, thing: Any) -> Step | None:
    names = ("gi_code", "cr_code", "ag_code")
    code: Any = next(getattr(holder, name) for name in names if hasattr(holder, name))
    return Step(f"suspended function {_place(code, code.co_firstlineno)}", rank=2)


def _class(holder: type, thing: Any) -> Step | None:
    return Step(f"of class {holder.__module__}.{holder.__qualname__}", rank=1)


def _sequence(holder: Any, thing: Any) -> Step | None:
    return Step(type(holder).__name__, rank=6, above=holder)


def _error(holder: BaseException, thing: Any) -> Step | None:
    name = type(holder).__name__
    if thing is holder.__traceback__ or thing is holder.__cause__ or thing is holder.__context__:
        return Step(f"exception {name}", rank=7, above=holder)
    return Step(f"exception {name}, its arguments or attributes", rank=4, above=holder)


def _object(holder: Any, thing: Any) -> Step | None:
    """Any other object: by attribute, where it has one of its own that is the thing."""
    kind = type(holder).__name__
    try:
        names = object.__getattribute__(holder, "__dict__")
    except (AttributeError, TypeError):
        names = {}
    if type(names) is dict:
        if thing is names:
            return Step(f"of {kind}", rank=4, above=holder)
        for name, value in list(names.items()):
            if value is thing:
                return Step(f"attribute {_quoted(name)} of {kind}", rank=4, above=holder)
    for cls in type(holder).__mro__:
        for name, member in vars(cls).items():
            if type(member) is types.MemberDescriptorType and _slot(member, holder) is thing:
                return Step(f"attribute {_quoted(name)} of {kind}", rank=4, above=holder)
    return Step(kind, rank=8, above=holder)


def _slot(member: types.MemberDescriptorType, holder: Any) -> Any:
    try:
        return member.__get__(holder)
    except (AttributeError, TypeError):  # an empty slot
        return None


_KINDS: tuple[tuple[type, Callable[[Any, Any], Step | None]], ...] = (
    (dict, _dict),
    (types.ModuleType, _module),
    (types.FrameType, _frame),
    (types.CellType, _cell),
    (types.FunctionType, _function),
    (types.GeneratorType, _generator),
    (types.CoroutineType, _generator),
    (types.AsyncGeneratorType, _generator),
    (type, _class),
    (list, _sequence),
    (tuple, _sequence),
    (BaseException, _error),
)


def _join(words: list[str], more: str) -> None:
    """Adds a step. An object and its __dict__ are one: "dict, key 'a'", "of Model" becomes
    "attribute 'a' of Model", and "'weight' of Linear" for the parts of an nn.Module."""
    prefix = "dict, key "
    if more.startswith("of "):
        if not words or not words[-1].startswith(prefix):
            more = more.removeprefix("of ")
        else:
            key = words.pop().removeprefix(prefix)
            if key.strip("'") in _MODULE_PARTS and words and words[-1].startswith(prefix):
                more = f"{words.pop().removeprefix(prefix)} {more}"
            else:
                more = f"attribute {key} {more}"
    words.append(more)


def _running_locals() -> dict[int, str]:
    """Names of the locals of running functions, by the id of their values."""
    found: dict[int, str] = {}
    # Before 3.13 looking changes what locals() returned, so other threads are left alone.
    safe = sys.version_info >= (3, 13)
    for top in sys._current_frames().values() if safe else (sys._getframe(),):
        frame: types.FrameType | None = top
        while frame is not None:
            if frame.f_code.co_filename != __file__ and frame.f_code.co_name != "<module>":
                place = _place(frame.f_code, frame.f_lineno)
                for name, value in _locals_of(frame).items():
                    found.setdefault(id(value), f"local {_quoted(name)} of function {place}")
            frame = frame.f_back
    # A frame in one of its own locals is a cycle, and the frames above would keep their tensors.
    del top, frame
    return found


def _locals_of(frame: types.FrameType) -> dict[str, Any]:
    """A copy of a frame's locals that leaves none behind.

    Before Python 3.13 f_locals is a dict that stays in the frame and would keep, until the
    function ends, what the function itself lets go of: a leak made by looking for one.
    """
    snapshot = frame.f_locals
    found = dict(snapshot)
    is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    # 3 references: the frame's, ours, the call's. One more, and someone uses what locals() gave.
    if sys.version_info < (3, 13) and is_function and sys.getrefcount(snapshot) <= 3:
        snapshot.clear()
    return found


def _error_with(frame: types.FrameType) -> str | None:
    """The class of an exception whose traceback holds the frame."""
    for one in gc.get_objects():
        if BaseException in type(one).__mro__:
            step = one.__traceback__
            while step is not None:
                if step.tb_frame is frame:
                    return type(one).__name__
                step = step.tb_next
    return None


def _place(code: types.CodeType, line: int | None) -> str:
    name = code.co_filename.replace("\\", "/").rsplit("/", 1)[-1]
    return f"{code.co_qualname} ({name}:{line})"


def _quoted(key: Any) -> str:
    if type(key) in (int, bool, float):
        return repr(key)
    return repr(key[:80]) if type(key) is str else type(key).__name__
