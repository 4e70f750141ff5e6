"""What other tests rely on when several ranks play a function."""

import sys

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks


def _sum_of_ranks(start: int) -> tuple[float, list[str]]:
    total = torch.tensor(float(start + dist.get_rank()))
    dist.all_reduce(total)
    return total.item(), sorted({"prefect", "mlflow"} & set(sys.modules))


def _fail_on_the_second() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the second")
    dist.barrier()


def test_ranks_talk_and_import_neither_prefect_nor_mlflow() -> None:
    assert on_ranks(3, _sum_of_ranks, 10) == [(33.0, [])] * 3


def test_a_rank_that_fails_is_told_and_ends_the_others() -> None:
    with pytest.raises(AssertionError, match="ValueError: the second"):
        on_ranks(2, _fail_on_the_second)
