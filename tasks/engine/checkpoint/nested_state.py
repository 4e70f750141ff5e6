"""A state of any structure, as tensors with names and plain JSON: dicts with keys of any plain
type, lists, tuples, numbers, text and bytes. It refuses what it could only keep by pickling.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch
from torch import Tensor

PLAIN = (str, int, float, bool, type(None))


class Unkeepable(TypeError):
    """A state holds something that is neither a tensor nor plain."""


def taken_apart(state: Any, tensors: dict[str, Tensor], name: str = "") -> Any:
    """The state as JSON knows it. Its tensors go to `tensors`, by where they lie in the state.

    Raises Unkeepable.
    """
    if isinstance(state, Tensor):
        tensors[name] = state.detach()
        return {"tensor": name}
    if isinstance(state, np.ndarray | np.generic) and state.dtype.kind in "bifu":
        tensors[name] = torch.from_numpy(np.array(state))
        return {"array": name}
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    if isinstance(state, PLAIN):
        return state
    if isinstance(state, dict):
        pairs = [[k, taken_apart(v, tensors, f"{name}/{_told(k)}")] for k, v in state.items()]
        if all(isinstance(key, PLAIN) for key, _ in pairs):
            return {"dict": pairs}
    elif isinstance(state, list | tuple):
        parts = [taken_apart(v, tensors, f"{name}/{i}") for i, v in enumerate(state)]
        return parts if isinstance(state, list) else {"tuple": parts}
    raise Unkeepable(f"{name or 'the state'} is a {type(state).__name__}")


def _told(key: Any) -> str:
    """A key in a name: no two of them are the same."""
    return key.replace("/", "//") if isinstance(key, str) else repr(key)


def put_together(plain: Any, tensors: dict[str, Tensor]) -> Any:
    """What was taken apart."""
    if isinstance(plain, list):
        return [put_together(part, tensors) for part in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, value),) = plain.items()
    match kind:
        case "tensor":
            return tensors[value]
        case "array":
            array = tensors[value].numpy()
            return array if array.ndim else array[()]
        case "bytes":
            return base64.b64decode(value)
        case "tuple":
            return tuple(put_together(part, tensors) for part in value)
    return {key: put_together(part, tensors) for key, part in value}
