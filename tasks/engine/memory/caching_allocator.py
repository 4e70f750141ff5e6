"""What PyTorch's caching allocator reserves for a sequence of allocations: its rules, followed on
numbers alone. A limit counts what is reserved, not what tensors hold, so whoever forecasts has to
know both. It follows the allocator of CUDA, ROCm and XPU on one stream, with its default settings
(c10/core/AllocatorConfig.h: the sizes below) or those of PYTORCH_ALLOC_CONF that make it hold more.
"""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MIB = 1024**2
BLOCK_BYTES = 512
SMALL_BYTES = 1 * MIB  # up to here a tensor lies among the small ones
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB  # for what is below LARGE_BYTES; above in multiples of ROUND_BYTES
LARGE_BYTES = 10 * MIB
ROUND_BYTES = 2 * MIB


NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# What takes no more of the device: it gives back earlier, maps as needed, or is the host's.
TAKE_NO_MORE = re.compile(
    "garbage_collection_threshold|expandable_segments|per_process_memory_fraction|pinned_.*"
    "|release_lock_on_.*|throw_on_.*|graph_capture_.*"
)


@dataclass(frozen=True)
class Rules:
    """Settings of the allocator, in bytes. unfollowed: names of those that are not known here."""

    # Steps of sizes between two powers of two, by the power in MiB that a size is above, or by "<"
    # and ">" below the first and above the last of them (of one number for all: ">").
    divisions: Mapping[str, int] = field(default_factory=dict)
    max_split_bytes: float = math.inf  # larger blocks are never split
    rounding_bytes: int = LARGE_SEGMENT_BYTES  # that such a block may be larger than what is asked
    segment_bytes: int = LARGE_SEGMENT_BYTES
    unfollowed: tuple[str, ...] = ()

    def rounded(self, asked_bytes: int) -> int:
        """The size of a block for so many bytes."""
        parts = self._divisions(asked_bytes)
        if parts > 1 and asked_bytes > BLOCK_BYTES * parts:
            step = (1 << (asked_bytes.bit_length() - 1)) // parts
            return -(-asked_bytes // step) * step
        return max(1, -(-asked_bytes // BLOCK_BYTES)) * BLOCK_BYTES

    def _divisions(self, asked_bytes: int) -> int:
        if not self.divisions:
            return 0
        powers = [int(mib) for mib in self.divisions if mib.isdigit()]
        mib = 1 << max(0, asked_bytes.bit_length() - 1 - 20)
        beyond = ">" if not powers or mib > max(powers) else "<" if mib < min(powers) else ""
        return self.divisions.get(str(mib), self.divisions.get(beyond, 0))


def rules(environment: Mapping[str, str] = os.environ) -> Rules:
    """The settings of this process. What PyTorch itself would refuse is not followed."""
    text = next((environment[name] for name in NAMES if environment.get(name)), "")
    found: dict[str, Any] = {}
    unfollowed = []
    sizes = {
        "max_split_size_mb": "max_split_bytes",
        "max_non_split_rounding_mb": "rounding_bytes",
        "large_segment_size_mb": "segment_bytes",
    }
    for name, value in re.findall(r"([^,:\[\]\s]+)\s*:\s*(\[[^\]]*\]|[^,\[\]]+)", text):
        pairs = re.findall(r"(\d+|>)\s*:\s*(\d+)", value)
        if name in sizes and value.strip().isdigit():
            found[sizes[name]] = int(value) * MIB
        elif name == "roundup_power2_divisions" and value.strip().isdigit():
            found["divisions"] = {">": int(value)}
        elif name == "roundup_power2_divisions" and pairs:
            found["divisions"] = {"<": int(pairs[0][1]), **{k: int(v) for k, v in pairs}}
        elif (name, value.strip()) != ("backend", "native") and not TAKE_NO_MORE.fullmatch(name):
            unfollowed.append(name)
    return Rules(**found, unfollowed=tuple(unfollowed))


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
    rules: Rules = field(default_factory=lambda: rules())
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
        size = self.rules.rounded(asked.bytes)
        is_small = size <= SMALL_BYTES
        pool = asked.pool, is_small
        block = self._best(pool, size) or self._segment(pool, size)
        left = block.bytes - size
        may_split = size < self.rules.max_split_bytes
        if left >= BLOCK_BYTES if is_small else may_split and left > SMALL_BYTES:
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
        if at == len(blocks):
            return None
        found_bytes, whole_bytes = blocks[at][0], self.rules.max_split_bytes
        is_kept = size < whole_bytes <= found_bytes  # for what needs all of it
        is_waste = size >= whole_bytes and found_bytes >= size + self.rules.rounding_bytes
        return None if is_kept or is_waste else blocks.pop(at)[2]

    def _segment(self, pool: tuple[int, bool], size: int) -> _Block:
        if pool[1]:
            size = SMALL_SEGMENT_BYTES
        elif size < LARGE_BYTES:
            size = self.rules.segment_bytes
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
