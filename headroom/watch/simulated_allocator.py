"""Simulate how much PyTorch's caching allocator reserves for a sequence of allocations. A limit
counts what is reserved, not what tensors hold, so a forecast needs both. It follows the
allocator of CUDA, ROCm and XPU on one stream, with its default settings
(c10/core/AllocatorConfig.h: the sizes below) or those of PYTORCH_ALLOC_CONF that make it hold
more.
"""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

MIB = 1024**2
BLOCK_BYTES = 512
SMALL_BYTES = 1 * MIB  # up to here a tensor lies among the small ones
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB  # for what is below LARGE_BYTES; above in multiples of ROUND_BYTES
LARGE_BYTES = 10 * MIB
ROUND_BYTES = 2 * MIB


ALLOC_CONF_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# What takes no more of the device: it gives back earlier, maps as needed, or is the host's.
TAKE_NO_MORE = re.compile(
    "garbage_collection_threshold|expandable_segments|per_process_memory_fraction|pinned_.*"
    "|release_lock_on_.*|throw_on_.*|graph_capture_.*"
)


@dataclass(frozen=True)
class AllocatorRules:
    """Settings of the allocator, in bytes. unfollowed: names of the settings that are not
    simulated."""

    # Steps of sizes between two powers of two, by the power in MiB that a size is above, or by "<"
    # and ">" below the first and above the last of them (of one number for all: ">").
    divisions: Mapping[str, int] = field(default_factory=dict)
    max_split_bytes: float = math.inf  # larger blocks are never split
    rounding_bytes: int = LARGE_SEGMENT_BYTES  # that such a block may be larger than what is asked
    segment_bytes: int = LARGE_SEGMENT_BYTES
    unfollowed: tuple[str, ...] = ()

    def round_up(self, asked_bytes: int) -> int:
        """Return the size of the block for an allocation of so many bytes."""
        parts = self._find_divisions(asked_bytes)
        if parts > 1 and asked_bytes > BLOCK_BYTES * parts:
            step = (1 << (asked_bytes.bit_length() - 1)) // parts
            return -(-asked_bytes // step) * step
        return max(1, -(-asked_bytes // BLOCK_BYTES)) * BLOCK_BYTES

    def _find_divisions(self, asked_bytes: int) -> int:
        if not self.divisions:
            return 0
        powers = [int(mib) for mib in self.divisions if mib.isdigit()]
        mib = 1 << max(0, asked_bytes.bit_length() - 1 - 20)
        beyond = ">" if not powers or mib > max(powers) else "<" if mib < min(powers) else ""
        return self.divisions.get(str(mib), self.divisions.get(beyond, 0))


def read_rules(environment: Mapping[str, str] = os.environ) -> AllocatorRules:
    """Return the allocator's settings of this process. What PyTorch itself would refuse is not
    followed."""
    text = next((environment[name] for name in ALLOC_CONF_NAMES if environment.get(name)), "")
    rules: dict[str, Any] = {}
    unfollowed = []
    sizes = {
        "max_split_size_mb": "max_split_bytes",
        "max_non_split_rounding_mb": "rounding_bytes",
        "large_segment_size_mb": "segment_bytes",
    }
    for name, value in re.findall(r"([^,:\[\]\s]+)\s*:\s*(\[[^\]]*\]|[^,\[\]]+)", text):
        pairs = re.findall(r"(\d+|>)\s*:\s*(\d+)", value)
        if name in sizes and value.strip().isdigit():
            rules[sizes[name]] = int(value) * MIB
        elif name == "roundup_power2_divisions" and value.strip().isdigit():
            rules["divisions"] = {">": int(value)}
        elif name == "roundup_power2_divisions" and pairs:
            rules["divisions"] = {"<": int(pairs[0][1]), **{k: int(v) for k, v in pairs}}
        elif (name, value.strip()) != ("backend", "native") and not TAKE_NO_MORE.fullmatch(name):
            unfollowed.append(name)
    return AllocatorRules(**rules, unfollowed=tuple(unfollowed))


@dataclass(frozen=True)
class AllocateEvent:
    """An allocation of so many bytes under a name of its own. pool: 0 is the common one; a
    recorded graph has its own."""

    name: int
    bytes: int
    pool: int = 0


@dataclass(frozen=True)
class FreeEvent:
    """The allocation of this name is freed."""

    name: int


@dataclass(frozen=True)
class EmptyCacheEvent:
    """The caches are returned to the driver."""


AllocatorEvent = AllocateEvent | FreeEvent | EmptyCacheEvent


class LimitExceeded(Exception):
    """An allocation does not fit under the limit, even after all caches were returned."""


@dataclass(eq=False)
class _Block:
    """A part of a segment. Neighbours are linked as long as their segment lives."""

    bytes: int
    pool: tuple[int, bool]  # which, and whether that of the small ones
    before: _Block | None = None
    after: _Block | None = None


@dataclass
class SimulatedAllocator:
    """A simulated caching allocator. limit_bytes: of what may be reserved."""

    limit_bytes: float = math.inf
    rules: AllocatorRules = field(default_factory=lambda: read_rules())
    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    _live: dict[int, _Block] = field(default_factory=dict)
    # By pool the free blocks, the smallest first; the number tells apart those of one size.
    _free: dict[tuple[int, bool], list[tuple[int, int, _Block]]] = field(default_factory=dict)

    def follow(self, events: Iterable[AllocatorEvent]) -> SimulatedAllocator:
        """Simulate these events and return the allocator; raises LimitExceeded."""
        for event in events:
            if isinstance(event, AllocateEvent):
                self._take(event)
            elif isinstance(event, FreeEvent):
                self._give(event.name)
            else:
                self._free_segments()
        return self

    def _take(self, event: AllocateEvent) -> None:
        size = self.rules.round_up(event.bytes)
        is_small = size <= SMALL_BYTES
        pool = event.pool, is_small
        block = self._take_best(pool, size) or self._reserve_segment(pool, size)
        left = block.bytes - size
        may_split = size < self.rules.max_split_bytes
        if left >= BLOCK_BYTES if is_small else may_split and left > SMALL_BYTES:
            rest = _Block(left, pool, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.bytes, block.after = size, rest
            self._put(rest)
        self._live[event.name] = block
        self.allocated += block.bytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def _give(self, name: int) -> None:
        block = self._live.pop(name)
        self.allocated -= block.bytes
        for other in (block.before, block.after):
            if other is not None and self._drop(other):
                block = _join_blocks(block, other)
        self._put(block)

    def _free_segments(self) -> None:
        """Give segments that hold nothing back to the device."""
        for pool, blocks in self._free.items():
            whole = [e for e in blocks if e[2].before is None and e[2].after is None]
            self.reserved -= sum(entry[0] for entry in whole)
            self._free[pool] = [entry for entry in blocks if entry not in whole]

    def _take_best(self, pool: tuple[int, bool], size: int) -> _Block | None:
        """Take the smallest free block that is large enough."""
        blocks = self._free.get(pool, [])
        at = bisect_left(blocks, (size,))
        if at == len(blocks):
            return None
        found_bytes, whole_bytes = blocks[at][0], self.rules.max_split_bytes
        is_kept = size < whole_bytes <= found_bytes  # for what needs all of it
        is_waste = size >= whole_bytes and found_bytes >= size + self.rules.rounding_bytes
        return None if is_kept or is_waste else blocks.pop(at)[2]

    def _reserve_segment(self, pool: tuple[int, bool], size: int) -> _Block:
        if pool[1]:
            size = SMALL_SEGMENT_BYTES
        elif size < LARGE_BYTES:
            size = self.rules.segment_bytes
        else:
            size = -(-size // ROUND_BYTES) * ROUND_BYTES
        if self.reserved + size > self.limit_bytes:
            self._free_segments()
        if self.reserved + size > self.limit_bytes:
            raise LimitExceeded
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


def _join_blocks(block: _Block, other: _Block) -> _Block:
    """Return both neighbours as one block."""
    first, second = (other, block) if block.before is other else (block, other)
    first.bytes += second.bytes
    first.after = second.after
    if first.after is not None:
        first.after.before = first
    return first


def find_smallest_limit(events: list[AllocatorEvent], *, up_to: int) -> int:
    """Return the smallest limit in bytes, a multiple of 2 MiB, under which all of these events fit.

    up_to: a limit that is known to suffice.
    """
    least = SimulatedAllocator().follow(events).peak_allocated // ROUND_BYTES
    most = -(-up_to // ROUND_BYTES)
    while least < most:
        middle = (least + most) // 2
        try:
            SimulatedAllocator(limit_bytes=middle * ROUND_BYTES).follow(events)
            most = middle
        except LimitExceeded:
            least = middle + 1
    return most * ROUND_BYTES


WARP, MOST_THREADS = 32, 512
LEAST_VALUES, MOST_VALUES = 16, 256  # that a thread adds up
ACCUMULATOR_BYTES = 4  # of a float32, also for bf16 and fp16


def make_scratch_counter(device: torch.device) -> Callable[[Any, tuple[Any, ...]], tuple[int, ...]]:
    """Return a function that computes what an operation with these arguments takes on the
    device for itself, as the bytes of each allocation."""
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return lambda func, args: ()
    properties = torch.cuda.get_device_properties(device)
    processors, threads = (
        properties.multi_processor_count,
        properties.max_threads_per_multi_processor,
    )

    def scratch(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
        if func is torch.ops.aten._softmax_backward_data.default:
            return (int(args[0].nbytes),)
        if func is torch.ops.aten._safe_softmax.default:
            return (int(args[0].numel()),)  # booleans
        if func is torch.ops.aten._native_multi_head_attention.default:
            return (3 * int(args[0].nbytes),) * 2
        if func is not torch.ops.aten.sum.dim_IntList or not _is_over_rows(args[0], args[1]):
            return ()
        columns = args[0].shape[-1]
        rows = prod(args[0].shape[:-1])
        taken = count_column_sum_bytes(rows, columns, processors=processors, threads=threads)
        return (taken,) if taken else ()

    return scratch


def count_column_sum_bytes(rows: int, columns: int, *, processors: int, threads: int) -> int:
    """Return the scratch bytes for the sums of the columns of a matrix. threads: how many a
    processor runs at once."""
    vector = next(n for n in (4, 2, 1) if columns % n == 0)
    most = MOST_THREADS // vector
    across = _find_power_of_two(columns // vector, most)
    down = _find_power_of_two(rows, most)
    width = min(across, WARP)
    height = min(down, most // width)
    width = min(across, most // height)
    values = rows  # of a thread
    if values < min(16 * height, MOST_VALUES):
        return 0  # each warp has columns of its own
    values = -(-rows // height)
    grid = -(-(columns // vector) // width)
    target = processors * (threads // (width * height))
    if values < MOST_VALUES or grid > target:
        return 0
    parts = max(min(-(-target // grid), -(-values // LEAST_VALUES)), -(-values // MOST_VALUES))
    return ACCUMULATOR_BYTES * columns * parts * width * vector if parts > 1 else 0


def _find_power_of_two(n: int, most: int) -> int:
    """Return the largest power of two in n, at most `most`."""
    return most if n >= most else 1 << (n.bit_length() - 1)


def _is_over_rows(tensor: Tensor, dims: Any) -> bool:
    kept = {d % tensor.dim() for d in dims or ()}
    return tensor.is_contiguous() and kept == set(range(tensor.dim() - 1)) and tensor.dim() > 1


def read_cublas_workspace_bytes() -> int | None:
    """Return the size of a cuBLAS workspace that the environment sets, such as :4096:8, eight
    times 4096 KiB; None where it sets none."""
    said = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    pairs = re.findall(r":(\d+):(\d+)", said)
    return 1024 * sum(int(size) * int(count) for size, count in pairs) if pairs else None
