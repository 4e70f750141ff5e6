"""Clients that wait for their answers, and a few servers that give them, in the order of the
questions: how long that takes, by simulation.
"""

from __future__ import annotations

import heapq
import random


def simulate(
    clients: int, pause_s: float, service_s: float, *, servers: int, requests: int = 40_000
) -> tuple[float, list[float], float]:
    """Share of the time in which a server is busy, seconds from each request to its answer, and
    requests a second: of `clients` that each ask, wait for the answer and pause. Service times are
    exponential."""
    draw, answered, busy_s = random.Random(0), [], 0.0
    waiting = [(draw.uniform(0, pause_s or service_s), n) for n in range(clients)]
    heapq.heapify(waiting)
    free = [0.0] * servers  # when each is
    now = 0.0
    for _ in range(requests):
        now, client = heapq.heappop(waiting)
        begun = max(now, heapq.heappop(free))
        took = draw.expovariate(1 / service_s)
        heapq.heappush(free, begun + took)
        busy_s += took
        answered.append(begun + took - now)
        heapq.heappush(waiting, (begun + took + pause_s, client))
    ended = max(now, *free)
    return busy_s / ended / servers, answered[requests // 4 :], requests / ended
