"""Keeps what calls of a user's function change in Python: its attributes and those of its object,
the variables that it shares with an outer function, and the globals that its code names. So a
function can be tried before a training, and the training finds it as it was.
"""

from __future__ import annotations

import copy
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))
Restore = Callable[[], object]


@contextmanager
def keep_python_state(functions: Iterable[Any]) -> Iterator[None]:
    """Put back, after the block, what calls inside it have changed of these functions, objects or
    modules: numbers, texts, lists, dicts, sets, arrays, tensors and random generators. Anything
    else that they hold is not looked into."""
    restores: list[Restore] = []
    seen: set[int] = set()
    for function in functions:
        _collect(function, seen, restores)
    try:
        yield
    finally:
        for restore in restores:
            restore()


@contextmanager
def keep_values(values: Iterable[Any]) -> Iterator[None]:
    """Put back, after the block, what these lists, dicts, sets, deques, arrays, tensors and random
    generators held before it. What is of another kind is left as it is then."""
    restores: list[Restore] = []
    for value in values:
        _keep_value(value, restores)
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _collect(owner: Any, seen: set[int], restores: list[Restore]) -> None:
    """Add what puts back the state of this function, method or object."""
    if isinstance(owner, (type, types.ModuleType, types.BuiltinFunctionType)) or id(owner) in seen:
        return
    seen.add(id(owner))
    if isinstance(owner, types.MethodType):
        _collect(owner.__self__, seen, restores)
        owner = owner.__func__
    if isinstance(owner, types.FunctionType):
        _collect_function(owner, seen, restores)
        return
    if isinstance(owner, nn.Module):
        _collect_module(owner, restores)
        return
    attributes = getattr(owner, "__dict__", None)
    if isinstance(attributes, dict):
        _keep_names(attributes, attributes, restores)
    for kind in type(owner).__mro__:
        if isinstance(call := vars(kind).get("__call__"), types.FunctionType):
            _collect_function(call, seen, restores)
            return


def _collect_function(
    function: types.FunctionType, seen: set[int], restores: list[Restore]
) -> None:
    _keep_names(function.__dict__, function.__dict__, restores)
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if isinstance(value, PLAIN):
            restores.append(partial(setattr, cell, "cell_contents", value))
        elif not _keep_value(value, restores):
            _collect(value, seen, restores)
    # Functions of the same file that it calls may count as well.
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        is_of_file = getattr(value, "__module__", None) == function.__module__
        if isinstance(value, types.FunctionType):
            if is_of_file and id(value) not in seen:
                seen.add(id(value))
                _collect_function(value, seen, restores)
        elif name in function.__globals__:
            _keep_names(function.__globals__, (name,), restores)
            if is_of_file:
                _collect(value, seen, restores)


def _collect_module(module: nn.Module, restores: list[Restore]) -> None:
    tensors = (*module.parameters(), *module.buffers())
    restores.extend(partial(_copy_into, tensor, tensor.detach().clone()) for tensor in tensors)
    for layer in module.modules():
        state = vars(layer)
        _keep_names(state, [name for name in state if not name.startswith("_")], restores)
        # Those that were put in another's place have to go again.
        restores.append(partial(layer._buffers.update, dict(layer._buffers)))


def _keep_names(
    names: MutableMapping[str, Any], which: Iterable[str], restores: list[Restore]
) -> None:
    for name in tuple(which):
        value = names[name]
        if isinstance(value, PLAIN) or _keep_value(value, restores):
            restores.append(partial(names.__setitem__, name, value))


def _keep_value(value: Any, restores: list[Restore]) -> bool:
    """Add what puts back the content of a value that can be changed in place; False where it is of
    none of the known kinds."""
    try:
        if isinstance(value, Tensor):
            restores.append(partial(_copy_into, value, value.detach().clone()))
        elif isinstance(value, np.ndarray):
            restores.append(partial(np.copyto, value, value.copy()))
        elif isinstance(value, list):
            restores.append(partial(value.__setitem__, slice(None), copy.deepcopy(value)))
        elif isinstance(value, (dict, set)):
            restores.append(partial(_refill, value, copy.deepcopy(value)))
        elif isinstance(value, deque):
            restores.append(partial(_refill_deque, value, copy.deepcopy(value)))
        elif isinstance(value, random.Random):
            restores.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.Generator):
            kept = copy.deepcopy(value.bit_generator.state)
            restores.append(partial(setattr, value.bit_generator, "state", kept))
        elif isinstance(value, np.random.RandomState):
            restores.append(partial(value.set_state, value.get_state(legacy=False)))
        elif isinstance(value, torch.Generator):
            # Alike in words alone: each takes a state of its own kind.
            restores.append(partial(torch.Generator.set_state, value, value.get_state()))
        else:
            return False
    except (TypeError, ValueError, RuntimeError):  # holds what cannot be copied
        return False
    return True


@torch.no_grad()
def _copy_into(tensor: Tensor, kept: Tensor) -> None:
    tensor.copy_(kept)


def _refill(value: Any, kept: Any) -> None:
    value.clear()
    value.update(kept)


def _refill_deque(value: deque[Any], kept: deque[Any]) -> None:
    value.clear()
    value.extend(kept)
