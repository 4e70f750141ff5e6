"""Several ranks train on the batches of one process: each reads its part and nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.data.batches import RankShare
from headroom.data.dataloaders import BatchShare
from headroom.data.dataset_batches import (
    ResidentBatches,
    StreamedBatches,
    draw_row_order,
    place_rows,
)
from headroom.data.preparation import view_token_rows

CPU = torch.device("cpu")
PLENTY = 10**9


def nothing(phase: str) -> None:
    pass


def on_disk(folder, **arrays: np.ndarray) -> list[np.ndarray]:
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return [np.load(folder / f"{name}.npy", mmap_mode="r") for name in arrays]


def table(folder, rows: int) -> list[np.ndarray]:
    x = np.arange(3 * rows, dtype=np.float32).reshape(rows, 3)
    return on_disk(folder, x=x, y=np.arange(rows))


def images(folder, rows: int) -> list[np.ndarray]:
    x = np.arange(rows * 24, dtype=np.float32).reshape(rows, 2, 3, 4)
    return on_disk(folder, x=x, y=np.arange(rows))


def text(folder, rows: int) -> tuple[np.ndarray, np.ndarray]:
    (kept,) = on_disk(folder, text=np.arange(5 * rows + 1, dtype=np.uint16))
    return view_token_rows(kept, 5)


def taken(found) -> list[tuple[torch.Tensor, torch.Tensor, float, int]]:
    """Each batch with what is told of it, by when it is used."""
    return [(x.clone(), y.clone(), weight, rows) for x, y, rows, weight in found]


def same_batches(make, *, size: int, batches) -> None:
    """What the ranks take together is what one process takes. batches: of what it is given."""
    wholes = [(x.clone(), y.clone()) for x, y, *_ in batches(make())]
    shares = [RankShare(make(), rank=rank, size=size) for rank in range(size)]
    found = [taken(batches(share)) for share in shares]
    for number, (x, y) in enumerate(wholes):
        parts = [of_rank[number] for of_rank in found]
        of_rows = [len(part) for part in torch.tensor_split(y, size)]
        assert [rows for *_, rows in parts] == [len(y)] * size
        assert [weight for _, _, weight, _ in parts] == [n * size / len(y) for n in of_rows]
        assert [len(part[1]) for part in parts] == [max(1, n) for n in of_rows]
        real = [part for part in parts if part[2] > 0]
        for whole, at in ((x, 0), (y, 1)):
            together = torch.cat([part[at] for part in real])
            assert together.dtype == whole.dtype
            assert sorted(together.tolist()) == sorted(whole.tolist())
        if x.dim() == 4:
            assert all(p[0].is_contiguous(memory_format=torch.channels_last) for p in parts)
    assert {len(of_rank) for of_rank in found} == {len(wholes)}
    assert {len(share) for share in shares} == {len(make())}
    assert len(shares[0]) == sum(rows for *_, rows in found[0])


@pytest.mark.parametrize("room_bytes", [0, PLENTY])
@pytest.mark.parametrize("rows_of_kind", [table, images, text])
@pytest.mark.parametrize(
    ("rows", "batch_size", "size"),
    [(20, 8, 2), (21, 8, 3), (17, 8, 2), (17, 4, 3), (5, 1, 2), (3, 8, 4), (19, 7, 5), (8, 8, 8)],
)
def test_the_batches_are_those_of_one_process(
    tmp_path, rows_of_kind, rows, batch_size, size, room_bytes
) -> None:
    x, y = rows_of_kind(tmp_path, rows)

    def make() -> ResidentBatches | StreamedBatches:
        return place_rows(x, y, device=CPU, room_bytes=room_bytes, channels_last=x.ndim == 4)

    assert isinstance(make(), ResidentBatches if room_bytes else StreamedBatches)
    order = make().draw_order(seed=3, epoch=1)
    same_batches(make, size=size, batches=lambda of: of.iterate_in_order(batch_size))
    same_batches(
        make, size=size, batches=lambda of: of.iterate_shuffled(batch_size, order, nothing)
    )


@pytest.mark.parametrize("room_bytes", [0, PLENTY])
def test_an_epoch_that_begins_in_its_middle_goes_on_with_the_same_batches(
    tmp_path, room_bytes
) -> None:
    x, y = table(tmp_path, 31)
    order = draw_row_order(31, seed=0, epoch=0)

    def batches(share: RankShare):
        return taken(share.iterate_shuffled(7, left, nothing))

    shares = [
        RankShare(place_rows(x, y, device=CPU, room_bytes=room_bytes), rank=rank, size=3)
        for rank in range(3)
    ]
    for share in shares:
        left = order
        whole = batches(share)
        for done in range(1, 5):
            left = order[7 * done :]
            for late, early in zip(batches(share), whole[done:], strict=True):
                assert torch.equal(late[0], early[0]) and late[2:] == early[2:]


@given(rows=st.integers(1, 50), size=st.integers(2, 9))
@settings(max_examples=60, deadline=None)
def test_parts_lie_side_by_side_as_tensor_split_has_them(rows: int, size: int) -> None:
    shares = [BatchShare(rank, size) for rank in range(size)]
    for share, part in zip(shares, torch.arange(rows).tensor_split(size), strict=True):
        assert torch.arange(rows)[share.find_slice(rows)].tolist() == (part.tolist() or [0])
        assert share.compute_weight(rows) == len(part) * size / rows
    assert sum(share.compute_weight(rows) for share in shares) == pytest.approx(size)


def test_batches_are_gathered_in_place_where_a_graph_reads_them(tmp_path) -> None:
    """A recorded graph reads the memory of the first batch: all but the last are of its size."""
    x, y = table(tmp_path, 30)
    kept = place_rows(x, y, device=CPU, room_bytes=PLENTY)
    assert isinstance(kept, ResidentBatches)
    kept._in_place = True
    share, order = RankShare(kept, rank=1, size=2), draw_row_order(30, seed=0, epoch=0)
    places = [(len(x), x.data_ptr()) for x, *_ in share.iterate_shuffled(7, order, nothing)]
    assert [rows for rows, _ in places] == [3, 3, 3, 3, 1]
    assert len({place for _, place in places}) == 1


class Watched(np.ndarray):
    """Writes down which rows of it are read."""

    def take(self, rows, **how):
        self.read.extend(rows.tolist())
        return np.asarray(self).take(rows, **how)

    def __getitem__(self, rows):
        self.read.extend(range(len(self))[rows])
        return np.asarray(self)[rows]


def test_a_rank_reads_its_rows_and_no_others(tmp_path) -> None:
    arrays, order = table(tmp_path, 20), draw_row_order(20, seed=0, epoch=0)
    for rank in range(3):
        kept = place_rows(*arrays, device=CPU, room_bytes=0)
        assert isinstance(kept, StreamedBatches)
        kept._arrays = tuple(array.view(Watched) for array in kept._arrays)
        reads: list[list[int]] = [[], []]
        for array, read in zip(kept._arrays, reads, strict=True):
            array.read = read
        share = RankShare(kept, rank=rank, size=3)
        judged = [row for _, y, *_ in share.iterate_in_order(9) for row in y.tolist()]
        # Batches of 9, 9 and 2, of which the last leaves the third rank one to fill in with.
        own = [[0, 1, 2, 9, 10, 11, 18], [3, 4, 5, 12, 13, 14, 19], [6, 7, 8, 15, 16, 17, 18]]
        assert judged == reads[0] == reads[1] == own[rank]
        reads[0].clear()
        trained = [
            row for _, y, *_ in share.iterate_shuffled(9, order, nothing) for row in y.tolist()
        ]
        assert trained == reads[0] and len(trained) == 7
        assert set(trained[:3]) == set(order[3 * rank : 3 * rank + 3].tolist())


def test_all_but_its_rows_is_told_as_of_the_whole(tmp_path) -> None:
    whole = place_rows(*table(tmp_path, 20), device=CPU, room_bytes=0)
    share = RankShare(whole, rank=1, size=2)
    assert share.whole is whole and len(share) == 20 and share.count_steps(8) == 3
    assert share.residency == "host" and share.copy_s is None and not share.begins_again
    assert share.reason == f"{whole.reason}; part 2 of 2 of each batch"
    assert torch.equal(share.draw_order(seed=1, epoch=2), whole.draw_order(seed=1, epoch=2))
    assert share.state() == {} and share.list_tensors() == () and share.give_back() is False
    share.restore({})
    share.close()
