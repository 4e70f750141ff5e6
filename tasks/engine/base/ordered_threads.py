"""Work on one block after another in a few threads, the results in the order of the blocks. Only
a few blocks are under way at once, so that what they take of memory is known. It suits work that
leaves Python's lock, as Arrow and numpy do on large arrays.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
MOST_THREADS = 8


def usable_threads() -> int:
    """The processors that this process may use, at most 8: beyond, one thread hands out too
    slowly."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0))))


def in_order(work: Callable[[T], R], items: Iterable[T], *, threads: int) -> Iterator[R]:
    """work(item) for each item, in the items' order; at most `threads` + 1 are under way.

    Raises what `work` raises, at its turn. Left early, it waits for what is under way.
    """
    pool = ThreadPoolExecutor(threads)
    under_way: deque[Future[R]] = deque()
    try:
        for item in items:
            under_way.append(pool.submit(work, item))
            if len(under_way) > threads:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
