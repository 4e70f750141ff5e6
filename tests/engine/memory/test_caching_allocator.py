"""The caching allocator's rules on numbers; against the allocator itself in tests/gpu."""

import pytest

from tasks.engine.memory.caching_allocator import (
    MIB,
    Empty,
    Exceeded,
    Give,
    Pool,
    Rules,
    Take,
    least_room,
    rules,
)
from tasks.engine.memory.scratch_memory import column_sum_bytes


def reserved(*events) -> int:
    return Pool().follow(events).reserved


def test_small_tensors_share_a_segment_of_two_mebibytes() -> None:
    assert reserved(Take(1, 5), Take(2, 1 * MIB)) == 2 * MIB
    assert reserved(Take(1, 5), Take(2, 1 * MIB), Take(3, 1 * MIB)) == 4 * MIB


@pytest.mark.parametrize(("asked", "segment"), [(1.5, 20), (9.9, 20), (10, 10), (11, 12), (64, 64)])
def test_a_large_tensor_takes_a_segment_of_twenty_or_of_its_size(asked, segment) -> None:
    assert reserved(Take(1, int(asked * MIB))) == segment * MIB


def test_what_is_freed_is_used_again_and_joined_with_its_neighbours() -> None:
    taken = [Take(n, 5 * MIB) for n in range(4)]
    assert reserved(*taken) == 20 * MIB
    assert reserved(*taken, Give(1), Give(2), Take(9, 10 * MIB)) == 20 * MIB
    assert reserved(*taken, Give(0), Give(2), Take(9, 10 * MIB)) == 30 * MIB


def test_a_remainder_of_a_mebibyte_stays_with_its_block() -> None:
    pool = Pool().follow([Take(1, 12 * MIB), Give(1), Take(2, 11 * MIB)])
    assert (pool.allocated, pool.reserved) == (12 * MIB, 12 * MIB)


def test_only_segments_that_hold_nothing_are_given_back() -> None:
    events = [Take(1, 5 * MIB), Take(2, 30 * MIB), Give(2), Take(3, 5), Give(3), Empty()]
    assert reserved(*events) == 20 * MIB


def test_a_private_pool_shares_nothing() -> None:
    assert reserved(Take(1, 30 * MIB), Give(1), Take(2, 30 * MIB, pool=1)) == 60 * MIB


def test_a_limit_counts_segments_and_gives_caches_back_before_it_refuses() -> None:
    fits = [Take(1, 30 * MIB), Give(1), Take(2, 40 * MIB)]
    assert Pool(limit_bytes=40 * MIB).follow(fits).reserved == 40 * MIB
    with pytest.raises(Exceeded):
        Pool(limit_bytes=19 * MIB).follow([Take(1, 2 * MIB)])
    assert least_room(fits, up_to=Pool().follow(fits).peak_reserved) == 40 * MIB


@pytest.mark.parametrize(
    ("rows", "columns", "bytes"),
    [(2048, 1024, 16 * MIB), (8192, 128, 8 * MIB), (4096, 1000, 16_384_000), (64, 512, 0)],
)
def test_the_scratch_memory_of_a_sum_over_rows(rows: int, columns: int, bytes: int) -> None:
    """Measured with torch 2.13 on a device of 16 processors: a bias's gradient took 16 MiB that
    no tensor showed, a fifth of a training's peak."""
    assert column_sum_bytes(rows, columns, processors=16, threads=2048) == bytes


def test_settings_of_the_environment_are_followed_and_others_named() -> None:
    assert rules({}) == Rules() and rules({"PYTORCH_ALLOC_CONF": "backend:native"}) == Rules()
    found = rules({"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:2"})
    assert found.rounded(5 * MIB) == 6 * MIB and found.rounded(4 * MIB) == 4 * MIB
    split = rules({"PYTORCH_ALLOC_CONF": "max_split_size_mb:20, garbage_collection_threshold:0.6"})
    assert split.max_split_bytes == 20 * MIB and not split.unfollowed
    events = [Take(1, 40 * MIB), Give(1), Take(2, 12 * MIB)]
    assert Pool(rules=split).follow(events).reserved == 52 * MIB
    assert Pool(rules=Rules()).follow(events).reserved == 40 * MIB
    other = {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync,expandable_segments:True,new_one:3"}
    assert rules(other).unfollowed == ("backend", "new_one")
