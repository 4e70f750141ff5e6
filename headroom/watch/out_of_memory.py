"""Recognize that memory ran out, whoever says so: PyTorch, a driver, a library or the system; keep
in plain values what was known of it; and release the tensors that an error keeps alive by the
frames of its traceback.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from headroom.base.import_paths import get_error_message

# What allocators and libraries say when memory ran out and no torch.OutOfMemoryError came of it.
_OOM = re.compile(
    r"(CUDA|HIP|XPU|MPS backend) out of memory"
    r"|(CUDA|HIP)( driver)? error: out of memory"
    r"|Cuda failure (\d+ )?'out of memory'"  # NCCL
    r"|(CUBLAS|HIPBLAS|CUSOLVER|CUSPARSE|CUDNN)_STATUS_ALLOC_FAILED"
    r"|CUDNN_STATUS_INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED"
    r"|miopenStatusAllocFailed|rocblas_status_memory_error"
    r"|UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY"
    r"|Invalid buffer size: [\d.]+ [KMGT]i?B"  # MPS: more than one Metal buffer can be
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|std::bad_alloc"
)


@dataclass(frozen=True)
class MemoryFailure:
    """The last attempt that ran out of memory, in plain values."""

    text: str  # the device's own words
    phase: str  # a phase of a step; training, sending or set-up where more is not known
    step: int = 0  # of the training; 0 before its first
    batch_shape: tuple[int, ...] = ()
    tried: tuple[int, ...] = ()  # rows of the micro-batches that did not fit
    fitted: int | None = None  # of the largest that did
    allocator: Mapping[str, int] = field(default_factory=dict)  # see allocators.py
    unrepeated: str = ""  # why it was not tried again: what would have been wrong then


def is_oom(error: BaseException) -> bool:
    """Return whether memory ran out: in the error itself, or in one that caused it."""
    return any(_is_oom_itself(one) for one in list_error_chain(error))


def _is_oom_itself(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _OOM.search(get_error_message(error)) is not None


def list_error_chain(error: BaseException) -> list[BaseException]:
    """Return the error, its causes and contexts, and the members of groups; each once."""
    errors: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in errors:
            continue
        errors[id(one)] = one
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
    return list(errors.values())


def clear_frames(error: BaseException) -> None:
    """Clear every local variable that the error and its whole chain keep.

    Functions that still run keep theirs. Code that keeps the error afterwards (Prefect does)
    keeps no tensor by it; the traceback still prints.
    """
    for one in list_error_chain(error):
        if isinstance(one, AttributeError):
            one.obj = None  # the very object that lacks the attribute: perhaps the model
        for frame, _ in traceback.walk_tb(one.__traceback__):
            try:
                frame.clear()
            except RuntimeError:  # it still runs
                continue
            if sys.version_info < (3, 13):
                # Whoever looked at f_locals left a copy in the frame, which clear() forgets.
                # Looking again brings the copy up to date, which is empty now.
                _ = frame.f_locals


def forget_frames(error: BaseException) -> None:
    """Remove the frames themselves from an error that ends a run from outside.

    In Python 3.11 a cleared frame keeps its function, and so what this encloses. Where in the
    libraries an interrupt arrived is of no use to anybody, and the compiler's closures hold models.
    """
    for one in list_error_chain(error):
        one.__traceback__ = None
