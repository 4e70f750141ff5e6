import numpy as np
import pytest
import torch

from tasks.engine.batches import Resident, Streamed, feed, row_order

CPU = torch.device("cpu")


@pytest.fixture
def on_disk(tmp_path):
    x = np.arange(60, dtype=np.float32).reshape(20, 3)
    y = np.arange(20)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    return tuple(np.load(tmp_path / f"{n}.npy", mmap_mode="r") for n in "xy")


def test_data_that_fits_lives_on_the_device(on_disk) -> None:
    assert isinstance(feed(*on_disk, device=CPU, room_bytes=10**6), Resident)


@pytest.mark.parametrize("free_bytes", [0, 700])
def test_data_that_does_not_fit_is_streamed(on_disk, free_bytes) -> None:
    fed = feed(*on_disk, device=CPU, room_bytes=free_bytes)
    assert isinstance(fed, Streamed)
    assert fed.residency == "host"


@pytest.mark.parametrize("free_bytes", [0, 10**6])
def test_an_epoch_gives_each_row_once_with_its_own_target(on_disk, free_bytes) -> None:
    fed = feed(*on_disk, device=CPU, room_bytes=free_bytes)
    seen = []
    for x, y in fed.shuffled(6, row_order(20, seed=1, epoch=0), lambda phase: None):
        assert x.dtype == torch.float32 and y.dtype == torch.int64
        assert torch.equal(x[:, 0], 3.0 * y)
        seen.append(y)
    assert [len(y) for y in seen] == [6, 6, 6, 2]
    assert sorted(torch.cat(seen).tolist()) == list(range(20))


def test_streamed_and_resident_batches_hold_the_same_rows(on_disk) -> None:
    order = row_order(20, seed=3, epoch=2)
    both = [feed(*on_disk, device=CPU, room_bytes=free) for free in (0, 10**6)]
    batches = [list(fed.shuffled(8, order, lambda phase: None)) for fed in both]
    for (_, streamed), (_, resident) in zip(*batches, strict=True):
        assert set(streamed.tolist()) == set(resident.tolist())


@pytest.mark.parametrize("free_bytes", [0, 10**6])
def test_evaluation_reads_in_order(on_disk, free_bytes) -> None:
    fed = feed(*on_disk, device=CPU, room_bytes=free_bytes)
    assert torch.cat([y for _, y in fed.in_order(7)]).tolist() == list(range(20))


def test_the_order_follows_the_seed_and_the_epoch_alone() -> None:
    torch.manual_seed(5)
    first = row_order(50, seed=1, epoch=1)
    torch.manual_seed(6)
    assert torch.equal(first, row_order(50, seed=1, epoch=1))
    assert not torch.equal(first, row_order(50, seed=1, epoch=2))
    assert not torch.equal(first, row_order(50, seed=2, epoch=1))
    row_order(5, seed=2**63 - 1, epoch=10**6)
