"""Do work in threads and hand out the results in order, with little of it under way at once, so
that its memory is bounded. What fails there is raised where its result is asked for.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
MOST_THREADS = 8


def count_usable_threads() -> int:
    """Return the number of processors that this process may use, at most 8: beyond that, one
    thread cannot hand out work fast enough."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0))))


def map_in_order(
    work: Callable[[T], R], items: Iterable[T], *, threads: int
) -> Generator[R, None, None]:
    """Yield work(item) for each item, in the items' order; at most `threads` + 1 are under way, so
    that their memory is bounded.

    The items are made here, in the caller's thread. Raises what `work` raises, at its turn. Closed
    early, it waits for what is under way; the threads end with it.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="in-order")
    under_way: deque[Future[R]] = deque()
    try:
        for item in items:
            under_way.append(pool.submit(work, item))
            if len(under_way) > threads:
                # Never named: an exception kept by a future that its own frame keeps is a circle.
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        under_way.clear()
        pool.shutdown(wait=True, cancel_futures=True)


def read_ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, while a thread makes the next one."""
    coming = iter(items)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(lambda: list(islice(coming, 1)))
        while values := following.result():
            following = pool.submit(lambda: list(islice(coming, 1)))
            yield from values
