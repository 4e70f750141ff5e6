"""Keeps what an account does wrong from the loop that it tells of. Each method that a loop or a
framework may call is guarded: an error of ours ends there, is told once, and the loop goes on. What
is not ours passes: Ctrl-C, an exit, and what a handler of a signal raises wherever we stand.
"""

from __future__ import annotations

import logging
import signal
import traceback
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import wraps
from inspect import unwrap
from types import FunctionType, MethodType
from typing import Any, TypeVar, cast

from torch.compiler import is_compiling

log = logging.getLogger(__name__)
Method = TypeVar("Method", bound=Callable[..., Any])
TAKE = "take_error"
OURS = ("headroom.",)  # modules; of a class that somebody derives, the methods are theirs


class Guarded:
    """A class whose public methods raise nothing of their own, but for those named `raising`."""

    is_deaf = False  # it measures no more, and its methods do nothing

    def __init_subclass__(cls, *, raising: Collection[str] = (), **more: Any) -> None:
        super().__init_subclass__(**more)
        for name, method in list(vars(cls).items()):
            is_method = isinstance(method, FunctionType) and not hasattr(method, "is_guarded")
            if is_method and name[0] != "_" and name not in (*raising, TAKE) and is_ours(cls):
                setattr(cls, name, guard(method))

    def take_error(self, error: BaseException) -> None:
        """Measure no more, and tell why, once."""
        raise NotImplementedError


def is_ours(cls: type) -> bool:
    """Return whether this class is of this project."""
    return cls.__module__.startswith(OURS)


def guard(
    method: Callable[..., Any], *, otherwise: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return the method of a Guarded, which raises nothing of its own. otherwise: returns what the
    caller gets where it fails, from the same arguments; None by default."""

    @wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if not self.is_deaf:
            try:
                return method(self, *arguments, **named)
            except Exception as error:
                take_own_error(self, error)
        return None if otherwise is None else otherwise(self, *arguments, **named)

    @wraps(method)
    def call_plainly(self: Any) -> None:  # at half the price: several are called at each step
        if not self.is_deaf:
            try:
                method(self)
            except Exception as error:
                take_own_error(self, error)

    code = method.__code__
    is_plain = code.co_argcount == 1 and not code.co_kwonlyargcount and not code.co_flags & 12
    has_result = method.__annotations__.get("return") not in (None, "None")
    guarded: Any = call if otherwise or has_result or not is_plain else call_plainly
    guarded.is_guarded = True
    return cast(Callable[..., Any], guarded)


def mark_guarded(method: Method) -> Method:
    """Return the method, which keeps its own errors to itself and needs no other guard."""
    method.is_guarded = True  # type: ignore[attr-defined]
    return method


def unguard(method: Any) -> Callable[..., Any]:
    """Return a bound method without its guard, for who guards it otherwise."""
    return MethodType(unwrap(method.__func__), method.__self__)


class Block:
    """A context of two calls, and a third where an error leaves it; it guards them itself. It has
    no state: a loop enters the same one at each step."""

    __slots__ = ("_begin", "_drop", "_end", "_owner")

    def __init__(
        self,
        owner: Guarded,
        begin: Callable[[], None],
        end: Callable[[], None],
        drop: Callable[[], None],
    ) -> None:
        self._owner, self._begin, self._end, self._drop = owner, begin, end, drop

    def __enter__(self) -> None:
        if not self._owner.is_deaf:
            try:
                self._begin()
            except Exception as error:
                take_own_error(self._owner, error)

    def __exit__(self, kind: Any, *_: object) -> None:
        if not self._owner.is_deaf:
            try:
                (self._end if kind is None else self._drop)()
            except Exception as error:
                take_own_error(self._owner, error)


def take_own_error(guarded: Guarded, error: Exception) -> None:
    """Hand this error to the one whose method it left. Raises it where it is somebody else's."""
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {getattr(handler, "__code__", None) for handler in handlers} - {None}
    frames = traceback.walk_tb(error.__traceback__)
    if any(frame.f_code in codes for frame, _ in frames):
        raise error
    try:
        guarded.take_error(error)
    except Exception as again:
        log.warning("account: an error of its own; the loop goes on", exc_info=again)


class Hook:
    """A hook for PyTorch to call, guarded. A copy of its model, pickled or not, does not keep it:
    there it does nothing."""

    __slots__ = ("call", "owner")
    __torch_unserializable__ = True  # no warning where a tensor that has it is written

    def __init__(self, owner: Guarded, call: Callable[..., None]) -> None:
        self.owner, self.call = owner, call

    def __call__(self, *arguments: Any) -> None:
        if is_compiling():  # a compiler looks on, which would keep what we hold for constant
            return
        try:
            self.call(*arguments)
        except Exception as error:
            take_own_error(self.owner, error)

    def __reduce__(self) -> Any:
        # Of the standard library, so that the copy can be read where this project is not.
        return getattr, (nullcontext(), "__exit__")
