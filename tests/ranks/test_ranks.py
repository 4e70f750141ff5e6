"""What other tests rely on when several ranks play a function."""

import sys

import pytest
import torch
import torch.distributed as dist

from headroom.ranks import ranks
from tests.rank_processes import on_ranks
from tests.ranks.peer_errors import LOST, OWN


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


def test_the_number_on_this_host_is_slurms_only_where_that_is_of_this_process() -> None:
    """RANK without LOCAL_RANK asked for cuda:1 of a pod with one GPU."""
    given = {"RANK": "3", "WORLD_SIZE": "4"}
    assert ranks.read_ranks_from_environment(given).local is None
    slurm = {"SLURM_LOCALID": "1", "SLURM_PROCID": "3"}
    assert ranks.read_ranks_from_environment(given | slurm).local == 1
    assert ranks.read_ranks_from_environment(given | slurm | {"SLURM_PROCID": "0"}).local is None


@pytest.mark.parametrize("name", LOST)
def test_what_tells_of_a_lost_peer_begins_all_again(name: str) -> None:
    assert ranks.is_lost_peer(LOST[name])


@pytest.mark.parametrize("name", OWN)
def test_what_is_an_error_of_its_own_begins_nothing_again(name: str) -> None:
    """Every error of NCCL was a lost peer, and so was what a user's code said of a socket."""
    assert not ranks.is_lost_peer(OWN[name])
