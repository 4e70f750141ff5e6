"""A user's own DataLoader feeds the loop like any other rows, and its processes end with it."""

import multiprocessing
import os
import signal
import time
from collections import namedtuple

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from headroom.data.dataloaders import LoaderBatches
from headroom.data.source_data import DataError

CPU, META = torch.device("cpu"), torch.device("meta")
NO_ORDER = torch.arange(0)
Pair = namedtuple("Pair", "left right")
# Python 3.12 warns of fork() in a process with threads, PyTorch's own among them.
forks = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def rows(count: int = 20) -> TensorDataset:
    return TensorDataset(torch.arange(2.0 * count).reshape(count, 2), torch.arange(count))


def nothing(phase: str) -> None:
    pass


def test_batches_are_the_loaders_own() -> None:
    marks: list[str] = []
    fed = LoaderBatches(DataLoader(rows(), batch_size=8), CPU)
    assert (len(fed), fed.batch_size, fed.count_steps(999), fed.residency) == (20, 8, 3, "loader")
    assert fed.reason == "a loader of its own: batches of 8 from this process, not pinned"
    found = list(fed.iterate_shuffled(5, NO_ORDER, marks.append))
    assert [batch.rows for batch in found] == [8, 8, 4]
    assert marks == ["data_wait"] * 3
    assert torch.equal(torch.cat([y for _, y, *_ in fed.iterate_in_order(5)]), torch.arange(20))


def test_a_batch_has_the_rows_of_the_targets_that_have_some() -> None:
    """Story: a single number that stood first among them made it one row."""
    scaled = [(torch.zeros(8, 2), {"scale": torch.tensor(2.0), "of": torch.zeros(8)})]
    fed = LoaderBatches(DataLoader(scaled, batch_size=1, collate_fn=lambda rows: rows[0]), CPU)
    assert [(batch.rows, batch.weight) for batch in fed.iterate_in_order(1)] == [(8, 1.0)]
    assert len(fed) == 8


@pytest.mark.parametrize(("drop_last", "count"), [(False, 20), (True, 16)])
def test_rows_of_an_epoch_are_those_that_come(drop_last: bool, count: int) -> None:
    fed = LoaderBatches(DataLoader(rows(), batch_size=8, drop_last=drop_last), CPU)
    assert len(fed) == count == sum(len(y) for _, y, *_ in fed.iterate_in_order(1))


class Uneven(BatchSampler):
    """Batches of its own sizes, the largest 6."""

    def __iter__(self):
        yield from ([0, 1, 2, 3, 4, 5], [6], [7, 8, 9])

    def __len__(self) -> int:
        return 3


def test_rows_of_a_sampler_that_does_not_tell_are_counted() -> None:
    sampler = Uneven(SequentialSampler(range(20)), batch_size=6, drop_last=False)
    fed = LoaderBatches(DataLoader(rows(), batch_sampler=sampler), CPU)
    assert (fed.batch_size, fed.count_steps(1)) == (6, 3)
    next(fed.iterate_in_order(1))
    assert len(fed) == 18, "three batches of at most 6, as far as it tells; one was not an epoch"
    assert sum(len(y) for _, y, *_ in fed.iterate_in_order(1)) == 10 == len(fed)


class Nested(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int):
        ones = torch.ones(2) * i
        return {"a": ones, "b": [ones, Pair(ones, "text")]}, (torch.tensor(i), torch.tensor(-i))


def test_inputs_of_any_structure_are_moved_with_it() -> None:
    marks: list[str] = []
    fed = LoaderBatches(DataLoader(Nested(), batch_size=4), META)
    for number, (x, y, *_) in enumerate(fed.iterate_shuffled(1, NO_ORDER, marks.append), start=1):
        assert marks == ["data_wait", "h2d"] * number
        left = x["b"][1].left
        assert type(x["b"][1]).__name__ == "Pair" and x["b"][1].right[0] == "text"
        assert {t.device.type for t in (x["a"], x["b"][0], left, *y)} == {"meta"}
    assert len(fed) == 6


@forks
def test_workers_give_the_same_and_end_with_the_epoch_or_its_early_end() -> None:
    fed = LoaderBatches(DataLoader(rows(), batch_size=8, num_workers=2), CPU)
    assert fed.reason == "a loader of its own: batches of 8 from 2 worker processes, not pinned"
    assert torch.equal(torch.cat([y for _, y, *_ in fed.iterate_in_order(1)]), torch.arange(20))
    assert not multiprocessing.active_children()
    for _ in fed.iterate_shuffled(1, NO_ORDER, nothing):
        assert len(multiprocessing.active_children()) == 2
        break
    assert not multiprocessing.active_children()
    with pytest.raises(KeyError):
        for _ in fed.iterate_shuffled(1, NO_ORDER, nothing):
            raise KeyError("the step failed")
    assert not multiprocessing.active_children()


@forks
def test_workers_that_outlive_an_epoch_end_at_close() -> None:
    fed = LoaderBatches(
        DataLoader(rows(), batch_size=8, num_workers=2, persistent_workers=True), CPU
    )
    for _ in fed.iterate_shuffled(1, NO_ORDER, nothing):
        break
    assert len(multiprocessing.active_children()) == 2
    fed.close()
    assert not multiprocessing.active_children()
    assert len(list(fed.iterate_in_order(1))) == 3, "a closed loader can start again"
    fed.close()


class Endless(IterableDataset):
    def __iter__(self):
        yield from rows()


class Liar(Endless):
    """Says that it has rows and gives none."""

    def __len__(self) -> int:
        return 4

    def __iter__(self):
        return iter(())


def test_what_cannot_feed_a_training_is_refused_in_one_sentence() -> None:
    untold = SequentialSampler(range(20))
    for loader, message in (
        (
            DataLoader(rows(3), batch_size=4, drop_last=True),
            r"must have at least one batch \(got 0\)",
        ),
        (DataLoader(rows(), batch_size=None), r"must tell its batch size \(got None\)"),
        (DataLoader(rows(), batch_sampler=untold), r"must tell its batch size \(got None\)"),
        ([(torch.ones(2), torch.ones(2))], r"must tell its batch size \(got None\)"),
    ):
        with pytest.raises(DataError, match=rf"^data.source: the loader {message}.*; \w+") as got:
            LoaderBatches(loader, CPU)
        assert "\n" not in str(got.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (TensorDataset(torch.ones(4)), r"must be a pair .* \(got a list of 1\)"),
        (TensorDataset(*[torch.ones(4)] * 3), r"must be a pair .* \(got a list of 3\)"),
        ([{"x": "cat"}] * 4, r"must be a pair .* \(got a dict\)"),
        ([1.0] * 4, r"must be a pair .* \(got a Tensor\)"),
        ([(1.0, "cat")] * 4, r"targets of a batch must be a tensor, or hold one \(got str\)"),
    ],
)
def test_a_batch_that_is_no_pair_of_tensors_is_refused(data, message: str) -> None:
    fed = LoaderBatches(DataLoader(data, batch_size=2), CPU)
    with pytest.raises(DataError, match=rf"^data.source: .*{message}; return "):
        list(fed.iterate_in_order(1))


def test_a_loader_that_gives_nothing_is_refused() -> None:
    fed = LoaderBatches(DataLoader(Liar(), batch_size=2), CPU)
    with pytest.raises(DataError, match="^data.source: the loader gave no rows; give it at least"):
        list(fed.iterate_in_order(1))


class Broken:
    """An iterator whose worker's connection breaks before the worker has ended."""

    batch_size = 2

    def __init__(self) -> None:
        self._workers = [multiprocessing.get_context("fork").Process(target=time.sleep, args=[0.3])]
        self._workers[0].start()

    def __len__(self) -> int:
        return 3

    def __iter__(self):
        return self

    def __next__(self):
        raise ConnectionResetError


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_worker_has_ended_when_its_loss_is_told() -> None:
    """The signal of its end raised amid a lock of the loader's queues, which was never let go."""
    loader = Broken()
    with pytest.raises(
        RuntimeError,
        match="^data.source: a worker process of the loader has died .DataLoader worker ended",
    ):
        list(LoaderBatches(loader, CPU).iterate_in_order(1))
    assert loader._workers[0].exitcode == 0


class ShortOfSharedMemory(Dataset):
    """What happens in a worker whose /dev/shm is full: PyTorch finds no room, or writes past it."""

    def __init__(self, kills: bool) -> None:
        self.kills = kills

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        if self.kills:
            os.kill(os.getpid(), signal.SIGBUS)
        raise RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space"
        )


@forks
@pytest.mark.parametrize(("kills", "is_deaf"), [(False, False), (True, False), (True, True)])
def test_workers_without_shared_memory_are_told_its_cure(
    kills: bool, is_deaf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container, whose /dev/shm has 64 MiB, the words were PyTorch's, without a remedy; also
    where an event loop has taken the signal of a worker's end."""
    before = signal.getsignal(signal.SIGCHLD)
    if is_deaf:
        monkeypatch.setattr(
            "torch.utils.data._utils.signal_handling._set_SIGCHLD_handler", lambda: None
        )
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    fed = LoaderBatches(DataLoader(ShortOfSharedMemory(kills), batch_size=4, num_workers=1), CPU)
    words = "^data.source: the worker .* in /dev/shm, which .*--shm-size.* or num_workers=0$"
    try:
        with pytest.raises(DataError, match=words):
            list(fed.iterate_in_order(4))
    finally:
        signal.signal(signal.SIGCHLD, before)
