"""The C library's heap, from which a CPU's tensors come. Left to itself, glibc returns each block
above 32 MiB to the system when a step lets go of it, and the next step pays a page fault for every
4 KiB of it again. It refuses nothing: where there is no glibc, nothing is changed.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

# Of mallopt(3): https://man7.org/linux/man-pages/man3/mallopt.3.html
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
USUAL_BYTES = 32 * 1024**2  # what glibc's own thresholds grow to; a trim happens at twice that
MOST_BYTES = 2**30  # a larger block is not worth keeping: the work on it outweighs its faults
NEVER = 2**31 - 1


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Inside, what a step on a CPU frees is kept for the next one; `give_back` returns it.

    A step of a cnn (3x32x32, batch 512, 2 cores) took 0.23 s inside and 0.32 to 0.44 s outside.
    """
    libc = _glibc()
    if device.type != "cpu" or libc is None:
        yield
        return
    # Older versions allow no more than the usual.
    if not libc.mallopt(M_MMAP_THRESHOLD, MOST_BYTES):
        libc.mallopt(M_MMAP_THRESHOLD, USUAL_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, NEVER)
    try:
        yield
    finally:
        libc.mallopt(M_MMAP_THRESHOLD, USUAL_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * USUAL_BYTES)


def give_back() -> None:
    """Return to the system what the heap keeps."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
