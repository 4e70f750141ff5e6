"""Where a training takes its rows from, as one process and as one of several ranks."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from headroom.base.facts import DataFacts
from headroom.data.preparation import prepare_dataset
from headroom.data.source_data import DataError
from headroom.device.detection import detect_best_device
from headroom.settings.run_config import RunConfig
from headroom.training.plan import make_plan
from headroom.training.training_parts import open_batches, open_test_batches, read_first_rows

Own = Callable[[str, str], None]
MODEL = nn.Linear(3, 2)
OWN = """
import random
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

ROWS = TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
ROWS.classes = ["no", "yes"]

def drawn():
    order = np.random.permutation(40).tolist()
    random.shuffle(order)
    parts = Subset(ROWS, order[:30]), Subset(ROWS, order[30:])
    return DataLoader(parts[0], 8, shuffle=True), DataLoader(parts[1], 8)

class Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)

def stream():
    return Stream(), ROWS
"""


def nothing(phase: str) -> None:
    pass


def sure(batches: Any) -> Any:
    """A part of each batch, which is said."""
    assert " of each batch" in batches.reason
    return batches


def parts_of(found: Any) -> list[list[list[float]]]:
    """The inputs of each batch that are the rank's own."""
    return [batch.x.tolist() if batch.weight else [] for batch in found]


def together(ranks: list[list[list[list[float]]]]) -> list[list[list[float]]]:
    return [sorted(sum(parts, [])) for parts in zip(*ranks, strict=True)]


@pytest.fixture
def files(tmp_path: Path) -> tuple[RunConfig, DataFacts]:
    x = np.random.default_rng(0).normal(size=(90, 3)).astype(np.float32)
    np.savez(tmp_path / "given.npz", x=x, y=np.arange(90) % 2)
    data = {
        "cache": str(tmp_path / "data"),
        "path": str(tmp_path / "given.npz"),
        "test_fraction": 0.1,
    }
    config = RunConfig.model_validate({"data": data, "train": {"batch_size": 8}})
    return config, prepare_dataset(config.data)


def test_prepared_rows_are_shared_by_the_ranks(files: tuple[RunConfig, DataFacts]) -> None:
    config, data = files
    device = detect_best_device("cpu")
    train, val = open_batches(make_plan(config, device, data), MODEL)
    test = open_test_batches(make_plan(config, device, data), MODEL)
    assert not any(" of each batch" in rows.reason for rows in (train, val, test))
    order = train.draw_order(seed=0, epoch=0)
    expected = [
        [sorted(x.tolist()) for x, *_ in found]
        for found in (
            train.iterate_shuffled(8, order, nothing),
            val.iterate_in_order(4),
            test.iterate_in_order(4),
        )
    ]
    found: list[list[Any]] = [[], [], []]
    for rank in range(3):
        train, val = map(
            sure, open_batches(make_plan(config, device, data), MODEL, rank=rank, size=3)
        )
        test = sure(open_test_batches(make_plan(config, device, data), MODEL, rank=rank, size=3))
        found[0].append(parts_of(train.iterate_shuffled(8, order, nothing)))
        found[1].append(parts_of(val.iterate_in_order(4)))
        found[2].append(parts_of(test.iterate_in_order(4)))
        assert len(read_first_rows(val)) == 2, "the example is no share"
    assert [together(ranks) for ranks in found] == expected


def test_rows_that_a_factory_draws_are_the_same_on_every_rank(own: Own, tmp_path: Path) -> None:
    """Each rank is a process of its own, whose numbers of NumPy and Python nobody has seeded."""
    own("mine", OWN)
    data = {"source": "mine:drawn", "cache": str(tmp_path)}
    config = RunConfig.model_validate({"data": data, "train": {"batch_size": 8, "seed": 3}})
    facts = prepare_dataset(config.data, batch_size=8, seed=3)
    found: list[list[Any]] = [[], []]
    after: list[tuple[float, float]] = []
    for rank in range(2):
        np.random.seed(rank)
        random.seed(rank)
        shares = open_batches(
            make_plan(config, detect_best_device("cpu"), facts), MODEL, rank=rank, size=2
        )
        for part, share in zip(found, map(sure, shares), strict=True):
            part.append(parts_of(share.iterate_in_order(8)))
        after.append((random.random(), np.random.random()))
    rows = [row for part in found for batch in together(part) for row in batch]
    assert not set(after[0]) & set(after[1]), "augmentations of other rows are others"
    assert len(rows) == 40 == len(torch.tensor(rows).unique(dim=0))


def test_a_stream_is_refused_by_several_ranks(own: Own, tmp_path: Path) -> None:
    own("mine", OWN)
    data = {"source": "mine:stream", "cache": str(tmp_path)}
    config = RunConfig.model_validate({"data": data, "train": {"max_steps": 5}})
    facts = prepare_dataset(config.data)
    assert len(open_batches(make_plan(config, detect_best_device("cpu"), facts), MODEL)) == 2
    with pytest.raises(DataError, match="^data.source: a loader over an IterableDataset cannot be"):
        open_batches(make_plan(config, detect_best_device("cpu"), facts), MODEL, rank=1, size=2)
