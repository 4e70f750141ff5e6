"""The process that the others wait for is named, and none where all wait alike."""

from __future__ import annotations

import random

import pytest

from headroom.ranks.slow_rank import exchange_phases, find_slow_rank


def test_the_rank_that_the_others_wait_for_is_found() -> None:
    quick = {"data_wait": 1.0, "forward": 10.0, "backward": 35.0, "optimizer": 2.0}
    slow = {"data_wait": 1.0, "forward": 25.0, "backward": 20.0, "optimizer": 2.0}
    found = find_slow_rank([quick, slow, quick])
    assert found == {
        "rank": 1,
        "own_ms": 28.0,
        "others_ms": 13.0,
        "phase": "forward",
        "share": pytest.approx(15 / 48),
    }


def test_no_rank_is_slow_where_all_do_the_same() -> None:
    draw = random.Random(2)
    told = 0
    for _ in range(300):
        ranks = [
            {
                "data_wait": draw.gauss(1, 0.1),
                "forward": draw.gauss(10, 0.4),
                "backward": draw.gauss(20, 0.6),
                "optimizer": draw.gauss(2, 0.1),
            }
            for _ in range(4)
        ]
        told += find_slow_rank(ranks) is not None
    assert told == 0


def test_a_slower_backward_pass_alone_is_nobody_s_wait() -> None:
    """It may be the rank that is near to the others, or one that waits for them."""
    assert (
        find_slow_rank([{"forward": 10.0, "backward": 20.0}, {"forward": 10.0, "backward": 40.0}])
        is None
    )
    assert find_slow_rank([{"forward": 10.0}]) is None
    assert find_slow_rank([{"forward": 10.0}, {}]) is None


def test_a_program_of_one_process_asks_nobody() -> None:
    assert exchange_phases({"forward": 1.0}, turn=1) == []
