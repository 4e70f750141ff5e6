"""Measure the memory that one operation on a CPU takes while it runs: what PyTorch's allocator of the
host tells a profiler of its own, which is on for this operation alone. That is what kernels take for
themselves, such as the reordered weights of a convolution, and give back before they return. It
measures nothing while somebody else's profiler is on, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

_AUTOGRAD: Any = torch._C._autograd
# They free a block that was there before the profiler was, of which PyTorch prints a warning.
_FREEING = ("resize_", "set_")


class Measured(NamedTuple):
    """What an operation has returned, and the bytes that it had in use above what was there."""

    out: Any
    most_bytes: int | None  # None where nobody has told


class KernelMemory:
    """Measures operations of this thread. It costs some microseconds for each."""

    def __init__(self) -> None:
        self.is_whole = True  # every operation was measured
        self._settings = _make_settings()

    def call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Measured:
        """Call the operation."""
        if not self._begin(func):
            return Measured(func(*args, **kwargs), None)
        try:
            out = func(*args, **kwargs)
        finally:
            most_bytes = self._end()
        return Measured(out, most_bytes)

    def _begin(self, func: Callable[..., Any]) -> bool:
        if getattr(func, "__name__", "").startswith(_FREEING):
            return False
        if self._settings is None or _AUTOGRAD._profiler_enabled():
            self.is_whole = False
            return False
        try:
            _AUTOGRAD._enable_profiler_legacy(self._settings)
        except RuntimeError:
            self.is_whole, self._settings = False, None
            return False
        return True

    def _end(self) -> int | None:
        try:
            threads = _AUTOGRAD._disable_profiler_legacy()
        except RuntimeError:  # the operation has ended the profiler
            self.is_whole = False
            return None
        most_bytes = 0
        for events in threads:
            now_bytes = 0
            for event in events:
                if event.kind() == "memory_alloc":
                    now_bytes += event.cpu_memory_usage()
                    most_bytes = max(most_bytes, now_bytes)
        return most_bytes


def _make_settings() -> Any:
    """Return the settings of the profiler that tells of memory alone; None where PyTorch has no such
    profiler."""
    profiler: Any = torch._C._profiler
    try:
        assert _AUTOGRAD._enable_profiler_legacy and _AUTOGRAD._disable_profiler_legacy
        return profiler.ProfilerConfig(
            profiler.ProfilerState.CPU,
            False,  # shapes
            True,  # memory
            *(False, False, False),  # stacks, operations, modules
            profiler._ExperimentalConfig(),
        )
    except (AttributeError, TypeError):
        return None
