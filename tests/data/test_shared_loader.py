"""A DataLoader of the user's own is split over the ranks: its batches stay those of one process."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from headroom.data.batches import RankShare
from headroom.data.dataloaders import LoaderBatches, share_loader
from headroom.data.source_data import DataError

CPU = torch.device("cpu")
NO_ORDER = torch.arange(0)
# Python 3.12 warns of fork() in a process with threads, PyTorch's own among them.
forks = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def nothing(phase: str) -> None:
    pass


class Rows(Dataset):
    """Each row draws from the random numbers of everybody, as augmentations do."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.rand(2) + random.random() + np.random.random(), i


class Mixed:
    """Index batches of 5, 2 and of odd sizes, in an order of everybody's random numbers, two of
    which are drawn as they are asked for."""

    batch_size = 5

    def __init__(self) -> None:
        self.rows = list(range(21))

    def __len__(self) -> int:
        return 6

    def __iter__(self):
        random.shuffle(self.rows)
        left = iter(self.rows)
        for size in np.random.permutation([5, 2, 1, 5, 5, 3]):
            turned = torch.randperm(size)
            batch = torch.tensor([next(left) for _ in range(size)])
            yield batch[turned].tolist()


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


KINDS = {
    "plain": lambda **how: DataLoader(Rows(), 4, **how),
    "shuffled": lambda **how: DataLoader(Rows(), 4, shuffle=True, **how),
    "dropping": lambda **how: DataLoader(Rows(), 4, shuffle=True, drop_last=True, **how),
    "its generator": lambda **how: DataLoader(
        Rows(), 4, shuffle=True, generator=generator(), **how
    ),
    "weighted": lambda **how: DataLoader(
        Rows(), 4, sampler=WeightedRandomSampler(torch.arange(1.0, 22), 18), **how
    ),
    "weighted, its generator": lambda **how: DataLoader(
        Rows(),
        4,
        sampler=WeightedRandomSampler(torch.arange(1.0, 22), 18, generator=generator()),
        **how,
    ),
    "a subset": lambda **how: DataLoader(
        Rows(), 4, sampler=SubsetRandomSampler(range(3, 14)), **how
    ),
    "a batch sampler": lambda **how: DataLoader(
        Rows(), batch_sampler=BatchSampler(RandomSampler(Rows()), 6, False), **how
    ),
    "its own batch sampler": lambda **how: DataLoader(Rows(), batch_sampler=Mixed(), **how),
    "one at a time": lambda **how: DataLoader(Rows(), 1, shuffle=True, **how),
}


def epoch(
    fed: LoaderBatches | RankShare, *, judges: bool = False
) -> list[tuple[list[int], float, int]]:
    """The rows of each batch of an epoch, its weight and how many rows the whole batch has."""
    return [
        (batch.y.tolist(), batch.weight, batch.rows)
        for batch in (
            fed.iterate_in_order(99) if judges else fed.iterate_shuffled(99, NO_ORDER, nothing)
        )
    ]


def one_of(kind: str, rank: int, size: int, **how) -> LoaderBatches | RankShare:
    fed = LoaderBatches(share_loader(KINDS[kind](**how), rank=rank, size=size, seed=7), CPU)
    return RankShare(fed, rank=rank, size=size) if size > 1 else fed


def apart(rank: int) -> None:
    """The random numbers of the ranks have parted ways."""
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)


def same_epochs(kind: str, size: int, epochs: int = 3, **how) -> None:
    apart(99)
    one = one_of(kind, 0, 1, **how)
    wholes = [epoch(one, judges=number == 1) for number in range(epochs)]
    found = []
    for rank in range(size):
        apart(rank)
        share = one_of(kind, rank, size, **how)
        assert len(share) >= sum(rows for *_, rows in wholes[0]), "as far as it tells"
        found.append([epoch(share, judges=number == 1) for number in range(epochs)])
        assert len(share) == len(one) and share.count_steps(1) == one.count_steps(1)
        share.close()
    one.close()
    for number, whole in enumerate(wholes):
        for at, (rows, _, _) in enumerate(whole):
            parts = [of_rank[number][at] for of_rank in found]
            split = [part.tolist() for part in torch.tensor(rows).tensor_split(size)]
            assert [part[0] for part in parts] == [own or rows[:1] for own in split]
            assert [part[1] for part in parts] == [len(own) * size / len(rows) for own in split]
            assert [part[2] for part in parts] == [len(rows)] * size
        assert {len(of_rank[number]) for of_rank in found} == {len(whole)}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_take_the_batches_of_one_process(kind: str, size: int) -> None:
    same_epochs(kind, size)


@forks
@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("kind", ["plain", "shuffled", "its generator", "its own batch sampler"])
def test_so_they_do_with_workers(kind: str, stays: bool) -> None:
    same_epochs(kind, 2, epochs=2, num_workers=2, persistent_workers=stays)


def test_an_order_of_its_own_has_no_effect_on_the_random_numbers_of_others() -> None:
    loader = share_loader(KINDS["its own batch sampler"](), rank=0, size=1, seed=0)
    apart(3)
    expected = torch.rand(3), random.random(), np.random.random(3)
    apart(3)
    assert len(list(loader.batch_sampler)) == 6
    found = torch.rand(3), random.random(), np.random.random(3)
    assert torch.equal(found[0], expected[0]) and found[1] == expected[1]
    assert (found[2] == expected[2]).all()


class Drawing:
    """Draws a batch at a time."""

    batch_size = 3

    def __len__(self) -> int:
        return 5

    def __iter__(self):
        for _ in range(5):
            yield [*torch.randint(10**6, (1,)).tolist(), random.random(), np.random.random()]


def test_no_number_of_an_order_is_drawn_twice() -> None:
    loader = share_loader(DataLoader(Rows(), batch_sampler=Drawing()), rank=0, size=1, seed=0)
    drawn = [tuple(batch) for _ in range(2) for batch in loader.batch_sampler]
    assert all(len(set(numbers)) == 10 for numbers in zip(*drawn, strict=True))


def test_the_order_is_of_the_seed() -> None:
    orders = [
        list(share_loader(KINDS["shuffled"](), rank=0, size=1, seed=seed).batch_sampler)
        for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["shuffled", "its generator", "weighted, its generator"])
def test_a_loader_that_is_resumed_goes_on_with_the_next_epoch(kind: str, size: int) -> None:
    whole = one_of(kind, 0, size)
    series = [epoch(whole) for _ in range(3)]
    first = one_of(kind, 0, size)
    assert epoch(first) == series[0] != series[1]
    state = first.state()
    for rank in range(size):
        apart(rank + 50)
        again = one_of(kind, rank, size)
        again.restore(state)
        found = [epoch(again), epoch(again)]
        assert rank or found == series[1:]


@forks
def test_an_epoch_that_was_left_says_nothing_of_the_next() -> None:
    """What was drawn ahead and never taken is forgotten."""
    share = one_of("its own batch sampler", 0, 2, num_workers=1)
    for _ in share.iterate_shuffled(9, NO_ORDER, nothing):
        break
    for rows, weight, of in epoch(share):
        assert weight * of == 2 * len(rows)


@forks
def test_workers_that_were_there_before_do_not_go_on_with_the_whole_batches() -> None:
    """A factory may keep its loader, which the look at the first batch has started."""
    loader = DataLoader(Rows(), 4, num_workers=1, persistent_workers=True)
    before = LoaderBatches(loader, CPU)
    assert next(before.iterate_in_order(4))[1].tolist() == [0, 1, 2, 3]
    share = RankShare(
        LoaderBatches(share_loader(loader, rank=1, size=2, seed=0), CPU), rank=1, size=2
    )
    assert epoch(share)[0] == ([2, 3], 1.0, 4)
    share.close()
    before.close()


def test_a_shared_loader_is_the_users_in_all_else() -> None:
    class Mine(DataLoader):
        pass

    def together(rows: list) -> list:
        return rows

    how = {"timeout": 3, "num_workers": 1, "prefetch_factor": 5, "in_order": False}
    loader = Mine(Rows(), 4, collate_fn=together, **how)
    shared = share_loader(loader, rank=1, size=2, seed=0)
    assert type(shared) is Mine and shared is not loader and shared.dataset is loader.dataset
    for name in ("batch_size", "collate_fn", "timeout", "num_workers", "prefetch_factor"):
        assert getattr(shared, name) == getattr(loader, name), name
    assert type(loader.batch_sampler) is BatchSampler, "theirs is as it was"
    assert shared.in_order, "or nobody could tell which batch came"
    assert not share_loader(loader, rank=0, size=1, seed=0).in_order


class Stream(IterableDataset):
    def __iter__(self):
        yield from Rows()


class OwnOrder(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


class Untold(Mixed):
    __len__ = None  # type: ignore[assignment]


ROWS = TensorDataset(torch.arange(20.0), torch.arange(20))
TRAINED_APART = DistributedSampler(ROWS, num_replicas=2, rank=0)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            DataLoader(Stream(), 4),
            "a loader over an IterableDataset cannot be split over 2 processes; return a Dataset "
            "with __getitem__ and __len__, or train in one process",
        ),
        (DataLoader(ROWS, batch_size=None), "a loader with batch_size=None cannot be split over 2"),
        ([(torch.ones(2), torch.ones(2))], "a loader that is a list and no DataLoader cannot be"),
        (OwnOrder(ROWS, 4), "a OwnOrder, which has an __iter__ of its own, cannot be split over 2"),
        (DataLoader(ROWS, batch_sampler=Untold()), "a loader without a length cannot be split"),
        (
            DataLoader(ROWS, 4, sampler=TRAINED_APART),
            "a loader with a DistributedSampler, which has split it already, cannot be split over "
            "2 processes; drop the sampler, and set shuffle=True where it shuffles: Headroom",
        ),
        (
            DataLoader(ROWS, batch_sampler=BatchSampler(TRAINED_APART, 4, False)),
            "a loader with a DistributedSampler, which has split it already, cannot be split over",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_and_left_alone_in_one_process(loader, message) -> None:
    with pytest.raises(DataError) as got:
        share_loader(loader, rank=0, size=2, seed=0)
    assert str(got.value).startswith(f"data.source: {message}") and "\n" not in str(got.value)
    assert "; " in str(got.value)
    assert share_loader(loader, rank=0, size=1, seed=0) is loader
