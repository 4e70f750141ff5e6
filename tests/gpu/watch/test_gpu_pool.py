"""The rules by which a forecast tells what is reserved, against PyTorch's own allocator."""

import os
import random
import subprocess
import sys

import pytest
import torch

from headroom.watch.allocators import release_cached_memory
from headroom.watch.leaks import release_device_memory
from headroom.watch.memory_meter import MIB
from headroom.watch.simulated_allocator import (
    AllocateEvent,
    EmptyCacheEvent,
    FreeEvent,
    LimitExceeded,
    SimulatedAllocator,
    make_scratch_counter,
)

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")


@pytest.fixture
def held() -> tuple[int, int]:
    """Bytes held and reserved before; a stream of its own shares no segment with them."""
    torch.ones(1, device=GPU)
    release_device_memory(GPU, baseline_bytes=0)
    torch.cuda.reset_peak_memory_stats(GPU)
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        yield torch.cuda.memory_allocated(GPU), torch.cuda.memory_reserved(GPU)
    torch.cuda.set_per_process_memory_fraction(1.0, GPU)
    release_cached_memory(GPU)


def _size(draw: random.Random) -> int:
    most = draw.choice([5_000, 2 * MIB, 12 * MIB, 60 * MIB])
    return draw.randint(1, most)


@pytest.mark.parametrize("seed", range(10))
def test_the_same_bytes_are_held_and_reserved_after_each_of_200_events(held, seed) -> None:
    draw, pool, live = random.Random(seed), SimulatedAllocator(), {}
    for number in range(200):
        kind = draw.random()
        if kind < 0.55 or not live:
            size = _size(draw)
            live[number] = torch.empty(size, dtype=torch.uint8, device=GPU)
            pool.follow([AllocateEvent(number, size)])
        elif kind < 0.98:
            freed = draw.choice(list(live))
            del live[freed]
            pool.follow([FreeEvent(freed)])
        else:
            torch.cuda.empty_cache()
            pool.follow([EmptyCacheEvent()])
        assert pool.allocated == torch.cuda.memory_allocated(GPU) - held[0]
        assert pool.reserved == torch.cuda.memory_reserved(GPU) - held[1]
    assert pool.peak_reserved == torch.cuda.max_memory_reserved(GPU) - held[1]


def test_a_limit_refuses_what_the_allocator_refuses(held) -> None:
    total = torch.cuda.get_device_properties(GPU).total_memory
    limit = 100 * MIB
    torch.cuda.set_per_process_memory_fraction((limit + held[1] + 0.5) / total, GPU)
    refused = 0
    for seed in range(20):
        draw, pool, live = random.Random(seed), SimulatedAllocator(limit_bytes=limit), []
        for number in range(30):
            size = _size(draw)
            try:
                live.append(torch.empty(size, dtype=torch.uint8, device=GPU))
                fits = True
            except torch.OutOfMemoryError:
                fits = False
            if not fits:
                with pytest.raises(LimitExceeded):
                    pool.follow([AllocateEvent(number, size)])
                refused += 1
                break
            pool.follow([AllocateEvent(number, size)])
            if draw.random() < 0.3:
                live.pop()
                pool.follow([FreeEvent(number)])
        live.clear()
        torch.cuda.empty_cache()
    assert refused > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [3, 10, 128, 1000, 4096])
@pytest.mark.parametrize("rows", [64, 500, 2048, 8192])
def test_a_sum_over_rows_takes_the_scratch_memory_that_is_foretold(
    held, rows, columns, dtype
) -> None:
    if torch.version.hip:
        pytest.skip("its kernels are not followed")
    x = torch.empty(rows, columns, device=GPU, dtype=dtype)
    before = torch.cuda.memory_allocated(GPU)
    torch.cuda.reset_peak_memory_stats(GPU)
    out = x.sum([0], keepdim=True)
    taken = torch.cuda.max_memory_allocated(GPU) - before - -(-out.nbytes // 512) * 512
    told = make_scratch_counter(GPU)(torch.ops.aten.sum.dim_IntList, (x, [0], True))
    assert abs(taken - sum(told)) <= MIB  # which a block may be larger than what was asked


SETTINGS = (
    "roundup_power2_divisions:2",
    "roundup_power2_divisions:[1:1,2:2,4:4,>:8]",
    "max_split_size_mb:21,garbage_collection_threshold:0.6",
    "max_split_size_mb:40,max_non_split_rounding_mb:30",
    "large_segment_size_mb:32",
)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_same_with_settings_of_the_environment(settings: str) -> None:
    """They were ignored: a quarter of what was reserved was not foretold, and two fifths."""
    done = subprocess.run(
        [sys.executable, "-c", FOLLOWS],
        env={**os.environ, "PYTORCH_ALLOC_CONF": settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same" in done.stdout


FOLLOWS = """
import os
import random
import subprocess
import sys
import torch
from headroom.watch.simulated_allocator import AllocateEvent, EmptyCacheEvent, FreeEvent
from headroom.watch.simulated_allocator import SimulatedAllocator, read_rules
assert not read_rules().unfollowed
with torch.cuda.stream(torch.cuda.Stream()):
    # Of free blocks of one size the allocator takes that of the lowest address, which nobody
    # foretells, and rounded sizes are often alike: each by itself.
    for power in range(9, 27):
        for size in (2**power, 2**power + 1, 3 * 2 ** (power - 1) + 1, 2 ** (power + 1) - 1):
            held = torch.cuda.memory_allocated()
            taken = torch.empty(size, dtype=torch.uint8, device="cuda")
            pool = SimulatedAllocator().follow([AllocateEvent(0, size)])
            assert pool.allocated == torch.cuda.memory_allocated() - held, size
            del taken
            torch.cuda.empty_cache()
    for seed in range(0 if read_rules().divisions else 10):
        torch.cuda.empty_cache()
        held, kept = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        draw, pool, live = random.Random(seed), SimulatedAllocator(), {}
        for number in range(150):
            kind = draw.random()
            if kind < 0.55 or not live:
                size = draw.randint(1, draw.choice([5_000, 2 << 20, 12 << 20, 60 << 20]))
                live[number] = torch.empty(size, dtype=torch.uint8, device="cuda")
                pool.follow([AllocateEvent(number, size)])
            elif kind < 0.98:
                freed = draw.choice(list(live))
                del live[freed]
                pool.follow([FreeEvent(freed)])
            else:
                torch.cuda.empty_cache()
                pool.follow([EmptyCacheEvent()])
            told = torch.cuda.memory_allocated() - held, torch.cuda.memory_reserved() - kept
            assert (pool.allocated, pool.reserved) == told, (seed, number, pool.allocated, told)
        live.clear()
print("same")
"""
