"""The rows that are held out, against a drawing by sorting."""

import numpy as np
import pytest

from headroom.data import row_parts, targets

STREAM = 0x5EED  # of every version: a seed draws the rows that it drew


@pytest.mark.parametrize("bins", [1, 3, 1 << 10])
@pytest.mark.parametrize("block_rows", [7, 1 << 16])
@pytest.mark.parametrize("seed", [0, 1])
def test_of_each_class_the_rows_with_the_smallest_random_numbers_are_taken(
    monkeypatch: pytest.MonkeyPatch, bins: int, block_rows: int, seed: int
) -> None:
    monkeypatch.setattr(row_parts, "MOST_BINS", bins)
    monkeypatch.setattr(targets, "BLOCK_ROWS", block_rows)
    group = np.random.default_rng(5).choice(6, 300, p=[0.3, 0.3, 0.2, 0.1, 0.09, 0.01])
    counts = np.bincount(group, minlength=6)
    taken = np.array([counts[0] // 5, counts[1] * 5 // 6, counts[2] * 3 // 5, counts[3], 1, 0])
    random = np.random.default_rng([STREAM, seed]).random(len(group))
    expected = np.zeros(len(group), dtype=bool)
    for of, many in enumerate(taken):
        rows = np.flatnonzero(group == of)
        expected[rows[np.argsort(random[rows])][:many]] = True
    chosen = row_parts.draw_rows(group.astype(np.uint8), counts, taken, seed=seed)
    assert np.array_equal(chosen, expected)


def test_without_classes_as_many_rows_as_asked_are_taken() -> None:
    chosen = row_parts.draw_rows(None, np.array([50]), np.array([20]), seed=3)
    random = np.random.default_rng([STREAM, 3]).random(50)
    assert np.array_equal(np.flatnonzero(chosen), np.sort(np.argsort(random)[:20]))


def test_more_classes_than_there_is_room_for_bins_are_drawn_from() -> None:
    """With as many bins for each as for few classes, counting them alone would take 32 GiB."""
    classes = (1 << 20) + 1
    taken = np.arange(classes) % 2
    chosen = row_parts.draw_rows(np.arange(classes), np.ones(classes, np.int64), taken, seed=0)
    assert np.array_equal(chosen, taken.astype(bool))
