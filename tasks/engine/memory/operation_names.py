"""What an operation made, in words, and which Python line it comes from: the nearest one outside
PyTorch and the ledger; in a backward, which has none of its own, that of the forward operation
whose gradient it computes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from tasks.engine.distributed.shards import local

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_OURS = (f"{_HERE}{os.sep}allocation_log.py", __file__)


class Lines:
    """The lines of a step's operations. To be asked inside of each operation, below autograd."""

    def __init__(self) -> None:
        self._forward: dict[int, str] = {}  # by the number of the autograd node that a line made

    def of_this(self, *, is_needed: bool) -> str:
        """The line of the operation that runs now; perhaps empty where it is not needed."""
        # A backward runs in a thread of C++ on a GPU, with no Python on its stack.
        node = torch._C._current_autograd_node()
        if node is not None:
            forward = self._forward.get(node._sequence_nr(), "")
            return f"backward of {forward}" if forward else node.name()
        # Of an operation that will be differentiated the node was made just before it runs.
        number = torch.autograd._get_sequence_nr() - 1
        if not is_needed and number in self._forward:
            return ""
        line = _python_line()
        self._forward.setdefault(number, line)
        return line


def _python_line() -> str:
    """The nearest Python line outside PyTorch and the ledger; empty where there is none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_TORCH) and name not in _OURS and not name.startswith("<"):
            return f"{os.path.basename(name)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def tensors_of(out: Any) -> Iterator[Tensor]:
    """All tensors that an operation returned: of one shared out among ranks, what is here."""
    if isinstance(out, Tensor):
        yield local(out)
    elif isinstance(out, (list, tuple)):
        for one in out:
            yield from tensors_of(one)


def described(func: Any, tensor: Tensor) -> str:
    """mm (128, 256) float32"""
    return f"{name_of(func)} {shaped(tensor)}"


def name_of(func: Any) -> str:
    """mm"""
    return str(func.__name__).partition(".")[0]


def shaped(tensor: Tensor) -> str:
    """(128, 256) float32"""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
