"""Which rows are drawn for validation: of each class the rows with the smallest of a stream of
random numbers, found in two passes over that stream, so that no row costs more memory than its
answer. It refuses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

BLOCK_ROWS = 1 << 16
MOST_BINS = 1 << 12
# Beside the seed: rows that their user drew with the same one would else lie in validation for
# what their first column says.
STREAM = 0x5EED


def drawn(
    group: np.ndarray | None, counts: np.ndarray, taken: np.ndarray, *, seed: int
) -> np.ndarray:
    """(rows,) booleans, true for taken[k] rows of each class k; the same for the same seed.

    group: (rows,) classes from 0, None where all rows are of one; counts: rows of each.
    """
    rows, classes = int(counts.sum()), len(counts)
    bins = max(1, min(MOST_BINS, (1 << 20) // classes))
    seen = np.zeros(classes * bins, dtype=np.int64)
    for _, _, _, place in _stream(group, rows, seed, bins):
        seen += np.bincount(place, minlength=len(seen))
    below = np.cumsum(seen.reshape(classes, bins), axis=1)
    # The bin in which the last row to take lies: those below are taken, of it the smallest few.
    last = (below >= taken[:, None]).argmax(axis=1)
    left = taken - np.where(last > 0, below[np.arange(classes), np.maximum(last - 1, 0)], 0)
    edge = np.arange(classes) * bins + last
    chosen = np.zeros(rows, dtype=bool)
    open_rows, open_values, open_groups = [], [], []
    for start, values, of, place in _stream(group, rows, seed, bins):
        at = edge[of]
        chosen[start : start + len(values)] = place < at
        inside = np.flatnonzero(place == at)
        open_rows.append(start + inside)
        open_values.append(values[inside])
        open_groups.append(of[inside])
    row, of = np.concatenate(open_rows), np.concatenate(open_groups)
    order = np.lexsort((np.concatenate(open_values), of))
    ends = np.searchsorted(of[order], np.arange(classes))
    rank = np.arange(len(order)) - ends[of[order]]
    chosen[row[order][rank < left[of[order]]]] = True
    return chosen


def _stream(
    group: np.ndarray | None, rows: int, seed: int, bins: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """In blocks: the first row, each row's random number, its class, and its bin among those of
    all classes."""
    random = np.random.default_rng([STREAM, seed])
    for start in range(0, rows, BLOCK_ROWS):
        count = min(BLOCK_ROWS, rows - start)
        values = random.random(count)
        some = np.zeros(count, np.int64) if group is None else group[start : start + count]
        of = some.astype(np.int64)
        yield start, values, of, of * bins + (values * bins).astype(np.int64)
