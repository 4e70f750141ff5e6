"""What PyTorch's caching allocator reserves for a sequence of allocations: its rules, followed on
numbers alone. A limit counts what is reserved, not what tensors hold, so whoever forecasts has to
know both. It follows the default settings of the allocator of CUDA, ROCm and XPU (c10/core/
AllocatorConfig.h: the sizes below), and one stream.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

MIB = 1024**2
BLOCK_BYTES = 512
SMALL_BYTES = 1 * MIB  # up to here a tensor lies among the small ones
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB  # for what is below LARGE_BYTES; above in multiples of ROUND_BYTES
LARGE_BYTES = 10 * MIB
ROUND_BYTES = 2 * MIB


@dataclass(frozen=True)
class Take:
    """An allocation of so many bytes under a name of its own, in a pool of its own or the common
    one (0): a recorded graph has its own."""

    name: int
    bytes: int
    pool: int = 0


@dataclass(frozen=True)
class Give:
    """The allocation of this name is freed."""

    name: int


@dataclass(frozen=True)
class Empty:
    """The caches are given back."""


Event = Take | Give | Empty


class Exceeded(Exception):
    """An allocation does not fit under the limit, even after all caches were given back."""


@dataclass(eq=False)
class _Block:
    """A part of a segment. Neighbours are linked as long as their segment lives."""

    bytes: int
    pool: tuple[int, bool]  # which, and whether that of the small ones
    before: _Block | None = None
    after: _Block | None = None


@dataclass
class Pool:
    """The allocator. limit_bytes: of what may be reserved."""

    limit_bytes: float = math.inf
    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    _live: dict[int, _Block] = field(default_factory=dict)
    # By pool the free blocks, the smallest first; the number tells apart those of one size.
    _free: dict[tuple[int, bool], list[tuple[int, int, _Block]]] = field(default_factory=dict)

    def follow(self, events: Iterable[Event]) -> Pool:
        """Do these; raises Exceeded."""
        for event in events:
            if isinstance(event, Take):
                self._take(event)
            elif isinstance(event, Give):
                self._give(event.name)
            else:
                self._empty()
        return self

    def _take(self, asked: Take) -> None:
        size = max(1, -(-asked.bytes // BLOCK_BYTES)) * BLOCK_BYTES
        is_small = size <= SMALL_BYTES
        pool = asked.pool, is_small
        block = self._best(pool, size) or self._segment(pool, size)
        left = block.bytes - size
        if left >= BLOCK_BYTES if is_small else left > SMALL_BYTES:
            rest = _Block(left, pool, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.bytes, block.after = size, rest
            self._put(rest)
        self._live[asked.name] = block
        self.allocated += block.bytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def _give(self, name: int) -> None:
        block = self._live.pop(name)
        self.allocated -= block.bytes
        for other in (block.before, block.after):
            if other is not None and self._drop(other):
                block = _joined(block, other)
        self._put(block)

    def _empty(self) -> None:
        """Segments that hold nothing go back to the device."""
        for pool, blocks in self._free.items():
            whole = [e for e in blocks if e[2].before is None and e[2].after is None]
            self.reserved -= sum(entry[0] for entry in whole)
            self._free[pool] = [entry for entry in blocks if entry not in whole]

    def _best(self, pool: tuple[int, bool], size: int) -> _Block | None:
        """The smallest free block that is large enough."""
        blocks = self._free.get(pool, [])
        at = bisect_left(blocks, (size,))
        return blocks.pop(at)[2] if at < len(blocks) else None

    def _segment(self, pool: tuple[int, bool], size: int) -> _Block:
        if pool[1]:
            size = SMALL_SEGMENT_BYTES
        elif size < LARGE_BYTES:
            size = LARGE_SEGMENT_BYTES
        else:
            size = -(-size // ROUND_BYTES) * ROUND_BYTES
        if self.reserved + size > self.limit_bytes:
            self._empty()
        if self.reserved + size > self.limit_bytes:
            raise Exceeded
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return _Block(size, pool)

    def _put(self, block: _Block) -> None:
        insort(self._free.setdefault(block.pool, []), (block.bytes, id(block), block))

    def _drop(self, block: _Block) -> bool:
        """Take the block out of the free ones; whether it was among them."""
        blocks = self._free.get(block.pool, [])
        at = bisect_left(blocks, (block.bytes, id(block)))
        if at < len(blocks) and blocks[at][2] is block:
            del blocks[at]
            return True
        return False


def _joined(block: _Block, other: _Block) -> _Block:
    """Both neighbours as one block."""
    first, second = (other, block) if block.before is other else (block, other)
    first.bytes += second.bytes
    first.after = second.after
    if first.after is not None:
        first.after.before = first
    return first


def least_room(events: list[Event], *, up_to: int) -> int:
    """The smallest limit in bytes, a multiple of 2 MiB, under which all of these find room; up_to:
    a limit that is known to do."""
    least = Pool().follow(events).peak_allocated // ROUND_BYTES
    most = -(-up_to // ROUND_BYTES)
    while least < most:
        middle = (least + most) // 2
        try:
            Pool(limit_bytes=middle * ROUND_BYTES).follow(events)
            most = middle
        except Exceeded:
            least = middle + 1
    return most * ROUND_BYTES
