"""Batches on a real CUDA or ROCm GPU: the rows of the CPU, copied beside the computing, and nothing
left behind; and the peak that such a GPU is measured at."""

import gc
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headroom.data.batches import RankShare
from headroom.data.dataloaders import LoaderBatches
from headroom.data.dataset_batches import (
    ResidentBatches,
    StreamedBatches,
    draw_row_order,
    place_rows,
)
from headroom.data.preparation import view_token_rows
from headroom.watch.leaks import release_device_memory, take_baseline

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
PLENTY = 10**9
BUSY_CYCLES = 20_000_000  # some 10 ms of a GPU that does nothing else


def nothing(phase: str) -> None:
    pass


def rows(count: int = 500, features: int = 64) -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.default_rng(0).normal(size=(count, features)).astype(np.float32)
    return drawn, np.arange(count)


@pytest.mark.parametrize(
    ("room_bytes", "kind", "residency"),
    [(PLENTY, ResidentBatches, "device"), (0, StreamedBatches, "pinned")],
)
def test_batches_hold_the_rows_of_plain_indexing(room_bytes, kind, residency) -> None:
    x, y = rows()
    fed = place_rows(x, y, device=GPU, room_bytes=room_bytes)
    assert isinstance(fed, kind) and fed.residency == residency
    order = draw_row_order(500, seed=0, epoch=0)
    for batches in (fed.iterate_shuffled(32, order, nothing), fed.iterate_in_order(32)):
        seen = []
        for got_x, got_y, *_ in batches:
            assert got_x.device == GPU
            assert torch.equal(got_x.cpu(), torch.from_numpy(x)[got_y.cpu()])
            seen += got_y.tolist()
        assert sorted(seen) == list(range(500))


def test_resident_batches_come_in_the_order_of_the_cpu_and_in_one_memory() -> None:
    x, y = rows()
    order = draw_row_order(500, seed=0, epoch=0)
    fed = place_rows(x, y, device=GPU, room_bytes=PLENTY)
    places, seen = set(), []
    for epoch in range(2):
        for got_x, got_y, *_ in fed.iterate_shuffled(50, order, nothing):
            places.add((got_x.data_ptr(), got_y.data_ptr()))
            seen += got_y.tolist() if epoch else []
    assert seen == order.tolist()
    assert len(places) == 1


def test_a_slow_gpu_reads_whole_batches_and_the_host_does_not_run_away() -> None:
    x, y = rows(count=400, features=4096)
    fed = place_rows(x, y, device=GPU, room_bytes=0)
    batch_bytes = 20 * 4096 * 4
    torch.cuda.synchronize(GPU)
    before = torch.cuda.memory_allocated(GPU)
    torch.cuda.reset_peak_memory_stats(GPU)
    sums, labels = [], []
    for _ in range(2):
        for got_x, got_y, *_ in fed.iterate_shuffled(20, torch.arange(400), nothing):
            torch.cuda._sleep(BUSY_CYCLES // 10)
            sums.append(got_x.double().sum(1))  # read late, long after the host has gone on
            labels.append(got_y.clone())
    expected = torch.from_numpy(x).double().sum(1)[torch.cat(labels).cpu()]
    torch.testing.assert_close(torch.cat(sums).cpu(), expected)
    most = torch.cuda.max_memory_allocated(GPU) - before
    assert most < 7 * batch_bytes, "three batches, the doubles of one, and what is summed"
    assert fed.copy_s is not None and 0 < fed.copy_s < 1


@pytest.mark.real_gpu("a stand-in copies and computes on the host")
def test_copies_run_beside_the_computing() -> None:
    x, y = rows(count=384, features=1 << 18)  # 32 rows: 32 MiB, a millisecond or so of any bus
    fed = place_rows(x, y, device=GPU, room_bytes=0)
    steps = []
    for _ in fed.iterate_in_order(32):
        arrived, left = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        arrived.record()  # in the stream that computes, behind its wait for the copy
        torch.cuda._sleep(5 * BUSY_CYCLES)
        left.record()
        steps.append((arrived, left))
    torch.cuda.synchronize(GPU)
    stalls_ms = [
        left.elapsed_time(arrived)
        for (_, left), (arrived, _) in zip(steps[2:], steps[3:], strict=False)
    ]
    assert sorted(stalls_ms)[len(stalls_ms) // 2] < 0.5 * 1000 * fed.copy_s


@pytest.mark.parametrize("room_bytes", [0, PLENTY])
def test_tokens_above_32767_and_images_arrive_as_they_were(tmp_path, room_bytes) -> None:
    kept = np.random.default_rng(0).integers(0, 65536, 40 * 16 + 3).astype(np.uint16)
    np.save(tmp_path / "text.npy", kept)
    rows = view_token_rows(np.load(tmp_path / "text.npy", mmap_mode="r"), 16)
    fed = place_rows(*rows, device=GPU, room_bytes=room_bytes)
    wide = torch.from_numpy(kept.astype(np.int64)).unfold(0, 17, 1)
    order = fed.draw_order(seed=0, epoch=1)
    if room_bytes == 0:  # a disk reads forwards: the rows of a batch are sorted
        order = torch.cat([begins.sort().values for begins in order.split(7)])
    straight = torch.arange(40) * 16
    for batches, begins in (
        (fed.iterate_shuffled(7, order, nothing), order),
        (fed.iterate_in_order(7), straight),
    ):
        x, y = (torch.cat(part).cpu() for part in list(zip(*batches, strict=True))[:2])
        assert torch.equal(x, wide[begins, :-1]) and torch.equal(y, wide[begins, 1:])
    images = np.random.default_rng(0).normal(size=(40, 3, 8, 8)).astype(np.float32)
    fed = place_rows(images, np.arange(40), device=GPU, room_bytes=room_bytes, channels_last=True)
    for got, numbers, *_ in fed.iterate_shuffled(7, draw_row_order(40, seed=0, epoch=0), nothing):
        assert got.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(got.cpu(), torch.from_numpy(images)[numbers.cpu()])


@pytest.mark.parametrize("room_bytes", [0, PLENTY])
def test_ranks_take_the_batches_of_one_process_and_know_what_each_is_of(room_bytes) -> None:
    """The next part is read, and sent, while the loop is at the one before."""
    x, y = rows(count=101)
    order, wholes, found = draw_row_order(101, seed=0, epoch=0), [], []
    for chunk in order.split(20):
        wholes.append((sorted(chunk.tolist()), len(chunk)))
    for rank in range(3):
        share = RankShare(place_rows(x, y, device=GPU, room_bytes=room_bytes), rank=rank, size=3)
        taken = []
        for got_x, got_y, whole, weight in share.iterate_shuffled(20, order, nothing):
            assert torch.equal(got_x.cpu(), torch.from_numpy(x)[got_y.cpu()])
            own = got_y.tolist() if weight else []
            assert weight == pytest.approx(len(own) * 3 / whole)
            taken.append((own, whole))
        assert sum(len(got) for _, got, *_ in share.iterate_in_order(20)) == (36, 36, 31)[rank]
        found.append(taken)
    for parts, (chunk, count) in zip(zip(*found, strict=True), wholes, strict=True):
        assert sorted(row for own, _ in parts for row in own) == chunk
        assert {told for _, told in parts} == {count}


def test_an_iteration_that_ends_early_leaves_nothing_behind() -> None:
    x, y = rows()
    torch.ones(1, device=GPU)
    gc.collect()  # a failed test's frames hold its tensors until then
    before = take_baseline(GPU).bytes
    fed = place_rows(x, y, device=GPU, room_bytes=0)
    for batch in fed.iterate_shuffled(32, draw_row_order(500, seed=0, epoch=0), nothing):
        assert batch[0].is_cuda
        break
    assert not [t for t in threading.enumerate() if t.name.startswith("in-order")]
    assert len(
        list(fed.iterate_shuffled(32, draw_row_order(500, seed=0, epoch=1), nothing))
    ) == fed.count_steps(32)
    fed.close()
    del batch
    gc.collect()
    facts = release_device_memory(GPU, baseline_bytes=before)
    assert facts.ok and facts.after_bytes == before, facts


def test_a_loaders_pinned_batches_are_moved() -> None:
    data = TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20))
    fed = LoaderBatches(DataLoader(data, batch_size=8, pin_memory=True), GPU)
    marks: list[str] = []
    found = list(fed.iterate_shuffled(1, torch.arange(0), marks.append))
    assert marks == ["data_wait", "h2d"] * 3 and fed.reason.endswith("this process, pinned")
    assert torch.equal(torch.cat([y for _, y, *_ in found]).cpu(), torch.arange(20))
    assert {batch.x.device for batch in found} == {GPU}
