"""Measure the memory that one operation on a CPU takes while it runs: what PyTorch's allocator of
the host tells a profiler of its own, which is on for this operation alone. That is what kernels
take for themselves, such as the reordered weights of a convolution, and give back before they
return. It measures nothing while somebody else's profiler is on, and no operation among processes,
and says so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headroom.base import nested

_AUTOGRAD: Any = torch._C._autograd
# They free a block that was there before the profiler was, of which PyTorch prints a warning.
_FREEING = ("resize_", "set_")
# Operations among processes end in threads of others, which a profiler of one thread cannot follow.
_COLLECTIVE = ("c10d", "_c10d")
# c10/core/CPUAllocator.h; names that a compiler for Windows writes otherwise.
_GET_REPORTER = "_ZN3c1025profiledCPUMemoryReporterEv"
_FORGET = "_ZN3c1025ProfiledCPUMemoryReporter6DeleteEPv"


class Measured(NamedTuple):
    """What an operation has returned, and the bytes that it had in use above what was there."""

    out: Any
    most_bytes: int | None  # None where nobody has told


class KernelMemory:
    """Measures operations of this thread. It costs some microseconds for each."""

    def __init__(self) -> None:
        self.is_whole = True  # every operation was measured
        self._means = _find_means()

    def call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Measured:
        """Call the operation. Raises what it raises, and nothing else."""
        if not self._begin(func):
            return Measured(func(*args, **kwargs), None)
        out: Any = None
        try:
            out = func(*args, **kwargs)
        finally:
            most_bytes = self._end(out, (args, kwargs))
        return Measured(out, most_bytes)

    def _begin(self, func: Callable[..., Any]) -> bool:
        if getattr(func, "__name__", "").startswith(_FREEING):
            return False
        try:
            is_followed = not getattr(func, "namespace", "").startswith(_COLLECTIVE)
            if is_followed and self._means is not None and not _AUTOGRAD._profiler_enabled():
                _AUTOGRAD._enable_profiler_legacy(self._means.settings)
                return True
        except Exception:  # of PyTorch's own, whose names are private
            self._means = None
        self.is_whole = False
        return False

    def _end(self, out: Any, inputs: Any) -> int | None:
        try:
            try:
                self._forget_outputs(out, inputs)
            finally:
                threads = _AUTOGRAD._disable_profiler_legacy()
            return _find_most_bytes(threads)
        except Exception:
            self.is_whole, self._means = False, None
            return None

    def _forget_outputs(self, out: Any, inputs: Any) -> None:
        """Let the allocator's table forget what lives on: it would hear of its end no more, and
        tell another profiler that another block of that address was as large."""
        made = {*_find_addresses(out)}
        if made and self._means is not None:
            for address in made.difference(_find_addresses(inputs)):
                self._means.forget(address)


class _Means(NamedTuple):
    settings: Any  # of the profiler
    forget: Callable[[int], None]  # an address


def _find_addresses(things: Any) -> Iterator[int]:
    for tensor in nested.find_tensors(things):
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            address = Tensor.untyped_storage(tensor).data_ptr()
            if address:  # not of one without elements
                yield address


def _find_most_bytes(threads: Any) -> int:
    most_bytes = 0
    for events in threads:
        now_bytes = 0
        for event in events:
            if event.kind() == "memory_alloc":
                now_bytes += event.cpu_memory_usage()
                most_bytes = max(most_bytes, now_bytes)
    return most_bytes


@cache
def _find_means() -> _Means | None:
    """Return how to ask for memory alone; None where this PyTorch does not tell of it."""
    profiler: Any = torch._C._profiler
    try:
        assert _AUTOGRAD._enable_profiler_legacy and _AUTOGRAD._disable_profiler_legacy
        settings = profiler.ProfilerConfig(
            profiler.ProfilerState.CPU,
            False,  # shapes
            True,  # memory
            *(False, False, False),  # stacks, operations, modules
            profiler._ExperimentalConfig(),
        )
        (library,) = (Path(torch.__file__).parent / "lib").glob("libc10.*")
        c10 = ctypes.PyDLL(str(library))
        get_reporter, forget = getattr(c10, _GET_REPORTER), getattr(c10, _FORGET)
    except (AttributeError, TypeError, ValueError, OSError):
        return None
    get_reporter.argtypes, get_reporter.restype = [], ctypes.c_void_p
    forget.argtypes, forget.restype = [ctypes.c_void_p, ctypes.c_void_p], None
    reporter = get_reporter()
    return _Means(settings, lambda address: forget(reporter, address))
