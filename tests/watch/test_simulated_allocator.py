"""The caching allocator's rules on numbers; against the allocator itself in tests/gpu."""

import pytest

from headroom.watch.simulated_allocator import (
    MIB,
    AllocateEvent,
    AllocatorRules,
    EmptyCacheEvent,
    FreeEvent,
    LimitExceeded,
    SimulatedAllocator,
    count_column_sum_bytes,
    find_smallest_limit,
    read_rules,
)


def reserved(*events) -> int:
    return SimulatedAllocator().follow(events).reserved


def test_small_tensors_share_a_segment_of_two_mebibytes() -> None:
    assert reserved(AllocateEvent(1, 5), AllocateEvent(2, 1 * MIB)) == 2 * MIB
    assert (
        reserved(AllocateEvent(1, 5), AllocateEvent(2, 1 * MIB), AllocateEvent(3, 1 * MIB))
        == 4 * MIB
    )


@pytest.mark.parametrize(("asked", "segment"), [(1.5, 20), (9.9, 20), (10, 10), (11, 12), (64, 64)])
def test_a_large_tensor_takes_a_segment_of_twenty_or_of_its_size(asked, segment) -> None:
    assert reserved(AllocateEvent(1, int(asked * MIB))) == segment * MIB


def test_what_is_freed_is_used_again_and_joined_with_its_neighbours() -> None:
    taken = [AllocateEvent(n, 5 * MIB) for n in range(4)]
    assert reserved(*taken) == 20 * MIB
    assert reserved(*taken, FreeEvent(1), FreeEvent(2), AllocateEvent(9, 10 * MIB)) == 20 * MIB
    assert reserved(*taken, FreeEvent(0), FreeEvent(2), AllocateEvent(9, 10 * MIB)) == 30 * MIB


def test_a_remainder_of_a_mebibyte_stays_with_its_block() -> None:
    pool = SimulatedAllocator().follow(
        [AllocateEvent(1, 12 * MIB), FreeEvent(1), AllocateEvent(2, 11 * MIB)]
    )
    assert (pool.allocated, pool.reserved) == (12 * MIB, 12 * MIB)


def test_only_segments_that_hold_nothing_are_given_back() -> None:
    events = [
        AllocateEvent(1, 5 * MIB),
        AllocateEvent(2, 30 * MIB),
        FreeEvent(2),
        AllocateEvent(3, 5),
        FreeEvent(3),
        EmptyCacheEvent(),
    ]
    assert reserved(*events) == 20 * MIB


def test_a_private_pool_shares_nothing() -> None:
    assert (
        reserved(AllocateEvent(1, 30 * MIB), FreeEvent(1), AllocateEvent(2, 30 * MIB, pool=1))
        == 60 * MIB
    )


def test_a_limit_counts_segments_and_gives_caches_back_before_it_refuses() -> None:
    fits = [AllocateEvent(1, 30 * MIB), FreeEvent(1), AllocateEvent(2, 40 * MIB)]
    assert SimulatedAllocator(limit_bytes=40 * MIB).follow(fits).reserved == 40 * MIB
    with pytest.raises(LimitExceeded):
        SimulatedAllocator(limit_bytes=19 * MIB).follow([AllocateEvent(1, 2 * MIB)])
    assert (
        find_smallest_limit(fits, up_to=SimulatedAllocator().follow(fits).peak_reserved) == 40 * MIB
    )


@pytest.mark.parametrize(
    ("rows", "columns", "bytes"),
    [(2048, 1024, 16 * MIB), (8192, 128, 8 * MIB), (4096, 1000, 16_384_000), (64, 512, 0)],
)
def test_the_scratch_memory_of_a_sum_over_rows(rows: int, columns: int, bytes: int) -> None:
    """Measured with torch 2.13 on a device of 16 processors: a bias's gradient took 16 MiB that
    no tensor showed, a fifth of a training's peak."""
    assert count_column_sum_bytes(rows, columns, processors=16, threads=2048) == bytes


def test_settings_of_the_environment_are_followed_and_others_named() -> None:
    assert (
        read_rules({}) == AllocatorRules()
        and read_rules({"PYTORCH_ALLOC_CONF": "backend:native"}) == AllocatorRules()
    )
    found = read_rules({"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:2"})
    assert found.round_up(5 * MIB) == 6 * MIB and found.round_up(4 * MIB) == 4 * MIB
    split = read_rules(
        {"PYTORCH_ALLOC_CONF": "max_split_size_mb:20, garbage_collection_threshold:0.6"}
    )
    assert split.max_split_bytes == 20 * MIB and not split.unfollowed
    events = [AllocateEvent(1, 40 * MIB), FreeEvent(1), AllocateEvent(2, 12 * MIB)]
    assert SimulatedAllocator(rules=split).follow(events).reserved == 52 * MIB
    assert SimulatedAllocator(rules=AllocatorRules()).follow(events).reserved == 40 * MIB
    other = {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync,expandable_segments:True,new_one:3"}
    assert read_rules(other).unfollowed == ("backend", "new_one")
